"""The real `openai` client against the front on a real port."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from microserving.front import create_front

from .fakes import ScriptedBackend, live


@pytest.fixture
def client() -> Iterator[openai.OpenAI]:
    with (
        live(create_front(ScriptedBackend())) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="org/tiny", prompt="hi", n=2)
    assert [choice.text for choice in answer.choices] == ["Hello world"] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    stream = client.completions.create(model="org/tiny", prompt="hi", stream=True)
    assert [chunk.choices[0].text for chunk in stream] == ["Hello", " wor", "ld"]


def test_chat(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="org/tiny", messages=messages)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(model="org/tiny", messages=messages) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello world"
    assert final.choices[0].finish_reason == "stop"


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["org/tiny"]
    assert client.models.retrieve("org/tiny").id == "org/tiny"
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="org/tiny", prompt="hi", temperature=9)
    assert bad.value.param == "temperature"
