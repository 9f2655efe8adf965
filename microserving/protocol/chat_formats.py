"""How models write what is not plain answer, and what an operator may say of it."""

from __future__ import annotations

from typing import Literal

ToolCallFormat = Literal["hermes", "llama3", "mistral"]
ReasoningFormat = Literal["none", "think"]
ToolCallSetting = Literal["auto", "hermes", "llama3", "mistral"]
"""auto: as the chat template shows."""
ReasoningSetting = Literal["auto", "none", "think"]
