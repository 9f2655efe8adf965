"""Compiling graphs with TVM and keeping the code on disk. Does not know architectures or weights.

Only ``compile`` imports TVM's compiler.
"""

from microserving.engine.compiler.cache import CodeCache, cache_key

__all__ = ["CodeCache", "cache_key"]
