"""The KV descriptor: what `prep_recv` gives out and `remote_send` takes back (`kv_append_metadata`, `kv_addr_info`).

A versioned JSON object in base64 (the standard alphabet with padding, RFC 4648 section 4). Opaque to routers. With a
cluster secret it is signed: ``hmac`` is the hex HMAC-SHA256 of the canonical JSON (sorted keys, no spaces, ASCII) of
all other fields; without one ``hmac`` is null. This module knows nothing of pools, transports or clocks: the time is
passed in. Everything it reads is hostile until `decode_descriptor` and `check_descriptor` have returned.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from microserving.errors import ConfigError, InvalidRequest, LeaseError, MicroservingError
from microserving.protocol.kv_layout import KVLayout

DESCRIPTOR_VERSION = 1
MAX_DESCRIPTOR_CHARS = 2 * 2**20
"""A descriptor of a fully fragmented 1M-token prompt (page size 16) stays below this."""
MAX_REQUEST_ID_BYTES = 1024
"""Of the UTF-8 form."""
MIN_SECRET_BYTES = 16

_PARAM = "kv_addr_info"
_SECRET_LABEL = b"microserving cluster secret id"  # no JSON object, so no descriptor
_MAX_SLOT = 2**31 - 1
_MAX_COUNT = 2**63 - 1
_MAX_UNIX_TIME = 2**40
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class KVDescriptor:
    """Where the KV of prompt positions [begin, begin + slot_count) goes.

    engine_id, epoch, rank: the receiving engine, this very process of it, and its rank. lease_id: its reservation.
    prompt_hash: ``hash_prompt`` of the positions [0, end) that were reserved for.
    segments: ``[n, begin_1, len_1, ...]``, n runs of consecutive absolute slots (page * page_size + offset) in the
    receiver's pool, in position order. nbytes: K and V of all these slots over all layers. expires_at: unix seconds.
    """

    engine_id: str
    epoch: str
    rank: int
    request_id: str
    lease_id: int
    layout_hash: str
    model_hash: str
    prompt_hash: str
    begin: int
    segments: tuple[int, ...]
    nbytes: int
    expires_at: float

    @property
    def slot_count(self) -> int:
        return sum(self.segments[2::2])


@dataclass(frozen=True, slots=True)
class SendRange:
    """What a `remote_send` asks for: positions [begin, end) of ``prompt`` and the receiver's rank."""

    prompt: Sequence[int]
    begin: int
    end: int
    recv_rank: int


def hash_prompt(token_ids: Sequence[int]) -> str:
    """32 hex digits: the first half of the SHA-256 over the ids as int32, little-endian."""
    return hashlib.sha256(np.asarray(token_ids, "<i4").tobytes()).hexdigest()[:32]


def check_secret(secret: bytes | None) -> bytes | None:
    """The cluster secret as it came. Raises ConfigError when it is shorter than MIN_SECRET_BYTES."""
    if secret is not None and len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the cluster secret has {len(secret)} bytes; it must have at least {MIN_SECRET_BYTES}"
        )
    return secret


def secret_id(secret: bytes | None) -> str:
    """Tells whether two engines have the same cluster secret, and nothing else of it. "" when there is none.

    16 hex digits of the HMAC-SHA256 of a fixed label: no descriptor can ever be signed with it.
    """
    return "" if secret is None else hmac.new(secret, _SECRET_LABEL, hashlib.sha256).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------- segments and slots


def segments_from_slots(slots: npt.NDArray[np.int32]) -> tuple[int, ...]:
    """int32 slots in position order as ``(n, begin_1, len_1, ...)``: neighbouring slots joined into runs."""
    cuts = np.flatnonzero(np.diff(slots) != 1) + 1
    runs = [run for run in np.split(slots, cuts) if len(run)]
    return (len(runs), *(value for run in runs for value in (int(run[0]), len(run))))


def slots_from_segments(segments: Sequence[int]) -> npt.NDArray[np.int32]:
    """int32 [slot_count], the slot of each position in order. The segments must have been checked."""
    runs = [
        np.arange(begin, begin + length, dtype=np.int32)
        for begin, length in zip(segments[1::2], segments[2::2], strict=True)
    ]
    return np.concatenate(runs) if runs else np.empty(0, np.int32)


# ------------------------------------------------------------------------------------------------ encode and decode


def encode_descriptor(descriptor: KVDescriptor, secret: bytes | None) -> str:
    """The wire form, signed when there is a secret. Raises InvalidRequest when a field is out of its range."""
    check_secret(secret)
    payload = {"version": DESCRIPTOR_VERSION, **asdict(descriptor)}
    payload["segments"] = list(descriptor.segments)
    _typed(payload)
    payload["hmac"] = None if secret is None else _signature(payload, secret)
    return base64.b64encode(_canonical(payload)).decode("ascii")


def decode_descriptor(text: str, secret: bytes | None) -> KVDescriptor:
    """The descriptor in ``text``; its fields have their types and ranges, its signature is good if we have a secret.

    Raises InvalidRequest (param ``kv_addr_info``) that says what is wrong; never anything else.
    """
    check_secret(secret)
    payload = _parse(text)
    version = payload.get("version")
    if type(version) is not int or version != DESCRIPTOR_VERSION:
        raise _bad(f"has version {_show(version)}, this engine speaks version {DESCRIPTOR_VERSION}")
    expected = {"version", "hmac", *(field.name for field in fields(KVDescriptor))}
    if missing := sorted(expected - payload.keys()):
        raise _bad(f"lacks the field {missing[0]}")
    if extra := sorted(payload.keys() - expected):
        raise _bad(f"has an unknown field {_show(extra[0])}")
    signature = payload.pop("hmac")
    if secret is not None:
        _check_signature(payload, signature, secret)
    return _typed(payload)


def _parse(text: str) -> dict[str, object]:
    if len(text) > MAX_DESCRIPTOR_CHARS:
        raise _bad(f"is too long: {len(text)} characters, at most {MAX_DESCRIPTOR_CHARS}")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise _bad("is not base64") from None
    try:
        payload = json.loads(raw)
    except (ValueError, RecursionError):
        raise _bad("is not JSON") from None
    if not isinstance(payload, dict):
        raise _bad("is not a JSON object")
    return payload


def _canonical(payload: dict[str, object]) -> bytes:
    return json.dumps(payload, sort_keys=True, separators=(",", ":")).encode("ascii")


def _signature(payload: dict[str, object], secret: bytes) -> str:
    return hmac.new(secret, _canonical(payload), hashlib.sha256).hexdigest()


def _check_signature(payload: dict[str, object], signature: object, secret: bytes) -> None:
    if signature is None:
        raise _bad("is not signed, and this cluster has a secret")
    good = _signature(payload, secret)
    if not isinstance(signature, str) or not hmac.compare_digest(
        good.encode(), signature.encode("utf-8", "replace")
    ):
        raise _bad("has a wrong signature")


def _typed(payload: dict[str, object]) -> KVDescriptor:
    return KVDescriptor(
        engine_id=_name(payload, "engine_id"),
        epoch=_name(payload, "epoch"),
        rank=_integer(payload, "rank", _MAX_SLOT),
        request_id=_request_id(payload),
        lease_id=_integer(payload, "lease_id", _MAX_COUNT),
        layout_hash=_name(payload, "layout_hash"),
        model_hash=_name(payload, "model_hash"),
        prompt_hash=_name(payload, "prompt_hash"),
        begin=_integer(payload, "begin", _MAX_SLOT),
        segments=_segments(payload["segments"]),
        nbytes=_integer(payload, "nbytes", _MAX_COUNT),
        expires_at=_unix_time(payload),
    )


def _name(payload: dict[str, object], field: str) -> str:
    value = payload[field]
    if not isinstance(value, str) or _NAME.fullmatch(value) is None:
        raise _bad(f"has a wrong {field}: {_show(value)}")
    return value


def _integer(payload: dict[str, object], field: str, maximum: int) -> int:
    value = payload[field]
    if type(value) is not int or not 0 <= value <= maximum:
        raise _bad(f"has a wrong {field}: {_show(value)}")
    return value


def _request_id(payload: dict[str, object]) -> str:
    value = payload["request_id"]
    if (
        not isinstance(value, str)
        or not 1 <= len(value.encode("utf-8", "surrogatepass")) <= MAX_REQUEST_ID_BYTES
    ):
        raise _bad(f"has a wrong request_id: {_show(value)}")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _bad("has a request_id that is not Unicode text")
    return value


def _unix_time(payload: dict[str, object]) -> float:
    value = payload["expires_at"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MAX_UNIX_TIME:
        raise _bad(f"has a wrong expires_at: {_show(value)}")
    return float(value)


def _segments(value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value or any(type(item) is not int for item in value):
        raise _bad("has wrong segments: not a list of integers")
    if len(value) != 1 + 2 * value[0]:
        raise _bad(f"has wrong segments: {_show(value[0])} runs announced, {len(value) - 1} numbers follow")
    runs = sorted(zip(value[1::2], value[2::2], strict=True))
    for begin, length in runs:
        if begin < 0 or length < 1 or begin + length > _MAX_SLOT:
            raise _bad(f"has a wrong segment: begin {_show(begin)}, length {_show(length)}")
    for (begin, length), (following, _) in pairwise(runs):
        if begin + length > following:
            raise _bad(f"has overlapping segments at slot {following}")
    return tuple(value)


# ---------------------------------------------------------------------------------------------------------- checks


def check_descriptor(
    descriptor: KVDescriptor, wanted: SendRange, *, layout: KVLayout, model_hash: str, now: float
) -> None:
    """Refuse a descriptor that is not for this model, layout, prompt and range, or has expired. now: unix seconds.

    wanted: its range lies inside its prompt, whose ids fit int32. Raises InvalidRequest naming the field at fault;
    LeaseError when expired.
    """
    if descriptor.layout_hash != layout.hash:
        raise _bad(f"is for another KV layout: {layout.hash} here, {descriptor.layout_hash} there")
    if descriptor.model_hash != model_hash:
        raise _bad(f"is for another model: {model_hash} here, {descriptor.model_hash} there")
    if descriptor.rank != wanted.recv_rank:
        raise InvalidRequest(
            f"recv_rank is {wanted.recv_rank}, the descriptor is for rank {descriptor.rank}",
            param="recv_rank",
        )
    if descriptor.begin != wanted.begin:
        raise InvalidRequest(
            f"begin is {wanted.begin}, the descriptor starts at {descriptor.begin}", param="begin"
        )
    count = descriptor.slot_count
    if count != wanted.end - wanted.begin:
        raise InvalidRequest(
            f"end - begin is {wanted.end - wanted.begin} tokens, the descriptor has {count} slots",
            param="end",
        )
    if descriptor.nbytes != count * layout.bytes_per_token:
        raise _bad(f"has {descriptor.nbytes} bytes for {count} slots of {layout.bytes_per_token} bytes")
    if descriptor.prompt_hash != hash_prompt(wanted.prompt[: wanted.end]):
        raise InvalidRequest("the prompt is not the one that the descriptor was made for", param="prompt")
    if now >= descriptor.expires_at:
        raise LeaseError("the reservation has expired", param=_PARAM)


def check_slots_fit(descriptor: KVDescriptor, total_slots: int) -> None:
    """Refuse slots outside [0, total_slots) of the receiver's pool. Raises InvalidRequest."""
    runs = zip(descriptor.segments[1::2], descriptor.segments[2::2], strict=True)
    last = max((begin + length for begin, length in runs), default=0)
    if last > total_slots:
        raise _bad(f"names slot {last - 1}, the receiver's pool has {total_slots}")


def _bad(what: str) -> MicroservingError:
    return InvalidRequest(f"kv_addr_info {what}", param=_PARAM)


def _show(value: object) -> str:
    """A short, printable form of a hostile value."""
    if isinstance(value, int) and abs(value) > 10**20:
        return "a huge integer"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
