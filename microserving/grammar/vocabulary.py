"""A tokenizer as ``llguidance`` wants it: the bytes of every token, and one more token that stands for the end.

That one (id ``vocab_size``) is allowed where the output may end, whichever ids end it: a model's own or a request's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import llguidance
import numpy as np
import numpy.typing as npt

from microserving.errors import ModelLoadError
from microserving.tokenizer.panics import raising


class GrammarTokenizer(Protocol):
    """What is needed of a tokenizer (``microserving.tokenizer.Tokenizer`` has it)."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def special_token_ids(self) -> frozenset[int]: ...

    @property
    def strips_first_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token stands for; empty for an id that there is not."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def space_first(tokenizer: GrammarTokenizer) -> npt.NDArray[np.bool_] | None:
    """bool [vocab_size]: the tokens that begin with a space, when a text's first space is not shown."""
    if not tokenizer.strips_first_space:
        return None
    return np.array([tokenizer.token_bytes(token).startswith(b" ") for token in range(tokenizer.vocab_size)])


def make_vocabulary(tokenizer: GrammarTokenizer) -> llguidance.LLTokenizer:
    """Takes a second for a large vocabulary. Raises ModelLoadError when the library cannot take it."""
    end = tokenizer.vocab_size
    with raising(ModelLoadError("the tokenizer's vocabulary cannot be used for grammars")):
        wrapped = llguidance.TokenizerWrapper(_Vocabulary(tokenizer, end))
        return llguidance.LLTokenizer(wrapped, n_vocab=end + 1, eos_token=end)


class _Vocabulary:
    """The attributes are ``llguidance.TokenizerWrapper``'s."""

    def __init__(self, tokenizer: GrammarTokenizer, end: int) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_token_ids
        self.tokens = [*map(tokenizer.token_bytes, range(end)), b"<end>"]
        self.special_token_ids = sorted({*self._special, end})
        self.eos_token_id = end
        self.bos_token_id = None
        ordinary = (token for token in range(end) if token not in self._special and self.tokens[token])
        self._ids = {self.tokens[token]: token for token in ordinary}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: bytes | str) -> list[int]:
        """The tokens that text is made of where a grammar leaves no choice, as the tokenizer would have them."""
        data = text.encode() if isinstance(text, str) else text
        try:
            ids = self._tokenizer.encode(data.decode(), add_special_tokens=False)
        except UnicodeDecodeError:
            return self._greedy(data)
        return ids if self._spells(ids, data) else self._greedy(data)

    def _spells(self, ids: Sequence[int], data: bytes) -> bool:
        return self._special.isdisjoint(ids) and b"".join(self.tokens[token] for token in ids) == data

    def _greedy(self, data: bytes) -> list[int]:
        """Always the longest token that fits; bytes that no token has are left out."""
        ids: list[int] = []
        at = 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + length])
                if token is not None:
                    ids.append(token)
                    break
            else:
                length = 1
            at += length
        return ids
