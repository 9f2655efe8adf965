"""One request is read as one request or refused, on a real socket of the front that engines and the router share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import requires, version

import pytest

from microserving.front import create_front
from microserving.front.http_protocol import BoundedHeadProtocol

from .fakes import ScriptedBackend, live
from .framing import AMBIGUOUS, CLEAR, SMUGGLED, answers, exchange, post, statuses


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with live(create_front(ScriptedBackend()), http=BoundedHeadProtocol, ws="none") as port:
        yield port


@pytest.mark.case("SC-26")
@pytest.mark.case("RT-16")
@pytest.mark.parametrize("path", [b"/v1/completions", b"/v1/models"], ids=["past ASGI", "through ASGI"])
@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_what_can_be_read_in_two_ways_is_refused(port: int, kind: str, path: bytes) -> None:
    request = AMBIGUOUS[kind].replace(b"/v1/completions", path)
    received = exchange(port, request + SMUGGLED)
    assert statuses(received) == [400]
    ((_, headers, body),) = answers(received)
    assert headers["connection"] == "close"
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.case("SC-26")
@pytest.mark.parametrize("kind", CLEAR)
def test_what_is_odd_but_clear_is_served(port: int, kind: str) -> None:
    first, second = answers(exchange(port, CLEAR[kind] + SMUGGLED))
    assert (first[0], json.loads(first[2])["choices"][0]["text"]) == (200, "Hello world")
    assert second[0] == 200


def test_http_1_0_needs_no_host(port: int) -> None:
    assert statuses(exchange(port, b"GET /health HTTP/1.0\r\n\r\n")) == [200]
    assert statuses(exchange(port, b"GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n")) == [400]


def test_an_answer_that_is_due_comes_before_the_refusal_closes(port: int) -> None:
    good, bad = post(b"content-length: 14\r\n"), AMBIGUOUS["no host"]
    ((status, headers, _),) = answers(exchange(port, good + bad + SMUGGLED))
    assert (status, headers["connection"]) == (200, "close")


@pytest.mark.case("SC-26")
def test_the_other_parser_is_one_without_the_known_hole() -> None:
    """h11 is under httpx, which the CLI uses; servers and the router parse with httptools."""
    assert "h11>=0.16" in (requires("microserving") or ())
    assert tuple(map(int, version("h11").split(".")[:2])) >= (0, 16)
