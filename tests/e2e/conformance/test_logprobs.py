"""Log-probabilities, scored and echoed prompts, candidates: what one engine answers, every program answers, bit for bit."""

from __future__ import annotations

import pytest

from .door import COMPLETIONS, Door, strict_json

SKY = "The sky is blue 🦊 and the grass"
SCORING = {"max_tokens": 0, "echo": True, "logprobs": 1, "temperature": 0}


@pytest.mark.case("API-14")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "fields",
    [
        {"top_p": 0.3, "temperature": 0.01, "logprobs": 5},
        {"top_k": 1, "logprobs": 0, "n": 2},
        {"temperature": 0.8, "logprobs": 20, "echo": True, "n": 2, "stop": [" the"]},
        {"temperature": 0, "logprobs": 2, "logit_bias": {"5": 100, "6": -100}, "min_tokens": 4},
        {"response_format": {"type": "json_object"}, "logprobs": 2, "temperature": 0},
    ],
    ids=["top_p", "top_k", "echo", "bias", "grammar"],
)
def test_streamed_is_whole_and_the_engines(door: Door, engine: Door, fields: dict[str, object]) -> None:
    body = {"prompt": SKY, "seed": 11, "max_tokens": 6, **fields}
    answer = door.both(COMPLETIONS, **body)
    assert answer.choices == engine.ask(COMPLETIONS, **body).choices
    for choice in answer.choices:
        assert choice.logprobs
        for _, logprob, _, offset in choice.logprobs:
            assert logprob is None or -9999 <= logprob <= 0
            assert offset <= len(choice.text) or choice.finish_reason == "stop"


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


def test_the_best_of_some_candidates(door: Door, engine: Door) -> None:
    sampling = {"prompt": SKY, "seed": 5, "temperature": 1.2, "max_tokens": 5}
    best = door.ask(COMPLETIONS, n=2, best_of=4, logprobs=0, **sampling)
    all_four = engine.ask(COMPLETIONS, n=4, logprobs=0, **sampling).choices

    def mean(choice: object) -> float:
        scores = [row[1] for row in choice.logprobs]  # type: ignore[attr-defined]
        return sum(scores) / len(scores)

    assert best.choices == sorted(all_four, key=mean, reverse=True)[:2]
    assert best.usage is not None
    assert best.usage["completion_tokens"] == sum(len(choice.logprobs) for choice in all_four)
