"""AVX-512 kernels on any machine: their layouts, register blocks and tails give the bits of this machine's own kernels.

They are generated for AVX-512 and compiled for the machine at hand; only the integer products, for which it may have no
instruction, are replaced by plain code of the same meaning. That the real object holds the instruction: ``test_int8``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import tirx

from microserving.engine import model_runner
from microserving.engine.kernels import matmul_int8
from microserving.engine.kernels.common import I32_LANES, LANES
from microserving.engine.kernels.isa import Isa, detect_isa, make_isa
from microserving.engine.kernels.matmul_int8 import Dot, Plain, Vnni, matmul_int8_kernel
from microserving.engine.kernels.plan import AttentionShape
from microserving.engine.kernels.quantise import quantise_kernel
from microserving.engine.kernels.tiles import MatmulShape
from microserving.engine.runner import RunnerChunk
from microserving.engine.weights import pack_matrix, tile_kind
from microserving.model_files import WeightKind
from microserving.protocol.kv_layout import Activations, KVLayout
from tests.engine.kernels.test_attention import Rig, random_data
from tests.engine.random_weights import (
    DENSE,
    QUANTISED,
    RandomWeights,
    layout_of,
    pool_memory,
    random_weight,
    small_config,
)

NATIVE = detect_isa()
BLOCKED: Isa = replace(make_isa("avx512"), mcpu=NATIVE.mcpu, features=NATIVE.features)
"""AVX-512's register blocks in code that this machine runs."""
PAGES = 16


class PlainVnni(Vnni):
    """vpdpbusd: each int32 lane gains the products of its 4 unsigned and 4 signed bytes."""

    def step(self, acc: Any, codes: Any, quad: Any) -> Any:
        def by(bits: int) -> Any:
            return tirx.Broadcast(tirx.IntImm("int32", bits), LANES)

        words, x = tirx.reinterpret(I32_LANES, codes), tirx.Broadcast(quad, LANES)
        for byte in range(4):
            code = tirx.bitwise_and(tirx.shift_right(words, by(8 * byte)), by(255))
            acc = acc + code * tirx.shift_right(tirx.shift_left(x, by(24 - 8 * byte)), by(24))
        return acc


class PlainMadd(Plain):
    """vpmaddubsw and vpmaddwd of 512 bits, whose int16 sums stay in bounds (``test_int8`` shows it)."""

    rows = (12, 8, 4, 2, 1)


DOTS: list[Callable[[], Dot]] = [PlainVnni, PlainMadd]


@pytest.fixture(params=DOTS, ids=["vnni", "madd"])
def dot(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dot]:
    """The products of every int8 kernel that is made while the test runs, this machine's own ones apart."""
    made: Dot = request.param()
    own = matmul_int8.dot_of
    monkeypatch.setattr(matmul_int8, "dot_of", lambda isa, kind: made if isa == BLOCKED else own(isa, kind))
    matmul_int8_kernel.cache_clear()
    yield made
    matmul_int8_kernel.cache_clear()


def compiled(kernel: tirx.PrimFunc) -> Any:
    target = tvm.target.Target(NATIVE.target)
    with target:
        return tvm.compile(tvm.IRModule({"f": kernel.with_attr("global_symbol", "f")}), target)["f"]


@pytest.mark.parametrize(("kind", "rows", "columns"), [("q4_1", 72, 544), ("q8_0", 100, 64)], ids=str)
def test_int8_products(dot: Dot, kind: WeightKind, rows: int, columns: int) -> None:
    """Row counts around every register block: 12, 8, 4, 2 and 1, and across the 96 rows of a pass."""
    rng = np.random.default_rng(rows)
    weight = random_weight("w", kind, (rows, columns), rng, size=1.0)
    shape, tiles = MatmulShape(tile_kind([weight]), rows, columns), tvm.runtime.tensor(pack_matrix([weight]))
    quantise = compiled(quantise_kernel(columns, shape.kind))
    ours, native = compiled(matmul_int8_kernel(shape, BLOCKED)), compiled(matmul_int8_kernel(shape, NATIVE))
    x = rng.standard_normal((121, columns)).astype(np.float32)
    x[3] = 0
    for count in (1, 2, 3, 11, 12, 13, 23, 121):
        codes = tvm.runtime.empty((count, columns // 32, 8), "int32")
        scales = tvm.runtime.empty((count, columns // 32, 2), "float32")
        quantise(tvm.runtime.tensor(x[:count]), codes, scales)
        found = [tvm.runtime.tensor(np.full((count, rows), np.nan, np.float32)) for _ in range(2)]
        ours(codes, scales, tiles, found[0])
        native(codes, scales, tiles, found[1])
        assert np.array_equal(found[0].numpy(), found[1].numpy()), count


@pytest.mark.parametrize(
    "shape", [AttentionShape(9, 3, 64, 16, "float32"), AttentionShape(7, 1, 80, 32, "float32")]
)
def test_attention(shape: AttentionShape) -> None:
    data = random_data(shape, 530)
    expected, rig = Rig(shape, isa=NATIVE).whole(data), Rig(shape, isa=BLOCKED)
    sequence = rig.sequence(data)
    assert np.array_equal(rig.step([(sequence, 300)])[0], expected[:300])
    assert np.array_equal(rig.step([(sequence, 229)])[0], expected[300:529])
    assert np.array_equal(rig.step([(sequence, 1)])[0], expected[529:])


def logits(weights: RandomWeights, activations: Activations, cache_dir: Path) -> np.ndarray:
    """Of a prefill in two chunks with a mate, then of a decode of both."""
    plain = layout_of(weights.config, "float32")
    layout = KVLayout(
        plain.layers, plain.kv_heads, plain.head_dim, plain.page_size, plain.dtype, activations=activations
    )
    runner = model_runner.TVMModelRunner.create(
        weights,
        layout=layout,
        total_pages=PAGES,
        pool_memory=pool_memory(layout, PAGES),
        threads=2,
        cache_dir=cache_dir,
    )
    tokens, pages = np.random.default_rng(3).integers(0, 100, 130).tolist(), list(range(PAGES))
    first = RunnerChunk(tokens[:97], 0, pages[:10], False)
    rest = [RunnerChunk(tokens[97:129], 97, pages[:10], True), RunnerChunk(tokens[:30], 0, pages[10:], True)]
    decodes = [
        RunnerChunk(tokens[129:], 129, pages[:10], True),
        RunnerChunk(tokens[30:31], 30, pages[10:], True),
    ]
    runner.run([first])
    return np.concatenate([np.array(runner.run(step).logits) for step in (rest, decodes)])


@pytest.mark.parametrize("dot", [PlainVnni], indirect=True, ids=["vnni"])
def test_a_model_of_8_bit_activations(dot: Dot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = RandomWeights(small_config(tied=True, layers=1), QUANTISED)
    expected = logits(weights, "int8", tmp_path / "own")
    monkeypatch.setattr(model_runner, "detect_isa", lambda: BLOCKED)
    assert np.array_equal(logits(weights, "int8", tmp_path / "blocked"), expected)


def test_a_model_of_float_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = RandomWeights(small_config(tied=False, layers=1, architecture="qwen3"), (*DENSE, *QUANTISED))
    expected = logits(weights, "float32", tmp_path)
    monkeypatch.setattr(model_runner, "detect_isa", lambda: BLOCKED)
    assert np.array_equal(logits(weights, "float32", tmp_path), expected)
