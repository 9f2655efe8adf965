"""What every model definition shares: its inputs, the packed weight modules, and the wrapping of kernels as graph calls.

Owns: the signature of a step in the graph. Does not know an architecture, files or the disk cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import tvm
from tvm import tirx
from tvm.relax.frontend import nn

from microserving.engine.kernels.attention import decode_kernel, prefill_kernel
from microserving.engine.kernels.elementwise import embedding_kernel
from microserving.engine.kernels.kv_write import append_kernel, put_kernel, stamp_kernel
from microserving.engine.kernels.matmul import matmul_kernel
from microserving.engine.kernels.matmul_int8 import QUADS, matmul_int8_kernel
from microserving.engine.kernels.plan import TASK_FIELDS
from microserving.engine.kernels.quantise import quantise_kernel
from microserving.engine.kernels.slot_copy import copy_kernel
from microserving.engine.kernels.tiles import CODE_BITS, GROUP, MatmulShape
from microserving.engine.kernels.transfer import COPY, LAYER_END
from microserving.engine.models.spec import ModelSpec
from microserving.model_files import ModelConfig

Parameters = Mapping[str, tuple[str, ...]]
"""Graph parameter -> the canonical tensors stacked in it (a matrix), or the one vector."""


class StepModel(Protocol):
    """A model definition: an ``nn.Module`` with the methods of ``step_signature`` and ``put_signature``."""

    def __init__(self, spec: ModelSpec) -> None: ...

    @classmethod
    def parameters_of(cls, config: ModelConfig) -> Parameters:
        """Every graph parameter and what it is made of."""

    def export_tvm(self, spec: Any) -> tuple[tvm.IRModule, list[tuple[str, Any]]]: ...


class Scratch:
    """The tensors between the kernels of a step: the first layer makes them, the layers after it write them again.

    Making a tensor costs the VM more than a small kernel takes. What a kernel made is overwritten by the next kernel that
    has the same name and gives the same shapes, so it must have been read by then; what layers hand on lives elsewhere.
    """

    def __init__(self) -> None:
        self._made: dict[str, list[Any]] = {}

    def call(self, kernel: tirx.PrimFunc, name: str, args: Sequence[Any], *outputs: Any) -> list[Any]:
        """What ``kernel`` writes. outputs: placeholders."""
        key = _key(name, outputs)
        made = self._made.get(key)
        found = (
            _listed(call(kernel, name, args, outputs)) if made is None else _again(kernel, name, args, made)
        )
        self._made[key] = found
        return found

    def call_inplace(
        self, kernel: tirx.PrimFunc, name: str, args: Sequence[Any], index: int, *outputs: Any
    ) -> list[Any]:
        """args[index], which ``kernel`` changes, then what it writes."""
        key, changed = _key(name, outputs), args[index]
        made = self._made.get(key)
        if made is None:
            changed, *found = call_inplace(kernel, name, args, index, *outputs)
        else:
            found = _again(kernel, name, args, made)
        self._made[key] = found
        return [changed, *found]


def _key(name: str, outputs: Sequence[Any]) -> str:
    return f"{name} {[(*map(str, output.shape), output.dtype) for output in outputs]}"


def _listed(outputs: Any) -> list[Any]:
    return [outputs] if isinstance(outputs, nn.Tensor) else list(outputs)


def _again(kernel: tirx.PrimFunc, name: str, args: Sequence[Any], made: Sequence[Any]) -> list[Any]:
    """Overwrites ``made``. Only its last tensor counts as a result in the graph: a tuple of them would cost more."""
    last = call_inplace(kernel, name, [*args, *made], len(args) + len(made) - 1)
    return [*made[:-1], last]


@dataclass(frozen=True)
class StepInputs:
    """The arguments of a step that layers share, and their scratch. Row i is token i of the step.

    angles: float32 [n, head_dim]; slots: int32 [n]; table: int32 [b, max_pages]; the rest: an ``AttentionPlan``.
    """

    angles: Any
    slots: Any
    table: Any
    prefill_tasks: Any
    prefill_threads: Any
    decode_tasks: Any
    decode_threads: Any
    merges: Any
    workspace: Any
    scratch: Scratch = field(default_factory=Scratch)


def step_signature(spec: ModelSpec) -> dict[str, Any]:
    """Inputs of ``step(ids, <StepInputs>, logit_rows, pool) -> logits [r, vocab]``."""
    tensor, shape = nn.spec.Tensor, spec.attention
    return {
        "ids": tensor(["n"], "int32"),
        "angles": tensor(["n", shape.head_dim], "float32"),
        "slots": tensor(["n"], "int32"),
        "table": tensor(["b", "max_pages"], "int32"),
        "prefill_tasks": tensor(["p", TASK_FIELDS], "int32"),
        "prefill_threads": tensor(["threads1"], "int32"),
        "decode_tasks": tensor(["d", TASK_FIELDS], "int32"),
        "decode_threads": tensor(["threads1"], "int32"),
        "merges": tensor(["m", 4], "int32"),
        "workspace": tensor(["w", shape.group, shape.head_dim + 32], "float32"),
        "logit_rows": tensor(["r"], "int32"),
        "pool": tensor(_pool_shape(spec, "pages"), spec.layout.dtype),
    }


def put_signature(spec: ModelSpec) -> dict[str, Any]:
    """Inputs of ``step_put``: those of ``step``, then the fields of ``RemoteInputs``; gives (logits, times)."""
    tensor = nn.spec.Tensor
    return {
        **step_signature(spec),
        "remote_pool": tensor(_pool_shape(spec, "remote_pages"), spec.layout.dtype),
        "remote_slots": tensor(["n"], "int32"),
        "remote_guards": tensor(["n", 2], "int64"),
        "leases": tensor(["words"], "int64"),
        "times": tensor([spec.layout.layers, 3], "int64"),
    }


def _pool_shape(spec: ModelSpec, pages: str) -> list[int | str]:
    layers, _, two, heads, size = spec.layout.shape(0)
    return [layers, pages, two, heads, size]


def export(model: StepModel, spec: ModelSpec) -> tuple[tvm.IRModule, list[str]]:
    """The graph of both step functions, the slot copy beside it, and the names of the graph's parameters in order."""
    modes = {"param_mode": "packed", "effect_mode": "none"}
    module, parameters = model.export_tvm(
        {
            "step": {**step_signature(spec), "$": modes},
            "step_put": {**put_signature(spec), "$": modes},
        }
    )
    layout = spec.layout
    module[COPY] = copy_kernel(layout.kv_heads, layout.head_dim, layout.page_size, layout.dtype)
    return module, [name for name, _ in parameters]


def call(kernel: tirx.PrimFunc, name: str, args: Sequence[Any], out: Any) -> Any:
    """One kernel that makes new tensors; ``out``: a placeholder or a list of them."""
    out = list(out) if isinstance(out, tuple) else out
    return nn.op.tensor_ir_op(kernel.without_attr("global_symbol"), name, list(args), out)


def call_inplace(kernel: tirx.PrimFunc, name: str, args: Sequence[Any], index: int, *fresh: Any) -> Any:
    """One kernel that changes args[index] and gives it back, with the tensors that it makes (``fresh``) if any."""
    kernel = kernel.without_attr("global_symbol")
    if not fresh:
        return nn.op.tensor_ir_inplace_op(kernel, name, list(args), index, _like(args[index]))
    outputs, indices = [_like(args[index]), *fresh], [index] + [-1] * len(fresh)
    return nn.op.tensor_ir_inplace_op(kernel, name, list(args), indices, outputs)


def new(shape: Sequence[Any], dtype: str = "float32") -> Any:
    return nn.Tensor.placeholder(list(shape), dtype)


def _like(tensor: Any) -> Any:
    return nn.Tensor.placeholder(tensor.shape, tensor.dtype)


@dataclass(frozen=True)
class QuantisedRows:
    """Activations as ``kernels.quantise`` writes them. codes: int32 [n, columns / 32, 8]; scales: float32 [.., .., 2]."""

    codes: Any
    scales: Any

    @property
    def shape(self) -> Any:
        return self.codes.shape


class Matrix(nn.Module):  # type: ignore[misc]
    """A packed weight: as a product, and as an embedding table.

    takes_int8: products are computed from quantised rows, which a kernel before may already have made (``quantised_by``).
    """

    def __init__(self, spec: ModelSpec, name: str, rows: int, columns: int) -> None:
        self.shape = MatmulShape(spec.kinds[name], rows, columns)
        self.isa = spec.isa
        self.takes_int8 = spec.layout.activations == "int8" and self.shape.kind in CODE_BITS
        self.tiles = nn.Parameter(self.shape.tiles, "uint8")

    def forward(self, x: Any, scratch: Scratch) -> Any:
        """x: float32 [n, columns], or QuantisedRows when takes_int8."""
        shape, out = self.shape, new([x.shape[0], self.shape.rows])
        name = f"matmul_{shape.kind}_{shape.rows}_{shape.columns}"
        if not self.takes_int8:
            return scratch.call(matmul_kernel(shape, self.isa), name, [x, self.tiles], out)[0]
        if not isinstance(x, QuantisedRows):
            x = self.quantised_by(quantise_kernel(shape.columns, shape.kind), "quantise", [x], scratch)
        kernel = matmul_int8_kernel(shape, self.isa)
        return scratch.call(kernel, f"{name}_int8", [x.codes, x.scales, self.tiles], out)[0]

    def quantised_by(
        self, kernel: tirx.PrimFunc, name: str, args: Sequence[Any], scratch: Scratch
    ) -> QuantisedRows:
        """The rows for this weight that ``kernel``, which gives codes and scales, makes of ``args``."""
        return QuantisedRows(*scratch.call(kernel, name, args, *self.quantised_outputs(args[0].shape[0])))

    def quantised_outputs(self, n: Any) -> list[Any]:
        """Placeholders of the codes and scales of n rows."""
        groups = self.shape.columns // GROUP
        return [new([n, groups, QUADS], "int32"), new([n, groups, 2])]

    def gather(self, ids: Any) -> Any:
        shape = self.shape
        return call(
            embedding_kernel(shape), "embedding", [ids, self.tiles], new([ids.shape[0], shape.columns])
        )


@dataclass(frozen=True)
class RemoteInputs:
    """What a step that puts takes besides. Row i of slots and guards is token i of the step.

    pool, leases: the receiver's; slots: int32 [n], guards: int64 [n, 2] (``kernels.kv_write``); times: int64 [layers, 3].
    """

    pool: Any
    slots: Any
    guards: Any
    leases: Any
    times: Any


class KVWriter:
    """Puts each layer's K/V into the pool, and into another engine's when the step has one."""

    def __init__(self, spec: ModelSpec, slots: Any, pool: Any, remote: RemoteInputs | None) -> None:
        layout = spec.layout
        self._sizes = (layout.kv_heads, layout.head_dim, layout.page_size, layout.dtype)
        self._slots, self.pool, self._remote = slots, pool, remote

    @property
    def times(self) -> Any:
        """The times tensor as the last stamp left it."""
        return None if self._remote is None else self._remote.times

    def write(self, k: Any, v: Any, layer: int) -> None:
        index = tirx.IntImm("int64", layer)
        self.pool = call_inplace(
            append_kernel(*self._sizes), "append", [k, v, self._slots, self.pool, index], 3
        )
        if self._remote is not None:
            to = self._remote
            args = [k, v, to.slots, to.guards, to.pool, to.leases, index, to.times]
            self._remote = replace(to, times=call_inplace(put_kernel(*self._sizes), "put", args, 7))

    def layer_end(self, layer: int) -> None:
        if self._remote is not None:
            index, column = tirx.IntImm("int64", layer), tirx.IntImm("int64", LAYER_END)
            times = call_inplace(stamp_kernel(), "stamp", [self._remote.times, index, column], 0)
            self._remote = replace(self._remote, times=times)


def attention(spec: ModelSpec, q: Any, pool: Any, layer: int, step: StepInputs) -> Any:
    """Causal attention of all rows over the paged pool: float32 [n, num_heads * head_dim]."""
    shape, index = spec.attention, tirx.IntImm("int64", layer)
    (out,) = step.scratch.call(
        prefill_kernel(shape, spec.isa),
        "prefill_attention",
        [q, pool, index, step.table, step.prefill_tasks, step.prefill_threads],
        new([q.shape[0], shape.num_heads * shape.head_dim]),
    )
    plan = [step.decode_tasks, step.decode_threads, step.merges, step.workspace]
    return call_inplace(
        decode_kernel(shape, spec.isa), "decode_attention", [q, pool, index, step.table, *plan, out], 8
    )
