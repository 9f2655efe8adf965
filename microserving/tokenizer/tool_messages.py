"""Tools for chat templates that have no place for them: they go into the messages, in the form of Hermes and Qwen.

The tools stand in a system message in front, an assistant's calls in its text, and a tool's answers in messages of the
user. That is the text which those models' own templates write, so that whoever reads one kind of calls reads these too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def with_tools(chat: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    """``chat`` with the tools told in its first system message (a new one, if it has none)."""
    text = _INTRODUCTION.format(tools="\n".join(_dump(tool) for tool in tools))
    head, *rest = chat
    if head["role"] == "system":
        return [{**head, "content": f"{head['content']}\n\n{text}"}, *map(dict, rest)]
    return [{"role": "system", "content": text}, *map(dict, chat)]


def as_text(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``chat`` without calls and answers of tools as such; answers that follow each other share a message."""
    result: list[dict[str, Any]] = []
    previous = None
    for message in chat:
        role = message["role"]
        if role == "tool":
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if previous == "tool":
                result[-1]["content"] += f"\n{text}"
            else:
                result.append({"role": "user", "content": text})
        else:
            result.append(_with_calls(message) if message.get("tool_calls") else dict(message))
        previous = role
    return result


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        f"<tool_call>\n{_dump({'name': function.get('name'), 'arguments': function.get('arguments')})}\n</tool_call>"
        for function in (call.get("function") or {} for call in message["tool_calls"])
    ]
    content = [message["content"]] if message["content"] else []
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**plain, "content": "\n".join([*content, *calls])}


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
