"""From a graph to machine code, without a C compiler or linker. Imports TVM's compiler: only for code that is not cached.

Owns: how graphs become ELF objects (``tvm_runtime.load_objects`` links them into a process). Does not know models, nor
where code is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm
from tvm import relax, tirx

from microserving.engine.kernels.isa import Isa
from microserving.engine.tvm_runtime import Objects


def compile_graph(module: tvm.IRModule, isa: Isa) -> Objects:
    """Machine code of a Relax module."""
    target = tvm.target.Target(isa.target)
    with target:
        executable = relax.build(module, target, relax_pipeline=_pipeline())
    return export_objects(executable)


def _pipeline() -> Any:
    """TVM's default passes, then "noalias" on every function.

    One function without it (TVM makes such ones for shapes) costs all kernels of the module their alias information in
    TVM 0.27, and with it the accumulators in registers: a factor of 3. No kernel of ours gets the same memory twice.
    """
    default = relax.get_pipeline("default")

    @tvm.transform.module_pass(opt_level=0)  # type: ignore[untyped-decorator]
    def assume_noalias(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        module = default(module)
        for name, function in list(module.functions.items()):
            if isinstance(function, tirx.PrimFunc):
                module[name] = function.with_attr("tirx.noalias", True)
        return module

    return assume_noalias


def export_objects(executable: Any) -> Objects:
    """The object files that ``export_library`` would hand to a linker."""
    found: list[bytes] = []

    def keep(_output: str, files: Sequence[str], **_options: object) -> None:
        found.extend(Path(file).read_bytes() for file in files)

    executable.export_library("unused.so", fcompile=keep)
    return tuple(found)
