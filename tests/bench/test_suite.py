"""A whole measurement that does not go as it should: nothing that was measured is lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from microserving.bench import suite
from microserving.bench.arrivals import Closed
from microserving.bench.clusters import Started
from microserving.bench.experiment import ExperimentSettings
from microserving.bench.lengths import Lengths
from microserving.bench.load import LoadSettings
from microserving.bench.report import Report
from microserving.bench.suite import Candidate, run_suite, serving
from microserving.bench.table import notes_on
from microserving.bench.targets import Target
from microserving.bench.texts import Prose, by_length
from microserving.bench.workloads import Sampling, Style, Synthetic
from microserving.cli import main as cli
from microserving.cluster.config import parse_cluster_config
from microserving.errors import EngineUnavailable, StartupError
from microserving.observability.console import Console

from .mock_server import Background, MockServer, Plan, listening

PLAN = suite.Plan(
    Style(Prose(), Sampling()),
    lambda style: Synthetic(style, Lengths.parse("9"), Lengths.parse("4")),
    [Closed(1), Closed(2), Closed(3)],
    ExperimentSettings(LoadSettings(2, keep_load=False)),
    by_length(),
)
"""Three runs of two requests."""
BEFORE_THE_SECOND_RUN = 3
"""A target is prepared for the first request, and for each run."""


class Lines(Console):
    """Knows when it was said that the measurement ends."""

    def __init__(self) -> None:
        super().__init__()
        self.ending = asyncio.Event()

    def line(self, text: str = "") -> None:
        if text.startswith("ending"):
            self.ending.set()


class Disturbed(Target):
    """Something happens when it is prepared for the ``number``th time."""

    def __init__(self, url: str, number: int, disturbance: Callable[[], Awaitable[None]]) -> None:
        super().__init__("t", url)
        self._number = number
        self._disturbance = disturbance

    async def prepare(self) -> None:
        self._number -= 1
        if self._number == 0:
            await self._disturbance()


async def disturbed(
    disturbance: Callable[[Lines], Awaitable[None]], number: int = BEFORE_THE_SECOND_RUN
) -> tuple[Report, int]:
    """The report, and how many requests the server got."""
    server, console = MockServer(itertools.repeat(Plan(0.001, (0.001,)))), Lines()
    async with listening(server) as url:
        target = Disturbed(url, number, lambda: disturbance(console))
        try:
            report = await run_suite([target], PLAN, console)
        finally:
            await target.close()
    assert not [task for task in asyncio.all_tasks() if "Experiment" in repr(task)]
    return report, len(server.served)


async def gone(_: Lines) -> None:
    raise EngineUnavailable("t: its router does not answer")


async def ctrl_c(console: Lines) -> None:
    """The user has had enough while a program is deployed, which then ends."""
    os.kill(os.getpid(), signal.SIGINT)
    await console.ending.wait()


async def ctrl_c_twice(console: Lines) -> None:
    """... which does not end."""
    await ctrl_c(console)
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.Event().wait()


def test_a_failure_keeps_the_runs_before_it() -> None:
    report, sent = asyncio.run(disturbed(gone))
    assert (report["stopped"], report["error"]) == (True, "t: its router does not answer")
    assert [run["summary"]["completed"] for run in report["runs"]] == [2]
    assert sent == 1 + 2


def test_a_failure_before_anything_was_measured_is_raised() -> None:
    with pytest.raises(EngineUnavailable):
        asyncio.run(disturbed(gone, BEFORE_THE_SECOND_RUN - 1))


@pytest.mark.parametrize("what", [ctrl_c, ctrl_c_twice])
def test_ctrl_c_between_two_runs_begins_no_other_and_keeps_the_first(
    what: Callable[[Lines], Awaitable[None]],
) -> None:
    report, sent = asyncio.run(disturbed(what))
    assert (report["stopped"], report["error"]) == (True, None)
    assert [run["load"] for run in report["runs"]] == ["1 at once"]
    assert sent == 1 + 2


def test_ctrl_c_before_the_first_run() -> None:
    report, sent = asyncio.run(disturbed(ctrl_c, 1))
    assert (report["stopped"], report["runs"]) == (True, [])
    assert sent <= 1


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ({"name": "mine", "settings": {"a": 1}, "version": 3}, None),
        ({"name": "round_robin", "settings": {}, "version": 1}, "another program: round_robin, version 1"),
        ({"name": "mine", "settings": {"a": 2}, "version": 3}, "another program: mine, version 3"),
        (None, "did not answer any more"),
    ],
)
def test_a_run_whose_program_was_taken_back_is_not_that_programs(
    program: dict[str, Any] | None, told: str | None
) -> None:
    """The router goes over to its last good program when one fails; the figures would be shown under a wrong name."""
    mine = {"program": {"name": "mine", "settings": {"a": 1}, "version": 3}, "requests_in_flight": 0}

    class Router(Target):
        answers = iter([mine, mine])  # before the run; when all have ended

        async def stats(self) -> dict[str, Any] | None:
            return next(self.answers, None if program is None else mine | {"program": program})

    async def run() -> Report:
        async with listening(MockServer(itertools.repeat(Plan(0.001, ())))) as url:
            target = Router("t", url)
            report = await run_suite([target], replace(PLAN, loads=[Closed(1)]), Console())
            await target.close()
        return report

    found = asyncio.run(run())["runs"][0]
    if told is None:
        assert found["disturbance"] is None
    else:
        assert told in found["disturbance"]
        assert found["disturbance"] in "".join(notes_on(found))


def test_clusters_that_want_a_key_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[bytes | None]:
        server = MockServer(itertools.repeat(Plan(0.001, ())))
        async with listening(server) as url:

            @asynccontextmanager
            async def started(*_: Any, **__: Any) -> AsyncIterator[Started]:
                yield Started(url, None)

            monkeypatch.setattr(suite, "started", started)
            candidate = Candidate("a", parse_cluster_config({"nodes": [{"id": "h", "role": "hybrid"}]}, "a"))
            async with serving([candidate], Console(), timeout_s=9.0, api_key="k") as (target,):
                await target.ask("/completions", {"model": "mock", "prompt": "a", "stream": True})
        return server.keys

    assert asyncio.run(run()) == [b"bearer k"]


# The command line


@pytest.fixture
def server() -> Iterator[Background]:
    with Background(itertools.repeat(Plan(0.01, (0.002,) * 4, prompt_tokens=600))) as server:
        yield server


def test_files_are_written_before_the_clusters_end(
    server: Background, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def clinging(*_: Any, **__: Any) -> AsyncIterator[list[Target]]:
        yield []
        raise StartupError("an engine does not end")

    monkeypatch.setattr(suite, "serving", clinging)
    load = ["--rate", "50", "--requests", "3", "--no-keep-load"]
    out = ["--json", str(tmp_path / "a.json"), "--svg", str(tmp_path / "a.svg")]
    assert cli.main(["bench", "--base-url", server.url, *load, *out]) == 1
    shown = capsys.readouterr()
    assert "TTFT, from the time it was sent" in shown.out
    assert "an engine does not end" in shown.err
    assert json.loads((tmp_path / "a.json").read_text())["runs"][0]["summary"]["completed"] == 3
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def trace(folder: Path) -> list[str]:
    lines = [{"timestamp": number / 50, "input_tokens": 5, "output_tokens": 2} for number in range(5)]
    (folder / "t.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return ["--workload", "trace", "--trace", str(folder / "t.jsonl")]


@pytest.mark.parametrize(("more", "counted"), [([], 3), (["--requests", "2", "--no-keep-load"], 2)])
def test_a_report_says_how_much_of_a_trace_counted(
    server: Background, tmp_path: Path, more: list[str], counted: int
) -> None:
    more = [*more, "--json", str(tmp_path / "a.json")]
    assert cli.main(["bench", "--base-url", server.url, *trace(tmp_path), "--warmup", "2", *more]) == 0
    data = json.loads((tmp_path / "a.json").read_text())
    assert (data["sessions"], data["warmup"]) == (counted, 2)
    run = data["runs"][0]
    assert (run["summary"]["requests"], len(run["requests"])) == (counted, 2 + counted)


def test_nothing_that_counts_is_no_success(
    server: Background, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--base-url", server.url, *trace(tmp_path), "--warmup", "5"]) == 1
    assert "--warmup 5 leaves nothing to count of the trace's 5 requests" in capsys.readouterr().err
    assert cli.main(["bench", "--base-url", server.url, *trace(tmp_path), "--requests", "6"]) == 1
    assert "--warmup 0 leaves fewer than 6 to count of the trace's 5 requests" in capsys.readouterr().err
    load = ["--concurrency", "1", "--requests", "9", "--warmup", "9", "--max-run", "0.001"]
    assert cli.main(["bench", "--base-url", server.url, *load]) == 1
    assert capsys.readouterr().out == "nothing was measured\n"
