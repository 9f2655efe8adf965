"""The limits of an HTTP front. Frozen; one per app."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """max_body_bytes, body_timeout_s: of one request body, enforced while it is read.

    strict_fields: unknown body fields are refused (400) instead of ignored. max_concurrent_choices: how many of one
    request's choices (n, several prompts) run at once; the others wait for their turn.
    """

    max_body_bytes: int = 16 * 2**20
    body_timeout_s: float = 60.0
    strict_fields: bool = False
    max_concurrent_choices: int = 8
