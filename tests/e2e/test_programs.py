"""Every pattern on real engines: one router, its program changed while it runs; the tokens are those of one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Cluster
from .processes import completion, counters, difference, token_ids, wait_idle
from .prompts import ids

Deploy = Callable[..., None]
MLC_FILE = Path(__file__).parents[1] / "program" / "data" / "mlc_router.py"
SEEDED = {"temperature": 0.8, "seed": 77}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def admin(cluster: Cluster) -> Iterator[httpx.Client]:
    transport = httpx.HTTPTransport(uds=cluster.ready["admin"])
    with httpx.Client(transport=transport, base_url="http://router", timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def deploy(admin: httpx.Client) -> Iterator[Deploy]:
    """Puts a shipped program, or a file's text, in charge of the cluster; the first one is back afterwards."""

    def deploy(program: str | Path, **settings: object) -> None:
        what = {"path": str(program)}
        if isinstance(program, Path):
            what["source"] = program.read_text()
        answer = admin.post("/admin/program/deploy", json={**what, "settings": settings})
        assert answer.status_code == 200, answer.text

    yield deploy
    deploy("prefill_decode")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "settings"),
    [
        ("balanced_prefill_decode", {"pd_balance_factor": "auto"}),
        ("prefix_aware", {}),
        ("prefix_aware", {"exact": True}),
        ("context_migration", {"slack": -9}),
        ("adaptive", {"apart": True}),
        (MLC_FILE, {}),
    ],
    ids=["auto", "prefix", "exact", "migration", "adaptive", "mlc"],
)
def test_every_pattern_gives_the_tokens_of_one_engine(
    program: str | Path, settings: dict[str, object], cluster: Cluster, hybrid: str, deploy: Deploy
) -> None:
    deploy(program, **settings)
    seed = sum(map(ord, f"{program}{settings}"))
    turns = [ids(length, seed) for length in (1, 40, 150)]
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": 8, **sampling} for prompt in turns for sampling in (GREEDY, SEEDED)
    ]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda body: token_ids(completion(cluster.router, **body)), bodies))
    assert answers == [token_ids(completion(hybrid, **body)) for body in bodies]
    wait_idle(cluster.engines)


def cached(engine: str, prompt: list[int]) -> int:
    body = {"prompt": prompt}
    answer = httpx.post(f"{engine}/microserving/match_prefix", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["prefix_matched_length"])


@pytest.mark.timeout(300)
def test_a_context_that_was_moved_is_a_hit_there(cluster: Cluster, hybrid: str, deploy: Deploy) -> None:
    """The decode engine has a conversation; its next turn is generated on the prefill engine, where it was not."""
    conversation = ids(200, seed=4711)
    body: dict[str, Any] = {"prompt": [*conversation, 7, 8, 9], "max_tokens": 8, **SEEDED}
    completion(cluster.decode, prompt=conversation, max_tokens=1)
    assert cached(cluster.prefill, conversation) == 0
    deploy("context_migration", slack=-9)  # always on the engine whose turn it is
    before = [counters(engine) for engine in cluster.engines]
    expected = token_ids(completion(hybrid, **body))
    moved = None
    for _ in range(2):
        answer = completion(cluster.router, **body)
        assert token_ids(answer) == expected
        if cached(cluster.prefill, conversation) == 200 and moved is None:
            moved = answer
    assert moved is not None
    assert moved["usage"]["prompt_tokens_details"]["cached_tokens"] == 202
    after = [counters(engine) for engine in cluster.engines]
    assert difference(before[1], after[1], "tokens_sent") == 203
    assert difference(before[0], after[0], "prompt_tokens_computed") == 1  # the last token, for its logits
    wait_idle(cluster.engines)
