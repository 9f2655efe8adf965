"""Compiling graphs with TVM and keeping the code on disk. Does not know architectures or weights."""

from microserving.engine.compiler.cache import CodeCache, cache_key
from microserving.engine.compiler.compile import Objects, compile_graph, load_objects

__all__ = ["CodeCache", "Objects", "cache_key", "compile_graph", "load_objects"]
