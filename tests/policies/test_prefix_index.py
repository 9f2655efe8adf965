"""The index of prompt prefixes against a plain list of all that was routed, and its bounds."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microserving.policies import PrefixIndex

BLOCK = 4
routes = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "b"]), st.lists(st.integers(0, 1), max_size=20), st.sampled_from("xyz")
    ),
    max_size=12,
)


def add(index: PrefixIndex, salt: str, tokens: list[int], engine_id: str, request_id: str = "r") -> None:
    index.routed(index.look_up(salt, tokens), request_id, engine_id)


def common_blocks(one: list[int], other: list[int]) -> int:
    """Tokens in the leading blocks that both have whole."""
    count = 0
    while one[count : count + BLOCK] == other[count : count + BLOCK] and count + BLOCK <= min(
        len(one), len(other)
    ):
        count += BLOCK
    return count


@given(routes, st.sampled_from(["", "a", "b"]), st.lists(st.integers(0, 1), max_size=20))
def test_it_finds_the_longest_prefix_of_each_engine(
    routed: list[tuple[str, list[int], str]], salt: str, prompt: list[int]
) -> None:
    index = PrefixIndex(block_tokens=BLOCK)
    for own_salt, tokens, engine_id in routed:
        add(index, own_salt, tokens, engine_id)
    expected: dict[str, int] = {}
    for own_salt, tokens, engine_id in routed:
        if own_salt == salt and (common := common_blocks(tokens, prompt)):
            expected[engine_id] = max(common, expected.get(engine_id, 0))
    assert index.look_up(salt, prompt).matched == expected


@pytest.mark.case("PX-03")
@pytest.mark.parametrize(
    ("one", "other"), [("a|b", "a\0b"), ("", "None"), ("", "\0"), ("ab", "a"), ("x" * 10_240, "x" * 10_241)]
)
def test_salts_share_nothing(one: str, other: str) -> None:
    index = PrefixIndex(block_tokens=BLOCK)
    add(index, one, [1] * 40, "x")
    assert index.look_up(other, [1] * 40).matched == {}
    assert index.look_up(one, [1] * 40).matched == {"x": 40}


def test_large_and_shifted_tokens_are_told_apart() -> None:
    index = PrefixIndex(block_tokens=2)
    add(index, "", [1, 2**31 - 1, 3, 4], "x")
    assert index.look_up("", [1, 2**31 - 1, 3, 4, 5]).matched == {"x": 4}
    assert index.look_up("", [3, 4]).matched == {}  # a block counts at its place only
    assert index.look_up("", [2**31 - 1, 1]).matched == {}


def test_it_is_bounded_and_forgets_ends_before_beginnings() -> None:
    index = PrefixIndex(block_tokens=BLOCK, max_blocks=10)
    add(index, "", [1] * 32, "x")
    add(index, "", [2] * 20, "x")
    assert len(index) == 10
    assert index.look_up("", [2] * 20).matched == {"x": 20}
    assert index.look_up("", [1] * 32).matched == {"x": 20}  # 5 of 8 blocks are left, the first ones
    for seed in range(50):
        add(index, "", [random.Random(seed).randrange(9) for _ in range(100)], "x")
    assert len(index) == 10


def test_no_tokens_are_kept() -> None:
    """Digests only, under a secret of their own: two indexes have different ones for the same prompt."""
    secret_text = list(range(1000, 1064))
    one, other = PrefixIndex().look_up("", secret_text), PrefixIndex().look_up("", secret_text)
    assert len(one.digests) == 2
    assert {len(digest) for digest in one.digests} == {16}
    assert not set(one.digests) & set(other.digests)


def test_an_engine_that_has_less_than_thought_is_believed_less() -> None:
    """One with its cache switched off is soon chosen by its load alone; it recovers when hits come."""
    index = PrefixIndex(block_tokens=BLOCK)
    prompt = [1] * 400
    add(index, "", prompt, "x", "first")
    index.observe("first", "x", 0)  # nothing was expected of the first one
    assert index.look_up("", prompt).matched == {"x": 400}
    add(index, "", prompt, "x", "second")
    index.observe("second", "x", 0)
    index.observe("second", "x", 0)  # the same one again says nothing new
    assert index.look_up("", prompt).matched == {"x": 300}
    for number in range(20):
        add(index, "", prompt, "x", f"miss {number}")
        index.observe(f"miss {number}", "x", 0)
    assert index.look_up("", prompt).matched["x"] < 5
    for number in range(20):
        add(index, "", prompt, "x", f"hit {number}")
        index.observe(f"hit {number}", "x", 399)  # the last token is always computed again
    assert index.look_up("", prompt).matched["x"] > 390


def test_expectations_are_bounded() -> None:
    index = PrefixIndex(block_tokens=BLOCK)
    for number in range(10_000):
        add(index, "", [1] * 8, "x", str(number))
    assert len(index._expected) <= 4096


@pytest.mark.case("PX-13")
def test_engines_that_come_and_go_leave_nothing() -> None:
    index = PrefixIndex(block_tokens=BLOCK, max_blocks=1000)
    tokens = random.Random(1)
    for number in range(600):
        prompt = [tokens.randrange(1000) for _ in range(50 * BLOCK)]
        add(index, "", prompt, f"engine-{number % 7}", str(number))
        if number % 50 == 49:
            index.forget(f"engine-{number // 50 % 7}")
        assert len(index) <= 1000
    for number in range(7):
        index.forget(f"engine-{number}")
    assert len(index) == 0
    assert not index._trust


@pytest.mark.case("PX-01")
def test_digests_that_are_all_equal_make_it_useless_but_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match is then a wrong guess, within the prompt; the engine that is asked for it sets it right."""

    class Constant:
        def __init__(self, *_arguments: object, **_options: object) -> None:
            pass

        def digest(self) -> bytes:
            return bytes(16)

    monkeypatch.setattr("microserving.policies.prefix_index.blake2b", Constant)
    index = PrefixIndex(block_tokens=BLOCK)
    add(index, "a", [1] * 40, "x")
    assert index.look_up("b", [2] * 11).matched == {"x": 8}
    assert index.look_up("b", [2] * 3).matched == {}


@pytest.mark.case("PX-01")
def test_no_false_hits() -> None:
    index = PrefixIndex(block_tokens=2)
    tokens = random.Random(2)
    for number in range(10_000):
        prefix = index.look_up("", [number, tokens.randrange(50_000)])
        assert prefix.matched == {}
        index.routed(prefix, str(number), "x")


def test_a_restarted_engine_is_forgotten() -> None:
    index = PrefixIndex(block_tokens=BLOCK)
    add(index, "", [1] * 8, "x")
    add(index, "", [1] * 16, "y")
    index.forget("x")
    assert index.look_up("", [1] * 16).matched == {"y": 16}
    index.forget("y")
    assert len(index) == 0


@pytest.mark.case("PX-17")
def test_placement_does_not_depend_on_the_hash_seed() -> None:
    script = """
from microserving.policies import PrefixIndex
index = PrefixIndex(block_tokens=4)
for i in range(30):
    index.routed(index.look_up("s", [1, 2, 3, 4] * (i % 5) + [i] * 8), str(i), "xyz"[i % 3])
print(sorted(index.look_up("s", [1, 2, 3, 4] * 4).matched.items()))
"""
    answers = {
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("0", "1")
    }
    assert answers == {"[('x', 16), ('y', 16), ('z', 16)]\n"}
