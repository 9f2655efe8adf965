"""OpenAI's request fields: ranges, defaults, null, and what is refused rather than ignored."""

from __future__ import annotations

from typing import Any

import pytest

from microserving.errors import InvalidRequest
from microserving.protocol.body import validate
from microserving.protocol.chat import ChatCompletionRequest
from microserving.protocol.openai import (
    MAX_CHOICES,
    MAX_PROMPTS,
    SMALLEST_TOP_P,
    CompletionRequest,
)


def completion(**fields: Any) -> CompletionRequest:
    return validate(CompletionRequest, {"prompt": "a", **fields})


def chat(**fields: Any) -> ChatCompletionRequest:
    return validate(ChatCompletionRequest, {"messages": [{"role": "user", "content": "a"}], **fields})


def refused(model: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        model(**fields)
    assert caught.value.param == param


@pytest.mark.case("API-19")
def test_null_is_the_same_as_absent() -> None:
    plain = completion()
    for name in CompletionRequest.model_fields:
        if name != "prompt":
            assert completion(**{name: None}) == plain, name
    plain_chat = chat()
    for name in ChatCompletionRequest.model_fields:
        if name != "messages":
            assert chat(**{name: None}) == plain_chat, name
    assert completion(stream_options={"include_usage": None}).include_usage is False


def test_a_required_field_that_is_null_is_missing() -> None:
    refused(completion, {"prompt": None}, "prompt")
    refused(chat, {"messages": None}, "messages")


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 0, 2], [[1, 0, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.case("API-21")
@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], ["a", ""], [[1], []], ["a", [1]], [1, "a"], [True], [1.0], [-1], [2**31], [[-1]], [[None]]]
    + [None, 5, {}, [None], [{}], ["a"] * (MAX_PROMPTS + 1)],
)  # fmt: skip
def test_an_empty_or_mixed_prompt_is_refused(prompt: Any) -> None:
    refused(completion, {"prompt": prompt}, "prompt")


@pytest.mark.case("SC-14")
def test_the_number_of_choices_is_bounded() -> None:
    completion(n=2, prompt=["a"] * (MAX_CHOICES // 2))
    refused(completion, {"n": 3, "prompt": ["a"] * (MAX_CHOICES // 2)}, "prompt")


@pytest.mark.case("API-13")
@pytest.mark.parametrize("n", [0, -1, 1.5, "2", 129, 512, 10**9, True])
def test_n_out_of_range(n: Any) -> None:
    refused(completion, {"n": n}, "n")
    refused(chat, {"n": n}, "n")


@pytest.mark.case("SC-22")
@pytest.mark.parametrize("name", ["n", "max_tokens", "top_k", "seed", "max_completion_tokens"])
@pytest.mark.parametrize("value", [1.0, "1", True, [], {}, 2**64, -(2**63) - 1])
def test_integers_are_integers_in_a_range(name: str, value: Any) -> None:
    refused(chat, {name: value}, name)


@pytest.mark.case("SC-22")
def test_the_ends_of_the_integer_ranges() -> None:
    for name, low, high in [
        ("max_tokens", 0, 2**31 - 1),
        ("min_tokens", 0, 2**31 - 1),
        ("logprobs", 0, 20),
        ("prompt_logprobs", 0, 20),
        ("top_k", -1, 2**31 - 1),
        ("seed", -(2**63), 2**64 - 1),
    ]:
        for value in (low, high):
            completion(**{name: value})
        for value in (low - 1, high + 1):
            refused(completion, {name: value}, name)
    completion(stop_token_ids=[0, 2**31 - 1])
    refused(completion, {"stop_token_ids": [-1]}, "stop_token_ids.0")
    refused(completion, {"stop_token_ids": [2**31]}, "stop_token_ids.0")
    refused(completion, {"stop_token_ids": [True]}, "stop_token_ids.0")


@pytest.mark.case("API-25")
@pytest.mark.parametrize(("top_p", "good"), [(0, True), (1e-9, True), (0.5, True), (1, True), (1.0, True), (1.0001, False), (-0.1, False)])  # fmt: skip
@pytest.mark.parametrize(("temperature", "fine"), [(0, True), (1e-9, True), (1, True), (2, True), (2.0001, False), (-1, False)])  # fmt: skip
def test_the_grid_of_top_p_and_temperature(top_p: float, good: bool, temperature: float, fine: bool) -> None:
    if good and fine:
        sampling = completion(top_p=top_p, temperature=temperature).sampling_params(0)
        assert sampling.temperature == temperature
        assert sampling.top_p == (top_p or SMALLEST_TOP_P)
    else:
        refused(completion, {"top_p": top_p, "temperature": temperature}, "top_p" if fine else "temperature")


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("min_p", 1.1),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0),
        ("temperature", "0.5"),
        ("temperature", True),
        ("temperature", 10**400),
        ("stream", "true"),
        ("stream", 1),
        ("model", ""),
        ("model", "m" * 257),
        ("user", 5),
        ("stream_options", []),
        ("best_of", True),
    ],
)
def test_wrong_values_name_their_field(name: str, bad: Any) -> None:
    refused(completion, {name: bad}, name)


@pytest.mark.case("API-23")
@pytest.mark.parametrize(
    "bias",
    [{"-1": 1}, {"abc": 1}, {"3": 1e9}, {"3": "x"}, {"3": True}, {"03": 1}, {"٣": 1}, {"2147483648": 1}, {"": 1}, [], 5]
    + [{str(i): 1 for i in range(5000)}],
)  # fmt: skip
def test_bad_logit_bias(bias: Any) -> None:
    refused(completion, {"logit_bias": bias}, "logit_bias")


def test_good_logit_bias() -> None:
    assert completion(logit_bias={"3": -100, "0": 0.5}).logit_bias == {3: -100.0, 0: 0.5}


@pytest.mark.case("API-43")
@pytest.mark.parametrize(
    "stop", ["", [""], ["", "END"], [None], [5], ["a"] * 17, ["a"] * 1000, "x" * 257, 5, {}]
)
def test_bad_stops(stop: Any) -> None:
    refused(completion, {"stop": stop}, "stop")


def test_good_stops() -> None:
    assert completion(stop="a").stop == ["a"]
    assert completion(stop=[]).stop == []
    assert (
        completion(stop=["a", "ab"] + ["x" * 256] * 3).stop_params(5).stop == ("a", "ab") + ("x" * 256,) * 3
    )


@pytest.mark.case("SC-14")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logprobs", True),
        ("logprobs", 10**6),
        ("prompt_logprobs", 21),
        ("echo", 1),
        ("suffix", "x"),
        ("best_of", 0),
        ("best_of", 129),
        ("best_of", 10**6),
        ("min_tokens", -1),
    ],
)
def test_what_completions_cannot_do_is_refused(name: str, value: Any) -> None:
    refused(completion, {name: value}, name)


def test_candidates_of_which_the_best_are_answered() -> None:
    assert completion(n=2, best_of=5).candidates == 5
    assert completion(n=2, best_of=2, stream=True).candidates == 2
    assert completion(n=2).candidates == 2
    refused(completion, {"n": 3, "best_of": 2}, "best_of")
    refused(completion, {"best_of": 2, "stream": True}, "best_of")
    refused(completion, {"prompt": ["x"] * 9, "best_of": 128}, "best_of")
    assert completion(best_of=2).output_logprobs == 0
    assert completion(best_of=2).shown_logprobs is None
    assert completion(best_of=2, logprobs=3).output_logprobs == 3


def test_which_prompts_are_scored() -> None:
    assert completion(logprobs=3).scored_prompt is None
    assert completion(logprobs=3, echo=True).scored_prompt == 3
    assert completion(logprobs=0, echo=True).scored_prompt == 0
    assert completion(echo=True).scored_prompt is None
    assert completion(logprobs=3, echo=True, prompt_logprobs=5).scored_prompt == 5


def test_off_values_and_other_makers_fields_pass() -> None:
    completion(best_of=1, suffix=None, echo=False, debug_config={"special_request": "query"}, logprobs=None)
    completion(logprobs=False, suffix="")
    chat(logprobs=False, response_format={"type": "text"}, tools=[], tool_choice="auto")


@pytest.mark.case("API-21")
def test_no_messages() -> None:
    refused(chat, {"messages": []}, "messages")


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert chat(max_tokens=3).token_limit == 3
    assert chat(max_tokens=3, max_completion_tokens=4).token_limit == 4
    assert chat().token_limit is None


def test_the_mapping_to_sampling_and_stop() -> None:
    fields = {"temperature": 0.5, "top_k": -1, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1}
    sampling = completion(**fields, repetition_penalty=1.1).sampling_params(7)
    assert (sampling.temperature, sampling.top_k, sampling.min_p) == (0.5, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (sampling.repetition_penalty, sampling.seed) == (1.1, 7)
    stop = completion(stop_token_ids=[5], ignore_eos=True).stop_params(9)
    assert (stop.max_tokens, stop.stop_token_ids, stop.ignore_eos, stop.stop) == (9, (5,), True, ())
