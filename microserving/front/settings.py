"""The limits of an HTTP front. Frozen; one per app."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from microserving.front.access import ApiKeys, ClientLimits
from microserving.protocol.body import MAX_VALUES

MIN_BODY_BYTES: Final = 2**20
"""Enough for every body whose prompt is short."""
MAX_TEXT_BODY_BYTES: Final = 4 * 2**20
"""However long a text the context might hold: parsing a body holds up every stream (about 0.1 s at this size)."""
_JSON_BYTES_PER_TEXT_BYTE: Final = 3
"""A text in JSON's own escapes: two bytes of UTF-8 may be written in six."""
_JSON_BYTES_PER_ID: Final = 16
"""A token id, its comma and space, and its share of a K/V address."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """max_bytes: of one body. max_values: JSON values in it (``parse_object``)."""

    max_bytes: int
    max_values: int


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """max_body_bytes, body_timeout_s: of one request body, enforced while it is read. max_body_bytes None: what the
    longest prompt of the served model needs; several prompts share that.

    write_timeout_s: how long a client may leave unread what is buffered for it; then its stream is cut.

    strict_fields: unknown body fields are refused (400) instead of ignored. max_concurrent_choices: how many of one
    request's choices (n, several prompts) run at once; the others wait for their turn. api_keys: None = everybody may
    ask. cors_origins: of web pages that may ask; none by default. on_ended: called with how each request to a hot route
    ended, however many choices it had: ``ok``, ``cancelled`` or an error's code.
    """

    max_body_bytes: int | None = None
    body_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    strict_fields: bool = False
    max_concurrent_choices: int = 8
    api_keys: ApiKeys | None = None
    client_limits: ClientLimits = field(default_factory=ClientLimits)
    cors_origins: tuple[str, ...] = ()
    on_ended: Callable[[str], None] | None = None

    def body_limits(self, max_context: int, text_bytes_per_token: int | None) -> BodyLimits:
        """text_bytes_per_token: as the tokenizer has it. max_context 0: the model is not known yet."""
        text = MAX_TEXT_BODY_BYTES
        if max_context and text_bytes_per_token is not None:
            text = min(text, max_context * text_bytes_per_token * _JSON_BYTES_PER_TEXT_BYTE)
        derived = max(MIN_BODY_BYTES, text, max_context * _JSON_BYTES_PER_ID)
        return BodyLimits(
            max_bytes=derived if self.max_body_bytes is None else self.max_body_bytes,
            max_values=max(MAX_VALUES, 2 * max_context),
        )
