"""A program is tried in a process of its own: whatever it does there is one line with the right number, in time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from microserving.errors import ProgramError
from microserving.router.dry_run import DryRun, ProgramFacts, Roles
from microserving.router.dry_run_helper import DryRunHelper
from microserving.router.program_loader import ProgramSource, read_program, shipped_programs

PATH = Path("/home/me/mine.py")
HEAD = "import asyncio, os, sys, time\nfrom microserving.program import *\nclass Mine(Program):\n"
ROUTE = "    async def route(self, request, cluster):\n"
SERVE = "        async for chunk in cluster.decode.least_loaded().start_generate(request):\n            yield chunk\n"
GOOD = HEAD + ROUTE + SERVE


def routing(*lines: str) -> str:
    """A program whose route begins with ``lines`` (the first one is line 5 of the file), then serves."""
    return HEAD + ROUTE + "".join(f"        {line}\n" for line in lines) + SERVE


def job(text: str, timeout_s: float = 5.0, **settings: object) -> DryRun:
    return DryRun(ProgramSource(PATH, text.encode()), settings, timeout_s=timeout_s)


Tried = Callable[..., list[ProgramFacts | str]]
"""What the helper says of each job: the facts, or the message of the refusal."""


@pytest.fixture(scope="module")
def tried() -> Iterator[Tried]:
    """By one helper for all tests, as in a router."""
    with asyncio.Runner() as runner:
        helper = DryRunHelper()

        async def ask(one: DryRun) -> ProgramFacts | str:
            try:
                return await helper.dry_run(one)
            except ProgramError as error:
                return error.message

        yield lambda *jobs: [runner.run(ask(one)) for one in jobs]
        runner.run(helper.close())


REFUSED = {
    "def f(:\n": "1: SyntaxError: invalid syntax",
    "import nowhere_to_be_found\n": "1: ModuleNotFoundError: No module named 'nowhere_to_be_found'",
    HEAD + "    pass\n": "3: Mine has no route(self, request, cluster)",
    HEAD + "    x: int\n" + ROUTE + SERVE: "4: Mine: setting 'x' must be given",
    routing("sys.exit(3)"): "5: SystemExit: 3 (dry run: a prompt of one token)",
    routing("pass", "os._exit(0)"): "6: os._exit(0) would end the router",
    routing("os.kill(os.getpid(), 9)"): "1: the program ended the process it was tried in (SIGKILL)",
    routing("os.kill(os.getpid(), 11)"): "1: the program ended the process it was tried in (SIGSEGV)",
    routing("raise KeyboardInterrupt"): "5: KeyboardInterrupt (dry run: a prompt of one token)",
    routing("big = bytearray(1 << 42)"): "5: MemoryError (dry run: a prompt of one token)",
    routing(
        "request.prompt_token_ids[2]"
    ): "5: IndexError: tuple index out of range (dry run: a prompt of one",
    routing(
        "if request.prompt_length > 2: 1 / 0"
    ): "5: ZeroDivisionError: division by zero (dry run: a prompt of 17",
    routing(
        "cluster.decode.least_loaded().prep_recv(request, end=1)"
    ): "5: prep_recv is called without await",
    routing(
        "d = cluster.decode.least_loaded()",
        "received = d.prep_recv(request, end=1)",
        "await cluster.prefill.least_loaded().remote_send(request, to=received)",
    ): "6: prep_recv is called without await",
    routing("yield 'text'"): "5: route yielded a str, not a GenerationChunk",
    routing("return"): "3: route ended without a last chunk",
    GOOD + SERVE: "8: route went on after the last chunk",
    GOOD
    + "    async def plan(self, cluster):\n        await asyncio.sleep(0)\n        1 / 0\n": "9: ZeroDivisionError",
}
"""Program -> what is said of it, after the file's name."""


def test_what_a_wrong_program_does_is_told_with_its_line(tried: Tried) -> None:
    messages = tried(*map(job, REFUSED))
    wrong = [
        (message, expected)
        for message, expected in zip(messages, REFUSED.values(), strict=True)
        if not str(message).startswith(f"{PATH}:{expected}")
    ]
    assert wrong == []


HANGING = {
    routing("time.sleep(100)"): 5,
    routing("while True: pass"): 5,
    routing("await asyncio.Event().wait()"): 5,
    HEAD + ROUTE + "        await self.wait()\n" + SERVE + "    async def wait(self):\n        await asyncio.Event().wait()\n": 9,
    "import time\ntime.sleep(100)\n": 2,
    routing(
        "while True:",
        "    try:",
        "        await asyncio.sleep(0.01)",
        "    except BaseException:",
        "        pass",
    ): 7,
    GOOD + "    async def plan(self, cluster):\n        while True: pass\n": 8,
}  # fmt: skip


def test_a_program_that_hangs_is_ended_in_time(tried: Tried) -> None:
    messages = tried(*(job(text, timeout_s=0.8) for text in HANGING))
    hung = "the program is not done after 0.8 s, on engines that answer at once"
    assert messages == [f"{PATH}:{line}: {hung}" for line in HANGING.values()]


def test_one_that_cannot_be_interrupted_is_killed(tried: Tried) -> None:
    """It took the alarm for itself."""
    text = "import signal, time\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\ntime.sleep(100)\n"
    hung = "the program is not done after 0.1 s, on engines that answer at once"
    assert tried(job(text, timeout_s=0.1)) == [f"{PATH}:1: {hung}"]


def test_good_programs_and_what_is_known_of_them(tried: Tried) -> None:
    text = HEAD + "    share: Fraction = 0.5\n    words: list[str] = []\n" + ROUTE + SERVE
    facts = tried(job(text), job(text, share="0.25"), job("print('x' * 10**6)\n" + GOOD))
    assert facts == [
        ProgramFacts("Mine", {"share": 0.5, "words": []}),
        ProgramFacts("Mine", {"share": 0.25, "words": []}),
        ProgramFacts("Mine"),
    ]


def test_large_values_of_settings_are_cut_where_they_are_told(tried: Tried) -> None:
    text = HEAD + "    word: str = 'x' * 10**6\n    numbers: list[int] = list(range(10**5))\n" + ROUTE + SERVE
    (by_default,), (given,) = tried(job(text)), tried(job(text, word="é" * 500_000))
    assert isinstance(by_default, ProgramFacts)
    assert isinstance(given, ProgramFacts)
    assert [len(value) for value in by_default.settings.values()] == [1003, 1003]
    assert by_default.settings["numbers"].startswith("[0, 1, 2, 3")
    assert given.settings["word"].endswith("...")


def test_every_shipped_program_passes_with_any_pools(tried: Tried) -> None:
    jobs = [
        DryRun(read_program(name), {}, roles)
        for name in shipped_programs()
        for roles in (Roles(), Roles(2, 3), Roles(0, 0, 2), Roles(1, 1, 1))
    ]
    assert [facts for facts in tried(*jobs) if not isinstance(facts, ProgramFacts)] == []


def test_a_pool_without_engines_is_noticed(tried: Tried) -> None:
    one = DryRun(read_program("prefill_decode"), {}, Roles(prefill=0, decode=2))
    (message,) = tried(one)
    assert "prefill_decode.py:" in str(message)
    assert "NoEngine: no prefill engine is reachable" in str(message)


def test_a_plan_may_run_for_ever(tried: Tried) -> None:
    text = (
        GOOD + "    async def plan(self, cluster):\n        while True:\n            await asyncio.sleep(3)\n"
    )
    assert tried(job(text)) == [ProgramFacts("Mine")]


def processes_named(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if word.encode() in command:
            found.append(command.decode())
    return found


def test_what_a_program_starts_is_ended_with_it(tried: Tried) -> None:
    word = f"31536{os.getpid()}"
    text = routing("import subprocess", f"subprocess.Popen(['sleep', '{word}'])")
    assert tried(job(text)) == [ProgramFacts("Mine")]
    asyncio.run(until(lambda: not processes_named(word)))


def test_a_helper_that_was_killed_is_started_again(tried: Tried) -> None:
    kills = "import os\nos.kill(os.getppid(), 9)\n"
    answers = tried(job(GOOD), job(kills), job(GOOD))
    facts = ProgramFacts("Mine")
    assert answers == [facts, f"{PATH}:1: the program ended the process that tried it", facts]


def test_cancelling_leaves_no_process(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    text = routing(f"open({str(note)!r}, 'w').write(f'{{os.getpid()}}\\n')", "while True: pass")

    async def run() -> None:
        helper = DryRunHelper()
        trial = asyncio.create_task(helper.dry_run(job(text, timeout_s=60)))
        await until(lambda: note.exists() and note.read_text().endswith("\n"))
        trial.cancel()
        with pytest.raises(asyncio.CancelledError):
            await trial
        await until(lambda: not Path(f"/proc/{note.read_text().strip()}").exists())
        assert await helper.dry_run(job(GOOD)) == ProgramFacts("Mine")
        await helper.close()
        await helper.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_helper_that_has_nothing_to_do_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("microserving.router.dry_run_helper.IDLE_S", 0.01)

    async def run() -> None:
        helper = DryRunHelper()
        assert await helper.dry_run(job(GOOD)) == ProgramFacts("Mine")
        process = helper._process
        assert process is not None
        await process.wait()
        assert await helper.dry_run(job(GOOD)) == ProgramFacts("Mine")
        await helper.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another process has no event for it
            await asyncio.sleep(0.005)


def test_the_helper_goes_when_its_owner_does() -> None:
    """End of file on its stdin is enough."""
    import subprocess
    import sys

    command = [sys.executable, "-P", "-m", "microserving.router.dry_run_helper"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, check=False, timeout=60, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
