"""An engine's verbs are as strict about framing as its front: on a real socket, nothing is reserved."""

from __future__ import annotations

import pytest

from microserving.transports.fake import FakeTransport
from tests.front.framing import AMBIGUOUS, SMUGGLED, exchange, statuses

from .engines import engines, make_node


@pytest.mark.case("SC-26")
def test_what_can_be_read_in_two_ways_is_no_verb() -> None:
    with engines(make_node("e", FakeTransport())) as (engine,):
        for kind, request in AMBIGUOUS.items():
            for path in (b"/v1/completions", b"/microserving/prep_recv"):
                received = exchange(engine.port, request.replace(b"/v1/completions", path) + SMUGGLED)
                assert statuses(received) == [400], (kind, path)
        load = engine.load()
        assert load["free_pages"] == load["total_pages"]
        engine.wait_idle()
