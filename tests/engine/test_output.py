"""Text of a generation: held back exactly as long as needed, cut exactly before the stop."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microserving.engine.output import OutputProcessor, StopMatcher
from microserving.errors import InvalidRequest
from microserving.protocol.generation import GenerationChunk, StopParams

EOS = 99
NO_STOP = StopParams()


class Pieces:
    """Token i is the i-th piece; half a code point is kept, as a real detokeniser does."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces
        self._kept = b""

    def put(self, token_id: int, /) -> str:
        if token_id >= len(self._pieces):
            return "<eos>"
        self._kept += self._pieces[token_id]
        try:
            text = self._kept.decode()
        except UnicodeDecodeError:
            return ""
        self._kept = b""
        return text

    def flush(self) -> str:
        kept, self._kept = self._kept, b""
        return kept.decode(errors="replace")


def process(*pieces: str | bytes, stop: StopParams = NO_STOP, max_output: int = 100) -> OutputProcessor:
    encoded = [p.encode() if isinstance(p, str) else p for p in pieces]
    return OutputProcessor(Pieces(*encoded), stop, frozenset({EOS}), prompt_tokens=5, max_output=max_output)


def feed(processor: OutputProcessor, tokens: list[int]) -> list[GenerationChunk]:
    """The chunks, until the last one."""
    chunks = []
    for token in tokens:
        chunk = processor.put(token)
        if chunk is not None:
            chunks.append(chunk)
            if chunk.finish_reason is not None:
                break
    return chunks


def texts(chunks: list[GenerationChunk]) -> list[str]:
    return [chunk.text for chunk in chunks]


def test_a_chunk_per_token_with_running_totals() -> None:
    chunks = feed(process("a", "b", max_output=2), [0, 1])
    assert chunks == [
        GenerationChunk("a", (0,), None, 5, 1),
        GenerationChunk("b", (1,), "length", 5, 2),
    ]


@pytest.mark.case("API-08")
def test_an_emoji_of_four_tokens_comes_whole() -> None:
    chunks = feed(process(b"\xf0", b"\x9f", b"\x98", b"\x80", "!"), [0, 1, 2, 3, 4])
    assert texts(chunks) == ["😀", "!"]
    assert chunks[0].token_ids == (0, 1, 2, 3)


@pytest.mark.case("API-04")
def test_a_stop_across_pieces_is_never_shown() -> None:
    chunks = feed(
        process("Hi ", "<|", "im_", "end|>", "x", stop=StopParams(stop=("<|im_end|>",))), [0, 1, 2, 3, 4]
    )
    assert texts(chunks) == ["Hi ", ""]
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].completion_tokens == 4
    assert [t for c in chunks for t in c.token_ids] == [0, 1, 2, 3]


def test_what_only_began_like_a_stop_is_shown_later() -> None:
    chunks = feed(process("a<", "|", "b", stop=StopParams(stop=("<|end",))), [0, 1, 2])
    assert texts(chunks) == ["a", "<|b"]


def test_a_stop_that_begins_inside_a_failed_stop() -> None:
    chunks = feed(process("a", "a", "a", "b", stop=StopParams(stop=("aab",))), [0, 1, 2, 3])
    assert texts(chunks) == ["a", ""]
    assert chunks[-1].finish_reason == "stop"


@pytest.mark.case("API-07")
def test_a_stop_that_never_comes_costs_no_text_and_no_empty_chunks() -> None:
    pieces = ["some ", "@", "@", "text", "@@nev", "er"]
    chunks = feed(process(*pieces, stop=StopParams(stop=("@@never@@",)), max_output=6), list(range(6)))
    assert "".join(texts(chunks)) == "".join(pieces)
    assert all(chunk.text for chunk in chunks)
    assert chunks[-1].finish_reason == "length"


@pytest.mark.case("API-43")
def test_empty_stops_are_ignored() -> None:
    chunks = feed(process("a", "END", "b", stop=StopParams(stop=("", "END"))), [0, 1, 2])
    assert texts(chunks) == ["a", ""]


def test_the_stop_that_is_complete_first_counts_however_the_text_is_cut() -> None:
    stop = StopParams(stop=("abc", "b"))
    assert "".join(texts(feed(process("xabc", stop=stop), [0]))) == "xa"
    assert "".join(texts(feed(process("x", "a", "b", "c", stop=stop), [0, 1, 2, 3]))) == "xa"
    longest = StopParams(stop=("c", "abc"))
    assert "".join(texts(feed(process("x", "ab", "c", stop=longest), [0, 1, 2]))) == "x"


def test_eos_ends_counts_and_is_not_shown() -> None:
    chunks = feed(process("a", "b"), [0, EOS])
    assert texts(chunks) == ["a", ""]
    assert chunks[-1] == GenerationChunk("", (EOS,), "stop", 5, 2)


def test_eos_first_gives_one_empty_last_chunk() -> None:
    assert feed(process("a"), [EOS]) == [GenerationChunk("", (EOS,), "stop", 5, 1)]


def test_ignore_eos_goes_on_but_stop_token_ids_still_count() -> None:
    stop = StopParams(ignore_eos=True, stop_token_ids=(1,))
    chunks = feed(process("a", "b", stop=stop), [0, EOS, 0, 1])
    assert texts(chunks) == ["a", "<eos>", "a", ""]
    assert chunks[-1].finish_reason == "stop"


def test_held_back_text_is_shown_when_eos_comes() -> None:
    chunks = feed(process("a<", stop=StopParams(stop=("<|",))), [0, EOS])
    assert texts(chunks) == ["a", "<"]


@pytest.mark.case("PD-30")
@pytest.mark.parametrize("most", [1, 2, 3])
def test_max_tokens_is_exact(most: int) -> None:
    chunks = feed(process("a", "b", "c", "d", max_output=most), [0, 1, 2, 3])
    assert "".join(texts(chunks)) == "abc"[:most]
    assert (chunks[-1].finish_reason, chunks[-1].completion_tokens) == ("length", most)


def test_a_stop_beats_the_limit_reached_by_the_same_token() -> None:
    assert (
        feed(process("a", "b", stop=StopParams(stop=("b",)), max_output=2), [0, 1])[-1].finish_reason
        == "stop"
    )
    assert feed(process("a", max_output=2), [0, EOS])[-1].finish_reason == "stop"


def test_half_a_code_point_at_the_end_is_flushed() -> None:
    chunks = feed(process("a", b"\xf0\x9f", max_output=2), [0, 1])
    assert "".join(texts(chunks)) == "a\ufffd"


def test_the_flush_may_complete_a_stop() -> None:
    chunks = feed(process("a", b"\xf0", stop=StopParams(stop=("a\ufffd",)), max_output=2), [0, 1])
    assert "".join(texts(chunks)) == ""
    assert chunks[-1].finish_reason == "stop"


def split_at(chunks: list[GenerationChunk], tokens: int) -> str:
    """The text of the chunks that tell no token behind the first ``tokens``."""
    told, text = 0, ""
    for chunk in chunks:
        told += len(chunk.token_ids)
        text += chunk.text if told <= tokens else ""
    return text


RESUMED: list[tuple[list[str | bytes], StopParams, int]] = [
    (["Hi ", "<|", "im_", "end|>", "x"], StopParams(stop=("<|im_end|>",)), 100),
    (["a<", "|", "b", "c"], StopParams(stop=("<|end",)), 4),
    (["a", b"\xf0", b"\x9f", b"\x98", b"\x80", "!"], NO_STOP, 6),
    (["a", b"\xf0", b"\x9f"], NO_STOP, 3),
    (["a", b"\xf0", "b"], StopParams(stop=("a\ufffd",)), 3),
    (["ab", "ab", "abc", "d"], StopParams(stop=("abab",), ignore_eos=True), 4),
    (["one", "two", "three"], StopParams(stop_token_ids=(2,)), 9),
]


@pytest.mark.case("PD-36")
@pytest.mark.parametrize(("pieces", "stop", "most"), RESUMED)
def test_a_resumed_output_goes_on_as_if_it_had_not_been_cut(
    pieces: list[str | bytes], stop: StopParams, most: int
) -> None:
    """At every token: text held back for a stop or a code point, the limit, the counts."""
    whole = feed(process(*pieces, stop=stop, max_output=most), list(range(len(pieces))))
    tokens = [token for chunk in whole for token in chunk.token_ids]
    assert whole[-1].finish_reason is not None
    for cut in range(len(tokens) + 1):
        processor = process(*pieces, stop=stop, max_output=most)
        ended = processor.resume(tokens[:cut])
        assert (ended is not None) == (cut == len(tokens))
        rest = [ended] if ended is not None else feed(processor, tokens[cut:])
        assert split_at(whole, cut) + "".join(texts(rest)) == "".join(texts(whole)), cut
        assert [t for chunk in rest for t in chunk.token_ids] == tokens[cut:]
        assert (rest[-1].finish_reason, rest[-1].completion_tokens, rest[-1].prompt_tokens) == (
            whole[-1].finish_reason,
            len(tokens),
            5,
        )


def test_what_goes_on_after_its_end_is_no_output() -> None:
    for tokens, most in [([0, EOS, 0], 9), ([0, 0, 0], 2)]:
        with pytest.raises(InvalidRequest) as refused:
            process("a", max_output=most).resume(tokens)
        assert refused.value.param == "resume_output_ids"


def test_a_preempted_output_tells_every_token_and_shows_nothing_held_back() -> None:
    pieces: list[str | bytes] = ["a", "b<", b"\xf0"]
    processor = process(*pieces, stop=StopParams(stop=("<|",)))
    assert texts(feed(processor, [0, 1])) == ["a", "b"]
    processor.put(2)
    assert processor.preempted() == GenerationChunk("", (2,), "preempt", 5, 3)


def oracle(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first end of a stop, and the longest stop that ends there."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if s and text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


letters = st.text(alphabet="ab<", max_size=12)


@settings(max_examples=500)
@given(st.lists(st.text(alphabet="ab<", max_size=4), max_size=10), st.lists(letters, max_size=3))
def test_the_matcher_equals_the_character_wise_oracle(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, stopped = StopMatcher(tuple(stops)), "", False
    expected, ends = oracle("".join(pieces), stops)
    for piece in pieces:
        text, stopped = matcher.put(piece)
        shown += text
        assert expected.startswith(shown), "something was shown that is not part of the text"
        if stopped:
            break
    if not stopped:
        shown += matcher.flush()
    assert (shown, stopped) == (expected, ends)


@settings(max_examples=300)
@given(
    st.lists(st.text(alphabet="ab<", min_size=1, max_size=3), min_size=1, max_size=8),
    st.lists(letters, min_size=1, max_size=3),
)
def test_nothing_is_held_back_without_need(pieces: list[str], stops: list[str]) -> None:
    matcher, seen, shown = StopMatcher(tuple(stops)), "", ""
    for piece in pieces:
        text, stopped = matcher.put(piece)
        if stopped:
            return
        seen, shown = seen + piece, shown + text
        held = seen[len(shown) :]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
