"""Wrong calls of the verbs: the right 4xx with the field named, and no page held afterwards (the fixtures check)."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from microserving.engine.fake_runner import TINY_LAYOUT
from microserving.protocol.kv_descriptor import decode_descriptor, encode_descriptor

from .engines import SECRET, Running


def check_error(response: Any, status: int, param: str | None, code: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code


def altered(metadata: str, **changes: Any) -> str:
    """The descriptor with some fields changed, not signed again."""
    payload = json.loads(base64.b64decode(metadata))
    return base64.b64encode(json.dumps({**payload, **changes}).encode()).decode()


def resigned(metadata: str, **changes: Any) -> str:
    import dataclasses

    return encode_descriptor(dataclasses.replace(decode_descriptor(metadata, SECRET), **changes), SECRET)


@pytest.mark.case("API-21")
@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""], ["a", "b"], None, 5, [256], [-1], [True]])
@pytest.mark.parametrize("verb", ["prep_recv", "remote_send", "start_generate", "match_prefix"])
def test_bad_prompts(decode: Running, verb: str, prompt: Any) -> None:
    fields = {"begin": 0, "end": 0, "kv_addr_info": "x", "recv_rank": 0}
    check_error(decode.verb(verb, prompt=prompt, **fields), 400, "prompt")


@pytest.mark.case("SC-22")
@pytest.mark.parametrize("end", [6, -6, 2**31, -(2**31), 2**63, 2**64, 1.0, "1", True, None])
def test_bad_ends(decode: Running, end: Any) -> None:
    check_error(decode.verb("prep_recv", prompt="hello", end=end), 400, "end")


@pytest.mark.case("SC-22")
@pytest.mark.parametrize("begin", [6, -6, 2**31, 1.0, "1", True, None])
def test_bad_begins(decode: Running, begin: Any) -> None:
    check_error(decode.verb("start_generate", prompt="hello", begin=begin), 400, "begin")


def test_begin_above_what_is_cached(decode: Running) -> None:
    check_error(decode.verb("start_generate", prompt="hello", begin=3), 400, "begin")


@pytest.mark.parametrize("verb", ["prep_recv", "remote_send", "start_generate"])
def test_over_long_prompts_and_unknown_models(decode: Running, verb: str) -> None:
    fields = {"begin": 0, "end": 0, "kv_addr_info": "x", "recv_rank": 0}
    if verb != "remote_send":  # the descriptor comes first there
        check_error(decode.verb(verb, prompt=[1] * 2000, **fields), 400, "prompt", "context_length_exceeded")
    check_error(
        decode.verb(verb, **{"prompt": "a", "model": "other", **fields}), 404, "model", "model_not_found"
    )


def test_a_live_id_is_a_conflict(decode: Running) -> None:
    assert decode.verb("prep_recv", prompt="hello", end=-1, request_id="c").status_code == 200
    check_error(
        decode.verb("prep_recv", prompt="hello", end=-1, request_id="c"), 409, None, "request_id_in_use"
    )
    check_error(decode.verb("prep_recv", prompt="other", end=-1, user="c"), 409, None, "request_id_in_use")
    assert decode.verb("renew", request_id="c").json()["lease_ttl_s"] > 0
    assert decode.verb("abort", request_id="c").json() == {"aborted": True}
    assert decode.verb("abort", request_id="c").json() == {"aborted": False}
    check_error(decode.verb("renew", request_id="c"), 409, None, "lease_invalid")


def test_unknown_ids(decode: Running) -> None:
    assert decode.verb("abort", request_id="nobody").json() == {"aborted": False}
    check_error(decode.verb("renew", request_id="nobody"), 409, None, "lease_invalid")
    for verb in ("abort", "renew"):
        check_error(decode.verb(verb), 400, "request_id")
        check_error(decode.verb(verb, request_id=5), 400, "request_id")


def test_generating_before_the_kv_arrived(decode: Running) -> None:
    decode.verb("prep_recv", prompt="hello", end=-1, request_id="early")
    check_error(decode.verb("start_generate", prompt="hello", begin=-1, request_id="early"), 409, None)
    check_error(decode.verb("start_generate", prompt="jello", begin=-1, request_id="early"), 400, "prompt")
    decode.verb("abort", request_id="early")


DESCRIPTORS = {
    "garbage": lambda text: "%%%",
    "not_json": lambda text: base64.b64encode(b"nonsense").decode(),
    "unsigned": lambda text: altered(text, hmac=None),
    "forged": lambda text: altered(text, lease_id=999),
    "expired": lambda text: resigned(text, expires_at=1.0),
    "other_layout": lambda text: resigned(text, layout_hash="0" * 16),
    "other_model": lambda text: resigned(text, model_hash="f" * 16),
    "other_length": lambda text: resigned(text, segments=(1, 0, 3), nbytes=3 * TINY_LAYOUT.bytes_per_token),
    "other_rank": lambda text: resigned(text, rank=1),
    "beyond_the_pool": lambda text: resigned(text, segments=(1, 48 * 16, 4)),
}


@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_bad_descriptors(prefill: Running, decode: Running, kind: str) -> None:
    received = decode.verb("prep_recv", prompt="hello", end=4, request_id=kind).json()
    metadata = DESCRIPTORS[kind](received["kv_append_metadata"])
    fields = {"prompt": "hello", "begin": 0, "end": 4, "recv_rank": 0, "request_id": kind}
    response = prefill.verb("remote_send", kv_addr_info=metadata, **fields)
    assert 400 <= response.status_code < 500, response.text
    # The reservation is untouched: the right descriptor still works.
    sent = prefill.verb("remote_send", kv_addr_info=received["kv_append_metadata"], **fields)
    assert sent.json()["tokens_sent"] == 4
    decode.verb("abort", request_id=kind)


def test_another_prompt_of_the_same_length(prefill: Running, decode: Running) -> None:
    """A router that mixes up two requests is told, instead of decoding over another's KV."""
    received = decode.verb("prep_recv", prompt="hello", end=4, request_id="mine").json()
    fields = {"begin": 0, "end": 4, "kv_addr_info": received["kv_append_metadata"], "recv_rank": 0}
    check_error(prefill.verb("remote_send", prompt="jelly", **fields), 400, "prompt")
    assert prefill.verb("remote_send", prompt="hello", **fields).json()["tokens_sent"] == 4
    decode.verb("abort", request_id="mine")


@pytest.mark.parametrize(
    ("begin", "end", "param"), [(1, 4, "begin"), (3, 2, "begin"), (0, 5, None), (0, 9, "end")]
)
def test_ranges_that_are_not_the_descriptors(
    prefill: Running, decode: Running, begin: int, end: int, param: str | None
) -> None:
    received = decode.verb("prep_recv", prompt="hello", end=4, request_id="range").json()
    fields = {"prompt": "hello", "kv_addr_info": received["kv_append_metadata"], "recv_rank": 0}
    check_error(prefill.verb("remote_send", begin=begin, end=end, **fields), 400, param)
    decode.verb("abort", request_id="range")


def test_an_aborted_reservation_refuses_its_writer(prefill: Running, decode: Running) -> None:
    received = decode.verb("prep_recv", prompt="hello", end=4, request_id="late").json()
    decode.verb("abort", request_id="late")
    fields = {"prompt": "hello", "begin": 0, "end": 4, "kv_addr_info": received["kv_append_metadata"]}
    check_error(prefill.verb("remote_send", recv_rank=0, **fields), 409, None, "lease_invalid")


def test_unknown_fields_are_named(decode: Running) -> None:
    response = decode.verb("match_prefix", prompt="a", foo=1)
    assert response.json() == {"prefix_matched_length": 0}
    assert response.headers["x-ignored-fields"] == "foo"


def test_info_load_and_tokenizer(decode: Running) -> None:
    info = decode.http.get("/microserving/info").json()
    assert (info["engine_id"], info["rank"], info["model"]) == ("decode-0", 0, "tiny")
    assert info["kv_layout_hash"] == TINY_LAYOUT.hash
    assert (info["page_size"], info["total_pages"], info["max_context"]) == (16, 48, 768)
    assert set(info["transports"]) == {"fake"}
    assert decode.http.get("/microserving/tokenizer").json() == {"kind": "bytes"}
    assert decode.load()["counters"]["requests_finished"].keys() >= {"stop", "length", "abort", "error"}
    assert decode.http.get("/health").status_code == 200
    assert decode.http.get("/ready").status_code == 200
    assert decode.http.get("/v1/models/tiny").json()["max_model_len"] == 768
    assert decode.http.get("/microserving/prep_recv").status_code == 405
    assert decode.http.get("/microserving/nothing").status_code == 404
