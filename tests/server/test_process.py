"""A whole process: it stops on a signal, in time, with status 0; a busy port is found before the model is opened."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from microserving.engine.config import EngineConfig
from microserving.errors import ConfigError, ModelLoadError, StartupError
from microserving.front import bind_listener
from microserving.server import run
from microserving.server.run import read_secret, run_engine
from tests.reference.model_builder import write_tiny_hf

SCRIPT = Path(__file__).with_name("engine_process.py")


@contextlib.contextmanager
def process(*config: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    with subprocess.Popen([sys.executable, str(SCRIPT), *config], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline())
            transport = httpx.HTTPTransport(retries=20)  # the port is bound; it refuses until it is served
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=20) as client:
                yield child, client
        finally:
            child.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_streams_with_an_error_event_and_the_process_with_0(number: signal.Signals) -> None:
    with process("shutdown_timeout_s=0") as (child, client):
        body = {"prompt": "a", "max_tokens": 700, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_raw()
            first = next(pieces)
            assert first.startswith(b"data: {")
            child.send_signal(number)
            text = b"".join(pieces)
        assert text.count(b'"error"') == 1
        assert b"[DONE]" not in text
        assert child.wait(timeout=10) == 0
        assert child.stdout is not None
        assert child.stdout.read() == "ended ['MainThread']\n"
        with pytest.raises(httpx.ConnectError):
            httpx.get(client.base_url)


def streamed_over_the_signal(child: subprocess.Popen[str], client: httpx.Client, *, max_tokens: int) -> bytes:
    """What a client still reads when SIGTERM comes after the first piece."""
    body = {"prompt": "a", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_raw()
        next(pieces)
        child.terminate()
        return b"".join(pieces)


@pytest.mark.parametrize("config", [[], ["shutdown_timeout_s=20"]], ids=["unless told", "told"])
def test_with_time_for_it_a_stream_finishes_after_the_signal(config: list[str]) -> None:
    with process(*config) as (child, client):
        text = streamed_over_the_signal(child, client, max_tokens=60)
        assert text.count(b"[DONE]") == 1
        assert b'"error"' not in text
        assert child.wait(timeout=10) == 0  # at once, not after 20 s


def test_what_takes_longer_than_that_ends_with_an_error_event() -> None:
    with process("shutdown_timeout_s=0.2") as (child, client):
        text = streamed_over_the_signal(child, client, max_tokens=700)
        assert text.count(b'"error"') == 1
        assert child.wait(timeout=10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(number: signal.Signals) -> None:
    with process("shutdown_timeout_s=3600") as (child, client):
        body = {"prompt": "a", "max_tokens": 700, "stream": True, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            pieces = response.iter_raw()
            next(pieces)
            child.send_signal(number)
            while not refuses(client.base_url):
                next(pieces)  # goes on meanwhile
            child.send_signal(number)
            with pytest.raises(httpx.RemoteProtocolError):
                list(pieces)
        assert child.wait(timeout=10) == 1


def refuses(url: httpx.URL) -> bool:
    """Whether it has taken the first signal: new connections are refused from then on."""
    try:
        httpx.get(f"{url}/health")
    except httpx.ConnectError:
        return True
    return False


def test_an_engine_behind_a_router_does_not_wait_unless_told() -> None:
    def drain_s(**config: Any) -> float:
        return EngineConfig.model_validate(config).drain_s

    assert [drain_s(node_role=role) for role in ("hybrid", "prefill", "decode")] == [10.0, 0.0, 0.0]
    assert drain_s(node_role="decode", shutdown_timeout_s=3) == 3.0
    assert drain_s(shutdown_timeout_s=0) == 0.0


def test_an_idle_process_stops_while_a_client_keeps_its_connection() -> None:
    with process() as (child, client):
        assert client.get("/ready").status_code == 200
        child.terminate()
        assert child.wait(timeout=10) == 0


LOADING = """
import sys, tempfile, threading
from microserving.cli.main import main
from microserving.server import run

def load(config, transport, progress):
    transport.allocate(2**20)
    with tempfile.TemporaryDirectory(dir=config.cache_dir):
        print("loading", flush=True)
        threading.Event().wait()

run.open_parts = load
sys.exit(main(["serve", "--port", "0", "--cache-dir", sys.argv[1], "--runtime-dir", sys.argv[1] + "/run"]))
"""


def test_a_sigterm_while_the_model_loads_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOADING, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "loading\n"
            child.terminate()
            _, errors = child.communicate(timeout=30)
        finally:
            child.kill()
    assert child.returncode == 128 + signal.SIGTERM  # what a shell shows for a process that the signal ended
    assert errors == ""
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]


def test_a_busy_port_is_found_before_the_model_is_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = EngineConfig(model="/does/not/exist", port=port)
        with pytest.raises(StartupError, match=rf"cannot listen on 127\.0\.0\.1 port {port}") as caught:
            run_engine(config)
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("content", [None, "{}", "rubbish"])
def test_a_tokenizer_that_cannot_be_used_is_found_before_the_weights_are_packed(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_hf(tmp_path / "hf")
    if content is not None:
        (directory / "tokenizer.json").write_text(content)

    def create(*_: object, **__: object) -> None:
        raise AssertionError("the weights are packed")

    monkeypatch.setattr(run.TVMModelRunner, "create", create)
    config = EngineConfig(model=str(directory), port=0, runtime_dir=tmp_path / "run", cache_dir=tmp_path)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json") as caught:
        run_engine(config)
    assert "\n" not in caught.value.message


def test_an_address_that_is_not_ours() -> None:
    for host in ("192.0.2.1", "no.such.host.invalid"):
        with pytest.raises(StartupError, match="cannot listen"):
            bind_listener(host, 0)


def test_secrets(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("  0123456789abcdef\n")
    assert read_secret(file) == b"0123456789abcdef"
    assert read_secret(None) is None
    file.write_text("0123456789abcde\n")
    with pytest.raises(ConfigError, match="15 bytes"):
        read_secret(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_secret(tmp_path / "none")
