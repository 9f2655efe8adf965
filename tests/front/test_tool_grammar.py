"""The grammars that make a model call tools: they compile, and what they let pass is read back as calls."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from microserving.front.chat_output import OutputForm
from microserving.front.chat_output.tool_grammar import MAX_CALLS, calls_grammar
from microserving.grammar import GrammarCompiler
from microserving.protocol.chat_formats import ToolCallFormat
from microserving.protocol.chat_responses import CallArguments, CallBegin, Content
from microserving.protocol.chat_tools import Tool
from microserving.protocol.generation import Grammar

FORMS: list[ToolCallFormat] = ["hermes", "llama3", "mistral"]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
ANSWER = {
    "type": "object",
    "properties": {"x": {"type": "boolean"}},
    "required": ["x"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any]) -> Tool:
    return Tool(name, {}, parameters)


TOOLS = [tool("weather", WEATHER), tool("now", NOTHING)]


class Bytes:
    """One token for each byte."""

    vocab_size = 256
    special_token_ids: frozenset[int] = frozenset()
    strips_first_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Bytes())


def walk(compiler: GrammarCompiler, text: str, seed: int) -> str:
    """A random output of at most 4,000 bytes."""
    matcher = compiler.compile(Grammar("lark", text)).matcher()
    choose, output = random.Random(seed), bytearray()
    while len(output) < 4000:
        allowed = matcher.allowed()
        tokens = [int(token) for token in allowed.tokens.nonzero()[0]]
        if not tokens or (allowed.may_end and choose.random() < 0.5):
            break
        # mostly printable letters, and quotes often, so that strings end
        likely = [token for token in tokens if token in b'"}]' or chr(token).isalnum()] or tokens
        token = choose.choice(likely if choose.random() < 0.9 else tokens)
        matcher.accept([token])
        output.append(token)
    return output.decode()


def calls_of(form: ToolCallFormat, text: str) -> tuple[str, list[tuple[str, Any]]]:
    make = OutputForm([each.name for each in TOOLS], calls=form).make_reader
    assert make is not None
    reader = make()
    pieces = [*reader.put(text), *reader.end()]
    names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
    arguments = [""] * len(names)
    for piece in pieces:
        if isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    return content, [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("several", [True, False])
def test_what_the_grammar_lets_pass_is_read_back(
    compiler: GrammarCompiler, form: ToolCallFormat, several: bool
) -> None:
    text = calls_grammar(TOOLS, form, several=several)
    counts, names = set(), set()
    for seed in range(12):
        content, calls = calls_of(form, walk(compiler, text, seed))
        assert content == ""
        counts.add(len(calls))
        for name, arguments in calls:
            names.add(name)
            jsonschema.validate(arguments, {"weather": WEATHER, "now": NOTHING}[name])
            assert arguments.keys() <= {"city", "days", "unit"}
    assert names == {"weather", "now"}
    assert counts == {1} or (several and min(counts) >= 1 and max(counts) <= MAX_CALLS)


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_of_a_schema_instead(compiler: GrammarCompiler, form: ToolCallFormat) -> None:
    text = calls_grammar(TOOLS[1:], form, several=True, answer=ANSWER)
    contents = set()
    for seed in range(12):
        content, calls = calls_of(form, walk(compiler, text, seed))
        assert bool(calls) != bool(content)
        contents.add(content)
    for content in contents - {""}:
        jsonschema.validate(json.loads(content), ANSWER)
    assert len(contents) > 1


def test_a_tool_that_takes_what_it_gets(compiler: GrammarCompiler) -> None:
    """A schema that speaks of other properties is left as it is."""
    free = tool("f", {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}})
    matcher = compiler.compile(Grammar("lark", calls_grammar([free], "llama3", several=False))).matcher()
    matcher.accept(list(b'{"name": "f", "parameters": {"x": 1, "y": 22}}'))
    assert matcher.allowed().may_end
