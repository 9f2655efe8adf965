"""`/v1/responses`: the handler. The chat's (``front.chat``) does the work; what it says of its fields is said of this API's."""

from __future__ import annotations

from functools import partial
from typing import Final

from microserving.errors import RequestError
from microserving.front.chat import ChatFront
from microserving.front.exchange import Exchange
from microserving.front.openai_api import parse_request
from microserving.protocol.responses_api.request import ResponsesRequest
from microserving.protocol.responses_api.shape import ResponsesShape

_NAMES: Final = {"messages": "input", "max_tokens": "max_output_tokens"}
"""The chat's field -> the one that holds the same here."""


class ResponsesFront:
    """The handler. Holds no state of requests, nor any answer."""

    def __init__(self, chat: ChatFront, *, strict: bool) -> None:
        """strict: refuse unknown fields."""
        self._chat = chat
        self._strict = strict

    async def responses(self, exchange: Exchange) -> None:
        fields = parse_request(exchange, ResponsesRequest, strict=self._strict)
        shape = partial(ResponsesShape, settings=fields.echo())
        try:
            await self._chat.answer(exchange, shape, fields)
        except RequestError as error:
            if error.param is not None:  # the place in the messages is not that in the input
                name = error.param.partition("[")[0]
                error.param = _NAMES.get(name, error.param)
            raise
