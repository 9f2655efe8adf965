"""Two engines, a hand-off between them, and pools that are too small for all that is wanted."""

from __future__ import annotations

from itertools import pairwise

import pytest

from microserving.engine.fake_runner import FakeRunner
from microserving.errors import (
    KVExhausted,
    Overloaded,
)
from microserving.protocol.generation import SamplingParams

from .harness import (
    GREEDY,
    KV_BYTES,
    SEEDED,
    Clock,
    Node,
    alone,
    hand_over,
    prompt_of,
)

LENGTHS = [1, 2, 15, 16, 17, 31, 33, 50]


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


@pytest.mark.parametrize("cache", ["off", "radix"])
def test_a_preempted_send_sends_every_row_once(cache: str) -> None:
    prefill = Node(FakeRunner(total_pages=6), chunk_size_tokens=1, prefix_cache=cache)
    decode = Node()
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
    assert (sent.done.tokens_computed > 45) == (cache == "off"), "what it had computed was found again"
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
