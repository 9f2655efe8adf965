"""Deployments under load: good and broken programs in turn, and no client sees anything of it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
from pathlib import Path

import pytest

from microserving.errors import ProgramError
from microserving.program.testing import collect
from microserving.router.deployment import Deployer
from microserving.router.dry_run import Roles
from microserving.router.program_loader import source_of

from .hosting import Hosted, generation

HEAD = "import time\nfrom microserving.program import *\nclass Mine(Program):\n    share: Fraction = 0.5\n"
ROUTE = "    async def route(self, request, cluster):\n"
SERVE = "        async for chunk in cluster.decode.least_loaded().start_generate(request):\n            yield chunk\n"
PREFILL = (
    "        decode, end = cluster.decode.least_loaded(), request.split(self.share)\n"
    "        received = await decode.prep_recv(request, end=end)\n"
    "        await cluster.prefill.least_loaded().remote_send(request, to=received)\n"
    "        async for chunk in decode.start_generate(request, begin=end):\n"
    "            yield chunk\n"
)
GOOD = HEAD + ROUTE + SERVE
LIVE = "        if not request.request_id.startswith('dry-run'):\n            "

GOOD_PROGRAMS = [
    GOOD,
    HEAD + ROUTE + PREFILL,
    GOOD + "    async def plan(self, cluster):\n        time.time()\n",
]
REFUSED = [
    "import nowhere_to_be_found\n" + GOOD,
    GOOD + "    def f(:\n",
    HEAD,
    HEAD + "    must: int\n" + ROUTE + SERVE,
    HEAD + ROUTE + "        1 / 0\n" + SERVE,
    "raise SystemExit\n" + GOOD,
]
FAILS_LIVE = [
    HEAD + ROUTE + LIVE + "1 / 0\n" + SERVE,
    HEAD + ROUTE + LIVE + "yield 'rubbish'\n" + SERVE,
    HEAD + ROUTE + LIVE + "return\n" + SERVE,
    HEAD + ROUTE + LIVE + "raise SystemExit\n" + SERVE,
]
HANGS = HEAD + ROUTE + "        while True: pass\n" + SERVE


class Deployed(Hosted):
    """With a deployer, and clients that ask all the time."""

    def __init__(self, dry_run_timeout_s: float = 20.0) -> None:
        super().__init__("round_robin")
        self.deployer = Deployer(self.host, Roles, dry_run_timeout_s=dry_run_timeout_s)
        self.answered = 0
        self.leaving = False

    async def deploy(self, text: str, **settings: object) -> int:
        version = await self.deployer.deploy(source_of(Path("/mine.py"), text.encode()), settings)
        return version.number

    async def ask_until_told(self, name: str) -> None:
        while not self.leaving:
            request = generation(request_id=f"{name}-{self.answered}")
            chunks = await collect(self.dispatcher.generate(request))
            assert [chunk.text for chunk in chunks] == ["Hello", " world"]
            self.answered += 1
            await asyncio.sleep(0.002)  # clients think; the processor is for the trials

    async def until_answered(self, more: int) -> None:
        wanted = self.answered + more
        async with asyncio.timeout(30):
            while self.answered < wanted:  # noqa: ASYNC110 - the clients tell nobody
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.deployer.close()
        await self.settle()


def test_a_refused_program_changes_nothing() -> None:
    async def scenario() -> None:
        hosted = Deployed()
        assert await hosted.deploy(GOOD) == 2
        for text in REFUSED:
            with pytest.raises(ProgramError, match=r"^/mine\.py:\d+: "):
                await hosted.deploy(text)
        with pytest.raises(ProgramError, match=r"^/mine\.py:4: Mine: setting 'share' is wrong") as caught:
            await hosted.deploy(GOOD, share=2)
        assert caught.value.param == "share"
        assert hosted.host.current.number == 2
        assert (hosted.host.deployments, hosted.deployer.refused) == (1, len(REFUSED) + 1)
        assert await hosted.deploy(GOOD, share=0.25) == 3
        assert hosted.host.program.instance.share == 0.25  # type: ignore[attr-defined]
        await hosted.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def modules() -> set[str]:
    return {name for name in sys.modules if name.startswith("router_program_mine_")}


def test_a_program_that_hangs_while_it_is_loaded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passed the trial, so it looks at where it is; the event loop must not wait for it."""
    going_on = threading.Event()
    monkeypatch.setattr(sys, "going_on", going_on, raising=False)
    text = "import sys\nif hasattr(sys, 'going_on'):\n    sys.going_on.wait(60)\n" + GOOD

    async def scenario() -> None:
        hosted = Deployed(dry_run_timeout_s=1.0)
        with pytest.raises(ProgramError, match="the program took too long to load"):
            await hosted.deploy(text)
        assert hosted.host.current.number == 1
        (loading,) = [thread for thread in threading.enumerate() if thread.name == "program-load"]
        going_on.set()
        await asyncio.to_thread(loading.join)
        await asyncio.sleep(0)  # what it has loaded comes back
        assert modules() == before  # too late: nothing of it stays
        assert await hosted.deploy(GOOD) == 2
        await hosted.close()

    before = modules()
    asyncio.run(scenario())


def test_deployments_are_one_after_the_other() -> None:
    async def scenario() -> None:
        hosted = Deployed()
        numbers = await asyncio.gather(*(hosted.deploy(GOOD) for _ in range(4)))
        assert numbers == [2, 3, 4, 5]
        await hosted.close()

    asyncio.run(scenario())


def footprint() -> dict[str, int]:
    """What a leak would make grow."""
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "tasks": len(asyncio.all_tasks()),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "modules": len(sys.modules),
    }


async def deploy_all_kinds(hosted: Deployed, round_: int) -> int:
    """Twenty deployments; returns how many were broken only in front of requests."""
    broken_live = 0
    for number in range(20):
        if number % 2 == 0:
            await hosted.deploy(GOOD_PROGRAMS[number % 3])
        elif number % 8 == 1:
            broken_live += 1
            back_to = hosted.host.current.number
            rolled_back = hosted.host.rollbacks
            await hosted.deploy(FAILS_LIVE[broken_live % 4])
            async with asyncio.timeout(30):
                while hosted.host.rollbacks == rolled_back:  # noqa: ASYNC110 - it is the clients' doing
                    await asyncio.sleep(0.001)
            assert hosted.host.current.number == back_to
        else:
            with pytest.raises(ProgramError):
                await hosted.deploy(REFUSED[(number + round_) % len(REFUSED)])
        await hosted.until_answered(1)
        for engine in hosted.cluster.engines.values():
            engine.calls.clear()
    return broken_live


@pytest.mark.timeout(300)
@pytest.mark.case("CF-01")
def test_500_deployments_under_load(caplog: pytest.LogCaptureFixture) -> None:
    """Every request is answered right, whatever is deployed meanwhile, and nothing grows."""
    caplog.set_level(logging.CRITICAL, "microserving")  # records of the test itself would grow

    async def scenario() -> None:
        hosted = Deployed()
        broken_live = 0
        before: dict[str, int] = {}
        async with asyncio.TaskGroup() as clients:
            for client in range(6):
                clients.create_task(hosted.ask_until_told(f"client-{client}"))
            for round_ in range(25):
                broken_live += await deploy_all_kinds(hosted, round_)
                if round_ == 4:
                    before = footprint()
            after = footprint()
            hosted.leaving = True
        assert hosted.host.rollbacks == broken_live == 75
        assert hosted.host.deployments == 250 + 75
        assert hosted.deployer.refused == 175
        assert after["objects"] < 1.02 * before["objects"], (before, after)
        del before["objects"], after["objects"]
        assert after == before
        assert len(hosted.host.versions) <= 4
        await hosted.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_a_trial_that_hangs_holds_no_request_up() -> None:
    async def scenario() -> None:
        hosted = Deployed(dry_run_timeout_s=0.5)
        async with asyncio.TaskGroup() as clients:
            clients.create_task(hosted.ask_until_told("client"))
            trial = clients.create_task(refused(hosted))
            while not trial.done():
                await hosted.until_answered(1)
            hosted.leaving = True
        assert hosted.answered > 10
        await hosted.close()

    asyncio.run(scenario())


async def refused(hosted: Deployed) -> None:
    with pytest.raises(ProgramError, match=r"^/mine\.py:6: the program is not done after 0.5 s"):
        await hosted.deploy(HANGS)
