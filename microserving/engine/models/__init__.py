"""Model definitions in ``tvm.relax.frontend.nn`` and the registry of architectures. Does not know files or requests."""
