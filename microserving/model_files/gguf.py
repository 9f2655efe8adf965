"""Strict reader of the GGUF container (versions 2 and 3, little-endian) over a memory map.

Owns the container: header, typed metadata, tensor table, where each tensor's bytes lie. Every count and length is
checked against the bytes that are really there before anything is allocated. Does not know models or tokenizers.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from microserving.errors import ModelLoadError
from microserving.model_files.mapped_file import MappedFile
from microserving.model_files.weights import FORMATS, WeightKind

_T = TypeVar("_T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 2**16
MAX_KEY_BYTES = 2**16 - 1
MAX_TENSOR_NAME_BYTES = 64
MAX_DIMENSIONS = 4

STRING, ARRAY = 8, 9
VALUE_TYPES = {
    0: "UINT8",
    1: "INT8",
    2: "UINT16",
    3: "INT16",
    4: "UINT32",
    5: "INT32",
    6: "FLOAT32",
    7: "BOOL",
    STRING: "STRING",
    ARRAY: "ARRAY",
    10: "UINT64",
    11: "INT64",
    12: "FLOAT64",
}
_SCALARS = {
    "UINT8": "<u1",
    "INT8": "<i1",
    "UINT16": "<u2",
    "INT16": "<i2",
    "UINT32": "<u4",
    "INT32": "<i4",
    "FLOAT32": "<f4",
    "BOOL": "<u1",
    "UINT64": "<u8",
    "INT64": "<i8",
    "FLOAT64": "<f8",
}
_INTEGERS = frozenset({"UINT8", "INT8", "UINT16", "INT16", "UINT32", "INT32", "UINT64", "INT64"})

TENSOR_KINDS: dict[int, WeightKind] = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 8: "q8_0", 30: "bf16"}
_OTHER_TENSOR_TYPES = {
    6: "Q5_0",
    7: "Q5_1",
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
}

# Smallest encodings, in bytes: key length + 1 character + type + value; name length + ... + offset.
_MIN_PAIR = 8 + 1 + 4 + 1
_MIN_TENSOR = 8 + 1 + 4 + 8 + 4 + 8


class MetadataValue(NamedTuple):
    """type: a name of VALUE_TYPES, or ``ARRAY[element type]``."""

    type: str
    value: object


class GGUFMetadata:
    """Typed access to the key/value pairs: a wrong type is a ModelLoadError that names key and type."""

    def __init__(self, values: Mapping[str, MetadataValue]) -> None:
        self._values = values

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def _get(self, key: str, allowed: frozenset[str]) -> object | None:
        """The value when it has an allowed type; None when the key is absent."""
        found = self._values.get(key)
        if found is None:
            return None
        if found.type not in allowed:
            raise ModelLoadError(
                f"metadata key {key!r} has type {found.type}, not {' or '.join(sorted(allowed))}"
            )
        return found.value

    def string(self, key: str, default: str | None = None) -> str:
        value = self._get(key, frozenset({"STRING"}))
        return _required(key, default if value is None else str(value))

    def uint(self, key: str, default: int | None = None) -> int:
        """A non-negative integer of any width."""
        value = self._get(key, _INTEGERS)
        if value is None:
            return _required(key, default)
        if not isinstance(value, int) or value < 0:
            raise ModelLoadError(f"metadata key {key!r} is {value}; it must not be negative")
        return value

    def uint32(self, key: str, default: int) -> int:
        """An integer whose type must be exactly UINT32."""
        value = self._get(key, frozenset({"UINT32"}))
        return value if isinstance(value, int) else default

    def float(self, key: str, default: float | None = None) -> float:
        value = self._get(key, frozenset({"FLOAT32", "FLOAT64"}))
        return _required(key, value if isinstance(value, float) else default)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        value = self._get(key, frozenset({"BOOL"}))
        return _required(key, value if isinstance(value, bool) else default)

    def strings(self, key: str) -> list[str]:
        value = self._get(key, frozenset({"ARRAY[STRING]"}))
        return _required(key, value if isinstance(value, list) else None)

    def int32s(self, key: str) -> npt.NDArray[np.int32]:
        value = self._get(key, frozenset({"ARRAY[INT32]"}))
        return _required(key, value if isinstance(value, np.ndarray) else None)

    def floats(self, key: str) -> npt.NDArray[np.float32]:
        value = self._get(key, frozenset({"ARRAY[FLOAT32]"}))
        return _required(key, value if isinstance(value, np.ndarray) else None)


def _required(key: str, value: _T | None) -> _T:
    if value is None:
        raise ModelLoadError(f"metadata key {key!r} is missing")
    return value


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """shape: outermost first, as numpy has it (the file has it reversed). offset: absolute, in bytes."""

    name: str
    kind: WeightKind
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class _Cursor:
    """Reads forward through the map; a read beyond its end is a ModelLoadError."""

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.position = 0

    @property
    def remaining(self) -> int:
        return len(self.data) - self.position

    def take(self, count: int) -> memoryview:
        if count > self.remaining:
            raise ModelLoadError(
                f"the file is cut or damaged: expected {self.position + count} bytes or more, found {len(self.data)}"
            )
        piece = self.data[self.position : self.position + count]
        self.position += count
        return piece

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.uint64()
        if limit is not None and length > limit:
            raise ModelLoadError(f"{what} is {length} bytes long; at most {limit} are allowed")
        try:
            return str(self.take(length), "utf-8")
        except UnicodeDecodeError:
            raise ModelLoadError(f"{what} is not valid UTF-8") from None

    def identifier(self, what: str, limit: int) -> str:
        text = self.string(what, limit)
        if not text:
            raise ModelLoadError(f"{what} is empty")
        if "\0" in text:
            raise ModelLoadError(f"{what} {text!r} contains a NUL character")
        return text

    def count(self, what: str, smallest: int) -> int:
        """A number of items of at least ``smallest`` bytes each, all of which must fit in the rest of the file."""
        count = self.uint64()
        if count > self.remaining // smallest:
            raise ModelLoadError(
                f"{what} is {count}: expected {self.position + count * smallest} bytes or more,"
                f" found {len(self.data)}"
            )
        return count


class GGUFFile:
    """One mapped GGUF file, its header read and checked. The map lives as long as this or a view of it.

    metadata: every key/value pair. tensors: name -> where it lies. Raises ModelLoadError when made from anything
    that is not a whole, well-formed file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = MappedFile(path)
            cursor = _Cursor(self._file.head())
            tensor_count, pair_count = _read_header(cursor)
            self.metadata = _read_metadata(cursor, pair_count)
            self.alignment = _alignment(self.metadata)
            self.tensors = _read_tensors(cursor, tensor_count, self.alignment)
            _check_extents(self.tensors.values(), self._file.size)
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error.message}") from None

    def tensor_bytes(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """Read-only view uint8 [nbytes]. Raises ModelLoadError when the file has been cut since it was opened."""
        return self._file.view(tensor.offset, tensor.nbytes)


def _read_header(cursor: _Cursor) -> tuple[int, int]:
    """(number of tensors, number of metadata pairs)."""
    if bytes(cursor.take(min(4, cursor.remaining))) != MAGIC:
        raise ModelLoadError("not a GGUF file (wrong magic)")
    version = cursor.uint32()
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        hint = "a big-endian file" if swapped in VERSIONS else f"version {version}"
        raise ModelLoadError(f"{hint} is not supported; GGUF versions 2 and 3, little-endian, are")
    tensors = cursor.count("the number of tensors", _MIN_TENSOR)
    return tensors, cursor.count("the number of metadata pairs", _MIN_PAIR)


def _read_metadata(cursor: _Cursor, count: int) -> GGUFMetadata:
    values: dict[str, MetadataValue] = {}
    for _ in range(count):
        key = cursor.identifier("a metadata key", MAX_KEY_BYTES)
        if key in values:
            raise ModelLoadError(f"metadata key {key!r} occurs twice")
        values[key] = _read_value(cursor, key)
    return GGUFMetadata(values)


def _type_name(cursor: _Cursor, key: str) -> str:
    number = cursor.uint32()
    name = VALUE_TYPES.get(number)
    if name is None:
        raise ModelLoadError(f"metadata key {key!r} has the unknown value type {number}")
    return name


def _read_value(cursor: _Cursor, key: str) -> MetadataValue:
    kind = _type_name(cursor, key)
    if kind == "ARRAY":
        return _read_array(cursor, key)
    if kind == "STRING":
        return MetadataValue(kind, cursor.string(f"the value of metadata key {key!r}"))
    dtype = np.dtype(_SCALARS[kind])
    value = np.frombuffer(cursor.take(dtype.itemsize), dtype)[0].item()
    if kind == "BOOL":
        if value not in (0, 1):
            raise ModelLoadError(f"metadata key {key!r} is a BOOL of value {value}")
        value = value == 1
    return MetadataValue(kind, value)


def _read_array(cursor: _Cursor, key: str) -> MetadataValue:
    element = _type_name(cursor, key)
    if element == "ARRAY":
        raise ModelLoadError(f"metadata key {key!r} has type ARRAY[ARRAY], which is not supported")
    what = f"the length of metadata key {key!r}"
    if element == "STRING":
        count = cursor.count(what, 8)
        item = f"an element of metadata key {key!r}"
        return MetadataValue("ARRAY[STRING]", [cursor.string(item) for _ in range(count)])
    dtype = np.dtype(_SCALARS[element])
    count = cursor.count(what, dtype.itemsize)
    raw = bytes(cursor.take(count * dtype.itemsize))
    return MetadataValue(f"ARRAY[{element}]", np.frombuffer(raw, dtype))


def _alignment(metadata: GGUFMetadata) -> int:
    """``general.alignment``: UINT32, a power of two up to MAX_ALIGNMENT; 32 when absent."""
    value = metadata.uint32("general.alignment", DEFAULT_ALIGNMENT)
    if not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise ModelLoadError(f"general.alignment is {value}; it must be a power of two up to {MAX_ALIGNMENT}")
    return value


class _Entry(NamedTuple):
    name: str
    kind: WeightKind
    shape: tuple[int, ...]
    offset: int


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, GGUFTensor]:
    entries = [_read_entry(cursor, alignment) for _ in range(count)]
    begin = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise ModelLoadError(f"tensor {entry.name!r} occurs twice")
        tensors[entry.name] = GGUFTensor(
            entry.name,
            entry.kind,
            entry.shape,
            begin + entry.offset,
            _nbytes(entry.name, entry.kind, entry.shape),
        )
    return tensors


def _read_entry(cursor: _Cursor, alignment: int) -> _Entry:
    name = cursor.identifier("a tensor name", MAX_TENSOR_NAME_BYTES)
    dimensions = cursor.uint32()
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        raise ModelLoadError(
            f"tensor {name!r} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed"
        )
    sizes = struct.unpack(f"<{dimensions}Q", cursor.take(8 * dimensions))
    if 0 in sizes:
        raise ModelLoadError(f"tensor {name!r} has a dimension of size 0")
    number = cursor.uint32()
    kind = TENSOR_KINDS.get(number)
    if kind is None:
        label = _OTHER_TENSOR_TYPES.get(number, f"unknown type {number}")
        supported = ", ".join(sorted(k.upper() for k in TENSOR_KINDS.values()))
        raise ModelLoadError(
            f"tensor {name!r} has type {label}, which is not supported (supported: {supported})"
        )
    offset = cursor.uint64()
    if offset % alignment:
        raise ModelLoadError(
            f"tensor {name!r} lies at offset {offset}, which is not a multiple of {alignment}"
        )
    return _Entry(name, kind, tuple(reversed(sizes)), offset)


def _nbytes(name: str, kind: WeightKind, shape: tuple[int, ...]) -> int:
    block = FORMATS[kind]
    if shape[-1] % block.elements:
        raise ModelLoadError(
            f"tensor {name!r} ({kind.upper()}) has rows of {shape[-1]} elements, not a multiple of {block.elements}"
        )
    elements = 1
    for size in shape:
        elements *= size
    return elements // block.elements * block.size


def _check_extents(tensors: Iterable[GGUFTensor], size: int) -> None:
    """Every tensor inside the file, no two of them overlapping."""
    ordered = sorted(tensors, key=lambda tensor: tensor.offset)
    end, previous = 0, ""
    for tensor in ordered:
        if tensor.offset < end:
            raise ModelLoadError(f"tensors {previous!r} and {tensor.name!r} overlap")
        end, previous = tensor.offset + tensor.nbytes, tensor.name
    if end > size:
        raise ModelLoadError(
            f"the file is cut or damaged: expected {end} bytes, found {size} (tensor {previous!r})"
        )
