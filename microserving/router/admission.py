"""Whether a request may be dispatched now: load levels, and a bounded queue that is fair to clients.

Owns the count of admitted requests and those that wait. Knows engines only by what they say of their load.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from microserving.errors import ContextLengthExceeded, Overloaded, ShuttingDown
from microserving.policies import EngineLoad
from microserving.protocol.generation import GenerationRequest

LoadLevel = Literal["low", "moderate", "high", "critical"]
Action = Literal["queue", "reject"]

MAX_PROMPT_TOKENS: Final = 1_048_576
LEVELS: Final[tuple[tuple[float, LoadLevel], ...]] = ((0.5, "low"), (0.8, "moderate"), (1.0, "high"))
"""Up to which share of the capacity a level goes; from 1 on the load is critical: nothing more is dispatched."""
_LOOK_AGAIN_S: Final = 0.1
"""While requests wait: how soon news of the engines' load are looked at."""
_LOADS_S: Final = 0.05
"""How long the engines' load is not looked up again."""
_RETRY_AFTER_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """max_in_flight: requests dispatched at once. max_engine_waiting: requests that wait inside an engine until it is
    full. action: at critical load, wait in the queue or be refused. queue_size: of all clients together.
    queue_timeout_s: the longest wait."""

    max_in_flight: int = 4096
    max_engine_waiting: int = 64
    action: Action = "queue"
    queue_size: int = 1024
    queue_timeout_s: float = 30.0


class FairQueue:
    """Waiters of many clients, one client after the other; each client's own in order. Bounded."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._length = 0
        self._clients: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    def __len__(self) -> int:
        return self._length

    def push(self, client: str, waiter: asyncio.Future[None]) -> bool:
        """False: it is full. A client with few waiters takes the place of the last one of who has most."""
        own = len(self._clients.get(client, ()))
        if self._length >= self._size and not self._make_room(own):
            return False
        self._clients.setdefault(client, deque()).append(waiter)
        self._length += 1
        return True

    def pop(self) -> asyncio.Future[None] | None:
        """The next waiter; its client's others come after those of all other clients."""
        while self._clients:
            client, waiters = self._clients.popitem(last=False)
            waiter = waiters.popleft()
            self._length -= 1
            if waiters:
                self._clients[client] = waiters
            if not waiter.done():
                return waiter
        return None

    def remove(self, client: str, waiter: asyncio.Future[None]) -> None:
        """It does not wait any more. Idempotent."""
        waiters = self._clients.get(client)
        if waiters is not None and waiter in waiters:
            waiters.remove(waiter)
            self._length -= 1
            if not waiters:
                del self._clients[client]

    def _make_room(self, own: int) -> bool:
        longest = max(self._clients, key=lambda client: len(self._clients[client]), default=None)
        if longest is None or len(self._clients[longest]) <= own + 1:
            return False
        last = self._clients[longest].pop()
        self._length -= 1
        if not last.done():
            last.set_exception(_full())
        return True


class Admission:
    """loads: what the engines that can generate last said, one each; empty when none is up. Needs a running loop."""

    def __init__(self, settings: AdmissionSettings, loads: Callable[[], Iterable[EngineLoad]]) -> None:
        self.admitted = 0
        self.refused = 0
        self.queued = 0
        self._settings = settings
        self._loads = loads
        self._queue = FairQueue(settings.queue_size)
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._engines = 0.0
        self._stale_at = 0.0
        self._idle: asyncio.Future[None] | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    @property
    def load(self) -> float:
        """Share of the capacity in use; 1 and more is critical."""
        return max(self.admitted / self._settings.max_in_flight, self._engine_load())

    @property
    def level(self) -> LoadLevel:
        load = self.load
        return next((level for limit, level in LEVELS if load < limit), "critical")

    def check(self, request: GenerationRequest) -> None:
        """Raises ContextLengthExceeded for a request that is let in never."""
        if len(request.prompt_token_ids) > MAX_PROMPT_TOKENS:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt_token_ids)} tokens, more than {MAX_PROMPT_TOKENS}",
                param="prompt",
            )

    def try_enter(self) -> bool:
        """Admit a request at once, if nobody waits and the load allows it. It must ``leave``."""
        if self._queue or self._closed or self.load >= 1.0:
            return False
        self.admitted += 1
        return True

    async def enter(self, client: str) -> None:
        """Wait until the request may be dispatched; then it must ``leave``. Raises Overloaded, ShuttingDown."""
        if self._closed:
            raise ShuttingDown
        if self.try_enter():
            return
        waiter = asyncio.get_running_loop().create_future()
        if self._settings.action == "reject" or not self._queue.push(client, waiter):
            self.refused += 1
            raise _full()
        self.queued += 1
        self._look_again()
        try:
            async with asyncio.timeout(self._settings.queue_timeout_s):
                await waiter
        except BaseException as error:
            self._queue.remove(client, waiter)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.leave()  # it was let in just when it gave up
            if isinstance(error, (TimeoutError, Overloaded)):
                self.refused += 1
                raise _full() from None
            raise

    def leave(self) -> None:
        """An admitted request ended."""
        self.admitted -= 1
        if self._queue:
            self._let_in()
        elif not self.admitted and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    async def until_idle(self, timeout_s: float) -> bool:
        """Wait until every admitted request has ended. False: it took longer."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.admitted:
                    self._idle = asyncio.get_running_loop().create_future()
                    await self._idle
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Let nobody in any more; who waits gets ShuttingDown. Idempotent."""
        self._closed = True
        while (waiter := self._queue.pop()) is not None:
            waiter.set_exception(ShuttingDown())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _engine_load(self) -> float:
        """Of the engine that is least busy: a request goes where there is room. Looked up now and then only: engines
        tell it every few seconds."""
        now = asyncio.get_running_loop().time()
        if now >= self._stale_at:
            full = self._settings.max_engine_waiting
            self._engines = min((load.waiting / full for load in self._loads()), default=0.0)
            self._stale_at = now + _LOADS_S
        return self._engines

    def _let_in(self) -> None:
        while self._queue and self.load < 1.0:
            waiter = self._queue.pop()
            if waiter is None:
                return
            self.admitted += 1
            waiter.set_result(None)

    def _look_again(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, self._looked)

    def _looked(self) -> None:
        self._timer = None
        self._let_in()
        if self._queue:
            self._look_again()


def _full() -> Overloaded:
    return Overloaded("the service is busy; try again soon", retry_after_s=_RETRY_AFTER_S)
