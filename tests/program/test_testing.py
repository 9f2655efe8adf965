"""The shipped fake engines keep the rules that real ones keep."""

from __future__ import annotations

import asyncio

import pytest

from microserving.errors import InvalidRequest, LeaseError, RequestConflict
from microserving.program.testing import Call, FakeCluster, collect, make_request


def test_a_hand_off_by_hand() -> None:
    async def scenario() -> None:
        cluster, request = FakeCluster(), make_request(range(10))
        prefill, decode = cluster["prefill-0"], cluster["decode-0"]
        received = await decode.prep_recv(request, end=-1)
        assert (received.prefix_matched_length, received.end, received.engine) == (0, 9, decode)
        assert decode.held == {"request-0"}
        result = await prefill.remote_send(request, to=received)
        assert (result.tokens_computed, result.tokens_sent) == (9, 9)
        chunks = await collect(decode.start_generate(request, begin=9))
        assert [(c.text, c.finish_reason) for c in chunks] == [("Hello", None), (" world", "stop")]
        assert (chunks[-1].prompt_tokens, chunks[-1].completion_tokens) == (10, 2)
        assert not decode.held | prefill.held
        assert prefill.calls == [Call("remote_send", "request-0", 0, 9)]

    asyncio.run(scenario())


def test_what_was_matched_is_not_sent() -> None:
    async def scenario() -> None:
        cluster, request = FakeCluster(), make_request(range(10))
        cluster["decode-0"].matched = 50
        received = await cluster["decode-0"].prep_recv(request, end=4)
        assert received.complete
        assert received.prefix_matched_length == 4
        result = await cluster["prefill-0"].remote_send(request, to=received)
        assert result.tokens_sent == 0
        assert not cluster["prefill-0"].calls

    asyncio.run(scenario())


def test_wrong_orders_are_refused() -> None:
    async def scenario() -> None:
        cluster, request = FakeCluster(), make_request(range(10))
        decode = cluster["decode-0"]
        with pytest.raises(LeaseError):
            await collect(decode.start_generate(request, begin=9))
        with pytest.raises(InvalidRequest):
            await decode.prep_recv(request, end=11)
        received = await decode.prep_recv(request, end=9)
        with pytest.raises(RequestConflict):
            await decode.prep_recv(request, end=9)
        await decode.abort(request)
        assert not decode.held
        with pytest.raises(LeaseError):
            await cluster["prefill-0"].remote_send(request, to=received)

    asyncio.run(scenario())
