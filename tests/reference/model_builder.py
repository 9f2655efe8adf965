"""Writes small models byte by byte from the formats' documents; shares no code with the readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

GGUF_SCALARS = {
    "UINT8": (0, "<B"),
    "INT8": (1, "<b"),
    "UINT16": (2, "<H"),
    "INT16": (3, "<h"),
    "UINT32": (4, "<I"),
    "INT32": (5, "<i"),
    "FLOAT32": (6, "<f"),
    "BOOL": (7, "<?"),
    "UINT64": (10, "<Q"),
    "INT64": (11, "<q"),
    "FLOAT64": (12, "<d"),
}
GGUF_KINDS = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8, "bf16": 30}


def gguf_string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(kind: str, value: Any) -> bytes:
    """Type number and encoding; kind is a scalar's name, STRING, or ``ARRAY[...]``."""
    if kind == "STRING":
        return struct.pack("<I", 8) + gguf_string(value)
    if kind == "ARRAY[STRING]":
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
    if kind.startswith("ARRAY["):
        number, form = GGUF_SCALARS[kind[6:-1]]
        return struct.pack("<IIQ", 9, number, len(value)) + b"".join(
            struct.pack(form, item) for item in value
        )
    number, form = GGUF_SCALARS[kind]
    return struct.pack("<I", number) + struct.pack(form, value)


@dataclass
class RawTensor:
    """shape outermost first; data: its bytes."""

    kind: str
    shape: tuple[int, ...]
    data: bytes


@dataclass
class RawGGUF:
    """Everything that goes into a file; tests change a field and write it."""

    pairs: dict[str | bytes, tuple[str, Any]] = field(default_factory=dict)
    tensors: dict[str, RawTensor] = field(default_factory=dict)
    version: int = 3
    alignment: int = 32
    extra_pairs: bytes = b""
    extra_pair_count: int = 0

    def to_bytes(self) -> bytes:
        count = len(self.pairs) + self.extra_pair_count
        out = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), count)
        for key, (kind, value) in self.pairs.items():
            out += gguf_string(key) + gguf_value(kind, value)
        out += self.extra_pairs
        data = b""
        for name, tensor in self.tensors.items():
            data += b"\0" * (-len(data) % self.alignment)
            dimensions = tuple(reversed(tensor.shape))
            out += gguf_string(name) + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
            out += struct.pack("<IQ", GGUF_KINDS.get(tensor.kind, 12), len(data))
            data += tensor.data
        return out + b"\0" * (-len(out) % self.alignment) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.to_bytes())
        return path


@dataclass(frozen=True)
class TinyShape:
    """A llama small enough to write and run in milliseconds."""

    layers: int = 2
    hidden: int = 64
    wide: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 300
    context: int = 128


def tiny_arrays(
    shape: TinyShape, *, tied: bool = True, seed: int = 0, architecture: str = "llama"
) -> dict[str, np.ndarray]:
    """Canonical name -> float32 weights, rows of q and k in NeoX order."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(shape.hidden)).astype(np.float32)

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    arrays = {"model.embed_tokens.weight": matrix(shape.vocab, shape.hidden)}
    for i in range(shape.layers):
        prefix = f"model.layers.{i}."
        arrays[prefix + "input_layernorm.weight"] = norm()
        arrays[prefix + "self_attn.q_proj.weight"] = matrix(q, shape.hidden)
        arrays[prefix + "self_attn.k_proj.weight"] = matrix(kv, shape.hidden)
        arrays[prefix + "self_attn.v_proj.weight"] = matrix(kv, shape.hidden)
        arrays[prefix + "self_attn.o_proj.weight"] = matrix(shape.hidden, q)
        arrays[prefix + "post_attention_layernorm.weight"] = norm()
        arrays[prefix + "mlp.gate_proj.weight"] = matrix(shape.wide, shape.hidden)
        arrays[prefix + "mlp.up_proj.weight"] = matrix(shape.wide, shape.hidden)
        arrays[prefix + "mlp.down_proj.weight"] = matrix(shape.hidden, shape.wide)
    arrays["model.norm.weight"] = norm()
    if not tied:
        arrays["lm_head.weight"] = matrix(shape.vocab, shape.hidden)
    for i in range(shape.layers):
        prefix = f"model.layers.{i}.self_attn."
        if architecture == "qwen2":
            for part, size in (("q", q), ("k", kv), ("v", kv)):
                arrays[f"{prefix}{part}_proj.bias"] = rng.standard_normal(size).astype(np.float32)
        if architecture == "qwen3":
            for part in "qk":
                arrays[f"{prefix}{part}_norm.weight"] = rng.standard_normal(shape.head_dim).astype(np.float32)
    return arrays


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, last = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{_GGUF_NAMES[rest]}.{last}"
    return f"{_GGUF_NAMES[stem]}.{last}"


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """What the converter to GGUF does to q and k: per head, row i of the first half, row i of the second, ..."""
    per_head = rows.reshape(heads, -1, rows.shape[-1])
    half = per_head.shape[1] // 2
    out = np.empty_like(per_head)
    for i in range(half):
        out[:, 2 * i] = per_head[:, i]
        out[:, 2 * i + 1] = per_head[:, half + i]
    return out.reshape(rows.shape)


def bf16_bytes(values: np.ndarray) -> bytes:
    """Truncated to bfloat16."""
    return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()


def encode(values: np.ndarray, kind: str) -> bytes:
    if kind == "bf16":
        return bf16_bytes(values)
    if kind in ("f32", "f16"):
        return values.astype("<f4" if kind == "f32" else "<f2").tobytes()
    return b"".join(encode_block(block, kind) for block in values.reshape(-1, 32))


def encode_block(block: np.ndarray, kind: str) -> bytes:
    """32 numbers, rounded to the nearest code of a quantised kind."""
    low, high, largest = float(block.min()), float(block.max()), float(np.abs(block).max())
    if kind == "q8_0":
        d = np.float16(largest / 127 or 1)
        return d.tobytes() + np.clip(np.round(block / float(d)), -127, 127).astype(np.int8).tobytes()
    if kind == "q4_0":
        d = np.float16(largest / 7 or 1)
        head, codes = d.tobytes(), np.clip(np.round(block / float(d)) + 8, 0, 15)
    else:
        d, m = np.float16((high - low) / 15 or 1), np.float16(low)
        head, codes = d.tobytes() + m.tobytes(), np.clip(np.round((block - float(m)) / float(d)), 0, 15)
    nibbles = codes.astype(np.uint8)
    return head + (nibbles[:16] | (nibbles[16:] << 4)).tobytes()


def tiny_gguf(
    shape: TinyShape | None = None,
    *,
    kind: str = "f32",
    tied: bool = True,
    seed: int = 0,
    architecture: str = "llama",
    pairs: Mapping[str, tuple[str, Any]] | None = None,
) -> RawGGUF:
    """A whole small model; matrices of ``kind``, norms f32. ``pairs`` replace or add metadata."""
    shape = shape or TinyShape()
    file = RawGGUF(
        {
            "general.architecture": ("STRING", architecture),
            "general.name": ("STRING", "tiny"),
            f"{architecture}.block_count": ("UINT32", shape.layers),
            f"{architecture}.context_length": ("UINT32", shape.context),
            f"{architecture}.embedding_length": ("UINT32", shape.hidden),
            f"{architecture}.feed_forward_length": ("UINT32", shape.wide),
            f"{architecture}.attention.head_count": ("UINT32", shape.heads),
            f"{architecture}.attention.head_count_kv": ("UINT32", shape.kv_heads),
            f"{architecture}.attention.layer_norm_rms_epsilon": ("FLOAT32", 1e-5),
            f"{architecture}.rope.freq_base": ("FLOAT32", 10000.0),
            f"{architecture}.rope.dimension_count": ("UINT32", shape.head_dim),
            **(pairs or {}),
        }
    )
    for name, values in tiny_arrays(shape, tied=tied, seed=seed, architecture=architecture).items():
        stored = values
        if name.endswith("q_proj.weight") and architecture == "llama":
            stored = interleaved(values, shape.heads)
        elif name.endswith("k_proj.weight") and architecture == "llama":
            stored = interleaved(values, shape.kv_heads)
        used = "f32" if values.ndim == 1 else kind
        file.tensors[gguf_name(name)] = RawTensor(used, values.shape, encode(stored, used))
    return file


def safetensors_bytes(tensors: Mapping[str, tuple[str, Sequence[int], bytes]]) -> bytes:
    """name -> (dtype, shape, data)."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tiny_hf_config(
    shape: TinyShape | None = None, *, tied: bool = True, architecture: str = "llama"
) -> dict[str, Any]:
    shape = shape or TinyShape()
    return {
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "model_type": architecture,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.wide,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
    }


def tiny_tensors(
    shape: TinyShape | None = None,
    *,
    kind: str = "f32",
    tied: bool = True,
    seed: int = 0,
    architecture: str = "llama",
) -> dict[str, tuple[str, Sequence[int], bytes]]:
    arrays = tiny_arrays(shape or TinyShape(), tied=tied, seed=seed, architecture=architecture)
    return {name: (kind.upper(), values.shape, encode(values, kind)) for name, values in arrays.items()}


def write_tiny_hf(
    directory: Path,
    *,
    shards: int = 1,
    kind: str = "f32",
    tied: bool = True,
    seed: int = 0,
    architecture: str = "llama",
) -> Path:
    """A Hugging Face directory (without tokenizer)."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(tiny_hf_config(tied=tied, architecture=architecture)))
    tensors = tiny_tensors(kind=kind, tied=tied, seed=seed, architecture=architecture)
    if shards == 1:
        (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return directory
    weight_map: dict[str, str] = {}
    names = list(tensors)
    for i in range(shards):
        shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i::shards]
        weight_map.update(dict.fromkeys(part, shard))
        (directory / shard).write_bytes(safetensors_bytes({name: tensors[name] for name in part}))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory
