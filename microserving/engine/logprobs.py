"""Log-probabilities of tokens under the model: a pure function of one row of raw logits, in float64.

Owns: the arithmetic, and the log-probabilities of one request's prompt as its chunks come. Does not know: sampling, the
wire. So a number is the same in whatever batch, chunk or engine its row was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from microserving.errors import InternalError
from microserving.protocol.generation import TokenLogprob
from microserving.protocol.logprobs import LOWEST

ROWS_AT_ONCE: Final = 128
"""How many tokens of a scored prompt are computed in one step: their logits, [tokens, vocabulary], are all there at a
time."""

Logits = npt.NDArray[np.float32]


def token_logprob(logits: Logits, token_id: int, count: int) -> TokenLogprob:
    """Of ``token_id`` and of the ``count`` likeliest tokens. logits: float32 [vocabulary], the model's own.

    Raises InternalError when the logits have no usable maximum.
    """
    wide = logits.astype(np.float64)
    best = wide.max()
    if not np.isfinite(best):
        raise InternalError("the model's logits are not finite")
    scores = wide - best
    scores -= np.log(np.exp(scores).sum())
    own = logits[token_id]
    before = np.count_nonzero(logits > own) + np.count_nonzero(logits[:token_id] == own)
    top = tuple((int(i), _told(scores[i])) for i in _likeliest(logits, count))
    return TokenLogprob(token_id, _told(scores[token_id]), top, int(before) + 1)


class PromptScores:
    """The log-probabilities of a prompt's tokens: row p of its logits is about token p + 1.

    count: of how many of the likeliest tokens. error: of a row that has no log-probabilities.
    """

    def __init__(self, prompt: Sequence[int], count: int) -> None:
        self._prompt = prompt
        self._count = count
        self._found: list[TokenLogprob | None] = [None]  # of the first token there is none
        self._told = False
        self.error: InternalError | None = None

    def first_wanted(self, start: int, end: int) -> int:
        """Of positions [start, end): the first whose logits are wanted; ``end`` = none."""
        next_row = len(self._found) - 1
        return max(start, next_row) if next_row < min(end, len(self._prompt) - 1) else end

    def take(self, logits: Logits, first: int) -> None:
        """Rows of positions ``first`` and on; those that are known already, or are about the output, are passed over."""
        for row in range(
            max(0, len(self._found) - 1 - first), min(len(logits), len(self._prompt) - 1 - first)
        ):
            try:
                self._found.append(token_logprob(logits[row], self._prompt[first + row + 1], self._count))
            except InternalError as error:
                self.error = error
                return

    def tell(self) -> tuple[TokenLogprob | None, ...] | None:
        """All of them, once; then None."""
        if self._told:
            return None
        self._told = True
        return tuple(self._found)


def _likeliest(logits: Logits, count: int) -> npt.NDArray[np.intp]:
    """The ids of the ``count`` highest, highest first; of equal ones the lowest id."""
    if count == 0:
        return np.zeros(0, np.intp)
    if count < logits.size:
        threshold = np.partition(logits, logits.size - count)[logits.size - count]
        candidates = np.flatnonzero(logits >= threshold)
    else:
        candidates = np.arange(logits.size)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


def _told(score: np.float64) -> float:
    return max(float(score), LOWEST)
