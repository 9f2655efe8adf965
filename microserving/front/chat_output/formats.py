"""Which form a model's output has: what the operator says, else what its chat template shows."""

from __future__ import annotations

from typing import get_args

from microserving.front.chat_output.reasoning import OPEN
from microserving.protocol.chat_formats import ReasoningFormat, ToolCallFormat


def tool_call_format(setting: str, template: str | None) -> ToolCallFormat:
    """setting: a format, or anything else for the template's. Without a sign of another one it is Hermes's, which is
    also the form that ``tokenizer.tool_messages`` teaches."""
    for form in get_args(ToolCallFormat):
        if setting == form:
            return form  # type: ignore[no-any-return]
    template = template or ""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters": ' in template):
        return "llama3"
    return "hermes"


def reasoning_format(setting: str, template: str | None) -> ReasoningFormat:
    """setting: a format, or anything else for the template's."""
    if setting in ("none", "think"):
        return "think" if setting == "think" else "none"
    return "think" if OPEN in (template or "") else "none"
