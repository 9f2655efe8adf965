"""How much text some tokens can stand for at most, read off a tokenizer's own JSON.

So that a text which cannot fit a context is known before it is tokenised. Errs on the long side only: wherever text
might vanish (stripped, fused, or replaced by something unknown to us) there is no bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from microserving.tokenizer.pieces import byte_alphabet

NFC_SHRINKS: Final = 4
"""A text has at most this many times the UTF-8 bytes of its NFC form (the worst code point, U+0390, stays below)."""
_NFC_KEEPS: Final = frozenset([*range(0x20), 0x7F, 0xC0, 0xC1, *range(0xF1, 0xF4), *range(0xF5, 0x100)])
"""Bytes that NFC neither makes nor takes: controls, first bytes of planes 4 to 15, and what is never in UTF-8."""
_KEEPING_PRE_TOKENIZERS: Final = ("ByteLevel", "Digits", "Metaspace", "Split")


@dataclass(frozen=True, slots=True)
class TextBound:
    """bytes_per_token: UTF-8 bytes that one token stands for at most. dropped: bytes without a token, which the
    library leaves out."""

    bytes_per_token: int
    dropped: bytes = b""

    def may_fit(self, text: bytes, tokens: int) -> bool:
        """False when ``text`` certainly gives more than ``tokens`` tokens."""
        most = tokens * self.bytes_per_token
        return len(text) <= most or (bool(self.dropped) and len(text.translate(None, self.dropped)) <= most)


def text_bound(document: Mapping[str, Any]) -> TextBound | None:
    """None when there is none. document: the parsed ``tokenizer.json``."""
    model, added = document["model"], document["added_tokens"]
    pre_tokenizers = list(_steps(document["pre_tokenizer"], "pretokenizers"))
    steps = list(_steps(document["normalizer"], "normalizers"))
    if (
        model["type"] != "BPE"
        or not all(map(_keeps_text, pre_tokenizers))
        or any(token["lstrip"] or token["rstrip"] for token in added)
    ):
        return None
    byte_level = any(step["type"] == "ByteLevel" for step in pre_tokenizers)
    dropped = _dropped(model, byte_level)
    shrinks = _shrinks(steps)
    if dropped is None or shrinks is None or (steps and not _NFC_KEEPS.issuperset(dropped)):
        return None
    # One character of the byte alphabet is one byte; "▁" (3 bytes) stands for a space: the longer one is taken.
    words = max((len(token) if byte_level else len(token.encode()) for token in model["vocab"]), default=1)
    longest = max([words, *(len(token["content"].encode()) for token in added)])
    return TextBound(shrinks * longest, dropped)


def _steps(part: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    """``part`` without its nested sequences. inner: what a sequence calls its members."""
    if part is None:
        return
    if part["type"] == "Sequence":
        for step in part[inner]:
            yield from _steps(step, inner)
    else:
        yield part


def _keeps_text(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return kind in _KEEPING_PRE_TOKENIZERS and pre_tokenizer.get("behavior", "") != "Removed"


def _dropped(model: Mapping[str, Any], byte_level: bool) -> bytes | None:
    """The bytes that have no token; None when whole texts may have none (or one unknown token together)."""
    vocab = model["vocab"]
    if byte_level:
        dropped = [byte for character, byte in byte_alphabet().items() if character not in vocab]
        return bytes(dropped) if not dropped or model["unk_token"] is None else None
    complete = model["byte_fallback"] and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    return b"" if complete else None


def _shrinks(normalizers: list[Mapping[str, Any]]) -> int | None:
    """How many times shorter the text may become; None when not known."""
    factor = 1
    for step in normalizers:
        if step["type"] == "NFC":
            factor *= NFC_SHRINKS
        elif step["type"] == "Replace":
            old, new = step["pattern"].get("String"), step["content"]
            if not old or len(new.encode()) < len(old.encode()) or not _NFC_KEEPS.isdisjoint(new.encode()):
                return None
        elif step["type"] != "Prepend":
            return None
    return factor
