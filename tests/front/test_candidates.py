"""`best_of`: of each prompt's candidates the best are answered with, free or bound to a grammar, and all of them count."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from microserving.front import create_front
from microserving.protocol.generation import Grammar

from .chats import backend
from .fakes import ScriptedBackend, call

TEXTS = ("zz", "aaa", "mm", "b")
"""By candidate. A token is a character, the likelier the earlier it is in the alphabet."""


def post(to: ScriptedBackend, **fields: Any) -> httpx.Response:
    body = {"prompt": "p", "max_tokens": 5, **fields}
    return call(create_front(to), "POST", "/v1/completions", json=body)


@pytest.mark.parametrize("grammar", [None, Grammar("regex", "[a-z]+")])
def test_the_likeliest_per_token_come_first(grammar: Grammar | None) -> None:
    """And not the likeliest of all: the longest one is the best."""
    to = backend(*TEXTS)
    bound = {} if grammar is None else {"regex": grammar.text}
    answer = post(to, n=2, best_of=4, **bound).json()
    assert [choice["text"] for choice in answer["choices"]] == ["aaa", "b"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["usage"]["prompt_tokens"] == 1
    assert answer["usage"]["completion_tokens"] == len("".join(TEXTS))
    assert [request.grammar for request in to.requests] == [grammar] * 4
    assert len({request.sampling.seed for request in to.requests}) == 4


def test_each_prompt_has_candidates_of_its_own() -> None:
    """The eight of both prompts are played as the four, twice."""
    answer = post(backend(*TEXTS, *reversed(TEXTS)), prompt=["p", "qq"], n=1, best_of=4).json()
    assert [choice["text"] for choice in answer["choices"]] == ["aaa", "aaa"]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 2 * len("".join(TEXTS))


def test_of_equals_the_first_is_the_best() -> None:
    answer = post(backend("xa", "ax", "ac", "ca"), n=3, best_of=4).json()
    assert [choice["text"] for choice in answer["choices"]] == ["ac", "ca", "xa"]


def test_the_best_are_not_known_before_the_end() -> None:
    for fields, status in (({"n": 2, "best_of": 2}, 200), ({"n": 1, "best_of": 2}, 400)):
        response = post(backend(*TEXTS), stream=True, **fields)
        assert response.status_code == status
    assert response.json()["error"]["param"] == "best_of"
