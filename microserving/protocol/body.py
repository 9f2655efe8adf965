"""JSON request bodies: strict parsing, validation against a wire model, and what was ignored.

Owns the rules that hold for every endpoint: null is the same as absent, numbers are never converted from other types,
unknown fields are ignored and named, and whatever is wrong becomes ``InvalidRequest`` with ``param`` = the dotted path
of the field. It does not know any endpoint.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, Final, NoReturn, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from microserving.errors import InvalidRequest

MAX_DEPTH = 64
"""Nesting limit of a request body (arrays and objects)."""
MAX_CONTAINERS = 16_384
"""Limit of arrays and objects in a request body: more than the most messages, each with a text part, need."""
MAX_KEYS = 32_768
MAX_VALUES = 262_144
"""Limit of commas, unless the caller allows more."""
MAX_PARAM_CHARS = 100
MAX_MESSAGE_CHARS = 200
_PLAIN_BYTES: Final = 65_536
"""Up to here a body may be parsed at once: it cannot hold too many of anything, nor hold up other requests."""
_MAX_IGNORED_NAMES = 16
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]")
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


class WireModel(BaseModel):
    """Base of every request model: strict types, unknown fields ignored, null = absent."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if isinstance(value, dict) and None in value.values():
            return {key: item for key, item in value.items() if item is not None}
        return value

    @classmethod
    def ignored_within(cls, body: dict[str, Any]) -> list[str]:  # noqa: ARG003 - of a model that looks deeper
        """Dotted names of what is ignored in the values of fields. ``body`` is not validated yet."""
        return []


ModelT = TypeVar("ModelT", bound=WireModel)


def parse_object(body: bytes, *, max_values: int = MAX_VALUES) -> dict[str, Any]:
    """The JSON object that ``body`` holds.

    Raises InvalidRequest for anything that is not one strict JSON object: invalid UTF-8, a byte order mark,
    duplicate keys, NaN or numbers beyond float64, lone surrogates, trailing text. Before anything is parsed (which no
    other thread can run beside) also for nesting over ``MAX_DEPTH``, more than ``MAX_CONTAINERS`` or ``MAX_KEYS``, and
    more than ``max_values`` values.
    """
    plain = _parse_plain(body, max_values)
    return _parse_strictly(body, max_values) if plain is None else plain


def _parse_plain(body: bytes, max_values: int) -> dict[str, Any] | None:
    """The object in ``body`` when that is short and holds no other one, as nearly all do, at a tenth of the price.

    None when it is something else, or wrong: the strict parser says what.
    """
    if len(body) > min(_PLAIN_BYTES, max_values) or body.count(b"{") != 1 or body.count(b"[") >= MAX_DEPTH:
        return None
    if b"\\u" in body:  # may be half of a surrogate pair
        return None
    try:
        value = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    # As many keys as there are colons outside of texts: none was there twice.
    once = body.count(b":") == len(value) or _outside_texts(_without_escapes(body)).count(b":") == len(value)
    return value if once else None


def _parse_strictly(body: bytes, max_values: int) -> dict[str, Any]:
    if body.startswith(b"\xef\xbb\xbf"):
        raise InvalidRequest("the body starts with a byte order mark; send plain UTF-8")
    _check_structure(body, max_values)
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_float=_finite_float,
        )
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error.msg} at character {error.pos}") from None
    except ValueError:
        raise InvalidRequest("the body holds a number with too many digits") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    _check_surrogates(body, value)
    return value


def validate(model: type[ModelT], body: dict[str, Any]) -> ModelT:
    """``body`` as a checked ``model``. Raises InvalidRequest with ``param`` for the first field that is wrong."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _invalid(error) from None


def ignored_fields(model: type[WireModel], body: dict[str, Any]) -> list[str]:
    """Fields of ``body`` (not null) that ``model`` does not know, in the body's order, then those within its fields."""
    known = model.model_fields
    own = [name for name, value in body.items() if name not in known and value is not None]
    return own + model.ignored_within(body)


def header_value(names: Iterable[str]) -> str:
    """Field names as one bounded, printable header value (`x-ignored-fields`)."""
    listed = list(names)
    shown = [_UNSAFE.sub("?", name[:64]) for name in listed[:_MAX_IGNORED_NAMES]]
    if len(listed) > _MAX_IGNORED_NAMES:
        shown.append("...")
    return ", ".join(shown)


def refuse_ignored(names: list[str]) -> None:
    """The strict setting: raise InvalidRequest when a field was not known."""
    if names:
        param = _UNSAFE.sub("?", names[0][:MAX_PARAM_CHARS])
        raise InvalidRequest(f"unknown field {param!r}", param=param)


def invalid(message: str) -> PydanticCustomError:
    """What a validator raises: ``message`` is shown to the client as it is, so it must not repeat the input."""
    # Braces would be read as a format string.
    return PydanticCustomError("invalid_value", "{message}", {"message": message})


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                name = _UNSAFE.sub("?", key[:64])
                raise InvalidRequest(f"the body has the key {name!r} twice", param=name)
            seen.add(key)
    return result


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequest(f"the body is not valid JSON: {name} is not a JSON number")


def _finite_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidRequest("the body holds a number outside the range of a 64-bit float")
    return value


def _check_structure(body: bytes, max_values: int) -> None:
    """Count what a parser would build, in a few passes at memory speed. Exact up to the first error in the JSON."""
    plain = _without_escapes(body)
    _at_most(plain.count(b'"'), 2 * (max_values + MAX_KEYS), "quotes")
    outside = _outside_texts(plain)
    _at_most(outside.count(b","), max_values, "values")
    _at_most(outside.count(b":"), MAX_KEYS, "keys")
    _at_most(outside.count(b"[") + outside.count(b"{"), MAX_CONTAINERS, "arrays and objects")
    depth = 0
    for bracket in outside.translate(None, _NO_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth < 0:  # not JSON, and the parser will stop here
            return
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels")


def _without_escapes(body: bytes) -> bytes:
    """Without escaped backslashes and quotes, so that quotes are the ends of texts only."""
    return body.replace(rb"\\", b"").replace(rb"\"", b"")


def _outside_texts(plain: bytes) -> bytes:
    """Every second part between quotes."""
    return b"".join(plain.split(b'"')[::2])


def _at_most(count: int, limit: int, things: str) -> None:
    if count > limit:
        raise InvalidRequest(f"the body holds more than {limit} {things}")


def _check_surrogates(body: bytes, value: Any) -> None:
    if b"\\ud" not in body and b"\\uD" not in body:
        return
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest("the body holds half of a surrogate pair (\\ud800..\\udfff)") from None


def _invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_input=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    param = re.sub(r"[^\x20-\x7e]", "?", path)[:MAX_PARAM_CHARS] or None
    message = first["msg"][:MAX_MESSAGE_CHARS]
    return InvalidRequest(f"{param}: {message}" if param else message, param=param)
