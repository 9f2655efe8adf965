"""Output is the contract: through any program and split, alone or in company, the tokens of one engine alone."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from .conftest import Cluster
from .processes import MODEL, counters, difference, wait_idle
from .prompts import PROMPTS, Prompt

PROGRAMS: list[tuple[str, float | None]] = [
    ("round_robin", None),
    ("prefill_decode", None),
    *(("balanced_prefill_decode", factor) for factor in (0.1, 0.5, 0.9, 1.0)),
]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.8, "seed": 1234},
}
CELLS = [
    (program, name, at_once)
    for program, name, at_once in itertools.product(PROGRAMS, SAMPLING, (1, 8))
    if program[1] in (None, 0.5) or (name == "greedy") == (at_once == 1)
]
"""Every program under both samplings, alone and in company; of the factors only 0.5 in all four ways."""
MAX_TOKENS = 8
Outputs = list[list[int]]


def generate(
    client: httpx.Client, url: str, prompt: Prompt, sampling: dict[str, Any], salt: str
) -> list[int]:
    path = "/v1/chat/completions" if prompt.chat else "/v1/completions"
    body = {"model": MODEL, "max_tokens": MAX_TOKENS, "return_token_ids": True, "cache_salt": salt}
    body |= {**prompt.body, **sampling}
    response = client.post(url + path, json=body)
    assert response.status_code == 200, f"{prompt.name}: {response.text}"
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def outputs(url: str, sampling: dict[str, Any], at_once: int) -> Outputs:
    """The token ids of every prompt, in order, ``at_once`` requests in flight; nothing of them is cached before."""
    salt = uuid.uuid4().hex
    with httpx.Client(timeout=300) as client, ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: generate(client, url, prompt, sampling, salt), PROMPTS))


@pytest.fixture(scope="module")
def expected(hybrid: str) -> dict[str, Outputs]:
    """One hybrid engine, one request at a time."""
    return {name: outputs(hybrid, sampling, at_once=1) for name, sampling in SAMPLING.items()}


@pytest.mark.timeout(600)
def test_there_are_enough_prompts_and_they_differ(expected: dict[str, Outputs]) -> None:
    assert len(PROMPTS) >= 40
    for values in expected.values():
        assert all(1 <= len(ids) <= MAX_TOKENS for ids in values)
        assert len({tuple(ids) for ids in values}) > len(PROMPTS) * 0.8
    assert expected["greedy"] != expected["seeded"]


@pytest.mark.case("PD-44")
@pytest.mark.case("PD-26")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("program", "sampling", "at_once"),
    CELLS,
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_parity(
    program: tuple[str, float | None],
    sampling: str,
    at_once: int,
    expected: dict[str, Outputs],
    router_for: Callable[[str, float | None], str],
    cluster: Cluster,
) -> None:
    url = router_for(*program)
    before = [counters(engine) for engine in cluster.engines]
    actual = outputs(url, SAMPLING[sampling], at_once)
    wrong = [p.name for p, a, e in zip(PROMPTS, actual, expected[sampling], strict=True) if a != e]
    assert not wrong
    sent = sum(
        difference(old, counters(engine), "tokens_sent")
        for old, engine in zip(before, cluster.engines, strict=True)
    )
    moves_kv = program[0] != "round_robin" and program[1] != 1.0
    assert (
        sent > 0
    ) == moves_kv  # a parity test that never used the prefill engine would prove nothing (PD-52)
    wait_idle(cluster.engines)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sampling", list(SAMPLING))
def test_one_engine_in_company(sampling: str, expected: dict[str, Outputs], hybrid: str) -> None:
    assert outputs(hybrid, SAMPLING[sampling], at_once=8) == expected[sampling]
