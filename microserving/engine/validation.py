"""What an engine refuses.

Pure functions over the request and the engine's limits; each raises the error that the client shall see.
"""

from __future__ import annotations

from collections.abc import Sequence

from microserving.engine.jobs import SendJob
from microserving.errors import ContextLengthExceeded, InvalidRequest
from microserving.protocol.generation import GenerationRequest


def check_prompt(prompt: Sequence[int], *, vocab_size: int, max_context: int) -> None:
    """A prompt of known ids that leaves room for one token. Raises InvalidRequest, ContextLengthExceeded."""
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if len(prompt) >= max_context:
        raise ContextLengthExceeded(
            f"the context holds {max_context} tokens: a prompt of {len(prompt)} leaves no room for an answer",
            param="prompt",
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"token id {wrong} is outside of the vocabulary [0, {vocab_size})", param="prompt"
        )


def check_generation(request: GenerationRequest, *, vocab_size: int, max_context: int) -> int:
    """The number of tokens that the request's output may have, those that it resumes included.

    Raises InvalidRequest, ContextLengthExceeded.
    """
    prompt_tokens, max_tokens = len(request.prompt_token_ids), request.stop.max_tokens
    check_prompt(request.prompt_token_ids, vocab_size=vocab_size, max_context=max_context)
    for token in request.resume_output_ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"token id {token} is outside of the vocabulary [0, {vocab_size})", param="resume_output_ids"
            )
    for token in request.sampling.logit_bias:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"logit_bias: token id {token} is outside of [0, {vocab_size})", param="logit_bias"
            )
    if request.grammar is not None and request.stop.ignore_eos:
        raise InvalidRequest(
            "an output that must match something cannot go on behind its end", param="ignore_eos"
        )
    max_output = _max_output(prompt_tokens, max_tokens, max_context)
    if request.stop.min_tokens > max_output:
        raise InvalidRequest(
            f"an output of min_tokens has no room in {max_output} tokens", param="min_tokens"
        )
    return max_output


def _max_output(prompt_tokens: int, max_tokens: int | None, max_context: int) -> int:
    if max_tokens is None:
        return max_context - prompt_tokens
    if max_tokens < 0:
        raise InvalidRequest(f"max_tokens is {max_tokens}, at least 0 is needed", param="max_tokens")
    if prompt_tokens + max_tokens > max_context:
        raise ContextLengthExceeded(
            f"the context holds {max_context} tokens: "
            f"a prompt of {prompt_tokens} and max_tokens {max_tokens} do not fit",
            param="max_tokens",
        )
    return max_tokens


def check_send(job: SendJob, *, vocab_size: int, max_context: int) -> None:
    """Raises InvalidRequest, ContextLengthExceeded. ``begin`` and ``end`` are absolute here."""
    check_prompt(job.prompt_token_ids, vocab_size=vocab_size, max_context=max_context)
    if not 0 <= job.end <= len(job.prompt_token_ids):
        raise InvalidRequest(
            f"end is {job.end}, but the prompt has {len(job.prompt_token_ids)} tokens", param="end"
        )
    if not 0 <= job.begin <= job.end:
        raise InvalidRequest(f"begin {job.begin} is not in [0, end = {job.end}]", param="begin")
    if job.slots.shape != (job.end - job.begin,):
        raise InvalidRequest(
            f"{job.slots.size} slots for the {job.end - job.begin} tokens of [begin, end)",
            param="kv_addr_info",
        )
