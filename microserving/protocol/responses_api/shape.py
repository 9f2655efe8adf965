"""The answers of `/v1/responses`, as bytes: `response`, and the numbered events of its stream.

Owns what is around the output: settings, status, usage, errors. ``output`` has the items. Does not know how a model's
output is taken apart: a reader is given (``front.chat_output``).
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from microserving.errors import MicroservingError, http_status
from microserving.protocol.chat_responses import PieceReader, PlainText, Reasoning, joined_pieces
from microserving.protocol.generation import FinishReason, GenerationChunk
from microserving.protocol.logprobs import TokenTexts
from microserving.protocol.responses import AnswerShape, FinishedChoice, Usage, dump
from microserving.protocol.responses_api.output import Event, Output

_ERROR_CODES: Final = {429: "rate_limit_exceeded", 400: "invalid_prompt"}
"""HTTP status -> OpenAI's code for it in an answer that has failed; `server_error` is that of all others."""


class ResponsesShape(AnswerShape):
    """settings: of the request, as the answer repeats them. make_reader: of the output; None = all text is the answer's.
    texts: what tokens stand for, to count those of the thoughts. There is one choice."""

    def __init__(
        self,
        *,
        request_id: str,
        created: int,
        model: str,
        settings: Mapping[str, Any],
        texts: TokenTexts | None = None,
        make_reader: Callable[[], PieceReader] | None = None,
        **_: Any,
    ) -> None:
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": created, "model": model}
        self._settings = settings
        self._texts = texts
        self._make_reader = make_reader or PlainText
        self._plain = make_reader is None
        self._reader = self._make_reader()
        self._output = Output(request_id)
        self._told = 0
        self._token_ids: list[int] = []
        self._finish: FinishReason | None = None

    def events(self, index: int, chunk: GenerationChunk, *, first: bool) -> bytes:  # noqa: ARG002 - there is one choice
        names = ("response.created", "response.in_progress") if first else ()
        begun = [(name, {"response": self._response()}) for name in names]
        return b"".join(map(self._event, begun + self._put(chunk)))

    def next_event(self, index: int, chunk: GenerationChunk) -> bytes | None:  # noqa: ARG002 - as above
        message = self._output.open_message
        if not self._plain or message is None or not chunk.text or chunk.finish_reason is not None:
            return None
        return self._event(message.grow(chunk.text))

    def last_events(self, usage: Usage) -> bytes:
        whole = self._response(usage=self._usage(usage))
        return self._event((f"response.{whole['status']}", {"response": whole}))

    def error_event(self, error: MicroservingError) -> bytes:
        self._output.close("incomplete")  # nothing is told of it: the whole answer has failed
        code = _ERROR_CODES.get(http_status(error), "server_error")
        failed = {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._event(("response.failed", {"response": self._response() | failed}))

    def answer(self, choices: Sequence[FinishedChoice], usage: Usage) -> bytes:
        (choice,) = choices
        self._put(choice)
        return dump(self._response(usage=self._usage(usage)))

    def _put(self, piece: GenerationChunk | FinishedChoice) -> list[Event]:
        """Take it in; what there is to tell of it."""
        self._token_ids += piece.token_ids
        finish = piece.finish_reason
        read = [*self._reader.put(piece.text), *(self._reader.end() if finish is not None else ())]
        told = [event for part in joined_pieces(read) for event in self._output.put(part)]
        if finish is not None:
            self._finish = finish
            told += self._output.end("incomplete" if finish == "length" else "completed")
        return told

    def _response(self, usage: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer as it is now."""
        cut = self._finish == "length"
        status = "in_progress" if self._finish is None else "incomplete" if cut else "completed"
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output.items(),
            "usage": usage,
            **self._settings,
        }

    def _usage(self, usage: Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._thought_tokens()},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _thought_tokens(self) -> int:
        """How many tokens came before the first that is not thought: thoughts, their marks, space. Read one by one, so
        that it is the same however the output was cut."""
        if self._texts is None or not self._output.thought:
            return 0
        reader, decoder = self._make_reader(), codecs.getincrementaldecoder("utf-8")("replace")
        for count, token in enumerate(self._token_ids):
            pieces = reader.put(decoder.decode(self._texts.token_bytes(token)))
            if not all(isinstance(piece, Reasoning) for piece in pieces):
                return count
        return len(self._token_ids)

    def _event(self, event: Event) -> bytes:
        """As it is sent, with its number."""
        kind, fields = event
        data = dump({"type": kind, "sequence_number": self._told, **fields})
        self._told += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)
