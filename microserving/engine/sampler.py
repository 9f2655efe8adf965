"""Choosing the next token: a pure function of (logits row, parameters, tokens so far, seed, output position).

Owns: the order and the arithmetic of the sampling parameters. Does not know: the model, stop rules, batch mates. So a
token is the same whichever engine samples it, with whatever neighbours, before or after a preemption.

The order, for each row:
 1. rows beyond the tokenizer's vocabulary are cut off (models pad their embedding);
 2. repetition_penalty over prompt and output (CTRL, arXiv:1909.05858: positive logits are divided, others multiplied),
    then frequency_penalty * count and presence_penalty * (count > 0) over the output (OpenAI's API reference);
 3. logit_bias is added (OpenAI);
 4. what a grammar does not allow gets -inf, whatever it had, and so do the ends of an output that is too short for one
    (unless nothing else is left);
 5. temperature below 1e-5 (vLLM's ``_SAMPLING_EPS``): the highest logit; otherwise the logits are divided by it;
 6. top_k, top_p, min_p, each over what the one before left (the order of HF transformers' ``generate``);
 7. softmax in float64, inverse CDF over ascending token ids with one uniform number.
vLLM adds the bias before the penalties and applies min_p before top_k: it differs only where these are combined.
Equal logits: the lowest id comes first, in greedy, in top_k and in top_p.

The uniform number is Philox4x64-10 (Salmon et al., SC'11) with key = seed and counter = output position: its first 53
bits as a fraction. It needs no state, so a resumed generation goes on with the same numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from microserving.errors import InternalError
from microserving.protocol.generation import SamplingParams

GREEDY_BELOW = 1e-5
_WORD = (1 << 64) - 1

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What one row is sampled for. tokens: prompt and output so far; the output begins at ``prompt_length``. allowed: the
    ids that may come, bool [vocabulary]; None = all. forbidden: ids that may not, unless ``allowed`` has no others."""

    params: SamplingParams
    tokens: Sequence[int]
    prompt_length: int
    allowed: npt.NDArray[np.bool_] | None = None
    forbidden: Collection[int] = ()

    @property
    def position(self) -> int:
        """Index in the output of the token to be sampled."""
        return len(self.tokens) - self.prompt_length


def sample(
    logits: npt.NDArray[np.float32], rows: Sequence[SamplingRow], vocab_size: int
) -> list[int | InternalError]:
    """One token per row. logits: float32 [len(rows), >= vocab_size], not changed.

    A row whose logits hold no usable maximum (NaN, +inf, or nothing above -inf) yields an error; other rows are fine.
    """
    logits = logits[:, :vocab_size]
    best = np.argmax(logits, axis=1)  # the first of equals; the first NaN if there is one
    return [_sample_row(logits[i], row, int(best[i])) for i, row in enumerate(rows)]


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) of an output position."""
    bits = np.random.Philox(key=seed & _WORD, counter=position).random_raw()
    return int(bits >> 11) * 2.0**-53


def _sample_row(logits: npt.NDArray[np.float32], row: SamplingRow, best: int) -> int | InternalError:
    if not np.isfinite(logits[best]):
        return InternalError("the model's logits are not finite")
    params = row.params
    greedy = params.temperature < GREEDY_BELOW
    allowed = _allowed(row, logits.size)
    if greedy and allowed is None and not _changes_logits(params):
        return best
    changed = _with_bias(_with_penalties(logits.astype(np.float64), row), params)
    if allowed is not None:
        changed[~allowed] = -np.inf
        if not np.isfinite(changed.max()):
            return InternalError("the model's logits leave nothing that may come")
    if greedy:
        return int(np.argmax(changed))
    return _draw(changed / params.temperature, params, uniform(params.seed, row.position))


def _allowed(row: SamplingRow, vocab_size: int) -> npt.NDArray[np.bool_] | None:
    """bool [vocab_size]; None = all."""
    if not row.forbidden:
        return row.allowed
    allowed = np.ones(vocab_size, np.bool_) if row.allowed is None else row.allowed.copy()
    allowed[[token for token in row.forbidden if token < vocab_size]] = False
    return allowed if allowed.any() else row.allowed


def _changes_logits(params: SamplingParams) -> bool:
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return bool(params.logit_bias) or penalties != (1.0, 0.0, 0.0)


def _with_penalties(logits: Floats, row: SamplingRow) -> Floats:
    """Changes ``logits`` in place and returns them."""
    params = row.params
    if params.repetition_penalty != 1.0:
        seen = _known(np.unique(np.asarray(row.tokens, np.int64)), logits.size)
        scores = logits[seen]
        logits[seen] = np.where(
            scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty
        )
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        output = _known(np.asarray(row.tokens[row.prompt_length :], np.int64), logits.size)
        ids, counts = np.unique(output, return_counts=True)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    return logits


def _with_bias(logits: Floats, params: SamplingParams) -> Floats:
    """Changes ``logits`` in place and returns them."""
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    return logits


def _known(ids: npt.NDArray[np.int64], vocab_size: int) -> npt.NDArray[np.int64]:
    return ids[(ids >= 0) & (ids < vocab_size)]


def _draw(logits: Floats, params: SamplingParams, u: float) -> int:
    ids, logits = _top_k(logits, params.top_k)
    weights = np.exp(logits - logits.max())
    if params.top_p < 1.0:
        ids, weights = _top_p(ids, weights, params.top_p)
    if params.min_p > 0.0:
        keep = weights >= params.min_p * weights.max()
        ids, weights = ids[keep], weights[keep]
    cdf = np.cumsum(weights)
    index = np.searchsorted(cdf, u * cdf[-1], side="right")
    last = np.searchsorted(cdf, cdf[-1], side="left")  # u * total may round up to the total
    return int(ids[min(index, last)])


def _top_k(logits: Floats, k: int) -> tuple[npt.NDArray[np.intp], Floats]:
    """Ids (ascending) and logits of the k highest; all of them when k is 0."""
    if not 0 < k < logits.size:
        return np.arange(logits.size), logits
    threshold = np.partition(logits, logits.size - k)[logits.size - k]
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: k - above.size]
    ids = np.sort(np.concatenate((above, equal)))
    return ids, logits[ids]


def _top_p(ids: npt.NDArray[np.intp], weights: Floats, p: float) -> tuple[npt.NDArray[np.intp], Floats]:
    """The fewest ids whose probabilities sum to at least p, highest first; returned in ascending order.

    Only ids with a probability of at least (1 - p) / n are sorted: all the others together have less than 1 - p.
    """
    total = weights.sum()
    likely = np.flatnonzero(weights >= (1.0 - p) * total / weights.size)
    order = likely[np.argsort(-weights[likely], kind="stable")]
    needed = int(np.searchsorted(np.cumsum(weights[order]), p * total, side="left")) + 1
    kept = np.sort(order[:needed])
    return ids[kept], weights[kept]
