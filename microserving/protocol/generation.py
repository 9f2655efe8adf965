"""What a generation is asked for and what it gives back, as every layer passes it on.

Pure data: no JSON, no HTTP, no tokenizer. ``openai.py`` and ``microserving.py`` map the wire to these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Literal

from microserving.protocol.records import record

FinishReason = Literal["stop", "length", "tool_calls", "preempt"]
Preemption = Literal["recompute", "return"]


@record
class SamplingParams:
    """How the next token is chosen. Sampling is a pure function of (logits, these, seed, output position).

    temperature 0 is greedy. top_p in (0, 1], top_k 0 = off, min_p in [0, 1]. presence_penalty and
    frequency_penalty in [-2, 2] count output tokens (OpenAI); repetition_penalty > 0 counts prompt and output
    (HF). logit_bias: token id -> additive bias in [-100, 100]. seed: 64-bit unsigned.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0


@record
class StopParams:
    """When a generation ends. max_tokens None = up to the context limit, 0 = with the prompt. stop_token_ids add to the
    model's EOS set. min_tokens: before so many output tokens none of these ids is chosen and no stop string ends it."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0


@record
class Grammar:
    """What the whole output must match. kind: how ``text`` is written. ``json_schema``: a JSON Schema; ``json_object``:
    any JSON object (text is ""); ``regex``; ``lark``: a context-free grammar in llguidance's Lark."""

    kind: Literal["json_schema", "json_object", "regex", "lark"]
    text: str = ""


@record
class TokenLogprob:
    """A token that came, its natural log-probability under the model (softmax of the raw logits: before penalties, bias,
    temperature and cut-offs), and the likeliest tokens of its position with theirs, likeliest first. rank: 1 for the
    likeliest token of the vocabulary. Equal ones: the lowest id comes first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 1


@record
class GenerationChunk:
    """One piece of a generation's output, in order.

    text: what may be shown now (may be empty when only token_ids or finish_reason matter; never holds half a code
    point or half a stop string). token_ids: the tokens produced since the last chunk. finish_reason: set on the
    last chunk only. prompt_tokens, completion_tokens: running totals, exact on the last chunk. cached_tokens: how many of
    the prompt's tokens came out of a prefix cache (0 while unknown). logprobs: one for each of ``token_ids`` when they
    were asked for. prompt_logprobs: one for each prompt token, None for the first, on the first chunk when they were
    asked for (not of a resumed request: they have been told).
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@record
class GenerationRequest:
    """One prompt to continue. request_id is made by the server and unique among live requests of an engine.

    cache_salt: only requests with the same salt share cached prefixes ("" is a salt like any other). timeout_s: the
    whole request ends with DeadlineExceeded (504) after so long, counted from its arrival at whoever holds it; None =
    no deadline. resume_output_ids: output tokens that another engine produced already for this very request; the
    engine goes on behind them (they count as output: for usage, penalties, stops, the random numbers and max_tokens)
    and does not give them out again. preemption: what becomes of the request when its pages are needed for others: the
    engine computes its tokens again later, or ends it with the finish reason ``preempt`` (never a client's).

    logprobs, prompt_logprobs: how many of the likeliest tokens each output or prompt token comes with; 0 = only its own
    log-probability, None = no log-probabilities. grammar: see there; a resumed request has the whole output's.

    metadata (the client's, OpenAI's field) and headers (the few that ``front`` lets pass, lower-case names): for router
    programs only; no engine gets them. whole: nobody looks at the output before its end, so that it may come as one
    chunk.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: StopParams
    cache_salt: str = ""
    timeout_s: float | None = None
    resume_output_ids: tuple[int, ...] = ()
    preemption: Preemption = "recompute"
    metadata: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None


@record
class RemoteSendResult:
    """What one `remote_send` did. Durations in milliseconds.

    prefix_matched_length: how many of the prompt's tokens the sender had cached and did not compute. prefill_ms: from
    the first step's begin to the last layer's compute end, puts included. transfer_ms: sum of the put times, of whole
    steps (a step shared with other sends to the same receiver counts for each). exposed_ms: how much later the answer
    came than the same prefill without a transfer: the two hand-shakes with the receiver (connect and begin, before the
    first step; finish, after the last) plus transfer_ms. A put runs on the engine's thread between a layer's K/V and
    its attention, so none of it is hidden; what layer-wise sending hides is the wait for a bulk copy after the last
    layer. layer_times_ns: per step, per layer (put_begin, put_end, layer_end) in nanoseconds since the first put began
    (debugging, tests).
    """

    tokens_computed: int
    tokens_sent: int
    bytes_sent: int
    prefix_matched_length: int
    prefill_ms: float
    transfer_ms: float
    exposed_ms: float
    layer_times_ns: tuple[tuple[tuple[int, int, int], ...], ...] = ()
