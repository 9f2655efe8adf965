"""Model tensors as the kernels want them: tile kinds and packing."""

from microserving.engine.weights.packing import pack_matrix, pack_vector, tile_kind

__all__ = ["pack_matrix", "pack_vector", "tile_kind"]
