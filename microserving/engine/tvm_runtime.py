"""TVM's runtime without its compiler: the shared library, tensors over numpy memory, compiled code that can be called.

Owns: how ``libtvm_runtime`` is loaded. ``import tvm`` takes a second, most of it for the compiler, which an engine needs
only when its code is not in the cache; it may be imported before or after.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tvm_ffi
import tvm_ffi_orcjit
from tvm_ffi.libinfo import load_lib_ctypes

ALIGNMENT: Final = 64
"""Bytes. Compiled vector loads assume it of every tensor."""
Objects = tuple[bytes, ...]
"""The object files of one module: its kernels, and its VM bytecode as data."""

_CPU: Final = 1  # kDLCPU
_NAIVE_ALLOCATOR: Final = 1
"""Of the Relax VM. Its pooled one keeps all that is freed, apart for every size: gigabytes, for steps of any length."""
_NO_CXX_RUNTIME = "microserving-needs-no-c++-runtime"  # else orcjit asks a C++ compiler where libstdc++ is


@functools.cache
def load_runtime() -> None:
    """Make TVM's runtime known to this process; from any thread. Raises RuntimeError when TVM is not installed."""
    spec = importlib.util.find_spec("tvm")  # finds the package without running it
    if spec is None or spec.origin is None:
        raise RuntimeError("TVM is not installed")
    libraries = [Path(spec.origin).parent / "lib"]
    load_lib_ctypes("apache-tvm", "tvm_runtime", "RTLD_GLOBAL", extra_lib_paths=libraries)


def global_function(name: str) -> Callable[..., Any]:
    """A function of the runtime. Raises ValueError for an unknown one."""
    load_runtime()
    found: Callable[..., Any] = tvm_ffi.get_global_func(name)
    return found


def aligned_bytes(size: int) -> npt.NDArray[np.uint8]:
    """Zeroed uint8 [size] that starts at a multiple of 64."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def tensor_of(array: npt.NDArray[Any]) -> Any:
    """``array``'s memory as a tensor, which keeps it. Raises an error of the runtime when it is not aligned or contiguous."""
    return tvm_ffi.from_dlpack(array, require_alignment=ALIGNMENT, require_contiguous=True)


def tensor(array: npt.NDArray[Any]) -> Any:
    """A tensor with the contents of ``array``."""
    copy = empty_array(array.shape, array.dtype)
    np.copyto(copy, array)
    return tensor_of(copy)


def constant(array: npt.NDArray[Any]) -> Any:
    """``array``'s memory as a tensor when it is aligned, else a copy of it."""
    return tensor(array) if array.ctypes.data % ALIGNMENT else tensor_of(array)


def empty_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros of ``shape`` that a tensor can be made of."""
    kind = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    memory = aligned_bytes(max(size, ALIGNMENT))  # an empty array has an aligned address too
    return np.ndarray(shape, kind, memory)


def array_of(tensor: Any) -> npt.NDArray[Any]:
    """A copy of ``tensor``'s contents, which outlives it."""
    return np.array(np.from_dlpack(tensor))


def load_objects(objects: Objects) -> Any:
    """Link ``objects`` into this process: a module for ``virtual_machine``. Takes milliseconds."""
    load_runtime()
    session = tvm_ffi_orcjit.default_session()
    return session.load_module(list(objects), keep_module_alive=True, cxx=_NO_CXX_RUNTIME)


def virtual_machine(code: Any) -> Any:
    """The functions of a compiled Relax module by name, ready to be called on the CPU (as ``tvm.relax.VirtualMachine``)."""
    machine = code["vm_load_executable"]()
    machine["vm_initialization"](_CPU, 0, _NAIVE_ALLOCATOR)
    return machine
