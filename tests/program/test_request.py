from __future__ import annotations

import asyncio
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.program import Request
from microserving.program.testing import make_request
from microserving.protocol.generation import GenerationRequest, SamplingParams, StopParams


@pytest.mark.parametrize(
    ("length", "factor", "end"),
    [
        (100, 0.0, 99),
        (100, 9e-6, 99),  # below MLC's threshold: all but the last token
        (100, 1e-5, 99),  # int((1 - 1e-5) * 100) = 99
        (100, 0.1, 90),
        (100, 0.5, 50),
        (100, 0.9, 9),  # (1 - 0.9) * 100 is 9.999... in binary; int() cuts it
        (100, 1.0, 0),
        (100, 1 - 1e-9, 0),
        (1, 0.0, 0),
        (1, 0.5, 0),
        (2, 0.1, 1),
        (1, 1.0, 0),
    ],
)
@pytest.mark.case("PD-29")
def test_split_values(length: int, factor: float, end: int) -> None:
    assert make_request(range(length)).split(factor) == end


@given(st.integers(1, 5000), st.floats(0, 1))
def test_split_leaves_a_token_to_decode(length: int, factor: float) -> None:
    """Within one token of the exact share, and never the whole prompt."""
    end = make_request(range(length)).split(factor)
    assert 0 <= end <= length - 1
    if factor >= 1e-5:
        exact = (1 - Fraction(factor)) * length
        assert end == length - 1 or abs(exact - end) <= 1 + Fraction(1, 10**6)


@given(st.integers(1, 300), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_factor_never_sends_more(length: int, one: float, other: float) -> None:
    request = make_request(range(length))
    assert request.split(max(one, other)) <= request.split(min(one, other))


@pytest.mark.parametrize("factor", [-0.01, 1.5, math.nan, math.inf, -math.inf])
@pytest.mark.case("PD-29")
def test_split_refuses_what_is_no_share(factor: float) -> None:
    with pytest.raises(ValueError, match="pd_balance_factor must be in"):
        make_request(range(10)).split(factor)


@pytest.mark.case("PD-46")
def test_prompt_length_counts_tokens() -> None:
    assert make_request([5, 6, 7]).prompt_length == 3


def test_a_request_is_the_generation_under_another_id() -> None:
    generation = GenerationRequest(
        "client",
        (1, 2),
        SamplingParams(seed=7),
        StopParams(5),
        cache_salt="salt",
        timeout_s=3.0,
        resume_output_ids=(4,),
        metadata={"m": "1"},
        headers={"x-h": "2"},
    )
    request = Request.of(generation, request_id="own", deadline=9.5)
    assert (request.request_id, request.deadline) == ("own", 9.5)
    for name in GenerationRequest.__dataclass_fields__:
        assert name == "request_id" or getattr(request, name) == getattr(generation, name)


def test_the_time_that_is_left() -> None:
    async def scenario() -> None:
        assert make_request([1]).remaining_s is None
        now = asyncio.get_running_loop().time()
        left = Request.of(make_request([1]), request_id="r", deadline=now + 60).remaining_s
        assert left is not None
        assert 50 < left <= 60
        late = Request.of(make_request([1]), request_id="r", deadline=now - 1).remaining_s
        assert late is not None
        assert late < 0

    asyncio.run(scenario())
