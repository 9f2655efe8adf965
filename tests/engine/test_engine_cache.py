"""The prefix cache changes what is computed and sent, never what is said: every state of it against a cold engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict

import pytest

from microserving.engine.fake_runner import FakeRunner
from microserving.engine.jobs import Counters
from microserving.engine.runner import RunnerChunk
from microserving.errors import InternalError, InvalidRequest, LeaseError

from .harness import (
    GREEDY,
    SEEDED,
    Clock,
    Node,
    Outcome,
    alone,
    greedy_reference,
    hand_over,
    prompt_of,
)

PROMPT = prompt_of(50, salt=6)


def warm(node: Node, tokens: int, prompt: Sequence[int] = PROMPT) -> None:
    """Let the engine have seen the first ``tokens`` of the prompt (with one more, another one's)."""
    if tokens:
        node.submit([*prompt[:tokens], 255 - prompt[tokens] if tokens < len(prompt) else 1], 1)
        node.run()
        node.assert_idle()


@pytest.mark.case("PD-44")
@pytest.mark.case("PX-15")
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("seen", [0, 1, 15, 16, 17, 32, 40, 49, 50])
def test_a_warm_engine_says_what_a_cold_one_says(seen: int, sampling: object) -> None:
    expected = alone(PROMPT, 6, sampling)  # type: ignore[arg-type]
    node = Node(chunk_size_tokens=16)
    warm(node, seen)
    before = node.engine.load().counters
    for round_ in range(3):
        outcome = node.submit(PROMPT, 6, sampling)  # type: ignore[arg-type]
        node.run()
        assert outcome.tokens == expected
        cached = outcome.chunks[-1].cached_tokens
        assert cached == min(49, 49 if round_ else seen)
        counters = node.engine.load().counters
        assert counters.prompt_tokens_computed - before.prompt_tokens_computed == 50 - cached
        assert counters.prefix_hit_tokens - before.prefix_hit_tokens == cached
        before = counters
        node.assert_idle()


def test_the_reference_itself_is_the_model() -> None:
    assert alone(PROMPT, 6) == greedy_reference(PROMPT, 6)


@pytest.mark.case("PD-28")
@pytest.mark.case("PD-44")
@pytest.mark.parametrize("end", [0, 1, 16, 33, 48, 49, 50])
@pytest.mark.parametrize("on_decode", [0, 5, 16, 33, 50])
@pytest.mark.parametrize("on_prefill", [0, 5, 16, 33, 50])
def test_a_hand_off_between_warm_engines(on_prefill: int, on_decode: int, end: int) -> None:
    """The prefill engine computes what it has not cached, the transfer carries what the decode engine has not."""
    prefill, decode = Node(chunk_size_tokens=16), Node(FakeRunner(total_pages=40), chunk_size_tokens=16)
    warm(decode, on_decode)
    warm(prefill, on_prefill)
    reservation, lease = decode.reserve_and_grant("r", PROMPT, end)
    matched = reservation.prefix_matched_length
    assert matched == min(on_decode, end)
    before = prefill.engine.load().counters
    sent = prefill.send(decode, reservation, PROMPT)
    prefill.run()
    assert sent.done is not None
    if matched < end:
        decode.engine.end_write(lease, ok=True)
        found = min(on_prefill, end)
        done = sent.done
        assert (done.tokens_computed, done.prefix_matched_length) == (end - found, found)
        assert done.tokens_sent == end - matched
    counters = prefill.engine.load().counters
    assert counters.tokens_sent - before.tokens_sent == end - matched
    outcome = decode.submit(PROMPT, 4, SEEDED, request_id="r", begin=end)
    decode.run()
    assert outcome.tokens == alone(PROMPT, 4, SEEDED)
    # What the decode engine has beyond the hand-off's end is used, too; the last position is computed in any case.
    assert min(matched, 49) <= outcome.chunks[-1].cached_tokens <= on_decode
    prefill.assert_idle()
    decode.assert_idle()


@pytest.mark.case("PX-11")
@pytest.mark.parametrize("order", ["one after another", "at once"])
def test_many_with_one_prefix(order: str) -> None:
    """Plain requests and hand-offs, partial pages and whole ones; random aborts; the survivors are right."""
    chance = random.Random(5)
    prefill, decode = Node(chunk_size_tokens=24), Node(chunk_size_tokens=24, max_batch_size=6)
    prompts = [[*PROMPT[: 20 + i], 200 + i] for i in range(12)]
    outcomes: dict[int, Outcome] = {}
    for i, prompt in enumerate(prompts):
        if i % 2:
            hand_over(prefill, decode, f"r{i}", prompt, len(prompt) - 1)
        outcomes[i] = decode.submit(prompt, 6, SEEDED, request_id=f"r{i}")
        if order == "one after another":
            decode.run()
        else:
            decode.engine.step()
    for i in chance.sample(range(12), 4):
        if decode.engine.abort(f"r{i}"):
            del outcomes[i]
    decode.run()
    for i, outcome in outcomes.items():
        assert outcome.tokens == alone(prompts[i], 6, SEEDED), i
    decode.assert_idle()
    prefill.assert_idle()


@pytest.mark.case("PX-09")
@pytest.mark.parametrize("pages", [8, 9, 12])
def test_eviction_under_pressure(pages: int) -> None:
    """A pool hardly larger than one request: a long stream on a prefix while others flood the cache."""
    node = Node(FakeRunner(total_pages=pages), chunk_size_tokens=32, memory_threshold=1.0)
    warm(node, 30)
    stream = node.submit(PROMPT, 60)
    chance = random.Random(pages)
    others = []
    for i in range(25):
        prompt = [*PROMPT[: chance.choice((0, 16, 30))], *prompt_of(chance.randrange(1, 20), salt=i)]
        others.append((prompt, node.submit(prompt, 3)))
        for _ in range(6):
            node.engine.step()
            node.engine.check()
    node.run()
    assert stream.tokens == alone(PROMPT, 60)
    for prompt, outcome in others:
        assert outcome.tokens == alone(prompt, 3)
    assert node.engine.load().counters.evicted_pages > 0
    node.assert_idle()


@pytest.mark.parametrize("pages", [6, 7])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preemption_in_the_middle_of_shared_prefixes(pages: int, sampling: object) -> None:
    node = Node(FakeRunner(total_pages=pages), chunk_size_tokens=32, memory_threshold=1.0)
    prompts = [[*PROMPT[:18], i] for i in range(4)]
    outcomes = [node.submit(prompt, 50, sampling) for prompt in prompts]  # type: ignore[arg-type]
    node.run()
    expected = [alone(prompt, 50, sampling) for prompt in prompts]  # type: ignore[arg-type]
    assert [outcome.tokens for outcome in outcomes] == expected
    assert node.engine.load().counters.preemptions > 0
    node.assert_idle()


# --- who may share with whom -------------------------------------------------------------------------------------------


@pytest.mark.case("PX-03")
@pytest.mark.case("PX-07")
def test_salts_never_share() -> None:
    node = Node()
    salts = ["", "a", "a|b", "a\0b", "None", "b"]
    for salt in salts:
        for seen in (0, 49):
            outcome = node.submit(PROMPT, 3, more={"cache_salt": salt})
            node.run()
            assert outcome.tokens == alone(PROMPT, 3)
            assert outcome.chunks[-1].cached_tokens == seen
    assert node.engine.match_prefix(PROMPT, "other") == 0
    assert [node.engine.match_prefix(PROMPT, salt) for salt in salts] == [50] * len(salts)


def test_salts_never_share_over_a_hand_off() -> None:
    prefill, decode = Node(), Node()
    for name in ("one", "two"):
        done = hand_over(prefill, decode, name, PROMPT, 40, salt=name)
        assert (done.tokens_computed, done.tokens_sent) == (40, 40)
        with pytest.raises(InvalidRequest) as refused:
            decode.submit(PROMPT, 3, request_id=name)
        assert refused.value.param == "cache_salt"
        outcome = decode.submit(PROMPT, 3, request_id=name, more={"cache_salt": name})
        decode.run()
        assert outcome.tokens == alone(PROMPT, 3)
    decode.assert_idle()


def test_off_is_off() -> None:
    node = Node(prefix_cache="off")
    for _ in range(2):
        outcome = node.submit(PROMPT, 3)
        node.run()
        assert outcome.chunks[-1].cached_tokens == 0
    load = node.engine.load()
    assert (load.free_pages, load.cached_pages, load.counters.prefix_hit_tokens) == (64, 0, 0)
    assert node.engine.match_prefix(PROMPT) == 0


# --- what is published, and when ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
def test_a_prefix_is_migrated_without_generating(length: int) -> None:
    prefill, decode = Node(chunk_size_tokens=16), Node()
    prompt = PROMPT[:length]
    hand_over(prefill, decode, "r", prompt, length)
    assert decode.engine.commit("r") == length
    assert decode.engine.match_prefix([*prompt, 1]) == length
    decode.assert_idle()
    with pytest.raises(LeaseError):
        decode.engine.commit("r")
    outcome = decode.submit([*prompt, 9], 4)
    decode.run()
    assert outcome.tokens == alone([*prompt, 9], 4)
    assert decode.engine.load().counters.prompt_tokens_computed == 1
    again, _ = decode.reserve_and_grant("again", prompt, length)
    assert again.prefix_matched_length == length
    assert decode.engine.commit("again") == length
    decode.assert_idle()


def test_what_cannot_be_committed() -> None:
    decode = Node(clock=(clock := Clock()), lease_ttl_s=10)
    with pytest.raises(LeaseError, match="unknown"):
        decode.engine.commit("nobody")
    decode.reserve_and_grant("r", PROMPT, 40)
    with pytest.raises(LeaseError, match="not arrived"):
        decode.engine.commit("r")
    clock.now += 10
    with pytest.raises(LeaseError, match="expired"):
        decode.engine.commit("r")
    assert decode.engine.match_prefix(PROMPT) == 0


@pytest.mark.parametrize("fate", ["stalled", "failed", "aborted", "arrived"])
def test_nothing_is_shared_before_it_has_arrived(fate: str) -> None:
    """One request's K/V is on its way; others with the same prompt come before, during and after."""
    prefill, decode = Node(chunk_size_tokens=16), Node(chunk_size_tokens=16)
    expected = alone(PROMPT, 4)
    reservation, lease = decode.reserve_and_grant("r", PROMPT, 48)
    sent = prefill.send(decode, reservation, PROMPT)
    prefill.engine.step()  # a third of it
    assert decode.engine.match_prefix(PROMPT) == 0
    during = decode.submit(PROMPT, 4, more={"cache_salt": "during"})
    decode.run()
    assert during.tokens == expected
    if fate == "arrived":
        prefill.run()
        decode.engine.end_write(lease, ok=True)
    elif fate != "stalled":
        prefill.engine.abort("r") if fate == "failed" else decode.engine.abort("r")
        prefill.run()
        decode.engine.end_write(lease, ok=sent.done is not None)
    after = decode.submit(PROMPT, 4)
    decode.run()
    assert after.tokens == expected
    assert after.chunks[-1].cached_tokens == 0, "arrived K/V is published when it is committed, not before"


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_step_that_failed_leaves_nothing_behind(at: int) -> None:
    node = Node(chunk_size_tokens=16)
    node.runner.memory[:] = 77  # what was never computed is not zero, as in a pool that is used for long
    outcome = node.submit(PROMPT, 4)
    steps = iter(range(1, 9))

    def broken(chunks: Sequence[RunnerChunk]) -> None:
        if next(steps) == at:
            raise RuntimeError("the model broke")

    node.runner.before_run = broken
    node.run()
    assert isinstance(outcome.error, InternalError)
    node.runner.before_run = None
    assert node.engine.match_prefix(PROMPT) == 0
    again = node.submit(PROMPT, 4)
    node.run()
    assert again.tokens == alone(PROMPT, 4)


def test_what_an_aborted_request_had_computed_can_be_used() -> None:
    for steps in range(1, 5):
        node = Node(chunk_size_tokens=16)
        node.submit(PROMPT, 4, request_id="r")
        for _ in range(steps):
            node.engine.step()
        node.engine.abort("r")
        again = node.submit(PROMPT, 4)
        node.run()
        assert again.tokens == alone(PROMPT, 4)
        assert again.chunks[-1].cached_tokens == min(16 * steps, 49)
        node.assert_idle()


def test_a_copy_that_fails_ends_the_reservation(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    warm(node, 20)

    def broken(*_: object) -> None:
        raise RuntimeError("no copy")

    node.runner.copy_slots = broken  # type: ignore[assignment]
    with pytest.raises(InternalError):
        node.engine.prep_recv("r", tuple(PROMPT), 40)
    assert "no copy" in caplog.text
    node.assert_idle()


def test_what_is_cached_is_no_queued_work() -> None:
    node = Node(max_concurrent_prefills=1, chunk_size_tokens=16)
    warm(node, 48)
    node.submit(prompt_of(40, salt=9), 2)
    node.engine.step()
    assert node.engine.load().queued_prefill_tokens == 24
    node.submit(PROMPT, 2)  # waits
    assert node.engine.load().queued_prefill_tokens == 24 + len(PROMPT) - 48


# --- figures -----------------------------------------------------------------------------------------------------------


@pytest.mark.case("MT-01")
def test_no_counter_ever_goes_back() -> None:
    """Preemptions, prefix hits, evictions, aborts and sends, looked at after every step."""
    node = Node(FakeRunner(total_pages=7), chunk_size_tokens=24, memory_threshold=1.0)
    peer, chance = Node(), random.Random(1)
    last = node.engine.load().counters
    for i in range(40):
        prompt = [*PROMPT[: chance.choice((0, 18, 30))], *prompt_of(chance.randrange(1, 12), salt=i)]
        if i % 5 == 4:
            reservation, lease = peer.reserve_and_grant(f"r{i}", prompt, len(prompt))
            node.send(peer, reservation, prompt)
            peer.engine.end_write(lease, ok=False)
        else:
            node.submit(prompt, chance.randrange(1, 30), request_id=f"r{i}")
        if i % 7 == 6:
            node.engine.abort(f"r{i - chance.randrange(5)}")
        for _ in range(chance.randrange(8)):
            node.engine.step()
            node.engine.check()
            now = node.engine.load().counters
            assert_grew(last, now)
            last = now
    node.run()
    counters = node.engine.load().counters
    assert_grew(last, counters)
    assert sum(counters.requests_finished.values()) == 40
    assert min(counters.preemptions, counters.evicted_pages, counters.prefix_hit_tokens) > 0
    assert counters.prefix_hit_tokens <= counters.prefix_query_tokens
    node.assert_idle()


def assert_grew(before: Counters, after: Counters) -> None:
    for name, value in asdict(after).items():
        earlier = getattr(before, name)
        pairs = (
            zip(earlier.values(), value.values(), strict=True)
            if isinstance(value, dict)
            else [(earlier, value)]
        )
        assert all(then <= now for then, now in pairs), name
