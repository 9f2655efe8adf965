"""Two prefill and two decode engines with a tiny model behind one router, each behind a proxy of its own.

The model is random, so that engines are there at once; it has 8 layers, and prompts of many chunks. What is changed on
purpose is short: leases, and how soon the router notices an engine that is silent.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import tokenizers

from tests.reference.model_builder import TinyShape, safetensors_bytes, tiny_hf_config, tiny_tensors

from .conftest import Starter
from .engine_nursery import Nursery, kill
from .fault_proxy import FaultProxy, Trigger, fault_proxies
from .processes import PLAIN, free_port, is_ready, load, wait_idle, wait_until

MODEL = "tiny-pairs"
SHAPE = TinyShape(layers=8, hidden=128, wide=256, heads=4, kv_heads=2, head_dim=32, vocab=300, context=4096)
NAMES = ("prefill-0", "prefill-1", "decode-0", "decode-1")
LEASE_S = 2.0
_ENGINE = (
    *("--served-model-name", MODEL, "--threads", "1", "--kv-cache-bytes", str(32 * 2**20)),
    *("--chunk-size-tokens", "64", "--lease-ttl-s", str(LEASE_S), "--transfer-timeout-s", "5"),
)
ROUTER = (
    *("--probe-interval-s", "0.5", "--probe-timeout-s", "1", "--probe-misses", "2"),
    *("--release-timeout-s", "1"),
)
START_S = 240
"""The model's code is compiled once into the user's cache."""


def write_model(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(tiny_hf_config(SHAPE)))
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tiny_tensors(SHAPE)))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<{number}>" for number in range(SHAPE.vocab - len(alphabet))])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


class Engines:
    """Starts and ends engines by name; an engine keeps its port."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self._folder = folder
        self._nursery = nursery
        self._model = write_model(folder / "model")
        (folder / "run").mkdir(mode=0o700)
        self._ports: dict[str, int] = {}
        self.pids: dict[str, int] = {}

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._ports[name]}"

    def start(self, name: str, *more: str) -> None:
        """Returns before it is ready."""
        port = self._ports.setdefault(name, free_port())
        role = name.rpartition("-")[0]
        self.pids[name] = self._nursery.start(
            "serve", "--model", str(self._model), "--node-role", role, "--node-id", name, "--port", str(port),
            "--runtime-dir", str(self._folder / "run"), *_ENGINE, *more, log=self._folder / f"{name}.log",
        )  # fmt: skip

    def wait_ready(self, name: str) -> None:
        wait_until(lambda: is_ready(self.url(name)), START_S, f"{name} is ready")

    def kill(self, name: str) -> None:
        kill(self.pids.pop(name))

    def stop(self, name: str) -> None:
        """SIGSTOP."""
        os.kill(self.pids[name], signal.SIGSTOP)

    def heal(self) -> None:
        """All of them are running again; those that were killed are not ready yet."""
        for name in NAMES:
            if name in self.pids:
                os.kill(self.pids[name], signal.SIGCONT)
            else:
                self.start(name)


@dataclass
class Pairs:
    """deployed: what ``deploy`` was asked for last."""

    engines: Engines
    proxies: dict[str, FaultProxy]
    router: str
    admin: httpx.Client
    deployed: Any = None
    _known: dict[str, list[int]] = field(default_factory=dict)

    def of(self, role: str) -> list[FaultProxy]:
        return [proxy for name, proxy in self.proxies.items() if name.startswith(role)]

    def deploy(self, program: str | Path, settings: dict[str, object]) -> None:
        if self.deployed == (program, settings):
            return
        what = {"path": str(program), "settings": settings}
        if isinstance(program, Path):
            what["source"] = program.read_text()
        answer = self.admin.post("/admin/program/deploy", json=what)
        assert answer.status_code == 200, answer.text
        self.deployed = (program, settings)

    @contextmanager
    def watched_by(self, trigger: Trigger) -> Iterator[None]:
        for proxy in self.proxies.values():
            proxy.trigger = trigger
        try:
            yield
        finally:
            for proxy in self.proxies.values():
                proxy.trigger = None

    def states(self) -> dict[str, tuple[str, int]]:
        """Engine id -> state and requests in flight, as the router has it."""
        engines = self.stats()["engines"]
        return {engine["id"]: (engine["state"], engine["in_flight"]) for engine in engines}

    def stats(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.router}/router/stats", timeout=10, verify=PLAIN).json()
        return answer

    def wait_at_rest(self, timeout_s: float = 90) -> None:
        """All engines are admitted, and nothing is held or in flight anywhere, an expired lease later at most."""
        wait_until(
            lambda: self.states() == dict.fromkeys(NAMES, ("up", 0)), timeout_s, f"all up: {self.states()}"
        )
        wait_idle([self.engines.url(name) for name in NAMES], timeout_s=3 * LEASE_S)
        assert self.stats()["requests_in_flight"] == 0

    def expected(self, body: dict[str, Any]) -> list[int]:
        """The token ids of one engine alone; asked once for the same body."""
        key = json.dumps(body, sort_keys=True)
        if key not in self._known:
            self._known[key] = ask(self.engines.url("hybrid-0"), body)
        return self._known[key]


def post(url: str, body: dict[str, Any]) -> httpx.Response:
    """A completion with token ids, of as many tokens as ``body`` allows."""
    request = {"model": MODEL, "return_token_ids": True, "ignore_eos": True, **body}
    return httpx.post(f"{url}/v1/completions", json=request, timeout=60, verify=PLAIN)


def ask(url: str, body: dict[str, Any]) -> list[int]:
    """The token ids of a whole answer, streamed or not. AssertionError for anything else."""
    streamed = bool(body.get("stream"))
    answer = post(url, {**body, "stream_options": {"include_usage": True}} if streamed else body)
    assert answer.status_code == 200, answer.text
    chunks = _events(answer.text) if streamed else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    assert (len(ids), usage["completion_tokens"]) == (body["max_tokens"], body["max_tokens"])
    assert usage["prompt_tokens"] == len(body["prompt"])
    return ids


def _events(text: str) -> list[dict[str, Any]]:
    """Of a stream without an error, with one end."""
    *events, end = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert end == "[DONE]", text[-500:]
    chunks: list[dict[str, Any]] = [json.loads(event) for event in events]
    assert all("error" not in chunk for chunk in chunks), chunks[-1]
    return chunks


def ask_all(url: str, bodies: list[dict[str, Any]], **extra: Any) -> list[list[int]]:
    """All at once."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ask(url, {**body, **extra}), bodies))


def router_command(proxies: dict[str, FaultProxy]) -> list[str]:
    """Of a router over the proxies; the rest of its arguments may follow."""
    prefill = ",".join(proxy.url for name, proxy in proxies.items() if name.startswith("prefill"))
    decode = ",".join(proxy.url for name, proxy in proxies.items() if name.startswith("decode"))
    return [
        "router",
        "--program",
        "prefill_decode",
        "--prefill-peers",
        prefill,
        "--decode-peers",
        decode,
        *ROUTER,
    ]


def wait_receiving(proxies: list[FaultProxy], *, done_too: bool = False) -> FaultProxy:
    """The first of them whose engine is being written to. done_too: or is about to be, or has been."""
    states = ("issued", "writing", "arrived") if done_too else ("writing",)
    found: list[FaultProxy] = []

    def looked() -> bool:
        for proxy in proxies:
            leases = load(proxy.engine)["leases"]
            if any(leases[state] for state in states):
                found.append(proxy)
        return bool(found)

    wait_until(looked, 10, "a transfer")
    return found[0]


@contextmanager
def running_pairs(start: Starter, folder: Path) -> Iterator[Pairs]:
    nursery = Nursery(folder / "nursery.log")
    try:
        engines = Engines(folder, nursery)
        engines.start("hybrid-0", "--prefix-cache", "off")
        engines.wait_ready("hybrid-0")  # the code is compiled once
        for name in NAMES:
            engines.start(name)
        for name in NAMES:
            engines.wait_ready(name)
        with fault_proxies({name: engines.url(name) for name in NAMES}) as proxies:
            admin = folder / "admin"
            router = start.server(*router_command(proxies), "--admin-socket", str(admin))
            transport = httpx.HTTPTransport(uds=str(admin))
            with httpx.Client(transport=transport, base_url="http://router", timeout=60) as client:
                yield Pairs(engines, proxies, router, client)
    finally:
        nursery.close()
