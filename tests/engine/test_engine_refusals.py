"""What the engine refuses, and that a refusal changes nothing; leases at their end; the load."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from microserving.engine.fake_runner import FakeRunner
from microserving.engine.runner import RunnerChunk
from microserving.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    LeaseError,
    MicroservingError,
    Overloaded,
    RequestConflict,
)
from microserving.protocol.generation import SamplingParams
from microserving.transports.base import Lease, LeaseGuard

from .harness import (
    Clock,
    Node,
    Outcome,
    alone,
    prompt_of,
)


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
    wanted = np.zeros(slots, np.int32)
    job = SendJob("r", tuple(prompt_of(20)), begin, end, node.pool, "d", wanted, LeaseGuard(0, 1))
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
    decode.grant(lease)
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
    assert node.engine.match_prefix([200, 201]) == 0
    assert node.engine.match_prefix([*prompt_of(20), 200]) == 20


@pytest.mark.case("PD-40")
def test_nothing_that_comes_waits_for_the_running_step() -> None:
    """The model's run calls everything a loop may call: were the lock held, it would wait for itself for ever."""
    node = Node(max_sequences=20)
    node.submit(prompt_of(40), 2)
    prompt = tuple(prompt_of(30, salt=1))
    done: list[str] = []

    def meanwhile(_: Sequence[RunnerChunk]) -> None:
        node.runner.before_run = None
        caller = threading.Thread(target=everything, daemon=True)
        caller.start()
        caller.join(20)

    def everything() -> None:
        node.submit(prompt_of(9), 2, request_id="new")
        node.submit(prompt_of(9), 2, request_id="gone")
        reservation, lease = node.reserve_and_grant("r", prompt, 20)
        node.send(node, reservation, prompt)
        assert node.engine.match_prefix(prompt) == 0
        assert node.engine.renew("r") > 0
        assert node.engine.load().waiting == 3
        assert node.engine.next_deadline is not None
        assert node.engine.timings().ttft.counts is not None
        assert node.engine.abort_send("r")
        assert node.engine.end_write(lease, ok=True)
        assert node.engine.commit("r") == 20
        assert node.engine.abort("gone")
        done.append("all")

    node.runner.before_run = meanwhile
    node.engine.step()
    assert done == ["all"]
    node.run()
    node.assert_idle()


def test_too_many_that_wait() -> None:
    node = Node(ingestion_queue_size=3, max_batch_size=1)
    running = node.submit(prompt_of(5), 30)
    node.engine.step()
    waiting = [node.submit(prompt_of(5), 2) for _ in range(3)]
    with pytest.raises(Overloaded) as refused:
        node.submit(prompt_of(5), 2)
    assert refused.value.retry_after_s
    with pytest.raises(Overloaded):
        node.engine.prep_recv("r", tuple(prompt_of(20)), 5)
    node.run()
    assert all(outcome.finish_reason == "length" for outcome in (running, *waiting))
    node.assert_idle()
