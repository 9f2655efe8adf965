"""A prefix whose K/V is still on its way is nobody's: a second request with the same prefix, whenever it comes, decodes
what one engine decodes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .conftest import Cluster
from .handoffs import GREEDY, SEEDED, HandOff, go_on, stopped_sender, wait_served
from .processes import completion, counters, difference, token_ids, verb, wait_idle
from .prompts import ids

PREFIX = 320


def second(prefix: list[int], **sampling: Any) -> dict[str, Any]:
    return {"prompt": [*prefix, 7, 8, 9], "max_tokens": 6, **sampling}


def cached(url: str, prompt: list[int]) -> int:
    return int(verb(url, "match_prefix", prompt=prompt).json()["prefix_matched_length"])


@pytest.mark.timeout(200)
@pytest.mark.parametrize("ending", ["arrives", "fails"])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_stalled_hand_off(
    sampling: dict[str, Any], ending: str, tight: Cluster, alone: Callable[..., list[int]]
) -> None:
    prefix = ids(PREFIX, seed=len(ending) + 100 * len(sampling))
    body = second(prefix, **sampling)
    expected = alone(**body)
    wait_served(tight)
    with (
        ThreadPoolExecutor(2) as pool,
        stopped_sender(tight, pool, prefix, sent=128, end=PREFIX) as (first, sending),
    ):
        # A part of it is in the pages of the lease, and none of it can be had.
        assert cached(tight.decode, body["prompt"]) == 0
        beside = HandOff(tight, "beside", body["prompt"], PREFIX)
        assert first.renew()
        assert beside.prepare().matched == 0
        beside.abort_receiver()
        assert first.generate(max_tokens=2).status_code == 409
        assert first.renew()
        during = pool.submit(completion, tight.decode, **body)
        assert token_ids(during.result()) == expected
        if ending == "fails":
            first.abort_receiver()
        racing = pool.submit(completion, tight.decode, **body)
        go_on(tight.pid("prefill-0"))
        # On a slow machine the lease may have ended by itself.
        assert sending.result().status_code in ((200, 409) if ending == "arrives" else (409,))
        assert token_ids(racing.result()) == expected
        first.abort()
    wait_served(tight)
    assert token_ids(completion(tight.router, **body)) == expected
    wait_idle(tight.engines)


@pytest.mark.timeout(100)
def test_what_arrived_is_published_by_its_commit(cluster: Cluster, alone: Callable[..., list[int]]) -> None:
    """Before the commit nobody finds it; after it everybody does, and an abort instead leaves nothing."""
    for committed in (False, True):
        prefix = ids(PREFIX, seed=77 + committed)
        body = second(prefix, **GREEDY)
        first = HandOff(cluster, f"published-{committed}", prefix, PREFIX).prepare()
        assert first.matched == 0
        assert first.send().status_code == 200
        assert cached(cluster.decode, body["prompt"]) == 0
        if committed:
            answer = verb(cluster.decode, "commit", request_id=first.request_id)
            assert answer.json()["cached_tokens"] == PREFIX
        else:
            first.abort()
        assert cached(cluster.decode, body["prompt"]) == (PREFIX if committed else 0)
        before = counters(cluster.decode)
        assert token_ids(completion(cluster.decode, **body)) == alone(**body)
        computed = difference(before, counters(cluster.decode), "prompt_tokens_computed")
        assert computed == 3 + (0 if committed else PREFIX)
    wait_idle(cluster.engines)
