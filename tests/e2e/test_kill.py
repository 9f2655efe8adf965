"""kill -9 in the middle of a request: one clean error in time, the router stays up, nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from .conftest import Cluster, Starter
from .processes import MODEL, completion, load, wait_until
from .prompts import ids

ERROR_WITHIN_S = 5


@pytest.fixture
def own_cluster(start: Starter) -> Cluster:
    return start.up("configs/1p1d.toml")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def pids(cluster: Cluster) -> list[int]:
    return [cluster.pid(name) for name in ("prefill-0", "decode-0", "router")]


def serves_again(cluster: Cluster) -> None:
    """The killed engine was started again and admitted; the answer is right."""

    def served() -> bool:
        body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        response = httpx.post(f"{cluster.router}/v1/completions", json=body, timeout=30)
        return response.status_code == 200 and "Paris" in response.json()["choices"][0]["text"]

    wait_until(served, 60, "served again after a kill")


def stopped_clean(cluster: Cluster, before: set[str]) -> None:
    runtime_dir = Path(cluster.ready["runtime_dir"])
    assert runtime_dir.exists()
    known = pids(cluster)
    assert cluster.process.stop() == 0
    wait_until(lambda: not any(map(alive, known)), 3, "all processes gone")
    assert not runtime_dir.exists()
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.timeout(200)
@pytest.mark.case("PD-48")
def test_prefill_engine_dies_during_the_transfer(own_cluster: Cluster) -> None:
    segments = set(os.listdir("/dev/shm"))
    pid = own_cluster.pid("prefill-0")
    body = {"model": MODEL, "prompt": ids(1900), "max_tokens": 4}
    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, f"{own_cluster.router}/v1/completions", json=body)
        wait_until(lambda: load(own_cluster.decode)["reserved"] == 1, 10, "reserved")
        wait_until(lambda: load(own_cluster.prefill)["running"] == 1, 10, "sending")
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        response = answer.result()
    assert time.monotonic() - killed < ERROR_WITHIN_S
    assert response.status_code in (502, 503)
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    wait_until(lambda: load(own_cluster.decode)["reserved_pages"] == 0, 5, "reservation freed")
    wait_until(lambda: load(own_cluster.decode)["quarantined_pages"] == 0, 5, "quarantine freed")
    assert httpx.get(f"{own_cluster.router}/health", timeout=5).status_code == 200
    serves_again(own_cluster)
    stopped_clean(own_cluster, segments)


@pytest.mark.timeout(200)
def test_decode_engine_dies_in_mid_stream(own_cluster: Cluster) -> None:
    segments = set(os.listdir("/dev/shm"))
    pid = own_cluster.pid("decode-0")
    body = {
        "model": MODEL,
        "prompt": "Once upon a time",
        "max_tokens": 2000,
        "stream": True,
        "ignore_eos": True,
    }
    events: list[str] = []
    killed = 0.0
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{own_cluster.router}/v1/completions", json=body) as response,
    ):
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
            if len(events) == 5:
                os.kill(pid, signal.SIGKILL)
                killed = time.monotonic()
    assert time.monotonic() - killed < ERROR_WITHIN_S
    errors = [event for event in events if "error" in json.loads(event)]
    assert errors == events[-1:]  # one error event, at the end, and no [DONE]
    assert httpx.get(f"{own_cluster.router}/health", timeout=5).status_code == 200
    serves_again(own_cluster)
    stopped_clean(own_cluster, segments)


@pytest.mark.timeout(120)
def test_an_engine_that_is_stopped_and_its_client_gone_frees_everything(cluster: Cluster) -> None:
    """STR-01: the client leaves in mid-stream; both engines are at rest at once and the next answer is right."""
    body = {"model": MODEL, "prompt": "Count: 1 2 3", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", f"{cluster.router}/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        while not next(lines).startswith("data: "):
            pass
    for url in cluster.engines:
        wait_until(lambda url=url: load(url)["running_pages"] == 0, 2, "pages freed")
    assert completion(cluster.router, prompt="The capital of France is", max_tokens=4, temperature=0)
