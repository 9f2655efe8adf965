"""The generations of one request: how many, with which seeds, and their chunks as one sequence.

Choice ``j`` of every prompt runs with ``derive_seed(seed, j)``; choice 0 uses the seed itself, so a prompt gives the
same text alone and within a list. The index of choice j of prompt i is ``i * n + j`` (OpenAI's order).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Final

from microserving.errors import ContextLengthExceeded, DeadlineExceeded, InternalError, InvalidRequest
from microserving.front.backend import Backend
from microserving.protocol.generation import GenerationChunk, GenerationRequest, Grammar
from microserving.protocol.openai import UINT64_MAX, GenerationFields
from microserving.protocol.sse import MAX_EVENT_BYTES

_logger = logging.getLogger(__name__)

MAX_SCORES: Final = 2**22
"""Log-probabilities in one answer: about 0.5 GB."""
MAX_PROMPT_SCORES: Final = MAX_EVENT_BYTES // 48
"""Log-probabilities of one prompt: an engine tells a router all of them in one event, each in 48 bytes at the most."""
_END_S: Final = 10.0
"""How long generations that nobody wants any more may take to end."""
IndexedChunk = tuple[int, GenerationChunk]
_GOLDEN = 0x9E3779B97F4A7C15


def pick_seed(seed: int | None) -> int:
    """The request's seed as 64-bit unsigned (negative ones wrap around), a random one when it named none."""
    return secrets.randbits(64) if seed is None else seed & UINT64_MAX


def derive_seed(seed: int, choice: int) -> int:
    """The seed of choice ``choice``: the seed itself for choice 0, else output ``choice`` of SplitMix64 (Steele et
    al. 2014) started at it."""
    if choice == 0:
        return seed
    z = (seed + choice * _GOLDEN) & UINT64_MAX
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & UINT64_MAX
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & UINT64_MAX
    return z ^ (z >> 31)


def resolve_max_tokens(
    asked: int | None, *, default: int | None, prompt_tokens: int, max_context: int, param: str
) -> int:
    """How many tokens may be generated. default None: all that fit.

    Raises ContextLengthExceeded when the prompt leaves no room, or not the room that was asked for. ``param``: the
    field that holds the prompt.
    """
    room = max_context - prompt_tokens
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_tokens} tokens, which leaves no room in the context of {max_context} tokens",
            param=param,
        )
    if asked is None:
        return room if default is None else min(default, room)
    if asked > room:
        raise ContextLengthExceeded(
            f"{prompt_tokens} prompt tokens and {asked} output tokens do not fit the context of {max_context} tokens",
            param="max_tokens",
        )
    return asked


def check_vocabulary(fields: GenerationFields, vocab_size: int) -> None:
    """Raises InvalidRequest when a token id of the request is outside the model's vocabulary."""
    for token in fields.logit_bias:
        if token >= vocab_size:
            raise InvalidRequest(f"token {token} is not in the vocabulary", param=f"logit_bias.{token}")
    if any(token >= vocab_size for token in fields.stop_token_ids):
        raise InvalidRequest("a token id is not in the vocabulary", param="stop_token_ids")


def grammar_of(fields: GenerationFields) -> Grammar | None:
    """What every output must match. Raises InvalidRequest when the request says it twice."""
    bound = fields.constraint()
    return None if bound is None else bound[0]


def check_logprobs(fields: GenerationFields, prompts: Sequence[Sequence[int]], limits: Sequence[int]) -> None:
    """Raises InvalidRequest when the answer would hold too many log-probabilities. A stream does not hold the output's."""
    scored = [] if fields.scored_prompt is None else [(fields.scored_prompt + 1) * len(p) for p in prompts]
    scores = sum(scored)
    if fields.output_logprobs is not None and not fields.stream:
        scores += (fields.output_logprobs + 1) * sum(limits)
    if scores * fields.candidates > MAX_SCORES or max(scored, default=0) > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            "so many log-probabilities are too much for one answer: ask for fewer tokens, choices or logprobs",
            param="logprobs" if fields.output_logprobs is not None else "prompt_logprobs",
        )


def plan_generations(
    fields: GenerationFields,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    request_id: str,
    headers: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    grammar: Grammar | None = None,
) -> list[GenerationRequest]:
    """One generation per candidate, in index order. limits: the resolved max_tokens of each prompt. headers: for router
    programs. timeout_s: from now. grammar: that every choice must match. Raises InvalidRequest."""
    check_logprobs(fields, prompts, limits)
    seed = pick_seed(fields.seed)
    choices = [(i, j) for i in range(len(prompts)) for j in range(fields.candidates)]
    return [
        GenerationRequest(
            request_id=request_id if len(choices) == 1 else f"{request_id}-{index}",
            prompt_token_ids=tuple(prompts[i]),
            sampling=fields.sampling_params(derive_seed(seed, j)),
            stop=fields.stop_params(limits[i]),
            cache_salt=fields.cache_salt,
            whole=not fields.stream,
            timeout_s=timeout_s,
            metadata=fields.metadata,
            headers=headers or {},
            grammar=grammar,
            logprobs=fields.output_logprobs,
            prompt_logprobs=fields.scored_prompt,
        )
        for index, (i, j) in enumerate(choices)
    ]


def run_generations(
    backend: Backend, requests: Sequence[GenerationRequest], concurrency: int
) -> aclosing[AsyncGenerator[IndexedChunk, None]]:
    """The chunks of all ``requests`` with their index, as they come. Leaving the context ends what still runs."""
    return aclosing(_merged(backend, requests, concurrency))


class ChunkOrder:
    """Holds a backend to its promise: one finish reason, on the last chunk, ``preempt`` only when it was asked for."""

    __slots__ = ("_finished", "_may_be_preempted")

    def __init__(self, request: GenerationRequest) -> None:
        self._finished = False
        self._may_be_preempted = request.preemption == "return"

    def check(self, chunk: GenerationChunk) -> None:
        """The next one. Raises InternalError."""
        reason = chunk.finish_reason
        if self._finished or (reason == "preempt" and not self._may_be_preempted):
            raise InternalError("the backend broke the order of its chunks")
        self._finished = reason is not None

    def end(self) -> None:
        """There are no more. Raises InternalError."""
        if not self._finished:
            raise InternalError("the backend ended a generation without a finish reason")


async def close_generation(chunks: AsyncIterator[GenerationChunk]) -> None:
    """End what a backend began; an async generator can be told."""
    close = getattr(chunks, "aclose", None)
    if close is not None:
        await close()


async def _indexed(
    backend: Backend, index: int, request: GenerationRequest
) -> AsyncGenerator[IndexedChunk, None]:
    order = ChunkOrder(request)
    chunks = backend.generate(request)
    try:
        async for chunk in chunks:
            order.check(chunk)
            yield index, chunk
    finally:
        await close_generation(chunks)
    order.end()


async def _merged(
    backend: Backend, requests: Sequence[GenerationRequest], concurrency: int
) -> AsyncGenerator[IndexedChunk, None]:
    queue: asyncio.Queue[IndexedChunk | BaseException | None] = asyncio.Queue(maxsize=2 * concurrency)
    waiting, started = iter(enumerate(requests)), time.monotonic()
    left = False

    async def work() -> None:
        for index, planned in waiting:
            request = _from_now(planned, started)
            async with aclosing(_indexed(backend, index, request)) as chunks:
                async for item in chunks:
                    await queue.put(item)

    async def work_to_the_end() -> None:
        end: BaseException | None = None
        try:
            await work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the reader waits for it
            if left:
                return
            end = error
            if isinstance(error, asyncio.CancelledError):
                end = InternalError("the backend cancelled a generation")
        await queue.put(end)

    workers = [asyncio.create_task(work_to_the_end()) for _ in range(min(concurrency, len(requests)))]
    running = len(workers)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        left = True
        await _end(workers)


async def _end(workers: Collection[asyncio.Task[None]]) -> None:
    for worker in workers:
        worker.cancel()
    if workers:
        _, clinging = await asyncio.wait(workers, timeout=_END_S)
        if clinging:
            _logger.warning("%d generations do not end although they were cancelled", len(clinging))


def _from_now(request: GenerationRequest, since: float) -> GenerationRequest:
    """``request``, whose time ran while it waited for its turn. Raises DeadlineExceeded when it is over."""
    if request.timeout_s is None:
        return request
    left = request.timeout_s - (time.monotonic() - since)
    if left <= 0:
        raise DeadlineExceeded("the request took longer than its timeout")
    return dataclasses.replace(request, timeout_s=left)
