"""What one output may go on with: its grammar's tokens, and its ends where the grammar may end.

Owns how a grammar and the ids that end an output go together. Does not know sampling, nor when an output ends otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from microserving.errors import InvalidRequest
from microserving.grammar import GrammarError, Matcher


def unusable_grammar() -> InvalidRequest:
    """What a client is told of a GrammarError: no engine is at fault, and none does better."""
    return InvalidRequest(
        "the grammar cannot be used: nothing may follow the output so far, or it is too much work to find out what may",
        param="grammar",
    )


class Constraint:
    """A pure function of the tokens taken so far: the same in another engine, and after a preemption.

    Ids that end the output are no part of what must match: they are allowed exactly where the grammar may end, also
    those that stand for a text. ``allowed``: bool [vocab_size], what may come next; as of the last ``look``.
    """

    __slots__ = ("_ends", "_matcher", "_vocab_size", "allowed")

    def __init__(
        self,
        matcher: Matcher,
        ends: Iterable[int],
        vocab_size: int,
        not_first: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """not_first: as ``CompiledGrammar`` has it. Raises GrammarError when nothing may come."""
        self._matcher = matcher
        self._ends = [token for token in ends if token < vocab_size]
        self._vocab_size = vocab_size
        self.allowed: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self.look()
        if not_first is not None and (others := self.allowed & ~not_first[:vocab_size]).any():
            self.allowed = others

    def accept(self, token_id: int) -> None:
        """Take the next token, which is no end. Raises GrammarError when it does not match."""
        self._matcher.accept((token_id,))

    def look(self) -> bool:
        """Find out what may come next. True when nothing but the end may.

        Raises GrammarError when nothing at all may come, or it takes too much work to find out.
        """
        found = self._matcher.allowed()
        allowed = found.tokens[: self._vocab_size].copy()
        allowed[self._ends] = False
        more = bool(allowed.any())
        if not more and not found.may_end:
            raise GrammarError("no token goes on with what the grammar wants")
        allowed[self._ends] = found.may_end
        self.allowed = allowed
        return not more
