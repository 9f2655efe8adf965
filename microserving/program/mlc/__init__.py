"""Runs router files written for MLC-LLM: change the import lines, keep the rest.

    from mlc_llm.router import Router                           ->  from microserving.program.mlc import Router
    from mlc_llm.protocol import openai_api_protocol            ->  from microserving.program.mlc import openai_api_protocol
    from mlc_llm.serve.entrypoints import microserving_entrypoints
                                           ->  from microserving.program.mlc import microserving_entrypoints
    from mlc_llm.interface.router import serve                  ->  from microserving.program.mlc import serve
    import aiohttp                                              ->  from microserving.program.mlc import aiohttp

A ``Router`` is a ``Program`` like any other: our host runs it, retries it, frees what it leaves behind, and swaps it. The
names and their behaviour follow MLC-LLM's public router; the code is our own, and opens no connection and starts no
engine.
"""

from __future__ import annotations

from microserving.program.mlc import aiohttp, microserving_entrypoints, openai_api_protocol
from microserving.program.mlc.router import Router, serve

__all__ = ["Router", "aiohttp", "microserving_entrypoints", "openai_api_protocol", "serve"]
