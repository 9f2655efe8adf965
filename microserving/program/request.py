"""The request that a router program routes."""

from __future__ import annotations

import asyncio
from dataclasses import field, fields
from operator import attrgetter
from typing import Any, Self

from microserving.protocol.generation import GenerationRequest
from microserving.protocol.records import record

_ALL_BUT_LAST = 1e-5
"""Below this balance factor the prefill engine takes all but the last token (MLC-LLM's constant)."""


@record
class Request(GenerationRequest):
    """One prompt to continue, already tokenised.

    ``request_id`` is made by the router: unique, and not the id that the client sent. ``prompt_token_ids`` is the
    whole prompt; ``sampling`` and ``stop`` say how to go on and when to end. ``metadata`` is what the client sent in
    OpenAI's field of that name; ``headers`` are those of its headers that are hints for routing (``x-...`` and a few
    more), by lower-case name: never credentials. Only requests with the same ``cache_salt`` share cached prefixes.
    ``deadline``: on the event loop's clock, None for none; the host ends the request then.
    """

    deadline: float | None = None
    encoded: dict[str | None, bytes] = field(
        default_factory=dict, init=False, compare=False, repr=False, kw_only=True
    )
    """Of the host: the request in the verbs' JSON, by the model's name."""

    @classmethod
    def of(cls, generation: GenerationRequest, *, request_id: str, deadline: float | None = None) -> Self:
        """``generation`` under another id."""
        values: list[Any] = [request_id, *_inherited(generation), deadline]
        return cls(*values)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, negative when it has passed; None when there is none. On the event loop only."""
        return None if self.deadline is None else self.deadline - asyncio.get_running_loop().time()

    @property
    def prompt_length(self) -> int:
        """Length of the prompt in tokens (not characters)."""
        return len(self.prompt_token_ids)

    def split(self, pd_balance_factor: float) -> int:
        """Where the prompt is split: the prefill engine computes ``[0, end)``, the decode engine the rest.

        pd_balance_factor: the share of the prompt that the decode engine computes, in [0, 1]. 0 leaves it the last
        token only (somebody has to compute the first output token's logits), 1 all of it, so that nothing is sent.
        Returns: end, in [0, prompt_length - 1].
        Raises: ValueError when the factor is not a number in [0, 1].
        """
        if not 0.0 <= pd_balance_factor <= 1.0:  # also false for NaN
            raise ValueError(f"pd_balance_factor must be in [0, 1], not {pd_balance_factor}")
        last = self.prompt_length - 1
        end = last if pd_balance_factor < _ALL_BUT_LAST else int((1 - pd_balance_factor) * self.prompt_length)
        return max(0, min(end, last))


_inherited = attrgetter(*(each.name for each in fields(GenerationRequest)[1:]))
"""All but the id."""
