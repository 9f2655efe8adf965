"""The figures of a router whose engines it has not reached."""

from __future__ import annotations

import asyncio
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from microserving.router.app import Router
from microserving.router.config import RouterConfig


def test_engines_that_were_never_reached_are_told_of_once() -> None:
    """A scrape with the same labels twice is refused as a whole by some."""
    peers = [f"http://engine-{number}:8000" for number in range(3)]
    config = RouterConfig(
        program="round_robin", prefill_peers=peers[:2], decode_peers=peers[1:], allow_missing_peers=True
    )

    async def figures() -> str:
        router = Router(config)
        try:
            return (await router.metrics()).body.decode()  # type: ignore[union-attr]
        finally:
            await router.stop()

    text = asyncio.run(figures())
    samples = [
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert max(Counter((name, labels) for name, labels, _ in samples).values()) == 1
    told = {dict(labels)["role"]: value for name, labels, value in samples if name.endswith("engine_up")}
    assert told == {"prefill": 0.0, "hybrid": 0.0, "decode": 0.0}
