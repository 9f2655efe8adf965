"""The GGUF container: what is read, and that nothing damaged or crafted is."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microserving.errors import ModelLoadError
from microserving.model_files import GGUFFile, GGUFWeights
from tests.reference.model_builder import RawGGUF, RawTensor, gguf_string, gguf_value, tiny_gguf


def refuse(raw: bytes, directory: Path) -> str:
    """The message with which the bytes are refused, without the path."""
    path = directory / "model.gguf"
    path.write_bytes(raw)
    with pytest.raises(ModelLoadError) as caught:
        GGUFFile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path}: ")


def one_pair(kind: str, value: Any, key: str = "k") -> GGUFFileBytes:
    return RawGGUF({key: (kind, value)}).to_bytes()


GGUFFileBytes = bytes


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type_is_read(version: int, tmp_path: Path) -> None:
    file = RawGGUF(
        {
            "a.string": ("STRING", "héllo"),
            "a.int": ("INT8", 5),
            "a.big": ("UINT64", 2**40),
            "a.float": ("FLOAT64", 0.5),
            "a.bool": ("BOOL", True),
            "a.strings": ("ARRAY[STRING]", ["x", "", "日本"]),
            "a.ints": ("ARRAY[INT32]", [1, -2]),
            "a.floats": ("ARRAY[FLOAT32]", [0.25]),
        },
        {"t": RawTensor("f32", (2, 3), np.arange(6, dtype="<f4").tobytes())},
        version=version,
    ).write(tmp_path / "a.gguf")
    read = GGUFFile(file)
    meta = read.metadata
    assert (meta.string("a.string"), meta.uint("a.int"), meta.uint("a.big")) == ("héllo", 5, 2**40)
    assert (meta.float("a.float"), meta.boolean("a.bool")) == (0.5, True)
    assert meta.strings("a.strings") == ["x", "", "日本"]
    assert (meta.int32s("a.ints").tolist(), meta.floats("a.floats").tolist()) == ([1, -2], [0.25])
    tensor = read.tensors["t"]
    assert (tensor.kind, tensor.shape) == ("f32", (2, 3))
    assert read.tensor_bytes(tensor).view("<f4").tolist() == [0, 1, 2, 3, 4, 5]


def test_a_missing_key_a_wrong_type_and_a_default(tmp_path: Path) -> None:
    meta = GGUFFile(RawGGUF({"k": ("INT32", -1)}).write(tmp_path / "a.gguf")).metadata
    assert meta.uint("absent", 7) == 7
    with pytest.raises(ModelLoadError, match="'absent' is missing"):
        meta.uint("absent")
    with pytest.raises(ModelLoadError, match="'k' has type INT32, not STRING"):
        meta.string("k")
    with pytest.raises(ModelLoadError, match="must not be negative"):
        meta.uint("k")


@pytest.mark.case("LD-01")
@pytest.mark.parametrize(
    ("key", "kind", "value"),
    [
        ("tokenizer.ggml.scores", "ARRAY[UINT8]", [1, 2]),
        ("tokenizer.ggml.token_type", "ARRAY[STRING]", ["a"]),
        ("tokenizer.ggml.tokens", "ARRAY[INT32]", [1]),
    ],
)
def test_an_array_of_another_element_type_is_named(
    key: str, kind: str, value: list[Any], tmp_path: Path
) -> None:
    meta = GGUFFile(RawGGUF({key: (kind, value)}).write(tmp_path / "a.gguf")).metadata
    read = {"scores": meta.floats, "token_type": meta.int32s, "tokens": meta.strings}[key.rsplit(".", 1)[1]]
    with pytest.raises(ModelLoadError) as caught:
        read(key)
    assert key in str(caught.value)
    assert kind in str(caught.value)


@pytest.mark.case("LD-01")
def test_nested_arrays_are_refused(tmp_path: Path) -> None:
    nested = gguf_string("nest") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 0, 1) + b"\1"
    message = refuse(RawGGUF(extra_pairs=nested, extra_pair_count=1).to_bytes(), tmp_path)
    assert "'nest'" in message
    assert "ARRAY[ARRAY]" in message


def with_counts(tensors: int, pairs: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, pairs) + rest


@pytest.mark.case("LD-03")
@pytest.mark.parametrize("count", [2**32, 2**63, 2**64 - 1, "remaining+1"])
@pytest.mark.parametrize("place", ["tensors", "pairs", "key", "string", "strings", "numbers"])
def test_a_damaged_count_costs_nothing(place: str, count: int | str, tmp_path: Path) -> None:
    number = 9 if isinstance(count, str) else count
    rest = b"\0" * 8
    raw = {
        "tensors": with_counts(number, 0, rest),
        "pairs": with_counts(0, number, rest),
        "key": with_counts(0, 1, struct.pack("<Q", number) + rest),
        "string": with_counts(0, 1, gguf_string("k") + struct.pack("<IQ", 8, number) + rest),
        "strings": with_counts(0, 1, gguf_string("k") + struct.pack("<IIQ", 9, 8, number) + rest),
        "numbers": with_counts(0, 1, gguf_string("k") + struct.pack("<IIQ", 9, 0, number) + rest),
    }[place]
    tracemalloc.start()
    started = time.process_time()
    refuse(raw, tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.process_time() - started < 1
    assert peak < 100 * 2**20


def keyed(key: str | bytes) -> bytes:
    return RawGGUF({key: ("UINT32", 1)}).to_bytes()


@pytest.mark.case("LD-05")
@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (keyed(""), "a metadata key is empty"),
        (keyed("k" * 65536), "65536 bytes long"),
        (keyed("a\0b"), "NUL"),
        (keyed(b"\xff\xfe"), "not valid UTF-8"),
        (RawGGUF({"k": ("STRING", b"\xc3(")}).to_bytes(), "not valid UTF-8"),
        (
            RawGGUF(
                {"k": ("UINT8", 1)}, extra_pairs=gguf_string("k") + gguf_value("UINT8", 1), extra_pair_count=1
            ).to_bytes(),
            "'k' occurs twice",
        ),
        (
            RawGGUF(
                extra_pairs=gguf_string("k") + struct.pack("<I", 255) + b"\0" * 8, extra_pair_count=1
            ).to_bytes(),
            "255",
        ),
        (
            RawGGUF(
                extra_pairs=gguf_string("k") + struct.pack("<I", 7) + b"\2", extra_pair_count=1
            ).to_bytes(),
            "BOOL",
        ),
        (b"GGML" + RawGGUF().to_bytes()[4:], "not a GGUF file"),
        (RawGGUF(version=0).to_bytes(), "version 0"),
        (RawGGUF(version=1).to_bytes(), "version 1"),
        (RawGGUF(version=4).to_bytes(), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_headers(raw: bytes, part: str, tmp_path: Path) -> None:
    assert part in refuse(raw, tmp_path)


@pytest.mark.case("LD-05")
@pytest.mark.parametrize("fill", ["real", "zeros", "ones"])
def test_files_of_0_to_64_bytes(fill: str, tmp_path: Path) -> None:
    real = tiny_gguf().to_bytes()
    for length in range(65):
        raw = {"real": real[:length], "zeros": b"\0" * length, "ones": b"\xff" * length}[fill]
        refuse(raw, tmp_path)


@pytest.mark.case("LD-07")
@pytest.mark.parametrize(
    ("kind", "value"),
    [("INT32", 32), ("UINT64", 32), ("STRING", "32"), ("UINT32", 0), ("UINT32", 3), ("UINT32", 2**31)],
)
def test_a_wrong_alignment_is_refused(kind: str, value: Any, tmp_path: Path) -> None:
    assert "general.alignment" in refuse(one_pair(kind, value, "general.alignment"), tmp_path)


@pytest.mark.case("LD-07")
@pytest.mark.parametrize("alignment", [1, 8, 32, 64, 4096, None])
def test_alignment_moves_the_data(alignment: int | None, tmp_path: Path) -> None:
    tensors = {name: RawTensor("f32", (3,), np.full(3, i, "<f4").tobytes()) for i, name in enumerate("ab")}
    pairs = {} if alignment is None else {"general.alignment": ("UINT32", alignment)}
    read = GGUFFile(RawGGUF(dict(pairs), tensors, alignment=alignment or 32).write(tmp_path / "a.gguf"))
    assert [read.tensor_bytes(read.tensors[name]).view("<f4").tolist() for name in "ab"] == [[0] * 3, [1] * 3]


@pytest.mark.case("LD-07")
def test_a_tensor_that_is_not_aligned_is_refused(tmp_path: Path) -> None:
    tensors = {name: RawTensor("f32", (1,), b"\0" * 4) for name in "ab"}
    message = refuse(
        RawGGUF({"general.alignment": ("UINT32", 64)}, tensors, alignment=4).to_bytes(), tmp_path
    )
    assert "tensor 'b'" in message
    assert "multiple of 64" in message


def entry(name: str, dimensions: tuple[int, ...], number: int, offset: int) -> bytes:
    count = len(dimensions)
    return (
        gguf_string(name)
        + struct.pack(f"<I{count}Q", count, *dimensions)
        + struct.pack("<IQ", number, offset)
    )


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ([entry("t", (32,), 12, 0)], "tensor 't' has type Q4_K, which is not supported"),
        ([entry("t", (32,), 14, 0)], "Q6_K"),
        ([entry("t", (32,), 250, 0)], "unknown type 250"),
        ([entry("t", (), 0, 0)], "0 dimensions"),
        ([entry("t", (1, 1, 1, 1, 1), 0, 0)], "5 dimensions"),
        ([entry("t", (4, 0), 0, 0)], "size 0"),
        ([entry("t", (33,), 2, 0)], "not a multiple of 32"),
        ([entry("t", (2**32, 2**32), 0, 0)], "expected"),
        ([entry("t", (2,), 0, 2**63)], "expected"),
        ([entry("t", (1,), 0, 0), entry("t", (1,), 0, 32)], "'t' occurs twice"),
        ([entry("a", (16,), 0, 0), entry("b", (1,), 0, 32)], "'a' and 'b' overlap"),
        ([entry("", (1,), 0, 0)], "a tensor name is empty"),
        ([entry("n" * 65, (1,), 0, 0)], "65 bytes long"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_tensor_tables(entries: list[bytes], part: str, tmp_path: Path) -> None:
    assert part in refuse(with_counts(len(entries), 0, b"".join(entries) + b"\0" * 256), tmp_path)


@pytest.mark.case("LD-11")
def test_a_file_cut_anywhere_says_how_much_is_missing(tmp_path: Path) -> None:
    whole = tiny_gguf().to_bytes()
    for part in range(1, 50):
        cut = len(whole) * part // 50
        message = refuse(whole[:cut], tmp_path)
        assert "expected" in message
        assert f"found {cut}" in message
    assert f"expected {len(whole)} bytes, found {len(whole) - 1}" in refuse(whole[:-1], tmp_path)


@pytest.mark.case("LD-11")
def test_a_file_cut_after_opening_is_an_error_not_a_signal(tmp_path: Path) -> None:
    path = tiny_gguf().write(tmp_path / "a.gguf")
    weights = GGUFWeights(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ModelLoadError, match=f"expected {size} bytes, found 100"):
        weights.weight("model.norm.weight")


def test_a_path_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelLoadError, match="cannot be read"):
            GGUFFile(path)


@given(data=st.data())
@settings(max_examples=150)
def test_a_flipped_byte_never_does_more_than_raise(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    raw = bytearray(tiny_gguf(pairs={"x": ("ARRAY[STRING]", ["ab", "c"])}).to_bytes())
    position = data.draw(st.integers(0, 2000))
    raw[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(raw)
    try:
        weights = GGUFWeights(path)
    except ModelLoadError:
        return
    assert weights.weight("model.norm.weight").dequantize().shape == (64,)
