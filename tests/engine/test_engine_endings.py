"""Aborts at every step and faults inside steps: each request ends once, nobody else notices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from microserving.engine.fake_runner import FakeRunner
from microserving.engine.runner import RunnerChunk, StepOutput
from microserving.errors import (
    EngineUnavailable,
    InternalError,
    KVExhausted,
    LeaseError,
    RequestAborted,
)
from microserving.protocol.generation import GenerationRequest, StopParams
from microserving.scheduler import Sequence as TokenSequence

from .harness import (
    GREEDY,
    Node,
    Outcome,
    alone,
    prompt_of,
)


def steps_of(scenario: Callable[[Node], Sequence[Outcome]]) -> int:
    node = Node(chunk_size_tokens=16)
    scenario(node)
    return node.run()


def two_generations(node: Node) -> list[Outcome]:
    return [
        node.submit(prompt_of(40, salt=1), 6, request_id="victim"),
        node.submit(prompt_of(25, salt=2), 9, request_id="other"),
    ]


@pytest.mark.case("PD-09")
@pytest.mark.parametrize("inside", [False, True], ids=["between steps", "inside a step"])
def test_an_abort_at_any_step_frees_all_and_disturbs_nobody(inside: bool) -> None:
    for at in range(steps_of(two_generations)):
        node = Node(chunk_size_tokens=16)
        victim, other = two_generations(node)
        for _ in range(at):
            node.engine.step()
        was_over = victim.ended
        if inside:
            node.runner.before_run = lambda chunks, node=node: node.engine.abort("victim")  # type: ignore[misc]
            node.engine.step()
            node.runner.before_run = None
        else:
            assert node.engine.abort("victim") == (not was_over)
        assert victim.ended
        assert isinstance(victim.error, RequestAborted) == (not was_over)
        assert not node.engine.abort("victim")
        node.run()
        assert other.tokens == alone(prompt_of(25, salt=2), 9)
        assert node.engine.load().counters.aborts == (not was_over)
        node.assert_idle()


def test_an_id_is_free_again_while_its_aborted_sequence_is_still_in_the_step() -> None:
    node = Node()
    node.submit(prompt_of(20), request_id="r")
    again: list[Outcome] = []

    def abort_and_submit(chunks: Sequence[RunnerChunk]) -> None:
        node.runner.before_run = None
        node.engine.abort("r")
        again.append(node.submit(prompt_of(33), request_id="r"))

    node.runner.before_run = abort_and_submit
    node.run()
    assert again[0].tokens == alone(prompt_of(33))
    node.assert_idle()


@pytest.mark.case("PD-13")
def test_an_aborted_send_is_told_after_its_last_put() -> None:
    prefill, decode = Node(chunk_size_tokens=8), Node()
    prompt = prompt_of(40)
    reservation, lease = decode.reserve_and_grant("r", prompt, 40)
    sent = prefill.send(decode, reservation, prompt)
    prefill.engine.step()

    seen: list[bool] = []

    def abort(chunks: Sequence[RunnerChunk]) -> None:
        seen.extend([prefill.engine.abort("r"), sent.ended, prefill.engine.abort("r")])

    prefill.runner.before_run = abort
    prefill.engine.step()
    prefill.runner.before_run = None
    assert seen == [True, False, False], "it is told when the puts of this step are over"
    assert isinstance(sent.error, RequestAborted)
    prefill.assert_idle()
    assert prefill.engine.load().counters.requests_finished["abort"] == 1
    decode.engine.end_write(lease, ok=False)
    decode.assert_idle()
    with pytest.raises(LeaseError, match="transfer failed"):
        decode.submit(prompt, request_id="r")


def test_aborting_a_reservation_under_a_writer_quarantines_its_pages() -> None:
    prefill, decode = Node(chunk_size_tokens=8), Node(FakeRunner(total_pages=4))
    prompt = prompt_of(40)
    reservation, lease = decode.reserve_and_grant("r", prompt, 40)
    sent = prefill.send(decode, reservation, prompt)
    prefill.engine.step()
    revoked: list[int] = []
    decode.engine.on_revoked = revoked.append
    assert decode.engine.abort("r")
    assert revoked == [lease.lease_id]
    load = decode.engine.load()
    assert (load.quarantined_pages, load.reserved_pages, load.free_pages, load.reserved) == (3, 0, 1, 0)
    beside = decode.submit(prompt_of(9), 4)
    prefill.run()  # the writer does not know yet, and writes on
    decode.run()
    assert beside.tokens == alone(prompt_of(9), 4)
    assert sent.done is not None
    decode.engine.end_write(lease, ok=True)
    decode.assert_idle()
    assert decode.engine.load().counters.tokens_received == 0


def _refused_reservation(node: Node) -> None:
    with pytest.raises(KVExhausted):
        node.engine.prep_recv("new", tuple(prompt_of(60)), 60)


def _refused_commit(node: Node) -> None:
    with pytest.raises(LeaseError, match="expired"):
        node.engine.commit("r")


def _refused_renewal(node: Node) -> None:
    with pytest.raises(LeaseError, match="expired"):
        node.engine.renew("r")


@pytest.mark.parametrize(
    "call",
    [
        lambda node: node.submit([1, 2]),
        lambda node: node.engine.prep_recv("new", (1, 2), 1),
        _refused_reservation,
        _refused_commit,
        _refused_renewal,
        lambda node: node.engine.load(),
        lambda node: node.engine.step(),
    ],
    ids=["submit", "prep_recv", "prep_recv without pages", "commit", "renew", "load", "step"],
)
def test_whoever_finds_a_lease_expired_stops_its_writer_at_once(call: Callable[[Node], object]) -> None:
    """Not only the next step: a long one may be running."""
    node = Node(FakeRunner(total_pages=4))
    _, lease = node.reserve_and_grant("r", prompt_of(20), 20)
    revoked: list[int] = []
    node.engine.on_revoked = revoked.append
    node.clock.now += 31
    call(node)
    assert revoked == [lease.lease_id]
    load = node.engine.load()
    assert (load.quarantined_pages, load.counters.leases_expired) == (2, 1)


def test_a_resumed_request_that_had_ended_stops_the_writer_of_its_reservation() -> None:
    node = Node()
    _, lease = node.reserve_and_grant("r", [1, 2, 3], 2)
    revoked: list[int] = []
    node.engine.on_revoked = revoked.append
    outcome = node.submit([1, 2, 3], 2, request_id="r", more={"resume_output_ids": (4, 5)})
    assert (outcome.finish_reason, revoked) == ("length", [lease.lease_id])


def test_aborting_what_is_not_there() -> None:
    node = Node()
    assert not node.engine.abort("nobody")
    assert not node.engine.abort_send("nobody")


def test_close_ends_everything_once() -> None:
    prefill, decode = Node(), Node()
    outcomes = [decode.submit(prompt_of(20), 8) for _ in range(3)]
    decode.engine.step()
    reservation, _ = decode.reserve_and_grant("r", prompt_of(20, salt=1), 10)
    outcomes.append(decode.send(prefill, reservation, prompt_of(20, salt=1)))
    decode.engine.close(EngineUnavailable("the engine has stopped"))
    decode.engine.close(EngineUnavailable("the engine has stopped"))
    assert all(isinstance(outcome.error, EngineUnavailable) for outcome in outcomes)
    with pytest.raises(EngineUnavailable):
        decode.submit([1])
    with pytest.raises(EngineUnavailable):
        decode.engine.prep_recv("s", (1,), 0)
    nothing, _ = prefill.reserve_and_grant("n", [1], 0)
    with pytest.raises(EngineUnavailable):
        decode.send(prefill, nothing, [1])
    assert not decode.engine.step()


def test_broken_books_cost_nobody_an_ending(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of three requests breaks them while the first, in the same step, has had its last token."""
    node = Node()
    outcomes = [node.submit([1, 2, i], 1, request_id=f"r{i}") for i in range(3)]
    finish = node.engine._scheduler.finish

    def broken(sequence: TokenSequence, publish: bool = True) -> None:
        if sequence.request_id == "r1":
            raise InternalError("the books do not balance")
        finish(sequence, publish)

    monkeypatch.setattr(node.engine._scheduler, "finish", broken)
    with pytest.raises(InternalError):
        node.engine.step()
    assert [outcome.ended for outcome in outcomes] == [True, False, False]
    node.engine.close(EngineUnavailable("the engine has failed"))
    assert outcomes[0].tokens == alone([1, 2, 0], 1)
    assert all(isinstance(outcome.error, EngineUnavailable) for outcome in outcomes[1:])
    assert "request r1" in caplog.text


def test_a_step_that_fails_ends_its_own_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    node = Node(max_batch_size=2)
    first = [node.submit(prompt_of(20, salt=i), 4, request_id=f"first-{i}") for i in range(2)]
    later = node.submit(prompt_of(30), 4)

    def broken(chunks: Sequence[RunnerChunk]) -> None:
        raise RuntimeError("the model broke")

    node.runner.before_run = broken
    assert node.engine.step()
    node.runner.before_run = None
    for outcome in first:
        assert isinstance(outcome.error, InternalError)
        assert "broke" not in outcome.error.message
    node.run()
    assert later.tokens == alone(prompt_of(30), 4)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "first-0" in caplog.text
    assert "first-1" in caplog.text
    finished = node.engine.load().counters.requests_finished
    assert {ending: number for ending, number in finished.items() if number} == {"length": 1, "error": 2}
    node.assert_idle()


def test_a_listener_that_fails_costs_nobody_else_an_ending(caplog: pytest.LogCaptureFixture) -> None:
    node = Node()
    heard: list[object] = []

    def deaf(item: object) -> None:
        heard.append(item)
        raise RuntimeError("cannot listen")

    request = GenerationRequest("deaf", (1, 2), GREEDY, StopParams(max_tokens=1))
    node.engine.submit(request, on_chunk=deaf)
    others = [node.submit(prompt_of(9, salt=i), 1) for i in range(2)]
    node.run()
    assert len(heard) == 1
    assert all(outcome.ended for outcome in others)
    assert "cannot listen" in caplog.text
    node.assert_idle()


def test_an_abort_inside_a_failing_step_ends_once() -> None:
    prefill, decode = Node(), Node()
    reservation, _ = decode.reserve_and_grant("s", prompt_of(20), 20)
    sent = prefill.send(decode, reservation, prompt_of(20))
    generation = prefill.submit(prompt_of(20), request_id="g")

    def broken(chunks: Sequence[RunnerChunk]) -> None:
        prefill.engine.abort("g")
        prefill.engine.abort("s")
        raise RuntimeError("the model broke")

    prefill.runner.before_run = broken
    prefill.engine.step()
    assert isinstance(sent.error, RequestAborted)
    assert isinstance(generation.error, RequestAborted)
    prefill.assert_idle()


class NotFinite(FakeRunner):
    """NaN in the logits of every sequence whose newest token is 13."""

    def run(self, chunks: Sequence[RunnerChunk]) -> StepOutput:
        output = super().run(chunks)
        wanted = [chunk for chunk in chunks if chunk.logits]
        for row, chunk in enumerate(wanted):
            if chunk.token_ids[-1] == 13:
                output.logits[row, 5] = np.nan
        return output


def test_logits_that_are_not_finite_end_one_request() -> None:
    node = Node(NotFinite())
    bad, good = node.submit([1, 2, 13]), node.submit([1, 2, 3])
    node.run()
    assert isinstance(bad.error, InternalError)
    assert good.tokens == alone([1, 2, 3])
    node.assert_idle()


def test_nobody_shares_what_gave_logits_that_are_not_finite() -> None:
    node = Node(NotFinite())
    prompt = [*prompt_of(40), 13]
    bad = node.submit(prompt)
    node.run()
    assert isinstance(bad.error, InternalError)
    assert node.engine.match_prefix(prompt) == 0
    node.assert_idle()


def test_a_token_without_text_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    expected = alone([1, 2, 3])
    bad, good = node.submit([4, 5, 6], request_id="bad"), node.submit([1, 2, 3])
    task = next(task for task in node.engine._books._tasks.values() if task.sequence.request_id == "bad")

    def broken(token: int, logprob: object) -> None:
        raise ValueError("no such token")

    monkeypatch.setattr(task.output, "put", broken)
    node.run()
    assert isinstance(bad.error, InternalError)
    assert good.tokens == expected
    node.assert_idle()
