"""8-bit activations: rows quantised, products against float64 numpy of exactly this scheme, the same bits on every path and ISA."""

from __future__ import annotations

import itertools
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx

from microserving.engine.kernels.elementwise import add_rms_norm_kernel, silu_mul_kernel
from microserving.engine.kernels.isa import Isa, detect_isa, make_isa
from microserving.engine.kernels.matmul_int8 import column_order, matmul_int8_kernel
from microserving.engine.kernels.quantise import (
    add_norm_quantise_kernel,
    quantise_kernel,
    silu_mul_quantise_kernel,
)
from microserving.engine.kernels.tiles import MatmulShape, TileKind
from microserving.engine.model_runner import TVMModelRunner
from microserving.engine.runner import RunnerChunk
from microserving.engine.weights import pack_matrix, tile_kind
from microserving.model_files import Weight, WeightKind
from microserving.protocol.kv_layout import KVLayout
from tests.engine.random_weights import (
    QUANTISED,
    RandomWeights,
    layout_of,
    pool_memory,
    random_weight,
    small_config,
)
from tests.reference.llama_numpy import Array, ReferenceLlama

# kind, rows (no multiple of 16), columns (544: more groups than are unpacked at once)
CASES: list[tuple[WeightKind, int, int]] = [("q4_1", 72, 544), ("q4_0", 16, 32), ("q8_0", 100, 64)]
MAX_ROWS = 210
EPS = 1e-5
VNNI = make_isa("avx512", frozenset({"avx512_vnni"}))


def build(kernel: tirx.PrimFunc, isa: Isa | None = None) -> Any:
    target = tvm.target.Target((isa or detect_isa()).target)
    with target:
        return tvm.compile(tvm.IRModule({"f": kernel.with_attr("global_symbol", "f")}), target)


def tensor(values: np.ndarray) -> Any:
    return tvm.runtime.tensor(np.ascontiguousarray(values))


@lru_cache
def compiled(case: tuple[WeightKind, int, int], isa: Isa) -> tuple[Weight, Any, Any]:
    weight = random_weight("w", case[0], case[1:], np.random.default_rng(case[1]), size=1.0)
    kernel = matmul_int8_kernel(MatmulShape(tile_kind([weight]), *case[1:]), isa)
    return weight, build(kernel, isa)["f"], tensor(pack_matrix([weight]))


@lru_cache
def quantiser(columns: int, kind: TileKind) -> Any:
    return build(quantise_kernel(columns, kind))["f"]


def outputs(count: int, columns: int) -> tuple[Any, Any]:
    groups = columns // 32
    return tensor(np.full((count, groups, 8), -1, np.int32)), tensor(
        np.full((count, groups, 2), np.nan, np.float32)
    )


def quantised(x: np.ndarray, kind: TileKind) -> tuple[Any, Any]:
    rows = outputs(*x.shape)
    quantiser(x.shape[1], kind)(tensor(x), *rows)
    return rows


def codes_of(codes: Any, kind: TileKind) -> np.ndarray:
    """int8 [n, columns] in the order of the columns."""
    packed = codes.numpy().view(np.int8).reshape(len(codes.numpy()), -1, 32)
    plain = np.empty_like(packed)
    plain[..., column_order(kind)] = packed
    return plain.reshape(len(packed), -1)


def multiply(case: tuple[WeightKind, int, int], x: np.ndarray, isa: Isa | None = None) -> np.ndarray:
    weight, kernel, tiles = compiled(case, isa or detect_isa())
    y = tensor(np.full((len(x), case[1]), np.nan, np.float32))
    kernel(*quantised(x, tile_kind([weight])), tiles, y)
    return np.array(y.numpy())


def rows_of(case: tuple[WeightKind, int, int]) -> np.ndarray:
    return np.random.default_rng(case[2]).standard_normal((MAX_ROWS, case[2])).astype(np.float32)


@lru_cache
def alone(case: tuple[WeightKind, int, int]) -> np.ndarray:
    return np.concatenate([multiply(case, row[None]) for row in rows_of(case)])


def scheme(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition in float64: codes [n, groups, 32] and scales [n, groups]."""
    groups = x.astype(np.float64).reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2)
    inverse = np.where(largest >= 2.0**-100, (127 / np.maximum(largest, 2.0**-100)).astype(np.float32), 0)
    return np.rint(groups * inverse[..., None]), largest * np.float32(1 / 127)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_is_the_scheme_in_float64(case: tuple[WeightKind, int, int]) -> None:
    parts, x = compiled(case, detect_isa())[0].affine(), rows_of(case)
    codes, scales = scheme(x)
    weight_codes = parts.codes.reshape(case[1], -1, 32).astype(np.float64)
    sums = np.einsum("mgk,ngk->mng", codes, weight_codes)
    products = sums * scales[:, None] * parts.scale
    biases = (scales * codes.sum(axis=2))[:, None] * parts.bias
    bound = (np.abs(products) + np.abs(biases)).sum(axis=2) * (case[2] // 32 + 8) * 2.0**-24
    assert (np.abs(alone(case) - (products + biases).sum(axis=2)) <= bound).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_product_is_the_exact_one_within_half_a_step(case: tuple[WeightKind, int, int]) -> None:
    weight, x = compiled(case, detect_isa())[0].dequantize().astype(np.float64), rows_of(case)
    steps = np.abs(x).reshape(len(x), -1, 32).max(axis=2) / 127
    bound = np.repeat(steps * 0.5, 32, axis=1) @ np.abs(weight).T
    assert (np.abs(alone(case) - x.astype(np.float64) @ weight.T) <= bound * 1.01).all()


@settings(max_examples=30)
@given(case=st.sampled_from(CASES), first=st.integers(0, MAX_ROWS), count=st.integers(0, MAX_ROWS))
def test_a_row_does_not_depend_on_its_batch(
    case: tuple[WeightKind, int, int], first: int, count: int
) -> None:
    batch = slice(first, min(MAX_ROWS, first + count))
    assert np.array_equal(multiply(case, rows_of(case)[batch]), alone(case)[batch])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_vector_code_gives_the_same_bits(case: tuple[WeightKind, int, int]) -> None:
    for x, expected in ((rows_of(case)[:31], alone(case)[:31]), (rows_of(case)[:1], alone(case)[:1])):
        assert np.array_equal(multiply(case, x, make_isa("generic")), expected)


@pytest.mark.parametrize("kind", ["q4", "q8"])
@pytest.mark.parametrize(
    ("isa", "instruction"), [(VNNI, "vpdpbusd"), (make_isa("avx512"), "vpmaddubsw")], ids=str
)
def test_the_avx512_code_compiles_anywhere(kind: TileKind, isa: Isa, instruction: str) -> None:
    code = build(matmul_int8_kernel(MatmulShape(kind, 48, 64), isa), isa).mod.inspect_source("asm")
    lines = [line for line in code.splitlines() if instruction in line]
    assert any("zmm" in line for line in lines)


@pytest.mark.parametrize(("kind", "stored", "code"), [("q4", 255, 15), ("q8", 127, 255), ("q8", 128, 0)])
def test_the_largest_sums_do_not_saturate(kind: TileKind, stored: int, code: int) -> None:
    """Every code at its end, of either sign, in every pattern of 32-bit lanes. stored: each byte of codes in the file."""
    rows, columns = 16, 64
    blocks = {"q4": ("q4_1", 20), "q8": ("q8_0", 34)}[kind]
    data = np.zeros((rows, columns // 32, blocks[1]), np.uint8)
    data[..., :2] = np.array([1.0], "<f2").view(np.uint8)
    data[..., blocks[1] - (16 if kind == "q4" else 32) :] = stored
    weight = Weight("w", blocks[0], (rows, columns), data.reshape(rows, -1))  # type: ignore[arg-type]
    assert (weight.affine().codes == code).all()
    kernel = build(matmul_int8_kernel(MatmulShape(kind, rows, columns), detect_isa()))["f"]
    signs = np.array([[1] * 64, [-1] * 64, [1, -1] * 32, [1, 1, -1, -1] * 16], np.float32)
    x = np.concatenate([signs, signs, signs]) * np.float32(127)
    for count in (1, len(x)):
        y = tensor(np.full((count, rows), np.nan, np.float32))
        kernel(*quantised(x[:count], kind), tensor(pack_matrix([weight])), y)
        expected = x[:count].astype(np.float64) @ weight.dequantize().T.astype(np.float64)
        np.testing.assert_allclose(y.numpy(), expected, rtol=1e-6, atol=0.5)


def test_vnni_sums_are_those_of_the_halves() -> None:
    """What the three integer paths compute, in numpy: u8 x s8 in fours, and 4-bit halves with an int16 sum of a group."""
    rng = np.random.default_rng(0)
    codes = rng.choice(np.array([0, 1, 15, 16, 240, 255]), (1000, 32))
    x = rng.choice(np.array([-127, -1, 0, 1, 127]), (1000, 32))
    fours = (codes * x).reshape(1000, 8, 4).sum(axis=2)
    halves = []
    for nibble in (codes & 15, codes >> 4):
        pairs = (nibble * x).reshape(1000, 8, 2, 2).sum(axis=3)  # pmaddubsw
        assert np.abs(np.cumsum(pairs, axis=1)).max() < 2**15  # eight additions in int16
        halves.append(pairs.sum(axis=(1, 2)))
    assert np.array_equal(fours.sum(axis=1), halves[0] + 16 * halves[1])


@pytest.mark.parametrize("kind", ["q4", "q8"])
def test_codes_and_scales(kind: TileKind) -> None:
    x = np.random.default_rng(4).standard_normal((40, 96)).astype(np.float32)
    x[0] = 0.0  # a row of zeros
    x[1, 5] = 3e38  # an outlier hides its group, and only that one
    x[2] *= 1e-36  # near the smallest normal number
    x[3] *= 1e-44  # denormal
    x[4] = np.arange(96) % 2 - 0.5  # halves: all codes +-127
    x[5, :32] = np.float32(127) - np.arange(32, dtype=np.float32) / 2  # exact ties go to even
    codes, scales = quantised(x, kind)
    expected, steps = scheme(x)
    assert np.array_equal(codes_of(codes, kind).reshape(expected.shape), expected)
    found = scales.numpy()
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found[..., 0], steps, rtol=1e-6, atol=1e-44)
    np.testing.assert_allclose(found[..., 1], steps * expected.sum(axis=2), rtol=1e-6, atol=1e-40)
    for row in (0, 1, 5, 39):
        one = quantised(x[row : row + 1], kind)
        assert np.array_equal(one[0].numpy()[0], codes.numpy()[row])
        assert np.array_equal(one[1].numpy()[0], found[row])


@settings(max_examples=50)
@given(
    x=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=64, max_size=64),
    kind=st.sampled_from(["q4", "q8"]),
)
def test_finite_numbers_stay_finite(x: list[float], kind: TileKind) -> None:
    row = np.array([x], np.float32)
    codes, scales = quantised(row, kind)
    plain = codes_of(codes, kind).astype(np.float64).reshape(1, 2, 32)
    assert (np.abs(plain) <= 127).all()
    assert np.isfinite(scales.numpy()[..., 0]).all()
    steps = np.abs(row.astype(np.float64)).reshape(1, 2, 32).max(axis=2, keepdims=True) / 127
    error = np.abs(plain * scales.numpy()[..., :1] - row.reshape(1, 2, 32))
    assert (error <= steps * 0.50001 + 2.0**-100).all()


@pytest.mark.parametrize("count", [1, 40])
def test_fused_kernels_give_the_bits_of_the_two_kernels(count: int) -> None:
    rng, kind, size = np.random.default_rng(count), "q4", 96
    x, delta = (rng.standard_normal((count, size)).astype(np.float32) for _ in range(2))
    norm = rng.standard_normal(size).astype(np.float32)
    fused, split, normed = tensor(x), tensor(x), tensor(np.zeros((count, size), np.float32))
    rows = outputs(count, size)
    build(add_norm_quantise_kernel(size, EPS, kind))["f"](fused, tensor(delta), tensor(norm), *rows)
    build(add_rms_norm_kernel(size, EPS))["f"](split, tensor(delta), tensor(norm), normed)
    assert np.array_equal(fused.numpy(), split.numpy())
    for ours, theirs in zip(rows, quantised(normed.numpy(), kind), strict=True):
        assert np.array_equal(ours.numpy(), theirs.numpy())

    gate_up, gated = np.concatenate([x, delta], axis=1), tensor(np.zeros((count, size), np.float32))
    rows = outputs(count, size)
    build(silu_mul_quantise_kernel(size, kind))["f"](tensor(gate_up), *rows)
    build(silu_mul_kernel(size))["f"](tensor(gate_up), gated)
    for ours, theirs in zip(rows, quantised(gated.numpy(), kind), strict=True):
        assert np.array_equal(ours.numpy(), theirs.numpy())


def test_only_whole_groups_of_quantised_kinds() -> None:
    for shape in (MatmulShape("q4", 16, 40), MatmulShape("f16", 16, 64)):
        with pytest.raises(ValueError, match="no int8 product"):
            matmul_int8_kernel(shape, detect_isa())
    with pytest.raises(ValueError, match="multiple of 32"):
        quantise_kernel(40, "q4")


# ---- the whole model -------------------------------------------------------------------------------------------------

PAGES = 64
WEIGHTS = RandomWeights(small_config(tied=True), QUANTISED)
TOKENS = np.random.default_rng(7).integers(0, 100, 300).tolist()


class QuantisedReference(ReferenceLlama):
    """Every product takes rows that were rounded to codes and back."""

    def _linear(self, x: Array, name: str) -> Array:
        return super()._linear(self._rounded(x), name)

    def _norm(self, x: Array, name: str) -> Array:
        normed = super()._norm(x, name)
        return self._rounded(normed) if name == "model.norm" else normed

    def _rounded(self, x: Array) -> Array:
        codes, scales = scheme(x)
        return (codes * scales[..., None]).reshape(x.shape)


def layout() -> KVLayout:
    plain = layout_of(WEIGHTS.config, "float32")
    return KVLayout(
        plain.layers, plain.kv_heads, plain.head_dim, plain.page_size, plain.dtype, activations="int8"
    )


def make(cache_dir: Path, threads: int = 2) -> TVMModelRunner:
    return TVMModelRunner.create(
        WEIGHTS,
        layout=layout(),
        total_pages=PAGES,
        pool_memory=pool_memory(layout(), PAGES),
        threads=threads,
        cache_dir=cache_dir,
    )


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def runner(cache_dir: Path) -> TVMModelRunner:
    return make(cache_dir)


def prefill(runner: TVMModelRunner, length: int, cuts: tuple[int, ...] = (), seed: int = 0) -> np.ndarray:
    pages = np.random.default_rng(seed).permutation(PAGES)[:32].tolist()
    for begin, end in itertools.pairwise([0, *cuts, length]):
        out = runner.run([RunnerChunk(TOKENS[begin:end], begin, pages, True)])
    return np.array(out.logits[0])


def test_the_model_against_numpy_with_the_same_rounding(runner: TVMModelRunner) -> None:
    """A code that lies at a tie falls to either side: hence the wide bound of single logits, and the narrow mean."""
    same = QuantisedReference(WEIGHTS, dtype=np.float64).logits(TOKENS[:130])
    exact = ReferenceLlama(WEIGHTS, dtype=np.float64).logits(TOKENS[:130])
    for length in (1, 17, 65, 130):
        found = prefill(runner, length)
        error, rounding = np.abs(found - same[length - 1]), np.abs(exact - same)[length - 1]
        assert error.mean() < 0.2 * rounding.mean(), length
        assert error.max() < rounding.max(), length


@pytest.mark.parametrize("cuts", [(1,), (129,), (16, 32, 33), tuple(range(110, 130))], ids=str)
def test_chunking_changes_no_bit(runner: TVMModelRunner, cuts: tuple[int, ...]) -> None:
    assert np.array_equal(prefill(runner, 130, cuts, seed=1), prefill(runner, 130))


def test_batch_mates_change_no_bit(runner: TVMModelRunner) -> None:
    expected = {length: prefill(runner, length) for length in (5, 40, 65)}
    owned = {5: [0], 40: [1, 2, 3], 65: [4, 5, 6, 7, 8]}
    runner.run([RunnerChunk(TOKENS[: n - 1], 0, owned[n], False) for n in (5, 65)])
    last = [(5, 4), (40, 0), (65, 64)]
    logits = runner.run([RunnerChunk(TOKENS[at:n], at, owned[n], True) for n, at in last]).logits
    for row, (length, _) in zip(logits, last, strict=True):
        assert np.array_equal(row, expected[length]), length


def test_threads_change_no_bit(runner: TVMModelRunner, cache_dir: Path) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(prefill(make(cache_dir, 1), 300, (250,), seed=2)))
    thread.start()
    thread.join()
    assert np.array_equal(found[0], prefill(runner, 300))


def test_another_instruction_set_changes_no_bit(
    runner: TVMModelRunner, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MICROSERVING_ISA", "generic")
    generic = make(cache_dir)
    for length, cuts in ((1, ()), (17, (1,)), (130, (60,))):
        assert np.array_equal(prefill(generic, length, cuts), prefill(runner, length))


def test_pages_of_another_precision_are_of_another_layout() -> None:
    plain = layout_of(WEIGHTS.config, "float32")
    assert plain.hash != layout().hash
    assert plain.bytes_per_page == layout().bytes_per_page
