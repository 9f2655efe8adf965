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

from microserving.engine.kernels.common import Isa

Objects = tuple[bytes, ...]
"""The object files of one module: its kernels, and its VM bytecode as data."""

_NO_CXX_RUNTIME = "microserving-needs-no-c++-runtime"  # else orcjit asks a C++ compiler where libstdc++ is


def compile_graph(module: tvm.IRModule, isa: Isa) -> Objects:
    """Machine code of a Relax module."""
    target = tvm.target.Target(isa.target)
    with target:
        executable = tvm.compile(module, target)
    return export_objects(executable)


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
