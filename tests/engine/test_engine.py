"""The engine over a runner whose output depends on every stored K/V row: what one engine says."""

from __future__ import annotations

import pytest

from microserving.engine.fake_runner import FakeRunner
from microserving.protocol.generation import SamplingParams

from .harness import (
    GREEDY,
    SEEDED,
    Node,
    alone,
    greedy_reference,
    prompt_of,
)

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 50]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 256])
def test_tokens_are_the_models_whatever_the_chunks(length: int, chunk: int) -> None:
    node = Node(chunk_size_tokens=chunk)
    outcome = node.submit(prompt_of(length), 8)
    node.run()
    assert outcome.tokens == greedy_reference(prompt_of(length), 8)
    assert outcome.text == "".join(f"<{token}>" for token in outcome.tokens)
    assert (outcome.chunks[-1].prompt_tokens, outcome.finish_reason) == (length, "length")
    assert node.engine.load().counters.prompt_tokens_computed == length
    assert node.engine.load().counters.output_tokens == 8
    node.assert_idle()


def test_sampling_is_repeatable_and_seeds_differ() -> None:
    prompt = prompt_of(20)
    assert alone(prompt, 16, SEEDED) == alone(prompt, 16, SEEDED)
    assert alone(prompt, 16, SEEDED) != alone(prompt, 16, SamplingParams(temperature=0.8, seed=4321))


@pytest.mark.parametrize("batch", [2, 8])
def test_eight_at_once_say_what_each_says_alone(batch: int) -> None:
    prompts = [prompt_of(3 + 11 * i, salt=i) for i in range(8)]
    samplings = [GREEDY if i % 2 else SamplingParams(temperature=0.9, top_p=0.9, seed=i) for i in range(8)]
    node = Node(chunk_size_tokens=16, max_batch_size=batch)
    outcomes = [node.submit(p, 4 + i, s) for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))]
    node.run()
    for i, outcome in enumerate(outcomes):
        assert outcome.tokens == alone(prompts[i], 4 + i, samplings[i])
    node.assert_idle()


def test_eos_stop_ids_and_stop_strings_end_a_generation() -> None:
    prompt = prompt_of(10)
    tokens = alone(prompt, 8)
    node = Node(eos=[tokens[3]])
    by_eos = node.submit(prompt)
    ignoring = node.submit(prompt, ignore_eos=True)
    by_id = node.submit(prompt, stop_token_ids=(tokens[2],))
    by_text = node.submit(prompt, stop=(f">{f'<{tokens[2]}>'}",))
    node.run()
    assert (by_eos.tokens, by_eos.finish_reason) == (tokens[:4], "stop")
    assert by_eos.text == "".join(f"<{token}>" for token in tokens[:3])
    assert (ignoring.tokens, ignoring.finish_reason) == (tokens, "length")
    assert (by_id.tokens, by_id.finish_reason) == (tokens[:3], "stop")
    assert by_text.text == f"<{tokens[0]}><{tokens[1]}"
    node.assert_idle()


@pytest.mark.case("PD-30")
@pytest.mark.parametrize("most", [1, 2, 3])
def test_max_tokens_is_exact(most: int) -> None:
    assert alone(prompt_of(20), most) == greedy_reference(prompt_of(20), most)


def test_without_max_tokens_it_goes_to_the_context_limit() -> None:
    node = Node(max_context=40)
    outcome = node.submit(prompt_of(20), None)
    node.run()
    assert (len(outcome.tokens), outcome.finish_reason) == (20, "length")


def test_a_small_pool_is_the_context_limit_and_can_be_filled() -> None:
    node = Node(FakeRunner(total_pages=3))
    assert node.engine.max_context == 48
    outcome = node.submit(prompt_of(20), None)
    node.run()
    assert outcome.tokens == greedy_reference(prompt_of(20), 28)
