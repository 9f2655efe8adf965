"""What is damaged, and what is then tried: each target writes one damaged input and does with it what a server does.

A target returns when the input is fine after all, and raises ModelLoadError or InvalidRequest when it is refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE

from microserving.engine.weights.packing import pack_matrix, pack_vector
from microserving.model_files import open_model
from microserving.model_files.resolved_model import ResolvedModel
from microserving.tokenizer import Tokenizer
from microserving.tokenizer.chat_template import ChatTemplate, TemplateUnusableError
from tests.fuzz.mutations import EXTREMES, changed_document, damaged, extreme_value, json_text
from tests.reference.gpt2_bpe import byte_characters
from tests.reference.model_builder import (
    GGUF_SCALARS,
    TinyShape,
    safetensors_bytes,
    tiny_gguf,
    tiny_hf_config,
    tiny_tensors,
)

SHAPE = TinyShape(layers=1, hidden=32, wide=32, heads=2, kv_heads=1)
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message.content | trim }}"
    "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor %}{% if tools %}{{ tools | tojson(indent=2) }}"
    "{% endif %}{% if add_generation_prompt %}{{- '<|im_start|>assistant' }}{% endif %}"
)
MACROS = (
    "{% macro turn(m) %}[{{ m.role | upper }}] {{ m['content'][:40] | replace('a', 'b') }}{% endmacro %}"
    "{% set ns = namespace(n=0) %}{% for m in messages if m.role in ['user', 'system'] %}"
    "{% set ns.n = ns.n + 1 %}{{ turn(m) ~ ns.n }}{% else %}{{ raise_exception('none') }}{% endfor %}"
)
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ h"]
TOKENS = [*byte_characters(), *(merge.replace(" ", "") for merge in MERGES), "<s>", "</s>", "<|im_end|>"]
PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    "▁",
    "h",
    "e",
    "▁h",
    "he",
    "▁he",
]
CHAT = [{"role": "system", "content": "Be kind. " * 5}, {"role": "user", "content": "hello a user\n"}]


def use(model: ResolvedModel) -> None:
    """What a start and a first request do with a model, without a kernel."""
    for name in model.weights.names():
        weight = model.weights.weight(name)
        (pack_matrix if len(weight.shape) == 2 else pack_vector)([weight])
    assert model.model_hash
    speak(Tokenizer.load(model))


def speak(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello hé 😀 <s> </s>", max_context=100_000)
    tokenizer.decode([*ids, 0, tokenizer.vocab_size, 2**31])
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert all(0 <= token < 2**32 for token in tokenizer.eos_token_ids)
    Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    if tokenizer.chat_unavailable is None:
        tokenizer.encode_chat(CHAT)


def vocabulary_pairs(kind: str) -> dict[str, tuple[str, Any]]:
    tokens = TOKENS if kind == "gpt2" else PIECES
    pairs: dict[str, tuple[str, Any]] = {
        "model": ("STRING", kind),
        "tokens": ("ARRAY[STRING]", list(tokens)),
        "token_type": ("ARRAY[INT32]", [1] * (len(tokens) - 3) + [3, 3, 4]),
        "bos_token_id": ("UINT32", 1),
        "eos_token_id": ("UINT32", 2),
        "add_bos_token": ("BOOL", True),
    }
    if kind == "gpt2":
        pairs |= {"pre": ("STRING", "smollm"), "merges": ("ARRAY[STRING]", list(MERGES))}
    else:
        pairs |= {"scores": ("ARRAY[FLOAT32]", [-float(i) for i in range(len(tokens))])}
    named = {f"tokenizer.ggml.{key}": value for key, value in pairs.items()}
    return {**named, "tokenizer.chat_template": ("STRING", CHATML)}


def damage_gguf(random: Random, directory: Path) -> None:
    """Bytes of a whole model file, or its metadata."""
    file = tiny_gguf(SHAPE, kind=random.choice(("f32", "q8_0", "q4_1")), pairs=vocabulary_pairs("gpt2"))
    if random.random() < 0.4:
        file.pairs = changed_pairs(random, file.pairs)
        raw = file.to_bytes()
    else:
        data = sum(len(tensor.data) for tensor in file.tensors.values())
        raw = file.to_bytes()
        raw = damaged(random, raw, len(raw) - data)
    (directory / "m.gguf").write_bytes(raw)
    use(open_model(str(directory / "m.gguf")))


def damage_vocabulary(random: Random, directory: Path) -> None:
    """The tokenizer inside a GGUF file, its file otherwise well formed."""
    file = tiny_gguf(SHAPE, pairs=changed_pairs(random, vocabulary_pairs(random.choice(("gpt2", "llama")))))
    use(open_model(str(file.write(directory / "m.gguf"))))


def changed_pairs(random: Random, pairs: dict[Any, tuple[str, Any]]) -> dict[Any, tuple[str, Any]]:
    result = dict(pairs)
    for _ in range(random.randint(1, 3)):
        key = random.choice(list(result))
        kind, value = result.pop(key)
        if random.random() < 0.15:
            continue
        result[key] = _other_value(random, kind, value)
    return result


def _other_value(random: Random, kind: str, value: Any) -> tuple[str, Any]:
    if random.random() < 0.2:  # another type
        return random.choice(
            (
                ("STRING", "1"),
                ("UINT64", 2**64 - 1),
                ("FLOAT32", float("nan")),
                ("ARRAY[STRING]", ["a"]),
                ("INT8", -1),
            )
        )
    if kind == "STRING":
        return kind, random.choice((b"", b"\xff\xfe", b"x" * 300_000, b"llama", b"qwen2", b"a\nb\0", b"none"))
    if kind == "ARRAY[STRING]":
        return kind, _other_strings(random, value)
    if kind.startswith("ARRAY"):
        item = {"INT32": -(2**31), "FLOAT32": float("nan")}[kind[6:-1]]
        return kind, random.choice(([], value[:-1], [item] * len(value), value[::-1], value * 2))
    if kind in ("FLOAT32", "FLOAT64"):
        return kind, random.choice((0.0, -1.0, 1e-38, 3e38, float("inf"), float("nan")))
    bits = 8 * len(_packed_zero(kind))
    return kind, random.choice(EXTREMES) % 2 ** (bits - 1) if kind != "BOOL" else not value


def _packed_zero(kind: str) -> bytes:
    return struct.pack(GGUF_SCALARS[kind][1], 0)


def _other_strings(random: Random, value: list[str]) -> list[Any]:
    changed: list[Any] = list(value)
    if not value:
        return ["a"]
    strange = random.choice(
        ("", " ", "a b", "\0", b"\xff", "x" * 100_000, "▁" * 50_000, "he", "\u0390", "</s>")
    )
    what = random.randrange(5)
    if what == 0:
        changed[random.randrange(len(changed))] = strange
    elif what == 1:
        del changed[random.randrange(len(changed))]
    elif what == 2:
        changed += [f"t{i}" for i in range(random.choice((1, 10, 20_000)))]
    elif what == 3:
        random.shuffle(changed)
    else:
        changed = random.choice(([], [strange], [strange] * 3))
    return changed


def damage_safetensors(random: Random, directory: Path) -> None:
    """Header, contents, index and config.json of a Hugging Face directory."""
    tensors = tiny_tensors(SHAPE, kind=random.choice(("f32", "bf16")))
    raw, config = safetensors_bytes(tensors), json.dumps(tiny_hf_config(SHAPE)).encode()
    length = int.from_bytes(raw[:8], "little")
    shard, index = "model.safetensors", b""
    what = random.randrange(4)
    if what == 0:
        raw = damaged(random, raw, 8 + length)
    elif what == 1:
        text = json_text(changed_document(random, json.loads(raw[8 : 8 + length])))
        raw = len(text).to_bytes(8, "little") + text + raw[8 + length :]
    elif what == 2:
        config = _damaged_json(random, tiny_hf_config(SHAPE))
    else:
        shard = "model-1.safetensors"
        index = _damaged_json(random, {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)})
    (directory / "config.json").write_bytes(config)
    (directory / shard).write_bytes(raw)
    if index:
        (directory / "model.safetensors.index.json").write_bytes(index)
    _write_tokenizer(directory)
    use(open_model(str(directory)))


def _damaged_json(random: Random, document: Any) -> bytes:
    if random.random() < 0.25:
        text = json_text(document)
        return damaged(random, text, len(text))
    return json_text(changed_document(random, document))


def tokenizer_document(kind: str) -> dict[str, Any]:
    """What the library writes for a small tokenizer with all the usual parts."""
    tokens, byte_level = (TOKENS, True) if kind == "gpt2" else (PIECES, False)
    merges = MERGES if byte_level else ["▁ h", "h e", "▁h e"]
    library = Library(
        BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(left, right) for left, right in (merge.split(" ") for merge in merges)],
            byte_fallback=not byte_level,
            unk_token=None if byte_level else "<unk>",
        )
    )
    if byte_level:
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    else:
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        library.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    library.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<s>", "</s>")])
    bos = tokens.index("<s>")
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    document: dict[str, Any] = json.loads(library.to_str())
    return document


def _write_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_bytes(json_text(tokenizer_document("gpt2")))


def damage_tokenizer(random: Random, directory: Path) -> None:
    """tokenizer.json and the small files beside it."""
    files: dict[str, Any] = {
        "tokenizer.json": tokenizer_document(random.choice(("gpt2", "llama"))),
        "tokenizer_config.json": {
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "chat_template": [{"name": "default", "template": CHATML}],
        },
        "special_tokens_map.json": {"bos_token": "<s>", "unk_token": None},
        "generation_config.json": {"eos_token_id": [1, 2]},
        "config.json": tiny_hf_config(SHAPE),
    }
    chosen = random.choice(("tokenizer.json",) * 3 + tuple(files)[1:-1])
    for name, document in files.items():
        raw = _damaged_json(random, document) if name == chosen else json_text(document)
        (directory / name).write_bytes(raw)
    if random.random() < 0.1:
        (directory / "chat_template.jinja").write_bytes(damaged(random, CHATML.encode(), len(CHATML)))
    (directory / "model.safetensors").write_bytes(_WEIGHTS)
    speak(Tokenizer.load(open_model(str(directory))))


_WEIGHTS = safetensors_bytes(tiny_tensors(SHAPE))
_SNIPPETS = (
    "{{ 'x' * 10**9 }}",
    "{{ ''.__class__.__mro__ }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ 'x' | center(99999) }}" * 2000,
    "{{ messages | tojson | urlize }}",
    "{{ ('(' * 100000) | urlize }}",
    "{{ ('<' * 1000000) | striptags }}",
    "{{ ('a ' * 500000) | wordwrap(1) | length }}",
    "{{ ('ab' * 500000) | list | sort | unique | list | length }}",
    "{{ [[1] * 1000] * 1000 | string | length }}",
    "{% set a = [1] * 1000 %}{{ a | map('string') | join('x' * 10000) | length }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ 1" + "+1" * 15000 + " }}",
    "{{ x" + ".a" * 15000 + " }}",
    "{% if a %}" + "{% elif b %}" * 3000 + "{% endif %}",
    "{% for a in b %}" * 50 + "{% endfor %}" * 50,
    "{{ " + "[" * 10000 + "]" * 10000 + " }}",
    "{{ " + "not " * 10000 + "1 }}",
    "{% set x = messages %}" + "{% set x = [x, x] %}" * 40 + "{{ x }}",
    "{% set x = messages %}" + "{% set x = [x, x] %}" * 40 + "{{ x == x }}{{ x | tojson }}",
    "{% include 'x' %}",
    "{% import 'os' as o %}",
    "{{ '%*d' % (10**9, 1) }}{{ '{:99999999}'.format(1) }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ messages.append(1) }}",
    "{{ (1, 2)[10**30] }}",
    "{{ undefined.a.b }}",
    "\x00",
    "\ud800",
)


def damage_template(random: Random, directory: Path) -> None:
    """A chat template's text: characters, parts repeated or lost, hostile snippets in any place."""
    source = random.choice((CHATML, MACROS))
    if random.random() < 0.5:
        source = damaged(random, source.encode(), len(source)).decode("utf-8", "replace")
    if random.random() < 0.7:
        at = random.choice((0, len(source), random.randrange(len(source) + 1)))
        source = source[:at] + random.choice(_SNIPPETS) + source[at:]
    if random.random() < 0.1:
        source = source * random.choice((5, 50, 1000))
    try:
        template = ChatTemplate(source, {"bos_token": "<s>"})
    except TemplateUnusableError:
        return
    odd = random.choice(
        (CHAT, [{"role": "user", "content": json.dumps(str(extreme_value(random)))[:100_000]}])
    )
    template.render(odd, tools=[{"type": "function", "function": {"name": "f"}}])


TARGETS: dict[str, Callable[[Random, Path], None]] = {
    "gguf": damage_gguf,
    "vocabulary": damage_vocabulary,
    "safetensors": damage_safetensors,
    "tokenizer": damage_tokenizer,
    "template": damage_template,
}
