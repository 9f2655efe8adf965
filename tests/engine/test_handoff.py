"""`remote_send` and the descriptors: what is refused before anything moves, and who is told when something fails."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from microserving.engine.handoff import EngineIdentity, HandoffReceiver
from microserving.engine.jobs import SendJob
from microserving.errors import (
    ConfigError,
    EngineUnavailable,
    InternalError,
    InvalidRequest,
    LeaseError,
    TransferFailed,
)
from microserving.protocol.generation import RemoteSendResult
from microserving.protocol.kv_descriptor import decode_descriptor, encode_descriptor
from microserving.transports.fake import FakeTransport

from .handoff_setup import LAYOUT, MS, NOW, PAGES, PROMPT, SECRET, Setup


def test_the_descriptor_says_what_was_reserved(setup: Setup) -> None:
    descriptor = decode_descriptor(setup.descriptor(), SECRET)
    assert descriptor.segments == (2, 82, 14, 32, 24)
    assert descriptor.begin == 2
    assert descriptor.nbytes == 38 * 64
    assert descriptor.expires_at == NOW + 30
    assert (descriptor.engine_id, descriptor.epoch, descriptor.rank) == ("d0", "e1", 0)
    assert (descriptor.request_id, descriptor.lease_id) == ("r1", 9)
    assert (descriptor.layout_hash, descriptor.model_hash) == (LAYOUT.hash, "m1")


def test_a_send_puts_exactly_the_reserved_slots_and_reports_its_times(setup: Setup) -> None:
    result = setup.send()
    assert setup.memory is not None
    rows = setup.memory.reshape(PAGES * 16, -1).all(axis=1)
    assert np.flatnonzero(rows).tolist() == [*range(32, 56), *range(82, 96)]
    assert setup.observer.events == [("begin", 9), ("end", 9, True)]
    (job,) = setup.engine.jobs
    assert job.prompt_token_ids == tuple(PROMPT)
    assert (job.request_id, job.begin, job.end) == ("p-1", 2, 40)
    assert job.slots.tolist() == [*range(82, 96), *range(32, 56)]
    assert (result.tokens_computed, result.tokens_sent, result.bytes_sent) == (40, 38, 38 * 64)
    assert result.prefix_matched_length == 0
    assert result.prefill_ms == 100.0  # 500 .. 600
    assert result.transfer_ms == 10.0  # 1 + 2 + 3 + 4
    assert result.exposed_ms == 17.0  # and hand-shakes of 3 and 4
    assert result.layer_times_ns == (
        ((0, 1 * MS, 10 * MS), (20 * MS, 22 * MS, 30 * MS)),
        ((50 * MS, 53 * MS, 60 * MS), (70 * MS, 74 * MS, 80 * MS)),
    )


def test_jobs_to_one_receiver_share_destination_and_pool(setup: Setup) -> None:
    async def main() -> None:
        sender = setup.sender(monotonic_ns=lambda: 0)
        await setup._send(sender)
        setup.sending.connect("d0", "e1", 1).close()
        await asyncio.gather(
            setup._send(sender), setup._send(sender, kv_addr_info=setup.descriptor(lease_id=10))
        )
        await sender.close()

    asyncio.run(main())
    before, one, two = setup.engine.jobs
    assert one.destination == two.destination
    assert one.pool is two.pool
    assert before.pool is not one.pool
    assert before.destination != one.destination  # never two mappings in one step


@pytest.mark.case("PD-26")
def test_nothing_to_send_is_done_at_once(setup: Setup) -> None:
    result = setup.send(begin=7, end=7, kv_addr_info=setup.descriptor(7, 7))
    assert result == RemoteSendResult(0, 0, 0, 0, 0.0, 0.0, 0.0)
    assert setup.engine.jobs == []
    assert setup.observer.events == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"end": 51}, "end"),
        ({"end": -1}, "end"),
        ({"begin": -1}, "begin"),
        ({"begin": 41}, "begin"),
        ({"end": 39}, "end"),
        ({"begin": 3}, "begin"),
        ({"recv_rank": 1}, "recv_rank"),
        ({"prompt": [PROMPT[0] + 1, *PROMPT[1:]]}, "prompt"),
        ({"kv_addr_info": "garbage"}, "kv_addr_info"),
        ({"kv_addr_info": ""}, "kv_addr_info"),
    ],
)
def test_bad_requests_touch_nothing(setup: Setup, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        setup.send(**changes)
    assert caught.value.param == param
    assert setup.engine.jobs == []
    assert setup.observer.events == []


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"layout_hash": "other"}, InvalidRequest, f"{LAYOUT.hash} here, other there"),
        ({"model_hash": "m2"}, InvalidRequest, "m1 here, m2 there"),
        ({"nbytes": 64}, InvalidRequest, "64 bytes for 38 slots"),
        ({"expires_at": NOW}, LeaseError, "expired"),
        ({"segments": (1, 91, 38)}, InvalidRequest, "slot 128, the receiver's pool has 128"),
        ({"segments": (1, 2**31 - 40, 38)}, InvalidRequest, "the receiver's pool has 128"),
        ({"epoch": "e0"}, TransferFailed, "cannot be reached"),
        ({"engine_id": "nobody"}, TransferFailed, "cannot be reached"),
    ],
)
def test_bad_descriptors_touch_nothing(
    setup: Setup, changes: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        setup.send(kv_addr_info=setup.descriptor(**changes))
    assert setup.engine.jobs == []
    assert setup.observer.events == []


def test_an_unsigned_descriptor_is_refused(setup: Setup) -> None:
    unsigned = encode_descriptor(decode_descriptor(setup.descriptor(), SECRET), None)
    with pytest.raises(InvalidRequest, match="not signed"):
        setup.send(kv_addr_info=unsigned)


@pytest.mark.case("PD-24")
def test_a_pool_of_another_geometry_is_refused(setup: Setup) -> None:
    other = FakeTransport(network=setup.network)
    other.allocate(PAGES * LAYOUT.bytes_per_page * 2)
    other.serve("d0", "e2", PAGES, setup.observer)
    with pytest.raises(TransferFailed, match="8 KV pages have 16384 bytes, 1024 each were expected"):
        setup.send(kv_addr_info=setup.descriptor(epoch="e2"))
    assert setup.engine.jobs == []
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]
    other.close()


@pytest.mark.case("PD-03")
def test_a_refused_begin_computes_nothing(setup: Setup) -> None:
    setup.observer.grant = False
    with pytest.raises(LeaseError):
        setup.send()
    assert setup.engine.jobs == []
    assert setup.observer.events == [("begin", 9)]


@pytest.mark.case("PD-03")
def test_a_lease_that_ended_while_the_engine_computed(setup: Setup) -> None:
    setup.observer.keep = False
    with pytest.raises(LeaseError):
        setup.send()
    assert setup.observer.events == [("begin", 9), ("end", 9, True)]


def test_the_receiver_decides_whether_a_lease_lives_on(setup: Setup) -> None:
    async def later(_: SendJob) -> None:
        setup.wall += 3600  # renewed at the receiver, of which the descriptor knows nothing

    setup.engine.before = later
    assert setup.send().tokens_sent == 38


@pytest.mark.case("PD-05")
@pytest.mark.parametrize("error", [EngineUnavailable("stopped"), InternalError("bug"), ValueError("worse")])
def test_when_the_engine_fails_the_receiver_is_told(setup: Setup, error: Exception) -> None:
    async def fail(_: SendJob) -> None:
        raise error

    setup.engine.before = fail
    with pytest.raises(type(error)):
        setup.send()
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]


@pytest.mark.case("PD-42")
def test_a_lost_finish_is_a_failure(setup: Setup) -> None:
    setup.network.fail_finish = True
    with pytest.raises(TransferFailed):
        setup.send()
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]


def test_a_receiver_that_dies_ends_the_computation(setup: Setup) -> None:
    async def die(_: SendJob) -> None:
        setup.receiving.vanish()
        await asyncio.Event().wait()  # a prefill without end

    setup.engine.before = die
    with pytest.raises(TransferFailed, match="gone"):
        setup.send()
    assert setup.engine.stopped == 1
    assert setup.observer.events == [("begin", 9), ("end", 9, False)]


def test_a_receiver_that_died_before_the_finish(setup: Setup) -> None:
    async def die(_: SendJob) -> None:
        setup.receiving.vanish()

    setup.engine.before = die
    with pytest.raises(TransferFailed, match="gone"):
        setup.send()


def test_a_short_secret_is_refused(setup: Setup) -> None:
    with pytest.raises(ConfigError):
        setup.sender(secret=b"short")
    with pytest.raises(ConfigError):
        HandoffReceiver(EngineIdentity("d0", "e1", 0), LAYOUT, "m1", b"short")
