"""Log-probabilities: right, and the same in every batch, chunk, cache state, after a hand-off, a preemption, a resume."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from microserving.engine.fake_runner import FakeRunner
from microserving.engine.logprobs import ROWS_AT_ONCE, token_logprob
from microserving.engine.runner import RunnerChunk, StepOutput
from microserving.errors import InternalError, InvalidRequest
from microserving.protocol.generation import Grammar, SamplingParams, TokenLogprob
from microserving.protocol.logprobs import LOWEST

from .harness import GREEDY, SEEDED, Node, Outcome, alone, hand_over, prompt_of

SCORED = {"logprobs": 3, "prompt_logprobs": 2}


def output_scores(outcome: Outcome) -> list[TokenLogprob]:
    scores = [token for chunk in outcome.chunks for token in chunk.logprobs]
    assert [token.token_id for token in scores] == outcome.tokens
    return scores


def prompt_scores(outcome: Outcome) -> tuple[TokenLogprob | None, ...]:
    """They come once, with the first chunk."""
    first, *others = outcome.chunks
    assert first.prompt_logprobs is not None
    assert all(chunk.prompt_logprobs is None for chunk in others)
    return first.prompt_logprobs


def expected(logits: np.ndarray, token: int, count: int) -> TokenLogprob:
    """By brute force, with Python's own floats."""
    values = [float(value) for value in logits]
    total = math.fsum(math.exp(value - max(values)) for value in values)
    scores = [value - max(values) - math.log(total) for value in values]
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    top = tuple((i, scores[i]) for i in order[:count])
    return TokenLogprob(token, scores[token], top, order.index(token) + 1)


def same(found: TokenLogprob | None, wanted: TokenLogprob) -> None:
    assert found is not None
    assert (found.token_id, found.rank) == (wanted.token_id, wanted.rank)
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-12)
    assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
    assert [score for _, score in found.top] == pytest.approx([score for _, score in wanted.top], abs=1e-12)


def test_one_row_against_brute_force_with_equal_logits() -> None:
    row = np.array([0.5, 2.0, -1.0, 2.0, 0.5, -np.inf], np.float32)
    for token in range(5):
        for count in (0, 1, 2, 3, 5):
            same(token_logprob(row, token, count), expected(row, token, count))
    assert token_logprob(row, 5, 0).logprob == LOWEST
    for bad in (np.nan, np.inf):
        with pytest.raises(InternalError):
            token_logprob(np.array([1.0, bad], np.float32), 0, 1)
    with pytest.raises(InternalError):
        token_logprob(np.full(3, -np.inf, np.float32), 0, 1)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, SamplingParams(temperature=0.01, top_p=0.3)])
def test_an_engine_against_whole_runs_of_the_model(sampling: SamplingParams) -> None:
    prompt, node = prompt_of(37), Node()
    outcome = node.submit(prompt, 6, sampling, more=SCORED)
    node.run()
    assert outcome.tokens == alone(prompt, 6, sampling)
    tokens = prompt + outcome.tokens
    logits = FakeRunner().run([RunnerChunk(tokens, 0, range(64), logits=len(tokens))]).logits
    first, *others = prompt_scores(outcome)
    assert first is None
    for position, found in enumerate(others, 1):
        same(found, expected(logits[position - 1], prompt[position], 2))
    for position, found in enumerate(output_scores(outcome), len(prompt)):
        same(found, expected(logits[position - 1], tokens[position], 3))
    node.assert_idle()


def test_the_same_bits_in_company_in_other_chunks_and_with_a_full_cache() -> None:
    prompt = prompt_of(200)
    node = Node()
    lonely = node.submit(prompt, 6, SEEDED, more=SCORED)
    node.run()
    busy = Node(chunk_size_tokens=23)
    others = [busy.submit(prompt_of(90, salt), 9) for salt in (1, 2)]
    busy.submit(prompt, 1)
    busy.run()
    again = [
        busy.submit(prompt, 6, SEEDED, more=SCORED),
        busy.submit(prompt, 6, SEEDED, more={"logprobs": 3}),
    ]
    others += [busy.submit(prompt_of(50, salt), 9) for salt in (3, 4)]
    busy.run()
    for outcome in again:
        assert output_scores(outcome) == output_scores(lonely)
    assert prompt_scores(again[0]) == prompt_scores(lonely)
    assert again[0].chunks[-1].cached_tokens == 0
    assert again[1].chunks[-1].cached_tokens > 0
    assert all(outcome.ended for outcome in others)
    busy.assert_idle()


def test_what_was_received_is_not_used_for_a_scored_prompt() -> None:
    prompt, prefill, decode = prompt_of(70), Node(), Node()
    lonely = Node()
    wanted = lonely.submit(prompt, 5, more=SCORED)
    lonely.run()
    hand_over(prefill, decode, "r", prompt, 69)
    outcome = decode.submit(prompt, 5, request_id="r", begin=69, more=SCORED)
    decode.run()
    assert output_scores(outcome) == output_scores(wanted)
    assert prompt_scores(outcome) == prompt_scores(wanted)
    decode.assert_idle()


def test_preempted_and_computed_again() -> None:
    prompts = [prompt_of(60, salt) for salt in range(4)]
    node = Node(FakeRunner(total_pages=18))
    outcomes = [node.submit(prompt, 40, SEEDED, more=SCORED) for prompt in prompts]
    node.run()
    assert node.engine.load().counters.preemptions > 0
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        quiet = Node()
        wanted = quiet.submit(prompt, 40, SEEDED, more=SCORED)
        quiet.run()
        assert output_scores(outcome) == output_scores(wanted)
        assert prompt_scores(outcome) == prompt_scores(wanted)
    node.assert_idle()


def test_a_resumed_output_repeats_none_and_misses_none() -> None:
    prompt, node = prompt_of(30), Node()
    whole = node.submit(prompt, 10, SEEDED, more=SCORED)
    node.run()
    for cut in (1, 4, 9):
        given = tuple(whole.tokens[:cut])
        rest = node.submit(prompt, 10, SEEDED, more={**SCORED, "resume_output_ids": given})
        node.run()
        assert output_scores(rest) == output_scores(whole)[cut:]
        assert all(chunk.prompt_logprobs is None for chunk in rest.chunks)


@pytest.mark.case("API-14")
@pytest.mark.parametrize(
    "sampling",
    [
        SEEDED,
        SamplingParams(temperature=0.01, top_p=0.3, seed=4),
        SamplingParams(top_k=1, logit_bias={101: -100.0}),
    ],
)
def test_a_grammar_changes_no_score(sampling: SamplingParams) -> None:
    """They are the model's, also of what it might not say: numbers all of them, through a resume too."""
    prompt, letters = prompt_of(30), b"abcdef!"
    more = {"grammar": Grammar("regex", "[a-f]{3,5}!"), "logprobs": 5}
    node = Node(eos=(0,))
    outcome = node.submit(prompt, 9, sampling, more=more)
    node.run()
    tokens = prompt + outcome.tokens
    assert set(outcome.tokens) <= set(letters)
    logits = FakeRunner().run([RunnerChunk(tokens, 0, range(64), logits=len(tokens))]).logits
    scores = output_scores(outcome)
    for position, found in enumerate(scores, len(prompt)):
        same(found, expected(logits[position - 1], tokens[position], 5))
    assert {token for score in scores for token, _ in score.top} - set(letters)
    assert all(LOWEST <= value <= 0 for score in scores for _, value in score.top)
    for cut in range(1, len(scores)):
        rest = node.submit(
            prompt, 9, sampling, more={**more, "resume_output_ids": tuple(outcome.tokens[:cut])}
        )
        node.run()
        assert output_scores(rest) == scores[cut:]
    node.assert_idle()


@pytest.mark.case("API-17")
@pytest.mark.parametrize("length", [1, 2, 300])
def test_a_prompt_alone(length: int) -> None:
    prompt, node = prompt_of(length), Node()
    rows: list[int] = []
    node.runner.before_run = lambda chunks: rows.append(sum(chunk.logits for chunk in chunks))
    outcome = node.submit(prompt, 0, more={"prompt_logprobs": 0})
    node.run()
    assert sum(rows) == (length if length > 1 else 0)  # the last one comes with those before it
    assert max(rows) <= ROWS_AT_ONCE
    assert (outcome.tokens, outcome.text, outcome.finish_reason) == ([], "", "length")
    assert [token and token.token_id for token in prompt_scores(outcome)] == [None, *prompt[1:]]
    assert node.engine.load().counters.output_tokens == 0
    node.assert_idle()


def test_no_output_and_no_scores_fill_the_cache() -> None:
    prompt, node = prompt_of(64), Node()
    outcome = node.submit(prompt, 0)
    node.run()
    assert (outcome.tokens, outcome.finish_reason) == ([], "length")
    assert node.engine.match_prefix(prompt) == 64


class NotFinite(FakeRunner):
    """NaN in every row of logits behind a token 13."""

    def run(self, chunks: Sequence[RunnerChunk]) -> StepOutput:
        output = super().run(chunks)
        wanted = [
            token for chunk in chunks for token in chunk.token_ids[len(chunk.token_ids) - chunk.logits :]
        ]
        output.logits[[row for row, token in enumerate(wanted) if token == 13], 5] = np.nan
        return output


def test_a_prompt_whose_logits_are_not_finite_ends_alone() -> None:
    node = Node(NotFinite())
    bad = node.submit([1, 13, 2], more=SCORED)
    good = node.submit([1, 2, 3], more=SCORED)
    node.run()
    assert isinstance(bad.error, InternalError)
    assert good.tokens == alone([1, 2, 3])
    node.assert_idle()


def test_min_tokens_hold_back_every_end() -> None:
    prompt = prompt_of(12)
    eos = alone(prompt, 3)[2]
    for min_tokens in (0, 3, 6):
        node = Node(eos=[eos])
        outcome = node.submit(prompt, 12, min_tokens=min_tokens, stop=("<",))
        node.run()
        if min_tokens == 0:
            assert (len(outcome.tokens), outcome.text) == (1, "")  # the first "<" is a stop
        else:
            assert len(outcome.tokens) == min_tokens
            assert outcome.text.count("<") == min_tokens - 1
        assert eos not in outcome.tokens[:min_tokens]
    node = Node()
    with pytest.raises(InvalidRequest) as refused:
        node.submit(prompt, 3, min_tokens=4)
    assert refused.value.param == "min_tokens"
