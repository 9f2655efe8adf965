"""`/tokenize` and `/detokenize`: the handlers. Long texts are worked on beside the event loop, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from microserving.errors import InvalidRequest
from microserving.front.backend import ServedModel
from microserving.front.exchange import Exchange
from microserving.front.models import ModelsFront
from microserving.front.openai_api import check_body, off_loop, parse_request
from microserving.protocol.body import parse_object
from microserving.protocol.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from microserving.tokenizer import Tokenizer

MAX_AT_ONCE: Final = 2
"""Nobody's completion waits for its tokens because of these."""
_CHARS_PER_TOKEN: Final = 4
"""For how long a list of ids is to decode, compared with a text."""


class TokenizeFront:
    """Holds no state of requests. strict: unknown fields are refused."""

    def __init__(self, models: ModelsFront, *, strict: bool) -> None:
        self._models = models
        self._strict = strict
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    async def tokenize(self, exchange: Exchange) -> None:
        """POST `/tokenize`: a text or a chat. A text may be longer than the context."""
        body = parse_object(exchange.body, max_values=exchange.max_values)
        fields: TokenizeTextRequest | TokenizeChatRequest
        if "messages" in body:
            fields = check_body(exchange, body, TokenizeChatRequest, strict=self._strict)
        else:
            fields = check_body(exchange, body, TokenizeTextRequest, strict=self._strict)
        model, tokenizer = await self._models.served(fields.model)
        with_strings = fields.return_token_strs
        await self._reply(
            exchange,
            len(exchange.body),
            lambda: _tokens(_encode(fields, tokenizer), model, tokenizer, with_strings),
        )

    async def detokenize(self, exchange: Exchange) -> None:
        """POST `/detokenize`."""
        fields = parse_request(exchange, DetokenizeRequest, strict=self._strict)
        model, tokenizer = await self._models.served(fields.model)
        ids = fields.tokens
        if len(ids) > model.max_context:
            raise InvalidRequest(f"at most {model.max_context} tokens, as the context has", param="tokens")
        if ids and max(ids) >= tokenizer.vocab_size:
            raise InvalidRequest("a token id is not in the vocabulary", param="tokens")
        await self._reply(
            exchange,
            _CHARS_PER_TOKEN * len(ids),
            lambda: msgspec.json.encode({"prompt": tokenizer.decode(ids, skip_special_tokens=False)}),
        )

    async def _reply(self, exchange: Exchange, size: int, work: Callable[[], bytes]) -> None:
        async with self._slots:
            answer = await off_loop(size, work)
        await exchange.reply(answer)


def _encode(fields: TokenizeTextRequest | TokenizeChatRequest, tokenizer: Tokenizer) -> list[int]:
    if isinstance(fields, TokenizeTextRequest):
        return tokenizer.encode(fields.prompt, add_special_tokens=fields.add_special_tokens)
    return tokenizer.encode_chat(fields.template_messages(), **fields.template_options)


def _tokens(ids: Sequence[int], model: ServedModel, tokenizer: Tokenizer, with_strings: bool) -> bytes:
    """The answer of `/tokenize` (``TokenizeAnswer``)."""
    if with_strings and len(ids) > model.max_context:
        raise InvalidRequest(
            f"only for as many tokens as the context has, {model.max_context}", param="return_token_strs"
        )
    strings = tokenizer.token_strings(ids) if with_strings else None
    return msgspec.json.encode(
        {"count": len(ids), "max_model_len": model.max_context, "tokens": ids, "token_strs": strings}
    )
