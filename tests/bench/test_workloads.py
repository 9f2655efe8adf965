"""Prompts have the lengths that are asked for, and are the same whenever the seed is."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.bench.arrivals import Constant, Poisson, Replay
from microserving.bench.lengths import Lengths
from microserving.bench.texts import Prose, by_length, sonnets
from microserving.bench.trace import offsets, read_trace
from microserving.bench.workloads import (
    Ask,
    Chat,
    Mix,
    Phase,
    Sampling,
    SharedPrefix,
    Style,
    Synthetic,
    Trace,
    TraceEntry,
    Workload,
)
from microserving.errors import ConfigError


def words(text: str) -> float:
    """A tokenizer whose tokens are words."""
    return len(text.split())


STYLE = Style(Prose(words), Sampling(model="m"))
TEN = Lengths.parse("10")


def first(workload: Workload, number: int = 0) -> Ask:
    return next(workload.session(number))


def prompts(workload: Workload, count: int = 20) -> list[str]:
    return [first(workload, number).body["prompt"] for number in range(count)]


def test_there_are_154_sonnets() -> None:
    assert len(sonnets()) == 154
    assert sonnets()[17].startswith("Shall I compare thee to a summer's day?")
    assert all(poem.isascii() for poem in sonnets())


@given(st.integers(1, 900), st.integers(0, 99))
def test_a_passage_has_as_many_tokens_as_wanted(tokens: int, seed: int) -> None:
    text = Prose(words).passage(random.Random(seed), tokens)
    assert words(text) == tokens
    assert text == Prose(words).passage(random.Random(seed), tokens)


def test_a_passage_measured_by_length_is_no_longer() -> None:
    count = by_length(4.0)
    for tokens in (10, 100, 700):
        text = Prose(count).passage(random.Random(tokens), tokens)
        assert tokens - 4 <= count(text) <= tokens


@pytest.mark.parametrize(
    ("text", "mean", "deviation"),
    [
        ("600", 600, 0),
        ("uniform:400:800", 600, 115.5),
        ("normal:600:100", 600, 100),
        ("exponential:600", 600, 600),
        ("lognormal:600:0.5", 679.9, 362.3),
    ],
)
def test_lengths(text: str, mean: float, deviation: float) -> None:
    draw = random.Random(1)
    found = [Lengths.parse(text).sample(draw) for _ in range(20_000)]
    assert min(found) >= 1
    assert np.mean(found) == pytest.approx(mean, rel=0.03)
    assert np.std(found) == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0",
        "-1",
        "uniform:1",
        "uniform:50:10",
        "normal:1:2:3",
        "nan",
        "1e99",
        "weibull:1:2",
        ":1",
        "lognormal:600:100",
    ],
)
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(ValueError, match="is no length in tokens"):
        Lengths.parse(text)


def test_no_length_is_endless() -> None:
    wide = Lengths.parse("lognormal:1000000:4")
    assert max(wide.sample(random.Random(seed)) for seed in range(99)) == 1_000_000


def test_synthetic_prompts_differ_and_come_again() -> None:
    workload = Synthetic(STYLE, TEN, Lengths.parse("60"))
    assert len(set(prompts(workload))) == 20
    assert prompts(workload) == prompts(Synthetic(STYLE, TEN, Lengths.parse("60")))
    assert first(workload).path == "/completions"
    assert {key: first(workload, 4).body[key] for key in ("model", "max_tokens", "seed", "ignore_eos", "stream")} == {
        "model": "m", "max_tokens": 60, "seed": 4, "ignore_eos": True, "stream": True
    }  # fmt: skip
    other = Style(STYLE.prose, STYLE.sampling, seed=1)
    assert prompts(Synthetic(other, TEN, TEN)) != prompts(workload)


def test_fields_of_ones_own_win() -> None:
    sampling = Sampling(ignore_eos=False, extra={"temperature": 0, "cache_salt": "s"})
    body = first(Synthetic(Style(STYLE.prose, sampling), TEN, TEN)).body
    assert (body["temperature"], body["cache_salt"]) == (0, "s")
    assert not {"model", "ignore_eos"} & set(body)


def test_the_chat_endpoint_asks_the_same_as_a_message() -> None:
    ask = first(Synthetic(Style(STYLE.prose, STYLE.sampling, "chat"), TEN, TEN))
    assert ask.path == "/chat/completions"
    assert ask.body["messages"][0]["content"].startswith(prompts(Synthetic(STYLE, TEN, TEN), 1)[0])


def test_shared_prefixes() -> None:
    workload = SharedPrefix(STYLE, TEN, TEN, prefix_tokens=40, prefixes=3)
    texts = prompts(workload, 60)
    assert {words(text) for text in texts} == {50}
    assert len({" ".join(text.split()[:40]) for text in texts}) == 3
    assert len(set(texts)) == 60


def test_a_mix_goes_through_its_phases_again_and_again() -> None:
    workload = Mix(STYLE, [Phase.parse("30/2x2"), Phase.parse("5/40x1")])
    asks = [first(workload, number) for number in range(6)]
    assert [ask.phase for ask in asks] == ["30/2", "30/2", "5/40"] * 2
    assert [(words(ask.body["prompt"]), ask.body["max_tokens"]) for ask in asks[:3]] == [
        (30, 2),
        (30, 2),
        (5, 40),
    ]
    assert len(set(prompts(workload, 6))) == 6


@pytest.mark.parametrize("text", ["", "600/20", "600x30", "600/20x0", "600/20x-1", "a/bx1"])
def test_what_is_no_phase(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no (phase|length)"):
        Phase.parse(text)


def test_later_turns_of_a_chat_wait_and_begin_like_the_earlier_ones() -> None:
    session = Chat(STYLE, TEN, TEN, turns=2, think_s=3.0, system_tokens=7).session(5)
    one = next(session)
    said = json.dumps(one.body["messages"])
    two = session.send("answered")
    assert one.think_s == 0
    assert two.think_s > 0
    assert json.dumps(two.body["messages"]).startswith(said[:-1])
    with pytest.raises(StopIteration):
        session.send("")


def test_a_chat_makes_all_its_texts_before_the_first_turn() -> None:
    """To make one takes the client a while, in which it could not take down when others' tokens came."""
    counted: list[str] = []

    def count(text: str) -> float:
        counted.append(text)
        return words(text)

    session = Chat(Style(Prose(count), Sampling()), TEN, TEN, turns=3, think_s=0.0, system_tokens=0).session(
        5
    )
    next(session)
    before = len(counted)
    session.send("a")
    session.send("b")
    assert before == len(counted) > 0


def test_poisson_arrivals_are_the_same_at_every_rate_and_independent() -> None:
    slow, fast = (list(islice(Poisson(rate, seed=2).times(), 20_000)) for rate in (1.0, 4.0))
    assert slow == pytest.approx([4 * at for at in fast])
    gaps = np.diff(slow)
    assert np.mean(gaps) == pytest.approx(1.0, rel=0.03)
    assert np.std(gaps) == pytest.approx(1.0, rel=0.03)
    assert list(islice(Constant(4.0).times(), 3)) == [0.0, 0.25, 0.5]
    assert list(Replay((0.0, 3.0), 3.0).times()) == [0.0, 1.0]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_a_trace(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"timestamp": 9000, "prompt": "Hello", "max_tokens": 3},
        "",
        {"timestamp": 8000, "input_length": 12, "output_length": 4, "hash_ids": [1]},
        {"timestamp": 8500.5, "messages": [{"role": "user", "content": "Hi"}], "output_tokens": 5},
    )
    entries = read_trace(path, milliseconds=True)
    assert offsets(entries) == pytest.approx([0.0, 0.5005, 1.0])
    trace = Trace(STYLE, entries, "t")
    asks = [first(trace, number) for number in range(len(trace))]
    assert words(asks[0].body["prompt"]) == 12
    assert asks[1].body["messages"] == [{"role": "user", "content": "Hi"}]
    assert (asks[2].body["prompt"], asks[2].body["max_tokens"]) == ("Hello", 3)
    assert entries[2] == TraceEntry(9.0, 3, 0, "Hello")


def test_a_line_of_a_trace_ends_where_jsonl_says(tmp_path: Path) -> None:
    """Some editors write a byte order mark, and a text may have Unicode's own line ends in it."""
    path = tmp_path / "t.jsonl"
    line = json.dumps({"timestamp": 0, "prompt": "a\u2028b\x85c", "max_tokens": 1}, ensure_ascii=False)
    path.write_text(f"\ufeff{line}\r\n", "utf-8")
    assert [entry.prompt for entry in read_trace(path)] == ["a\u2028b\x85c"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ([1], "not an object"),
        ({}, "timestamp must be a number, 0 or more"),
        ({"timestamp": True}, "timestamp must be a number, 0 or more"),
        ('{"timestamp": NaN}', "timestamp must be a number, 0 or more"),
        ({"timestamp": 1}, "input_tokens must be a number of tokens, 1 or more"),
        ({"timestamp": 1, "prompt": "a"}, "output_tokens must be a number of tokens, 1 or more"),
        ({"timestamp": 1, "prompt": 5, "max_tokens": 1}, "prompt must be a text"),
        ({"timestamp": 1, "messages": ["a"], "max_tokens": 1}, "messages must be a list of objects"),
        ({"timestamp": 1, "messages": [], "max_tokens": 1}, "messages must not be empty"),
        ({"timestamp": 1, "prompt": "\ud800", "max_tokens": 1}, "half of a surrogate pair is no text"),
        (
            {"timestamp": 1, "messages": [{"\udfff": 1}], "max_tokens": 1},
            "half of a surrogate pair is no text",
        ),
    ],
)
def test_a_fault_in_a_trace_names_its_line(tmp_path: Path, line: Any, reason: str) -> None:
    path = write(tmp_path / "t.jsonl", {"timestamp": 0, "prompt": "a", "max_tokens": 1}, line)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert caught.value.message == f"{path}:2: {reason}"


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the trace"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(write(tmp_path / "empty"))
