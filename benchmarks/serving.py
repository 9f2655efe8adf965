"""Real clusters for benchmarks, prompts of an exact length, and a client that writes down when each token came.

Owns: starting `microserving up` and `microserving router` and ending them, the client's clock. Does not know what is
measured.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from microserving.tokenizer import Tokenizer

REPOSITORY = Path(__file__).resolve().parents[1]
_START_S = 300.0
_ANSWER_S = 300.0
_MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class Serving:
    """A cluster that runs. url: where clients go. nodes: id -> address of each engine."""

    url: str
    nodes: Mapping[str, str]

    def load(self, node: str) -> dict[str, Any]:
        """What `/microserving/load` of that engine says."""
        answer: dict[str, Any] = json.loads(get(f"{self.nodes[node]}/microserving/load"))
        return answer

    def counters(self, node: str) -> dict[str, Any]:
        counters: dict[str, Any] = self.load(node)["counters"]
        return counters


@contextmanager
def up(config: str) -> Iterator[Serving]:
    """`microserving up` with that TOML text, on free ports."""
    with TemporaryDirectory(prefix="microserving-bench-") as folder:
        file, ready = Path(folder) / "cluster.toml", Path(folder) / "ready.json"
        file.write_text(config)
        arguments = ["up", "--config", str(file), "--port", "0", "--ready-file", str(ready)]
        with _process(arguments) as process:
            _wait(process, ready.exists)
            state = json.loads(ready.read_text())
            yield Serving(state["url"], state["nodes"])


@contextmanager
def router(serving: Serving, *, program: str, prefill: str, decode: str) -> Iterator[str]:
    """The address of one more router in front of two of the cluster's engines."""
    url = f"http://127.0.0.1:{_free_port()}"
    peers = ["--prefill-peers", serving.nodes[prefill], "--decode-peers", serving.nodes[decode]]
    with _process(["router", "--program", program, *peers, "--port", url.rpartition(":")[2]]) as process:
        _wait(process, lambda: _is_ready(url))
        yield url


class Words:
    """Prompts made of words that are one token each, wherever they stand."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        texts = ((token_id, tokenizer.decode([token_id])) for token_id in range(tokenizer.vocab_size))
        known = (text for token_id, text in texts if _is_word(text) and tokenizer.encode(text) == [token_id])
        self._words = sorted(known)
        self._random = random.Random(seed)

    def text(self, count: int) -> str:
        """Of ``count`` tokens; that two begin alike is a chance of one in thousands."""
        return "".join(self._random.choices(self._words, k=count))


def _is_word(text: str) -> bool:
    letters = text[1:]
    return (
        text[:1] == " " and len(letters) > 2 and letters.isascii() and letters.isalpha() and letters.islower()
    )


@dataclass
class Stream:
    """One streamed completion as its client saw it. Seconds on one clock. events: when each piece of output came."""

    sent: float = 0.0
    ended: float = 0.0
    events: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft(self) -> float:
        return self.events[0] - self.sent

    def gaps(self, begin: float, end: float) -> list[float]:
        """Between outputs of which the second came within [begin, end]."""
        pairs = zip(self.events, self.events[1:], strict=False)
        return [after - before for before, after in pairs if begin <= after <= end]


async def complete(url: str, stream: Stream, **body: Any) -> Stream:
    """Post to `/v1/completions` and read to the end, into ``stream``. Exits when the answer is not a whole stream."""
    where = urlsplit(url)
    greedy = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    payload = json.dumps({**greedy, "stream_options": {"include_usage": True}, **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=_MAX_HEADER_BYTES)
    try:
        stream.sent = time.perf_counter()
        writer.write(head.encode() + payload)
        async with asyncio.timeout(_ANSWER_S):
            await _read(reader, stream)
    finally:
        writer.close()
    return stream


async def _read(reader: asyncio.StreamReader, stream: Stream) -> None:
    status = await reader.readline()
    if b" 200 " not in status:
        sys.exit(f"the server answered {status!r} {(await reader.read(4096))!r}")
    async for line in reader:
        if not line.startswith(b"data: "):
            continue
        now = time.perf_counter()
        if line.startswith(b"data: [DONE]"):
            stream.ended = now
            return
        event = json.loads(line[6:])
        if "error" in event:
            sys.exit(f"the stream ended with {event['error']}")
        if event.get("usage"):
            stream.usage = event["usage"]
        if any(choice.get("token_ids") for choice in event["choices"]):
            stream.events.append(now)
    sys.exit("the stream was cut off")


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _end_with_parent() -> None:
    """In the child: SIGTERM when the benchmark dies, however it dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


@contextmanager
def _process(arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "microserving", *arguments]
    log = open(os.environ.get("MICROSERVING_BENCH_LOG", os.devnull), "ab")  # noqa: SIM115 - closed below
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log, preexec_fn=_end_with_parent)
    try:
        yield process
    finally:
        log.close()
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _is_ready(url: str) -> bool:
    try:
        get(f"{url}/ready")
    except OSError:
        return False
    return True


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            sys.exit("a process did not start; MICROSERVING_BENCH_LOG=FILE shows its messages")
        time.sleep(0.1)
