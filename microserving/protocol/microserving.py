"""The verbs' bodies: requests, answers and index rules.

Field names are MLC-LLM's where it has them; everything else is a superset. Used by the engine's server and by the
router's engine client, which reads what every request brings with ``verb_answers`` and ``generation_stream``. Knows
neither HTTP nor the model.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

from pydantic import Field, PlainValidator, field_validator

from microserving.errors import InvalidRequest
from microserving.protocol.body import WireModel, invalid
from microserving.protocol.generation import (
    GenerationRequest,
    Preemption,
    RemoteSendResult,
)
from microserving.protocol.openai import INT32_MAX, MAX_NAME_CHARS, CompletionRequest, Prompt, token_ids
from microserving.protocol.structured import WireGrammar, wire_grammar

PROTOCOL_VERSION: Final = 1

Index = Annotated[int, Field(ge=-(2**31), le=INT32_MAX)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Total = Annotated[int, Field(ge=0)]
Measure = Annotated[float, Field(ge=0, le=1e12)]
"""Of speed or time, in any unit. Beyond it something is broken."""
RequestId = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]


def resolve_index(value: int, length: int, *, param: str) -> int:
    """A wire index over ``length`` prompt tokens as an offset in [0, length]; negative counts from the end.

    Raises InvalidRequest naming ``param`` when it lies outside.
    """
    resolved = value + length if value < 0 else value
    if not 0 <= resolved <= length:
        raise InvalidRequest(f"{param} is {value}, but the prompt has {length} tokens", param=param)
    return resolved


def _resumed(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise invalid("must be a list of token ids")
    return tuple(token_ids(value)) if value else ()


class VerbRequest(CompletionRequest):
    """A completion body with exactly one prompt and one choice.

    resume_output_ids, preemption, return_logprob_ids (log-probabilities come with ids instead of OpenAI's texts): of
    `start_generate`; the other verbs have nothing to do with the output and take them without effect, so that a caller
    may send one and the same body to all.
    """

    resume_output_ids: Annotated[
        tuple[int, ...], PlainValidator(_resumed, json_schema_input_type=list[int])
    ] = ()
    preemption: Preemption = "recompute"
    return_logprob_ids: bool = False
    grammar: WireGrammar = None

    @field_validator("n")
    @classmethod
    def _one_choice(cls, n: int) -> int:
        if n != 1:
            raise invalid("must be 1 here")
        return n

    @field_validator("best_of")
    @classmethod
    def _one_candidate(cls, best_of: int | None) -> int | None:
        if best_of not in (None, 1):
            raise invalid("must be 1 here")
        return best_of

    @field_validator("echo")
    @classmethod
    def _no_echo(cls, echo: bool) -> bool:
        if echo:
            raise invalid("must be false here")
        return echo

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, prompts: list[Prompt]) -> list[Prompt]:
        if len(prompts) != 1:
            raise invalid("must be a single prompt here")
        return prompts

    @property
    def given_id(self) -> str | None:
        """The request id that the caller chose: `request_id`, else `user` (MLC's habit); None = the server makes one."""
        return self.request_id or self.user or None


class PrepRecvRequest(VerbRequest):
    end: Index


class RemoteSendRequest(VerbRequest):
    """kv_addr_info: bounded by ``kv_descriptor``, which alone reads it. recv_rank: the receiving rank; it must be the
    descriptor's. include_layer_times: answer when each layer was sent.
    """

    begin: Index
    end: Index
    kv_addr_info: str = Field(min_length=1)
    recv_rank: int = Field(ge=0, le=INT32_MAX)
    include_layer_times: bool = False


class StartGenerateRequest(VerbRequest):
    """begin: from where on the engine shall compute the prompt."""

    begin: Index


class RequestIdBody(WireModel):
    """`abort`, `commit` and `renew`."""

    request_id: RequestId


class MatchPrefixRequest(VerbRequest):
    """`match_prefix`; every field but the prompt is without effect."""


class PrepRecvAnswer(WireModel):
    """Ours adds the last three; a peer of another make may leave them out."""

    kv_append_metadata: str
    prefix_matched_length: int = Field(ge=0)
    prompt_length: int | None = None
    request_id: str | None = None
    lease_ttl_s: float | None = None


class RemoteSendAnswer(WireModel):
    """What `remote_send` answers (MLC: an empty object)."""

    tokens_computed: int = Field(0, ge=0)
    tokens_sent: int = Field(0, ge=0)
    bytes_sent: int = Field(0, ge=0)
    prefix_matched_length: int = Field(0, ge=0)
    prefill_ms: float = 0.0
    transfer_ms: float = 0.0
    exposed_ms: float = 0.0


class AbortAnswer(WireModel):
    """aborted: whether the engine held anything for the id."""

    aborted: bool = False


class RenewAnswer(WireModel):
    """lease_ttl_s: seconds from now until the lease expires."""

    request_id: str | None = None
    lease_ttl_s: float | None = None


class CommitAnswer(WireModel):
    """cached_tokens: how many of the prompt's first tokens are in the prefix cache now."""

    request_id: str | None = None
    cached_tokens: int = Field(0, ge=0)


class MatchPrefixAnswer(WireModel):
    prefix_matched_length: int = Field(ge=0)


class EngineInfo(WireModel):
    """GET `/microserving/info`: what an engine is. transports: name -> public description.

    aliases: further names of the model. cluster_secret_id: ``kv_descriptor.secret_id``: "" without a secret, None of
    engines that do not tell.
    """

    protocol_version: int
    engine_id: str
    epoch: str
    rank: int
    node_role: str
    model: str
    model_hash: str
    kv_layout_hash: str
    kv_bytes_per_token: int
    page_size: int
    total_pages: int
    max_context: int
    created: int
    transports: dict[str, dict[str, str | int]]
    cluster_secret_id: str | None = None
    aliases: list[str] = Field(default_factory=list)


class EngineCounters(WireModel):
    """Totals since the engine started (``engine.jobs.Counters``)."""

    prompt_tokens_computed: Total = 0
    recomputed_tokens: Total = 0
    output_tokens: Total = 0
    tokens_sent: Total = 0
    bytes_sent: Total = 0
    tokens_received: Total = 0
    requests_finished: dict[str, Total] = Field(default_factory=dict)
    aborts: Total = 0
    preemptions: Total = 0
    leases_expired: Total = 0
    prefix_query_tokens: Total = 0
    prefix_hit_tokens: Total = 0
    evicted_pages: Total = 0


class EngineLoad(WireModel):
    """GET `/microserving/load`: what an engine has to do now, and its cumulative counters."""

    running: Count = 0
    waiting: Count = 0
    reserved: Count = 0
    leases: dict[str, Count] = Field(default_factory=dict)
    free_pages: Count = 0
    cached_pages: Count = 0
    pinned_pages: Count = 0
    evictable_pages: Count = 0
    running_pages: Count = 0
    reserved_pages: Count = 0
    quarantined_pages: Count = 0
    total_pages: Count = 0
    queued_prefill_tokens: Count = 0
    prefill_tokens_per_s: Measure = 0.0
    decode_step_ms: Measure = 0.0
    decode_base_ms: Measure = 0.0
    decode_per_sequence_ms: Measure = 0.0
    mixed_step_stretch: Measure = 0.0
    counters: EngineCounters = EngineCounters()


class TokenizerDocument(WireModel):
    """GET `/microserving/tokenizer`: what ``Tokenizer.to_dict`` gives. tokenizer: the library's own JSON, as text."""

    version: int
    tokenizer: str
    bos_token_id: int | None = None
    eos_token_ids: list[int]
    prefix_ids: list[int]
    suffix_ids: list[int]
    special_tokens: dict[str, str]
    chat_template: str | None = None
    tool_call_format: str | None = None
    reasoning_format: str | None = None


def remote_send_body(result: RemoteSendResult, *, include_layer_times: bool) -> dict[str, Any]:
    """The answer of `remote_send`."""
    body = asdict(result)
    if not include_layer_times:
        del body["layer_times_ns"]
    return body


def completion_body(request: GenerationRequest, *, model: str | None) -> dict[str, Any]:
    """``request`` as the body that every verb carries: prompt ids and all parameters. The verb's own fields are added
    by the caller. What only our engines know is left out where it has no effect."""
    sampling, stop = request.sampling, request.stop
    ours = {
        "cache_salt": request.cache_salt,
        "timeout": request.timeout_s,
        "resume_output_ids": list(request.resume_output_ids),
        "preemption": None if request.preemption == "recompute" else request.preemption,
        "grammar": wire_grammar(request.grammar),
        "min_tokens": stop.min_tokens,
    }
    return {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "request_id": request.request_id,
        "max_tokens": stop.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "seed": sampling.seed,
        "stop": list(stop.stop),
        "stop_token_ids": list(stop.stop_token_ids),
        "ignore_eos": stop.ignore_eos,
        **{name: value for name, value in ours.items() if value},
        **_logprob_fields(request),
    }


def _logprob_fields(request: GenerationRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if request.logprobs is not None:
        fields["logprobs"] = request.logprobs
    if request.prompt_logprobs is not None:
        fields["prompt_logprobs"] = request.prompt_logprobs
    if fields:
        fields["return_logprob_ids"] = True
    return fields


def stream_fields() -> dict[str, Any]:
    """What `start_generate` needs on top so that its stream tells everything that a ``GenerationChunk`` holds."""
    return {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
