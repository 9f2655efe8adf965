"""`/tokenize` and `/detokenize` over a real tokenizer of a hundred words."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from microserving.front import FrontSettings, create_front
from microserving.tokenizer import Tokenizer

from .fakes import ScriptedBackend, call

TEMPLATE = "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"


def ask(path: str, *, strict: bool = False, **body: Any) -> httpx.Response:
    backend = ScriptedBackend()
    library = Library(WordLevel({f"t{i}": i for i in range(100)}, unk_token="t0"))
    library.pre_tokenizer = Whitespace()
    facts = {"version": 1, "bos_token_id": 2, "prefix_ids": [2], "suffix_ids": [], "eos_token_ids": [1]}
    document = {"tokenizer": library.to_str(), "chat_template": TEMPLATE, "special_tokens": {}, **facts}
    backend.tokenizer = Tokenizer.from_dict(document)
    return call(create_front(backend, FrontSettings(strict_fields=strict)), "POST", path, json=body)


def test_a_text() -> None:
    answer = ask("/tokenize", model="org/tiny", prompt="t5 t7")
    assert answer.json() == {"count": 3, "max_model_len": 64, "tokens": [2, 5, 7], "token_strs": None}
    answer = ask("/tokenize", prompt="t5 t7", add_special_tokens=False, return_token_strs=True)
    assert answer.json() == {"count": 2, "max_model_len": 64, "tokens": [5, 7], "token_strs": ["t5", "t7"]}
    assert ask("/tokenize", prompt="", add_special_tokens=False).json()["count"] == 0


def test_a_text_may_be_longer_than_the_context() -> None:
    long = " ".join(["t9"] * 3000)
    assert ask("/tokenize", prompt=long).json()["tokens"] == [2, *[9] * 3000]
    refused = ask("/tokenize", prompt=long, return_token_strs=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "return_token_strs")


def test_a_chat_gives_the_tokens_that_it_would_be_answered_from() -> None:
    messages = [
        {"role": "user", "content": "t5"},
        {"role": "assistant", "content": [{"type": "text", "text": "t6"}]},
    ]
    answer = ask("/tokenize", messages=messages, temperature=0, max_tokens=5)
    assert answer.json()["tokens"] == [2, 0, 5, 0, 6]  # t0 stands for unknown words, as "user" is
    assert "x-ignored-fields" not in answer.headers


def test_unknown_fields_are_named_or_refused() -> None:
    assert ask("/tokenize", prompt="t5", foo=1).headers["x-ignored-fields"] == "foo"
    refused = ask("/tokenize", strict=True, prompt="t5", foo=1)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "foo")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ["t5"]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": "t5"}, "messages"),
        ({"prompt": "t5", "add_special_tokens": 1}, "add_special_tokens"),
    ],
)
def test_what_cannot_be_tokenised(body: dict[str, Any], param: str) -> None:
    refused = ask("/tokenize", **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_detokenize() -> None:
    assert ask("/detokenize", tokens=[5, 7]).json() == {"prompt": "t5t7"}
    assert ask("/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize("tokens", [[100], [-1], [1.5], ["5"], "t5", None, [True], [5] * 65, [2**70]])
def test_what_cannot_be_detokenised(tokens: Any) -> None:
    refused = ask("/detokenize", tokens=tokens)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tokens")


def test_another_model_is_not_found() -> None:
    for path, body in (("/tokenize", {"prompt": "t5"}), ("/detokenize", {"tokens": [5]})):
        assert ask(path, model="other", **body).status_code == 404
