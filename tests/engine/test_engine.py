"""The engine over a runner whose output depends on every stored K/V row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from microserving.engine.fake_runner import FakeRunner
from microserving.engine.runner import RunnerChunk, StepOutput
from microserving.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InternalError,
    InvalidRequest,
    KVExhausted,
    LeaseError,
    MicroservingError,
    Overloaded,
    RequestAborted,
    RequestConflict,
)
from microserving.protocol.generation import GenerationRequest, SamplingParams, StopParams
from microserving.transports.base import Lease

from .harness import GREEDY, KV_BYTES, SEEDED, Clock, Node, Outcome, greedy_reference, hand_over, prompt_of

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 50]


def alone(prompt: Sequence[int], max_tokens: int = 8, sampling: SamplingParams = GREEDY) -> list[int]:
    """The tokens of a fresh engine that does nothing else."""
    node = Node()
    outcome = node.submit(prompt, max_tokens, sampling)
    node.run()
    return outcome.tokens


# --- what one engine says ------------------------------------------------------------------------------------


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


# --- hand-off --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_split_over_two_engines_says_the_same(length: int, sampling: SamplingParams) -> None:
    prompt = prompt_of(length, salt=5)
    expected = alone(prompt, 6, sampling)
    for end in range(length + 1):
        prefill = Node(chunk_size_tokens=16)
        decode = Node(FakeRunner(total_pages=40), chunk_size_tokens=16)
        decode.submit(prompt_of(9), 2)  # so that the pools' pages differ
        decode.run()
        done = hand_over(prefill, decode, "r", prompt, end)
        outcome = decode.submit(prompt, 6, sampling, request_id="r", begin=end)
        decode.run()
        assert outcome.tokens == expected, f"end {end}"
        assert (done.tokens_computed, done.tokens_sent, done.bytes_sent) == (end, end, end * KV_BYTES)
        sender, receiver = prefill.engine.load().counters, decode.engine.load().counters
        assert (sender.prompt_tokens_computed, sender.tokens_sent, sender.bytes_sent) == (
            end,
            end,
            end * KV_BYTES,
        )
        assert receiver.prompt_tokens_computed == 9 + length - min(end, length - 1)
        assert receiver.tokens_received == end
        prefill.assert_idle()
        decode.assert_idle()


def test_a_row_that_did_not_arrive_changes_the_output() -> None:
    """The fake would notice: this is what makes the parity tests above worth something."""
    prompt = prompt_of(33)
    for missing in (0, 15, 31):
        prefill, decode = Node(), Node()
        reservation, lease = decode.reserve_and_grant("r", prompt, 32)
        reservation.slots[missing] = -1
        prefill.send(decode, reservation, prompt)
        prefill.run()
        decode.engine.end_write(lease, ok=True)
        outcome = decode.submit(prompt, 6, request_id="r")
        decode.run()
        assert outcome.tokens != alone(prompt, 6)


def test_a_begin_below_the_cache_uses_the_cache() -> None:
    prompt = prompt_of(30)
    for begin in (None, 0, 5, -10):
        prefill, decode = Node(), Node()
        hand_over(prefill, decode, "r", prompt, 20)
        outcome = decode.submit(prompt, 4, request_id="r", begin=begin)
        decode.run()
        assert outcome.tokens == alone(prompt, 4)
        assert decode.engine.load().counters.prompt_tokens_computed == 10


def test_eight_hand_offs_at_once() -> None:
    prefill, decode = Node(chunk_size_tokens=24), Node(chunk_size_tokens=24)
    prompts = [prompt_of(4 + 9 * i, salt=i) for i in range(8)]
    granted = [decode.reserve_and_grant(f"r{i}", p, len(p) - 1 - i % 3) for i, p in enumerate(prompts)]
    sent = [prefill.send(decode, r, p) for (r, _), p in zip(granted, prompts, strict=True)]
    beside = prefill.submit(prompt_of(40), 6)  # a hybrid engine generates meanwhile
    prefill.run()
    assert beside.tokens == alone(prompt_of(40), 6)
    for i, (reservation, lease) in enumerate(granted):
        done = sent[i].done
        assert done is not None
        assert (done.tokens_computed, done.tokens_sent) == (reservation.end, reservation.end)
        decode.engine.end_write(lease, ok=True)
    outcomes = [decode.submit(p, 5, SEEDED, request_id=f"r{i}") for i, p in enumerate(prompts)]
    decode.run()
    assert [outcome.tokens for outcome in outcomes] == [alone(p, 5, SEEDED) for p in prompts]
    prefill.assert_idle()
    decode.assert_idle()


def test_a_send_says_when_each_step_ran() -> None:
    prefill, decode = Node(chunk_size_tokens=16), Node()
    done = hand_over(prefill, decode, "r", prompt_of(40), 40)
    assert len(done.steps) == 3
    for times in done.steps:
        assert times.layers is not None
        assert (
            times.begin_ns
            <= times.layers.put_begin[0]
            <= times.layers.put_end[0]
            <= times.layers.layer_end[0]
        )
        assert times.layers.layer_end[-1] <= times.end_ns
    for before, after in pairwise(done.steps):
        assert before.end_ns <= after.begin_ns


def test_a_send_of_nothing_is_done_at_once() -> None:
    prefill, decode = Node(), Node()
    reservation, _ = decode.reserve_and_grant("r", [1], 0)
    sent = prefill.send(decode, reservation, [1])
    assert sent.done is not None
    assert (sent.done.tokens_computed, sent.done.tokens_sent, sent.done.steps) == (0, 0, ())
    outcome = decode.submit([1], 4, request_id="r", begin=0)
    decode.run()
    assert outcome.tokens == alone([1], 4)


def test_sends_to_two_engines_run_in_different_steps() -> None:
    prefill, one, two = Node(), Node(), Node()
    prompts = [prompt_of(20, salt=i) for i in range(4)]
    sent, leases = [], []
    for i, prompt in enumerate(prompts):
        to = (one, two)[i % 2]
        reservation, lease = to.reserve_and_grant(f"r{i}", prompt, 20)
        leases.append((to, lease))
        sent.append(prefill.send(to, reservation, prompt, destination=f"decode-{i % 2}"))
    assert prefill.run() == 2
    assert all(outcome.done for outcome in sent)
    for i, (to, lease) in enumerate(leases):
        to.engine.end_write(lease, ok=True)
        outcome = to.submit(prompts[i], 4, request_id=f"r{i}")
        to.run()
        assert outcome.tokens == alone(prompts[i], 4)


def test_the_same_engine_can_send_to_itself() -> None:
    node = Node()
    prompt = prompt_of(30)
    hand_over(node, node, "r", prompt, 29)
    outcome = node.submit(prompt, 4, request_id="r", begin=29)
    node.run()
    assert outcome.tokens == alone(prompt, 4)


# --- too few pages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [5, 6, 8])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preemption_changes_no_token(pages: int, sampling: SamplingParams) -> None:
    node = Node(FakeRunner(total_pages=pages), chunk_size_tokens=32)
    prompts = [prompt_of(10 + 3 * i, salt=i) for i in range(5)]
    outcomes = [node.submit(prompt, 50, sampling) for prompt in prompts]
    node.run()
    assert [outcome.tokens for outcome in outcomes] == [alone(prompt, 50, sampling) for prompt in prompts]
    counters = node.engine.load().counters
    assert counters.preemptions > 0
    assert counters.recomputed_tokens > 0
    assert counters.output_tokens == 250
    assert counters.prompt_tokens_computed > sum(map(len, prompts))  # recomputed ones count again
    node.assert_idle()


def test_a_preempted_received_sequence_computes_all_of_its_prompt_here() -> None:
    """Also the case that its K/V was received and never used."""
    prompts = [prompt_of(31, salt=i) for i in range(2)]
    prefill, decode = Node(), Node(FakeRunner(total_pages=5))
    for i, prompt in enumerate(prompts):
        hand_over(prefill, decode, f"r{i}", prompt, 30)
    outcomes = [decode.submit(prompt, 40, request_id=f"r{i}") for i, prompt in enumerate(prompts)]
    decode.run()
    assert [outcome.tokens for outcome in outcomes] == [alone(prompt, 40) for prompt in prompts]
    assert decode.engine.load().counters.preemptions > 0
    decode.assert_idle()


def test_a_preempted_send_sends_every_row_once() -> None:
    prefill, decode = Node(FakeRunner(total_pages=6), chunk_size_tokens=1), Node()
    sent_slots: list[int] = []
    prefill.runner.before_run = lambda chunks: sent_slots.extend(
        int(slot) for c in chunks if c.put is not None for slot in c.put.slots if slot >= 0
    )
    old = prefill.submit(prompt_of(15), 40)
    while len(old.chunks) < 2:
        prefill.engine.step()  # then it decodes, and will need more pages than are left
    prompt = prompt_of(45, salt=3)
    reservation, lease = decode.reserve_and_grant("r", prompt, 45)
    sent = prefill.send(decode, reservation, prompt)
    prefill.run()
    assert old.tokens == alone(prompt_of(15), 40)
    assert sent.done is not None
    assert prefill.engine.load().counters.preemptions > 0
    assert sorted(sent_slots) == sorted(reservation.slots)
    assert sent.done.tokens_computed > 45
    assert (sent.done.tokens_sent, prefill.engine.load().counters.tokens_sent) == (45, 45)
    decode.engine.end_write(lease, ok=True)
    outcome = decode.submit(prompt, 4, request_id="r")
    decode.run()
    assert outcome.tokens == alone(prompt, 4)


def test_no_pages_for_a_reservation() -> None:
    node = Node(FakeRunner(total_pages=4), clock=(clock := Clock()), lease_ttl_s=10)
    node.engine.prep_recv("a", tuple(prompt_of(40)), 40)
    with pytest.raises(KVExhausted) as refused:
        node.engine.prep_recv("b", tuple(prompt_of(40)), 40)
    assert refused.value.retry_after_s
    freed = node.engine.pages_freed
    clock.now += 10
    node.engine.step()
    assert node.engine.pages_freed > freed
    node.engine.prep_recv("b", tuple(prompt_of(40)), 40)


def test_a_generation_waits_while_leases_hold_all_pages_and_then_goes_on() -> None:
    node = Node(FakeRunner(total_pages=4), clock=(clock := Clock()), lease_ttl_s=10)
    outcome = node.submit(prompt_of(15), 20)
    node.engine.step()
    node.engine.prep_recv("r", tuple(prompt_of(40)), 32)
    node.run()
    assert not outcome.ended
    clock.now += 10
    node.run()
    assert outcome.tokens == alone(prompt_of(15), 20)
    node.assert_idle()


def test_sends_and_leases_that_wait_for_each_other_do_not_wait_for_ever() -> None:
    """Two engines that send to each other, each pool full of leases for the other's send; the router renews them."""
    clock = Clock()
    one, two = (Node(FakeRunner(total_pages=4), clock=clock, reserve_wait_s=5) for _ in range(2))
    prompt = prompt_of(40)
    sent, leases = [], []
    for sender, receiver in ((one, two), (two, one)):
        reservation, lease = receiver.reserve_and_grant("r", prompt, 40)
        sent.append(sender.send(receiver, reservation, prompt))
        leases.append(lease)
    for _ in range(4):
        one.run()
        two.run()
        assert not any(outcome.ended for outcome in sent)
        clock.now += 1
        assert one.engine.renew("r") == two.engine.renew("r") == 30.0
    clock.now += 1
    one.run()
    assert isinstance(sent[0].error, KVExhausted)
    assert sent[0].error.retry_after_s
    two.engine.end_write(leases[0], ok=False)  # as the hand-off tells the receiver
    two.run()
    assert sent[1].done is not None
    one.engine.end_write(leases[1], ok=True)
    outcome = one.submit(prompt, 4, request_id="r")
    one.run()
    assert outcome.tokens == alone(prompt, 4)
    one.assert_idle()
    two.assert_idle()


def test_too_many_requests() -> None:
    node = Node(max_sequences=2)
    node.submit([1])
    node.submit([1])
    with pytest.raises(Overloaded) as refused:
        node.submit([1])
    assert refused.value.retry_after_s
    node.run()
    node.assert_idle()


# --- aborts ----------------------------------------------------------------------------------------------------


def steps_of(scenario: Callable[[Node], Sequence[Outcome]]) -> int:
    node = Node(chunk_size_tokens=16)
    scenario(node)
    return node.run()


def two_generations(node: Node) -> list[Outcome]:
    return [
        node.submit(prompt_of(40, salt=1), 6, request_id="victim"),
        node.submit(prompt_of(25, salt=2), 9, request_id="other"),
    ]


@pytest.mark.case("PD-09")
@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "inside a step"])
def test_an_abort_at_any_step_frees_all_and_disturbs_nobody(inside: bool) -> None:
    for at in range(steps_of(two_generations)):
        node = Node(chunk_size_tokens=16)
        victim, other = two_generations(node)
        for _ in range(at):
            node.engine.step()
        was_over = victim.ended
        if inside:
            node.runner.before_run = lambda chunks, node=node: node.engine.abort("victim")  # type: ignore[misc]
            node.engine.step()
            node.runner.before_run = None
        else:
            assert node.engine.abort("victim") == (not was_over)
        assert victim.ended
        assert isinstance(victim.error, RequestAborted) == (not was_over)
        assert not node.engine.abort("victim")
        node.run()
        assert other.tokens == alone(prompt_of(25, salt=2), 9)
        assert node.engine.load().counters.aborts == (not was_over)
        node.assert_idle()


def test_an_id_is_free_again_while_its_aborted_sequence_is_still_in_the_step() -> None:
    node = Node()
    node.submit(prompt_of(20), request_id="r")
    again: list[Outcome] = []

    def abort_and_submit(chunks: Sequence[RunnerChunk]) -> None:
        node.runner.before_run = None
        node.engine.abort("r")
        again.append(node.submit(prompt_of(33), request_id="r"))

    node.runner.before_run = abort_and_submit
    node.run()
    assert again[0].tokens == alone(prompt_of(33))
    node.assert_idle()


@pytest.mark.case("PD-13")
def test_an_aborted_send_is_told_after_its_last_put() -> None:
    prefill, decode = Node(chunk_size_tokens=8), Node()
    prompt = prompt_of(40)
    reservation, lease = decode.reserve_and_grant("r", prompt, 40)
    sent = prefill.send(decode, reservation, prompt)
    prefill.engine.step()

    seen: list[bool] = []

    def abort(chunks: Sequence[RunnerChunk]) -> None:
        seen.extend([prefill.engine.abort("r"), sent.ended, prefill.engine.abort("r")])

    prefill.runner.before_run = abort
    prefill.engine.step()
    prefill.runner.before_run = None
    assert seen == [True, False, False], "it is told when the puts of this step are over"
    assert isinstance(sent.error, RequestAborted)
    prefill.assert_idle()
    assert prefill.engine.load().counters.requests_finished["abort"] == 1
    decode.engine.end_write(lease, ok=False)
    decode.assert_idle()
    with pytest.raises(LeaseError, match="transfer failed"):
        decode.submit(prompt, request_id="r")


def test_aborting_a_reservation_under_a_writer_quarantines_its_pages() -> None:
    prefill, decode = Node(chunk_size_tokens=8), Node(FakeRunner(total_pages=4))
    prompt = prompt_of(40)
    reservation, lease = decode.reserve_and_grant("r", prompt, 40)
    sent = prefill.send(decode, reservation, prompt)
    prefill.engine.step()
    revoked: list[int] = []
    decode.engine.on_revoked = revoked.append
    assert decode.engine.abort("r")
    assert revoked == [lease.lease_id]
    load = decode.engine.load()
    assert (load.quarantined_pages, load.reserved_pages, load.free_pages, load.reserved) == (3, 0, 1, 0)
    beside = decode.submit(prompt_of(9), 4)
    prefill.run()  # the writer does not know yet, and writes on
    decode.run()
    assert beside.tokens == alone(prompt_of(9), 4)
    assert sent.done is not None
    decode.engine.end_write(lease, ok=True)
    decode.assert_idle()
    assert decode.engine.load().counters.tokens_received == 0


def test_aborting_what_is_not_there() -> None:
    node = Node()
    assert not node.engine.abort("nobody")
    assert not node.engine.abort_send("nobody")


def test_close_ends_everything_once() -> None:
    prefill, decode = Node(), Node()
    outcomes = [decode.submit(prompt_of(20), 8) for _ in range(3)]
    decode.engine.step()
    reservation, _ = decode.reserve_and_grant("r", prompt_of(20), 10)
    outcomes.append(decode.send(prefill, reservation, prompt_of(20)))
    decode.engine.close(EngineUnavailable("the engine has stopped"))
    decode.engine.close(EngineUnavailable("the engine has stopped"))
    assert all(isinstance(outcome.error, EngineUnavailable) for outcome in outcomes)
    with pytest.raises(EngineUnavailable):
        decode.submit([1])
    with pytest.raises(EngineUnavailable):
        decode.engine.prep_recv("s", (1,), 0)
    assert not decode.engine.step()


# --- faults ----------------------------------------------------------------------------------------------------


def test_a_step_that_fails_ends_its_own_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    node = Node(max_batch_size=2)
    first = [node.submit(prompt_of(20, salt=i), 4, request_id=f"first-{i}") for i in range(2)]
    later = node.submit(prompt_of(30), 4)

    def broken(chunks: Sequence[RunnerChunk]) -> None:
        raise RuntimeError("the model broke")

    node.runner.before_run = broken
    assert node.engine.step()
    node.runner.before_run = None
    for outcome in first:
        assert isinstance(outcome.error, InternalError)
        assert "broke" not in outcome.error.message
    node.run()
    assert later.tokens == alone(prompt_of(30), 4)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "first-0" in caplog.text
    assert "first-1" in caplog.text
    assert node.engine.load().counters.requests_finished == {
        "stop": 0,
        "length": 1,
        "sent": 0,
        "abort": 0,
        "error": 2,
    }
    node.assert_idle()


def test_a_listener_that_fails_costs_nobody_else_an_ending(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    heard: list[object] = []

    def deaf(item: object) -> None:
        heard.append(item)
        raise RuntimeError("cannot listen")

    request = GenerationRequest("deaf", (1, 2), GREEDY, StopParams(max_tokens=1))
    node.engine.submit(request, on_chunk=deaf)
    others = [node.submit(prompt_of(9, salt=i), 1) for i in range(2)]
    node.run()
    assert len(heard) == 1
    assert all(outcome.ended for outcome in others)
    assert "cannot listen" in caplog.text
    node.assert_idle()


def test_an_abort_inside_a_failing_step_ends_once() -> None:
    prefill, decode = Node(), Node()
    reservation, _ = decode.reserve_and_grant("s", prompt_of(20), 20)
    sent = prefill.send(decode, reservation, prompt_of(20))
    generation = prefill.submit(prompt_of(20), request_id="g")

    def broken(chunks: Sequence[RunnerChunk]) -> None:
        prefill.engine.abort("g")
        prefill.engine.abort("s")
        raise RuntimeError("the model broke")

    prefill.runner.before_run = broken
    prefill.engine.step()
    assert isinstance(sent.error, RequestAborted)
    assert isinstance(generation.error, RequestAborted)
    prefill.assert_idle()


class NotFinite(FakeRunner):
    """NaN in the logits of every sequence whose newest token is 13."""

    def run(self, chunks: Sequence[RunnerChunk]) -> StepOutput:
        output = super().run(chunks)
        wanted = [chunk for chunk in chunks if chunk.needs_logits]
        for row, chunk in enumerate(wanted):
            if chunk.token_ids[-1] == 13:
                output.logits[row, 5] = np.nan
        return output


def test_logits_that_are_not_finite_end_one_request() -> None:
    node = Node(NotFinite())
    bad, good = node.submit([1, 2, 13]), node.submit([1, 2, 3])
    node.run()
    assert isinstance(bad.error, InternalError)
    assert good.tokens == alone([1, 2, 3])
    node.assert_idle()


def test_a_token_without_text_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    expected = alone([1, 2, 3])
    bad, good = node.submit([4, 5, 6], request_id="bad"), node.submit([1, 2, 3])
    task = next(task for task in node.engine._tasks.values() if task.sequence.request_id == "bad")

    def broken(token: int) -> None:
        raise ValueError("no such token")

    monkeypatch.setattr(task, "output", type("Broken", (), {"put": staticmethod(broken)}))
    node.run()
    assert isinstance(bad.error, InternalError)
    assert good.tokens == expected
    node.assert_idle()


# --- what is refused -------------------------------------------------------------------------------------------


@pytest.mark.case("API-21")
@pytest.mark.parametrize(
    ("prompt", "changes", "error", "param"),
    [
        ([], {}, InvalidRequest, "prompt"),
        ([1, 256], {}, InvalidRequest, "prompt"),
        ([-1], {}, InvalidRequest, "prompt"),
        (prompt_of(64), {"max_tokens": None}, ContextLengthExceeded, "prompt"),
        (prompt_of(65), {"max_tokens": 1}, ContextLengthExceeded, "prompt"),
        (prompt_of(60), {"max_tokens": 5}, ContextLengthExceeded, "max_tokens"),
        ([1], {"max_tokens": 0}, InvalidRequest, "max_tokens"),
        ([1], {"max_tokens": -3}, InvalidRequest, "max_tokens"),
        ([1], {"begin": 2}, InvalidRequest, "begin"),
        ([1], {"begin": -2}, InvalidRequest, "begin"),
        ([1, 2], {"begin": 1}, InvalidRequest, "begin"),
        ([1, 2], {"begin": -1}, InvalidRequest, "begin"),
        ([1], {"sampling": SamplingParams(logit_bias={256: 1.0})}, InvalidRequest, "logit_bias"),
        ([1], {"sampling": SamplingParams(logit_bias={-1: 1.0})}, InvalidRequest, "logit_bias"),
    ],
)
def test_a_bad_generation_is_refused_and_leaves_nothing(
    prompt: list[int], changes: dict[str, Any], error: type[MicroservingError], param: str
) -> None:
    node = Node(max_context=64)
    with pytest.raises(error) as refused:
        node.submit(prompt, **changes)
    assert refused.value.param == param
    node.assert_idle()
    outcome = node.submit(prompt_of(60), 4)
    node.run()
    assert outcome.tokens == alone(prompt_of(60), 4)


@pytest.mark.parametrize(
    ("prompt", "end", "error", "param"),
    [
        ([], 0, InvalidRequest, "prompt"),
        ([300], 0, InvalidRequest, "prompt"),
        (prompt_of(64), 3, ContextLengthExceeded, "prompt"),
        (prompt_of(60), 61, InvalidRequest, "end"),
        (prompt_of(60), -61, InvalidRequest, "end"),
    ],
)
def test_a_bad_reservation_is_refused(
    prompt: list[int], end: int, error: type[MicroservingError], param: str
) -> None:
    node = Node(max_context=64)
    with pytest.raises(error) as refused:
        node.engine.prep_recv("r", tuple(prompt), end)
    assert refused.value.param == param
    node.assert_idle()


def test_an_end_beyond_the_prompt_says_by_how_much() -> None:
    with pytest.raises(InvalidRequest, match="end is 400, but the prompt has 90 tokens"):
        Node().engine.prep_recv("r", tuple(prompt_of(90)), 400)


def test_a_negative_end_counts_from_the_end() -> None:
    node = Node()
    reservation = node.engine.prep_recv("r", tuple(prompt_of(40)), -1)
    assert (reservation.end, reservation.prompt_length, reservation.prefix_matched_length) == (39, 40, 0)
    assert reservation.lease_ttl_s == 30.0
    assert len(reservation.slots) == 39
    assert reservation.slots.dtype == np.int32
    assert len(set(reservation.slots.tolist())) == 39
    offsets = [slot % 16 for slot in reservation.slots.tolist()]
    assert offsets == [position % 16 for position in range(39)]


@pytest.mark.case("PD-11")
@pytest.mark.parametrize(
    ("begin", "end", "slots", "param"),
    [
        (0, 21, 21, "end"),
        (5, 4, 0, "begin"),
        (-1, 4, 5, "begin"),
        (0, 10, 9, "kv_addr_info"),
        (0, -1, 0, "end"),
    ],
)
def test_a_bad_send_is_refused(begin: int, end: int, slots: int, param: str) -> None:
    from microserving.engine.jobs import SendJob

    node = Node()
    job = SendJob("r", tuple(prompt_of(20)), begin, end, node.pool, "d", np.zeros(slots, np.int32))
    with pytest.raises(InvalidRequest) as refused:
        node.engine.submit_send(job, Outcome())
    assert refused.value.param == param
    node.assert_idle()


def test_a_live_id_is_refused() -> None:
    node = Node()
    outcome = node.submit([1, 2], request_id="r")
    with pytest.raises(RequestConflict):
        node.submit([1, 2], request_id="r")
    with pytest.raises(RequestConflict):
        node.engine.prep_recv("r", (1, 2), 1)
    node.run()
    assert outcome.tokens == alone([1, 2])
    again = node.submit([1, 2], request_id="r")  # the id is free again
    node.run()
    assert again.tokens == outcome.tokens


def test_start_before_the_kv_arrived_is_refused_and_the_reservation_lives_on() -> None:
    prefill, decode = Node(), Node()
    prompt = prompt_of(20)
    reservation, lease = decode.reserve_and_grant("r", prompt, 19)
    with pytest.raises(LeaseError):
        decode.submit(prompt, request_id="r", begin=19)
    with pytest.raises(RequestConflict):
        decode.engine.prep_recv("r", tuple(prompt), 19)
    prefill.send(decode, reservation, prompt)
    prefill.run()
    decode.engine.end_write(lease, ok=True)
    with pytest.raises(InvalidRequest) as refused:
        decode.submit(prompt_of(20, salt=1), request_id="r", begin=19)
    assert refused.value.param == "prompt"
    with pytest.raises(InvalidRequest) as refused:
        decode.submit(prompt, request_id="r", begin=20)
    assert refused.value.param == "begin"
    outcome = decode.submit(prompt, request_id="r", begin=-1)
    decode.run()
    assert outcome.tokens == alone(prompt)


@pytest.mark.case("PD-03")
def test_an_expired_reservation_answers_409_and_an_unknown_id_is_new() -> None:
    node = Node(clock=(clock := Clock()), lease_ttl_s=10)
    prompt = tuple(prompt_of(20))
    reservation = node.engine.prep_recv("r", prompt, 19)
    clock.now += 5
    assert node.engine.renew("r") == 10.0
    clock.now += 9
    assert node.engine.load().reserved == 1
    clock.now += 1
    with pytest.raises(LeaseError, match="expired"):
        node.submit(prompt, request_id="r", begin=19)
    assert not node.engine.begin_write(Lease("e", "e", "r", reservation.lease_id))
    with pytest.raises(LeaseError):
        node.engine.renew("r")
    assert node.engine.load().counters.leases_expired == 1
    node.assert_idle()
    fresh = node.submit(prompt, request_id="s")
    node.run()
    assert fresh.tokens == alone(prompt)
    node.engine.prep_recv("r", prompt, 19)  # the id may be used for a new try


@pytest.mark.case("PD-03")
def test_a_lease_is_renewed_in_every_state_until_it_ends() -> None:
    """Issued, being written, arrived, committed: a prefill may take longer than the lease lives."""
    prefill, decode = Node(), Node(clock=(clock := Clock()), lease_ttl_s=10)
    prompt = tuple(prompt_of(20))

    def renew_late() -> None:
        clock.now += 9
        assert decode.engine.renew("r") == 10.0
        clock.now += 9
        decode.engine.step()
        assert decode.engine.load().counters.leases_expired == 0

    reservation = decode.engine.prep_recv("r", prompt, 19)
    renew_late()
    lease = Lease("decode", "epoch", "r", reservation.lease_id)
    assert decode.engine.begin_write(lease)
    renew_late()
    prefill.send(decode, reservation, prompt)
    prefill.run()
    assert decode.engine.end_write(lease, ok=True)
    renew_late()
    outcome = decode.submit(prompt, request_id="r", begin=19)
    assert decode.engine.renew("r") == 10.0  # it generates: nothing can expire any more
    decode.run()
    assert outcome.tokens == alone(prompt)
    with pytest.raises(LeaseError):
        decode.engine.renew("r")
    decode.assert_idle()


def test_a_lease_that_expires_under_its_writer_can_neither_be_renewed_nor_started() -> None:
    node = Node(FakeRunner(total_pages=4), clock=(clock := Clock()), lease_ttl_s=10)
    prompt = tuple(prompt_of(40))
    _, lease = node.reserve_and_grant("r", prompt, 40)
    clock.now += 10
    revoked: list[int] = []
    node.engine.on_revoked = revoked.append
    with pytest.raises(LeaseError, match="expired"):
        node.engine.renew("r")
    assert node.engine.load().quarantined_pages == 3
    node.engine.step()
    node.engine.step()
    assert revoked == [lease.lease_id]
    again = node.engine.prep_recv("r", prompt[:16], 16)  # a new try, beside the old writer
    assert not node.engine.begin_write(lease)
    with pytest.raises(LeaseError, match="not arrived"):
        node.submit(prompt[:16], request_id="r")
    assert not node.engine.end_write(lease, ok=True)
    load = node.engine.load()
    assert (load.quarantined_pages, load.reserved_pages, load.free_pages) == (0, 1, 3)
    assert node.engine.begin_write(Lease("decode", "epoch", "r", again.lease_id))


def test_the_load_adds_up() -> None:
    node = Node(chunk_size_tokens=16)
    node.submit(prompt_of(20), 3)
    node.submit(prompt_of(40), 3)
    node.engine.prep_recv("r", tuple(prompt_of(20)), 20)
    load = node.engine.load()
    assert (load.waiting, load.running, load.reserved, load.queued_prefill_tokens) == (2, 0, 1, 60)
    assert (load.reserved_pages, load.running_pages, load.free_pages, load.total_pages) == (2, 0, 62, 64)
    node.engine.step()
    load = node.engine.load()
    assert (load.waiting, load.running, load.queued_prefill_tokens, load.running_pages) == (1, 1, 44, 2)
    assert load.prefill_tokens_per_s > 0
    assert load.decode_step_ms == 0.0
    node.run()
    assert node.engine.load().decode_step_ms > 0
    assert node.engine.match_prefix(prompt_of(20)) == 0
