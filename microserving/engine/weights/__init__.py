"""Model tensors as the kernels want them: tile kinds, packing, and the packed file that later starts map."""

from microserving.engine.weights.loading import load_weights
from microserving.engine.weights.packing import pack_matrix, pack_vector, tile_kind

__all__ = ["load_weights", "pack_matrix", "pack_vector", "tile_kind"]
