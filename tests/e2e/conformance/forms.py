"""The requests whose answers must be the same whole, streamed and through every door: one for each thing that changes an
answer's form, together with what it is likely to upset, and short, since there are many.

``GRAMMARS`` is what an output must match in some of them; ``finished`` tells whether it does.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import jsonschema

from .door import CHAT, COMPLETIONS, Choice

SKY: Final = "The sky is blue 🦊 and the grass"
IDS: Final = [[504, 6376, 314], [504, 6376]]
STOPS: Final = ["en", " th", " Fr", "oi"]
NEVER: Final = ["@@never@@"]
SEEDED: Final[dict[str, Any]] = {"temperature": 0.9, "seed": 11, "max_tokens": 6, "return_token_ids": True}
COLOUR: Final = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
WORD: Final = "[a-z]{3,5}!"
TOOLS: Final = [
    {"type": "function", "function": {"name": "paint", "parameters": COLOUR}},
    {"type": "function", "function": {"name": "stop"}},
]
PAINT: Final = {"type": "function", "function": {"name": "paint"}}
SCHEMA: Final = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "c", "strict": True, "schema": COLOUR}}
}
OBJECT: Final = {"response_format": {"type": "json_object"}}

FORMS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    COMPLETIONS: {
        "text alone": {"return_token_ids": False, "n": 2, "stop": NEVER},
        "stops": {"n": 2, "stop": STOPS},
        "tight top_p": {"top_p": 0.3, "temperature": 0.01, "logprobs": 5},
        "one of one": {"top_k": 1, "logprobs": 0, "n": 2, "return_token_ids": False},
        "echo": {"logprobs": 20, "echo": True, "n": 2, "stop": STOPS},
        "echo of ids": {"prompt": IDS, "echo": True, "logprobs": 1, "max_tokens": 2},
        "bias": {"temperature": 0, "logprobs": 2, "logit_bias": {"5": 100, "6": -100}},
        "min_tokens": {"temperature": 0, "logit_bias": {"2": 100}, "min_tokens": 3, "stop": NEVER},
        "scoring": {"max_tokens": 0, "echo": True, "logprobs": 1},
        "scores of ids": {"prompt": IDS, "max_tokens": 0, "echo": True, "logprobs": 1},
        "nothing": {"max_tokens": 0, "n": 2},
        "prompt_logprobs": {"max_tokens": 2, "prompt_logprobs": 2, "n": 2},
        "regex": {"regex": WORD, "n": 2, "logprobs": 1, "max_tokens": 12},
        "schema": {**SCHEMA, "logprobs": 2, "max_tokens": 16},
        "object": {**OBJECT, "logprobs": 2, "temperature": 0, "min_tokens": 3},
    },
    CHAT: {
        "text alone": {"return_token_ids": False, "n": 2},
        "stops": {"n": 2, "stop": STOPS},
        "logprobs": {"logprobs": True, "top_logprobs": 3, "n": 2, "stop": STOPS},
        "min_tokens": {"temperature": 0, "logit_bias": {"2": 100}, "min_tokens": 3, "max_completion_tokens": 4},
        "no tools": {"tools": TOOLS, "tool_choice": "none"},
        "required tool": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 40},
        "named tool": {"tools": TOOLS, "tool_choice": PAINT, "logprobs": True, "max_tokens": 40},
        "half a call": {"tools": TOOLS, "tool_choice": PAINT, "max_tokens": 22},
        "regex": {"regex": WORD, "n": 2, "max_tokens": 12},
        "schema": {**SCHEMA, "logprobs": True, "top_logprobs": 2, "max_tokens": 16},
        "object": {**OBJECT, "logprobs": True, "top_logprobs": 1},
    },
}  # fmt: skip


def finished(choice: Choice, form: str) -> None:
    """Asserts that a choice that has ended by itself is what the form binds it to."""
    if choice.finish_reason == "length":
        return
    if form == "regex":
        assert re.fullmatch(WORD, choice.text)
    elif form == "schema":
        jsonschema.validate(json.loads(choice.text), COLOUR)
    elif form == "object":
        assert isinstance(json.loads(choice.text), dict)
    elif form in ("required tool", "named tool"):
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.tool_calls
        assert call["name"] == "paint" or form == "required tool"
        jsonschema.validate(json.loads(call["arguments"]), COLOUR if call["name"] == "paint" else {})
