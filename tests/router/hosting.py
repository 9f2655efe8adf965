"""A dispatcher and its program host over engines in memory, for the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from microserving.front import ServedModel
from microserving.program import Program
from microserving.program.testing import FakeCluster
from microserving.protocol.generation import GenerationRequest, SamplingParams, StopParams
from microserving.router.admission import Admission
from microserving.router.dispatch import Dispatcher, DispatchSettings
from microserving.router.in_flight import InFlight
from microserving.router.program_host import ProgramHost
from microserving.router.program_loader import LoadedProgram, load_program
from microserving.router.retries import RetrySettings
from microserving.tokenizer import Tokenizer

QUICK = DispatchSettings(release_timeout_s=0.2, retries=RetrySettings(backoff_s=0.0))


class FakeServed:
    """Engines that are always there; ``refresh`` counts, and brings back those in ``returning``."""

    model = ServedModel(id="m", max_context=100, created=0)
    tokenizer = cast(Tokenizer, None)
    grammars = None
    ready = True

    def __init__(self, cluster: FakeCluster) -> None:
        self.refreshes = 0
        self.returning: list[str] = []
        self._cluster = cluster

    async def refresh(self) -> None:
        self.refreshes += 1
        for engine_id in self.returning:
            self._cluster[engine_id].up = True


class Hosted:
    """A dispatcher with all its parts at hand. program: a shipped name, or an instance."""

    def __init__(
        self,
        program: str | Program,
        cluster: FakeCluster | None = None,
        dispatching: DispatchSettings | None = None,
        admission: Admission | None = None,
        **settings: object,
    ) -> None:
        self.cluster = FakeCluster() if cluster is None else cluster
        self.served = FakeServed(self.cluster)
        self.in_flight = InFlight()
        self.loaded = load_program(program, settings) if isinstance(program, str) else _loaded(program)
        self.host = ProgramHost(self.loaded, self.cluster)
        self.dispatcher = Dispatcher(
            self.host,
            self.cluster,
            self.in_flight,
            self.served,
            dispatching or QUICK,
            admission=admission,
        )

    async def settle(self) -> None:
        """Wait for the clean-ups, then hold that nothing is left anywhere."""
        await self.stop()
        assert not self.in_flight, self.in_flight
        held = {engine.id: engine.held for engine in self.cluster.engines.values() if engine.held}
        assert not held, held
        assert self.dispatcher.running == 0
        assert self.host.uses == 0

    async def stop(self) -> None:
        await self.host.stop()
        await self.dispatcher.stop()


def _loaded(program: Program) -> LoadedProgram:
    return LoadedProgram(name="test", path=Path(__file__), line=1, instance=program)


def generation(prompt_length: int = 20, request_id: str = "r") -> GenerationRequest:
    return GenerationRequest(request_id, tuple(range(prompt_length)), SamplingParams(), StopParams())
