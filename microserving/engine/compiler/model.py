"""A model's step functions as machine code: from the disk cache, or compiled.

Owns: what a compiled model depends on (the cache key). Knows models and the cache; no weights' values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import microserving.engine.kernels as kernels
import microserving.engine.models as models
from microserving.engine.compiler.cache import CodeCache, cache_key
from microserving.engine.models.registry import model_class
from microserving.engine.models.spec import ModelSpec
from microserving.engine.tvm_runtime import Objects

Progress = Callable[[str, float], None]


def model_key(spec: ModelSpec) -> str:
    """Changes with everything that changes the code: shapes, tile kinds, KV layout, ISA, our sources, TVM's version."""
    config = asdict(spec.config)
    del config["name"], config["max_context"], config["rope_theta"]  # not in the code
    isa = {"name": spec.isa.name, "target": spec.isa.target, "accumulators": spec.isa.accumulators}
    parts = {"config": config, "kinds": dict(spec.kinds), "layout": asdict(spec.layout), "isa": isa}
    sources = [Path(path) for package in (kernels, models) for path in package.__path__]
    return cache_key(parts, [*sources, Path(__file__).parent])


def compiled_model(spec: ModelSpec, cache: CodeCache, progress: Progress) -> Objects:
    """The code of ``spec``. progress("compile", fraction) is called when it has to be made."""

    def build() -> Objects:
        progress("compile", 0.0)
        from microserving.engine.compiler.compile import compile_graph  # these import TVM's compiler
        from microserving.engine.models.base import export

        module, names = export(model_class(spec.config.architecture)(spec), spec)
        progress("compile", 0.6)
        objects = compile_graph(module, spec.isa)
        progress("compile", 1.0)
        return ("\n".join(names).encode(), *objects)

    return cache.get(model_key(spec), build)
