"""A chat model that plays a script, cut as a seed says, with stops and log-probabilities as an engine has them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from microserving.engine.output import StopMatcher
from microserving.protocol.generation import GenerationChunk, GenerationRequest, TokenLogprob

from .fakes import ByteTokenizer, ScriptedBackend

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


class ChatTokenizer(ByteTokenizer):
    """Token id = byte; remembers how the last chat was asked for."""

    special_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    strips_first_space = False

    def __init__(self, template: str | None = None, end: str = "") -> None:
        """end: of every prompt."""
        self.chat_template = template
        self.end = end
        self.options: dict[str, Any] = {}
        self.messages: Sequence[dict[str, Any]] = ()

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], *, max_context: int | None = None, **options: Any
    ) -> list[int]:
        self.messages, self.options = messages, options
        return self.encode("chat" + self.end)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def says(*texts: str, seed: int = 0) -> Callable[[GenerationRequest], AsyncIterator[GenerationChunk]]:
    """Choice j says text j (round and round); a character is a token."""

    async def play(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
        choice = int(request.request_id.rpartition("-")[2]) if "-" in request.request_id else 0
        text, cuts = texts[choice % len(texts)], random.Random(f"{seed} {choice}")
        matcher, shown, ids, total = StopMatcher(request.stop.stop), "", [], 0
        for at, char in enumerate(text):
            part, stopped = matcher.put(char)
            last = stopped or at == len(text) - 1
            shown += part + ("" if stopped or not last else matcher.flush())
            ids.append(ord(char) % 256)
            if last or (not request.whole and cuts.random() < 0.4):
                total += len(ids)
                yield chunk(request, shown, ids, total, last)
                await asyncio.sleep(0)
                shown, ids = "", []
            if stopped:
                return

    return play


def chunk(
    request: GenerationRequest, text: str, ids: Sequence[int], total: int, last: bool
) -> GenerationChunk:
    scores = [TokenLogprob(token, -token / 7, ((1, -0.5), (token, -token / 7))) for token in ids]
    return GenerationChunk(
        text,
        tuple(ids),
        "stop" if last else None,
        len(request.prompt_token_ids),
        total,
        logprobs=() if request.logprobs is None else tuple(scores),
    )


def backend(*texts: str, template: str | None = None, end: str = "", seed: int = 0) -> ScriptedBackend:
    made = ScriptedBackend(says(*texts, seed=seed))
    made.tokenizer = ChatTokenizer(template, end)
    return made
