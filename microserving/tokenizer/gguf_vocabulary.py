"""A tokenizer of the ``tokenizers`` library from the vocabulary inside a GGUF file.

Byte-level BPE (``gpt2``) with the pre-tokenizers that the format names, and SentencePiece BPE (``llama``). The rules
are those of the models' own ``tokenizer.json``; the names are llama.cpp's ``tokenizer.ggml.pre``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library
from tokenizers import decoders as library_decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import PreTokenizer

from microserving.errors import ModelLoadError
from microserving.model_files.gguf import GGUFMetadata

MAX_PIECE_CHARS = 1024

# tokenizer.ggml.token_type
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _llama3() -> PreTokenizer:
    return _split(_LLAMA3)


def _qwen2() -> PreTokenizer:
    return _split(_QWEN2)


PRE_TOKENIZERS: dict[str, Callable[[], PreTokenizer]] = {
    "smollm": _digits_then_gpt2,
    "starcoder": _digits_then_gpt2,
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
}
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3"})
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})


def build(metadata: GGUFMetadata) -> tuple[Library, bool]:
    """The library's tokenizer, and whether a start token is put in front of every text.

    Raises ModelLoadError for a vocabulary of an unknown kind, or one that is not consistent.
    """
    kind = metadata.string("tokenizer.ggml.model")
    tokens = metadata.strings("tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelLoadError("metadata key 'tokenizer.ggml.tokens' holds a token twice")
    if kind == "gpt2":
        library, adds_bos = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        library, adds_bos = _sentencepiece(metadata, tokens, vocabulary), True
    else:
        raise ModelLoadError(f"tokenizer model {kind!r} is not supported (supported: gpt2, llama)")
    _add_special_tokens(library, metadata, tokens)
    return library, metadata.boolean("tokenizer.ggml.add_bos_token", adds_bos)


def _byte_level(metadata: GGUFMetadata, vocabulary: dict[str, int]) -> tuple[Library, bool]:
    pre = metadata.string("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"pre-tokenizer {pre!r} (tokenizer.ggml.pre) is not supported"
            f" (supported: {', '.join(sorted(PRE_TOKENIZERS))})"
        )
    merges = [_merge(text) for text in metadata.strings("tokenizer.ggml.merges")]
    library = Library(_bpe(vocabulary, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _NFC:
        library.normalizer = normalizers.NFC()
    library.pre_tokenizer = PRE_TOKENIZERS[pre]()
    library.decoder = library_decoders.ByteLevel()
    return library, pre in _WHOLE_WORDS_FIRST


def _merge(text: str) -> tuple[str, str]:
    left, space, right = text.partition(" ")
    if not (left and space and right) or " " in right:
        raise ModelLoadError(f"metadata key 'tokenizer.ggml.merges' holds {text!r}, which is not a pair")
    return left, right


def _bpe(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: object) -> BPE:
    """The library's model; it refuses a merge of tokens that do not exist."""
    try:
        return BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception for a bad merge
        raise ModelLoadError(f"the tokenizer's merges do not fit its tokens: {error}") from None


def _sentencepiece(metadata: GGUFMetadata, tokens: list[str], vocabulary: dict[str, int]) -> Library:
    _check_lengths(tokens)
    scores = metadata.floats("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelLoadError(f"the tokenizer has {len(tokens)} tokens but {len(scores)} scores")
    if np.isnan(scores).any():
        raise ModelLoadError("metadata key 'tokenizer.ggml.scores' holds a number that is not finite")
    unknown = tokens[_token_id(metadata, "unknown", tokens) or 0]
    merges = _merges_by_score(tokens, vocabulary, scores.tolist())
    library = Library(_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    prefixed = metadata.boolean("tokenizer.ggml.add_space_prefix", True)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prefixed else replace
    steps = [library_decoders.Replace("▁", " "), library_decoders.ByteFallback(), library_decoders.Fuse()]
    library.decoder = library_decoders.Sequence(
        [*steps, library_decoders.Strip(" ", 1, 0)] if prefixed else steps
    )
    return library


def _check_lengths(tokens: list[str]) -> None:
    """Every cut of every token is tried, so they must not be long."""
    longest = max(map(len, tokens), default=0)
    if not 0 < longest <= MAX_PIECE_CHARS:
        raise ModelLoadError(
            f"metadata key 'tokenizer.ggml.tokens' has a token of {longest} characters;"
            f" 1 to {MAX_PIECE_CHARS} are allowed"
        )


def _merges_by_score(
    tokens: list[str], vocabulary: dict[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best token first: what SentencePiece does at run time."""
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _token_id(metadata: GGUFMetadata, role: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in metadata:
        return None
    value = metadata.uint(key)
    if value >= len(tokens):
        raise ModelLoadError(f"metadata key {key!r} is {value}, but there are {len(tokens)} tokens")
    return value


def special_ids(metadata: GGUFMetadata) -> dict[str, int]:
    """Role (bos, eos, eot, eom, unknown, padding) -> id, for those that the file names."""
    tokens = metadata.strings("tokenizer.ggml.tokens")
    roles = ("bos", "eos", "eot", "eom", "unknown", "padding")
    found = {role: _token_id(metadata, role, tokens) for role in roles}
    return {role: token_id for role, token_id in found.items() if token_id is not None}


def _add_special_tokens(library: Library, metadata: GGUFMetadata, tokens: list[str]) -> None:
    """Control tokens are special (never shown); user-defined ones are matched whole, but are text."""
    if "tokenizer.ggml.token_type" not in metadata:
        return
    types = metadata.int32s("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise ModelLoadError(f"the tokenizer has {len(tokens)} tokens but {len(types)} token types")
    special = [tokens[i] for i in ((types == CONTROL) | (types == UNKNOWN)).nonzero()[0].tolist()]
    plain = [tokens[i] for i in (types == USER_DEFINED).nonzero()[0].tolist()]
    library.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    library.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
