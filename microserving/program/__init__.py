"""All that a router program may touch.

A program is a class with an async generator ``route`` that serves one request by composing the engines' verbs::

    from microserving.program import Chunks, Cluster, Program, Request

    class PrefillDecode(Program):
        async def route(self, request: Request, cluster: Cluster) -> Chunks:
            prefill, decode = cluster.prefill.least_loaded(), cluster.decode.least_loaded()
            end = request.prompt_length - 1
            received = await decode.prep_recv(request, end=end)
            await prefill.remote_send(request, to=received)
            async for chunk in decode.start_generate(request, begin=end):
                yield chunk

Knows no HTTP and no engine process: ``microserving.program.testing`` has engines in memory for tests of programs.
"""

from __future__ import annotations

from microserving.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    KVExhausted,
    LeaseError,
    MicroservingError,
    NoEngine,
    Overloaded,
    Preempted,
    TransferFailed,
)
from microserving.policies import EngineLoad
from microserving.program.cluster import Cluster, Pool
from microserving.program.engine_client import NOTHING_SENT, EngineClient, EngineRole, Received
from microserving.program.metrics import ClusterMetrics, PoolMetrics, Window
from microserving.program.program import Chunks, Program
from microserving.program.request import Request
from microserving.program.settings import Fraction, check_settings, setting_types
from microserving.protocol.generation import GenerationChunk, RemoteSendResult, SamplingParams, StopParams

__all__ = [
    "NOTHING_SENT",
    "Chunks",
    "Cluster",
    "ClusterMetrics",
    "DeadlineExceeded",
    "EngineClient",
    "EngineLoad",
    "EngineRole",
    "EngineUnavailable",
    "Fraction",
    "GenerationChunk",
    "KVExhausted",
    "LeaseError",
    "MicroservingError",
    "NoEngine",
    "Overloaded",
    "Pool",
    "PoolMetrics",
    "Preempted",
    "Program",
    "Received",
    "RemoteSendResult",
    "Request",
    "SamplingParams",
    "StopParams",
    "TransferFailed",
    "Window",
    "check_settings",
    "setting_types",
]
