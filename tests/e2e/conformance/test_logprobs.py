"""Log-probabilities, scored and echoed prompts, candidates: what one engine answers, every program answers, bit for bit."""

from __future__ import annotations

import pytest

from .door import COMPLETIONS, Door, strict_json

SKY = "The sky is blue 🦊 and the grass"
SCORING = {"max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}


@pytest.mark.case("API-17")
def test_a_scoring_request(door: Door, engine: Door) -> None:
    answer = door.both(COMPLETIONS, prompt=SKY, **SCORING)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (SKY, "length")
    assert answer.usage is not None
    assert answer.usage["completion_tokens"] == 0
    assert len(choice.logprobs) == answer.usage["prompt_tokens"]
    assert choice.logprobs[0][1] is None
    assert all(logprob <= 0 for _, logprob, _, _ in choice.logprobs[1:])
    ids = [[504, 6376, 314], [504, 6376]]
    pair = door.ask(COMPLETIONS, prompt=ids, **SCORING)
    assert [len(choice.logprobs) for choice in pair.choices] == [3, 2]
    assert pair.choices == engine.ask(COMPLETIONS, prompt=ids, **SCORING).choices
    first = answer.choices[0].logprobs
    assert (
        first == door.ask(COMPLETIONS, prompt=SKY, **SCORING).choices[0].logprobs
    )  # all of it is cached now


def test_prompt_logprobs_and_the_fingerprint(door: Door, engine: Door) -> None:
    bodies = [
        strict_json(one.post(COMPLETIONS, prompt=SKY, max_tokens=2, temperature=0, prompt_logprobs=2).text)
        for one in (door, engine)
    ]
    first, *others = bodies[0]["choices"][0]["prompt_logprobs"]
    assert first is None
    assert all(2 <= len(entry) <= 3 for entry in others)
    assert bodies[0]["choices"] == bodies[1]["choices"]
    assert bodies[0]["system_fingerprint"] == bodies[1]["system_fingerprint"]
    assert bodies[0]["system_fingerprint"].startswith("fp_")
