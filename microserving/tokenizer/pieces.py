"""What each token id contributes to the text, as bytes, and the incremental decoder over that.

Two families of decoders are known: byte-level BPE (GPT-2's byte alphabet) and SentencePiece with byte fallback.
The text of a sequence is the bytes of its non-special tokens, decoded as UTF-8 with U+FFFD for every maximal
ill-formed part; nothing here keeps or re-decodes earlier tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer as Library

from microserving.errors import ModelLoadError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level alphabet: printable Latin-1 stands for itself, the rest from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


class Pieces:
    """Token id -> bytes of one tokenizer. Thread-safe: a cache entry is always the same value.

    strips_first_space: the decoder drops one space at the very beginning of the text.
    """

    def __init__(self, library: Library, decoder: dict[str, Any] | None) -> None:
        kinds = list(_flatten(decoder))
        names = {kind["type"] for kind in kinds}
        self._library = library
        self._byte_level = names == {"ByteLevel"}
        if not self._byte_level and not names <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
            raise ModelLoadError(f"the tokenizer's decoder {sorted(names)} is not supported")
        self._byte_fallback = "ByteFallback" in names
        self._replacements = [
            _replacement(kind) for kind in kinds if kind["type"] in ("Replace", "Metaspace")
        ]
        self.strips_first_space = any(map(_strips, kinds))
        self._alphabet = byte_alphabet()
        self._special = {
            token_id for token_id, token in library.get_added_tokens_decoder().items() if token.special
        }
        self._cache: dict[int, bytes] = {}

    def special(self, token_id: int) -> bool:
        return token_id in self._special

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for an id that the vocabulary does not have."""
        found = self._cache.get(token_id)
        if found is None:
            token = self._library.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            found = b"" if token is None else self._convert(token)
            self._cache[token_id] = found
        return found

    def _convert(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes(self._alphabet[character] for character in token)
            except KeyError:  # an added token, stored as plain text
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if match:
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _flatten(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _flatten(inner)
    else:
        yield decoder


def _replacement(kind: dict[str, Any]) -> tuple[str, str]:
    if kind["type"] == "Metaspace":
        return str(kind["replacement"]), " "
    pattern = kind["pattern"].get("String")
    if not isinstance(pattern, str):
        raise ModelLoadError(
            "the tokenizer's decoder replaces by a regular expression, which is not supported"
        )
    return pattern, str(kind["content"])


def _strips(kind: dict[str, Any]) -> bool:
    if kind["type"] == "Metaspace":
        return str(kind.get("prepend_scheme", "always")) != "never"
    if kind["type"] != "Strip":
        return False
    if (kind["content"], kind["start"], kind["stop"]) != (" ", 1, 0):
        raise ModelLoadError(
            "the tokenizer's decoder strips more than one leading space, which is not supported"
        )
    return True


class IncrementalDetokenizer:
    """Turns one sequence's ids into text as they come: the deltas and the flush, joined, are the decoded whole.

    A code point whose bytes are not all there yet is held back; bytes that can never complete one become U+FFFD.
    Special tokens and unknown ids give "". Each call costs the length of its token. Used from one thread.
    """

    def __init__(self, pieces: Pieces, *, skip_special_tokens: bool = True) -> None:
        self._pieces = pieces
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = pieces.strips_first_space

    def put(self, token_id: int) -> str:
        """The text that has become certain with this token; may be empty."""
        if self._skip_special and self._pieces.special(token_id):
            return ""
        return self._strip(self._utf8.decode(self._pieces.bytes_of(token_id)))

    def flush(self) -> str:
        """What was held back, U+FFFD for an unfinished code point; afterwards it is as new."""
        rest = self._strip(self._utf8.decode(b"", final=True))
        self._utf8.reset()
        self._at_start = self._pieces.strips_first_space
        return rest

    def _strip(self, text: str) -> str:
        if not self._at_start or not text:
            return text
        self._at_start = False
        return text.removeprefix(" ")
