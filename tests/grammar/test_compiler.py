"""What a compiled grammar lets through, against Python's own ``re`` and ``json``; and what is not compiled at all."""

from __future__ import annotations

import asyncio
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microserving.engine.fake_runner import FakeTokenizer
from microserving.errors import InvalidRequest, ModelLoadError, Overloaded
from microserving.grammar import GrammarCompiler, GrammarError
from microserving.protocol.generation import Grammar

BYTES = GrammarCompiler(FakeTokenizer())
CHAIN = {
    "$ref": "#/$defs/d0",
    "$defs": {
        f"d{i}": {"type": "object", "properties": {"a": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]}}}
        for i in range(600)
    },
}
"""As deep as would overflow the compiler's stack."""


def walk(grammar: Grammar, text: bytes) -> bool:
    """Whether the grammar takes ``text``, byte by byte, and may end behind it. Asserts that a byte is taken exactly when it
    was said to be allowed."""
    matcher = BYTES.compile(grammar).matcher()
    for byte in text:
        allowed = bool(matcher.allowed().tokens[byte])
        if not allowed:
            with pytest.raises(GrammarError):
                matcher.accept((byte,))
            return False
        matcher.accept((byte,))
    return matcher.allowed().may_end


@settings(max_examples=60)
@given(st.sampled_from(["a+b?", "(ab|ba){2}", "[a-b]{1,3}", "a(b|a)*a"]), st.text("ab", max_size=5))
def test_a_regex_lets_through_what_it_matches(pattern: str, text: str) -> None:
    assert walk(Grammar("regex", pattern), text.encode()) == (re.fullmatch(pattern, text) is not None)


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text('ab"\\é\n', max_size=3),
        st.none() | st.booleans() | st.integers() | st.lists(st.text(max_size=3), max_size=2),
        max_size=3,
    )
)
def test_any_object_may_come_and_half_of_it_is_no_end(value: dict[str, object]) -> None:
    text = json.dumps(value, ensure_ascii=False).encode()
    assert walk(Grammar("json_object"), text)
    assert not walk(Grammar("json_object"), text[:-1])


def test_white_space_has_an_end() -> None:
    assert walk(Grammar("json_object"), b"{" + b" " * 32 + b"}")
    assert not walk(Grammar("json_object"), b"{" + b" " * 33 + b"}")


def test_gbnf_is_read_too() -> None:
    grammar = Grammar("lark", 'root ::= "a" b*\nb ::= [xy]')
    assert [walk(grammar, text) for text in (b"a", b"axyx", b"ab", b"")] == [True, True, False, False]


@pytest.mark.case("SC-10")
@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "("),
        Grammar("regex", "["),
        Grammar("regex", "ab++*"),
        Grammar("regex", "(?P<a>"),
        Grammar("regex", "a" * 1_000_000),
        Grammar("regex", "(a{1,1000}){1,1000}"),
        Grammar("regex", "(?=a)b"),
        Grammar("regex", ""),
        Grammar("regex", "[^\\s\\S]"),
        Grammar("regex", "[" * 16_000),
        Grammar("json_schema", json.dumps({"enum": [f"v{i}" for i in range(100_000)]})),
        Grammar("json_schema", json.dumps(CHAIN)),
        Grammar("json_schema", "[" * 100_000),
        Grammar("json_schema", '{"a":' * 65 + "1" + "}" * 65),
        Grammar("json_schema", '{"type":"string","pattern":"(a{1,1000}){1,1000}"}'),
        Grammar("json_schema", '{"patternProperties":{"(":{}}}'),
        Grammar("json_schema", '{"type":"foo"}'),
        Grammar("json_schema", '{"not":{}}'),
        Grammar("json_schema", '{"$ref":"http://example.com/schema"}'),
        Grammar("lark", "foo: "),
        Grammar("lark", 'start: "a'),
        Grammar("lark", "start: " + "(" * 20_000),
        Grammar("lark", "start: a" + " " * 100_000),
        Grammar("lark", "start: A\nA: B{100}\nB: C{100}\nC: D{100}\nD: /a/"),
        Grammar("lark", "start: a0\n" + "\n".join(f'a{i}: "x" a{i + 1}' for i in range(3000)) + '\na3000: "z"'),
        Grammar("lark", "start: %json " + json.dumps(CHAIN)),
        Grammar("lark", "a::=" + "(" * 20_000),
    ],
    ids=lambda grammar: f"{grammar.kind}:{grammar.text[:24]}",
)  # fmt: skip
def test_what_would_stop_a_server_is_refused(grammar: Grammar) -> None:
    """Twice: a refusal is remembered."""
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            BYTES.compile(grammar, param="guided_regex")
        assert refused.value.param == "guided_regex"
        assert len(refused.value.message) < 300
        assert refused.value.message.isprintable()


def test_a_refusal_names_no_option_that_a_request_cannot_set() -> None:
    schema = '{"oneOf":[{"type":"integer"},{"type":"number"}]}'
    with pytest.raises(InvalidRequest, match=r"oneOf constraints are not supported\.$"):
        BYTES.compile(Grammar("json_schema", schema))


def test_a_schema_cannot_relax_its_own_rules() -> None:
    unknown = {"type": "object", "not": {"required": ["a"]}}
    for options in ({"lenient": True}, {}, None):
        with pytest.raises(InvalidRequest, match="x-guidance"):
            BYTES.compile(Grammar("json_schema", json.dumps({**unknown, "x-guidance": options})))
    named = {"type": "object", "properties": {"x-guidance": {"const": 1}}, "required": ["x-guidance"]}
    assert walk(Grammar("json_schema", json.dumps(named)), b'{"x-guidance":1}')


def test_each_output_has_its_own_place() -> None:
    compiled = BYTES.compile(Grammar("regex", "a|bc"))
    first, second = compiled.matcher(), compiled.matcher()
    first.accept(b"b")
    assert np.flatnonzero(first.allowed().tokens).tolist() == [ord("c")]
    assert np.flatnonzero(second.allowed().tokens).tolist() == [ord("a"), ord("b")]


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten() -> None:
    compiler = GrammarCompiler(FakeTokenizer(), kept=2)
    first, second = (compiler.compile(Grammar("regex", text)) for text in "ab")
    assert compiler.compile(Grammar("regex", "a")) is first
    compiler.compile(Grammar("regex", "c"))
    assert compiler.compile(Grammar("regex", "a")) is first
    assert compiler.compile(Grammar("regex", "b")) is not second


def test_compiling_off_the_loop_is_the_same_and_bounded() -> None:
    compiler = GrammarCompiler(FakeTokenizer(), max_waiting=2)

    async def scenario() -> None:
        asked = [compiler.compile_off_loop(Grammar("regex", f"a{{{n}}}")) for n in range(1, 5)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(result) is Overloaded for result in results] == [False, False, True, True]
        assert await compiler.compile_off_loop(Grammar("regex", "a{1}")) is results[0]
        with pytest.raises(InvalidRequest) as refused:
            await compiler.compile_off_loop(Grammar("regex", "("), param="regex")
        assert refused.value.param == "regex"

    asyncio.run(scenario())


def test_a_special_token_is_no_text() -> None:
    class Special(FakeTokenizer):
        special_token_ids = frozenset({ord("x")})

    matcher = GrammarCompiler(Special()).compile(Grammar("regex", "[a-z]")).matcher()
    assert np.flatnonzero(matcher.allowed().tokens).tolist() == [
        *range(ord("a"), ord("x")),
        ord("y"),
        ord("z"),
    ]


def test_an_output_does_not_begin_with_a_space_that_nobody_would_see() -> None:
    class Stripping(FakeTokenizer):
        strips_first_space = True

    compiled = GrammarCompiler(Stripping()).compile(Grammar("regex", " ?a"))
    assert compiled.not_first is not None
    assert np.flatnonzero(compiled.not_first).tolist() == [ord(" ")]


def test_a_vocabulary_that_the_library_panics_on_is_one_error() -> None:
    class Long(FakeTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"a" * 5000

    with pytest.raises(ModelLoadError, match="vocabulary"):
        GrammarCompiler(Long()).prepare()
