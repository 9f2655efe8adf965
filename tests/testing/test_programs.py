"""Every program that users copy stands the kit; those that misbehave are caught, each for what it does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from microserving.errors import ProgramError
from microserving.program import Chunks, Cluster, Program, Request
from microserving.protocol.generation import GenerationRequest, SamplingParams, StopParams
from microserving.router.program_loader import shipped_programs
from microserving.testing import ALL_FAULTS, Fault, assert_program_is_sound, check_program
from microserving.testing.report import FindingKind

DATA = Path(__file__).parent / "data"
MLC_FILE = Path(__file__).parents[1] / "program" / "data" / "mlc_router.py"
SOUND: dict[str, tuple[str, dict[str, object]]] = {
    **{name: (name, {}) for name in shipped_programs()},
    "balanced, auto": ("balanced_prefill_decode", {"pd_balance_factor": "auto"}),
    "balanced, half": ("balanced_prefill_decode", {"pd_balance_factor": 0.5}),
    "prefix_aware, exact": ("prefix_aware", {"exact": True}),
    "context_migration, always": ("context_migration", {"min_tokens": 1, "slack": -9}),
    "adaptive, apart": ("adaptive", {"apart": True}),
    "mlc": (str(MLC_FILE), {}),
}
HANDED_OVER = {"prefill_decode", "balanced_prefill_decode", "balanced, auto", "balanced, half", "mlc"} | {
    "context_migration, always",
    "adaptive, apart",
}
"""Programs that hand K/V over here."""


@pytest.mark.case("PD-01")
@pytest.mark.case("PD-05")
@pytest.mark.case("RT-04")
@pytest.mark.parametrize("name", SOUND)
def test_every_shipped_program_is_sound(name: str) -> None:
    """Engines fail, or the client leaves, at each verb and each token; then two faults, and crowds."""
    program, settings = SOUND[name]
    report = assert_program_is_sound(program, settings=settings, pairs=20, crowds=10)
    verbs = {moment.verb for moment in report.awaits}
    assert {"start_generate", "chunk"} <= verbs
    assert ({"prep_recv", "remote_send"} <= verbs) == (name in HANDED_OVER)
    met = {(moment.verb, fault) for verdict in report.verdicts for moment, fault in verdict.met}
    assert {("chunk", fault) for fault in ("broken", "dies", "preempted", "client_leaves")} <= met
    assert all(moment.line is not None for moment in report.awaits)


BAD: dict[str, tuple[FindingKind, str, str]] = {
    "keeps_a_task": (
        "leak",
        "the task KeepsATask._tick at keeps_a_task.py:17 still runs",
        "without any fault",
    ),
    "reserves_while_closed": (
        "cancel",
        "still asks for prep_recv when its client has left (line 18)",
        "leaves",
    ),
    "goes_round_the_host": (
        "leak",
        "a reservation is left on a decode engine",
        "it is refused, at goes_round_the_host.py:11 (remote_send on prefill-0)",
    ),
    "yields_twice": ("tokens", "a client gets tokens twice", "without any fault"),
    "starts_over": (
        "tokens",
        "a client gets tokens twice",
        "the connection breaks before the answer, at starts_over.py:11 (token 2 on prefill-0)",
    ),
    "swallows_cancellation": (
        "cancel",
        "the output goes on without its client",
        "the client leaves, at swallows_cancellation.py:12 (match_prefix on prefill-0)",
    ),
    "never_ends": (
        "bug",
        "hung: it neither asked an engine nor gave a chunk for too long (never_ends.py:16)",
        "it is refused, at never_ends.py:14 (remote_send on prefill-0)",
    ),
    "cannot_be_ended": ("hang", "a request does not end (cannot_be_ended.py:20)", "cannot_be_ended.py:15"),
    "counts_globally": (
        "counter",
        "the program's RUNNING does not come back",
        "the client leaves, at counts_globally.py:17",
    ),
    "retries_for_ever": (
        "runaway",
        "tries again without bound: more than 50 verbs, prep_recv at last (line 11)",
        "no engine has KV pages left, at retries_for_ever.py:11 (prep_recv on decode-0)",
    ),
    "sends_another_prompt": ("tokens", "tokens are wrong", "without any fault"),
    "drops_scores": ("tokens", "the log-probabilities are not those of the tokens", "without any fault"),
    "hides_failures": ("tokens", "tokens are missing at the end", "it is refused, at hides_failures.py:9"),
    "tells_the_client": (
        "bug",
        "the program raised RuntimeError: no answer from prefill-0 (tells_the_client.py:13)",
        "the engine dies, at tells_the_client.py:10 (token 3 on prefill-0)",
    ),
}
"""File -> the kind of a finding, its message, and when it shows."""
QUICK: tuple[Fault, ...] = ("refused", "broken", "dies", "all_exhausted", "client_leaves", "client_closes")


@pytest.mark.parametrize("name", BAD)
def test_a_bad_program_is_caught(name: str) -> None:
    kind, message, when = BAD[name]
    faults: tuple[Fault, ...] = (
        "refused",
        "broken",
        "dies",
        "all_exhausted",
        "client_leaves",
        "client_closes",
    )
    report = check_program(DATA / f"{name}.py", faults=faults, pairs=0, crowds=1)
    assert not report.ok
    found = [report.when(verdict) for finding, verdict in report.findings if _is(finding, kind, message)]
    assert any(when in each for each in found), str(report)
    assert message in str(report)


def _is(finding: object, kind: str, message: str) -> bool:
    return getattr(finding, "kind", "") == kind and message in getattr(finding, "message", "")


def test_every_bad_program_is_looked_for() -> None:
    assert {path.stem for path in DATA.glob("*.py")} == set(BAD)


class PassesOn(Program):
    """Serves whole requests; for the tests below."""

    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        async for chunk in cluster.all.round_robin().start_generate(request):
            yield chunk


class Busy(PassesOn):
    """Waits without letting time pass."""

    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        while request.request_id != "none":  # noqa: ASYNC110 - a program may do anything
            await asyncio.sleep(0)
        yield  # type: ignore[misc]


class InThreads(PassesOn):
    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        assert await asyncio.to_thread(len, "four") == 4
        async for chunk in super().route(request, cluster):
            yield chunk


def test_a_class_in_a_test_file_can_be_checked() -> None:
    report = assert_program_is_sound(PassesOn, crowds=2, pairs=2)
    assert report.path == Path(__file__)
    line = next(
        i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "round_robin()" in text
    )
    assert {moment.line for moment in report.awaits} == {line}
    assert_program_is_sound(InThreads, crowds=1, pairs=0, faults=["dies"])


def test_a_program_that_waits_busily_hangs_and_does_not_hang_the_kit() -> None:
    report = check_program(Busy, pairs=0, crowds=0)
    assert report.kinds == {"bug"}
    assert "hung" in str(report)


def test_one_engine_a_role_may_show_its_failures_but_nothing_else() -> None:
    report = assert_program_is_sound("prefill_decode", cluster=(1, 1), pairs=10, crowds=5)
    outcomes = {fault for verdict in report.verdicts for _, fault in verdict.met}
    assert outcomes == set(ALL_FAULTS)


def test_hybrid_engines_and_own_requests() -> None:
    sampled = GenerationRequest("mine", tuple(range(40)), SamplingParams(seed=3), StopParams(max_tokens=2))
    report = assert_program_is_sound("round_robin", cluster=(0, 0, 3), requests=[sampled], pairs=0, crowds=3)
    assert {moment.detail for moment in report.awaits} <= {"", "token 1", "token 2"}


def test_the_same_seed_gives_the_same_runs() -> None:
    one, two = (
        check_program("round_robin", faults=QUICK, pairs=6, crowds=3, seed=5).as_dict() for _ in range(2)
    )
    other = check_program("round_robin", faults=QUICK, pairs=6, crowds=3, seed=6)
    assert one == two
    assert other.ok
    assert one["awaits"][0]["line"] == 9


def test_what_cannot_be_loaded_and_what_runs_already_is_refused() -> None:
    with pytest.raises(ProgramError, match="no router program"):
        check_program("no_such_program")
    with pytest.raises(ProgramError, match="no setting 'depth'"):
        check_program("round_robin", settings={"depth": 3})

    async def inside() -> None:
        check_program("round_robin")

    with pytest.raises(RuntimeError, match="event loop of its own"):
        asyncio.run(inside())


def test_assert_says_what_is_wrong() -> None:
    with pytest.raises(AssertionError, match="yields_twice: not sound, 1 problem"):
        assert_program_is_sound(DATA / "yields_twice.py")
