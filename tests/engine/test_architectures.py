"""What an architecture adds to Llama, against the numpy forward, cut into steps in different ways.

Llama itself: ``test_model_runner``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from microserving.engine.model_runner import TVMModelRunner
from microserving.engine.runner import RunnerChunk
from microserving.model_files import ModelConfig
from microserving.protocol.kv_layout import Activations
from tests.engine.random_weights import DENSE, QUANTISED, RandomWeights, layout_of, pool_memory, small_config
from tests.reference.llama_numpy import ReferenceLlama

PAGES = 8
TOKENS = np.random.default_rng(3).integers(0, 100, 70).tolist()


def config_of(architecture: str, tied: bool) -> ModelConfig:
    """Heads that are together wider than the hidden size, as Qwen3 has them."""
    return replace(small_config(tied=tied, architecture=architecture), head_dim=32)


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize(
    ("architecture", "tied", "activations", "error"),
    [
        ("qwen2", True, "float32", 2e-5),
        ("qwen2", False, "float32", 2e-5),
        ("qwen3", True, "float32", 2e-5),
        ("qwen3", True, "int8", 0.1),  # of logits up to 3
    ],
    ids=str,
)
def test_matches_the_reference_and_is_batch_invariant(
    architecture: str, tied: bool, activations: Activations, error: float, cache_dir: Path
) -> None:
    weights = RandomWeights(config_of(architecture, tied), QUANTISED if tied else DENSE)
    layout = replace(layout_of(weights.config, "float32"), activations=activations)
    runner = TVMModelRunner.create(
        weights,
        layout=layout,
        total_pages=PAGES,
        pool_memory=pool_memory(layout, PAGES),
        threads=2,
        cache_dir=cache_dir,
    )
    expected = ReferenceLlama(weights, dtype=np.float64).logits(TOKENS)
    found = []
    for cuts in ((), (40,), (1, 17, *range(60, 70))):
        for begin, end in itertools.pairwise((0, *cuts, len(TOKENS))):
            out = runner.run([RunnerChunk(TOKENS[begin:end], begin, list(range(PAGES)), True)])
            np.testing.assert_allclose(out.logits[0], expected[end - 1], atol=error)
        found.append(out.logits[0])
    assert all(np.array_equal(found[0], logits) for logits in found[1:])


@pytest.mark.parametrize(("architecture", "name"), [("qwen2", "q_proj.bias"), ("qwen3", "k_norm.weight")])
def test_the_reference_uses_what_the_architecture_adds(architecture: str, name: str) -> None:
    """Otherwise the test above could not tell an engine that leaves it out."""
    weights = RandomWeights(config_of(architecture, True))
    reference = ReferenceLlama(weights, dtype=np.float64)
    before = reference.logits(TOKENS[:5])
    reference._weights[f"model.layers.1.self_attn.{name}"] *= 2
    assert np.abs(reference.logits(TOKENS[:5]) - before).max() > 1e-3
