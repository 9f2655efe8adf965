"""What is written down of each request: times on the client's clock and token counts. Knows no HTTP and no statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

INTERRUPTED = "interrupted"
"""The error of a request that had not ended when its run was stopped."""
_DIGITS = 6


@dataclass(slots=True)
class Measured:
    """One request. Times in seconds since its run began; None until it is so far.

    scheduled: when the load says that it is sent; sent: when it was. pieces: when each piece of output came. completed:
    when the last piece or the finish reason came, ended: when nothing more could come. piece_tokens: the tokens of the
    pieces, where a piece that does not say counts as one. usage: whether the server told its token counts; else
    output_tokens is piece_tokens. counted: not a part of the warm-up, nor sent only to keep the load up.
    """

    session: int
    scheduled: float
    turn: int = 0
    phase: str = ""
    counted: bool = True
    sent: float | None = None
    pieces: list[float] = field(default_factory=list)
    completed: float | None = None
    ended: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    piece_tokens: int = 0
    usage: bool = False
    finish: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.ended is not None and self.error is None

    @property
    def queueing(self) -> float | None:
        """How much later than scheduled it was sent."""
        return None if self.sent is None else self.sent - self.scheduled

    @property
    def ttft(self) -> float | None:
        """To the first output, from the scheduled time: a server that holds up later requests does not look fast."""
        return self.pieces[0] - self.scheduled if self.pieces else None

    @property
    def ttft_from_sent(self) -> float | None:
        return self.pieces[0] - self.sent if self.pieces and self.sent is not None else None

    @property
    def jct(self) -> float | None:
        """Of the whole request, from the scheduled time."""
        return None if self.ended is None else self.ended - self.scheduled

    @property
    def jct_from_sent(self) -> float | None:
        return self.ended - self.sent if self.ended is not None and self.sent is not None else None

    @property
    def tpot(self) -> float | None:
        """Mean time of an output token after the first one; None for fewer than two."""
        if self.completed is None or not self.pieces or self.output_tokens < 2:
            return None
        return (self.completed - self.pieces[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between one piece of output and the next."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def disagrees(self) -> bool:
        """The server's token count cannot be: more pieces came, each of at least one token."""
        return self.ok and self.usage and self.piece_tokens > self.output_tokens

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields, times to the microsecond."""
        return {
            name: _rounded(getattr(self, name))
            for name in type(self).__dataclass_fields__
            if getattr(self, name) not in (None, "")
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Measured:
        """The inverse of ``as_dict``; of what it does not know it takes nothing."""
        return cls(**{name: value for name, value in data.items() if name in cls.__dataclass_fields__})


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    return [round(one, _DIGITS) for one in value] if isinstance(value, list) else value
