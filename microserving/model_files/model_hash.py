"""A fingerprint of a model's numbers: two engines with the same one may exchange KV.

Hashes the config (not its name), the tensor table and the contents. Models up to ``FULL_BYTES`` are hashed whole; of
larger ones a fixed set of blocks of every tensor, so that the time is bounded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence

from microserving.model_files.model_config import ModelConfig
from microserving.model_files.weights import Weight

FULL_BYTES = 256 * 2**20
SAMPLE_BYTES = 16 * 2**10
SAMPLES_PER_TENSOR = 8


def model_hash(config: ModelConfig, weights: Sequence[Weight], *, full_bytes: int = FULL_BYTES) -> str:
    """Lower-case hex SHA-256 over config, names, kinds, shapes and contents, in the order of the names.

    full_bytes: up to this total size every byte counts. Depends on nothing but the arguments.
    """
    ordered = sorted(weights, key=lambda weight: weight.name)
    whole = sum(weight.rows.size for weight in ordered) <= full_bytes
    identity = {key: value for key, value in dataclasses.asdict(config).items() if key != "name"}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    for weight in ordered:
        digest.update(json.dumps([weight.name, weight.kind, list(weight.shape)]).encode())
        _update(digest, weight, whole)
    return digest.hexdigest()


def _update(digest: hashlib._Hash, weight: Weight, whole: bool) -> None:
    flat = weight.rows.reshape(-1)
    if whole or flat.size <= SAMPLE_BYTES * SAMPLES_PER_TENSOR:
        digest.update(flat.data)
        return
    last = flat.size - SAMPLE_BYTES
    for i in range(SAMPLES_PER_TENSOR):
        begin = last * i // (SAMPLES_PER_TENSOR - 1)
        digest.update(flat[begin : begin + SAMPLE_BYTES].data)
