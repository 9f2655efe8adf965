"""The verbs over HTTP: POST `/microserving/*`. Parses, resolves indices, calls the engine, shapes the answer.

Does not know how pages are reserved, how KV travels or how a descriptor looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from microserving.errors import InvalidRequest
from microserving.front import Exchange, FrontSettings, HotRoute, parse_request, tokenize
from microserving.front.deadline import before_deadline, remaining_s
from microserving.front.generations import (
    check_logprobs,
    check_vocabulary,
    grammar_of,
    pick_seed,
    resolve_max_tokens,
)
from microserving.front.openai_api import stream_answer, whole_answer
from microserving.protocol.generation import GenerationRequest
from microserving.protocol.microserving import (
    AbortAnswer,
    CommitAnswer,
    MatchPrefixAnswer,
    MatchPrefixRequest,
    PrepRecvAnswer,
    PrepRecvRequest,
    RemoteSendAnswer,
    RemoteSendRequest,
    RenewAnswer,
    RequestIdBody,
    StartGenerateRequest,
    VerbRequest,
    remote_send_body,
    resolve_index,
)
from microserving.protocol.openai import DEFAULT_COMPLETION_TOKENS
from microserving.protocol.responses import CompletionShape, Usage, VerbShape
from microserving.server.backend import EngineBackend
from microserving.server.services import EngineServices

VerbRequestT = TypeVar("VerbRequestT", bound=VerbRequest)


class Verbs:
    """The handlers. Holds no state of requests."""

    def __init__(
        self, services: EngineServices, settings: FrontSettings, clock: Callable[[], float] = time.time
    ) -> None:
        self._services = services
        self._settings = settings
        self._clock = clock
        self._model = EngineBackend(services).model

    def routes(self) -> list[HotRoute]:
        at = "/microserving/"
        return [
            HotRoute(
                at + "prep_recv", self.prep_recv, "Reserve room for K/V", PrepRecvRequest, PrepRecvAnswer
            ),
            HotRoute(
                at + "remote_send",
                self.remote_send,
                "Compute K/V and write it into a receiver",
                RemoteSendRequest,
                RemoteSendAnswer,
            ),
            HotRoute(at + "start_generate", self.start_generate, "Generate", StartGenerateRequest),
            HotRoute(at + "commit", self.commit, "Cache what was received", RequestIdBody, CommitAnswer),
            HotRoute(at + "abort", self.abort, "Free what a request holds", RequestIdBody, AbortAnswer),
            HotRoute(at + "renew", self.renew, "Extend a reservation's lease", RequestIdBody, RenewAnswer),
            HotRoute(
                at + "match_prefix",
                self.match_prefix,
                "How much of a prompt is cached",
                MatchPrefixRequest,
                MatchPrefixAnswer,
            ),
        ]

    async def prep_recv(self, exchange: Exchange) -> None:
        fields = self._parse(exchange, PrepRecvRequest)
        prompt = await self._prompt(fields)
        end = resolve_index(fields.end, len(prompt), param="end")
        received = end if fields.scored_prompt is None else 0  # else it will be computed here, for its logits
        request_id = fields.given_id or exchange.request_id
        services = self._services
        async with before_deadline(remaining_s(exchange, fields.timeout)):
            reservation = await services.engine.prep_recv(
                request_id, tuple(prompt), received, fields.cache_salt
            )
        try:
            await exchange.reply_json(
                {
                    "kv_append_metadata": services.receiver.descriptor(reservation),
                    "prefix_matched_length": end - received + reservation.prefix_matched_length,
                    "prompt_length": reservation.prompt_length,
                    "request_id": request_id,
                    "lease_ttl_s": reservation.lease_ttl_s,
                }
            )
        except BaseException:
            services.engine.abort(request_id)  # nobody will ever know of it
            raise

    async def remote_send(self, exchange: Exchange) -> None:
        """Answers when every byte is at the receiver. A caller that leaves ends the send."""
        fields = self._parse(exchange, RemoteSendRequest)
        prompt = await self._prompt(fields)
        begin = resolve_index(fields.begin, len(prompt), param="begin")
        end = resolve_index(fields.end, len(prompt), param="end")
        if begin > end:
            raise InvalidRequest(f"begin is {begin}, behind end, which is {end}", param="begin")
        async with before_deadline(remaining_s(exchange, fields.timeout)):
            result = await self._services.sender.send(
                prompt,
                begin,
                end,
                fields.kv_addr_info,
                fields.recv_rank,
                fields.given_id or exchange.request_id,
                fields.cache_salt,
            )
        await exchange.reply_json(remote_send_body(result, include_layer_times=fields.include_layer_times))

    async def start_generate(self, exchange: Exchange) -> None:
        fields = self._parse(exchange, StartGenerateRequest)
        check_vocabulary(fields, self._services.tokenizer.vocab_size)
        prompt = await self._prompt(fields)
        begin = resolve_index(fields.begin, len(prompt), param="begin")
        limit = resolve_max_tokens(
            fields.max_tokens,
            default=DEFAULT_COMPLETION_TOKENS,
            prompt_tokens=len(prompt),
            max_context=self._model.max_context,
            param="prompt",
        )
        request = GenerationRequest(
            request_id=fields.given_id or exchange.request_id,
            prompt_token_ids=tuple(prompt),
            sampling=fields.sampling_params(pick_seed(fields.seed)),
            stop=fields.stop_params(limit),
            cache_salt=fields.cache_salt,
            timeout_s=remaining_s(exchange, fields.timeout),
            resume_output_ids=fields.resume_output_ids,
            preemption=fields.preemption,
            grammar=grammar_of(fields),
            logprobs=fields.output_logprobs,
            prompt_logprobs=fields.scored_prompt,
        )
        check_logprobs(fields, [prompt], [limit])
        make_shape = VerbShape if fields.return_logprob_ids else CompletionShape
        shape = make_shape(
            request_id=exchange.request_id,
            created=int(self._clock()),
            model=self._model.id,
            include_usage=fields.include_usage,
            token_ids=fields.return_token_ids,
            logprobs=fields.shown_logprobs,
            prompt_logprobs=fields.prompt_logprobs,
            texts=self._services.tokenizer,
        )
        answer = stream_answer if fields.stream else whole_answer
        backend = EngineBackend(self._services, begin=begin)
        await answer(exchange, backend, [request], shape, Usage(len(prompt)), 1)

    async def commit(self, exchange: Exchange) -> None:
        """What was received can be shared from now on; the reservation has ended."""
        fields = parse_request(exchange, RequestIdBody, strict=self._settings.strict_fields)
        cached_tokens = self._services.engine.commit(fields.request_id)
        await exchange.reply_json({"request_id": fields.request_id, "cached_tokens": cached_tokens})

    async def abort(self, exchange: Exchange) -> None:
        """Idempotent: an unknown id is fine."""
        fields = parse_request(exchange, RequestIdBody, strict=self._settings.strict_fields)
        await exchange.reply_json({"aborted": self._services.engine.abort(fields.request_id)})

    async def renew(self, exchange: Exchange) -> None:
        fields = parse_request(exchange, RequestIdBody, strict=self._settings.strict_fields)
        lease_ttl_s = self._services.engine.renew(fields.request_id)
        await exchange.reply_json({"request_id": fields.request_id, "lease_ttl_s": lease_ttl_s})

    async def match_prefix(self, exchange: Exchange) -> None:
        fields = self._parse(exchange, MatchPrefixRequest)
        prompt = await self._prompt(fields)
        matched = self._services.engine.match_prefix(tuple(prompt), fields.cache_salt)
        await exchange.reply_json({"prefix_matched_length": matched})

    def _parse(self, exchange: Exchange, model: type[VerbRequestT]) -> VerbRequestT:
        fields = parse_request(exchange, model, strict=self._settings.strict_fields)
        self._model.named(fields.model)
        return fields

    async def _prompt(self, fields: VerbRequest) -> list[int]:
        tokenizer, max_context = self._services.tokenizer, self._model.max_context
        return (await tokenize(fields.prompt, tokenizer, max_context=max_context))[0]
