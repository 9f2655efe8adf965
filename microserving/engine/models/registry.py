"""Architecture name -> model definition, loaded only when it is needed (a definition imports TVM)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from microserving.errors import ModelLoadError

if TYPE_CHECKING:
    from microserving.engine.models.base import StepModel

MODELS: dict[str, str] = {
    "llama": "microserving.engine.models.llama:LlamaModel",
    "qwen2": "microserving.engine.models.qwen2:Qwen2Model",
    "qwen3": "microserving.engine.models.qwen3:Qwen3Model",
}


def model_class(architecture: str) -> type[StepModel]:
    """The definition of ``architecture``; raises ModelLoadError when there is none."""
    try:
        module, _, name = MODELS[architecture].partition(":")
    except KeyError:
        known = ", ".join(sorted(MODELS))
        raise ModelLoadError(f"architecture {architecture!r} is not supported (known: {known})") from None
    found: type[StepModel] = getattr(import_module(module), name)
    return found
