"""The router process: runs a user's program over engines, behind the OpenAI front.

Model-free: it knows a tokenizer, URLs and verbs, never an engine's code. ``app.create_app`` makes the ASGI app and
``run.run_router`` the process; only the light configuration is imported here.
"""

from microserving.router.config import RouterConfig

__all__ = ["RouterConfig"]
