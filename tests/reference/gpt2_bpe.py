"""GPT-2's byte-level BPE as Radford et al. published it, in plain Python; the reference for token ids.

Only for tests: https://github.com/openai/gpt-2/blob/master/src/encoder.py, with special tokens split off first and,
for SmolLM2, single digits (the models' own tokenizer.json: Digits(individual_digits) before ByteLevel).
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import pairwise

import regex

WORDS = regex.compile(r"""'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+""")


def byte_characters() -> list[str]:
    """The character that stands for each byte 0..255."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {byte: chr(byte) for byte in shown}
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(256 + len(table) - len(shown))
    return [table[byte] for byte in range(256)]


class ReferenceBPE:
    def __init__(
        self, tokens: Sequence[str], merges: Sequence[str], special: Sequence[str], *, digits: bool
    ) -> None:
        self.ids = {token: index for index, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.special = set(special)
        self.digits = digits
        self.splitter = regex.compile(
            "(" + "|".join(regex.escape(token) for token in sorted(special, key=len, reverse=True)) + ")"
        )
        self.characters = byte_characters()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self.splitter.split(text):
            if part in self.special:
                ids.append(self.ids[part])
                continue
            for word in self._words(part):
                ids.extend(
                    self.ids[piece] for piece in self._merge([self.characters[b] for b in word.encode()])
                )
        return ids

    def _words(self, text: str) -> Iterator[str]:
        for piece in self._digits(text):
            yield from WORDS.findall(piece)

    def _digits(self, text: str) -> Iterator[str]:
        run = ""
        for character in text:
            if self.digits and unicodedata.category(character).startswith("N"):
                yield run
                yield character
                run = ""
            else:
                run += character
        yield run

    def _merge(self, pieces: list[str]) -> list[str]:
        while len(pieces) > 1:
            pairs = set(pairwise(pieces))
            best = min(pairs, key=lambda pair: self.ranks.get(pair, 10**9))
            if best not in self.ranks:
                break
            merged, i = [], 0
            while i < len(pieces):
                if tuple(pieces[i : i + 2]) == best:
                    merged.append("".join(best))
                    i += 2
                else:
                    merged.append(pieces[i])
                    i += 1
            pieces = merged
        return pieces
