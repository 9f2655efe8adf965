"""`/ready` says whether a request sent now would be served by the program in charge, and if not, which engine lacks."""

from __future__ import annotations

import asyncio

import pytest

from microserving.router.deployment import Deployer

from .test_admin import Admin, with_admin

HEAD = "from microserving.program import *\nclass Mine(Program):\n"
SPLITS_LONG_PROMPTS = (
    HEAD
    + """\
    async def route(self, request, cluster):
        decode, begin = cluster.decode.least_loaded(), 0
        if request.prompt_length > 100:
            begin = request.prompt_length - 1
            received = await decode.prep_recv(request, end=begin)
            await cluster.prefill.least_loaded().remote_send(request, to=received)
        async for chunk in decode.start_generate(request, begin=begin):
            yield chunk
"""
)
SERVES_WHOLE_WITHOUT_PREFILL = (
    HEAD
    + """\
    async def route(self, request, cluster):
        decode, begin = cluster.decode.least_loaded(), 0
        try:
            prefill = cluster.prefill.least_loaded()
        except NoEngine:
            pass
        else:
            begin = request.prompt_length - 1
            await prefill.remote_send(request, to=await decode.prep_recv(request, end=begin))
        async for chunk in decode.start_generate(request, begin=begin):
            yield chunk
"""
)
COUNTS_IN_ITS_OWN_WAY = (
    HEAD
    + """\
    async def route(self, request, cluster):
        decode = [engine for engine in cluster.all if engine.role == "decode"][0]
        async for chunk in decode.start_generate(request):
            yield chunk
"""
)


async def readiness(admin: Admin) -> str:
    """``ready``, or what lacks."""
    answer = await admin.public.get("/ready")
    if answer.status_code == 200:
        return str(answer.json()["status"])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], answer.headers["retry-after"]) == (503, "no_engine", "1")
    return str(error["message"])


def lacks(role: str, program: str) -> str:
    return f"no {role} engine is up, and the router program {program} needs one"


async def drained(admin: Admin, engine: str) -> str:
    """What `/ready` says without the engine; it is back afterwards."""
    await admin.ask("POST", f"/admin/engines/{engine}/drain")
    told = await readiness(admin)
    await admin.ask("POST", f"/admin/engines/{engine}/undrain")
    return told


def test_it_depends_on_what_the_program_needs() -> None:
    async def scenario(admin: Admin) -> None:
        assert await readiness(admin) == "ready"
        assert await drained(admin, "prefill-0") == lacks("prefill", "prefill_decode")
        assert await drained(admin, "decode-0") == lacks("decode", "prefill_decode")
        assert await readiness(admin) == "ready"
        await admin.deploy(path="round_robin")
        assert [await drained(admin, engine) for engine in ("prefill-0", "decode-0")] == ["ready"] * 2
        await admin.deploy(path="own.py", source=SPLITS_LONG_PROMPTS)
        assert await drained(admin, "prefill-0") == lacks("prefill", "own")
        await admin.deploy(path="own.py", source=SERVES_WHOLE_WITHOUT_PREFILL)
        assert await drained(admin, "prefill-0") == "ready"
        assert await drained(admin, "decode-0") == lacks("decode", "own")
        await admin.deploy(path="own.py", source=COUNTS_IN_ITS_OWN_WAY)
        assert await drained(admin, "prefill-0") == "ready"
        assert await drained(admin, "decode-0") == lacks("decode", "own")

    with_admin(scenario, program="prefill_decode")


def test_a_hybrid_engine_stands_for_both_roles_and_without_any_engine_it_is_plain() -> None:
    async def scenario(admin: Admin) -> None:
        await admin.ask("PATCH", "/admin/engines/decode-0", json={"role": "hybrid"})
        await admin.ask("POST", "/admin/engines/prefill-0/drain")
        assert await readiness(admin) == "ready"
        await admin.ask("POST", "/admin/engines/decode-0/drain")
        assert await readiness(admin) == "no engine is ready to serve this"

    with_admin(scenario, program="prefill_decode")


def test_a_program_that_changes_its_pattern_is_tried_as_it_is_now() -> None:
    async def scenario(admin: Admin) -> None:
        await admin.ask("POST", "/admin/engines/prefill-0/drain")
        assert await readiness(admin) == "ready"  # whole requests
        vars(admin.router._host.program.instance)["apart"] = True
        assert await readiness(admin) == lacks("prefill", "adaptive")

    with_admin(scenario, program="adaptive")


def test_many_who_ask_share_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    trials: list[object] = []
    check = Deployer.check

    async def counted(self: Deployer, *of: object) -> object:
        trials.append(of)
        return await check(self, *of)  # type: ignore[arg-type]

    monkeypatch.setattr(Deployer, "check", counted)

    async def scenario(admin: Admin) -> None:
        await asyncio.gather(*(readiness(admin) for _ in range(20)))
        assert trials == []  # every role has an engine
        await admin.ask("POST", "/admin/engines/decode-0/drain")
        assert set(await asyncio.gather(*(readiness(admin) for _ in range(20)))) == {"ready"}
        assert len(trials) == 1
        vars(admin.router._host.program.instance)["apart"] = True
        said = await asyncio.gather(*(readiness(admin) for _ in range(20)))
        assert set(said) == {lacks("decode", "adaptive")}
        assert len(trials) == 2

    with_admin(scenario, program="adaptive")
