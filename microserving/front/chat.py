"""`/v1/chat/completions`, and the way from any API's chat to its answer, on the shared one (``openai_api``)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from microserving.errors import InvalidRequest
from microserving.front.chat_output import OutputForm
from microserving.front.chat_output.formats import reasoning_format, tool_call_format
from microserving.front.chat_output.reasoning import CLOSE, OPEN
from microserving.front.chat_output.tool_grammar import calls_grammar
from microserving.front.exchange import Exchange
from microserving.front.generations import check_vocabulary, resolve_max_tokens
from microserving.front.openai_api import OpenAIFront, off_loop, parse_request
from microserving.protocol.chat import ChatCompletionRequest
from microserving.protocol.chat_fields import ChatFields
from microserving.protocol.chat_responses import ChatShape
from microserving.protocol.generation import Grammar
from microserving.protocol.responses import AnswerShape
from microserving.tokenizer import Tokenizer

_TAIL_TOKENS: Final = 16
"""As many as a prompt's end with an opening marker needs."""


class ChatFront:
    """The handler. Holds no state of requests."""

    def __init__(self, front: OpenAIFront) -> None:
        self._front = front

    async def chat_completions(self, exchange: Exchange) -> None:
        fields = parse_request(exchange, ChatCompletionRequest, strict=self._front.settings.strict_fields)
        await self.answer(exchange, ChatShape, fields)

    async def answer(
        self, exchange: Exchange, make_shape: Callable[..., AnswerShape], fields: ChatFields
    ) -> None:
        """Answer the chat of ``fields`` in the shape. make_shape: its constructor; it gets a ``make_reader``. Errors name
        the fields as `/v1/chat/completions` does."""
        model, tokenizer = await self._front.served(fields.model)
        check_vocabulary(fields, tokenizer.vocab_size)
        messages, options = fields.template_messages(), fields.template_options
        prompt = await off_loop(
            fields.prompt_chars,
            lambda: tokenizer.encode_chat(messages, max_context=model.max_context, **options),
        )
        if not prompt:
            raise InvalidRequest("the rendered chat is empty", param="messages")
        limit = resolve_max_tokens(
            fields.token_limit,
            default=None,
            prompt_tokens=len(prompt),
            max_context=model.max_context,
            param="messages",
        )
        grammar = _grammar(fields, tokenizer)
        constrained = grammar is not None or fields.constraint() is not None
        form = _output_form(fields, tokenizer, prompt, constrained=constrained)
        shape = partial(make_shape, make_reader=form.make_reader)
        await self._front.answer(exchange, shape, fields, model, [prompt], [limit], grammar)


def _grammar(fields: ChatFields, tokenizer: Tokenizer) -> Grammar | None:
    """What the output must match for the sake of its tools; None when they ask for nothing, whatever else does.

    Raises InvalidRequest for a form of answers that cannot stand beside calls.
    """
    answer: dict[str, Any] | None = None
    if not fields.forced_tools:
        bound = fields.constraint()
        if bound is None or not fields.offered_tools:
            return None
        answer = _schema(*bound)
    form = tool_call_format(tokenizer.tool_call_format, tokenizer.chat_template)
    tools = fields.forced_tools or fields.offered_tools
    return Grammar("lark", calls_grammar(tools, form, several=fields.several_calls, answer=answer))


def _schema(grammar: Grammar, param: str) -> dict[str, Any]:
    if grammar.kind == "json_object":
        return {"type": "object"}
    if grammar.kind != "json_schema":
        raise InvalidRequest(f"{param} cannot be combined with tools", param=param)
    schema: dict[str, Any] = json.loads(grammar.text)
    return schema


def _output_form(
    fields: ChatFields, tokenizer: Tokenizer, prompt: Sequence[int], *, constrained: bool
) -> OutputForm:
    """constrained: the output matches a grammar from its first token, so that it has no thoughts."""
    template = tokenizer.chat_template
    reasoning = "none" if constrained else reasoning_format(tokenizer.reasoning_format, template)
    return OutputForm(
        tools=[tool.name for tool in fields.offered_tools],
        several=fields.several_calls,
        only_calls=bool(fields.forced_tools),
        calls=tool_call_format(tokenizer.tool_call_format, template),
        reasoning=reasoning,
        thinks_already=reasoning != "none" and _thinks_already(fields, tokenizer, prompt),
    )


def _thinks_already(fields: ChatFields, tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends within the assistant's thoughts."""
    begun = fields.begun_answer
    if begun is not None:
        return begun.rfind(OPEN) > begun.rfind(CLOSE)
    tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False)
    return tail.rstrip().endswith(OPEN)
