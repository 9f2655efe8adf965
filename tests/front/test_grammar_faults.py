"""A grammar that fails in the middle of an answer is told by the name that the client gave it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from microserving.errors import InvalidRequest
from microserving.front import create_front
from microserving.protocol.generation import GenerationChunk, GenerationRequest

from .chats import backend
from .fakes import call, events

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


async def too_much(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
    yield GenerationChunk("a", (97,), None, len(request.prompt_token_ids), 1)
    raise InvalidRequest("too much work", param="grammar")


@pytest.mark.case("STR-05")
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"prompt": "p", "regex": "a+"}, "regex"),
        ("completions", {"prompt": "p", "structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ("completions", {"prompt": "p", "grammar": 'start: "a"', "n": 2}, "grammar"),
        ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format.type"),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "required"}, "tools"),
    ],
)
def test_the_field_at_fault_is_the_clients(path: str, fields: dict[str, Any], param: str) -> None:
    to = backend()
    to.script = too_much
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    answer = call(create_front(to), "POST", f"/v1/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    streamed = call(create_front(to), "POST", f"/v1/{path}", json={**body, "stream": True})
    if param == "tools":  # "a" begins no call that the client may see: the stream has not begun either
        assert (streamed.status_code, streamed.json()["error"]["param"]) == (400, param)
    else:
        assert f'"param":"{param}"' in events(streamed)[-1]
    assert to.active == 0
