"""The Llama family (Llama, SmolLM2, Mistral) as a graph of our kernels.

Formulas: Touvron et al. 2023 (arXiv 2302.13971), grouped-query attention (arXiv 2305.13245).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from tvm.relax.frontend import nn

from microserving.engine.kernels.elementwise import (
    add_rms_norm_kernel,
    last_norm_kernel,
    rms_norm_kernel,
    rope_kernel,
    silu_mul_kernel,
)
from microserving.engine.kernels.quantise import add_norm_quantise_kernel, silu_mul_quantise_kernel
from microserving.engine.models.base import (
    KVWriter,
    Matrix,
    Parameters,
    QuantisedRows,
    RemoteInputs,
    Scratch,
    StepInputs,
    attention,
    call,
    new,
)
from microserving.engine.models.spec import ModelSpec
from microserving.model_files import ModelConfig

_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


class LlamaLayer(nn.Module):  # type: ignore[misc]
    """One decoder layer. x is changed in place; a layer returns what is still to be added to it.

    VECTORS: each vector parameter and the tensors of a layer that it is made of.
    """

    VECTORS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "attention_norm": ("input_layernorm.weight",),
        "mlp_norm": ("post_attention_layernorm.weight",),
    }

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        config, prefix = spec.config, f"layers.{layer}."
        self.spec, self.layer = spec, layer
        heads = config.num_heads + 2 * config.num_kv_heads
        self.attention_norm = nn.Parameter((config.hidden_size,), "float32")
        self.qkv = Matrix(spec, f"{prefix}qkv.tiles", heads * config.head_dim, config.hidden_size)
        self.output = Matrix(
            spec, f"{prefix}output.tiles", config.hidden_size, config.num_heads * config.head_dim
        )
        self.mlp_norm = nn.Parameter((config.hidden_size,), "float32")
        self.gate_up = Matrix(
            spec, f"{prefix}gate_up.tiles", 2 * config.intermediate_size, config.hidden_size
        )
        self.down = Matrix(spec, f"{prefix}down.tiles", config.hidden_size, config.intermediate_size)

    def forward(self, x: Any, delta: Any, step: StepInputs, kv: KVWriter) -> tuple[Any, Any]:
        config = self.spec.config
        x, normed = _add_norm(config, x, delta, self.attention_norm, self.qkv, step.scratch)
        delta = self.attend(normed, step, kv)
        x, normed = _add_norm(config, x, delta, self.mlp_norm, self.gate_up, step.scratch)
        delta = self.mlp(normed, step.scratch)
        kv.layer_end(self.layer)
        return x, delta

    def attend(self, x: Any, step: StepInputs, kv: KVWriter) -> Any:
        config, n = self.spec.config, x.shape[0]
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = self.project(x, step.scratch)
        parts = [new([n, heads, dim]), new([n, kv_heads, dim]), new([n, kv_heads, dim])]
        q, k, v = step.scratch.call(rope_kernel(heads, kv_heads, dim), "rope", [qkv, step.angles], *parts)
        kv.write(k, v, self.layer)
        out = attention(self.spec, q, kv.pool, self.layer, step)
        return self.output(out, step.scratch)

    def project(self, x: Any, scratch: Scratch) -> Any:
        """q, k and v of each row side by side, before rope; architectures that differ there override this."""
        return self.qkv(x, scratch)

    def mlp(self, x: Any, scratch: Scratch) -> Any:
        size = self.spec.config.intermediate_size
        gate_up = self.gate_up(x, scratch)
        if self.down.takes_int8:
            kernel = silu_mul_quantise_kernel(size, self.down.shape.kind)
            rows = self.down.quantised_by(kernel, "silu_mul_quantise", [gate_up], scratch)
            return self.down(rows, scratch)
        (gated,) = scratch.call(silu_mul_kernel(size), "silu_mul", [gate_up], new([x.shape[0], size]))
        return self.down(gated, scratch)


class LlamaModel(nn.Module):  # type: ignore[misc]
    """``step`` and ``step_put`` as ``models.base`` describes them."""

    LAYER: ClassVar[type[LlamaLayer]] = LlamaLayer

    def __init__(self, spec: ModelSpec) -> None:
        config = spec.config
        self.spec = spec
        self.embedding = Matrix(spec, "embedding.tiles", config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([self.LAYER(spec, layer) for layer in range(config.num_layers)])
        self.last_norm = nn.Parameter((config.hidden_size,), "float32")
        if not config.tie_word_embeddings:
            self.head = Matrix(spec, "head.tiles", config.vocab_size, config.hidden_size)

    @classmethod
    def parameters_of(cls, config: ModelConfig) -> Parameters:
        found: dict[str, tuple[str, ...]] = {
            "embedding.tiles": ("model.embed_tokens.weight",),
            "last_norm": ("model.norm.weight",),
        }
        for layer in range(config.num_layers):
            source = f"model.layers.{layer}."
            for name, parts in _FUSED.items():
                found[f"layers.{layer}.{name}.tiles"] = tuple(f"{source}{part}.weight" for part in parts)
            for name, parts in cls.LAYER.VECTORS.items():
                found[f"layers.{layer}.{name}"] = tuple(f"{source}{part}" for part in parts)
        if not config.tie_word_embeddings:
            found["head.tiles"] = ("lm_head.weight",)
        return found

    def step(
        self,
        ids: Any,
        angles: Any,
        slots: Any,
        table: Any,
        prefill_tasks: Any,
        prefill_threads: Any,
        decode_tasks: Any,
        decode_threads: Any,
        merges: Any,
        workspace: Any,
        logit_rows: Any,
        pool: Any,
    ) -> Any:
        inputs = StepInputs(
            angles,
            slots,
            table,
            prefill_tasks,
            prefill_threads,
            decode_tasks,
            decode_threads,
            merges,
            workspace,
        )
        return self._logits(ids, inputs, logit_rows, KVWriter(self.spec, slots, pool, None))

    def step_put(
        self,
        ids: Any,
        angles: Any,
        slots: Any,
        table: Any,
        prefill_tasks: Any,
        prefill_threads: Any,
        decode_tasks: Any,
        decode_threads: Any,
        merges: Any,
        workspace: Any,
        logit_rows: Any,
        pool: Any,
        remote_pool: Any,
        remote_slots: Any,
        remote_guards: Any,
        leases: Any,
        times: Any,
    ) -> Any:
        inputs = StepInputs(
            angles,
            slots,
            table,
            prefill_tasks,
            prefill_threads,
            decode_tasks,
            decode_threads,
            merges,
            workspace,
        )
        remote = RemoteInputs(remote_pool, remote_slots, remote_guards, leases, times)
        kv = KVWriter(self.spec, slots, pool, remote)
        logits = self._logits(ids, inputs, logit_rows, kv)
        return logits, kv.times

    def _logits(self, ids: Any, inputs: StepInputs, logit_rows: Any, kv: KVWriter) -> Any:
        config = self.spec.config
        x, delta = self.embedding.gather(ids), None
        for layer in self.layers:
            x, delta = layer(x, delta, inputs, kv)
        kernel = last_norm_kernel(config.hidden_size, config.rms_norm_eps)
        out = new([logit_rows.shape[0], config.hidden_size])
        rows = call(kernel, "last_norm", [x, delta, logit_rows, self.last_norm], out)
        return (self.embedding if config.tie_word_embeddings else self.head)(rows, inputs.scratch)


def _add_norm(
    config: ModelConfig, x: Any, delta: Any | None, weight: Any, reader: Matrix, scratch: Scratch
) -> tuple[Any, Any]:
    """(x + delta, its RMSNorm, quantised when ``reader`` takes it so); x is changed in place."""
    size, eps = config.hidden_size, config.rms_norm_eps
    if delta is None:
        return x, call(rms_norm_kernel(size, eps), "rms_norm", [x, weight], new(x.shape))
    if reader.takes_int8:
        kernel = add_norm_quantise_kernel(size, eps, reader.shape.kind)
        outputs = reader.quantised_outputs(x.shape[0])
        x, *rows = scratch.call_inplace(kernel, "add_norm_quantise", [x, delta, weight], 0, *outputs)
        return x, QuantisedRows(*rows)
    kernel = add_rms_norm_kernel(size, eps)
    x, normed = scratch.call_inplace(kernel, "add_rms_norm", [x, delta, weight], 0, new(x.shape))
    return x, normed
