"""The verbs' requests as MLC's router files build them: a completion request and the verb's own fields.

Indices are half-open over prompt tokens; negative ones count from the end.
"""

from __future__ import annotations

from microserving.program.mlc.openai_api_protocol import CompletionRequest


class PrepRecvRequest(CompletionRequest):
    end: int


class RemoteSendRequest(CompletionRequest):
    begin: int
    end: int
    kv_addr_info: str
    recv_rank: int


class StartGenerateRequest(CompletionRequest):
    begin: int
