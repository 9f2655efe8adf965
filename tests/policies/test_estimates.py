"""The split of a prompt between two engines, against trying every split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.policies import EngineLoad, balanced_end, decoding_s

engine_loads = st.builds(
    EngineLoad,
    queued_prefill_tokens=st.integers(0, 2000),
    prefill_tokens_per_s=st.floats(10, 5000),
)


def engine(queued: int = 0, rate: float = 0.0) -> EngineLoad:
    return EngineLoad(queued_prefill_tokens=queued, prefill_tokens_per_s=rate)


@pytest.mark.parametrize(
    ("tokens", "matched", "prefill", "decode", "end"),
    [
        # (0 + e) / 300 == (0 + 1000 - e) / 100
        pytest.param(1000, 0, engine(0, 300), engine(0, 100), 750, id="three times as fast"),
        # (400 + e) / 100 == (1000 - e) / 100
        pytest.param(1000, 0, engine(400, 100), engine(0, 100), 300, id="the prefill engine has a queue"),
        pytest.param(1000, 0, engine(0, 100), engine(400, 100), 700, id="the decode engine has one"),
        # (e - 200) / 100 == (1000 - e) / 100
        pytest.param(1000, 200, engine(0, 100), engine(0, 100), 600, id="some is cached"),
        pytest.param(1000, 900, engine(0, 100), engine(0, 100), 900, id="most is cached"),
        pytest.param(1000, 1000, engine(0, 100), engine(0, 100), 999, id="all is cached"),
        pytest.param(
            1000, 0, engine(5000, 100), engine(0, 100), 0, id="the prefill engine has too much to do"
        ),
        pytest.param(1000, 100, engine(5000, 100), engine(0, 100), 100, id="that, and some is cached"),
        pytest.param(
            1000, 0, engine(0, 100), engine(9000, 100), 999, id="the decode engine has too much to do"
        ),
        pytest.param(1000, 0, engine(), engine(), 999, id="nothing was measured yet"),
        pytest.param(1000, 0, engine(0, 100), engine(), 500, id="one rate is known"),
        pytest.param(1000, 0, engine(), engine(0, 100), 500, id="the other one is known"),
        pytest.param(1, 0, engine(0, 100), engine(0, 100), 0, id="one token"),
        pytest.param(2, 0, engine(0, 100), engine(0, 100), 1, id="two tokens"),
    ],
)
def test_balanced_end(tokens: int, matched: int, prefill: EngineLoad, decode: EngineLoad, end: int) -> None:
    assert balanced_end(tokens, matched, prefill, decode) == end


def test_what_is_known_beyond_the_loads() -> None:
    loads = engine(400, 100), engine(0, 100)  # 400 and 0 are what they told
    assert balanced_end(1000, 0, *loads) == 300
    # (100 + e) / 100 == (300 + 1000 - e) / 100
    assert balanced_end(1000, 0, *loads, queued=(100.0, 300.0)) == 600
    # (100 + e) / 100 == 2 + (300 + 1000 - e) / 100: outputs go on for 2 s
    assert balanced_end(1000, 0, *loads, queued=(100.0, 300.0), decoding=2.0) == 700
    assert balanced_end(1000, 0, *loads, decoding=60.0) == 999


def test_how_long_outputs_go_on() -> None:
    load = EngineLoad(decode_step_ms=20.0)
    assert decoding_s(load, 0) == 0.0
    assert decoding_s(load, 1, 100) == pytest.approx(50 * 0.02)  # amid its output
    assert decoding_s(load, 3, 100) == pytest.approx(75 * 0.02)  # the longest rest of three
    assert decoding_s(load, 1, 100_000) == pytest.approx(128 * 0.02)  # that is a bound, not an output
    assert decoding_s(EngineLoad(), 5) == 0.0


@given(st.integers(1, 600), st.integers(0, 700), engine_loads, engine_loads, st.floats(0, 20))
def test_no_other_split_is_done_sooner(
    tokens: int, matched: int, prefill: EngineLoad, decode: EngineLoad, decoding: float
) -> None:
    """Of all legal splits the one chosen has its slower engine done first, within one token's work."""
    end = balanced_end(tokens, matched, prefill, decode, decoding=decoding)
    assert 0 <= end <= tokens - 1
    matched = min(matched, tokens - 1)
    if matched >= 0.9 * tokens:
        assert end == matched
        return
    assert end >= matched

    def done(split: int) -> float:
        first = (prefill.queued_prefill_tokens + split - matched) / prefill.prefill_tokens_per_s
        second = (decode.queued_prefill_tokens + tokens - split) / decode.prefill_tokens_per_s + decoding
        return max(first, second)

    best = min(map(done, range(matched, tokens)))
    one_token = max(1 / prefill.prefill_tokens_per_s, 1 / decode.prefill_tokens_per_s)
    assert done(end) <= best + one_token * 1.001
