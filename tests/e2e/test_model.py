"""The default model's logits, computed by the engine, against an independent numpy forward pass."""

from __future__ import annotations

import numpy as np
import pytest

from microserving.engine.model_runner import TVMModelRunner
from microserving.engine.runner import RunnerChunk
from microserving.model_files import DEFAULT_MODEL, open_model
from microserving.tokenizer import Tokenizer
from tests.engine.random_weights import layout_of, pool_memory
from tests.reference.llama_numpy import ReferenceLlama

PAGES = 16
PROMPTS = [
    "Hello",
    "The quick brown fox jumps over the lazy dog, and then",
    "def add(a, b):\n    return a + b\n\nprint(add(2,",
    "人工智能正在改变世界 🍕 naïve façade",
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOLERANCE = 0.02
"""Of logits that span tens: fp32 sums in another order, and K/V rounded to fp16 a little differently for it."""


@pytest.mark.timeout(300)
def test_logits_equal_a_numpy_forward() -> None:
    model = open_model(DEFAULT_MODEL)
    tokenizer = Tokenizer.load(model)
    layout = layout_of(model.config, "float16")
    runner = TVMModelRunner.create(
        model.weights, layout=layout, total_pages=PAGES, pool_memory=pool_memory(layout, PAGES), threads=2
    )
    reference = ReferenceLlama(model.weights, kv_dtype=np.float16)
    for ids in [*map(tokenizer.encode, PROMPTS), tokenizer.encode_chat(QUESTION)]:
        expected = reference.logits(ids)
        middle = max(1, len(ids) // 2)
        for start, end in ((0, middle), (middle, len(ids))):
            if start == end:
                continue
            chunk = RunnerChunk(ids[start:end], start, list(range(PAGES)), logits=1)
            row = runner.run([chunk]).logits[0]
            np.testing.assert_allclose(row, expected[end - 1], atol=TOLERANCE)
            assert row.argmax() == expected[end - 1].argmax()
