"""A compiled grammar, and where one output stands in it. The state is a pure function of the tokens taken so far."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
import numpy.typing as npt


class GrammarError(Exception):
    """A token does not match, or what comes next is too much work to find out. The message is for logs."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may come next. tokens: bool [vocab_size], ends excluded. may_end: what there is matches already."""

    tokens: npt.NDArray[np.bool_]
    may_end: bool


class Matcher:
    """One output's place in a grammar. Not thread-safe; it shares nothing with other outputs of the same grammar."""

    __slots__ = ("_inner", "_vocab_size")

    def __init__(self, inner: llguidance.LLMatcher, vocab_size: int) -> None:
        """inner: over a vocabulary that has one more token, ``vocab_size``, for the end."""
        self._inner = inner
        self._vocab_size = vocab_size

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take the next tokens. Raises GrammarError when one does not match; then this is of no more use."""
        if not self._inner.consume_tokens(list(token_ids)):
            raise GrammarError(self._inner.get_error()[:200])

    def allowed(self) -> Allowed:
        """What may come next. Raises GrammarError when that takes too much work (``compiler``'s limits)."""
        if self._inner.is_stopped():
            if self._inner.is_error():
                raise GrammarError(self._inner.get_error()[:200])
            return Allowed(np.zeros(self._vocab_size, np.bool_), may_end=True)
        mask = np.frombuffer(self._inner.compute_bitmask(), np.uint8)
        if self._inner.is_error():
            raise GrammarError(self._inner.get_error()[:200])
        bits = np.unpackbits(mask, count=self._vocab_size + 1, bitorder="little").view(np.bool_)
        return Allowed(bits[:-1], may_end=bool(bits[-1]))


class CompiledGrammar:
    """Thread-safe. not_first: bool [vocab_size], tokens that the output does not begin with if there are others (its first
    space would not be shown); None = there are none."""

    def __init__(
        self, start: llguidance.LLMatcher, vocab_size: int, not_first: npt.NDArray[np.bool_] | None = None
    ) -> None:
        self.not_first = not_first
        self._start = start
        self._vocab_size = vocab_size
        self._lock = threading.Lock()

    def matcher(self) -> Matcher:
        """A new one, at the beginning."""
        with self._lock:
            return Matcher(self._start.deep_copy(), self._vocab_size)
