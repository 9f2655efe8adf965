"""Grammars, in llguidance's Lark, that make a model call tools: what ``tool_calls`` reads back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from microserving.protocol.chat_formats import ToolCallFormat
from microserving.protocol.chat_tools import Tool

MAX_CALLS: Final = 16
"""Of one answer: a model that is made to go on would otherwise call without an end."""


def calls_grammar(
    tools: Sequence[Tool], form: ToolCallFormat, *, several: bool, answer: dict[str, Any] | None = None
) -> str:
    """At least one call of one of ``tools``. several: up to ``MAX_CALLS``. answer: a JSON Schema; a value of it may be
    the output instead."""
    start = "calls" if answer is None else "calls | answer"
    more = f"{{0,{MAX_CALLS - 1}}}"
    rules = [f"start: {start}", *_FORMS[form](more if several else None)]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    key = "parameters" if form == "llama3" else "arguments"
    for number, tool in enumerate(tools):
        # In the lexemes of JSON: a longer one would win against an answer that begins like it.
        head = ["{", '"name"', ":", " ", f'"{tool.name}"', ",", " ", f'"{key}"', ":", " "]
        rules.append(f'call_{number}: {" ".join(map(json.dumps, head))} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {json.dumps(_closed(tool.parameters))}")
    if answer is not None:
        rules.append(f"answer: %json {json.dumps(answer)}")
    return "\n".join(rules) + "\n"


def _hermes(more: str | None) -> list[str]:
    calls = 'wrapped ("\\n" wrapped)' + more if more else "wrapped"
    return [f"calls: {calls}", 'wrapped: "<tool_call>\\n" call "\\n</tool_call>"']


def _llama3(more: str | None) -> list[str]:
    return ['calls: call ("; " call)' + more if more else "calls: call"]


def _mistral(more: str | None) -> list[str]:
    return ['calls: "[" call (", " call)' + more + ' "]"' if more else 'calls: "[" call "]"']


_FORMS: Final[dict[ToolCallFormat, Callable[[str | None], list[str]]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
}


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Without properties that the tool does not name, unless its schema speaks of them; without layout, which a model
    could write without an end."""
    speaks = {
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
    }
    closed = parameters if speaks & parameters.keys() else {**parameters, "additionalProperties": False}
    return {
        **closed,
        "x-guidance": {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "},
    }
