"""An asyncio event loop whose clock jumps to the next timer as soon as nothing is ready: hours pass in milliseconds.

Deterministic: no thread, no socket, no wall clock. Work for threads is done at once, in place. Owns the end of what is
left on the loop; knows nothing of programs.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

_BUSY_ROUNDS = 2000
"""So many rounds without a wait are work; who goes on is busy waiting, and time begins to pass."""
_BUSY_ROUND_S = 0.01
_SWEEP_S = 10.0


class NothingHappensError(RuntimeError):
    """Somebody waits, but nothing is ready and no timer runs: it would wait for ever."""


class VirtualLoop(asyncio.BaseEventLoop):
    """``time()`` begins at 0. A program that waits busily sees time pass, too, so that its deadline comes."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._busy_rounds = 0
        self._clock_resolution = 1e-9
        self._selector = self  # what the base class asks for events
        self.set_exception_handler(lambda _loop, _context: None)

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Called once a round; lets time pass. timeout: seconds until the next timer; 0: something is ready."""
        if timeout is None:
            raise NothingHappensError("everything waits, and nothing will happen any more")
        if timeout > 0:
            self._now += timeout
            self._busy_rounds = 0
        else:
            self._busy_rounds += 1
            if self._busy_rounds > _BUSY_ROUNDS:
                self._now += _BUSY_ROUND_S
        return []

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]  # noqa: ARG002 - a part of the interface
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - handed on to who waits for it
            future.set_exception(error)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


def run_virtual(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """``main`` on a loop of its own. What it leaves is cancelled; what clings to life is forgotten, silently.

    Raises: what ``main`` raises, NothingHappensError, RuntimeError when a loop runs in this thread already.
    """
    loop = VirtualLoop()
    try:
        result = loop.run_until_complete(main)
    except BaseException:
        main.close()
        raise
    finally:
        _sweep(loop)
    return result


def _sweep(loop: VirtualLoop) -> None:
    left = asyncio.all_tasks(loop)
    if left:
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.wait(left, timeout=_SWEEP_S))
    clinging = [task for task in left if not task.done()]
    if not clinging:
        loop.run_until_complete(loop.shutdown_asyncgens())
    for task in clinging:
        task._log_destroy_pending = False  # type: ignore[attr-defined]
    loop.close()
    if clinging:
        del task, left
        _forget(clinging)


def _forget(tasks: list[asyncio.Task[Any]]) -> None:
    """Let go of tasks that do not end; what they say about it is nobody's business."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _unraisable: None
    try:
        tasks.clear()
        gc.collect()
    finally:
        sys.unraisablehook = hook
