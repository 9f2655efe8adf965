"""What the engine's HTTP app is made over: one engine and everything around it, already wired."""

from __future__ import annotations

from dataclasses import dataclass

from microserving.engine.async_engine import AsyncEngine
from microserving.engine.handoff import HandoffReceiver, HandoffSender
from microserving.protocol.microserving import EngineInfo
from microserving.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EngineServices:
    """info: as `/microserving/info` shows it; its model and max_context are those of `/v1`, too."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    receiver: HandoffReceiver
    sender: HandoffSender
    info: EngineInfo
