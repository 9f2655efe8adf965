"""What OpenAI's request bodies share, and the body of `/v1/completions`, field by field; ``chat`` has the chat's.

Owns names, types, ranges and defaults of the fields, and their mapping to ``SamplingParams`` and ``StopParams``. It
does not know the model: limits that depend on it (context, vocabulary) are checked by ``front``.

Limits beyond OpenAI's own: see the constants. A field of OpenAI that is not here is ignored, and the answer names it; one
without which the text would be another one (`suffix`) is refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, field_validator

from microserving.protocol.body import WireModel, invalid
from microserving.protocol.generation import SamplingParams, StopParams
from microserving.protocol.logprobs import MAX_LOGPROBS
from microserving.protocol.names import MAX_MODEL_NAME_CHARS
from microserving.protocol.structured import StructuredFields

INT32_MAX: Final = 2**31 - 1
UINT64_MAX: Final = 2**64 - 1
MAX_SALT_CHARS: Final = 128
MAX_TIMEOUT_S: Final = 86_400.0
MAX_CHOICES_PER_PROMPT: Final = 128
"""Limit of `n` (OpenAI's)."""
MAX_PROMPTS: Final = 256
MAX_CHOICES: Final = 512
"""Limit of n x prompts in one request."""
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 256
MAX_STOP_TOKEN_IDS: Final = 256
MAX_LOGIT_BIAS: Final = 300
MAX_NAME_CHARS: Final = 256
MAX_METADATA: Final = 16
MAX_METADATA_KEY_CHARS: Final = 64
MAX_METADATA_VALUE_CHARS: Final = 512
"""Limits of `metadata` (OpenAI's)."""
DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's default of `max_tokens` for completions; chat has none (up to the context limit)."""
SMALLEST_TOP_P: Final = 1e-9
"""What `top_p: 0` means: only the most likely token is kept."""

ModelName = Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME_CHARS)]
Prompt = str | list[int]
PromptInput = str | list[str] | list[int] | list[list[int]]
"""OpenAI's four forms of `prompt`."""
_DECIMAL: Final = re.compile(r"0|[1-9][0-9]{0,9}")


def no_longer_than(limit: int) -> BeforeValidator:
    """Checks a list's length before its items are looked at."""

    def check(value: Any) -> Any:
        if isinstance(value, list) and len(value) > limit:
            raise invalid(f"at most {limit} items")
        return value

    return BeforeValidator(check)


def token_ids(value: list[Any]) -> list[int]:
    """``value``, a non-empty list, when it holds plain integers in [0, 2^31); for validators."""
    if set(map(type, value)) != {int}:
        raise invalid("token ids must be integers")
    if min(value) < 0 or max(value) > INT32_MAX:
        raise invalid("token ids must be between 0 and 2147483647")
    return value


def _prompts(value: Any) -> list[Prompt]:
    """OpenAI's four forms (text, texts, ids, lists of ids) as a list of prompts, each a text or its ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise invalid("must be a string, a list of strings, a list of token ids, or a list of those lists")
    if not value:
        raise invalid("must not be empty")
    if type(value[0]) is int:
        return [token_ids(value)]
    if len(value) > MAX_PROMPTS:
        raise invalid(f"at most {MAX_PROMPTS} prompts in one request")
    if not all(value):
        raise invalid("must not be empty")
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) for item in value):
        return [token_ids(item) for item in value]
    raise invalid("must be a string, a list of strings, a list of token ids, or a list of those lists")


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise invalid(f"at most {MAX_STOPS} stop strings")
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid("must be a string or a list of strings")
    if not all(1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        raise invalid(f"each stop string must have 1 to {MAX_STOP_CHARS} characters")
    return stops


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise invalid("must be an object of token id: bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise invalid(f"at most {MAX_LOGIT_BIAS} entries")
    result: dict[int, float] = {}
    for key, bias in value.items():
        if not _DECIMAL.fullmatch(key) or int(key) > INT32_MAX:
            raise invalid("every key must be a token id in decimal digits")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise invalid(f"the bias of token {key} must be a number between -100 and 100")
        result[int(key)] = float(bias)
    return result


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise invalid("must be an object of texts")
    if len(value) > MAX_METADATA:
        raise invalid(f"at most {MAX_METADATA} entries")
    if not all(isinstance(text, str) and len(text) <= MAX_METADATA_VALUE_CHARS for text in value.values()):
        raise invalid(f"every value must be a string of at most {MAX_METADATA_VALUE_CHARS} characters")
    if not all(1 <= len(key) <= MAX_METADATA_KEY_CHARS for key in value):
        raise invalid(f"every key must have 1 to {MAX_METADATA_KEY_CHARS} characters")
    return value


def _off(value: Any) -> Any:
    """MLC has a switch where OpenAI has a number."""
    return None if value is False else value


def _suffix(value: Any) -> Any:
    if value not in (None, ""):
        raise invalid("is not supported: the model does not fill in text before a suffix")
    return None


class StreamOptions(WireModel):
    include_usage: bool = False


class GenerationFields(StructuredFields):
    """What both endpoints and the verbs share. The extensions have vLLM's names."""

    model: ModelName | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES_PER_PROMPT)
    max_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    min_tokens: int = Field(0, ge=0, le=INT32_MAX)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=INT32_MAX)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=10)
    logit_bias: Annotated[
        dict[int, float], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float])
    ] = Field(default_factory=dict)
    seed: int | None = Field(None, ge=-(2**63), le=UINT64_MAX)
    stop: Annotated[list[str], PlainValidator(_stops, json_schema_input_type=str | list[str])] = Field(
        default_factory=list
    )
    stop_token_ids: Annotated[
        list[Annotated[int, Field(ge=0, le=INT32_MAX)]], no_longer_than(MAX_STOP_TOKEN_IDS)
    ] = Field(default_factory=list, max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    user: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    cache_salt: str = Field("", max_length=MAX_SALT_CHARS)
    """vLLM's name: only requests with the same salt share cached prefixes; none is the salt ""."""
    timeout: float | None = Field(None, gt=0, le=MAX_TIMEOUT_S)
    """Seconds after which the request ends with 504; the header `x-request-timeout` may say less."""
    metadata: Annotated[dict[str, str], PlainValidator(_metadata, json_schema_input_type=dict[str, str])] = (
        Field(default_factory=dict)
    )
    """Router programs see it; without effect otherwise."""

    @property
    def include_usage(self) -> bool:
        return self.stream_options.include_usage

    def sampling_params(self, seed: int) -> SamplingParams:
        """``seed``: 64-bit unsigned; the caller picks it (from `seed`, or at random)."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=max(self.top_p, SMALLEST_TOP_P),
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            seed=seed,
        )

    def stop_params(self, max_tokens: int) -> StopParams:
        """``max_tokens``: the resolved limit (defaults and the room in the context are the caller's business)."""
        return StopParams(
            max_tokens=max_tokens,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
        )

    @property
    def candidates(self) -> int:
        """Generations for each prompt; of more than `n` the best are answered with."""
        return self.n

    @property
    def shown_logprobs(self) -> int | None:
        """With how many of the likeliest tokens each output token is shown; None = no log-probabilities."""
        return None

    @property
    def output_logprobs(self) -> int | None:
        """The same for what is generated: candidates are compared by their tokens' log-probabilities."""
        shown = self.shown_logprobs
        return 0 if shown is None and self.candidates > self.n else shown

    @property
    def scored_prompt(self) -> int | None:
        """The same for the tokens of the prompt."""
        return None


class CompletionRequest(GenerationFields):
    """`/v1/completions`. ``prompt``: at least one prompt, each a non-empty text or its token ids."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts, json_schema_input_type=PromptInput)]
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES_PER_PROMPT)
    echo: bool = False
    logprobs: Annotated[int | None, BeforeValidator(_off)] = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: Annotated[int | None, BeforeValidator(_off)] = Field(None, ge=0, le=MAX_LOGPROBS)
    suffix: Annotated[Any, PlainValidator(_suffix, json_schema_input_type=Literal[""] | None)] = None
    debug_config: Any = None
    """MLC's; accepted and without effect."""

    @field_validator("prompt")
    @classmethod
    def _bounded(cls, prompts: list[Prompt], info: ValidationInfo) -> list[Prompt]:
        if info.data.get("n", 1) * len(prompts) > MAX_CHOICES:
            raise invalid(f"n times the number of prompts must not exceed {MAX_CHOICES}")
        return prompts

    @field_validator("best_of")
    @classmethod
    def _enough_candidates(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n", 1)
        if best_of is None or best_of == n:
            return best_of
        if best_of < n:
            raise invalid("must not be below n")
        if info.data.get("stream"):
            raise invalid("cannot be above n in a stream: which choices are the best is known at the end")
        if best_of * len(info.data.get("prompt", ())) > MAX_CHOICES:
            raise invalid(f"best_of times the number of prompts must not exceed {MAX_CHOICES}")
        return best_of

    @property
    def candidates(self) -> int:
        return self.best_of or self.n

    @property
    def shown_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def scored_prompt(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)
