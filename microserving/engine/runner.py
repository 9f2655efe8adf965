"""The contract between the engine's step and whatever computes the model (TVM, or a fake in tests).

A step is a list of chunks: runs of consecutive positions of some sequences. A decode is a chunk of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from microserving.transports.base import LeaseGuard, RemotePool


@dataclass(frozen=True, slots=True)
class RemotePut:
    """Also write the K/V of a chunk into another engine's pool, layer by layer, as soon as each layer has it.

    slots: int32 [len(token_ids)], the receiver's slot (page * page_size + offset) of each token, -1 = do not send.
    guard: checked before every layer's put; once the receiver's word is another, nothing more of this put is written.
    """

    pool: RemotePool
    slots: npt.NDArray[np.int32]
    guard: LeaseGuard


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """Another engine's pool, and the guard of the lease that lets us write into it (as in ``RemotePut``)."""

    pool: RemotePool
    guard: LeaseGuard


@dataclass(frozen=True, slots=True)
class RunnerChunk:
    """token_ids[i] stands at absolute position start + i; its K/V goes to the sequence's page (start + i) // page_size.

    pages: the sequence's page ids in order; covers at least start + len(token_ids) positions. K/V of the positions
    below start is already there. logits: so many of its last tokens have a row of logits.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    logits: int
    put: RemotePut | None = None


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """When each layer's put and compute happened, in CLOCK_MONOTONIC nanoseconds (time.monotonic_ns).

    int64 [layers] each. The K/V put of a layer runs right after its K/V is computed and before its attention.
    """

    put_begin: npt.NDArray[np.int64]
    put_end: npt.NDArray[np.int64]
    layer_end: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """logits: float32 [sum of the chunks' ``logits``, vocab], in order of chunks and positions.

    layer_times: present when a chunk had a put.
    """

    logits: npt.NDArray[np.float32]
    layer_times: LayerTimes | None


class ModelRunner(Protocol):
    """Computes steps over a paged KV pool that it does not own the bookkeeping of.

    ``run`` is used from one thread; ``copy_slots`` from any, also while ``run`` runs.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int:
        """The model's own context limit in tokens."""

    @property
    def page_size(self) -> int: ...

    @property
    def total_pages(self) -> int: ...

    @property
    def kv_bytes_per_token(self) -> int:
        """layers * 2 * kv_heads * head_dim * itemsize."""

    def run(self, chunks: Sequence[RunnerChunk]) -> StepOutput:
        """Compute one step. All puts of one call go to the same pool object, each under its own guard.

        Row values depend only on the sequence's own tokens and absolute positions (batch invariance).
        """

    def copy_slots(
        self,
        source: npt.NDArray[np.int32],
        target: npt.NDArray[np.int32],
        remote: RemoteTarget | None = None,
    ) -> LayerTimes | None:
        """Copy the K/V of slots source[i] of our pool, all layers, to slots target[i] of our pool or of a remote one.

        source, target: int32 [n]. Bit-exact, whatever lies where in a page. Nobody may write the sources meanwhile nor
        read or write the targets; local sources and targets are disjoint. remote: the guard is checked before every
        layer, and from the first layer on that it does not hold for nothing is written; then the times of each layer
        are returned, ``layer_end`` being ``put_end``. Raises InternalError for a slot outside its pool.
        """
