"""The shape of a model, from GGUF metadata or a Hugging Face ``config.json``.

Knows which architectures and rope variants the project can run, and refuses the others by name, so that nothing
downstream has to. Does not know tensors or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from microserving.errors import ModelLoadError

if TYPE_CHECKING:
    from microserving.model_files.gguf import GGUFMetadata

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


class Family(NamedTuple):
    """How an architecture differs from the Llama of the same sizes; fields as in ModelConfig."""

    attention_bias: bool
    qk_norm: bool


FAMILIES = {
    "llama": Family(attention_bias=False, qk_norm=False),
    "qwen2": Family(attention_bias=True, qk_norm=False),
    "qwen3": Family(attention_bias=False, qk_norm=True),
}
"""Under GGUF's names."""

_LIMITS = {
    "num_layers": 2**12,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_heads": 2**14,
    "num_kv_heads": 2**14,
    "head_dim": 2**12,
    "vocab_size": 2**24,
    "max_context": 2**31 - 1,
}

_NUMBER_LIMITS = {"rope_theta": (1.0, 1e15), "rms_norm_eps": (1e-20, 0.5)}
"""What float32 can compute with: a lower base gives infinite angles, a lower epsilon divides a row of zeros by zero."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes are counts of elements; max_context is in tokens. All checked when made (ModelLoadError).

    architecture: a key of FAMILIES; ``llama`` is Llama, SmolLM2 and Mistral, ``qwen2`` Qwen2.5 too. head_dim is even (NeoX
    rope rotates halves). attention_bias: q/k/v projections have a bias. qk_norm: q and k are RMS-normalised per head.
    name: for people; no part of the model's identity.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    name: str

    def __post_init__(self) -> None:
        for field, limit in _LIMITS.items():
            value = getattr(self, field)
            if not 1 <= value <= limit:
                raise ModelLoadError(f"{field} is {value}; it must be between 1 and {limit}")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim is {self.head_dim}; rotary embeddings need an even number")
        for field, (least, most) in _NUMBER_LIMITS.items():
            if not least <= getattr(self, field) <= most:
                raise ModelLoadError(
                    f"{field} is {getattr(self, field)}; it must be between {least:g} and {most:g}"
                )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor that a model of this shape has; (N, K) means y = x @ w.T."""
    hidden, wide = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_size, hidden),
        "self_attn.k_proj.weight": (kv_size, hidden),
        "self_attn.v_proj.weight": (kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
    }
    if config.attention_bias:
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}
        layer.update({f"self_attn.{part}_proj.bias": (size,) for part, size in sizes.items()})
    if config.qk_norm:
        layer.update({f"self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"})
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def check_tensors(config: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelLoadError unless ``found`` is exactly what a model of this shape has."""
    expected = tensor_shapes(config)
    for name, shape in expected.items():
        if name not in found:
            raise ModelLoadError(f"tensor {name!r} is missing")
        if found[name] != shape:
            raise ModelLoadError(f"tensor {name!r} has shape {found[name]}, not {shape} as the config says")
    extra = sorted(found.keys() - expected.keys())
    if extra:
        raise ModelLoadError(
            f"tensor {extra[0]!r} is not part of a {config.architecture} model of this shape"
        )


def config_from_gguf(
    metadata: GGUFMetadata, *, vocab_size: int, tied: bool, fallback_name: str
) -> ModelConfig:
    """The shape that a GGUF file's metadata describes.

    vocab_size: rows of the embedding table. tied: the file has no separate output matrix. Raises ModelLoadError
    for a missing or mistyped key and for what the project cannot run.
    """
    architecture = metadata.string("general.architecture")
    if architecture not in FAMILIES:
        raise ModelLoadError(
            f"architecture {architecture!r} is not supported (supported: {', '.join(FAMILIES)})"
        )
    _refuse_gguf_variants(metadata, architecture)
    num_heads = metadata.uint(f"{architecture}.attention.head_count")
    hidden = metadata.uint(f"{architecture}.embedding_length")
    head_dim = metadata.uint(f"{architecture}.attention.key_length", hidden // max(num_heads, 1))
    config = ModelConfig(
        architecture=architecture,
        num_layers=metadata.uint(f"{architecture}.block_count"),
        hidden_size=hidden,
        intermediate_size=metadata.uint(f"{architecture}.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=metadata.uint(f"{architecture}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context=metadata.uint(f"{architecture}.context_length"),
        rope_theta=metadata.float(f"{architecture}.rope.freq_base", 10000.0),
        rms_norm_eps=metadata.float(f"{architecture}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings=tied,
        **FAMILIES[architecture]._asdict(),
        name=metadata.string("general.name", fallback_name),
    )
    for key in ("attention.value_length", "rope.dimension_count"):
        value = metadata.uint(f"{architecture}.{key}", head_dim)
        if value != head_dim:
            raise ModelLoadError(
                f"{architecture}.{key} is {value}, not the head size {head_dim}: not supported"
            )
    return config


def _refuse_gguf_variants(metadata: GGUFMetadata, architecture: str) -> None:
    scaling = metadata.string(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise ModelLoadError(f"rope scaling {scaling!r} is not supported")
    if metadata.float(f"{architecture}.rope.scale_linear", 1.0) != 1.0:
        raise ModelLoadError("rope scaling 'linear' is not supported")
    if metadata.uint(f"{architecture}.expert_count", 0) > 0:
        raise ModelLoadError("mixture-of-experts models are not supported")


def config_from_hf(document: Mapping[str, object], *, fallback_name: str) -> ModelConfig:
    """The shape that a Hugging Face ``config.json`` describes; raises ModelLoadError as config_from_gguf."""
    architecture = _hf_architecture(document)
    _refuse_hf_variants(document)
    num_heads = _integer(document, "num_attention_heads")
    hidden = _integer(document, "hidden_size")
    context = _integer(document, "max_position_embeddings", 2048)
    # Within one window sliding attention is full attention, so the window bounds the context exactly.
    window = _integer(document, "sliding_window", context)
    if not _boolean(document, "use_sliding_window", not architecture.startswith("qwen")):
        window = context  # Qwen names a window, and says whether it is used
    return ModelConfig(
        architecture=architecture,
        num_layers=_integer(document, "num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=_integer(document, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_integer(document, "num_key_value_heads", num_heads),
        head_dim=_integer(document, "head_dim", _default_head_dim(architecture, hidden, num_heads)),
        vocab_size=_integer(document, "vocab_size"),
        max_context=min(context, window),
        rope_theta=_hf_rope_theta(document),
        rms_norm_eps=_number(document, "rms_norm_eps", 1e-6),
        tie_word_embeddings=_boolean(document, "tie_word_embeddings", False),
        **FAMILIES[architecture]._asdict(),
        name=fallback_name,
    )


def _default_head_dim(architecture: str, hidden: int, num_heads: int) -> int:
    return 128 if architecture == "qwen3" else hidden // max(num_heads, 1)  # as Qwen3Config has it


def _hf_architecture(document: Mapping[str, object]) -> str:
    names = document.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ModelLoadError("config.json: 'architectures' must be a list of one name")
    if names[0] not in HF_ARCHITECTURES:
        supported = ", ".join(sorted(HF_ARCHITECTURES))
        raise ModelLoadError(f"architecture {names[0]!r} is not supported (supported: {supported})")
    return HF_ARCHITECTURES[names[0]]


def _refuse_hf_variants(document: Mapping[str, object]) -> None:
    for key in ("attention_bias", "mlp_bias", "rope_interleaved"):
        if _boolean(document, key, False):
            raise ModelLoadError(f"config.json: {key} = true is not supported")
    if document.get("quantization_config") is not None:
        raise ModelLoadError("config.json: quantised safetensors (quantization_config) are not supported")
    if document.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"config.json: hidden_act {document.get('hidden_act')!r} is not supported")
    if _number(document, "partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError("config.json: partial_rotary_factor is not supported")


def _hf_rope_theta(document: Mapping[str, object]) -> float:
    """rope_theta of either notation: flat with ``rope_scaling``, or the newer ``rope_parameters``."""
    theta = _number(document, "rope_theta", 10000.0)
    for key in ("rope_scaling", "rope_parameters"):
        rope = document.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ModelLoadError(f"config.json: {key!r} must be an object, not {_kind(rope)}")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ModelLoadError(f"rope scaling {kind!r} is not supported")
        theta = _number(rope, "rope_theta", theta)
    return theta


def _kind(value: object) -> str:
    return type(value).__name__


def _integer(document: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = document.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelLoadError(f"config.json: {key!r} must be an integer, not {_kind(value)}")
    return value


def _number(document: Mapping[str, object], key: str, default: float) -> float:
    value = document.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelLoadError(f"config.json: {key!r} must be a number, not {_kind(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ModelLoadError(f"config.json: {key!r} is too large a number") from None


def _boolean(document: Mapping[str, object], key: str, default: bool) -> bool:
    value = document.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ModelLoadError(f"config.json: {key!r} must be true or false, not {_kind(value)}")
    return value
