"""The base class of router programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from microserving.program.cluster import Cluster
from microserving.program.request import Request
from microserving.program.settings import check_settings
from microserving.protocol.generation import GenerationChunk

Chunks = AsyncIterator[GenerationChunk]
"""What ``route`` yields."""


class Program(ABC):
    """A router program: subclass it once in a file of your own and write ``route``.

    Annotated class attributes are the program's settings. They are checked and set when the program is loaded, from
    the configuration or the command line::

        class Balanced(Program):
            pd_balance_factor: Fraction = 0.1

            async def route(self, request: Request, cluster: Cluster) -> Chunks:
                ...

    One instance serves all requests at once on one event loop: keep what belongs to one request in local variables.
    """

    def __init__(self, **settings: object) -> None:
        """Raises ProgramError, which names it, for a setting that is unknown, missing or wrong."""
        for name, value in check_settings(type(self), settings).items():
            setattr(self, name, value)

    @abstractmethod
    def route(self, request: Request, cluster: Cluster) -> Chunks:
        """Serve one request: an async generator (``async def`` with ``yield``).

        Choose engines from ``cluster``, call their verbs, yield the chunks of ``start_generate``. The last chunk has
        a finish_reason. Cancelled where it awaits when the client goes away; nothing needs to be cleaned up.
        """

    async def plan(self, cluster: Cluster) -> None:  # noqa: B027 - a hook, not a duty
        """Runs in the background for as long as the program is in charge. Optional."""
