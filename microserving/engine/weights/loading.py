"""A model's weights, packed: from the packed file of an earlier start, or made from the model file and kept.

Owns: what a packed file depends on (the key), and which of them stay. Does not know tile formats.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO

from microserving.engine.kept_files import KeptFiles, fingerprint
from microserving.engine.kernels import tiles
from microserving.engine.models import registry
from microserving.engine.weights.packed_file import Packed, PackedWeight, read_packed, write_packed
from microserving.engine.weights.packing import pack_matrix, pack_vector, tile_kind
from microserving.model_files import Weight, WeightSource

Report = Callable[[str, float], None]


class PackedCache(KeptFiles[Packed]):
    """Packed weights under ``directory/packed``: one file per model, that of the version which was started last."""

    def __init__(self, directory: Path, threads: int) -> None:
        self._packed = directory / "packed"
        super().__init__(self._packed, "packed weights", partial(read_packed, threads=threads), self._keep)
        self._threads = threads

    def load(self, weights: WeightSource, report: Report) -> Packed:
        """The packed weights of ``weights``. Raises ModelLoadError for a model that cannot be packed."""
        key = packed_key(weights)
        packed = self.get(key, lambda: pack_model(weights, self._threads, report))
        report("weights", 1.0)
        return packed

    def remove_others(self, key: str) -> None:
        """Files of the same model that another version of the packing made. Whoever has one mapped keeps its memory."""
        for file in self._packed.glob(f"{_model_part(key)}-*.bin"):
            if file != self.path(key):
                file.unlink(missing_ok=True)

    def _keep(self, file: IO[bytes], packed: Packed) -> None:
        size = sum(weight.array.nbytes for weight in packed.values())
        if shutil.disk_usage(self._packed).free < 2 * size:
            raise OSError(errno.ENOSPC, "they would fill more than half of what is free on the disk")
        write_packed(file, packed, self._threads)


def load_weights(weights: WeightSource, directory: Path, threads: int, report: Report) -> Packed:
    """What the parameters of the model's graph are, by name, in no particular order.

    report("weights", fraction) is called. Raises ModelLoadError for a model that cannot be packed.
    """
    cache = PackedCache(directory, threads)
    packed = cache.load(weights, report)
    if cache.builds:
        cache.remove_others(packed_key(weights))
    return packed


def packed_key(weights: WeightSource) -> str:
    """Changes with everything that changes the arrays: the model's numbers, how they are stacked, the tile format."""
    version = fingerprint({}, [Path(registry.__file__).parent, Path(__file__).parent, Path(tiles.__file__)])
    return f"{weights.model_hash[:24]}-{version[:16]}"


def _model_part(key: str) -> str:
    return key.partition("-")[0]


def pack_model(weights: WeightSource, threads: int, report: Report) -> Packed:
    """All parameters, packed by ``threads`` threads: most of numpy's work is done without the GIL."""
    parameters = registry.model_class(weights.config.architecture).parameters_of(weights.config)
    packed: dict[str, PackedWeight] = {}
    with ThreadPoolExecutor(threads) as pool:
        made = pool.map(lambda sources: _packed([weights.weight(s) for s in sources]), parameters.values())
        for done, (name, weight) in enumerate(zip(parameters, made, strict=True)):
            report("weights", done / len(parameters))
            packed[name] = weight
    return packed


def _packed(parts: list[Weight]) -> PackedWeight:
    if len(parts[0].shape) == 2:
        return PackedWeight(pack_matrix(parts), tile_kind(parts))
    return PackedWeight(pack_vector(parts), None)
