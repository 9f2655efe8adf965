"""One real 1P1D cluster, one hybrid engine and one router per program, shared by all end-to-end tests.

Each engine has one thread, so that the tests run on two cores; the model is the default one, fetched and compiled
once into the user's cache.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from .processes import Process, completion, free_port, is_ready, token_ids

START_TIMEOUT_S = 240
TIGHT_PAGES = 48
PAGE_BYTES = 16 * 30 * 2 * 3 * 64 * 2
"""16 positions, 30 layers, K and V, 3 heads of 64 float16: of the default model."""
TIGHT = f"""\
[cluster]
name = "tight"

[engine]
lease_ttl_s = 2.0
memory_threshold = 1.0
chunk_size_tokens = 64

[router]
program = "prefill_decode"

[[nodes]]
id = "prefill-0"
role = "prefill"
resources.memory_bytes = {TIGHT_PAGES * PAGE_BYTES}

[[nodes]]
id = "decode-0"
role = "decode"
resources.memory_bytes = {TIGHT_PAGES * PAGE_BYTES}
"""


@dataclass
class Cluster:
    """A running `microserving up`, as its ready file describes it."""

    process: Process
    ready: dict[str, Any]

    @property
    def router(self) -> str:
        return str(self.ready["url"])

    @property
    def prefill(self) -> str:
        return str(self.ready["nodes"]["prefill-0"])

    @property
    def decode(self) -> str:
        return str(self.ready["nodes"]["decode-0"])

    @property
    def engines(self) -> list[str]:
        return [self.prefill, self.decode]

    @property
    def secret(self) -> bytes:
        return (Path(self.ready["runtime_dir"]) / "cluster-secret").read_bytes()

    def pid(self, name: str) -> int:
        return int(json.loads(Path(self.ready["ready_file"]).read_text())["pids"][name])


class Starter:
    """Starts `microserving` commands and waits until they are ready; ``stop`` ends them all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[Process] = []

    def up(self, config: str) -> Cluster:
        process = self._start(
            "up", "--config", config, "--port", "0", "--ready-file", str(self._path("json"))
        )
        ready_file = self._path("json", -1)
        process.wait(ready_file.exists, START_TIMEOUT_S)
        return Cluster(process, {**json.loads(ready_file.read_text()), "ready_file": str(ready_file)})

    def server(self, *arguments: str) -> str:
        """The address of a `serve` or `router` command on a free port."""
        port = free_port()
        process = self._start(*arguments, "--port", str(port))
        url = f"http://127.0.0.1:{port}"
        process.wait(lambda: is_ready(url), START_TIMEOUT_S)
        return url

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.stop()

    def _start(self, *arguments: str) -> Process:
        process = Process(*arguments, log=self._path("log"))
        self._processes.append(process)
        return process

    def _path(self, suffix: str, offset: int = 0) -> Path:
        return self._folder / f"{len(self._processes) + offset}.{suffix}"


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    starter = Starter(tmp_path_factory.mktemp("processes"))
    yield starter
    starter.stop()


@pytest.fixture(scope="session")
def cluster(start: Starter) -> Cluster:
    """`configs/1p1d.toml`, as `make up` starts it, on free ports."""
    return start.up("configs/1p1d.toml")


@pytest.fixture(scope="session")
def tight(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """A cluster of its own with little memory, short leases and small chunks, for tests that stop and kill engines.

    Such a test leaves it as it found it: `processes.wait_served`.
    """
    config = tmp_path_factory.mktemp("tight") / "tight.toml"
    config.write_text(TIGHT)
    return start.up(str(config))


@pytest.fixture(scope="session")
def hybrid(start: Starter) -> str:
    """The address of one engine alone, without a prefix cache: what every path is compared with."""
    return start.server("serve", "--threads", "1", "--node-id", "hybrid-0", "--prefix-cache", "off")


@pytest.fixture(scope="session")
def alone(hybrid: str) -> Callable[..., list[int]]:
    """The token ids of a completion by the ``hybrid`` engine; asked once for the same body."""
    known: dict[str, list[int]] = {}

    def alone(**body: Any) -> list[int]:
        key = json.dumps(body, sort_keys=True)
        if key not in known:
            known[key] = token_ids(completion(hybrid, **body))
        return known[key]

    return alone


@pytest.fixture(scope="session")
def router_for(start: Starter, cluster: Cluster) -> Callable[[str, float | None], str]:
    """The address of a router that runs a program in front of the cluster's engines."""

    @functools.cache
    def router_for(program: str, factor: float | None = None) -> str:
        settings = [] if factor is None else ["--set", f"pd_balance_factor={factor}"]
        peers = ["--prefill-peers", cluster.prefill, "--decode-peers", cluster.decode]
        return start.server("router", "--program", program, *settings, *peers)

    return router_for
