"""Runs against a mock server in virtual time: every statistic is the truth, also when the server stalls."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from microserving.bench import load as load_module
from microserving.bench.arrivals import Arrivals, Closed, Constant, Poisson, Replay
from microserving.bench.lengths import Lengths
from microserving.bench.load import Load, LoadSettings
from microserving.bench.measurement import Measured
from microserving.bench.progress import state_of
from microserving.bench.statistics import Slo, Spread, Summary, summarize
from microserving.bench.texts import Prose
from microserving.bench.workloads import Chat, Sampling, Session, Style, Synthetic, Workload
from microserving.testing.virtual_time import run_virtual

from .mock_server import MockServer, Plan

STYLE = Style(Prose(), Sampling())
WORKLOAD = Synthetic(STYLE, Lengths.parse("12"), Lengths.parse("4"))
SLACK = 0.02


def plans(seed: int = 1) -> Iterator[Plan]:
    """Of all kinds: the first piece after 0.05 to 1 s, 1 to 40 gaps of 5 to 80 ms."""
    draw = random.Random(seed)
    while True:
        gaps = tuple(draw.uniform(0.005, 0.08) for _ in range(draw.randint(1, 40)))
        yield Plan(draw.uniform(0.05, 1.0), gaps, prompt_tokens=draw.randint(1, 99))


def measured(
    arrivals: Arrivals,
    given: Iterator[Plan],
    sessions: int,
    *,
    workload: Workload = WORKLOAD,
    server: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[Measured], MockServer]:
    """The records of a run, and the server that it was against."""

    async def run() -> tuple[list[Measured], MockServer]:
        mock = MockServer(given, **(server or {}))
        load = Load(mock, workload, arrivals, LoadSettings(sessions, **settings))
        await load.prepare()
        records = await load.run()
        assert len(asyncio.all_tasks()) == 1
        return records, mock

    return run_virtual(run())


def assert_spread(found: Spread, truth: Sequence[float]) -> None:
    assert found.count == len(truth)
    assert found.mean == pytest.approx(np.mean(truth), rel=SLACK)
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99), ("max", 100)):
        assert getattr(found, name) == pytest.approx(np.percentile(truth, share), rel=SLACK, abs=1e-9)


def assert_true(summary: Summary, given: Sequence[Plan], waits: Sequence[float]) -> None:
    """All latencies, worked out from the plans. waits: how long each request waited for its turn."""
    work = [plan.first_s + sum(plan.gaps) for plan in given]
    found = summary.latencies
    assert_spread(found["ttft"], [wait + plan.first_s for wait, plan in zip(waits, given, strict=True)])
    assert_spread(found["jct"], [wait + all_of_it for wait, all_of_it in zip(waits, work, strict=True)])
    assert_spread(found["tpot"], [sum(plan.gaps) / len(plan.gaps) for plan in given])
    assert_spread(found["itl"], [gap for plan in given for gap in plan.gaps])
    assert summary.output_tokens == sum(plan.output_tokens for plan in given)
    assert summary.prompt_tokens == sum(plan.prompt_tokens for plan in given)
    assert (summary.completed, summary.failed, summary.disagreeing, summary.no_usage) == (len(given), 0, 0, 0)


@pytest.mark.parametrize("rate", [0.5, 4.0, 60.0])
def test_every_statistic_of_an_open_loop_is_the_truth(rate: float) -> None:
    given = list(itertools.islice(plans(), 300))
    records, server = measured(Poisson(rate, seed=3), iter(given), 300, keep_load=False)
    summary = summarize(records)
    assert_true(summary, given, [0.0] * 300)
    assert_spread(summary.latencies["queueing"], [0.0] * 300)
    last = max(served.ended for served in server.served)
    assert summary.wall_s == pytest.approx(last - server.served[0].came, rel=SLACK)
    assert summary.requests_per_s == pytest.approx(300 / summary.wall_s)
    assert summary.output_tokens_per_s == pytest.approx(summary.output_tokens / summary.wall_s)


def turns(
    arrivals: Sequence[float], work: Sequence[float], stall: tuple[float, float] | None = None
) -> list[float]:
    """How long each waits at a server that does one after the other; a stall holds up what would leave within it."""
    free, waits = 0.0, []
    for at, takes in zip(arrivals, work, strict=True):
        begin = max(at, free)
        waits.append(begin - at)
        free = begin + takes
        if stall is not None and stall[0] <= free < stall[1]:
            free = stall[1]
    return waits


def test_a_slow_server_does_not_slow_the_load_down() -> None:
    """It does one request after the other and is overloaded; latencies grow as queueing theory says (Lindley)."""
    given = list(itertools.islice(plans(2), 200))
    times = list(itertools.islice(Poisson(1.0, seed=5).times(), 200))
    server = {"one_at_a_time": True}
    records, mock = measured(Poisson(1.0, seed=5), iter(given), 200, server=server, keep_load=False)
    assert_true(summarize(records), given, turns(times, [plan.first_s + sum(plan.gaps) for plan in given]))
    assert [served.came for served in mock.served] == pytest.approx(times)


@pytest.mark.parametrize("max_concurrency", [None, 1])
def test_a_stall_is_felt_by_all_that_was_due_in_it(max_concurrency: int | None) -> None:
    """No coordinated omission: also when the client itself sends one request after the other, every request that would
    have been sent during the stall of 4 s counts with its wait."""
    plan = Plan(0.1, ())
    times = list(itertools.islice(Constant(5.0).times(), 100))
    waits = turns(times, [0.1] * 100, (6.0, 10.0))
    records, mock = measured(
        Constant(5.0),
        itertools.repeat(plan),
        100,
        server={"stall": (6.0, 10.0), "one_at_a_time": True},
        max_concurrency=max_concurrency,
        keep_load=False,
    )
    summary = summarize(records)
    truth = [wait + (4.0 if at == 6.0 else 0.1) for at, wait in zip(times, waits, strict=True)]
    assert [served.pieces[0] - at for served, at in zip(mock.served, times, strict=True)] == pytest.approx(
        truth
    )
    assert_spread(summary.latencies["ttft"], truth)
    assert_spread(summary.latencies["jct"], truth)
    assert summary.latencies["ttft"].p90 > 3.0
    if max_concurrency:  # what a closed client would have seen: one slow request
        assert summary.latencies["ttft_from_sent"].p90 == pytest.approx(0.1)
        assert_spread(summary.latencies["queueing"], waits)


def test_a_closed_loop_sends_when_an_answer_has_ended() -> None:
    records, mock = measured(Closed(3), itertools.repeat(Plan(0.5, (0.25,))), 30, warmup=6)
    assert [record.counted for record in records[:6]] == [False] * 6
    summary = summarize(records)
    assert (summary.requests, summary.completed) == (30, 30)
    assert_spread(summary.latencies["jct"], [0.75] * 30)
    assert_spread(summary.latencies["queueing"], [0.0] * 30)
    assert sorted(served.came for served in mock.served)[:36] == pytest.approx(
        [0.75 * (i // 3) for i in range(36)]
    )


def test_warm_up_is_left_out_and_the_load_is_kept_up_to_the_end() -> None:
    records, mock = measured(Constant(10.0), itertools.repeat(Plan(2.0, ())), 20, warmup=10)
    summary = summarize(records)
    assert (summary.requests, summary.completed) == (20, 20)
    assert sum(record.counted for record in records) == 20
    assert [record.scheduled for record in records if record.counted] == pytest.approx(
        [1.0 + i / 10 for i in range(20)]
    )
    assert len(mock.served) >= 49  # sent until the last counted one, of 2.9 s, ended at 4.9 s
    assert {record.error for record in records[30:]} == {"interrupted"}


def test_a_replay_sends_at_the_recorded_times_and_no_more() -> None:
    records, mock = measured(Replay((0.0, 0.5, 4.0), speed=2.0), itertools.repeat(Plan()), 3)
    assert [served.came for served in mock.served] == pytest.approx([0.0, 0.25, 2.0])
    assert all(record.ok for record in records)


def test_failures_are_counted_by_kind_and_have_no_latencies() -> None:
    given = [Plan(), Plan(status=503), Plan(cut=True), Plan(), Plan(status=503)]
    records, _ = measured(Constant(1.0), iter(given), 5, keep_load=False)
    summary = summarize(records, Slo(ttft=9))
    assert summary.errors == {"503 overloaded": 2, "the stream was cut off": 1}
    assert (summary.completed, summary.failed, summary.good) == (2, 3, 2)
    assert summary.latencies["jct"].count == 2
    assert summary.good_share == 0.4


def test_goodput_counts_those_that_meet_every_objective() -> None:
    given = [Plan(0.1, (0.01,) * 9), Plan(0.3, (0.01,) * 9), Plan(0.1, (0.05,) * 9), Plan(0.1, ())]
    records, _ = measured(Constant(1.0), iter(given), 4, keep_load=False)
    for text, good in (("ttft=200ms,tpot=20ms", 2), ("ttft=0.2s", 3), ("jct=500ms", 3), ("itl=20ms", 3)):
        assert summarize(records, Slo.parse(text)).good == good


def test_a_run_that_is_stopped_keeps_what_was_measured() -> None:
    async def run() -> list[Measured]:
        server = MockServer(itertools.repeat(Plan(1.0, ())))
        load = Load(server, WORKLOAD, Constant(2.0), LoadSettings(100))
        asyncio.get_running_loop().call_later(10.1, load.stop)
        return await load.run()

    records = run_virtual(run())
    summary = summarize(records, Slo(jct=60.0))
    assert (summary.requests, summary.completed, summary.interrupted, summary.failed) == (21, 19, 2, 0)
    assert (summary.good, summary.good_share) == (19, 1.0)
    assert (
        summarize(records).as_dict().items()
        >= {"good": None, "good_share": None, "goodput_per_s": None}.items()
    )


def test_texts_are_made_before_anything_is_measured() -> None:
    """Of the counted ones, and of as many that keep up the load: to make one takes the client milliseconds."""
    made: list[tuple[int, float]] = []

    class Noted(Synthetic):
        def session(self, number: int) -> Session:
            made.append((number, asyncio.get_running_loop().time()))
            return super().session(number)

    noted = Noted(STYLE, Lengths.parse("12"), Lengths.parse("4"))
    measured(Constant(1.0), itertools.repeat(Plan(9.5, ())), 5, warmup=2, workload=noted)
    assert made[:12] == [(number, 0.0) for number in range(12)]
    assert [number for number, _ in made] == list(range(len(made)))
    assert len(made) > 12  # the last counted one, due at 6 s, ended at 15.5 s
    made.clear()
    measured(Closed(3), itertools.repeat(Plan(0.5, ())), 5, workload=noted, keep_load=False)
    assert made == [(number, 0.0) for number in range(5)]


def test_texts_that_were_not_made_before_are_made_between_two_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right after one send it would hold that one up: its task has not begun."""
    monkeypatch.setattr(load_module, "_MAX_PREPARED", 0)
    made: list[float] = []

    class Noted(Synthetic):
        def session(self, number: int) -> Session:
            loop: Any = asyncio.get_running_loop()
            made.append(loop.time())
            loop._now += 0.02  # that long the client does nothing else
            return super().session(number)

    noted = Noted(STYLE, Lengths.parse("12"), Lengths.parse("4"))
    records, mock = measured(
        Constant(1.0), itertools.repeat(Plan(0.1, ())), 4, workload=noted, keep_load=False
    )
    assert made == pytest.approx([0.0, 0.51, 1.5, 2.5])
    assert [served.came for served in mock.served] == pytest.approx([0.02, 1.0, 2.0, 3.0])
    assert len(records) == 4


def test_a_stopped_load_prepares_and_sends_nothing() -> None:
    async def run() -> tuple[list[Measured], int]:
        server = MockServer(itertools.repeat(Plan()))
        load = Load(server, WORKLOAD, Constant(2.0), LoadSettings(100))
        load.stop()
        await load.prepare()
        return await load.run(), len(server.served)

    assert run_virtual(run()) == ([], 0)


def test_progress_says_how_many_are_done_run_and_failed() -> None:
    async def run() -> list[str]:
        given = iter([Plan(0.15, (0.5,)), Plan(status=503), Plan(0.35, (0.5,))])
        settings = LoadSettings(3, keep_load=False)
        shown: list[str] = []
        load = Load(
            MockServer(given), WORKLOAD, Constant(10.0), settings, lambda load: shown.append(state_of(load))
        )
        await load.run()
        assert (load.running, load.failed) == (0, 1)
        return shown

    assert run_virtual(run()) == [
        "0/3 done, 1 running",
        "0/3 done, 2 running",
        "1/3 done, 1 running, 1 FAILED",
        "1/3 done, 2 running, 1 FAILED, TTFT p50 0.15 s",
        "2/3 done, 1 running, 1 FAILED, TTFT p50 0.25 s",
        "3/3 done, 0 running, 1 FAILED, TTFT p50 0.25 s",
    ]


def test_what_was_late_when_its_run_was_cut_has_missed_its_objective() -> None:
    """One after the other, of 1 s each, due every half second: when the run is cut at 10.1 s, eleven have not ended, and
    those due before 7.9 s are late by any objective of 2.2 s."""

    async def run() -> list[Measured]:
        server = MockServer(itertools.repeat(Plan(0.5, (0.5,))), one_at_a_time=True)
        load = Load(server, WORKLOAD, Constant(2.0), LoadSettings(100))
        asyncio.get_running_loop().call_later(10.1, load.stop)
        return await load.run()

    records = run_virtual(run())
    for objective, good, missed in (("ttft=2.2s", 4, 6), ("jct=2.2s", 3, 6), ("ttft=60s", 10, 0)):
        summary = summarize(records, Slo.parse(objective), 10.1)
        assert (summary.requests, summary.completed, summary.interrupted) == (21, 10, 11)
        assert (summary.good, summary.missed) == (good, missed)
        assert summary.good_share == pytest.approx(good / (10 + missed))


def test_a_cancelled_run_leaves_no_task() -> None:
    async def run() -> int:
        load = Load(MockServer(itertools.repeat(Plan())), WORKLOAD, Constant(9.0), LoadSettings(100))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):
                await load.run()
        return len(asyncio.all_tasks())

    assert run_virtual(run()) == 1


def test_a_conversation_says_what_was_answered_and_thinks_in_between() -> None:
    chat = Chat(STYLE, Lengths.parse("5"), Lengths.parse("4"), turns=3, think_s=0.0, system_tokens=9)
    records, mock = measured(
        Constant(1.0), itertools.repeat(Plan(0.5, (0.1,))), 2, workload=chat, keep_load=False
    )
    talks = [served.body["messages"] for served in mock.served]
    first = talks[0]
    longest = next(talk for talk in talks if len(talk) == 6 and talk[:2] == first)
    assert [message["role"] for message in longest] == ["system", *("user", "assistant") * 2, "user"]
    assert longest[2]["content"] == "w0 w1 "
    assert [(r.session, r.turn, r.phase) for r in records if r.session == 0] == [
        (0, 0, "turn 1"), (0, 1, "turn 2"), (0, 2, "turn 3")
    ]  # fmt: skip
    assert [r.scheduled for r in records if r.session == 0] == pytest.approx([0.0, 0.6, 1.2])


def test_a_bug_in_a_workload_ends_the_run() -> None:
    class Broken(Synthetic):
        def session(self, number: int) -> Any:
            ask = next(super().session(number))
            yield ask
            raise RuntimeError("broken")

    broken = Broken(STYLE, Lengths.parse("5"), Lengths.parse("4"))
    with pytest.raises(RuntimeError, match="broken"):
        measured(Constant(1.0), itertools.repeat(Plan()), 5, workload=broken)
