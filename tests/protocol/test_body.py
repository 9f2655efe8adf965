"""Strict JSON bodies: what is refused, and that no refusal repeats the body or breaks out of InvalidRequest."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from microserving.errors import InvalidRequest
from microserving.protocol import body as body_module
from microserving.protocol.body import (
    MAX_CONTAINERS,
    MAX_DEPTH,
    MAX_KEYS,
    MAX_VALUES,
    header_value,
    ignored_fields,
    parse_object,
    refuse_ignored,
    validate,
)
from microserving.protocol.chat import ChatCompletionRequest
from microserving.protocol.openai import CompletionRequest


def refusal(call: Callable[[], object]) -> InvalidRequest | None:
    try:
        call()
    except InvalidRequest as error:
        return error
    return None


def nested(levels: int) -> bytes:
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}"


@pytest.mark.case("API-26")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b'{"model":"tiny",,"messages":[]}',
        b'{"model":"tiny","prompt":"a',
        b'{"prompt":"\xff\xfe"}',
        b'\xef\xbb\xbf{"prompt":"a"}',
        b'{"prompt":"a","prompt":"b"}',
        b'{"prompt":"a","x":{"k":1,"k":2}}',
        b'{"temperature":NaN}',
        b'{"temperature":Infinity}',
        b'{"temperature":-Infinity}',
        b'{"temperature":1e999}',
        b'{"seed":' + b"9" * 5000 + b"}",
        b'{"prompt":"\\ud83d"}',
        b'{"\\udc00":1}',
        b'{"prompt":"a"} trailing',
        nested(MAX_DEPTH + 1),
        nested(100_000),
        b"[]",
        b'"text"',
        b"null",
        b"1",
    ],
)
def test_what_is_not_one_strict_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)
    assert len(caught.value.message) <= 200


def test_the_deepest_allowed_nesting_and_pairs_of_surrogates_pass() -> None:
    parse_object(nested(MAX_DEPTH))
    assert parse_object(b'{"prompt":"\\ud83d\\ude00"}') == {"prompt": "😀"}


@pytest.mark.case("API-26")
@given(st.binary(max_size=300))
def test_any_bytes_are_an_object_or_an_invalid_request(body: bytes) -> None:
    error = refusal(lambda: parse_object(body))
    assert error is None or len(error.message.encode()) <= 250


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
COMPLETION_FIELDS = sorted(CompletionRequest.model_fields)
CHAT_FIELDS = sorted(ChatCompletionRequest.model_fields)


@pytest.mark.case("SC-22")
@given(st.sampled_from(COMPLETION_FIELDS), JSON)
def test_any_value_of_a_completion_field_is_taken_or_an_invalid_request(name: str, value: object) -> None:
    error = refusal(lambda: validate(CompletionRequest, {"prompt": "a", name: value}))
    assert error is None or (error.param is not None and error.param.split(".")[0] == name)
    assert error is None or len(error.message) <= 330


@pytest.mark.case("SC-22")
@given(st.sampled_from(CHAT_FIELDS), JSON)
def test_any_value_of_a_chat_field_is_taken_or_an_invalid_request(name: str, value: object) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], name: value}
    error = refusal(lambda: validate(ChatCompletionRequest, body))
    assert error is None or (error.param is not None and error.param.split(".")[0] == name)


@pytest.mark.case("API-29")
def test_unknown_fields_are_ignored_and_named() -> None:
    body = {"prompt": "a", "store": False, "foo": 1, "gone": None, "user": "u"}
    validate(CompletionRequest, body)
    assert ignored_fields(CompletionRequest, body) == ["store", "foo"]


@pytest.mark.case("SC-16")
def test_names_in_the_header_are_bounded_and_printable() -> None:
    value = header_value(["a\r\nset-cookie: x", "é", "ok", "x" * 500, *map(str, range(1000))])
    assert value.isascii()
    assert "\r" not in value
    assert "\n" not in value
    assert value.startswith("a??set-cookie??x, ?, ok, ")
    assert value.endswith("...")
    assert len(value) < 1200


def test_the_strict_setting_names_the_field() -> None:
    with pytest.raises(InvalidRequest, match="foo") as caught:
        refuse_ignored(["foo"])
    assert caught.value.param == "foo"


def test_an_error_names_the_path_and_never_repeats_the_value() -> None:
    secret = "tell-nobody" * 100
    messages = [{"role": "user", "content": "a"}, {"role": secret, "content": "b"}]
    with pytest.raises(InvalidRequest) as caught:
        validate(ChatCompletionRequest, {"messages": messages})
    assert caught.value.param == "messages.1.role"
    assert "tell-nobody" not in caught.value.message
    with pytest.raises(InvalidRequest) as caught:
        validate(CompletionRequest, {"prompt": "a", "logit_bias": {secret: 1}})
    assert secret not in caught.value.message
    assert len(json.dumps(caught.value.message)) < 400


TOO_MUCH = {
    "values": b'{"x":[' + b"1," * (MAX_VALUES + 1) + b"1]}",
    "lists": b'{"x":[' + b"[]," * MAX_CONTAINERS + b"[]]}",
    "objects": b'{"x":[' + b"{}," * MAX_CONTAINERS + b"{}]}",
    "keys": b"{" + b",".join(b'"%d":1' % i for i in range(MAX_KEYS + 1)) + b"}",
    "strings": b'{"x":[' + b'"",' * (MAX_VALUES + MAX_KEYS) + b'""]}',
    "depth": nested(MAX_DEPTH + 1),
    "open brackets": b'{"x":' + b"[" * 1_000_000,
    "quotes": b'"' * 1_000_001,
}


@pytest.mark.case("SC-12")
@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_would_take_long_to_parse_is_not_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(*_: object, **__: object) -> None:
        raise AssertionError("it was parsed")

    monkeypatch.setattr(body_module.json, "loads", parse)
    with pytest.raises(InvalidRequest, match=r"more than|deeper than"):
        parse_object(TOO_MUCH[name])


def test_a_caller_may_allow_more_values() -> None:
    assert len(parse_object(TOO_MUCH["values"], max_values=MAX_VALUES + 1)["x"]) == MAX_VALUES + 2


def test_what_strings_hold_is_not_counted() -> None:
    text = '[{"a":1},\\"' * 100_000 + "\\"
    assert parse_object(json.dumps({text: text}).encode()) == {text: text}


def commas(value: object) -> int:
    items = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return max(len(items) - 1, 0) + sum(map(commas, items))


TRICKY = st.text('[]{},:"\\a', max_size=6)
TRICKY_JSON = st.recursive(
    TRICKY | st.integers(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TRICKY, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TRICKY, TRICKY_JSON, max_size=4))
def test_the_count_of_values_is_exact(value: dict[str, object]) -> None:
    body, count = json.dumps(value).encode(), commas(value)
    assert parse_object(body, max_values=count) == value
    if count:
        with pytest.raises(InvalidRequest, match="values"):
            parse_object(body, max_values=count - 1)


@pytest.mark.parametrize(
    ("model", "name", "value", "param"),
    [
        (CompletionRequest, "stop_token_ids", ["x"] * 300, "stop_token_ids"),
        (CompletionRequest, "stop_token_ids", ["x"] * 200, "stop_token_ids.0"),
        (CompletionRequest, "stop", [1] * 300, "stop"),
        (ChatCompletionRequest, "messages", [{}] * 5000, "messages"),
        (ChatCompletionRequest, "messages", [{}] * 4000, "messages.0.role"),
    ],
)
def test_long_lists_are_refused_at_their_length_or_first_fault(
    model: type[CompletionRequest], name: str, value: object, param: str
) -> None:
    error = refusal(lambda: validate(model, {"prompt": "a", name: value}))
    assert error is not None
    assert error.param == param
    assert ("at most" in error.message) == (param == name)


def test_one_fault_of_a_list_is_collected() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": 1}] * 4000})
    assert caught.value.error_count() == 1


FLAT = st.dictionaries(
    st.text(max_size=6),
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())),
    max_size=5,
)


@given(st.one_of(FLAT.map(lambda value: json.dumps(value, ensure_ascii=False)), st.text()))
def test_a_plain_body_is_parsed_as_the_strict_parser_does(text: str) -> None:
    body = text.encode("utf-8", "surrogatepass")
    plain = body_module._parse_plain(body, body_module.MAX_VALUES)
    if plain is not None:
        assert repr(plain) == repr(body_module._parse_strictly(body, body_module.MAX_VALUES))


@pytest.mark.parametrize(
    ("body", "is_plain"),
    [
        (b'{"prompt":"a: b, {"}', False),  # a brace may begin an object
        (b'{"prompt":"Q: a","n":1}', True),
        (b'{"a\\":":1,"b":"\\\\"}', True),
        (b'{"n":1,"n":2}', False),
        (b'{"n":1, "prompt":"x","n":2}', False),
        (b'{"prompt":"\\ud800"}', False),
        (b'{"n":1e999}', False),
    ],
)
def test_what_is_plain(body: bytes, is_plain: bool) -> None:
    assert (body_module._parse_plain(body, body_module.MAX_VALUES) is not None) == is_plain
