"""Strict reader of the safetensors container over a memory map, and a Hugging Face directory as a WeightSource.

Every number of the header is checked against the bytes that are really there. Tensor names are canonical already,
and q/k rows are in NeoX order. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from microserving.errors import ModelLoadError
from microserving.model_files.mapped_file import MappedFile, parse_object, read_json
from microserving.model_files.model_config import ModelConfig, check_tensors, config_from_hf
from microserving.model_files.model_hash import model_hash
from microserving.model_files.weights import FORMATS, Weight, WeightKind

MAX_HEADER_BYTES = 32 * 2**20

MAX_DIMENSIONS = 8

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD_NAME = re.compile(r"[^/\\\0]*\.safetensors")

_KINDS: dict[str, WeightKind] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class SafeTensor(NamedTuple):
    """offset: absolute, in bytes."""

    kind: WeightKind
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """One mapped file, its header read and checked. Raises ModelLoadError for anything but a whole, sound file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = MappedFile(path)
            self.tensors = _read_tensors(self._file)
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error.message}") from None

    def tensor_bytes(self, tensor: SafeTensor) -> npt.NDArray[np.uint8]:
        """Read-only view uint8 [nbytes]. Raises ModelLoadError when the file has been cut since it was opened."""
        return self._file.view(tensor.offset, tensor.nbytes)


def _read_tensors(file: MappedFile) -> dict[str, SafeTensor]:
    if file.size < 8:
        raise ModelLoadError(f"the file is cut or damaged: expected 8 bytes or more, found {file.size}")
    length = int.from_bytes(file.head()[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ModelLoadError(
            f"the header claims {length} bytes; at most {MAX_HEADER_BYTES} are supported"
            " (save the model in several shards, or the file is damaged)"
        )
    begin = 8 + length
    if begin > file.size:
        raise ModelLoadError(f"the file is cut or damaged: expected {begin} bytes or more, found {file.size}")
    header = parse_object(bytes(file.head()[8:begin]))
    header.pop("__metadata__", None)
    tensors = {name: _tensor(name, entry, begin) for name, entry in header.items()}
    _check_extents(tensors, begin, file.size)
    return tensors


def _tensor(name: str, entry: Any, begin: int) -> SafeTensor:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ModelLoadError(f"tensor {name!r} must have exactly dtype, shape and data_offsets")
    kind = _KINDS.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if kind is None:
        supported = ", ".join(sorted(_KINDS))
        raise ModelLoadError(
            f"tensor {name!r} has type {_shown(entry['dtype'])}, which is not supported (supported: {supported})"
        )
    shape, offsets = _sizes(name, entry["shape"]), _sizes(name, entry["data_offsets"])
    nbytes = FORMATS[kind].size
    for size in shape:
        nbytes *= size
    if len(offsets) != 2 or offsets[1] - offsets[0] != nbytes:
        raise ModelLoadError(
            f"tensor {name!r} of shape {shape} needs {nbytes} bytes, but its place is {offsets}"
        )
    return SafeTensor(kind, shape, begin + offsets[0], nbytes)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else repr(value)


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item < 2**63 for item in value):
        raise ModelLoadError(
            f"tensor {name!r}: shape and data_offsets must be lists of non-negative integers below 2**63"
        )
    if len(value) > MAX_DIMENSIONS:
        raise ModelLoadError(
            f"tensor {name!r} has {len(value)} dimensions; at most {MAX_DIMENSIONS} are allowed"
        )
    return tuple(value)


def _check_extents(tensors: Mapping[str, SafeTensor], begin: int, size: int) -> None:
    """The tensors fill the rest of the file exactly, without a gap or an overlap."""
    end = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            raise ModelLoadError(
                f"tensor {name!r} begins at byte {tensor.offset}, but byte {end} is the next free one"
            )
        end += tensor.nbytes
    if end != size:
        raise ModelLoadError(f"the file is cut or damaged: expected {end} bytes, found {size}")


class HFWeights:
    """Implements WeightSource over a Hugging Face directory: config.json and one or more safetensors files."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            self._config = config_from_hf(read_json(directory / "config.json"), fallback_name=directory.name)
            found = {
                name: place
                for name, place in _open_files(directory).items()
                if not _is_ignored(name, self._config)
            }
            check_tensors(self._config, {name: tensor.shape for name, (_, tensor) in found.items()})
        except ModelLoadError as error:
            prefix = "" if str(directory) in error.message else f"{directory}: "
            raise ModelLoadError(f"{prefix}{error.message}") from None
        self._tensors = found

    @property
    def config(self) -> ModelConfig:
        return self._config

    @cached_property
    def model_hash(self) -> str:
        return model_hash(self._config, [self.weight(name) for name in self._tensors])

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def weight(self, name: str) -> Weight:
        if name == "lm_head.weight" and self._config.tie_word_embeddings:
            name = "model.embed_tokens.weight"
        if name not in self._tensors:
            raise ModelLoadError(f"{self._directory}: tensor {name!r} is missing")
        file, tensor = self._tensors[name]
        count = tensor.shape[0] if len(tensor.shape) == 2 else 1
        return Weight(name, tensor.kind, tensor.shape, file.tensor_bytes(tensor).reshape(count, -1))


Places = dict[str, tuple[SafetensorsFile, SafeTensor]]


def _is_ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that say nothing which the config does not: old rope tables, a copy of the tied embedding."""
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _open_files(directory: Path) -> Places:
    if (directory / SINGLE_FILE).exists():
        return _places(SafetensorsFile(directory / SINGLE_FILE))
    if not (directory / INDEX_FILE).exists():
        raise ModelLoadError(f"there is neither {SINGLE_FILE} nor {INDEX_FILE}")
    weight_map = _weight_map(read_json(directory / INDEX_FILE))
    found: Places = {}
    for shard in sorted(set(weight_map.values())):
        for name, place in _places(SafetensorsFile(directory / shard)).items():
            if name in found:
                raise ModelLoadError(
                    f"tensor {name!r} is in two shards, {found[name][0].path.name} and {shard}"
                )
            found[name] = place
    for name, shard in weight_map.items():
        if name not in found or found[name][0].path.name != shard:
            raise ModelLoadError(f"{INDEX_FILE}: tensor {name!r} is not in shard {shard}")
    return found


def _places(file: SafetensorsFile) -> Places:
    return {name: (file, tensor) for name, tensor in file.tensors.items()}


def _weight_map(index: Mapping[str, Any]) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(
            f"{INDEX_FILE}: 'weight_map' must be an object that names a shard for every tensor"
        )
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            raise ModelLoadError(f"{INDEX_FILE}: {shard!r} is not a file name inside the directory")
    return weight_map
