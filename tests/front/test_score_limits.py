"""What an engine tells a router of one prompt fits one event."""

from __future__ import annotations

import msgspec
import pytest

from microserving.errors import InvalidRequest
from microserving.front.generations import MAX_PROMPT_SCORES, check_logprobs
from microserving.protocol.generation import TokenLogprob
from microserving.protocol.logprobs import to_wire
from microserving.protocol.openai import CompletionRequest
from microserving.protocol.sse import MAX_EVENT_BYTES

LONGEST = -1234.5678901234567
"""A log-probability in 19 characters, as many as `float` has below -1000."""


def fields(count: int, **more: bool) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "x", "prompt_logprobs": count, **more})


@pytest.mark.parametrize("count", [0, 1, 20])
def test_the_longest_prompt_that_is_scored_fits_one_event(count: int) -> None:
    tokens = MAX_PROMPT_SCORES // (count + 1)
    check_logprobs(fields(count), [[1] * tokens], [1])
    top = tuple((262_143, LONGEST) for _ in range(count))
    entry = msgspec.json.encode(to_wire(TokenLogprob(262_143, LONGEST, top, 262_143)))
    assert (len(entry) + 1) * tokens < MAX_EVENT_BYTES


@pytest.mark.parametrize("stream", [False, True])
def test_a_longer_one_is_refused(stream: bool) -> None:
    """21 scores for each token: 8,322 tokens are 174,762."""
    check_logprobs(fields(20, stream=stream), [[1] * 8322, [1] * 8322], [1, 1])
    with pytest.raises(InvalidRequest) as refused:
        check_logprobs(fields(20, stream=stream), [[1] * 8323], [1])
    assert refused.value.param == "prompt_logprobs"
