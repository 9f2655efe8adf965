"""Texts that cannot fit are refused untouched, those that could never are; long ones do not hold the GIL."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE, WordLevel

from microserving.errors import ContextLengthExceeded
from microserving.model_files import GGUFMetadata
from microserving.tokenizer import Tokenizer
from microserving.tokenizer.text_bound import NFC_SHRINKS, text_bound
from tests.reference.gpt2_bpe import byte_characters
from tests.tokenizer.texts import texts

BYTES = {character: byte for byte, character in enumerate(byte_characters())}
WORDS = {**BYTES, "aa": 256, "aaa": 257}
BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}


def byte_level(vocab: dict[str, int] | None = None) -> Library:
    library = Library(BPE(vocab=vocab or WORDS, merges=[("a", "a"), ("aa", "a")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return library


def bound(library: Library) -> int | None:
    found = text_bound(json.loads(library.to_str()))
    return None if found is None else found.bytes_per_token


def test_the_longest_token_of_the_default_model(smollm2: Tokenizer, smollm2_metadata: GGUFMetadata) -> None:
    longest = max(map(len, smollm2_metadata.strings("tokenizer.ggml.tokens")))  # a character is a byte
    assert smollm2.text_bytes_per_token == longest == 81


def test_bounds_of_families() -> None:
    assert bound(byte_level()) == 3
    with_text = byte_level()
    with_text.add_tokens(["é€é"])
    assert bound(with_text) == 2 + 3 + 2
    composing = byte_level()
    composing.normalizer = normalizers.NFC()
    assert bound(composing) == 3 * NFC_SHRINKS
    fallback = BPE(vocab={**BYTE_TOKENS, "▁aé": 256, "<unk>": 257}, merges=[], byte_fallback=True)
    sentencepiece = Library(fallback)
    sentencepiece.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    assert bound(sentencepiece) == len("<0x00>")  # as they are written; their text is shorter


def stripping(library: Library) -> None:
    library.normalizer = normalizers.Strip()


def deleting(library: Library) -> None:
    library.normalizer = normalizers.Replace("ab", "")


def splitting(library: Library) -> None:
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
    )


def removing(library: Library) -> None:
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )


def swallowing(library: Library) -> None:
    library.add_tokens([AddedToken("<mask>", lstrip=True)])


@pytest.mark.parametrize("change", [stripping, deleting, splitting, removing, swallowing])
def test_where_text_may_vanish_there_is_no_bound(change: Callable[[Library], None]) -> None:
    library = byte_level()
    change(library)
    assert bound(library) is None


def without(text: str, **options: Any) -> Library:
    """No tokens for the bytes of ``text``."""
    missing = {byte_characters()[byte] for byte in text.encode()}
    library = byte_level()
    library.model = BPE(vocab={c: i for c, i in WORDS.items() if c not in missing}, merges=[], **options)
    return library


def test_bytes_without_a_token_do_not_count() -> None:
    found = text_bound(json.loads(without("\x04\x06").to_str()))
    assert found is not None
    assert found.bytes_per_token == 3
    assert set(found.dropped) == {4, 6}
    assert found.may_fit(b"\x04\x06" * 1000 + b"a" * 30, 10)
    assert not found.may_fit(b"\x04\x06" * 1000 + b"a" * 31, 10)
    composing = without("\x04")
    composing.normalizer = normalizers.NFC()
    assert bound(composing) == 3 * NFC_SHRINKS


def test_where_whole_texts_may_have_no_token_there_is_no_bound() -> None:
    assert bound(without("z", unk_token="a", fuse_unk=True)) is None
    composing = without("é")
    composing.normalizer = normalizers.NFC()
    assert bound(composing) is None
    assert bound(Library(BPE(vocab=BYTES, merges=[]))) is None
    assert bound(Library(WordLevel(vocab={"a": 0}, unk_token="a"))) is None


def test_how_far_nfc_shrinks() -> None:
    """Every code point that decomposes, against the longest text with the same decomposition."""
    points = [chr(point) for point in range(0x30000) if not 0xD800 <= point < 0xE000]  # later ones never do
    heaviest: dict[str, int] = {}
    for point in points:
        decomposed = unicodedata.normalize("NFD", point)
        if len(decomposed) == 1:
            heaviest[decomposed] = max(heaviest.get(decomposed, 0), len(point.encode()))

    def longest(text: str) -> int:
        return sum(heaviest[point] for point in unicodedata.normalize("NFD", text))

    # No code point is longer than its parts at their longest, so no text is; and no composed one is that much shorter.
    assert all(len(point.encode()) <= longest(point) for point in points)
    assert max(longest(point) / len(point.encode()) for point in points) <= NFC_SHRINKS


@given(st.text(max_size=60) | st.text("aaaé\u0308\u0301ι ΐ\u212a`\u1fef", max_size=60))
def test_no_text_is_longer_than_its_tokens_allow(text: str) -> None:
    library = byte_level()
    library.normalizer = normalizers.NFC()
    per_token = bound(library)
    assert per_token is not None
    assert len(text.encode()) <= per_token * len(library.encode(text).ids)


def test_the_default_models_texts_are_within_the_bound(smollm2: Tokenizer) -> None:
    per_token = smollm2.text_bytes_per_token
    assert per_token is not None
    assert all(
        len(text.encode()) <= per_token * len(smollm2.encode(text)) for text in texts() if text.isprintable()
    )


@pytest.mark.parametrize("text", ["\x04" * 1000, "\U000f0000" * 8, "\x04 " * 9, "a" * 31])
def test_no_text_that_fits_is_refused(smollm2: Tokenizer, text: str) -> None:
    tokens = len(smollm2.encode(text))
    assert len(smollm2.encode(text, max_context=tokens)) == tokens


class Recording:
    """A library that tells which of its calls were used."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._library, name)


@pytest.fixture
def library(smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Recording:
    recording = Recording(smollm2._library)
    monkeypatch.setattr(smollm2, "_library", recording)
    return recording


def test_a_text_that_cannot_fit_is_refused_untouched(smollm2: Tokenizer, library: Recording) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        smollm2.encode("é" * 41 + " " * 81 * 9, max_context=10)
    assert caught.value.param == "prompt"
    with pytest.raises(ContextLengthExceeded) as caught:
        smollm2.encode_chat([{"role": "user", "content": "a" * 1000}], max_context=10)
    assert caught.value.param == "messages"
    assert library.calls == []


def test_a_text_at_the_bound_is_tokenised(smollm2: Tokenizer) -> None:
    longest = smollm2.decode([46778])
    assert len(longest) == 81
    assert smollm2.encode(longest * 10, max_context=10) == [46778] * 10


@pytest.mark.parametrize("text", ["a" * 50_000, "many words of text " * 500, "日本語" * 3000, "\n 1" * 4000])
def test_long_texts_take_the_call_that_lets_other_threads_run(
    smollm2: Tokenizer, library: Recording, text: str
) -> None:
    ids = smollm2.encode(text)
    assert library.calls == ["encode_batch_fast"]
    assert ids == library._library.encode(text, add_special_tokens=False).ids


def test_short_texts_do_not_wait_for_the_librarys_threads(smollm2: Tokenizer, library: Recording) -> None:
    smollm2.encode("a short text")
    assert library.calls == ["encode"]
