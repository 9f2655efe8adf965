"""What a model is on disk: GGUF and safetensors readers, its shape, its fingerprint, and where to get it.

Knows files and names, not how a model is computed, and nothing of tokenizers beyond handing over their data.
"""

from microserving.model_files.gguf import GGUFFile, GGUFMetadata, GGUFTensor
from microserving.model_files.gguf_weights import GGUFWeights
from microserving.model_files.model_config import ModelConfig, tensor_shapes
from microserving.model_files.weights import Affine, Weight, WeightKind, WeightSource

__all__ = [
    "Affine",
    "GGUFFile",
    "GGUFMetadata",
    "GGUFTensor",
    "GGUFWeights",
    "ModelConfig",
    "Weight",
    "WeightKind",
    "WeightSource",
    "tensor_shapes",
]
