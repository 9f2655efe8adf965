"""What a model is on disk: GGUF and safetensors readers, its shape, its fingerprint, and where to get it.

Knows files and names, not how a model is computed, and nothing of tokenizers beyond handing over their data.
"""

from microserving.model_files.catalog import (
    CATALOG,
    DEFAULT_MODEL,
    ModelInfo,
    default_cache_dir,
    fetch,
    list_models,
    open_model,
    show,
)
from microserving.model_files.gguf import GGUFFile, GGUFMetadata, GGUFTensor
from microserving.model_files.gguf_weights import GGUFWeights
from microserving.model_files.model_config import ModelConfig, tensor_shapes
from microserving.model_files.progress import Progress, no_progress
from microserving.model_files.resolved_model import ResolvedModel
from microserving.model_files.safetensors import HFWeights
from microserving.model_files.weights import Affine, Weight, WeightKind, WeightSource

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "Affine",
    "GGUFFile",
    "GGUFMetadata",
    "GGUFTensor",
    "GGUFWeights",
    "HFWeights",
    "ModelConfig",
    "ModelInfo",
    "Progress",
    "ResolvedModel",
    "Weight",
    "WeightKind",
    "WeightSource",
    "default_cache_dir",
    "fetch",
    "list_models",
    "no_progress",
    "open_model",
    "show",
    "tensor_shapes",
]
