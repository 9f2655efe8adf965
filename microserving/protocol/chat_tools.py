"""The tools of a chat request, and which of them may, must or must not be called."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import PlainValidator

from microserving.protocol.body import invalid

MAX_TOOLS: Final = 128
"""OpenAI's limit."""
MAX_TOOLS_CHARS: Final = 262_144
"""Of all definitions together, as JSON."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. definition: as templates show it. parameters: a JSON Schema of type object."""

    name: str
    definition: dict[str, Any]
    parameters: dict[str, Any]


def _tools(value: Any) -> list[Tool]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise invalid(f"must be a list of at most {MAX_TOOLS} tools")
    tools = [_tool(tool) for tool in value]
    if len({tool.name for tool in tools}) != len(tools):
        raise invalid("two tools have the same name")
    if sum(len(json.dumps(tool.definition)) for tool in tools) > MAX_TOOLS_CHARS:
        raise invalid(f"at most {MAX_TOOLS_CHARS} characters of JSON together")
    return tools


def _tool(value: Any) -> Tool:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type") != "function":
        raise invalid('every tool must be {"type": "function", "function": {"name": ..., ...}}')
    name, description = function.get("name"), function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid("a function's name must have 1 to 64 letters, digits, underscores and dashes")
    if not isinstance(description, str | None):
        raise invalid("a function's description must be a string")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise invalid("a function's parameters must be a JSON Schema of type object")
    shown = {"name": name, "description": description, "parameters": parameters}
    if description is None:
        del shown["description"]
    return Tool(name, {"type": "function", "function": shown}, {"type": "object", **parameters})


def _tool_choice(value: Any) -> str | dict[str, str]:
    """A word, or {"name": ...} for a function that must be called."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise invalid('must be "none", "auto", "required" or {"type": "function", "function": {"name": ...}}')
    return {"name": name}


Tools = Annotated[list[Tool], PlainValidator(_tools, json_schema_input_type=list[dict[str, Any]])]
ToolChoice = Annotated[
    str | dict[str, str], PlainValidator(_tool_choice, json_schema_input_type=str | dict[str, Any])
]
