"""The admin route that shows the ledger: what became of the latest requests, and why each was (not) disaggregated."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel

from microserving.front import control_router
from microserving.program import EngineRole
from microserving.router.ledger import AttemptRecord, Ledger, RequestRecord, RequestState

_SHOWN = 20


class AttemptShown(BaseModel):
    """See ``ledger.AttemptRecord``. why: in words, why this attempt was, or was not, disaggregated."""

    program: str
    state: RequestState
    prefill: str | None
    decode: str | None
    role: EngineRole | None
    split_at: int | None
    prefix_matched_length: int
    tokens_sent: int
    bytes_sent: int
    prefill_ms: float
    transfer_ms: float
    exposed_ms: float
    error: str | None
    why: str


class RequestShown(BaseModel):
    """See ``ledger.RequestRecord``. started: ISO 8601, UTC."""

    request_id: str
    started: str
    state: RequestState
    outcome: str | None
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    itl_s: float | None
    duration_s: float | None
    retries: int
    resumes: int
    hedges: int
    attempts: list[AttemptShown]


class RequestList(BaseModel):
    requests: list[RequestShown]


class RequestAdmin:
    """The handler of `/admin/requests`."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def router(self) -> APIRouter:
        router = control_router()
        router.add_api_route("/admin/requests", self.requests, response_model=RequestList)
        return router

    async def requests(
        self, request_id: str = "", limit: Annotated[int, Query(ge=1, le=1000)] = _SHOWN
    ) -> RequestList:
        """Those that run, then those that ended, the newest first. request_id: only those whose id begins so."""
        found = (record for record in self._ledger.records if record.request_id.startswith(request_id))
        return RequestList(requests=[_request(record) for record in islice(found, limit)])


def _request(record: RequestRecord) -> RequestShown:
    return RequestShown(
        request_id=record.request_id,
        started=datetime.fromtimestamp(record.started, UTC).isoformat(timespec="milliseconds"),
        state=record.state,
        outcome=record.outcome,
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        ttft_s=record.ttft_s,
        itl_s=record.itl_s,
        duration_s=record.duration_s,
        retries=record.retries,
        resumes=record.resumes,
        hedges=record.hedges,
        attempts=[_attempt(attempt) for attempt in record.attempts],
    )


def _attempt(attempt: AttemptRecord) -> AttemptShown:
    return AttemptShown(**asdict(attempt), why=attempt.why)
