"""The engine's HTTP server: the OpenAI front plus the verbs, over one engine in this process.

Owns HTTP and the wiring of an engine process (``run``). Does not know the model, the scheduler or the transport inside.
"""

from microserving.server.app import create_app
from microserving.server.backend import EngineBackend
from microserving.server.services import EngineServices

__all__ = ["EngineBackend", "EngineServices", "create_app"]
