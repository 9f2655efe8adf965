"""English text of a wanted length in tokens. Owns the sonnets that prompts are made of and how texts are measured."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from importlib.resources import files

TokenCounter = Callable[[str], float]
"""How many tokens a text has, exactly or about."""

CHARS_PER_TOKEN = 3.6
"""Of the sonnets, with the vocabularies of today's models, about; for servers that do not tell."""


def by_length(chars_per_token: float = CHARS_PER_TOKEN) -> TokenCounter:
    """Counts by the length of the text."""
    return lambda text: len(text) / chars_per_token


@cache
def sonnets() -> tuple[str, ...]:
    """Each as one text of 14 lines (some have more or less)."""
    text = files("microserving.bench").joinpath("data/sonnets.txt").read_text("utf-8")
    return tuple(text.strip().split("\n\n"))


class Prose:
    """Passages of the sonnets. count: the tokens of a text; must not fall when a text grows."""

    def __init__(self, count: TokenCounter | None = None) -> None:
        self._count = count or by_length()

    def passage(self, draw: random.Random, tokens: int) -> str:
        """The longest text of whole words that has at most ``tokens`` tokens (but one word at least): from a random word
        of a sonnet on, then whole ones in random order, the last one cut off."""
        chosen = [_from_a_word_on(draw, draw.choice(sonnets()))]
        while self._count("\n\n".join(chosen)) < tokens:
            chosen.append(draw.choice(sonnets()))
        text = "\n\n".join(chosen)
        ends = [at for at, char in enumerate(text) if char.isspace()] + [len(text)]
        fitting = bisect_left(ends, True, key=lambda end: self._count(text[:end]) > tokens)
        return text[: ends[max(fitting - 1, 0)]]


def _from_a_word_on(draw: random.Random, text: str) -> str:
    """That hardly two passages begin alike: what is no shared prefix should be none."""
    begins = [0] + [at + 1 for at, char in enumerate(text) if char.isspace()]
    return text[draw.choice(begins) :]
