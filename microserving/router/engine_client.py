"""An engine over HTTP: the verbs that programs call, and the questions that the router asks for itself.

Does not know which request holds what (``holdings``) nor when an engine counts as up (``engine_registry``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from microserving.errors import InvalidRequest, MicroservingError
from microserving.policies import EngineLoad
from microserving.program import NOTHING_SENT, EngineClient, EngineRole, Received, Request
from microserving.protocol import microserving as wire
from microserving.protocol.body import WireModel, validate
from microserving.protocol.generation import GenerationChunk, RemoteSendResult
from microserving.protocol.sse import SSEParser
from microserving.router.engine_http import EngineHTTP

InFlight = Counter[EngineClient]
"""How many requests the router has on each engine; an engine without any is absent."""

AnswerT = TypeVar("AnswerT", bound=WireModel)
ResultT = TypeVar("ResultT")

_QUICK_S = 5.0
"""Limit of what an engine answers from memory."""
_TOKENIZER_S = 30.0
"""Limit of an answer of some megabytes."""


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """Seconds. connect: one connection attempt. prep_recv: its answer; an engine waits less long for free pages.
    stage: `remote_send`'s answer, and the longest silence within a stream."""

    connect: float = 5.0
    prep_recv: float = 30.0
    stage: float = 300.0


class HttpEngineClient(EngineClient):
    """The engine at ``url``. ``info`` is None, and ``id`` the URL, until the engine was identified.

    on_unreachable: called with the reason whenever a connection is refused or breaks.
    """

    def __init__(
        self,
        url: str,
        role: EngineRole,
        *,
        timeouts: EngineTimeouts,
        in_flight: InFlight,
        on_unreachable: Callable[[HttpEngineClient, str], None],
    ) -> None:
        self.url = url
        self.info: wire.EngineInfo | None = None
        self._role: EngineRole = role
        self._load = EngineLoad()
        self._timeouts = timeouts
        self._in_flight = in_flight
        self._http = EngineHTTP(
            url,
            connect_timeout_s=timeouts.connect,
            on_unreachable=lambda reason: on_unreachable(self, reason),
        )

    @property
    def id(self) -> str:
        return self.url if self.info is None else self.info.engine_id

    @property
    def role(self) -> EngineRole:
        return self._role

    @property
    def in_flight(self) -> int:
        return self._in_flight[self]

    @property
    def load(self) -> EngineLoad:
        return self._load

    # What programs call

    async def prep_recv(self, request: Request, *, end: int) -> Received:
        answer = await self._verb(
            "prep_recv", request, {"end": end}, wire.PrepRecvAnswer, self._timeouts.prep_recv
        )
        resolved = end + request.prompt_length if end < 0 else end
        if answer.prefix_matched_length > resolved:
            raise self._http.broken(f"matched {answer.prefix_matched_length} of {resolved} tokens")
        rank = 0 if self.info is None else self.info.rank
        return Received(
            answer.kv_append_metadata, answer.prefix_matched_length, resolved, self, rank, answer.lease_ttl_s
        )

    async def remote_send(self, request: Request, *, to: Received) -> RemoteSendResult:
        if to.complete:
            return NOTHING_SENT
        fields = {
            "begin": to.prefix_matched_length,
            "end": to.end,
            "kv_addr_info": to.kv_append_metadata,
            "recv_rank": to.rank,
        }
        answer = await self._verb("remote_send", request, fields, wire.RemoteSendAnswer, self._timeouts.stage)
        return answer.result()

    async def start_generate(self, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        body = self._body(request) | wire.stream_fields() | {"begin": begin}
        parser, reader = SSEParser(), wire.GenerationStreamReader(request.prompt_length)
        pieces = self._http.stream(_path("start_generate"), body, silence_s=self._timeouts.stage)
        async with aclosing(pieces):
            async for piece in pieces:
                for data in parser.feed(piece):
                    for chunk in self._read_event(reader, data):
                        yield chunk
        if not reader.done:
            raise self._http.broken("ended the stream early")

    async def commit(self, request: Request) -> int:
        fields = {"request_id": request.request_id}
        body = await self._http.post(_path("commit"), fields, timeout_s=_QUICK_S)
        return self._answer(wire.CommitAnswer, body).cached_tokens

    async def abort(self, request: Request) -> None:
        await self._http.post(_path("abort"), {"request_id": request.request_id}, timeout_s=_QUICK_S)

    async def renew(self, request: Request) -> float | None:
        fields = {"request_id": request.request_id}
        body = await self._http.post_if_known(_path("renew"), fields, timeout_s=_QUICK_S)
        return None if body is None else self._answer(wire.RenewAnswer, body).lease_ttl_s

    async def match_prefix(self, request: Request) -> int:
        answer = await self._verb("match_prefix", request, {}, wire.MatchPrefixAnswer, _QUICK_S)
        return answer.prefix_matched_length

    async def while_answering(self, work: Awaitable[ResultT]) -> ResultT:
        return await self._http.while_answering(work)

    # What the router asks for itself

    async def probe(self, connect_timeout_s: float) -> wire.EngineInfo:
        """Bring ``load`` up to date; returns what the engine is now, which does not change ``info``.

        The caller bounds it. Raises TimeoutError when a connection takes too long, a MicroservingError when the
        engine is not ready to serve, or fails.
        """
        ask = partial(self._http.probe, connect_timeout_s=connect_timeout_s)
        await ask("/ready")
        info = self._answer(wire.EngineInfo, await ask(_path("info")))
        load = self._answer(wire.EngineLoad, await ask(_path("load")))
        names = EngineLoad.__dataclass_fields__
        self._load = EngineLoad(**{name: getattr(load, name) for name in names})
        return info

    async def fetch_tokenizer(self) -> dict[str, Any]:
        """The tokenizer as JSON (``Tokenizer.from_dict``)."""
        return await self._http.get(_path("tokenizer"), timeout_s=_TOKENIZER_S)

    def identify(self, info: wire.EngineInfo) -> None:
        """Remember what the engine is."""
        self.info = info
        self._http.name = f"engine {info.engine_id}"
        self._http.came_back()

    def give_up(self, why: str) -> None:
        """Fail everything that waits for the engine's answer now. why: as in "engine decode-0 does not answer"."""
        self._http.give_up(why)

    def shut_down(self) -> None:
        """The router stops: fail everything that waits for the engine with ShuttingDown."""
        self._http.shut_down()

    async def close(self) -> None:
        """Idempotent."""
        await self._http.close()

    def _body(self, request: Request) -> dict[str, Any]:
        return wire.completion_body(request, model=None if self.info is None else self.info.model)

    async def _verb(
        self,
        verb: str,
        request: Request,
        fields: Mapping[str, object],
        answer: type[AnswerT],
        timeout_s: float,
    ) -> AnswerT:
        self._http.check_open()
        body = await self._http.post(_path(verb), {**self._body(request), **fields}, timeout_s=timeout_s)
        return self._answer(answer, body)

    def _answer(self, model: type[AnswerT], body: dict[str, Any]) -> AnswerT:
        try:
            return validate(model, body)
        except InvalidRequest as error:
            raise self._http.broken(f"gave a wrong answer: {error.message}") from None

    def _read_event(self, reader: wire.GenerationStreamReader, data: str) -> list[GenerationChunk]:
        try:
            return reader.feed(data)
        except MicroservingError as error:
            raise self._http.seen_by_client(error) from None


def _path(verb: str) -> str:
    return f"/microserving/{verb}"
