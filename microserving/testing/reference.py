"""The output that every engine of the kit gives: a function of the prompt, the seed and all tokens before.

So a continuation that was computed from another prompt's K/V, or from a wrong position, differs from here on.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from zlib import crc32

from microserving.protocol.generation import GenerationRequest, TokenLogprob

DEFAULT_MAX_TOKENS = 16
_VOCABULARY = 50_000
_HELD_BACK = 4
"""One token in so many shows its text only together with the next one's, as half a code point does."""


def next_token(context: Sequence[int], seed: int) -> int:
    """context: the prompt and all output so far."""
    return crc32(array("q", context).tobytes(), seed & 0xFFFFFFFF) % _VOCABULARY


def holds_back(token: int) -> bool:
    """Whether the token's text is not shown before the next token."""
    return token % _HELD_BACK == 0


def text_of(tokens: Sequence[int]) -> str:
    return "".join(f" {token}" for token in tokens)


def score_of(token: int) -> TokenLogprob:
    """The token's log-probability, where it was asked for."""
    return TokenLogprob(token, -(token % 97) / 8)


def length_of(request: GenerationRequest) -> int:
    """How many tokens the output has."""
    return DEFAULT_MAX_TOKENS if request.stop.max_tokens is None else request.stop.max_tokens


def output_of(request: GenerationRequest) -> tuple[int, ...]:
    """The whole output of ``request`` by one engine that never fails; what it resumes is part of it."""
    context, output = list(request.prompt_token_ids), list(request.resume_output_ids)
    while len(output) < length_of(request):
        output.append(next_token([*context, *output], request.sampling.seed))
    return tuple(output)
