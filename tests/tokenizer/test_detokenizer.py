"""Streaming text: every delta is final, nothing is lost, no code point is torn."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders
from tokenizers.models import BPE

from microserving.errors import ModelLoadError
from microserving.tokenizer import IncrementalDetokenizer, Tokenizer
from microserving.tokenizer.pieces import Pieces
from tests.reference.gpt2_bpe import byte_characters

BYTE_LEVEL = {"type": "ByteLevel"}


@pytest.fixture(scope="module")
def bytewise() -> IncrementalDetokenizer:
    """A byte-level vocabulary in which id b is the single byte b, then 256 = a special and 257 = an added token."""
    library = Library(
        BPE(vocab={character: byte for byte, character in enumerate(byte_characters())}, merges=[])
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<special>"])
    library.add_tokens(["an added token"])
    return IncrementalDetokenizer(Pieces(library, BYTE_LEVEL))


def deltas(detokenizer: IncrementalDetokenizer, ids: list[int]) -> list[str]:
    return [*map(detokenizer.put, ids), detokenizer.flush()]


@pytest.mark.case("API-08")
def test_an_emoji_comes_whole(bytewise: IncrementalDetokenizer) -> None:
    assert deltas(bytewise, [0xF0, 0x9F, 0x98, 0x80]) == ["", "", "", "😀", ""]


@pytest.mark.case("API-08")
@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0xF0, 0x9F, 0x61], ["", "", "\ufffda", ""]),  # can no longer complete
        ([0xE0, 0x80], ["", "\ufffd\ufffd", ""]),  # an overlong form never could
        ([0xF0, 0x9F], ["", "", "\ufffd"]),  # cut by the end
        ([0xFF, 0x62], ["\ufffd", "b", ""]),
        ([0xC3, 256, 0xA9], ["", "", "é", ""]),  # a special token is no text
        ([0xC3, 10**9, 0xA9], ["", "", "é", ""]),  # nor is an id that does not exist
        ([257, 0x21], ["an added token", "!", ""]),
        ([-1, 0x41], ["", "A", ""]),
    ],
)
def test_partial_and_broken_code_points(
    ids: list[int], expected: list[str], bytewise: IncrementalDetokenizer
) -> None:
    assert deltas(bytewise, ids) == expected


@given(st.lists(st.integers(0, 255)))
def test_any_bytes_give_what_python_decodes(bytewise: IncrementalDetokenizer, ids: list[int]) -> None:
    assert "".join(deltas(bytewise, ids)) == bytes(ids).decode("utf-8", "replace")


@given(text=st.text())
def test_no_replacement_character_for_valid_text(bytewise: IncrementalDetokenizer, text: str) -> None:
    pieces = deltas(bytewise, list(text.replace("\ufffd", "").encode()))
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text.replace("\ufffd", "")


@given(
    ids=st.lists(
        st.one_of(st.integers(0, 49151), st.integers(0, 20), st.integers(17, 280), st.integers(0, 2**33))
    )
)
def test_any_ids_of_the_default_model_give_what_the_library_decodes(
    smollm2: Tokenizer, ids: list[int]
) -> None:
    library = Library.from_str(smollm2.to_dict()["tokenizer"]) if not _LIBRARY else _LIBRARY[0]
    _LIBRARY[:] = [library]
    whole = "".join(deltas(smollm2.detokenizer(), ids))
    assert whole == library.decode([i for i in ids if i < 2**32], skip_special_tokens=True)
    assert whole == smollm2.decode(ids)
    for skip in (True, False):
        assert smollm2.decode(ids, skip_special_tokens=skip) == library.decode(
            [i for i in ids if i < 2**32], skip_special_tokens=skip
        )


_LIBRARY: list[Library] = []


@pytest.mark.case("TK-05")
def test_an_id_beyond_the_vocabulary_is_no_text(smollm2: Tokenizer) -> None:
    assert smollm2.decode([49152, 10**6, 2**31]) == ""
    assert smollm2.detokenizer().put(49152) == ""


def test_a_token_costs_the_same_however_long_the_text_is(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("The quick brown fox 😀 jumps. ") * 2000
    detokenizer = smollm2.detokenizer()
    started = time.perf_counter()
    for token_id in ids:
        detokenizer.put(token_id)
    per_token = (time.perf_counter() - started) / len(ids)
    assert len(ids) > 15_000
    assert per_token < 50e-6


def test_flush_makes_it_new(bytewise: IncrementalDetokenizer) -> None:
    assert bytewise.put(0xC3) == ""
    assert bytewise.flush() == "\ufffd"
    assert bytewise.put(0xA9) == "\ufffd"  # no memory of the byte before
    assert bytewise.flush() == ""


def sentencepiece_library() -> tuple[Library, decoders.Decoder]:
    vocab = {
        "<unk>": 0,
        **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)},
        "▁": 257,
        "a": 258,
        "▁b": 259,
    }
    library = Library(BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens(["<unk>"])
    return library, library.decoder


@given(st.lists(st.one_of(st.sampled_from([0, 257, 258, 259]), st.sampled_from(["é", "😀", "x"]))))
def test_sentencepiece_pieces_give_what_the_library_decodes(parts: list[int | str]) -> None:
    import json

    library, _ = sentencepiece_library()
    ids = [i for part in parts for i in ([part] if isinstance(part, int) else [1 + b for b in part.encode()])]
    detokenizer = IncrementalDetokenizer(Pieces(library, json.loads(library.to_str())["decoder"]))
    assert "".join(deltas(detokenizer, ids)) == library.decode(ids)


def test_a_decoder_that_is_not_understood_is_refused() -> None:
    library = Library(BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Pieces(library, {"type": "WordPiece"})
