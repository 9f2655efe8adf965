"""The OpenAI HTTP front: one app over any ``Backend`` (an engine in this process, or a router program).

Owns HTTP, JSON, tokenising and streams. Does not know how a generation is computed.
"""

from microserving.front.app import create_front
from microserving.front.backend import Backend, ServedModel
from microserving.front.exchange import Endpoint, Exchange, Handler, route
from microserving.front.openai_api import parse_request
from microserving.front.settings import FrontSettings

__all__ = [
    "Backend",
    "Endpoint",
    "Exchange",
    "FrontSettings",
    "Handler",
    "ServedModel",
    "create_front",
    "parse_request",
    "route",
]
