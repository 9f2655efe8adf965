"""`/v1/chat/completions`: the handler, on the shared way to an answer (``openai_api``)."""

from __future__ import annotations

from microserving.errors import InvalidRequest
from microserving.front.exchange import Exchange
from microserving.front.generations import check_vocabulary, resolve_max_tokens
from microserving.front.openai_api import OpenAIFront, off_loop, parse_request
from microserving.protocol.chat import ChatCompletionRequest
from microserving.protocol.chat_responses import ChatShape


class ChatFront:
    """The handler. Holds no state of requests."""

    def __init__(self, front: OpenAIFront) -> None:
        self._front = front

    async def chat_completions(self, exchange: Exchange) -> None:
        fields = parse_request(exchange, ChatCompletionRequest, strict=self._front.settings.strict_fields)
        model, tokenizer = await self._front.served(fields.model)
        check_vocabulary(fields, tokenizer.vocab_size)
        messages = fields.template_messages()
        size = sum(len(message["content"]) for message in messages)
        prompt = await off_loop(size, lambda: tokenizer.encode_chat(messages, max_context=model.max_context))
        if not prompt:
            raise InvalidRequest("the rendered chat is empty", param="messages")
        limit = resolve_max_tokens(
            fields.token_limit,
            default=None,
            prompt_tokens=len(prompt),
            max_context=model.max_context,
            param="messages",
        )
        await self._front.answer(exchange, ChatShape, fields, model, [prompt], [limit])
