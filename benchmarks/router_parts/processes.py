"""The processes of the router benchmark: mock engines, routers, load. Knows how each is started and what it costs.

The peers are `vllm-router` and `sglang-router` from PyPI, in a virtual environment in the cache folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from microserving.model_files import default_cache_dir

VERSIONS = {"vllm-router": "0.1.17", "sglang-router": "0.3.2"}
HERE = Path(__file__).parent
_PAGE = os.sysconf("SC_PAGE_SIZE")
_START_S = 60.0


@dataclass(frozen=True)
class Pace:
    """Streams get one event every interval_us, in so many groups spread over it."""

    interval_us: int
    groups: int


@dataclass(frozen=True)
class Router:
    """One router that runs. pid: of its first process."""

    name: str
    port: int
    pid: int

    def cpu_s(self) -> float:
        """CPU time that its processes have used so far."""
        return sum(map(_cpu_ns, _tree(self.pid))) / 1e9

    def memory(self) -> int:
        """Resident bytes of its processes."""
        return sum(map(_resident_pages, _tree(self.pid))) * _PAGE


class Programs:
    """The C programs, compiled into ``folder``, and a tokenizer document for the mock engines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("mock_engine", "http_load"):
            subprocess.run(["gcc", "-O2", "-o", str(folder / name), str(HERE / f"{name}.c")], check=True)
        self._tokenizer = folder / "tokenizer.json"
        self._tokenizer.write_text(json.dumps(_tokenizer_document()))

    @contextmanager
    def engines(self, pace: Pace) -> Iterator[tuple[int, int]]:
        """A prefill and a decode engine; yields their ports."""
        with ExitStack() as stack:
            ports = free_port(), free_port()
            for port, role in zip(ports, ("prefill", "decode"), strict=True):
                arguments = [port, role, pace.interval_us, pace.groups, self._tokenizer]
                environment = {"MOCK_ROLE": role}
                stack.enter_context(
                    _process([str(self._folder / "mock_engine"), *map(str, arguments)], environment)
                )
            yield ports

    def load(
        self, port: int, *, connections: int, requests: int, body: Mapping[str, object]
    ) -> dict[str, Any]:
        """Posts ``body`` to `/v1/completions`; what ``http_load`` tells. Exits when an answer was bad."""
        path = self._folder / "body.json"
        path.write_text(json.dumps(body))
        arguments = [port, "/v1/completions", connections, requests, path]
        command = [str(self._folder / "http_load"), *map(str, arguments)]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
        figures: dict[str, Any] = json.loads(ran.stdout)
        if ran.stderr:
            print(ran.stderr[:2000], file=sys.stderr)
        return figures


@contextmanager
def running(name: str, engines: tuple[int, int]) -> Iterator[Router]:
    """The router called ``name`` in front of a prefill and a decode engine, ready to serve."""
    port = free_port()
    urls = [f"http://127.0.0.1:{engine}" for engine in engines]
    with _process(_COMMANDS[name](port, *urls), {}) as process:
        _wait_until_it_serves(name, port, process)
        yield Router(name, port, process.pid)


def install_peers() -> None:
    """Make the peers' virtual environment when it is not there."""
    folder = _peers_folder()
    if (folder / "bin" / "vllm-router").exists() and (folder / "bin" / "sglang-router").exists():
        return
    print("installing the peers ...", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    wanted = [f"{name}=={version}" for name, version in VERSIONS.items()]
    subprocess.run([str(folder / "bin" / "pip"), "install", "-q", *wanted], check=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _ours(port: int, prefill: str, decode: str) -> list[str]:
    own = [sys.executable, "-m", "microserving", "router", "--program", "prefill_decode"]
    return [*own, "--port", str(port), "--prefill-peers", prefill, "--decode-peers", decode]


def _vllm(port: int, prefill: str, decode: str) -> list[str]:
    own = [str(_peers_folder() / "bin" / "vllm-router"), "--vllm-pd-disaggregation"]
    engines = ["--prefill", prefill, "--decode", decode, "--policy", "round_robin"]
    return [*own, *engines, *_peer_options(port), "--log-level", "warning"]


def _sglang(port: int, prefill: str, decode: str) -> list[str]:
    own = [str(_peers_folder() / "bin" / "python"), "-m", "sglang_router.launch_router"]
    engines = ["--pd-disaggregation", "--prefill", prefill, "8998", "--decode", decode]
    return [*own, *engines, "--policy", "round_robin", *_peer_options(port), "--log-level", "warn"]


_COMMANDS: Mapping[str, Callable[[int, str, str], list[str]]] = {
    "microserving": _ours,
    "vllm-router": _vllm,
    "sglang-router": _sglang,
}


def _peer_options(port: int) -> list[str]:
    return ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]


def _peers_folder() -> Path:
    return default_cache_dir() / "benchmarks" / "routers"


def _wait_until_it_serves(name: str, port: int, process: subprocess.Popen[bytes]) -> None:
    body = json.dumps({"model": "mock", "prompt": "hello", "max_tokens": 1}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(request, timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    sys.exit(f"{name} does not serve")


@contextmanager
def _process(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    if shutil.which(command[0]) is None:
        sys.exit(f"{command[0]} is not there")
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdout=subprocess.DEVNULL, stderr=_log()
    )
    try:
        yield process
    finally:
        family = _tree(process.pid)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(4)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in family[1:]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _tree(pid: int) -> list[int]:
    """``pid`` and all its descendants that live."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [each for child in children.read_text().split() for each in _tree(int(child))]
        except OSError:
            continue
    return found


def _cpu_ns(pid: int) -> int:
    """Of all its threads that live."""
    used = 0
    for times in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            used += int(times.read_text().split()[0])
        except OSError:
            continue
    return used


def _resident_pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0


def _tokenizer_document() -> dict[str, Any]:
    """A byte-level BPE of 8,192 tokens, as models have it, in the form in which an engine hands it out."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False)
    text = (HERE.parent / "data" / "english.txt").read_text()
    library.train_from_iterator(text.splitlines(), trainer)
    facts = {"version": 1, "bos_token_id": None, "eos_token_ids": [0], "prefix_ids": [], "suffix_ids": []}
    return {"tokenizer": library.to_str(), **facts, "special_tokens": {}, "chat_template": None}


def _log() -> IO[bytes]:
    """Where the processes' stderr goes: `MICROSERVING_BENCH_LOG`, else nowhere."""
    return open(os.environ.get("MICROSERVING_BENCH_LOG", os.devnull), "ab")
