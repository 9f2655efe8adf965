"""The OpenAI HTTP front: one app over any ``Backend`` (an engine in this process, or a router program).

Owns HTTP, JSON, tokenising and streams. Does not know how a generation is computed.
"""

from microserving.front.access import ApiKeys, ClientLimits
from microserving.front.app import create_front
from microserving.front.backend import Backend, ServedModel
from microserving.front.control import control_router
from microserving.front.exchange import Endpoint, Exchange, Handler
from microserving.front.openai_api import parse_request, tokenize
from microserving.front.openapi import HotRoute
from microserving.front.serving import bind_listener, run_on_uvloop, serve_app
from microserving.front.settings import FrontSettings

__all__ = [
    "ApiKeys",
    "Backend",
    "ClientLimits",
    "Endpoint",
    "Exchange",
    "FrontSettings",
    "Handler",
    "HotRoute",
    "ServedModel",
    "bind_listener",
    "control_router",
    "create_front",
    "parse_request",
    "run_on_uvloop",
    "serve_app",
    "tokenize",
]
