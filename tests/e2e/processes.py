"""Starts the product's real processes, through the public command line, and talks to them over HTTP."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = "smollm2-135m-instruct"
PLAIN = False
"""httpx's ``verify`` where nothing is encrypted: to load certificates takes 50 ms of a processor for each call."""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


def _end_with_parent() -> None:
    """In the child: SIGTERM when the test process dies, however it dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class Process:
    """One `microserving ...` command. ``url`` is known once it answered `/ready`."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self.log = log
        self._file = log.open("wb")
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "microserving", *arguments],
            cwd=REPOSITORY,
            env=environment(),
            stdout=self._file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )

    @property
    def pid(self) -> int:
        return self.popen.pid

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Until the condition holds; fails with the process's output when it ended or took too long."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.popen.poll() is not None:
                raise AssertionError(f"ended with {self.popen.returncode}:\n{self.output()}")
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"not ready after {timeout_s} s:\n{self.output()}")
            time.sleep(0.05)

    def stop(self, timeout_s: float = 10) -> int:
        """SIGTERM, and the exit status."""
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(timeout_s)
        finally:
            self.kill()
            self._file.close()

    def kill(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5, verify=PLAIN).status_code == 200
    except httpx.TransportError:
        return False


def load(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/microserving/load", timeout=10, verify=PLAIN).json()
    return answer


def counters(url: str) -> dict[str, Any]:
    values: dict[str, Any] = load(url)["counters"]
    return values


def difference(before: Mapping[str, Any], after: Mapping[str, Any], name: str) -> int:
    return int(after[name]) - int(before[name])


def wait_idle(urls: Sequence[str], timeout_s: float = 5) -> None:
    """IDLE of the case list: nothing running, waiting or reserved, and every page free, within the time."""
    deadline = time.monotonic() + timeout_s
    while True:
        loads = [load(url) for url in urls]
        if all(_is_idle(values) for values in loads):
            return
        assert time.monotonic() < deadline, loads
        time.sleep(0.02)


def _is_idle(values: Mapping[str, Any]) -> bool:
    at_rest = all(
        values[name] == 0
        for name in ("running", "waiting", "reserved", "running_pages", "reserved_pages", "quarantined_pages")
    )
    return at_rest and values["free_pages"] + values["cached_pages"] == values["total_pages"]


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.005)


def resident_bytes(pid: int) -> int:
    """The memory of a process that is its own: not the KV pools and libraries that it shares with others."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
    )
    return int(fields["RssAnon"].split()[0]) * 1024


def verb(url: str, name: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/microserving/{name}", json={"model": MODEL, **body}, timeout=60, verify=PLAIN)


def completion(url: str, timeout_s: float = 100, **body: Any) -> dict[str, Any]:
    """A non-streamed `/v1/completions` answer with token ids; asserts 200."""
    request = {"model": MODEL, "return_token_ids": True, **body}
    response = httpx.post(f"{url}/v1/completions", json=request, timeout=timeout_s, verify=PLAIN)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def token_ids(answer: Mapping[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids
