"""From token ids to the chunks that a client sees.

Owns: a request's detokeniser, stop strings, stop ids, when it ends, and how it goes on where another engine stopped.
Does not know: sampling, scheduling, the wire.

Counting follows OpenAI and vLLM: every sampled token counts in ``completion_tokens``, the end-of-sequence token and the
tokens of a stop string included; neither is shown in the text. A stop beats a length limit reached by the same token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

from microserving.engine.constraint import Constraint, unusable_grammar
from microserving.errors import InvalidRequest
from microserving.grammar import GrammarError, GrammarTokenizer
from microserving.protocol.generation import FinishReason, GenerationChunk, StopParams, TokenLogprob

_NONE: Final[frozenset[int]] = frozenset()


class Detokenizer(Protocol):
    """Token ids to text, incrementally. ``microserving.tokenizer.IncrementalDetokenizer`` is one."""

    def put(self, token_id: int, /) -> str:
        """The text that is certain now; "" while a code point is incomplete."""

    def flush(self) -> str:
        """What is left at the end."""


class EngineTokenizer(GrammarTokenizer, Protocol):
    """What the engine needs of a tokenizer (``microserving.tokenizer.Tokenizer`` has it)."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    def detokenizer(self) -> Detokenizer: ...


class StopMatcher:
    """Finds the stop string that is complete first; of those that end together, the one that began first.

    Where tokens are cut makes no difference: the text shown is the same as if it came character by character.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)  # an empty one would match everywhere
        self._held = ""

    def put(self, text: str) -> tuple[str, bool]:
        """(text that may be shown now, whether a stop is complete). Nothing that may become a stop is shown."""
        if not self._stops:
            return text, False
        buffer = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if ends:
            self._held = ""
            return buffer[: min(ends)[1]], True
        keep = self._possible_stop(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], False

    def flush(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


def stop_ids(stop: StopParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The ids that end an output."""
    return frozenset(stop.stop_token_ids) | (frozenset() if stop.ignore_eos else eos_token_ids)


class OutputProcessor:
    """One request's output. ``max_output``: the tokens it may have at most (max_tokens, or what the context leaves).

    cached_tokens, prompt_logprobs: what its chunks, or the next one, tell (``GenerationChunk``); written by the owner when
    it is known. Stop strings are looked for in the text of the last of ``min_tokens`` and of all after it. constraint: what the
    output must match; it is told every token, and ends the output when nothing more can come.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop: StopParams,
        eos_token_ids: frozenset[int],
        *,
        prompt_tokens: int,
        max_output: int,
        constraint: Constraint | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop.stop)
        self._stop_ids = stop_ids(stop, eos_token_ids)
        self.constraint = constraint
        self._prompt_tokens = prompt_tokens
        self._max_output = max_output
        self._min_tokens = stop.min_tokens
        self._unshown: list[int] = []
        self._unshown_logprobs: list[TokenLogprob] = []
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def resume(self, token_ids: Iterable[int]) -> GenerationChunk | None:
        """Take the tokens that another engine has given out, text included: what comes next is what came next there.

        None, or the last chunk when the output ended with them: it holds no text and no tokens. Before any ``put``.
        Raises InvalidRequest when the output had ended before the last of them, or its grammar cannot go on.
        """
        reason: FinishReason | None = None
        for token_id in token_ids:
            if reason is not None:
                raise InvalidRequest("these tokens go on after the output's end", param="resume_output_ids")
            chunk = self._resumed(token_id)
            reason = None if chunk is None else chunk.finish_reason
        self._unshown = []
        if self.completion_tokens and reason is None and self._nothing_follows():
            reason = "stop"
        return None if reason is None else self._chunk("", reason)

    def preempted(self) -> GenerationChunk:
        """The last chunk when the request is given back: the tokens that no chunk has told yet, and no text (what is
        held back of it, whoever resumes the output finds anew)."""
        return self._chunk("", "preempt")

    @property
    def room(self) -> int:
        """How many tokens may come yet."""
        return self._max_output - self.completion_tokens

    @property
    def forbidden(self) -> frozenset[int]:
        """The ids that may not come next: those that end the output, while it has fewer than ``min_tokens``."""
        return self._stop_ids if self.completion_tokens < self._min_tokens else _NONE

    def nothing(self) -> GenerationChunk:
        """The only chunk of an output that may have no token."""
        return self._chunk("", "length")

    def put(self, token_id: int, logprob: TokenLogprob | None = None) -> GenerationChunk | None:
        """Take the next token. None = nothing to show yet; a chunk with ``finish_reason`` is the last one.

        Raises GrammarError.
        """
        if logprob is not None:
            self._unshown_logprobs.append(logprob)
        return self._take(token_id, look=True)

    def _nothing_follows(self) -> bool:
        """Whether the grammar lets nothing come but the end."""
        try:
            return self.constraint is not None and self.constraint.look()
        except GrammarError:
            raise unusable_grammar() from None

    def _resumed(self, token_id: int) -> GenerationChunk | None:
        try:
            return self._take(token_id, look=False)
        except GrammarError:
            raise InvalidRequest("these tokens do not match the grammar", param="resume_output_ids") from None

    def _take(self, token_id: int, *, look: bool) -> GenerationChunk | None:
        """look: whether what may come next is wanted."""
        self._unshown.append(token_id)
        self.completion_tokens += 1
        if token_id in self._stop_ids:
            return self._last("", "stop")
        text, stopped = self._detokenizer.put(token_id), False
        if self.completion_tokens >= self._min_tokens:
            text, stopped = self._matcher.put(text)
        if stopped:
            return self._chunk(text, "stop")
        if self.constraint is not None:
            self.constraint.accept(token_id)
            if look and self.constraint.look():
                return self._last(text, "stop")
        if self.completion_tokens >= self._max_output:
            return self._last(text, "length")
        return self._chunk(text, None) if text else None

    def _last(self, text: str, reason: FinishReason) -> GenerationChunk:
        """The last chunk: ``text`` and all that was held back, unless that completes a stop after all."""
        rest, stopped = self._matcher.put(self._detokenizer.flush())
        if stopped:
            return self._chunk(text + rest, "stop")
        return self._chunk(text + rest + self._matcher.flush(), reason)

    def _chunk(self, text: str, reason: FinishReason | None) -> GenerationChunk:
        token_ids, self._unshown = tuple(self._unshown), []
        logprobs, self._unshown_logprobs = tuple(self._unshown_logprobs), []
        prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return GenerationChunk(
            text,
            token_ids,
            reason,
            self._prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
            logprobs,
            prompt_logprobs,
        )
