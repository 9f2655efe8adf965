"""What an engine of the kit holds for whom, and how many pages of its KV pool that takes.

Plain state; ``engines`` decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

PAGE_TOKENS = 16


@dataclass(slots=True)
class Lease:
    """A reservation. tokens: whose K/V lies there so far; arrived: it is whole."""

    end: int
    expires: float
    tokens: tuple[int, ...]
    arrived: bool


@dataclass(slots=True)
class Holds:
    """What an engine holds, by request id. sends, generations: with the number of pages."""

    leases: dict[str, Lease] = field(default_factory=dict)
    sends: dict[str, int] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)

    @property
    def pages(self) -> int:
        leased = sum(pages_of(lease.end) for lease in self.leases.values())
        return leased + sum(self.sends.values()) + sum(self.generations.values())

    def names(self) -> list[str]:
        """In words, without repetition."""
        parts = {"a reservation": self.leases, "a send": self.sends, "a generation": self.generations}
        return [kind for kind, held in parts.items() if held]

    def drop(self, request_id: str) -> None:
        """All that is held for the request. Idempotent."""
        for held in (self.leases, self.sends, self.generations):
            held.pop(request_id, None)


def pages_of(tokens: int) -> int:
    """Whole pages for the K/V of so many tokens."""
    return -(-tokens // PAGE_TOKENS)
