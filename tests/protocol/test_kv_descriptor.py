"""The descriptor: what comes in must be what went out, and nothing else may pass."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microserving.errors import ConfigError, InvalidRequest, LeaseError, http_status
from microserving.protocol.kv_descriptor import (
    MAX_DESCRIPTOR_CHARS,
    KVDescriptor,
    SendRange,
    check_descriptor,
    check_secret,
    check_slots_fit,
    decode_descriptor,
    encode_descriptor,
    segments_from_slots,
    slots_from_segments,
)
from microserving.protocol.kv_layout import KVLayout

SECRET = b"0123456789abcdef"
LAYOUT = KVLayout(layers=2, kv_heads=3, head_dim=4, page_size=16, dtype="float16")
# 2 layers * 2 (K, V) * 3 heads * 4 * 2 bytes = 96 bytes a token; 20 slots
GOOD = KVDescriptor(
    engine_id="decode-0",
    epoch="e1",
    rank=0,
    request_id="cmpl-1",
    lease_id=7,
    layout_hash=LAYOUT.hash,
    model_hash="abc123",
    # sha256sum of the 23 ids as int32, little-endian (written with struct, cut to 32 digits)
    prompt_hash="6d90e5acb2090e6538833f2481525976",
    begin=3,
    segments=(2, 19, 13, 64, 7),
    nbytes=20 * 96,
    expires_at=1000.5,
)
PROMPT = list(range(100, 130))
WANTED = SendRange(PROMPT, begin=3, end=23, recv_rank=0)


def _payload(**changes: Any) -> dict[str, Any]:
    payload: dict[str, Any] = json.loads(base64.b64decode(encode_descriptor(GOOD, None)))
    payload.update(changes)
    return payload


def _signed(payload: dict[str, Any], secret: bytes = SECRET) -> str:
    """Signed as the module docstring says, written a second time here."""
    body = {key: value for key, value in payload.items() if key != "hmac"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    body["hmac"] = hmac.new(secret, canonical, hashlib.sha256).hexdigest()
    return _base64(json.dumps(body).encode())


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _refused(text: str, says: str, secret: bytes | None = SECRET) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_descriptor(text, secret)
    assert caught.value.param == "kv_addr_info"
    assert http_status(caught.value) == 400
    assert says in caught.value.message
    assert len(caught.value.message) < 300
    assert caught.value.message.isprintable()


# ---------------------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("secret", [None, SECRET])
def test_what_was_encoded_is_decoded(secret: bytes | None) -> None:
    assert decode_descriptor(encode_descriptor(GOOD, secret), secret) == GOOD


def test_the_signature_is_hmac_sha256_of_the_canonical_json() -> None:
    assert decode_descriptor(_signed(_payload()), SECRET) == GOOD
    ours = json.loads(base64.b64decode(encode_descriptor(GOOD, SECRET)))
    theirs = json.loads(base64.b64decode(_signed(_payload())))
    assert ours["hmac"] == theirs["hmac"]


def test_without_a_secret_a_signed_descriptor_is_read_too() -> None:
    assert decode_descriptor(encode_descriptor(GOOD, SECRET), None) == GOOD


names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)


@given(
    request_id=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200),
    engine_id=names,
    epoch=names,
    lease_id=st.integers(0, 2**63 - 1),
    expires_at=st.floats(0, 1e12),
    slots=st.lists(st.integers(0, 500), unique=True, max_size=60),
)
def test_any_descriptor_survives(slots: list[int], **changes: Any) -> None:
    segments = segments_from_slots(np.array(slots, np.int32))
    descriptor = replace(GOOD, segments=segments, **changes)
    assert decode_descriptor(encode_descriptor(descriptor, SECRET), SECRET) == descriptor
    assert descriptor.slot_count == len(slots)


@given(st.lists(st.integers(0, 200), unique=True))
def test_segments_and_slots_are_inverse(slots: list[int]) -> None:
    segments = segments_from_slots(np.array(slots, np.int32))
    back = slots_from_segments(segments)
    assert back.dtype == np.int32
    assert back.tolist() == slots
    assert segments[0] == (len(segments) - 1) // 2
    assert segments[0] == sum(1 for i, slot in enumerate(slots) if i == 0 or slots[i - 1] + 1 != slot)


def test_neighbouring_pages_become_one_run() -> None:
    page = np.arange(16)
    slots = np.concatenate([page + 16 * 5, page + 16 * 6, page[:3] + 16 * 2])[4:].astype(np.int32)
    assert segments_from_slots(slots) == (2, 84, 28, 32, 3)
    assert segments_from_slots(np.empty(0, np.int32)) == (0,)


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("text", ["", "%%%", "a", "e30", "é", "e30=\n", "\ud800", "e30=e30="])
def test_garbage_base64(text: str) -> None:
    _refused(text, "base64" if text else "not JSON")


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'"\xff"'])
def test_not_json(raw: bytes) -> None:
    _refused(_base64(raw), "not JSON")


@pytest.mark.parametrize("raw", [b"[]", b"1", b"null", b'"x"', b"NaN"])
def test_not_an_object(raw: bytes) -> None:
    _refused(_base64(raw), "not a JSON object")


def test_huge_input_is_refused_before_it_is_decoded() -> None:
    _refused("!" * (MAX_DESCRIPTOR_CHARS + 1), "too long")


@pytest.mark.parametrize("version", [0, 2, "1", True, 1.0, None, 10**30])
def test_another_version(version: object) -> None:
    _refused(_signed(_payload(version=version)), "version")


@pytest.mark.parametrize("field", sorted(_payload()))
def test_a_missing_field(field: str) -> None:
    payload = _payload()
    del payload[field]
    _refused(
        _base64(json.dumps(payload).encode()), "version" if field == "version" else f"lacks the field {field}"
    )


def test_an_extra_field() -> None:
    _refused(_signed(_payload(address="10.0.0.1")), "unknown field 'address'")


@pytest.mark.case("SC-22")
@pytest.mark.parametrize("field", ["rank", "lease_id", "begin", "nbytes"])
@pytest.mark.parametrize("value", [-1, 2**63, 2**64, 1.0, "1", True, None, [], 10**400])
def test_a_wrong_integer(field: str, value: object) -> None:
    _refused(_signed(_payload(**{field: value})), f"wrong {field}")


@pytest.mark.parametrize("value", ["", " ", "a/b", "../x", "a\n", "x" * 129, 1, None, ["a"], "\ud800"])
@pytest.mark.parametrize("field", ["engine_id", "epoch", "layout_hash", "model_hash", "prompt_hash"])
def test_a_wrong_name(field: str, value: object) -> None:
    _refused(_signed(_payload(**{field: value})), f"wrong {field}")


@pytest.mark.parametrize("value", ["", "x" * 1025, "é" * 513, 1, None, "\ud800"])
def test_a_wrong_request_id(value: object) -> None:
    _refused(_signed(_payload(request_id=value)), "request_id")


@pytest.mark.parametrize("value", [-1, "soon", None, True, 2**50, float("nan"), float("inf"), 10**400])
def test_a_wrong_expiry(value: object) -> None:
    _refused(_signed(_payload(expires_at=value)), "wrong expires_at")


@pytest.mark.case("SC-22")
@pytest.mark.parametrize(
    "segments",
    [
        [],
        None,
        {},
        "1,0,1",
        [1],
        [-1],
        [True, 0, 1],
        [1, 0],
        [1, 0, 1, 2],
        [2, 0, 1],
        [10**30, 0, 1],
        [1, -1, 1],
        [1, 0, 0],
        [1, 0, -5],
        [1, 0, 1.0],
        [1, "0", 1],
        [1, 0, None],
        [1, [0], 1],
        [1, 2**31 - 1, 1],
        [1, 0, 2**31],
        [1, 2**64, 1],
        [1, 0, 10**400],
        [2, 0, 5, 4, 2],
        [2, 4, 2, 0, 5],
        [2, 3, 1, 3, 1],
    ],
)
def test_wrong_segments(segments: object) -> None:
    _refused(_signed(_payload(segments=segments)), "segment")


def test_unsigned_while_there_is_a_secret() -> None:
    _refused(encode_descriptor(GOOD, None), "not signed")


@pytest.mark.parametrize("signature", ["", "00", "é" * 64, "\ud800", 5, ["x"], "0" * 64])
def test_a_wrong_signature(signature: object) -> None:
    _refused(_base64(json.dumps(_payload(hmac=signature)).encode()), "wrong signature")


def test_signed_with_another_secret() -> None:
    _refused(encode_descriptor(GOOD, b"another secret of good length"), "wrong signature")


@pytest.mark.parametrize("field", sorted(set(_payload()) - {"hmac", "version"}))
def test_any_changed_field_breaks_the_signature(field: str) -> None:
    payload = json.loads(base64.b64decode(encode_descriptor(GOOD, SECRET)))
    value = payload[field]
    payload[field] = (
        f"{value}x" if isinstance(value, str) else [1, 0, 20] if field == "segments" else value + 1
    )
    _refused(_base64(json.dumps(payload).encode()), "wrong signature")


def test_short_secrets_are_refused() -> None:
    with pytest.raises(ConfigError, match="15 bytes"):
        check_secret(b"x" * 15)
    assert check_secret(None) is None
    assert check_secret(SECRET) == SECRET


@given(st.one_of(st.text(), st.binary().map(_base64), st.binary().map(lambda raw: _base64(b"{" + raw))))
def test_any_text_gives_a_typed_error(text: str) -> None:
    for secret in (None, SECRET):
        with pytest.raises(InvalidRequest):
            decode_descriptor(text, secret)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=5) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=300)
@given(field=st.sampled_from(sorted(_payload())), value=json_values)
def test_any_value_in_any_field_gives_a_descriptor_or_a_typed_error(field: str, value: object) -> None:
    payload = _payload(**{field: value})
    for text, secret in ((_signed(payload), SECRET), (_base64(json.dumps(payload).encode()), None)):
        try:
            descriptor = decode_descriptor(text, secret)
        except InvalidRequest:
            continue
        assert decode_descriptor(encode_descriptor(descriptor, secret), secret) == descriptor


# ---------------------------------------------------------------------------------------------------------- checks


def _check(descriptor: KVDescriptor, wanted: SendRange = WANTED, now: float = 1000.0) -> None:
    check_descriptor(descriptor, wanted, layout=LAYOUT, model_hash="abc123", now=now)


def test_a_good_descriptor_passes() -> None:
    _check(GOOD)


def test_another_layout_names_both() -> None:
    other = KVLayout(layers=2, kv_heads=3, head_dim=4, page_size=16, dtype="float32")
    with pytest.raises(InvalidRequest, match=f"{LAYOUT.hash} here, {other.hash} there") as caught:
        _check(replace(GOOD, layout_hash=other.hash))
    assert caught.value.param == "kv_addr_info"


@pytest.mark.case("PD-24")
def test_another_byte_length_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="3840 bytes for 20 slots of 96 bytes") as caught:
        _check(replace(GOOD, nbytes=2 * 20 * 96))
    assert caught.value.param == "kv_addr_info"


def test_another_model_names_both() -> None:
    with pytest.raises(InvalidRequest, match="abc123 here, fff there") as caught:
        _check(replace(GOOD, model_hash="fff"))
    assert caught.value.param == "kv_addr_info"


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        (SendRange(PROMPT, 3, 22, 0), "end"),
        (SendRange(PROMPT, 3, 24, 0), "end"),
        (SendRange(PROMPT, 2, 22, 0), "begin"),
        (SendRange(PROMPT, 4, 24, 0), "begin"),
        (SendRange(PROMPT, 3, 23, 1), "recv_rank"),
        (SendRange(PROMPT, 3, 23, -1), "recv_rank"),
    ],
)
def test_another_range_or_rank(wanted: SendRange, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        _check(GOOD, wanted)
    assert caught.value.param == param


@pytest.mark.parametrize("position", [0, 3, 22])
def test_another_prompt_in_the_same_range_is_refused(position: int) -> None:
    """A router that mixes up two requests; the positions below begin count too, the KV depends on them."""
    other = [*PROMPT]
    other[position] += 1
    with pytest.raises(InvalidRequest) as caught:
        _check(GOOD, replace(WANTED, prompt=other))
    assert caught.value.param == "prompt"


def test_the_prompt_behind_end_does_not_matter() -> None:
    _check(GOOD, replace(WANTED, prompt=PROMPT[:23]))
    _check(GOOD, replace(WANTED, prompt=[*PROMPT[:23], 5, 5]))


@pytest.mark.parametrize("now", [1000.5, 1000.6, 2e9])
def test_expired(now: float) -> None:
    with pytest.raises(LeaseError) as caught:
        _check(GOOD, now=now)
    assert http_status(caught.value) == 409
    assert caught.value.param == "kv_addr_info"


def test_slots_outside_the_receivers_pool() -> None:
    check_slots_fit(GOOD, 71)  # the last slot is 70
    with pytest.raises(InvalidRequest, match="names slot 70, the receiver's pool has 70") as caught:
        check_slots_fit(GOOD, 70)
    assert caught.value.param == "kv_addr_info"
    check_slots_fit(replace(GOOD, segments=(0,)), 0)
