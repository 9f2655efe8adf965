"""One event is one line, whatever a client put into it."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from microserving.observability import configure_logging, current_request_id, request_id_scope

HOSTILE = "a\r\nERROR forged\x1b[31m %s %d \u2028 \u2029 \x85 \x00 \ud800 end"


@pytest.fixture(autouse=True)
def _restore_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def _lines(style: str) -> list[str]:
    stream = io.StringIO()
    configure_logging("info", style, stream)  # type: ignore[arg-type]
    log = logging.getLogger("microserving.test")
    with request_id_scope(HOSTILE):
        log.info("model %s", HOSTILE)
        try:
            raise ValueError(HOSTILE)
        except ValueError:
            log.exception("failed")
    log.debug("not shown")
    text = stream.getvalue()
    assert text.endswith("\n")
    return text[:-1].splitlines()


@pytest.mark.case("SC-16")
def test_json_lines_survive_hostile_text() -> None:
    lines = _lines("json")
    events = [json.loads(line) for line in lines]
    assert [event["message"] for event in events] == [f"model {HOSTILE}", "failed"]
    assert all(event["request_id"] == HOSTILE for event in events)
    assert "ValueError" in events[1]["error"]
    assert set(events[0]) == {"time", "level", "logger", "message", "request_id"}
    assert all(line.isascii() and line.isprintable() for line in lines)


@pytest.mark.case("SC-16")
def test_plain_lines_survive_hostile_text() -> None:
    lines = _lines("plain")
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
    assert r"a\r\nERROR forged\x1b[31m %s %d \u2028 \u2029 \x85 \x00 \ud800 end" in lines[0]


def test_the_request_id_ends_with_its_scope() -> None:
    assert current_request_id() is None
    with request_id_scope("outer"):
        with request_id_scope("inner"):
            assert current_request_id() == "inner"
        assert current_request_id() == "outer"
    assert current_request_id() is None


def test_configuring_twice_does_not_double_the_lines() -> None:
    stream = io.StringIO()
    configure_logging(stream=io.StringIO())
    configure_logging(stream=stream)
    logging.getLogger("microserving.test").info("once")
    assert stream.getvalue().count("once") == 1
