"""The launcher over fake programs: start-up, every way out, restarts. After each test nothing may be left."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from microserving.cluster.runtime_dir import ADMIN_SOCKET, card_of

LAUNCHER = Path(__file__).with_name("fake_launcher.py")
ENGINES = ("prefill-0", "decode-0")
CONFIG: dict[str, Any] = {
    "router": {"address": "127.0.0.1:0", "program": "prefill_decode"},
    "nodes": [{"id": "prefill-0", "role": "prefill"}, {"id": "decode-0", "role": "decode"}],
}


class Run:
    """A launcher process; reads its output and knows which processes it started."""

    def __init__(self, base: Path, modes: dict[str, str], **task: Any) -> None:
        self.base = base
        text = json.dumps({"config": CONFIG, "base": str(base), "modes": modes} | task)
        self.process = subprocess.Popen(
            [sys.executable, str(LAUNCHER), text], stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self.pidfds: dict[int, int] = {}
        self.pid_of: dict[str, int] = {}

    def wait_for(self, wanted: str) -> str:
        """Read until a line contains ``wanted``; a launcher that ends before is a failure."""
        while True:
            line = self._read_line()
            if line is None:
                raise AssertionError(f"ended without {wanted!r}:\n" + "\n".join(self.lines))
            if wanted in line:
                return line

    def wait_end(self) -> int:
        while self._read_line() is not None:
            pass
        return self.process.wait()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait_end()

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def ready_state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.base / "ready.json").read_text())
        return state

    def assert_nothing_left(self) -> None:
        assert self.pidfds, "the test saw no process start"
        for pid, descriptor in self.pidfds.items():
            assert ended(descriptor, timeout_s=10.0), f"process {pid} lives on"
        assert sorted(path.name for path in self.base.iterdir()) == []

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()
        for pid, descriptor in self.pidfds.items():
            if not ended(descriptor, timeout_s=0):
                os.kill(pid, signal.SIGKILL)
            os.close(descriptor)

    def _read_line(self) -> str | None:
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        if not line:
            return None
        self.lines.append(line.rstrip("\n"))
        found = re.search(r"(\S+): pid (\d+)", line)
        if found:
            self._watch(found[1], int(found[2]))
        return self.lines[-1]

    def _watch(self, name: str, pid: int) -> None:
        self.pid_of[name] = pid
        try:
            self.pidfds[pid] = os.pidfd_open(pid)
        except ProcessLookupError:
            self.pidfds[pid] = os.open(os.devnull, os.O_RDONLY)  # already gone: always readable


def ended(pidfd: int, timeout_s: float) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(modes: dict[str, str] | None = None, **task: Any) -> Run:
        run = Run(tmp_path, modes or {}, **task)
        runs.append(run)
        return run

    yield start
    for run in runs:
        run.close()


Launch = Callable[..., Run]


def assert_snippets(lines: list[str], url: str) -> None:
    """What is printed to be pasted: the shell takes the curl command, Python the program; both end quickly."""
    first = next(i for i, line in enumerate(lines) if line.startswith("  curl "))
    words = shlex.split("\n".join(lines[first : first + 2]))
    body = json.loads(words[words.index("-d") + 1])
    assert (body["max_tokens"], body["temperature"], body["messages"][0]["role"]) == (32, 0, "user")
    first = next(i for i, line in enumerate(lines) if "from openai import" in line)
    calls: list[dict[str, Any]] = []

    class OpenAI:
        def __init__(self, base_url: str, api_key: str) -> None:
            assert base_url == f"{url}/v1"
            self.completions = self

        def create(self, **fields: Any) -> Any:
            calls.append(fields)
            return SimpleNamespace(choices=[SimpleNamespace(text="there was")])

    printed: list[str] = []
    code = textwrap.dedent("\n".join(line for line in lines[first + 1 : first + 5] if line.startswith("  ")))
    exec(code, {"OpenAI": OpenAI, "print": printed.append})
    assert printed == ["there was"]
    assert (calls[0]["max_tokens"], calls[0]["temperature"]) == (32, 0)


def test_what_was_started_last_ends_first(launch: Launch) -> None:
    """The router uses its engines: while it ends its requests they must still be there."""
    run = launch({"router": "slow-term", "prefill-0": "slow-term"})
    run.wait_for("Ctrl-C")
    assert run.stop() == 0
    ends = [line for line in run.lines if ": ends" in line]
    assert [line.partition(":")[0] for line in ends] == ["router", "prefill-0"]
    run.assert_nothing_left()


def test_engines_outlive_the_drain_of_their_router(launch: Launch) -> None:
    config = CONFIG | {"router": CONFIG["router"] | {"shutdown_timeout_s": 60.0}}
    run = launch({"router": "slow-term", "prefill-0": "slow-term"}, config=config, first_stop_s=0.0)
    run.wait_for("Ctrl-C")
    assert run.stop(signal.SIGINT) == 0
    ends = [line for line in run.lines if ": ends" in line]
    assert [line.partition(":")[0] for line in ends] == ["router", "prefill-0"]
    run.assert_nothing_left()


def test_a_second_ctrl_c_does_not_wait_for_the_router(launch: Launch) -> None:
    config = CONFIG | {"router": CONFIG["router"] | {"shutdown_timeout_s": 3600.0}}
    run = launch({"router": "stubborn"}, config=config)
    run.wait_for("Ctrl-C")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("Ctrl-C again ends at once")
    assert run.stop(signal.SIGINT) == 0
    run.assert_nothing_left()


def test_starts_tells_and_leaves_nothing(launch: Launch) -> None:
    run = launch()
    ready = run.wait_for("Ready: http://127.0.0.1:")
    assert "router program prefill_decode over 2 engines" in ready
    run.wait_for("Ctrl-C")
    state = run.ready_state()
    assert state["pids"] == {name: run.pid_of[name] for name in (*ENGINES, "router")}
    assert set(state["nodes"]) == set(ENGINES)
    assert state["url"] in ready
    assert f'base_url="{state["url"]}/v1"' in run.text
    assert f"curl {state['url']}/v1/chat/completions" in run.text
    assert_snippets(run.lines, state["url"])
    directory = Path(state["runtime_dir"])
    assert card_of(directory / ADMIN_SOCKET) == f"local at {state['url']}"
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "cluster-secret").stat().st_mode & 0o777 == 0o600
    assert len((directory / "cluster-secret").read_bytes()) == 64
    assert run.stop() == 0
    run.assert_nothing_left()


def test_every_child_leads_its_own_group(launch: Launch) -> None:
    run = launch()
    run.wait_for("Ctrl-C")
    groups = re.findall(r"pid (\d+) group (\d+)", run.text)
    assert len(groups) == 5
    assert all(pid == group for pid, group in groups)
    assert run.stop(signal.SIGINT) == 0
    run.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    ("modes", "moment"),
    [
        ({"model": "hang"}, "10%"),
        ({"prefill-0": "unready"}, "decode-0: ready"),
        ({"router": "unready"}, "router: serving"),
    ],
    ids=["fetching", "engines-starting", "router-starting"],
)
def test_a_signal_during_start_up_leaves_nothing(
    launch: Launch, number: signal.Signals, modes: dict[str, str], moment: str
) -> None:
    run = launch(modes)
    run.wait_for(moment)
    assert run.stop(number) == 0
    assert "Ready:" not in run.text
    run.assert_nothing_left()


@pytest.mark.parametrize(("modes", "moment"), [({"model": "hang"}, "10%"), ({}, "Ctrl-C")])
def test_a_killed_launcher_takes_its_children_along(
    launch: Launch, modes: dict[str, str], moment: str, tmp_path: Path
) -> None:
    run = launch(modes)
    run.wait_for(moment)
    run.process.kill()
    run.wait_end()
    assert all(ended(descriptor, timeout_s=10.0) for descriptor in run.pidfds.values())
    assert list(tmp_path.glob("microserving-up-*")), "nobody could remove the directory"
    # The next launcher removes what the killed one left.
    (tmp_path / "ready.json").unlink(missing_ok=True)
    after = launch()
    after.wait_for("Ctrl-C")
    assert list(tmp_path.glob("microserving-up-*")) == [Path(after.ready_state()["runtime_dir"])]
    assert after.stop() == 0
    after.assert_nothing_left()


def test_a_child_that_ignores_sigterm_is_killed(launch: Launch) -> None:
    run = launch({"decode-0": "stubborn"}, stop_grace_s=0.2)
    run.wait_for("Ctrl-C")
    assert run.stop() == 0
    run.assert_nothing_left()


def test_a_second_ctrl_c_kills_at_once(launch: Launch) -> None:
    run = launch({"decode-0": "stubborn"}, stop_grace_s=3600)
    run.wait_for("Ctrl-C")
    run.process.send_signal(signal.SIGINT)
    run.wait_for("stopping")
    assert run.stop(signal.SIGINT) == 0
    run.assert_nothing_left()


def test_a_child_that_dies_at_start_ends_all_and_shows_its_last_lines(launch: Launch) -> None:
    run = launch({"decode-0": "log-and-die", "prefill-0": "unready"}, verbose=False)
    assert run.wait_end() == 1
    assert run.lines[-1] == "microserving: error: decode-0 ended with status 3"
    assert "  decode-0: line 29" in run.lines
    assert "  decode-0: line 10" in run.lines
    assert "  decode-0: line 9" not in run.lines  # the last 20


def test_a_child_that_says_why_is_quoted_in_one_line(launch: Launch) -> None:
    run = launch({"prefill-0": "error"})
    assert run.wait_end() == 1
    assert run.lines[-1] == "microserving: error: prefill-0: the model is broken"
    run.assert_nothing_left()


def test_a_failed_fetch_starts_no_engine(launch: Launch) -> None:
    run = launch({"model": "error"})
    assert run.wait_end() == 1
    assert run.lines[-1] == "microserving: error: the model is broken"
    assert list(run.pid_of) == ["program", "model"]
    run.assert_nothing_left()


def test_a_wrong_program_is_found_before_anything_else_starts(launch: Launch) -> None:
    run = launch({"program": "error"})
    assert run.wait_end() == 1
    assert run.lines[-1] == "microserving: error: the model is broken"
    assert list(run.pid_of) == ["program"]
    run.assert_nothing_left()


def test_a_child_that_never_becomes_ready_is_given_up(launch: Launch) -> None:
    run = launch({"prefill-0": "unready"}, start_timeout_s=1.0)
    assert run.wait_end() == 1
    assert run.lines[-1] == "microserving: error: prefill-0 is not ready after 1 s"
    run.assert_nothing_left()


def test_a_busy_port_is_one_line(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = CONFIG | {"router": {"address": f"127.0.0.1:{port}"}}
        run = launch(config=config)
        assert run.wait_end() == 1
    assert run.lines == [f"microserving: error: router: port {port} on 127.0.0.1 is already in use"]
    assert list(run.base.iterdir()) == []


@pytest.mark.parametrize("name", ["decode-0", "router"])
def test_what_dies_later_is_started_again(launch: Launch, name: str) -> None:
    run = launch()
    run.wait_for("Ctrl-C")
    first = run.pid_of[name]
    for delay in ("0.05", "0.1"):
        os.kill(run.pid_of[name], signal.SIGKILL)
        run.wait_for(f"{name} was killed by SIGKILL; starting it again in {delay} s")
        run.wait_for(f"{name}: ready again")
        assert run.ready_state()["pids"] == {child: run.pid_of[child] for child in (*ENGINES, "router")}
    assert run.pid_of[name] != first
    assert run.stop() == 0
    run.assert_nothing_left()


def test_a_signal_while_a_restart_waits(launch: Launch) -> None:
    run = launch(first_restart_s=3600)
    run.wait_for("Ctrl-C")
    os.kill(run.pid_of["prefill-0"], signal.SIGKILL)
    run.wait_for("starting it again in 3600 s")
    assert run.stop() == 0
    run.assert_nothing_left()


def test_engines_are_pinned_to_different_cores(launch: Launch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    run = launch({"prefill-0": "affinity", "decode-0": "affinity"})
    run.wait_for("Ctrl-C")
    shown = {name: json.loads(text) for name, text in re.findall(r"(\S+): cores (\[.*\])", run.text)}
    if len(cores) >= 2:
        assert sorted(shown["prefill-0"] + shown["decode-0"]) == cores
    else:
        assert shown == dict.fromkeys(ENGINES, cores)
    assert run.stop() == 0


def test_logs_are_kept_where_asked_and_warnings_shown(launch: Launch, tmp_path: Path) -> None:
    logs = tmp_path / "kept"
    run = launch({"decode-0": "warn"}, log_dir=str(logs), verbose=False)
    run.wait_for("Ctrl-C")
    assert run.stop() == 0
    assert sum("decode-0: 2026-01-01" in line for line in run.lines) == 1
    assert "WARNING engine the pool is small" in run.text
    log = (logs / "decode-0.log").read_text()
    assert "WARNING engine the pool is small\n" in log
    assert "INFO engine nothing to see\n" in log


def test_one_hybrid_engine_needs_no_router(launch: Launch) -> None:
    run = launch(config={"nodes": [{"id": "engine-0"}]})
    assert "engine engine-0 alone, no router" in run.wait_for("Ready:")
    run.wait_for("Ctrl-C")
    state = run.ready_state()
    assert state["url"] == state["nodes"]["engine-0"]
    assert list(state["pids"]) == ["engine-0"]
    assert run.stop() == 0
    run.assert_nothing_left()
