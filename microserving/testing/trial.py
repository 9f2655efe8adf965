"""One run: the router's own dispatcher, attempts and holdings serve some clients with the program, on engines of the kit.

Owns the run from the first request until everything must be at rest. Does not judge (``verdict``).
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from microserving.front import ServedModel
from microserving.program import Chunks, Cluster, Request
from microserving.protocol.generation import GenerationRequest
from microserving.router.dispatch import Dispatcher, DispatchSettings
from microserving.router.dry_run import line_awaited, line_on_stack
from microserving.router.in_flight import InFlight
from microserving.router.ledger import Ledger
from microserving.router.program_host import ProgramHost
from microserving.router.program_loader import LoadedProgram
from microserving.testing.client import Client
from microserving.testing.engines import EngineSettings, ModelCluster
from microserving.testing.faults import Fault, Moment, Stage
from microserving.testing.gauges import Gauges, Values, read_values
from microserving.tokenizer import Tokenizer

STALL_S = 10.0
RELEASE_S = 1.0
_REST_S = 0.5
"""What the last answers may take when all requests have ended."""
_GLANCE_S = 0.9
_LATE_S = 20.0
"""How long after its deadline a request may end at the latest."""


@dataclass(frozen=True, slots=True)
class Scene:
    """requests: all of them at once, ``apart_s`` after each other; each has a deadline. counts: of prefill, decode and
    hybrid engines. cached: engine id -> prompts that
    are in its prefix cache before."""

    name: str
    requests: tuple[GenerationRequest, ...]
    counts: tuple[int, int, int] = (2, 2, 0)
    cached: tuple[tuple[str, tuple[int, ...]], ...] = ()
    apart_s: float = 0.003
    engines: EngineSettings = field(default_factory=EngineSettings)

    @property
    def longest_s(self) -> float:
        return max(request.timeout_s or 0.0 for request in self.requests) + _LATE_S


@dataclass(slots=True)
class Outcome:
    """What a run left, for ``verdict``. tasks: that still ran at its end, in words. stuck: not all requests ended.
    gauges: of a run without a fault, the program's own counters; before, after: the program's values. waited_at: request
    id -> the line at which the program was last seen to wait for long."""

    scene: Scene
    stage: Stage
    clients: list[Client]
    cluster: ModelCluster
    in_flight: InFlight
    dispatcher: Dispatcher
    host: ProgramHost
    stuck: bool = False
    tasks: list[str] = field(default_factory=list)
    held: dict[str, list[str]] = field(default_factory=dict)
    before: Values = field(default_factory=dict)
    after: Values = field(default_factory=dict)
    gauges: frozenset[str] = frozenset()
    ended_s: float = 0.0
    waited_at: dict[str, int] = field(default_factory=dict)


class _Served:
    """The kit's engines as the dispatcher knows them."""

    model = ServedModel(id="m", max_context=1_000_000, created=0)
    tokenizer = cast(Tokenizer, None)
    grammars = None
    ready = True

    async def refresh(self) -> None:
        await asyncio.sleep(0.01)


class Trial:
    """program: with an instance of its own. plan: moment -> fault. seed: of what the program and the router draw."""

    def __init__(
        self, program: LoadedProgram, scene: Scene, plan: dict[int, Fault], *, call_limit: int, seed: int
    ) -> None:
        self._program = program
        self._scene = scene
        self._plan = plan
        self._call_limit = call_limit
        self._seed = seed
        self._routes: dict[str, Chunks] = {}

    async def run(self) -> Outcome:
        random.seed(self._seed)
        self._trace_routes()
        out = self._set_up()
        out.before = read_values(self._program.instance)
        gauges = Gauges(out.before)
        if not self._plan:
            out.stage.on_moment = lambda _moment: gauges.watch(read_values(self._program.instance))
        out.stage.on_fault = partial(self._on_fault, out)
        out.host.start()
        out.clients = [
            Client(request, out.dispatcher, number * self._scene.apart_s)
            for number, request in enumerate(self._scene.requests)
        ]
        await self._until_all_ended(out)
        out.ended_s = asyncio.get_running_loop().time()
        await self._rest(out)
        out.after = read_values(self._program.instance)
        out.gauges = gauges.settle(out.after)
        return out

    def _set_up(self) -> Outcome:
        scene, in_flight = self._scene, InFlight()
        stage = Stage(self._plan, self._call_limit, self._line_of)
        cluster = ModelCluster(scene.counts, scene.engines, stage)
        cluster.in_flight_counts = in_flight
        for engine_id, tokens in scene.cached:
            cluster[engine_id].cached.append(("", tokens))
        host = ProgramHost(self._program, cluster)
        settings = DispatchSettings(release_timeout_s=RELEASE_S, stall_timeout_s=STALL_S)
        dispatcher = Dispatcher(host, cluster, in_flight, _Served(), settings, Ledger())
        return Outcome(scene, stage, [], cluster, in_flight, dispatcher, host)

    async def _until_all_ended(self, out: Outcome) -> None:
        """Or until that takes too long, or too many calls."""
        runaway = asyncio.create_task(out.stage.runaway.wait())
        watching = asyncio.create_task(self._watch(out))
        everyone = asyncio.gather(*(client.task for client in out.clients), return_exceptions=True)
        both: set[asyncio.Future[Any]] = {everyone, runaway}
        await asyncio.wait(both, timeout=self._scene.longest_s, return_when=asyncio.FIRST_COMPLETED)
        runaway.cancel()
        watching.cancel()
        out.stuck = not everyone.done()
        if out.stuck:
            everyone.add_done_callback(lambda done: done.cancelled())
            for client in out.clients:
                client.stuck = client.ended is None

    async def _rest(self, out: Outcome) -> None:
        """Wait for all clean-ups, then look at what is left."""
        if not out.stuck:
            await asyncio.wait([asyncio.ensure_future(out.dispatcher.stop())], timeout=10 * RELEASE_S)
            await out.host.stop()
            await asyncio.sleep(_REST_S)
        out.tasks = [] if out.stuck else [self._told(task) for task in self._strangers()]
        for engine in out.cluster.engines.values():
            engine.expire()
            if engine.state == "up" and not out.stuck:
                lapsed = ["a reservation (until its lease ended)"] if engine.expired else []
                out.held[engine.id] = engine.holds.names() + lapsed

    def _strangers(self) -> list[asyncio.Task[Any]]:
        this = asyncio.current_task()
        return sorted((task for task in asyncio.all_tasks() if task is not this), key=asyncio.Task.get_name)

    def _told(self, task: asyncio.Task[Any]) -> str:
        coroutine = task.get_coro()
        line = line_awaited(coroutine, str(self._program.path))
        name = getattr(coroutine, "__qualname__", "?")
        where = "" if line is None else f" at {self._program.path.name}:{line}"
        return f"the task {name}{where}"

    def _on_fault(self, out: Outcome, moment: Moment, fault: Fault) -> None:
        if not fault.startswith("client_"):
            return
        own = moment.request_id.partition("-")[0]
        client = next((each for each in out.clients if each.request.request_id == own), out.clients[0])
        if fault == "client_leaves":
            client.leave()
        else:
            client.close_soon()

    def _trace_routes(self) -> None:
        """Remember where every request is in the program's text."""
        instance, routes = self._program.instance, self._routes
        route = instance.route

        def traced(request: Request, cluster: Cluster) -> Chunks:
            routes[request.request_id] = chunks = route(request, cluster)
            return chunks

        vars(instance)["route"] = traced

    def _line_of(self, request_id: str) -> int | None:
        """Of the program's text: on the stack, else where the request's ``route`` waits."""
        path = str(self._program.path)
        line = line_on_stack(sys._getframe(1), path)
        return self._waits_at(request_id) if line is None else line

    def _waits_at(self, request_id: str) -> int | None:
        return line_awaited(self._routes.get(request_id), str(self._program.path))

    async def _watch(self, out: Outcome) -> None:
        """Remember where requests wait for long: when one hangs, its frames are gone before that is known."""
        while True:
            await asyncio.sleep(_GLANCE_S)
            waiting = {name: line for name in self._routes if (line := self._waits_at(name)) is not None}
            out.waited_at.update(waiting)
