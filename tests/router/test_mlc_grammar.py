"""What an engine that knows MLC's verbs only can be bound to: JSON, and nothing is dropped silently."""

from __future__ import annotations

import pytest

from microserving.errors import InvalidRequest
from microserving.program import Request
from microserving.protocol.generation import Grammar, SamplingParams, StopParams
from microserving.router.mlc_peer import mlc_body


def request(grammar: Grammar | None) -> Request:
    return Request("r", (1, 2), SamplingParams(), StopParams(max_tokens=4), grammar=grammar)


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (None, None),
        (Grammar("json_object"), {"type": "json_object"}),
        (Grammar("json_schema", "{}"), {"type": "json_object", "schema": "{}"}),
    ],
)
def test_json_is_asked_for_in_its_words(grammar: Grammar | None, expected: dict[str, str] | None) -> None:
    assert mlc_body({"prompt": [1, 2]}, request(grammar)).get("response_format") == expected


@pytest.mark.parametrize("kind", ["regex", "lark"])
def test_what_it_cannot_do_is_refused(kind: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        mlc_body({"prompt": [1, 2]}, request(Grammar(kind, "a")))  # type: ignore[arg-type]
    assert refused.value.param == "grammar"
