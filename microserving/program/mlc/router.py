"""``Router``: the base class of MLC-LLM's router files, on top of our programs.

Owns the mapping of that style to ours. Every request runs on a view of the router that shares all of its attributes and
knows, beside them, the one request and the engines that were up when it began; so ``server_urls`` and the other lists
stay what they are from the request's first step to its last.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from microserving.errors import NoEngine, Preempted
from microserving.program.cluster import Cluster
from microserving.program.engine_client import EngineClient, Received
from microserving.program.mlc.microserving_entrypoints import (
    PrepRecvRequest,
    RemoteSendRequest,
    StartGenerateRequest,
)
from microserving.program.mlc.openai_api_protocol import CompletionRequest, CompletionResponse
from microserving.program.program import Chunks, Program
from microserving.program.request import Request
from microserving.program.settings import Fraction
from microserving.protocol.generation import GenerationChunk

Responses = AsyncGenerator[CompletionResponse | None, None]
"""What ``translate_request`` yields; None: the engine gave the request back, it is to run again."""
RouterMode = Literal["disagg", "round-robin"]

_ALL_BUT_LAST = 1e-5
_SAMPLING = ("frequency_penalty", "presence_penalty", "logit_bias", "seed", "temperature", "top_p")


@dataclass(slots=True)
class _Call:
    """One request's run. received: what engines answered to ``prep_recv``, by the metadata that the file passes on."""

    request: Request
    engines: list[EngineClient]
    received: dict[str, Received] = field(default_factory=dict)


class _LiveList(list[str]):
    """MLC's files count on engines that are always there; one that is not is no bug of theirs."""

    def __getitem__(self, index: Any) -> Any:
        try:
            return super().__getitem__(index)
        except IndexError:
            raise NoEngine("not all engines are reachable", retry_after_s=1.0) from None


class Router(Program):
    """Subclass it and write ``translate_request``; without that, ``router_mode`` says what is done.

    pd_balance_factor: the share of the prompt that the decode engine computes itself, for mode ``disagg``.
    """

    __slots__ = ("_call",)
    _call: _Call

    router_mode: RouterMode = "disagg"
    pd_balance_factor: Fraction = 0.0

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises TypeError when ``translate_request`` is no async generator."""
        super().__init_subclass__(**options)
        if not inspect.isasyncgenfunction(cls.translate_request):
            raise TypeError("translate_request must be an async generator: `async def` with a `yield` in it")

    @property
    def server_urls(self) -> list[str]:
        """Names of the engines, to be passed to ``send_...``: prefill engines first, in a stable order. An index beyond
        the engines that are up raises NoEngine."""
        return _LiveList(_url(engine) for engine in self._current.engines)

    @property
    def num_servers(self) -> int:
        return len(self._current.engines)

    @property
    def device_id_starts(self) -> list[int]:
        """One rank for each engine, and the number of all at the end."""
        return list(range(len(self._current.engines) + 1))

    @property
    def num_running_requests(self) -> list[int]:
        """Requests in flight on each engine, counted by the host: what a file adds or subtracts has no effect."""
        return [engine.in_flight for engine in self._current.engines]

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": "application/json"}

    async def route(self, request: Request, cluster: Cluster) -> Chunks:
        """Runs ``translate_request``. Raises Preempted where it yields None: the host then lets it run again, or go on
        elsewhere when the client has seen some output."""
        engines = {engine.id: engine for engine in (*cluster.prefill, *cluster.decode)}
        view = self._view(_Call(request, list(engines.values())))
        produced = len(request.resume_output_ids)
        translated = view.translate_request(CompletionRequest.of(request), request.request_id)
        async with aclosing(translated) as responses:
            async for response in responses:
                if response is None:
                    raise Preempted("the generation was given back by its engine", retry_after_s=1.0)
                if response.choices:
                    produced += len(response.choices[0].token_ids)
                    yield _chunk(response, request, produced)

    async def translate_request(self, request: CompletionRequest, request_id: str) -> Responses:
        """Serve one request by calling ``send_...``: an async generator of what they answer."""
        if self.router_mode == "disagg":
            served = self._handle_completion_disagg(request, request_id, self.pd_balance_factor)
        else:
            served = self._handle_completion_round_robin(request)
        async for response in served:
            yield response

    def pick_endpoint(self, endpoint_ids: Iterable[int]) -> int:
        """The one of these engines with the fewest requests in flight. Raises NoEngine when there is none."""
        running = self.num_running_requests
        known = [index for index in endpoint_ids if index < len(running)]
        if not known:
            raise NoEngine("no engine is reachable", retry_after_s=1.0)
        return min(known, key=lambda index: running[index])

    def _pick_endpoint(self, endpoint_ids: Iterable[int]) -> int:
        return self.pick_endpoint(endpoint_ids)

    async def _handle_completion_round_robin(self, request: CompletionRequest) -> Responses:
        """The whole request on the least busy engine."""
        url = self.server_urls[self._pick_endpoint(range(self.num_servers))]
        whole = StartGenerateRequest(**request.model_dump(), begin=0)
        async for response in self.send_start_generate(None, whole, url):
            yield response

    async def _handle_completion_disagg(
        self, original_request: CompletionRequest, request_id: str, pd_balance_factor: float = 0.0
    ) -> Responses:
        """Engine 0 computes the prompt, the least busy of the others generates."""
        original_request.user = request_id
        decode = self._pick_endpoint(range(1, self.num_servers))
        length, url = len(original_request.prompt), self.server_urls[decode]
        end = length - 1 if abs(pd_balance_factor) < _ALL_BUT_LAST else int((1 - pd_balance_factor) * length)
        fields = original_request.model_dump()
        address, matched = await self.send_prepare_receive(None, PrepRecvRequest(**fields, end=end), url)
        if matched < end:
            rank = self.device_id_starts[decode]
            sending = RemoteSendRequest(
                **fields, begin=matched, end=end, kv_addr_info=address, recv_rank=rank
            )
            await self.send_remote_send(None, sending, self.server_urls[0])
        async for response in self.send_start_generate(None, StartGenerateRequest(**fields, begin=end), url):
            yield response

    async def send_prepare_receive(
        self,
        session: Any,  # noqa: ARG002 - not needed here, but part of the interface
        request: PrepRecvRequest,
        server_url: str,
    ) -> tuple[str, int]:
        """``prep_recv``. Returns (kv_addr_info, prefix_matched_length)."""
        received = await self._engine(server_url).prep_recv(self._request(request), end=request.end)
        self._current.received[received.kv_append_metadata] = received
        return received.kv_append_metadata, received.prefix_matched_length

    async def send_remote_send(
        self,
        session: Any,  # noqa: ARG002 - not needed here, but part of the interface
        request: RemoteSendRequest,
        server_url: str,
    ) -> None:
        """``remote_send``. A ``begin`` below what the receiver had cached is moved up to that."""
        received = self._current.received.get(request.kv_addr_info)
        if received is None:
            raise ValueError("kv_addr_info must be what send_prepare_receive returned for this request")
        own = self._request(request)
        begin = max(_resolved(request.begin, own), received.prefix_matched_length)
        to = replace(received, prefix_matched_length=begin, end=_resolved(request.end, own))
        await self._engine(server_url).remote_send(own, to=to)

    async def send_start_generate(
        self,
        session: Any,  # noqa: ARG002 - not needed here, but part of the interface
        request: StartGenerateRequest,
        server_url: str,
    ) -> AsyncGenerator[CompletionResponse, None]:
        """``start_generate``: the output as it comes, or in one piece when ``request.stream`` is false."""
        own = self._request(request)
        chunks = self._engine(server_url).start_generate(own, begin=_resolved(request.begin, own))
        if request.stream:
            async for chunk in chunks:
                yield CompletionResponse.of(chunk, own.request_id)
        else:
            yield CompletionResponse.of(_joined([chunk async for chunk in chunks]), own.request_id)

    @property
    def _current(self) -> _Call:
        try:
            return self._call
        except AttributeError:
            raise RuntimeError("requests and engines are known within translate_request only") from None

    def _view(self, call: _Call) -> Self:
        view = object.__new__(type(self))
        view.__dict__ = self.__dict__  # shared: what a file keeps in attributes is kept for all requests
        view._call = call
        return view

    def _engine(self, server_url: str) -> EngineClient:
        for engine in self._current.engines:
            if _url(engine) == server_url:
                return engine
        raise ValueError(f"{server_url!r} is none of server_urls")

    def _request(self, asked: CompletionRequest) -> Request:
        """What the file asks of an engine: the client's request, with what the file changed in it."""
        if isinstance(asked.prompt, str):
            raise ValueError("prompt must be the token ids that the request came with, or others")
        given = self._current.request
        changed = {name: value for name in _SAMPLING if (value := getattr(asked, name)) is not None}
        stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or ()
        return replace(
            given,
            request_id=asked.user or given.request_id,
            prompt_token_ids=tuple(asked.prompt),
            sampling=replace(given.sampling, **changed),
            stop=replace(given.stop, max_tokens=asked.max_tokens, stop=tuple(stop)),
        )


def serve(
    *_where: object,
    router_mode: RouterMode = "round-robin",
    pd_balance_factor: float = 0.0,
    router_type: type[Router] = Router,
    **_options: object,
) -> None:
    """Starts nothing: the host that loads the file does, with engines and addresses of its own configuration. So model,
    hosts, ports and GPUs have no effect; ``router_mode`` and ``pd_balance_factor`` become the defaults of the settings of these names.
    """
    if router_type is not Router:
        router_type.router_mode, router_type.pd_balance_factor = router_mode, pd_balance_factor


def _url(engine: EngineClient) -> str:
    return f"microserving://{engine.id}"


def _resolved(index: int, request: Request) -> int:
    return index + request.prompt_length if index < 0 else index


def _chunk(response: CompletionResponse, request: Request, produced: int) -> GenerationChunk:
    """produced: output tokens so far, these included; the engine's own count is used when the response has it."""
    choice, usage = response.choices[0], response.usage
    cached = (usage.extra or {}).get("cached_tokens", 0) if usage is not None else 0
    return GenerationChunk(
        text=choice.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=choice.finish_reason,
        prompt_tokens=request.prompt_length,
        completion_tokens=produced if usage is None else usage.completion_tokens,
        cached_tokens=cached,
        logprobs=choice.logprobs or (),
        prompt_logprobs=choice.prompt_logprobs,
    )


def _joined(chunks: list[GenerationChunk]) -> GenerationChunk:
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(score for chunk in chunks for score in chunk.logprobs),
        prompt_logprobs=chunks[0].prompt_logprobs,
    )
