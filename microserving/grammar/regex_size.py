"""How large a regular expression is once its repetitions are written out. An upper bound: it need not be valid."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_SIZE: Final = 20_000
"""Symbols of an expression with its repetitions written out: each may become a state of the matcher."""
_TOKEN: Final = re.compile(
    # Every part has a longest length, so that a text that closes nothing is read in linear time.
    r"""(?P<atom>\\[pPx]\{[^}]{0,64}\}|\\.|\[\^?\]?(?:\\.|[^\]\\]){0,128}\])
    |(?P<open>\((?:\?[^:()]{0,16}:|\?P?<[^>()]{0,64}>)?)
    |(?P<close>\))
    |(?P<bar>\|)
    |(?P<repeat>[*+?]|\{(?P<least>[0-9]{1,9})(?P<comma>,(?P<most>[0-9]{0,9}))?\})
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(slots=True)
class _Group:
    """size: of what is complete. last: of what a repetition would repeat. repeated: it has been repeated already."""

    size: int = 0
    last: int = 0
    repeated: bool = False

    def put(self, size: int) -> None:
        self.size += self.last
        self.last = size
        self.repeated = False

    def total(self) -> int:
        return self.size + self.last


def check_regex_size(pattern: str) -> None:
    """Raises ValueError when it is too large, or repeats a repetition (`a++`), which every dialect reads another way."""
    groups = [_Group()]
    for token in _TOKEN.finditer(pattern):
        group = groups[-1]
        match token.lastgroup:
            case "open":
                groups.append(_Group())
            case "close":
                if len(groups) > 1:
                    inner = groups.pop()
                    groups[-1].put(inner.total())
            case "repeat":
                _repeat(group, token)
            case "bar":
                group.put(0)
            case _:
                group.put(1)
        if groups[-1].total() > MAX_SIZE:
            raise ValueError(f"an expression with its repetitions has more than {MAX_SIZE} symbols")


def _repeat(group: _Group, token: re.Match[str]) -> None:
    text = token["repeat"]
    if group.repeated:
        if text != "?":  # which makes it lazy
            raise ValueError(
                "an expression repeats a repetition (possessive and stacked ones are not supported)"
            )
        return
    group.repeated = True
    group.last *= repetitions(token)


def repetitions(token: re.Match[str]) -> int:
    """How often a repetition (groups ``least``, ``most``) writes its part out."""
    if token["least"] is None:
        return 1
    return max(int(token["least"]), int(token["most"] or 0), 1)
