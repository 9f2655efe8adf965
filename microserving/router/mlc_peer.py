"""What engines of MLC-LLM's make know: its three verbs and its fields, no questions, no abort, no lease.

Translates; ``engine_client`` asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from microserving.errors import EngineUnavailable, InvalidRequest
from microserving.program import EngineRole, Request
from microserving.protocol.generation import Grammar
from microserving.protocol.microserving import PROTOCOL_VERSION, EngineInfo

MAX_CONTEXT: Final = 2**20
"""Of an engine that does not say: the longest prompt that the front takes. The engine refuses what it cannot hold."""

_SAME: Final = (
    "model",
    "prompt",
    "max_tokens",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "logit_bias",
    "stream",
    "stream_options",
    "begin",
    "end",
    "kv_addr_info",
    "recv_rank",
)
"""Fields that mean the same there."""
_UNKNOWN: Final[Mapping[str, object]] = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "stop_token_ids": [],
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
}
"""Fields that it has not, and the values at which they do nothing."""
_INT31 = 2**31 - 1


def mlc_body(body: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """A verb's ``body`` in its words.

    Raises InvalidRequest for a field that it cannot obey, EngineUnavailable for a generation that began elsewhere.
    """
    if request.resume_output_ids:
        raise EngineUnavailable("this engine cannot go on with what another one began")
    for name, neutral in _UNKNOWN.items():
        if body.get(name, neutral) != neutral:
            raise InvalidRequest(f"the engines of this server do not know {name}", param=name)
    if request.stop.max_tokens == 0:
        raise InvalidRequest("the engines of this server generate at least one token", param="max_tokens")
    fields = {name: body[name] for name in _SAME if body.get(name) not in (None, [], {})}
    if request.grammar is not None:
        fields["response_format"] = _response_format(request.grammar)
    fields["user"] = request.request_id  # its request id
    fields["seed"] = request.sampling.seed & _INT31
    if request.stop.ignore_eos:
        fields["debug_config"] = {"ignore_eos": True}
    return fields


def _response_format(grammar: Grammar) -> dict[str, str]:
    """JSON is all that it can be bound to. Raises InvalidRequest."""
    if grammar.kind not in ("json_object", "json_schema"):
        raise InvalidRequest(f"the engines of this server cannot enforce a {grammar.kind}", param="grammar")
    schema = {"schema": grammar.text} if grammar.kind == "json_schema" else {}
    return {"type": "json_object", **schema}


def mlc_info(models: Mapping[str, Any] | None, *, role: EngineRole, rank: int) -> EngineInfo:
    """What the router takes such an engine for. models: its answer to GET `/v1/models`, if it has one.

    rank: its number among the engines, which is where its memory is found by the others. Hashes are "": unknown.
    """
    cards = models.get("data") if models is not None else None
    card = cards[0] if isinstance(cards, list) and cards and isinstance(cards[0], dict) else {}
    length = card.get("max_model_len")
    return EngineInfo(
        protocol_version=PROTOCOL_VERSION,
        engine_id=f"mlc-{rank}",
        epoch="",
        rank=rank,
        node_role=role,
        model=str(card.get("id") or "default"),
        model_hash="",
        kv_layout_hash="",
        kv_bytes_per_token=0,
        page_size=0,
        total_pages=0,
        max_context=length if isinstance(length, int) and length > 0 else MAX_CONTEXT,
        created=0,
        transports={},
    )
