"""An engine dies or freezes in the middle of requests, another one of its role lives: no client sees anything of it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import pytest

from .conftest import Cluster, Starter
from .processes import MODEL, load, wait_until
from .prompts import ids

TOKENS = 40
ALL_UP_S = 60


@pytest.fixture(scope="module")
def pairs(start: Starter) -> Cluster:
    """Two prefill and two decode engines."""
    return start.up("configs/2p2d.toml")


def body(prompt: list[int], seed: int) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0.8,
        "seed": seed,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def stream(url: str, request: dict[str, Any], at_token: Callable[[int], None] = lambda _: None) -> list[int]:
    """The token ids of a stream that must be whole and have ``TOKENS``. at_token: called while it runs."""
    tokens, *_ = whole_stream(url, request, at_token)
    assert len(tokens) == TOKENS
    return tokens


def whole_stream(
    url: str, request: dict[str, Any], at_token: Callable[[int], None] = lambda _: None
) -> tuple[list[int], str, list[Any]]:
    """The token ids, the text and the log-probabilities of a stream that must be whole: one end, one usage, no error."""
    tokens: list[int] = []
    scores: list[Any] = []
    text = ""
    usages, ends = [], 0
    with httpx.Client(timeout=100) as client, client.stream("POST", url, json=request) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line == "data: [DONE]":
                ends += 1
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                usages += [event["usage"]] if event.get("usage") else []
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                    text += choice["text"]
                    scores += zip(*choice["logprobs"].values(), strict=True) if choice["logprobs"] else []
                at_token(len(tokens))
    assert (ends, [usage["completion_tokens"] for usage in usages]) == (1, [len(tokens)])
    return tokens, text, scores


def engines(cluster: Cluster) -> list[dict[str, Any]]:
    return list(httpx.get(f"{cluster.router}/router/stats", timeout=10).json()["engines"])


def all_up(cluster: Cluster) -> bool:
    return {(engine["state"], engine["in_flight"]) for engine in engines(cluster)} == {("up", 0)}


def busy(cluster: Cluster, role: str) -> list[str]:
    return [e["id"] for e in engines(cluster) if e["in_flight"] and e["id"].startswith(role)]


@pytest.mark.timeout(300)
@pytest.mark.case("PD-34")
@pytest.mark.case("RT-06")
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("scored", [False, True], ids=["", "scored"])
def test_a_decode_engine_goes_away_in_mid_stream(
    pairs: Cluster, hybrid: str, end: signal.Signals, scored: bool
) -> None:
    """scored: no log-probability, of the echoed prompt or of the output, comes twice or is missing."""
    url, request = f"{pairs.router}/v1/completions", body(ids(40), seed=int(end))
    request |= {"echo": True, "logprobs": 2} if scored else {}
    wait_until(lambda: all_up(pairs), ALL_UP_S, "all engines up")
    undisturbed = whole_stream(f"{hybrid}/v1/completions", request)
    assert len(undisturbed[2]) == (40 + TOKENS if scored else 0)
    hit: list[int] = []

    def strike(tokens: int) -> None:
        if tokens >= 8 and not hit:
            (engine,) = busy(pairs, "decode")
            hit.append(pairs.pid(engine))
            os.kill(hit[0], end)

    try:
        assert whole_stream(url, request, strike) == undisturbed
        assert hit
    finally:
        if hit and end is signal.SIGSTOP:
            os.kill(hit[0], signal.SIGCONT)
    wait_until(lambda: all_up(pairs), ALL_UP_S, "all engines up again")
    for node in pairs.ready["nodes"].values():
        wait_until(lambda node=node: load(node)["running_pages"] == 0, 10, "pages freed")


@pytest.mark.timeout(300)
@pytest.mark.case("PD-36")
def test_an_engine_dies_in_the_middle_of_an_object(pairs: Cluster, hybrid: str) -> None:
    """The other engine's grammar goes on where the first one's was: the object is whole, and one engine's."""
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[A-Z]{4}-[0-9]{6}$"},
            "tags": {
                "type": "array",
                "items": {"type": "string", "maxLength": 10},
                "minItems": 4,
                "maxItems": 6,
            },
            "colour": {"enum": ["red", "green"]},
        },
        "required": ["id", "tags", "colour"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    request = {**body(ids(40), seed=3), "ignore_eos": False, "max_tokens": 200, "response_format": form}
    wait_until(lambda: all_up(pairs), ALL_UP_S, "all engines up")
    expected = whole_stream(f"{hybrid}/v1/completions", request)
    hit: list[int] = []

    def strike(tokens: int) -> None:
        if tokens >= 8 and not hit:
            (engine,) = busy(pairs, "decode")
            hit.append(pairs.pid(engine))
            os.kill(hit[0], signal.SIGKILL)

    struck = whole_stream(f"{pairs.router}/v1/completions", request, strike)
    assert hit
    assert struck == expected
    jsonschema.validate(json.loads(struck[1]), schema)
    wait_until(lambda: all_up(pairs), ALL_UP_S, "all engines up again")


@pytest.mark.timeout(300)
@pytest.mark.case("PD-05")
def test_a_prefill_engine_dies_during_transfers(pairs: Cluster) -> None:
    url = f"{pairs.router}/v1/completions"
    wait_until(lambda: all_up(pairs), ALL_UP_S, "all engines up")
    requests = [body(ids(500 + number), seed=number) for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(stream, url, request) for request in requests]
        wait_until(lambda: "prefill-0" in busy(pairs, "prefill"), 30, "sending")
        time.sleep(0.1)  # anywhere in the transfer
        os.kill(pairs.pid("prefill-0"), signal.SIGKILL)
        struck = [future.result() for future in running]
    wait_until(lambda: all_up(pairs), ALL_UP_S, "all engines up again")
    assert struck == [stream(url, request) for request in requests]
    for node in pairs.ready["nodes"].values():
        wait_until(lambda node=node: load(node)["reserved_pages"] == 0, 10, "reservations freed")
