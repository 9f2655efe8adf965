"""A model that has been found and opened: what an engine and a tokenizer are made from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from microserving.errors import ModelLoadError
from microserving.model_files.gguf import GGUFMetadata
from microserving.model_files.model_config import ModelConfig
from microserving.model_files.weights import WeightSource


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """name: what the API calls it by default. source_path: the GGUF file or the directory.

    tokenizer_source: a GGUF file's metadata, or the directory that holds ``tokenizer.json``.
    """

    name: str
    weights: WeightSource
    source_path: Path
    tokenizer_source: GGUFMetadata | Path

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Within, a ModelLoadError that does not name the model's file gets its name in front."""
        try:
            yield
        except ModelLoadError as error:
            if str(self.source_path) in error.message:
                raise
            raise ModelLoadError(f"{self.source_path}: {error.message}") from None

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    @property
    def model_hash(self) -> str:
        return self.weights.model_hash
