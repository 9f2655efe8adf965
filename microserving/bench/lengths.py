"""How long prompts and outputs are: a number of tokens, or a distribution of it. Pure."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["fixed", "uniform", "normal", "lognormal", "exponential"]
_ARGUMENTS: dict[Kind, int] = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}
_MAX_TOKENS = 1_000_000
_MAX_SIGMA = 4
"""Of the logarithm: a deviation in tokens, taken for it, would ask for texts without end."""
FORMS = "600, uniform:400:800, normal:600:100 (deviation), lognormal:600:0.5 (median, sigma), exponential:600"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, at least one, at most a million. text: what it was written as."""

    kind: Kind
    arguments: tuple[float, ...]
    text: str

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """One of ``FORMS``. Raises ValueError."""
        name, *rest = text.split(":") if ":" in text else ("fixed", text)
        kinds = {str(kind): kind for kind in get_args(Kind)}
        try:
            arguments = tuple(float(part) for part in rest)
        except ValueError:
            arguments = ()
        good = name in kinds and len(arguments) == _ARGUMENTS[kinds[name]]
        good = good and all(0 <= number <= _MAX_TOKENS for number in arguments) and arguments[0] >= 1
        if good and name == "uniform" and arguments[0] > arguments[1]:
            raise ValueError(f"{text!r} is no length in tokens: the first number is the smaller one")
        if not good or (name == "lognormal" and arguments[1] > _MAX_SIGMA):
            raise ValueError(f"{text!r} is no length in tokens; write {FORMS}")
        return cls(kinds[name], arguments, text)

    def sample(self, draw: random.Random) -> int:
        first, *rest = self.arguments
        match self.kind:
            case "fixed":
                value = first
            case "uniform":
                value = draw.uniform(first, rest[0])
            case "normal":
                value = draw.gauss(first, rest[0])
            case "lognormal":
                value = draw.lognormvariate(math.log(first), rest[0])
            case "exponential":
                value = draw.expovariate(1 / first)
        return min(max(1, round(value)), _MAX_TOKENS)
