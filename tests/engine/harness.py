"""Engines over the fake runner, and a hand-off between two of them in one process."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from microserving.engine.config import EngineConfig
from microserving.engine.engine import Engine
from microserving.engine.fake_runner import TINY_LAYOUT, FakeRunner, FakeTokenizer
from microserving.engine.jobs import Reservation, SendDone, SendJob
from microserving.engine.runner import RunnerChunk
from microserving.errors import MicroservingError
from microserving.protocol.generation import GenerationChunk, GenerationRequest, SamplingParams, StopParams
from microserving.transports.base import Lease, LeaseGuard

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, seed=1234)
_ids = itertools.count()


class Clock:
    """Time that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Outcome:
    """What a request was told; asserts that nothing comes after its ending. resumed: output tokens it came with."""

    def __init__(self, resumed: int = 0) -> None:
        self.resumed = resumed
        self.chunks: list[GenerationChunk] = []
        self.error: MicroservingError | None = None
        self.done: SendDone | None = None

    def __call__(self, item: GenerationChunk | SendDone | MicroservingError) -> None:
        assert not self.ended, f"{item} came after the ending"
        if isinstance(item, MicroservingError):
            self.error = item
        elif isinstance(item, SendDone):
            self.done = item
        else:
            self.chunks.append(item)

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1].finish_reason if self.chunks else None

    @property
    def ended(self) -> bool:
        return self.error is not None or self.done is not None or self.finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        assert self.error is None, self.error
        assert self.ended
        assert all(chunk.finish_reason is None for chunk in self.chunks[:-1])
        tokens = [token for chunk in self.chunks for token in chunk.token_ids]
        assert self.chunks[-1].completion_tokens == self.resumed + len(tokens)
        return tokens

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


class Node:
    """An engine, its runner, and its pool as others see it. A look at its steps' clock takes 0.1 ms and nothing else takes
    any, whatever this machine does: what is scheduled is the same in every run."""

    def __init__(
        self,
        runner: FakeRunner | None = None,
        *,
        eos: Sequence[int] = (),
        clock: Clock | None = None,
        **config: Any,
    ) -> None:
        self.runner = runner or FakeRunner()
        self.clock = clock or Clock()
        self.runner.now_ns = itertools.count(step=100_000).__next__
        self.engine = Engine(
            self.runner,
            FakeTokenizer(eos_token_ids=frozenset(eos)),
            EngineConfig(**config),
            clock=self.clock,
            step_clock_ns=self.runner.now_ns,
        )
        self.pool = self.runner.remote_pool

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = 8,
        sampling: SamplingParams = GREEDY,
        *,
        request_id: str | None = None,
        begin: int | None = None,
        more: Mapping[str, Any] | None = None,
        **stop: Any,
    ) -> Outcome:
        """more: further fields of the request."""
        more = more or {}
        outcome = Outcome(len(more.get("resume_output_ids", ())))
        request = GenerationRequest(
            request_id or f"auto-{next(_ids)}",
            tuple(prompt),
            sampling,
            StopParams(max_tokens=max_tokens, **stop),
            **more,
        )
        self.engine.submit(request, begin=begin, on_chunk=outcome)
        return outcome

    def reserve_and_grant(
        self, request_id: str, prompt: Sequence[int], end: int, salt: str = ""
    ) -> tuple[Reservation, Lease]:
        reservation = self.engine.prep_recv(request_id, tuple(prompt), end, salt)
        lease = Lease("decode", "epoch", request_id, reservation.lease_id)
        if reservation.end > reservation.prefix_matched_length:
            self.grant(lease)
        return reservation, lease

    def grant(self, lease: Lease) -> None:
        """Let the writer begin, as a transport does: its word holds the lease's id."""
        assert self.engine.begin_write(lease)
        self.pool.leases[lease.lease_id] = lease.lease_id

    def send(
        self,
        to: Node,
        reservation: Reservation,
        prompt: Sequence[int],
        destination: str = "decode",
        salt: str = "",
    ) -> Outcome:
        outcome = Outcome()
        job = SendJob(
            reservation.request_id,
            tuple(prompt),
            reservation.prefix_matched_length,
            reservation.end,
            to.pool,
            destination,
            reservation.slots,
            LeaseGuard(reservation.lease_id, reservation.lease_id),
            salt,
        )
        self.engine.submit_send(job, outcome)
        return outcome

    def run(self, limit: int = 5000) -> int:
        """Step until nothing can run; the books must balance after every step."""
        for steps in range(limit):
            if not self.engine.step():
                return steps
            self.engine.check()
        raise AssertionError(f"still busy after {limit} steps")

    def assert_idle(self) -> None:
        """Nothing is held but by the prefix cache, which everybody may have evicted."""
        load = self.engine.load()
        assert (load.running, load.waiting, load.reserved, load.pinned_pages) == (0, 0, 0, 0)
        assert load.free_pages + load.cached_pages == load.total_pages
        assert load.cached_pages == load.evictable_pages
        self.engine.check()


def hand_over(
    prefill: Node, decode: Node, request_id: str, prompt: Sequence[int], end: int, salt: str = ""
) -> SendDone:
    """prep_recv and remote_send, to the end."""
    reservation, lease = decode.reserve_and_grant(request_id, prompt, end, salt)
    sent = prefill.send(decode, reservation, prompt, salt=salt)
    prefill.run()
    assert sent.done is not None, sent.error
    decode.engine.end_write(lease, ok=True)
    return sent.done


def greedy_reference(prompt: Sequence[int], count: int) -> list[int]:
    """The model's greedy continuation without any engine: each token from a whole run over a fresh pool."""
    tokens = list(prompt)
    for _ in range(count):
        runner = FakeRunner()
        output = runner.run([RunnerChunk(tokens, 0, range(64), logits=1)])
        tokens.append(int(np.argmax(output.logits[0])))
    return tokens[len(prompt) :]


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(salt * 31 + i * i + 7 * i) % 256 for i in range(length)]


KV_BYTES = TINY_LAYOUT.bytes_per_token


def alone(prompt: Sequence[int], max_tokens: int = 8, sampling: SamplingParams = GREEDY) -> list[int]:
    """The tokens of a fresh engine that does nothing else."""
    node = Node()
    outcome = node.submit(prompt, max_tokens, sampling)
    node.run()
    return outcome.tokens
