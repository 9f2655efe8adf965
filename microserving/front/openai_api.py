"""OpenAI's completions over a ``Backend``, and the way to every answer: parse, tokenise once, generate, answer whole
or as a stream.

Everything that can be refused is refused with a real status: the stream's headers go out with the first chunk.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from microserving.errors import InvalidRequest, NoEngine
from microserving.front.backend import Backend, ServedModel
from microserving.front.client_headers import routing_headers
from microserving.front.deadline import remaining_s
from microserving.front.exchange import Exchange
from microserving.front.generations import (
    ChunkOrder,
    check_vocabulary,
    close_generation,
    plan_generations,
    resolve_max_tokens,
    run_generations,
)
from microserving.front.models import ModelsFront
from microserving.front.settings import FrontSettings
from microserving.protocol.body import (
    WireModel,
    header_value,
    ignored_fields,
    parse_object,
    refuse_ignored,
    validate,
)
from microserving.protocol.generation import GenerationChunk, GenerationRequest, Grammar
from microserving.protocol.logprobs import mean_logprob
from microserving.protocol.openai import (
    DEFAULT_COMPLETION_TOKENS,
    CompletionRequest,
    GenerationFields,
    Prompt,
)
from microserving.protocol.responses import (
    AnswerShape,
    CompletionShape,
    EchoedPrompt,
    FinishedChoice,
    Usage,
)
from microserving.tokenizer import Tokenizer

ModelT = TypeVar("ModelT", bound=WireModel)
ResultT = TypeVar("ResultT")
_INLINE_CHARS = 1024
"""Texts that are longer together are tokenised on a worker thread, so that they do not hold up everybody's stream. Far
below what the tokenizer does without holding the GIL: a chat template adds text of its own."""


def parse_request(exchange: Exchange, model: type[ModelT], *, strict: bool) -> ModelT:
    """The exchange's body as a checked ``model``; ignored fields are named in the answer's headers (or refused)."""
    body = parse_object(exchange.body, max_values=exchange.max_values)
    return check_body(exchange, body, model, strict=strict)


def check_body(exchange: Exchange, body: dict[str, Any], model: type[ModelT], *, strict: bool) -> ModelT:
    """The same for a ``body`` that has been parsed."""
    ignored = ignored_fields(model, body)
    if ignored and strict:
        refuse_ignored(ignored)
    parsed = validate(model, body)
    if ignored:
        exchange.headers.append((b"x-ignored-fields", header_value(ignored).encode("ascii")))
    return parsed


async def tokenize(prompts: Sequence[Prompt], tokenizer: Tokenizer, *, max_context: int) -> list[list[int]]:
    """Each prompt's ids, in the vocabulary and at least one. A text that cannot fit the context is refused untouched.

    Raises InvalidRequest, ContextLengthExceeded.
    """
    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return await off_loop(size, lambda: [_token_ids(prompt, tokenizer, max_context) for prompt in prompts])


class OpenAIFront:
    """The handlers, and what they share with the chat's (``front.chat``). Holds no state of requests."""

    def __init__(
        self,
        backend: Backend,
        settings: FrontSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._backend = backend
        self.served = ModelsFront(backend).served
        self.settings = settings
        self._clock = clock

    async def completions(self, exchange: Exchange) -> None:
        fields = parse_request(exchange, CompletionRequest, strict=self.settings.strict_fields)
        model, tokenizer = await self.served(fields.model)
        check_vocabulary(fields, tokenizer.vocab_size)
        prompts = await tokenize(fields.prompt, tokenizer, max_context=model.max_context)
        limits = [
            resolve_max_tokens(
                fields.max_tokens,
                default=DEFAULT_COMPLETION_TOKENS,
                prompt_tokens=len(prompt),
                max_context=model.max_context,
                param="prompt",
            )
            for prompt in prompts
        ]
        shape = partial(
            CompletionShape,
            echo=await _echoed(fields, prompts, tokenizer),
            choices_per_prompt=fields.n,
            prompt_logprobs=fields.prompt_logprobs,
        )
        await self.answer(exchange, shape, fields, model, prompts, limits)

    async def answer(
        self,
        exchange: Exchange,
        make_shape: Callable[..., AnswerShape],
        fields: GenerationFields,
        model: ServedModel,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        grammar: Grammar | None = None,
    ) -> None:
        """Generate ``fields.n`` choices of each prompt and answer in the shape.

        make_shape: an ``AnswerShape``'s constructor. limits: max_tokens of each prompt. grammar: that every choice must
        match, instead of what the request's own fields say.
        """
        headers = routing_headers(exchange.client_headers)
        timeout_s = remaining_s(exchange, fields.timeout)
        bound, param = await self._checked_grammar(fields, grammar)
        requests = plan_generations(fields, prompts, limits, exchange.request_id, headers, timeout_s, bound)
        shape = make_shape(
            request_id=exchange.request_id,
            created=int(self._clock()),
            model=model.id,
            include_usage=fields.include_usage,
            token_ids=fields.return_token_ids,
            fingerprint=model.fingerprint,
            logprobs=fields.shown_logprobs,
            texts=self._backend.tokenizer,
        )
        usage = Usage(sum(map(len, prompts)), fields.candidates)
        concurrency = self.settings.max_concurrent_choices
        try:
            if fields.stream:
                await stream_answer(exchange, self._backend, requests, shape, usage, concurrency)
            else:
                await whole_answer(exchange, self._backend, requests, shape, usage, concurrency, fields.n)
        except InvalidRequest as error:
            if error.param == "grammar":  # the backend's name for it
                error.param = param
            raise

    async def _checked_grammar(
        self, fields: GenerationFields, grammar: Grammar | None
    ) -> tuple[Grammar | None, str]:
        """What binds the choices, which can be compiled, and the request's field that says so. Raises InvalidRequest,
        NoEngine, Overloaded."""
        param = "tools"
        if grammar is None:
            bound = fields.constraint()
            if bound is None:
                return None, "grammar"
            grammar, param = bound
        if fields.ignore_eos:
            raise InvalidRequest(f"{param} and ignore_eos cannot be combined", param="ignore_eos")
        grammars = self._backend.grammars
        if grammars is None:  # the last engine has left meanwhile
            raise NoEngine("no engine is ready to serve this", retry_after_s=1)
        await grammars.compile_off_loop(grammar, param=param)
        return grammar, param


async def stream_answer(
    exchange: Exchange,
    backend: Backend,
    requests: Sequence[GenerationRequest],
    shape: AnswerShape,
    usage: Usage,
    concurrency: int,
) -> None:
    """Stream the chunks of all ``requests``; nothing is sent before the first one has come."""
    exchange.error_event = shape.error_event
    show = _Shown(exchange, shape, usage)
    if len(requests) == 1:
        order, chunks = ChunkOrder(requests[0]), backend.generate(requests[0])
        try:
            async for chunk in chunks:
                order.check(chunk)
                if (sending := show.chunk(0, chunk)) is not None:
                    await sending
        finally:
            await close_generation(chunks)
        order.end()
    else:
        async with run_generations(backend, requests, concurrency) as indexed:
            async for index, chunk in indexed:
                if (sending := show.chunk(index, chunk)) is not None:
                    await sending
    await exchange.end_stream(shape.last_events(usage))


class _Shown:
    """What a stream has shown of each choice."""

    def __init__(self, exchange: Exchange, shape: AnswerShape, usage: Usage) -> None:
        self._exchange = exchange
        self._send = exchange.send_event
        self._shape = shape
        self._next_event = shape.next_event
        self._usage = usage
        self._started: set[int] = set()

    def chunk(self, index: int, chunk: GenerationChunk) -> Awaitable[None] | None:
        """Send it; what is to be awaited, if anything."""
        if index in self._started and (event := self._next_event(index, chunk)) is not None:
            return self._send(event)
        return self._other(index, chunk)

    async def _other(self, index: int, chunk: GenerationChunk) -> None:
        events = self._shape.events(index, chunk, first=index not in self._started)
        if events:
            self._started.add(index)
            await self._exchange.send_events(events)
        if chunk.finish_reason is not None:
            self._usage.count(index, chunk)


async def whole_answer(
    exchange: Exchange,
    backend: Backend,
    requests: Sequence[GenerationRequest],
    shape: AnswerShape,
    usage: Usage,
    concurrency: int,
    n: int = 1,
) -> None:
    """Collect all ``requests``, then answer once, with the best ``n`` of the candidates of each prompt."""
    pieces: list[list[GenerationChunk]] = [[] for _ in requests]
    if len(requests) == 1:
        order, chunks = ChunkOrder(requests[0]), backend.generate(requests[0])
        try:
            async for chunk in chunks:
                order.check(chunk)
                pieces[0].append(chunk)
        finally:
            await close_generation(chunks)
        order.end()
    else:
        async with run_generations(backend, requests, concurrency) as indexed:
            async for index, chunk in indexed:
                pieces[index].append(chunk)
    for index, of_choice in enumerate(pieces):
        usage.count(index, of_choice[-1])
    choices = [_joined(of_choice) for of_choice in pieces]
    await exchange.reply(shape.answer(_best(choices, usage.choices, n), usage))


def _token_ids(prompt: Prompt, tokenizer: Tokenizer, max_context: int) -> list[int]:
    ids = tokenizer.encode(prompt, max_context=max_context) if isinstance(prompt, str) else prompt
    if not ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if max(ids) >= tokenizer.vocab_size:
        raise InvalidRequest("a token id is not in the vocabulary", param="prompt")
    return ids


async def _echoed(
    fields: CompletionRequest, prompts: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> list[EchoedPrompt]:
    """The prompts as choices begin with them: as they were given, or what their ids stand for. None without `echo`."""
    if not fields.echo:
        return []

    def texts() -> list[str]:
        pairs = zip(fields.prompt, prompts, strict=True)
        return [
            given if isinstance(given, str) else tokenizer.decode(ids, skip_special_tokens=False)
            for given, ids in pairs
        ]

    shown = await off_loop(sum(map(len, prompts)), texts)
    return [EchoedPrompt(text, ids) for text, ids in zip(shown, prompts, strict=True)]


def _best(choices: Sequence[FinishedChoice], candidates: int, n: int) -> list[FinishedChoice]:
    """Of the ``candidates`` of each prompt the ``n`` with the highest log-probability per token, best first (OpenAI);
    all of them, in order, when no more than n were generated."""
    if candidates <= n:
        return list(choices)
    groups = [choices[begin : begin + candidates] for begin in range(0, len(choices), candidates)]
    return [
        choice
        for group in groups
        for choice in sorted(group, key=lambda choice: mean_logprob(choice.logprobs), reverse=True)[:n]
    ]


def _joined(chunks: Sequence[GenerationChunk]) -> FinishedChoice:
    last = chunks[-1]
    assert last.finish_reason is not None  # ChunkOrder holds the backend to it
    if len(chunks) == 1:
        return FinishedChoice(
            last.text, last.token_ids, last.finish_reason, last.logprobs, last.prompt_logprobs
        )
    return FinishedChoice(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish_reason=last.finish_reason,
        logprobs=tuple(token for chunk in chunks for token in chunk.logprobs),
        prompt_logprobs=chunks[0].prompt_logprobs,
    )


async def off_loop(size: int, encode: Callable[[], ResultT]) -> ResultT:
    """``encode()``, on a worker thread when the text is long. size: its characters."""
    return encode() if size <= _INLINE_CHARS else await asyncio.to_thread(encode)
