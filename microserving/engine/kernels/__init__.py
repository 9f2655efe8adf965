"""CPU kernels as TVMScript PrimFuncs, and the host-side plans that they read. Knows no request and no model.

The factories are cached and imported from their modules: parsing TVMScript costs more than compiling it, so nothing is
generated on import.
"""
