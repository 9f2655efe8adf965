"""One way into the system, and what its answers say once they are checked: whole or streamed, in one form.

Every answer is held to OpenAI's types and to what must hold for any answer; a test compares what is left.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from ..processes import MODEL, PLAIN

FINISH_REASONS: Final = {"stop", "length", "tool_calls", "content_filter"}
CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
QUESTION: Final = [{"role": "user", "content": "What is the capital of France?"}]
_HEAD: Final = ("id", "object", "created", "model", "system_fingerprint")


@dataclass
class Choice:
    """What a client has of a choice at the end, however it came."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    tool_calls: list[dict[str, str]] = field(default_factory=list)


@dataclass
class Answer:
    choices: list[Choice]
    usage: dict[str, Any] | None
    model: str

    @property
    def text(self) -> str:
        assert len(self.choices) == 1
        return self.choices[0].text

    @property
    def counts(self) -> tuple[int, int, int] | None:
        """Prompt, completion and all tokens: the same whatever was cached."""
        usage = self.usage
        if usage is None:
            return None
        return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


class Door:
    """An address that speaks OpenAI's API. name: of the program behind it, or `engine`."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=120, verify=PLAIN)

    def close(self) -> None:
        self.http.close()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": MODEL, **body})

    def ask(self, path: str, **body: Any) -> Answer:
        """The answer to a request, streamed or not as the body says; asserts that it is sound."""
        body = (
            {"prompt": "The capital of France is"} | body
            if path == COMPLETIONS
            else {"messages": QUESTION} | body
        )
        response = self.post(path, **body)
        assert response.status_code == 200, response.text
        answer = _streamed(response, path) if body.get("stream") else _whole(response, path)
        assert answer.model == body.get("model", MODEL)
        assert len(answer.choices) == (body.get("n") or 1) * _prompts(body)
        assert all(choice.finish_reason in FINISH_REASONS for choice in answer.choices)
        return answer

    def both(self, path: str, **body: Any) -> Answer:
        """The answer to a request that is asked whole and streamed; asserts that the two are one."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        whole, streamed = self.all([(path, body), (path, body | options)])
        assert streamed.choices == whole.choices
        assert streamed.counts == whole.counts
        return whole

    def all(self, asked: list[tuple[str, dict[str, Any]]]) -> list[Answer]:
        """The answers to requests that are sent at once."""
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda one: self.ask(one[0], **one[1]), asked))


def _prompts(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    return len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1


def strict_json(text: str) -> Any:
    """As a parser reads it that knows no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _whole(response: httpx.Response, path: str) -> Answer:
    assert response.headers["content-type"] == "application/json"
    body = strict_json(response.text)
    if path == CHAT:
        ChatCompletion.model_validate_json(response.text, strict=True)
    else:
        _check_piece(body, path)
    assert all(choice["finish_reason"] for choice in body["choices"])
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    choices = [_of_whole(choice, path) for choice in body["choices"]]
    return Answer(choices, body["usage"], body["model"])


def _of_whole(choice: dict[str, Any], path: str) -> Choice:
    known = Choice(finish_reason=choice["finish_reason"], token_ids=choice.get("token_ids", []))
    _add_logprobs(known, choice["logprobs"])
    known.prompt_logprobs += choice.get("prompt_logprobs") or []
    if path == COMPLETIONS:
        known.text = choice["text"]
        return known
    message = choice["message"]
    assert message["role"] == "assistant"
    known.text = message["content"] or ""
    known.reasoning = message.get("reasoning_content") or ""
    for call in message.get("tool_calls") or ():
        known.tool_calls.append(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        )
    return known


def _streamed(response: httpx.Response, path: str) -> Answer:
    headers = response.headers
    assert headers["content-type"].startswith("text/event-stream")
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers
    events = response.text.removesuffix("\n\n").split("\n\n")
    assert events[-1] == "data: [DONE]"
    bodies = [strict_json(event.removeprefix("data: ")) for event in events[:-1]]
    for body in bodies:
        _check_piece(body, path)
    heads = [{name: body.get(name) for name in _HEAD} for body in bodies]
    assert all(head == heads[0] for head in heads)
    usages = [body["usage"] for body in bodies if body.get("usage") is not None]
    assert len(usages) <= 1
    if usages:
        assert bodies[-1]["choices"] == []
        assert bodies.pop()["usage"] == usages[0]
    choices: dict[int, Choice] = {}
    for body in bodies:
        assert body["choices"], "a chunk without a choice, and without usage"
        for choice in body["choices"]:
            _take(choices, choice, path)
    ordered = [choices[index] for index in range(len(choices))]
    return Answer(ordered, usages[0] if usages else None, heads[0]["model"])


def _check_piece(body: dict[str, Any], path: str) -> None:
    """OpenAI's own type of a completion knows no piece without a finish reason, as all but the last have, nor that the
    first token of an echoed prompt has no log-probability."""
    if path == CHAT:
        ChatCompletionChunk.model_validate_json(json.dumps(body), strict=True)
        return
    choices = [
        {
            **choice,
            "finish_reason": choice["finish_reason"] or "stop",
            "logprobs": _with_a_first_one(choice["logprobs"]),
        }
        for choice in body["choices"]
    ]
    Completion.model_validate_json(json.dumps({**body, "choices": choices}), strict=True)


def _with_a_first_one(logprobs: dict[str, Any] | None) -> dict[str, Any] | None:
    if logprobs is None or logprobs["token_logprobs"][:1] != [None]:
        return logprobs
    assert logprobs["top_logprobs"][0] is None
    changed = {**logprobs, "token_logprobs": [0.0, *logprobs["token_logprobs"][1:]]}
    return {**changed, "top_logprobs": [{}, *logprobs["top_logprobs"][1:]]}


def _take(choices: dict[int, Choice], piece: dict[str, Any], path: str) -> None:
    first = piece["index"] not in choices
    known = choices.setdefault(piece["index"], Choice())
    assert known.finish_reason is None, "a piece behind the end"
    known.finish_reason = piece["finish_reason"]
    known.token_ids += piece.get("token_ids", [])
    _add_logprobs(known, piece["logprobs"])
    known.prompt_logprobs += piece.get("prompt_logprobs") or []
    if path == COMPLETIONS:
        known.text += piece["text"]
        shows: Any = piece["text"]
    else:
        delta = piece["delta"]
        assert ("role" in delta) == first
        known.text += delta.get("content") or ""
        known.reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            _add_call(known, call)
        shows = delta
    assert shows or first or piece.get("token_ids") or piece["finish_reason"], "a piece that shows nothing"


def _add_call(known: Choice, call: dict[str, Any]) -> None:
    """The name and the id come with the first piece of a call only."""
    function = call["function"]
    if call["index"] == len(known.tool_calls):
        assert call["id"]
        assert call["type"] == "function"
        known.tool_calls.append({"name": function["name"], "arguments": ""})
    else:
        assert call["index"] == len(known.tool_calls) - 1
        assert not call.get("id")
        assert not function.get("name")
    known.tool_calls[-1]["arguments"] += function.get("arguments") or ""


def _add_logprobs(known: Choice, logprobs: dict[str, Any] | None) -> None:
    """One entry a token, in either endpoint's form."""
    if logprobs is None:
        return
    if "content" in logprobs:
        known.logprobs += logprobs["content"] or []
        return
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    columns = [logprobs.get(name) or [None] * len(logprobs["tokens"]) for name in names]
    known.logprobs += [list(row) for row in zip(*columns, strict=True)]
