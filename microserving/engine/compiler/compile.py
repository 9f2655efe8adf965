"""From a graph to machine code and back, without a C compiler or linker.

Owns: the form of compiled code (ELF objects in memory: TVM's LLVM code generator writes them, LLVM's ORC JIT links them into
the process). Does not know models, nor where code is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi_orcjit
from tvm import relax, tirx

from microserving.engine.kernels.common import Isa

Objects = tuple[bytes, ...]
"""The object files of one module: its kernels, and its VM bytecode as data."""

_NO_CXX_RUNTIME = "microserving-needs-no-c++-runtime"  # else orcjit asks a C++ compiler where libstdc++ is


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


def load_objects(objects: Objects) -> Any:
    """Link ``objects`` into this process: a module for ``relax.VirtualMachine``. Takes milliseconds."""
    session = tvm_ffi_orcjit.default_session()
    return session.load_module(list(objects), keep_module_alive=True, cxx=_NO_CXX_RUNTIME)
