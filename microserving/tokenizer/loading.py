"""Makes a Tokenizer from a model's files: a GGUF file's metadata, or ``tokenizer.json`` and the files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library

from microserving.errors import InvalidRequest, ModelLoadError
from microserving.model_files.gguf import GGUFMetadata
from microserving.model_files.mapped_file import read_bytes, read_json
from microserving.model_files.resolved_model import ResolvedModel
from microserving.tokenizer import gguf_vocabulary
from microserving.tokenizer.panics import raising
from microserving.tokenizer.tokenizer import Tokenizer, TokenizerFacts

MAX_TEMPLATE_BYTES = 2**20
MAX_TOKENIZER_BYTES = 128 * 2**20
_UNUSABLE = "not a tokenizer that can be used; the file is damaged or too new"
_PROBE = "a <s> Hé1 😀\n"
"""Spaces, an accent, a digit, an emoji, a control character: a tokenizer that fails on a request should fail here."""

# Control tokens that end a turn in the families we know; a GGUF file names only one of them as its EOS.
_END_OF_TURN = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "</s>",
)

# Classes that build their own post-processor from ``add_bos_token``; the others only follow tokenizer.json.
_BOS_BY_CONFIG = ("LlamaTokenizer", "LlamaTokenizerFast")


def load_tokenizer(model: ResolvedModel) -> Tokenizer:
    """The tokenizer that comes with ``model``; raises ModelLoadError naming the file."""
    with model.naming():
        tokenizer = _opened(model.tokenizer_source)
        _check_fits(tokenizer, model.config.vocab_size)
    return tokenizer


def _opened(source: GGUFMetadata | Path) -> Tokenizer:
    with raising(ModelLoadError(f"the tokenizer is {_UNUSABLE}")):
        tokenizer = from_directory(source) if isinstance(source, Path) else from_gguf(source)
        try:
            tokenizer.decode(tokenizer.encode(_PROBE))
        except InvalidRequest as error:
            raise ModelLoadError(error.message) from None
    return tokenizer


def _check_fits(tokenizer: Tokenizer, rows: int) -> None:
    """Raises ModelLoadError unless a model with ``rows`` embeddings can say every token, and the end."""
    if tokenizer.vocab_size == 0:
        raise ModelLoadError("the tokenizer has no tokens")
    if tokenizer.vocab_size > rows:
        raise ModelLoadError(f"the tokenizer has {tokenizer.vocab_size} tokens, but the model only {rows}")
    if any(token_id >= rows for token_id in tokenizer.eos_token_ids):
        raise ModelLoadError(f"an 'eos_token_id' lies beyond the model's {rows} tokens")


def from_gguf(metadata: GGUFMetadata) -> Tokenizer:
    library, adds_bos = gguf_vocabulary.build(metadata)
    ids = gguf_vocabulary.special_ids(metadata)
    special = {token_id for token_id, token in library.get_added_tokens_decoder().items() if token.special}
    by_text = {token_id for token_id in special if library.id_to_token(token_id) in _END_OF_TURN}
    bos, eos = ids.get("bos"), ids.get("eos")
    adds_eos = metadata.boolean("tokenizer.ggml.add_eos_token", False)
    template_key = "tokenizer.chat_template"
    facts = TokenizerFacts(
        bos_token_id=bos,
        eos_token_ids=tuple(sorted(by_text | {ids[role] for role in ("eos", "eot", "eom") if role in ids})),
        prefix_ids=(bos,) if adds_bos and bos is not None else (),
        suffix_ids=(eos,) if adds_eos and eos is not None else (),
        special_tokens=_special_texts(library, ids),
        chat_template=metadata.string(template_key) if template_key in metadata else None,
    )
    return Tokenizer(library, facts)


def _special_texts(library: Library, ids: Mapping[str, int]) -> dict[str, str]:
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    texts = {name: library.id_to_token(ids[role]) for role, name in names.items() if role in ids}
    return {name: text for name, text in texts.items() if text is not None}


def from_directory(directory: Path) -> Tokenizer:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(
            f"{directory}: there is no tokenizer.json, the one kind of tokenizer that is read"
        )
    source = read_bytes(path, MAX_TOKENIZER_BYTES)
    with raising(ModelLoadError(f"{path}: {_UNUSABLE}")):
        library = Library.from_buffer(source)
    config = _optional_json(directory / "tokenizer_config.json")
    special = _special_tokens(_optional_json(directory / "special_tokens_map.json")) | _special_tokens(config)
    bos = _known_id(library, special.get("bos_token"))
    prefix, suffix = _surroundings(library)
    if config.get("tokenizer_class") in _BOS_BY_CONFIG and bos is not None:
        prefix = _with_bos(prefix, bos, config.get("add_bos_token"))
    facts = TokenizerFacts(
        bos_token_id=bos,
        eos_token_ids=_eos_ids(directory, library, special),
        prefix_ids=prefix,
        suffix_ids=suffix,
        special_tokens=special,
        chat_template=_chat_template(directory, config),
    )
    return Tokenizer(library, facts)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like: text, or an object with the text in ``content``."""
    found: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _known_id(library: Library, token: str | None) -> int | None:
    if token is None or not is_unicode(token):
        return None
    found: int | None = library.token_to_id(token)
    return found


def is_unicode(text: str) -> bool:
    """Whether ``text`` has an encoding: JSON may hold half a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _surroundings(library: Library) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a text."""
    plain = library.encode("a", add_special_tokens=False).ids
    whole = library.encode("a", add_special_tokens=True).ids
    for begin in range(len(whole) - len(plain) + 1):
        if whole[begin : begin + len(plain)] == plain:
            return tuple(whole[:begin]), tuple(whole[begin + len(plain) :])
    raise ModelLoadError(
        "the tokenizer's post-processor changes the text's own tokens, which is not supported"
    )


def _with_bos(prefix: tuple[int, ...], bos: int, wanted: object) -> tuple[int, ...]:
    if wanted is True and bos not in prefix:
        return (bos, *prefix)
    if wanted is False:
        return tuple(token for token in prefix if token != bos)
    return prefix


def _eos_ids(directory: Path, library: Library, special: Mapping[str, str]) -> tuple[int, ...]:
    """From generation_config.json, else config.json; always with the tokenizer's own EOS."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _optional_json(directory / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(item) is int and item >= 0 for item in ids):
            raise ModelLoadError(
                f"{directory / name}: 'eos_token_id' must be an integer or a list of integers"
            )
        found.update(ids)
        if found:
            break
    own = _known_id(library, special.get("eos_token"))
    return tuple(sorted(found if own is None else found | {own}))


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else ``chat_template`` of tokenizer_config.json (text, or a list with one ``default``)."""
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return read_bytes(path, MAX_TEMPLATE_BYTES).decode()
        except UnicodeDecodeError as error:
            raise ModelLoadError(f"{path}: cannot be read: {error}") from None
    value = config.get("chat_template")
    if isinstance(value, list):
        named = [item for item in value if isinstance(item, dict) and item.get("name") == "default"]
        value = named[-1].get("template") if named else None
    return value if isinstance(value, str) else None
