"""Generations that go on where another engine stopped, that are given back, and whose time runs out."""

from __future__ import annotations

from typing import Any

import pytest

from microserving.engine.fake_runner import FakeRunner
from microserving.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, RequestConflict
from microserving.protocol.generation import SamplingParams

from .harness import GREEDY, SEEDED, Clock, Node, Outcome, alone, hand_over, prompt_of

PENALISED = SamplingParams(
    temperature=0.9, seed=99, presence_penalty=0.7, frequency_penalty=1.5, repetition_penalty=1.3, top_p=0.95
)
BIASED = SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias={7: 8.0, 8: 7.5})
"""Greedy, but the tokens repeat until their penalty has grown: a count that starts anew would show."""
PROMPT = prompt_of(37, salt=4)


def shown(outcome: Outcome, tokens: int) -> str:
    """The text of the chunks that tell no token behind the first ``tokens``."""
    told, text = 0, ""
    for chunk in outcome.chunks:
        told += len(chunk.token_ids)
        text += chunk.text if told <= tokens else ""
    return text


def resumed(node: Node, cut: list[int], sampling: SamplingParams, max_tokens: int, **stop: Any) -> Outcome:
    outcome = node.submit(PROMPT, max_tokens, sampling, more={"resume_output_ids": tuple(cut)}, **stop)
    node.run()
    node.assert_idle()
    return outcome


@pytest.mark.case("PD-34")
@pytest.mark.case("PD-36")
@pytest.mark.parametrize("cache", ["off", "radix"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED, PENALISED, BIASED])
def test_a_resumed_generation_is_the_uninterrupted_one(sampling: SamplingParams, cache: str) -> None:
    """At every token; with the cache on, also when this engine had computed some of it."""
    node = Node(chunk_size_tokens=16, prefix_cache=cache)
    full = node.submit(PROMPT, 14, sampling)
    node.run()
    assert len(full.tokens) == 14
    for cut in range(15):
        for engine in (node, Node(chunk_size_tokens=7, prefix_cache=cache)):
            rest = resumed(engine, full.tokens[:cut], sampling, 14)
            assert rest.tokens == full.tokens[cut:], cut
            assert shown(full, cut) + rest.text == full.text
            assert (rest.finish_reason, rest.chunks[-1].completion_tokens) == ("length", 14)
            assert rest.chunks[-1].prompt_tokens == len(PROMPT)


@pytest.mark.case("PD-36")
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
def test_a_stop_that_began_before_the_cut_is_found(sampling: SamplingParams) -> None:
    tokens = alone(PROMPT, 12, sampling)
    stop = f"{tokens[4]}><{tokens[5]}><{tokens[6]}"
    node = Node()
    full = node.submit(PROMPT, 12, sampling, stop=(stop, "never"))
    node.run()
    assert (full.finish_reason, full.tokens) == ("stop", tokens[:7])
    for cut in range(8):
        rest = resumed(Node(), tokens[:cut], sampling, 12, stop=(stop, "never"))
        assert (rest.tokens, rest.finish_reason) == (tokens[cut:7], "stop")
        assert shown(full, cut) + rest.text == full.text


def test_the_first_tokens_are_computed_once_and_counted_as_output() -> None:
    tokens = alone(PROMPT, 8)
    node = Node()
    rest = resumed(node, tokens[:5], GREEDY, 8)
    assert rest.tokens == tokens[5:]
    counters = node.engine.load().counters
    assert (counters.prompt_tokens_computed, counters.output_tokens) == (len(PROMPT), 3)


@pytest.mark.parametrize("end", [1, 20, 36, 37])
def test_a_resume_over_a_hand_off(end: int) -> None:
    tokens = alone(PROMPT, 10, SEEDED)
    for cut in (1, 5, 9):
        prefill, decode = Node(chunk_size_tokens=16), Node(chunk_size_tokens=16)
        hand_over(prefill, decode, "r", PROMPT, end)
        more = {"resume_output_ids": tuple(tokens[:cut])}
        outcome = decode.submit(PROMPT, 10, SEEDED, request_id="r", begin=end, more=more)
        decode.run()
        assert outcome.tokens == tokens[cut:]
        decode.assert_idle()


@pytest.mark.parametrize("ending", ["length", "eos", "stop"])
def test_an_output_that_had_ended_is_told_its_end_at_once(ending: str) -> None:
    tokens = alone(PROMPT, 4)
    node = Node(eos=[tokens[3]] if ending == "eos" else [])
    limit = 4 if ending == "length" else 9
    stop = (f"<{tokens[3]}>",) if ending == "stop" else ()
    node.reserve_and_grant("r", PROMPT, 0)
    more = {"resume_output_ids": tuple(tokens)}
    outcome = node.submit(PROMPT, limit, request_id="r", more=more, stop=stop)
    reason = "length" if ending == "length" else "stop"
    assert (outcome.tokens, outcome.text, outcome.finish_reason) == ([], "", reason)
    assert node.engine.load().counters.requests_finished[reason] == 1
    assert not node.engine.step()
    node.assert_idle()


def test_what_cannot_be_resumed() -> None:
    node = Node(max_context=45)
    for ids, limit, error, param in [
        ([256], 9, InvalidRequest, "resume_output_ids"),
        ([1, 2, 3], 2, InvalidRequest, "resume_output_ids"),
        ([1, 2, 3], 30, ContextLengthExceeded, "max_tokens"),
    ]:
        with pytest.raises(error) as refused:
            node.submit(PROMPT, limit, more={"resume_output_ids": tuple(ids)})
        assert refused.value.param == param
    node.submit(PROMPT, 4, request_id="live")
    with pytest.raises(RequestConflict):
        node.submit(PROMPT, 1, request_id="live", more={"resume_output_ids": (5,)})
    node.run()
    node.assert_idle()


# --- given back ------------------------------------------------------------------------------------------------------


@pytest.mark.case("PD-34")
@pytest.mark.parametrize("cache", ["off", "radix"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_preempted_generation_is_given_back_and_goes_on_elsewhere(
    sampling: SamplingParams, cache: str
) -> None:
    """Over a pool that is too small for all: what comes back goes on, on an engine of its own, as if never cut."""
    node = Node(FakeRunner(total_pages=6), chunk_size_tokens=32, prefix_cache=cache, memory_threshold=1.0)
    prompts = [prompt_of(10 + 3 * i, salt=i) for i in range(5)]
    stop = ("<2 never",)  # "<2" is held back
    more = {"preemption": "return"}
    outcomes = [node.submit(prompt, 50, sampling, more=more, stop=stop) for prompt in prompts]
    node.run()
    preempted = [outcome for outcome in outcomes if outcome.finish_reason == "preempt"]
    assert preempted
    counters = node.engine.load().counters
    assert counters.requests_finished["preempt"] == counters.preemptions == len(preempted)
    assert counters.recomputed_tokens == 0
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        fresh = Node()
        whole = fresh.submit(prompt, 50, sampling, stop=stop)
        fresh.run()
        tokens, text = outcome.tokens, outcome.text
        if outcome.finish_reason == "preempt":
            rest = fresh.submit(prompt, 50, sampling, more={"resume_output_ids": tuple(tokens)}, stop=stop)
            fresh.run()
            tokens, text = tokens + rest.tokens, text + rest.text
        assert (tokens, text) == (whole.tokens, whole.text)
    node.assert_idle()


def test_without_being_asked_nothing_is_given_back() -> None:
    node = Node(FakeRunner(total_pages=5), chunk_size_tokens=32)
    outcomes = [node.submit(prompt_of(20, salt=i), 40) for i in range(3)]
    node.run()
    assert node.engine.load().counters.preemptions > 0
    assert all(outcome.finish_reason == "length" for outcome in outcomes)


# --- deadlines -------------------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_generation_while_it_waits_and_while_it_runs() -> None:
    node = Node(max_batch_size=1, clock=(clock := Clock()))
    runs = node.submit(prompt_of(20), 100, more={"timeout_s": 10.0})
    waits = node.submit(prompt_of(20, salt=1), 4, more={"timeout_s": 5.0})
    patient = node.submit(prompt_of(20, salt=2), 4, more={"timeout_s": 60.0})
    for _ in range(3):
        node.engine.step()
    assert node.engine.next_deadline == clock.now + 5
    clock.now += 5
    node.engine.step()
    assert isinstance(waits.error, DeadlineExceeded)
    assert not runs.ended
    clock.now += 5
    node.run()
    assert isinstance(runs.error, DeadlineExceeded)
    assert runs.chunks
    assert patient.tokens == alone(prompt_of(20, salt=2), 4)
    assert node.engine.load().counters.requests_finished["deadline"] == 2
    node.assert_idle()


def test_a_deadline_ends_what_waits_for_leases_that_hold_all_pages() -> None:
    node = Node(FakeRunner(total_pages=4), clock=(clock := Clock()), prefix_cache="off")
    node.engine.prep_recv("r", tuple(prompt_of(64)[:63]), 63)
    outcome = node.submit(prompt_of(20), 4, more={"timeout_s": 2.0})
    assert not node.engine.step()
    clock.now += 2
    assert node.engine.step(), "it has something to say"
    assert isinstance(outcome.error, DeadlineExceeded)
    assert not node.engine.step()
