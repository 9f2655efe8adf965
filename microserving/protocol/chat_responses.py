"""OpenAI's answers to a chat, as bytes: `chat.completion` and `chat.completion.chunk`.

Owns the shapes of messages and deltas. Does not know where text comes from.
"""

from __future__ import annotations

from typing import Any

from microserving.protocol.generation import FinishReason, GenerationChunk
from microserving.protocol.responses import AnswerShape, FinishedChoice


class ChatShape(AnswerShape):
    """`chat.completion`, and its chunks."""

    id_prefix = "chatcmpl"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"
    _around_text = (b'"delta":{"content":', b"}")

    def _choices(self, index: int, chunk: GenerationChunk, first: bool) -> list[dict[str, Any]]:
        """The role travels with the first content, the finish reason alone with an empty delta (as OpenAI does)."""
        choices = []
        if first and (self._shows(chunk) or chunk.finish_reason is not None):
            delta = {"role": "assistant", "content": chunk.text}
            choices.append(self._delta(index, delta, chunk.token_ids))
        elif self._shows(chunk):
            choices.append(self._delta(index, {"content": chunk.text}, chunk.token_ids))
        if chunk.finish_reason is not None:
            choices.append(self._delta(index, {}, (), chunk.finish_reason))
        return choices

    def _delta(
        self,
        index: int,
        delta: dict[str, str],
        token_ids: tuple[int, ...],
        finish: FinishReason | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._with_ids(choice, token_ids)

    def _whole_choice(self, index: int, choice: FinishedChoice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        shown = {"index": index, "message": message, "logprobs": None, "finish_reason": choice.finish_reason}
        return self._with_ids(shown, choice.token_ids)
