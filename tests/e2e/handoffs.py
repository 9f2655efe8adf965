"""Hand-offs driven by hand, verb by verb, and engines that are stopped in the middle of one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from .conftest import Cluster
from .processes import completion, counters, load, token_ids, verb, wait_until
from .prompts import ids

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 1234, "ignore_eos": True}


@dataclass
class HandOff:
    """One request's verbs. ``matched`` and ``descriptor`` are known once ``prepare`` was answered.

    sender_salt: the sender's own cache is asked under it.
    """

    cluster: Cluster
    request_id: str
    prompt: list[int]
    end: int
    sender_salt: str = ""
    matched: int = -1
    descriptor: str = ""

    def prepare(self) -> HandOff:
        answer = verb(
            self.cluster.decode, "prep_recv", prompt=self.prompt, end=self.end, request_id=self.request_id
        )
        assert answer.status_code == 200, answer.text
        self.matched = answer.json()["prefix_matched_length"]
        self.descriptor = answer.json()["kv_append_metadata"]
        return self

    def send(self) -> httpx.Response:
        return verb(
            self.cluster.prefill, "remote_send", prompt=self.prompt, begin=self.matched, end=self.end,
            kv_addr_info=self.descriptor, recv_rank=0, request_id=self.request_id, cache_salt=self.sender_salt,
        )  # fmt: skip

    def generate(self, **body: Any) -> httpx.Response:
        return verb(
            self.cluster.decode, "start_generate", prompt=self.prompt, begin=self.end,
            request_id=self.request_id, return_token_ids=True, **body,
        )  # fmt: skip

    def renew(self) -> bool:
        """False: the lease has ended."""
        return verb(self.cluster.decode, "renew", request_id=self.request_id).status_code == 200

    def abort_receiver(self) -> None:
        assert verb(self.cluster.decode, "abort", request_id=self.request_id).status_code == 200

    def abort(self) -> None:
        """At both ends. Not while the sender is stopped: it answers nothing."""
        self.abort_receiver()
        assert verb(self.cluster.prefill, "abort", request_id=self.request_id).status_code == 200


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stop(pid: int) -> None:
    """SIGSTOP; returns when every thread has stopped."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _state(pid) == "T", 5, "stopped")


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


@contextmanager
def stopped_sender(
    cluster: Cluster, pool: ThreadPoolExecutor, prompt: list[int], *, sent: int, end: int | None = None
) -> Iterator[tuple[HandOff, Future[httpx.Response]]]:
    """The prefill engine, stopped while it sends ``prompt`` and at least ``sent`` tokens of it are counted as sent.

    Within one step the K/V of all its tokens is put layer by layer: it stops behind any layer. A send that was faster
    than the signal is tried again. The engine goes on at the end, unless it was killed.
    """
    pid = cluster.pid("prefill-0")
    for _ in range(50):
        salt = os.urandom(8).hex()  # what was sent before is not cached
        hand_off = HandOff(cluster, f"stopped-{salt}", prompt, end or len(prompt) - 1, salt).prepare()
        before = counters(cluster.prefill)["tokens_sent"]
        sending = pool.submit(hand_off.send)
        caught = partial(_is_sending, hand_off, before + sent)
        wait_until(partial(_either, sending.done, caught), 30, "sending")
        stop(pid)
        if load(cluster.decode)["leases"]["writing"] == 1:
            break
        go_on(pid)
        sending.result()
        hand_off.abort()
    else:
        raise AssertionError("the sender was never caught in the middle")
    try:
        yield hand_off, sending
    finally:
        if cluster.pid("prefill-0") == pid:
            go_on(pid)


def _is_sending(hand_off: HandOff, sent: int) -> bool:
    """Keeps the lease alive, too: until it is so far."""
    decode, prefill = hand_off.cluster.decode, hand_off.cluster.prefill
    hand_off.renew()
    return bool(load(decode)["leases"]["writing"] == 1 and counters(prefill)["tokens_sent"] >= sent)


def _either(one: Callable[[], bool], other: Callable[[], bool]) -> bool:
    return one() or other()


def wait_served(cluster: Cluster, timeout_s: float = 60) -> None:
    """Both engines of the cluster serve its router (again): a hand-off succeeds."""
    body = {"prompt": ids(20, seed=4), "max_tokens": 1, "cache_salt": os.urandom(8).hex(), **GREEDY}

    def served() -> bool:
        try:
            before = counters(cluster.prefill)
            completion(cluster.router, **body)
            return bool(counters(cluster.prefill)["tokens_sent"] > before["tokens_sent"])
        except (AssertionError, httpx.TransportError):
            return False

    wait_until(served, timeout_s, "served by both engines")


def together(url: str, bodies: list[dict[str, Any]], at_once: int = 8) -> list[list[int]]:
    """The token ids of completions that run at once, in order."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda body: token_ids(completion(url, **body)), bodies))
