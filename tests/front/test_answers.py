"""What the front answers, whole and streamed, over a scripted backend."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from microserving.errors import EngineUnavailable, KVExhausted
from microserving.front import FrontSettings, create_front
from microserving.front.generations import derive_seed
from microserving.protocol.generation import GenerationChunk, GenerationRequest
from microserving.protocol.responses import Usage

from .fakes import ByteTokenizer, ScriptedBackend, call, events, pieces

CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "org/tiny", "prompt": "abc"}


def post(backend: ScriptedBackend, body: Any, *, path: str | None = None, **settings: Any) -> httpx.Response:
    app = create_front(backend, FrontSettings(**settings))
    path = path or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
    return call(app, "POST", path, json=body)


def error(response: httpx.Response) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a whole stream: the end marker comes once, last."""
    *data, end = events(response)
    assert end == "[DONE]"
    assert "[DONE]" not in data
    return [json.loads(event) for event in data]


def test_a_whole_completion() -> None:
    backend = ScriptedBackend()
    response = post(backend, TEXT)
    body = response.json()
    assert body["choices"] == [{"index": 0, "text": "Hello world", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == Usage(3, completion_tokens=3).body()
    assert (body["object"], body["model"]) == ("text_completion", "org/tiny")
    (request,) = backend.requests
    assert request.prompt_token_ids == (97, 98, 99)
    assert request.stop.max_tokens == 16
    assert body["id"] == f"cmpl-{request.request_id}"


def test_a_whole_chat_answer() -> None:
    backend = ScriptedBackend(pieces(["é", "!"], "length"))
    body = post(backend, CHAT).json()
    message = {"role": "assistant", "content": "é!", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    prompt = len("user:hi;")
    assert body["usage"] == Usage(prompt, completion_tokens=2).body()
    assert backend.requests[0].stop.max_tokens == 64 - prompt


@pytest.mark.case("API-39")
@pytest.mark.case("STR-07")
@pytest.mark.parametrize("body", [TEXT, CHAT])
def test_a_stream(body: dict[str, Any]) -> None:
    response = post(ScriptedBackend(), {**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    got = chunks(response)
    for name in ("id", "created", "model", "object"):
        assert len({chunk[name] for chunk in got}) == 1
    choices = [chunk["choices"][0] for chunk in got]
    assert (
        "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)
        == "Hello world"
    )
    assert [c["finish_reason"] for c in choices][-1] == "stop"
    assert all(c["finish_reason"] is None for c in choices[:-1])


@pytest.mark.case("API-41")
def test_the_role_comes_with_the_first_content_only() -> None:
    got = chunks(post(ScriptedBackend(), {**CHAT, "stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in got]
    assert deltas[0] == {"role": "assistant", "content": "Hello"}
    assert all("role" not in delta for delta in deltas[1:])


@pytest.mark.case("API-01")
@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}])  # fmt: skip
@pytest.mark.parametrize("body", [TEXT, CHAT])
def test_no_usage_unless_asked_for(body: dict[str, Any], options: dict[str, Any]) -> None:
    for chunk in chunks(post(ScriptedBackend(), {**body, "stream": True, **options})):
        assert len(chunk["choices"]) == 1
        assert "usage" not in chunk


@pytest.mark.case("API-03")
@pytest.mark.parametrize("body", [TEXT, CHAT])
def test_one_usage_chunk_when_asked_for(body: dict[str, Any]) -> None:
    got = chunks(
        post(ScriptedBackend(), {**body, "stream": True, "stream_options": {"include_usage": True}, "n": 2})
    )
    assert [chunk["usage"] for chunk in got[:-1]] == [None] * (len(got) - 1)
    prompt = 3 if "prompt" in body else len("user:hi;")
    assert got[-1]["choices"] == []
    assert got[-1]["usage"] == Usage(prompt, completion_tokens=6).body()


@pytest.mark.case("API-07")
def test_chunks_without_text_are_not_sent() -> None:
    backend = ScriptedBackend(pieces(["", "", "a", "", "b", ""]))
    got = chunks(post(backend, {**TEXT, "stream": True}))
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in got] == [
        ("a", None),
        ("b", None),
        ("", "stop"),
    ]


def test_token_ids_when_asked_for() -> None:
    backend = ScriptedBackend(pieces(["", "a", "b"]))
    for body in (TEXT, CHAT):
        got = chunks(post(backend, {**body, "stream": True, "return_token_ids": True}))
        assert [token for chunk in got for token in chunk["choices"][0]["token_ids"]] == [1, 2, 3]
        whole = post(backend, {**body, "return_token_ids": True}).json()
        assert whole["choices"][0]["token_ids"] == [1, 2, 3]
        assert "token_ids" not in post(backend, body).json()["choices"][0]


@pytest.mark.case("API-11")
@pytest.mark.parametrize("body", [TEXT, CHAT])
def test_every_index_finishes_exactly_once(body: dict[str, Any]) -> None:
    backend = ScriptedBackend()
    texts = dict.fromkeys(range(5), "")
    finished: list[int] = []
    for chunk in chunks(post(backend, {**body, "stream": True, "n": 5}, max_concurrent_choices=2)):
        (choice,) = chunk["choices"]
        assert choice["index"] not in finished
        texts[choice["index"]] += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        if choice["finish_reason"] is not None:
            finished.append(choice["index"])
    assert sorted(finished) == [0, 1, 2, 3, 4]
    assert set(texts.values()) == {"Hello world"}
    assert backend.most_at_once == 2
    assert backend.active == 0


@pytest.mark.case("API-45")
def test_seeds_of_choices_and_prompts() -> None:
    backend = ScriptedBackend()
    post(backend, {**TEXT, "prompt": ["a", "bc"], "n": 3, "seed": 42}, max_concurrent_choices=1)
    assert [r.prompt_token_ids for r in backend.requests] == [(97,)] * 3 + [(98, 99)] * 3
    seeds = [r.sampling.seed for r in backend.requests]
    assert seeds[:3] == seeds[3:]
    assert seeds[0] == 42
    assert len(set(seeds[:3])) == 3
    assert len({r.request_id for r in backend.requests}) == 6


def test_a_derived_seed_is_splitmix64s_output() -> None:
    # Reference outputs for seed 1234567, https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [derive_seed(1234567, choice) for choice in (1, 2, 3)] == expected


@pytest.mark.case("API-45")
def test_without_a_seed_each_request_gets_its_own() -> None:
    backend = ScriptedBackend()
    for _ in range(3):
        post(backend, TEXT)
    post(backend, {**TEXT, "seed": -1})
    assert len({r.sampling.seed for r in backend.requests}) == 4
    assert backend.requests[-1].sampling.seed == 2**64 - 1


def test_usage_counts_each_prompt_once() -> None:
    body = post(ScriptedBackend(), {**TEXT, "prompt": ["a", "bcd"], "n": 2}).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] == Usage(4, completion_tokens=12).body()


@pytest.mark.case("STR-03")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        ({**TEXT, "prompt": "x" * 64}, 400, "prompt", "context_length_exceeded"),
        ({**TEXT, "max_tokens": 62}, 400, "max_tokens", "context_length_exceeded"),
        (
            {**CHAT, "messages": [{"role": "user", "content": "x" * 60}]},
            400,
            "messages",
            "context_length_exceeded",
        ),
        ({**TEXT, "model": "other"}, 404, "model", "model_not_found"),
        ({**CHAT, "model": "other"}, 404, "model", "model_not_found"),
        ({**TEXT, "temperature": 3}, 400, "temperature", "invalid_value"),
        ({**TEXT, "prompt": [256]}, 400, "prompt", "invalid_value"),
        ({**TEXT, "logit_bias": {"256": 1}}, 400, "logit_bias.256", "invalid_value"),
        ({**TEXT, "stop_token_ids": [256]}, 400, "stop_token_ids", "invalid_value"),
        ({**CHAT, "messages": [{"role": "admin", "content": "x"}]}, 400, "messages.0.role", "invalid_value"),
        ({**TEXT, "prompt": ""}, 400, "prompt", "invalid_value"),
    ],
)
def test_what_is_wrong_is_a_real_status(body: Any, status: int, param: str, code: str, stream: bool) -> None:
    backend = ScriptedBackend()
    response = post(backend, {**body, "stream": stream})
    assert response.status_code == status
    assert (error(response)["param"], error(response)["code"]) == (param, code)
    assert backend.requests == []


def test_the_last_prompt_that_fits() -> None:
    backend = ScriptedBackend()
    assert post(backend, {**TEXT, "prompt": "x" * 63}).status_code == 200
    assert backend.requests[0].stop.max_tokens == 1
    assert post(backend, {**TEXT, "max_tokens": 61}).status_code == 200


async def fails_at_once(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
    raise KVExhausted("no pages", retry_after_s=2.5)
    yield GenerationChunk("never")


async def fails_later(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
    yield GenerationChunk("one", (1,), None, 3, 1)
    raise EngineUnavailable("the engine is gone")


async def breaks_later(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
    yield GenerationChunk("one", (1,), None, 3, 1)
    raise RuntimeError("secret path /etc/x")


async def never_finishes(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
    yield GenerationChunk("one", (1,), None, 3, 1)


async def preempts(request: GenerationRequest) -> AsyncIterator[GenerationChunk]:
    yield GenerationChunk("one", (1,), "preempt", 3, 1)


@pytest.mark.case("STR-03")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_an_error_before_the_first_token_is_a_status(stream: bool, n: int) -> None:
    backend = ScriptedBackend(fails_at_once)
    response = post(backend, {**TEXT, "stream": stream, "n": n})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "3"
    assert error(response)["code"] == "kv_exhausted"
    assert backend.active == 0


@pytest.mark.case("STR-05")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("body", [TEXT, CHAT])
def test_an_error_in_a_stream_is_its_last_event(body: dict[str, Any], n: int) -> None:
    backend = ScriptedBackend(fails_later)
    response = post(backend, {**body, "stream": True, "n": n})
    assert response.status_code == 200
    got = [json.loads(event) for event in events(response)]
    assert got[-1]["error"]["code"] == "engine_unavailable"
    assert sum("error" in event for event in got) == 1
    assert backend.active == 0


@pytest.mark.case("STR-05")
@pytest.mark.case("SC-18")
def test_a_bug_shows_no_detail_and_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    response = post(ScriptedBackend(breaks_later), {**TEXT, "stream": True})
    assert json.loads(events(response)[-1])["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    whole = post(ScriptedBackend(breaks_later), TEXT)
    assert whole.status_code == 500
    assert "secret" not in whole.text
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) == 2


@pytest.mark.case("STR-05")
@pytest.mark.parametrize("script", [never_finishes, preempts])
def test_a_backend_that_breaks_its_promise(script: Any) -> None:
    response = post(ScriptedBackend(script), TEXT)
    assert response.status_code == 500
    assert error(response)["code"] == "internal_error"


def test_not_ready_and_a_late_joiner() -> None:
    backend = ScriptedBackend()
    backend.ready = False
    response = post(backend, TEXT)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert error(response)["code"] == "no_engine"
    backend.ready_after_refresh = True
    assert post(backend, TEXT).status_code == 200


@pytest.mark.case("API-29")
def test_ignored_fields_are_named_or_refused() -> None:
    body = {**CHAT, "store": False, "metadata": {"k": "v"}, "user": "u1", "x\r\ny": 1}
    response = post(ScriptedBackend(), body)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "store, x??y"
    strict = post(ScriptedBackend(), body, strict_fields=True)
    assert strict.status_code == 400
    assert error(strict)["param"] == "store"


def test_an_absent_model_is_the_served_one() -> None:
    assert post(ScriptedBackend(), {"prompt": "a"}).json()["model"] == "org/tiny"


@pytest.mark.case("SC-16")
def test_an_unknown_model_is_not_repeated_raw() -> None:
    response = post(ScriptedBackend(), {**TEXT, "model": "a\r\n\x1b[31m" + "b" * 200})
    assert response.status_code == 404
    assert error(response)["message"].isprintable()
    assert "b" * 60 not in error(response)["message"]


def test_prompts_that_are_long_together_are_tokenised_off_the_event_loop() -> None:
    """Each alone is short, but 256 of them would hold up everybody's stream."""
    threads = set()

    class Recording(ByteTokenizer):
        def encode(self, text: str, **options: Any) -> list[int]:
            threads.add(threading.get_ident())
            return super().encode(text)

    backend = ScriptedBackend(pieces(["a"]))
    backend.tokenizer = Recording()
    response = post(backend, {"prompt": ["x" * 40] * 256, "max_tokens": 1})
    assert response.status_code == 200
    assert len(response.json()["choices"]) == 256
    assert threads
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(("path", "fields"), [("completions", {"prompt": "a"}), ("chat/completions", CHAT)])
def test_the_tokenizer_is_told_what_can_fit(path: str, fields: dict[str, Any]) -> None:
    told = []

    class Recording(ByteTokenizer):
        def encode(self, text: str, *, max_context: int | None = None, **options: Any) -> list[int]:
            told.append(max_context)
            return super().encode(text)

        def encode_chat(self, messages: Any, *, max_context: int | None = None) -> list[int]:
            return self.encode("a", max_context=max_context)

    backend = ScriptedBackend()
    backend.tokenizer = Recording()
    assert call(create_front(backend), "POST", f"/v1/{path}", json=fields).status_code == 200
    assert told == [64]
