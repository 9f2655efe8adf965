"""The real `openai` client against the router: completions and chat, streamed and not."""

from __future__ import annotations

import pytest
from openai import OpenAI

from .conftest import Cluster
from .processes import MODEL, wait_idle

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def talk_through(url: str) -> None:
    """Everything that `make up` promises to an OpenAI client at ``url``."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]

        chat = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)
        text = chat.choices[0].message.content
        assert text is not None
        assert "Paris" in text
        assert chat.usage is not None
        assert chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens

        pieces = client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=24, stream=True
        )
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text

        prompt = "The capital of France is"
        whole = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=12)
        parts = client.completions.create(
            model=MODEL, prompt=prompt, temperature=0, max_tokens=12, stream=True
        )
        assert whole.choices[0].finish_reason in ("stop", "length")
        assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


@pytest.mark.parametrize("program", ["round_robin", "prefill_decode", "balanced_prefill_decode"])
def test_openai_client(program: str, cluster: Cluster, router_for: object) -> None:
    assert callable(router_for)
    talk_through(router_for(program))
    wait_idle(cluster.engines)


def test_one_engine_alone(hybrid: str) -> None:
    talk_through(hybrid)


def test_the_router_serves_the_same_bytes_as_an_engine(cluster: Cluster, hybrid: str) -> None:
    answers = []
    for url in (hybrid, cluster.router):
        with OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0) as client:
            reply = client.chat.completions.create(
                model=MODEL,
                messages=QUESTION,
                temperature=0.7,
                seed=5,
                max_tokens=20,
                extra_body={"cache_salt": "the same bytes"},
            )
            answers.append(reply.model_dump(exclude={"id", "created"}))
    assert answers[0] == answers[1]
