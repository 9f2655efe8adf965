"""One request on its way: what it may still cost, which engines failed it, and what its client has been sent.

Plain state; ``dispatch`` decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from microserving.errors import InternalError, MicroservingError, NoEngine, Overloaded
from microserving.program import EngineClient, Request
from microserving.program.metrics import ClusterMetrics
from microserving.protocol.generation import GenerationRequest
from microserving.router.attempt import Attempt
from microserving.router.delivery import Delivery
from microserving.router.ledger import AttemptRecord, RequestRecord
from microserving.router.program_loader import LoadedProgram

_TOKENS_PER_LOOK = 8
"""Tokens between two looks at the time between tokens."""


class Journey:
    """default_timeout_s: for a request that brings none.

    failures: attempts in a row that gave no new token. excluded: engines that failed this request. overload: an engine
    was full when it was asked last, and how it said so; those in ``excluded`` are then not asked again even when there
    are no others. looked: whether engines were looked for because there was none. next_look: at which
    ``delivery.count`` the pace is measured. failed_program: the program that failed it last.
    """

    def __init__(
        self, request: GenerationRequest, record: RequestRecord, default_timeout_s: float | None
    ) -> None:
        timeout_s = default_timeout_s if request.timeout_s is None else request.timeout_s
        self.delivery = Delivery(request)
        self.deadline = None if timeout_s is None else record.began + timeout_s
        self.record = record
        self.failures = 0
        self.excluded: set[EngineClient] = set()
        self._full: set[EngineClient] = set()
        self.overload: MicroservingError | None = None
        self.looked = False
        self.failed_program: LoadedProgram | None = None
        self._request = request
        self._tokens_before = 0
        self.next_look = 0
        self._looked_at = 0.0
        self._looked_at_count = 0

    @property
    def spares_the_full(self) -> bool:
        """Whether engines that are full are not asked again. An output that has begun is worth another try."""
        return self.overload is not None and not self.delivery.begun

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline, never below 0; None when there is none."""
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - asyncio.get_running_loop().time())

    def next_request(self) -> Request:
        """The request as the next attempt's program gets it. Every attempt has an id of its own, because an engine may
        still be freeing what the last one held."""
        number = len(self.record.attempts)
        request = self._request
        changes: dict[str, object] = {}
        if self.deadline is not None:
            changes["timeout_s"] = max(self.remaining_s or 0.0, 1e-3)
        if self.delivery.begun:
            changes["resume_output_ids"] = self.delivery.output_ids
        return Request.of(
            replace(request, **changes) if changes else request,  # type: ignore[arg-type]
            request_id=f"{request.request_id}-{number}" if number else request.request_id,
            deadline=self.deadline,
        )

    @property
    def whole(self) -> bool:
        """Whether all of the output comes at once."""
        return self._request.whole

    def measure(self, attempt: AttemptRecord, metrics: ClusterMetrics) -> None:
        """Some output is on its way to the client. Of one that comes whole no pace is known."""
        record, delivery, now = self.record, self.delivery, asyncio.get_running_loop().time()
        self.next_look = delivery.count + _TOKENS_PER_LOOK
        tokens, self._looked_at_count = delivery.count - self._looked_at_count, delivery.count
        last, self._looked_at = self._looked_at, now
        if record.ttft_s is None:
            record.ttft_s = now - record.began
            if attempt.role is not None and not self._request.whole:
                metrics.add_ttft(attempt.role, record.ttft_s)
        elif tokens and attempt.role is not None:
            metrics.add_itl(attempt.role, (now - last) / tokens)

    def failed(self, attempts: Sequence[Attempt], error: MicroservingError) -> None:
        """The first one of ``attempts``, which ran beside each other, ended with ``error``; those after it are over, too."""
        self.failures = 1 if self.delivery.tokens > self._tokens_before else self.failures + 1
        self._tokens_before = self.delivery.tokens
        before, now = self.excluded, set().union(*(attempt.failed for attempt in attempts))
        for attempt in attempts:
            if isinstance(attempt.error, Overloaded):
                self._full |= attempt.failed
        if isinstance(error, Overloaded):
            self.overload = error
            before = self._full  # those that failed otherwise before may have room
        elif not isinstance(error, NoEngine):
            self.overload = None
        self.excluded = before | now
        self.failed_program = attempts[0].program if isinstance(error, InternalError) else None
