"""An engine over HTTP: the verbs that programs call, and the questions that the router asks for itself.

Does not know which request holds what (``holdings``) nor when an engine counts as up (``engine_registry``).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from microserving.errors import EngineUnavailable, InvalidRequest, MicroservingError, ShuttingDown
from microserving.policies import EngineLoad
from microserving.program import NOTHING_SENT, EngineClient, EngineRole, Received, Request
from microserving.protocol import microserving as wire
from microserving.protocol import verb_answers
from microserving.protocol.body import WireModel, validate
from microserving.protocol.generation import GenerationChunk, RemoteSendResult
from microserving.protocol.generation_stream import GenerationStreamReader
from microserving.router.connection import ConnectionFailedError
from microserving.router.engine_http import EngineHTTP
from microserving.router.engine_stream import EngineStream
from microserving.router.in_flight import InFlight
from microserving.router.mlc_peer import mlc_body, mlc_info

AnswerT = TypeVar("AnswerT", bound=WireModel)
ResultT = TypeVar("ResultT")
ReplyT = TypeVar("ReplyT")

_PREP_RECV: Final = "/microserving/prep_recv"
_REMOTE_SEND: Final = "/microserving/remote_send"
_START_GENERATE: Final = "/microserving/start_generate"
_MATCH_PREFIX: Final = "/microserving/match_prefix"
_STREAM_FIELDS = wire.stream_fields()
_encode: Final = msgspec.json.encode
_LOAD_FIELDS = tuple(EngineLoad.__dataclass_fields__)
SLOWEST_TOKEN_S = 1.0
"""What a token may take when nobody sees it before the last one."""
_QUICK_S = 5.0
"""Limit of what an engine answers from memory."""
_TOKENIZER_S = 30.0
"""Limit of an answer of some megabytes."""


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """Seconds. connect: one connection attempt. prep_recv: its answer; an engine waits less long for free pages.
    stage: `remote_send`'s answer, and the longest silence within a stream. authorization: what every call brings, when
    engines want an API key."""

    connect: float = 5.0
    prep_recv: float = 30.0
    stage: float = 300.0
    authorization: bytes | None = field(default=None, repr=False)


def _ignore(_client: HttpEngineClient, _answered: bool) -> None:
    """Nobody wants to know."""


class HttpEngineClient(EngineClient):
    """The engine at ``url``. ``info`` is None, and ``id`` the URL, until the engine was identified.

    on_unreachable: called with the reason whenever a connection is refused or breaks. on_outcome: called after every
    verb with whether the engine answered as it should, or failed though it could be reached. number: of the engine in
    its registry.

    An engine that knows MLC's three verbs only is driven with these (``mlc_peer``).
    """

    def __init__(
        self,
        url: str,
        role: EngineRole,
        *,
        timeouts: EngineTimeouts,
        in_flight: InFlight,
        on_unreachable: Callable[[HttpEngineClient, str], None],
        on_outcome: Callable[[HttpEngineClient, bool], None] = _ignore,
        number: int = 0,
    ) -> None:
        self.url = url
        self.info: wire.EngineInfo | None = None
        self.verbs_only = False
        self._role: EngineRole = role
        self._number = number
        self._on_outcome = on_outcome
        self._load = EngineLoad()
        self._timeouts = timeouts
        self._in_flight = in_flight
        self._http = EngineHTTP(
            url,
            connect_timeout_s=timeouts.connect,
            on_unreachable=lambda reason: on_unreachable(self, reason),
            authorization=timeouts.authorization,
        )

    @property
    def id(self) -> str:
        return self.url if self.info is None else self.info.engine_id

    @property
    def role(self) -> EngineRole:
        return self._role

    @role.setter
    def role(self, role: EngineRole) -> None:
        self._role = role

    @property
    def in_flight(self) -> int:
        return self._in_flight[self]

    @property
    def load(self) -> EngineLoad:
        return self._load

    # What programs call

    def prep_recv(self, request: Request, *, end: int) -> Coroutine[Any, Any, Received]:
        def received(content: bytes) -> Received:
            answer = verb_answers.PREP_RECV.decode(content)
            resolved = end + len(request.prompt_token_ids) if end < 0 else end
            if answer.prefix_matched_length > resolved:
                raise self._http.broken(f"matched {answer.prefix_matched_length} of {resolved} tokens")
            rank = 0 if self.info is None else self.info.rank
            return Received(
                answer.kv_append_metadata,
                answer.prefix_matched_length,
                resolved,
                self,
                rank,
                answer.lease_ttl_s,
            )

        return self._ask(_PREP_RECV, request, {"end": end}, received, self._timeouts.prep_recv)

    def remote_send(self, request: Request, *, to: Received) -> Coroutine[Any, Any, RemoteSendResult]:
        if to.complete:
            return _nothing_sent()
        fields = {
            "begin": to.prefix_matched_length,
            "end": to.end,
            "kv_addr_info": to.kv_append_metadata,
            "recv_rank": to.rank,
        }
        return self._ask(_REMOTE_SEND, request, fields, verb_answers.remote_send_result, self._timeouts.stage)

    def start_generate(self, request: Request, *, begin: int = 0) -> AsyncIterator[GenerationChunk]:
        reader = GenerationStreamReader(request.prompt_length, len(request.resume_output_ids))
        if request.whole:
            return self._generate_whole(request, begin, reader)
        return EngineStream(
            self._http,
            _START_GENERATE,
            self._body(request, {**_STREAM_FIELDS, "begin": begin}),
            reader,
            silence_s=self._timeouts.stage,
            answered=self._answered,
            failed=self._failed,
        )

    async def _generate_whole(
        self, request: Request, begin: int, reader: GenerationStreamReader
    ) -> AsyncGenerator[GenerationChunk, None]:
        """All of the output as one chunk: an answer instead of an event for every token."""
        fields = {"begin": begin, "return_token_ids": True}
        timeout_s = self._timeouts.stage + (request.stop.max_tokens or 0) * SLOWEST_TOKEN_S
        yield await self._ask(_START_GENERATE, request, fields, reader.read_whole, timeout_s)

    async def commit(self, request: Request) -> int:
        if self.verbs_only:
            raise self._http.broken("has no prefix cache to commit to")
        fields = {"request_id": request.request_id}
        body = await self._http.post(_path("commit"), fields, timeout_s=_QUICK_S)
        return self._answer(wire.CommitAnswer, body).cached_tokens

    async def abort(self, request: Request) -> None:
        if not self.verbs_only:  # leaving the connection is all that those understand
            await self._http.post(_path("abort"), {"request_id": request.request_id}, timeout_s=_QUICK_S)

    async def renew(self, request: Request) -> float | None:
        if self.verbs_only:
            return None
        fields = {"request_id": request.request_id}
        body = await self._http.post_if_known(_path("renew"), fields, timeout_s=_QUICK_S)
        return None if body is None else self._answer(wire.RenewAnswer, body).lease_ttl_s

    async def match_prefix(self, request: Request) -> int:
        if self.verbs_only:
            return 0
        return await self._ask(_MATCH_PREFIX, request, {}, verb_answers.prefix_matched_length, _QUICK_S)

    def while_answering(self, work: Awaitable[ResultT]) -> Coroutine[Any, Any, ResultT]:
        return self._http.while_answering(work)

    # What the router asks for itself

    async def probe(self, connect_timeout_s: float) -> wire.EngineInfo:
        """Bring ``load`` up to date; returns what the engine is now, which does not change ``info``.

        The caller bounds it. Raises TimeoutError when a connection takes too long, a MicroservingError when the
        engine is not ready to serve, or fails.
        """
        ask = partial(self._http.probe, connect_timeout_s=connect_timeout_s)
        ready, info = await ask("/ready"), await ask(_path("info"))
        self.verbs_only = info is None
        if info is None:
            return await self._probe_verbs(connect_timeout_s)
        if ready is None:
            raise self._http.broken("does not say whether it is ready")
        load = self._answer(wire.EngineLoad, await ask(_path("load")) or {})
        self._load = EngineLoad(**{name: getattr(load, name) for name in _LOAD_FIELDS})
        return self._answer(wire.EngineInfo, info)

    async def _probe_verbs(self, connect_timeout_s: float) -> wire.EngineInfo:
        """Of an engine that cannot be asked what it is: any answer shows that it lives."""
        http = self._http
        self._load = EngineLoad()  # a new one: what was sent there counts no longer as waiting
        if self.info is None or self.info.model_hash:  # another program may have taken its place
            verb = _START_GENERATE
            if not await http.knows(verb, connect_timeout_s=connect_timeout_s):
                raise http.broken("is none: it knows no verb")
        models = await http.probe("/v1/models", connect_timeout_s=connect_timeout_s)
        return mlc_info(models, role=self._role, rank=self._number)

    async def fetch_tokenizer(self) -> dict[str, Any]:
        """The tokenizer as JSON (``Tokenizer.from_dict``)."""
        return await self._http.get(_path("tokenizer"), timeout_s=_TOKENIZER_S)

    def identify(self, info: wire.EngineInfo) -> None:
        """Remember what the engine is."""
        self.info = info
        self._http.name = f"engine {info.engine_id}"

    def came_back(self) -> None:
        """It may be waited for again after ``give_up``."""
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

    def _body(self, request: Request, fields: Mapping[str, object]) -> bytes:
        """What every verb carries is encoded once for all of them."""
        model = None if self.info is None else self.info.model
        if self.verbs_only:
            return msgspec.json.encode(
                mlc_body({**wire.completion_body(request, model=model), **fields}, request)
            )
        common = request.encoded.get(model)
        if common is None:
            common = msgspec.json.encode(wire.completion_body(request, model=model))[:-1]
            request.encoded[model] = common
        return b"%b,%b" % (common, _encode(fields)[1:]) if fields else common + b"}"

    async def _ask(
        self,
        path: str,
        request: Request,
        fields: Mapping[str, object],
        read: Callable[[bytes], ReplyT],
        timeout_s: float,
    ) -> ReplyT:
        """A verb that carries the request. read: makes the reply out of the answer's bytes, raising msgspec's errors."""
        http = self._http
        http.check_open()
        try:
            status, headers, content = await http.fetch(
                path, self._body(request, fields), timeout_s=timeout_s
            )
            if status != 200:
                raise http.refusal(status, headers, content)
            reply = read(content)
        except msgspec.ValidationError as error:
            raise self._failed(http.broken(f"gave a wrong answer: {error}")) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise self._failed(http.broken("answered something that is not a JSON object")) from None
        except (TimeoutError, ConnectionFailedError) as error:
            raise self._failed(http.lost(error)) from None
        except MicroservingError as error:
            raise self._failed(http.seen_by_client(error)) from None
        self._on_outcome(self, True)
        return reply

    def _answered(self) -> None:
        self._on_outcome(self, True)

    def _failed(self, error: MicroservingError) -> MicroservingError:
        """``error``, with which a verb ended; noted when the engine is to blame."""
        if isinstance(error, EngineUnavailable) and not isinstance(error, ShuttingDown):
            self._on_outcome(self, False)
        return error

    def _answer(self, model: type[AnswerT], body: dict[str, Any]) -> AnswerT:
        try:
            return validate(model, body)
        except InvalidRequest as error:
            raise self._http.broken(f"gave a wrong answer: {error.message}") from None


def _path(verb: str) -> str:
    return f"/microserving/{verb}"


async def _nothing_sent() -> RemoteSendResult:
    return NOTHING_SENT
