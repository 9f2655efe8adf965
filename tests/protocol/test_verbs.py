"""The verbs' bodies and index rules, and the reader of `start_generate` streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from microserving.errors import EngineUnavailable, InvalidRequest, KVExhausted
from microserving.protocol.body import parse_object, validate
from microserving.protocol.generation import (
    GenerationChunk,
    GenerationRequest,
    RemoteSendResult,
    SamplingParams,
    StopParams,
)
from microserving.protocol.generation_stream import GenerationStreamReader
from microserving.protocol.microserving import (
    PrepRecvRequest,
    RemoteSendRequest,
    StartGenerateRequest,
    completion_body,
    remote_send_body,
    resolve_index,
    stream_fields,
)
from microserving.protocol.responses import CompletionShape, Usage, dump
from microserving.protocol.verb_answers import PREP_RECV, remote_send_result

SEND = {"prompt": [1, 2], "begin": 0, "end": -1, "kv_addr_info": "x", "recv_rank": 0}


@pytest.mark.parametrize(
    ("value", "resolved"), [(0, 0), (5, 5), (-1, 4), (-5, 0), (3, 3)]
)  # over 5 tokens; the end itself is legal
def test_resolve_index(value: int, resolved: int) -> None:
    assert resolve_index(value, 5, param="end") == resolved


@pytest.mark.parametrize("value", [6, -6, 2**31 - 1, -(2**31)])
def test_an_index_outside_the_prompt(value: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        resolve_index(value, 5, param="begin")
    assert caught.value.param == "begin"


@pytest.mark.case("SC-22")
@pytest.mark.parametrize("name", ["begin", "end", "recv_rank"])
@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63, 2**64, 1.0, "1", True, None, []])
def test_indices_are_integers_in_a_range(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(RemoteSendRequest, {**SEND, name: value})
    assert caught.value.param == name


def test_what_a_verb_refuses() -> None:
    for fields, param in [
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"n": 2}, "n"),
        ({"kv_addr_info": ""}, "kv_addr_info"),
        ({"kv_addr_info": 5}, "kv_addr_info"),
        ({"recv_rank": -1}, "recv_rank"),
        ({"request_id": ""}, "request_id"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            validate(RemoteSendRequest, {**SEND, **fields})
        assert caught.value.param == param
    for fields, param in [
        ({"preemption": "never"}, "preemption"),
        ({"preemption": True}, "preemption"),
        ({"resume_output_ids": "1"}, "resume_output_ids"),
        ({"resume_output_ids": [-1]}, "resume_output_ids"),
        ({"resume_output_ids": [True]}, "resume_output_ids"),
        ({"resume_output_ids": [1, 2.0]}, "resume_output_ids"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
    ]:
        with pytest.raises(InvalidRequest) as caught:
            validate(StartGenerateRequest, {"prompt": "a", "begin": 0, **fields})
        assert caught.value.param == param


def test_the_request_id_is_request_id_else_user() -> None:
    def given_id(**fields: Any) -> str | None:
        return validate(PrepRecvRequest, {"prompt": "a", "end": 0, **fields}).given_id

    assert given_id(request_id="r", user="u") == "r"
    assert given_id(user="u") == "u"
    assert given_id(user="") is None
    assert given_id() is None


def test_an_mlc_body_passes() -> None:
    body = {
        "model": "m",
        "prompt": [1, 2],
        "end": -1,
        "best_of": 1,
        "suffix": None,
        "debug_config": {"a": 1},
        "user": "7",
    }
    request = validate(
        PrepRecvRequest, {**body, "logprobs": None, "stream": False, "echo": False, "max_tokens": None}
    )
    assert request.prompt == [[1, 2]]
    assert request.end == -1


def test_mlc_answers_are_understood() -> None:
    answer = PREP_RECV.decode(b'{"kv_append_metadata": "x", "prefix_matched_length": 3}')
    assert answer.prefix_matched_length == 3
    assert remote_send_result(b"{}") == RemoteSendResult(0, 0, 0, 0, 0.0, 0.0, 0.0)


def test_remote_send_answers_survive_the_wire() -> None:
    result = RemoteSendResult(5, 4, 100, 1, 1.5, 0.5, 0.25)
    assert remote_send_result(dump(remote_send_body(result, include_layer_times=False))) == result


def test_a_generation_request_survives_the_wire() -> None:
    sampling = SamplingParams(0.8, 0.9, 40, 0.05, 0.5, -0.5, 1.1, {3: -100.0, 7: 1.5}, 2**64 - 1)
    request = GenerationRequest(
        "r-1",
        (1, 2, 3),
        sampling,
        StopParams(9, ("a", "b"), (4,), True),
        cache_salt="tenant",
        timeout_s=2.5,
        resume_output_ids=(7, 8),
        preemption="return",
    )
    body = {**completion_body(request, model="m"), **stream_fields(), "begin": -1}
    parsed = validate(StartGenerateRequest, parse_object(dump(body)))
    assert parsed.seed == 2**64 - 1
    assert parsed.sampling_params(parsed.seed) == sampling
    assert parsed.stop_params(parsed.max_tokens or 0) == request.stop
    assert (parsed.prompt, parsed.given_id, parsed.begin) == ([[1, 2, 3]], "r-1", -1)
    assert (parsed.cache_salt, parsed.timeout) == ("tenant", 2.5)
    assert (parsed.resume_output_ids, parsed.preemption) == ((7, 8), "return")
    assert parsed.stream
    assert parsed.include_usage
    assert parsed.return_token_ids


def test_what_is_not_asked_for_is_not_sent() -> None:
    """An engine of another make sees no field that it does not know, unless it matters."""
    request = GenerationRequest("r-1", (1,), SamplingParams(), StopParams())
    assert not {"cache_salt", "timeout", "resume_output_ids", "preemption"} & set(
        completion_body(request, model="m")
    )


def test_null_is_the_default() -> None:
    body = {"prompt": "a", "begin": 0, "cache_salt": None, "timeout": None, "resume_output_ids": None}
    parsed = validate(StartGenerateRequest, {**body, "preemption": None})
    assert (parsed.cache_salt, parsed.timeout) == ("", None)
    assert (parsed.resume_output_ids, parsed.preemption) == ((), "recompute")


CHUNKS = [
    GenerationChunk("a", (1,), None, 4, 1),
    GenerationChunk("", (2, 3), None, 4, 3),
    GenerationChunk("b", (4,), "length", 4, 4),
]


def events(include_usage: bool) -> list[str]:
    shape = CompletionShape(request_id="x", created=1, model="m", include_usage=include_usage, token_ids=True)
    data = [event for chunk in CHUNKS for event in shape.chunks(0, chunk, first=False)]
    usage = shape.usage_chunk(Usage(4, 1, 4))
    return [event.decode() for event in (*data, *([usage] if usage else []))] + ["[DONE]"]


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_stream_gives_back_its_chunks(include_usage: bool) -> None:
    reader = GenerationStreamReader(prompt_tokens=4)
    assert [chunk for event in events(include_usage) for chunk in reader.feed(event)] == CHUNKS
    assert reader.done


def test_the_usage_of_the_stream_wins() -> None:
    reader = GenerationStreamReader(prompt_tokens=4)
    reader.feed('{"choices":[{"index":0,"text":"a","finish_reason":"stop"}]}')
    (last,) = reader.feed(
        '{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":8,"total_tokens":17,'
        '"prompt_tokens_details":{"cached_tokens":6}}}'
    )
    assert (last.prompt_tokens, last.completion_tokens, last.finish_reason) == (9, 8, "stop")
    assert last.cached_tokens == 6


def test_resumed_tokens_count_from_the_start() -> None:
    reader = GenerationStreamReader(prompt_tokens=4, resumed_tokens=10)
    (chunk,) = reader.feed('{"choices":[{"index":0,"text":"a","token_ids":[5]}]}')
    assert (chunk.token_ids, chunk.completion_tokens) == ((5,), 11)


@pytest.mark.parametrize(
    "data",
    ["", "nonsense", "[]", '{"choices":5}', '{"choices":[{"text":5}]}', '{"choices":[{"finish_reason":""}]}'],
)
def test_a_broken_event_is_a_failed_engine(data: str) -> None:
    with pytest.raises(EngineUnavailable):
        GenerationStreamReader(prompt_tokens=1).feed(data)


def test_an_error_event_is_raised_as_what_it_was() -> None:
    body = json.dumps(
        {"error": {"message": "no pages", "type": "server_error", "param": None, "code": "kv_exhausted"}}
    )
    with pytest.raises(KVExhausted, match="no pages"):
        GenerationStreamReader(prompt_tokens=1).feed(body)
    with pytest.raises(EngineUnavailable):
        GenerationStreamReader(prompt_tokens=1).feed('{"error":{}}')


@pytest.mark.parametrize("events", [["[DONE]"], ['{"choices":[{"text":"a"}]}', "[DONE]"]])
def test_a_stream_without_a_finish_reason_is_a_failed_engine(events: list[str]) -> None:
    reader = GenerationStreamReader(prompt_tokens=1)
    with pytest.raises(EngineUnavailable, match="without a finish reason"):
        list(map(reader.feed, events))
    assert not reader.done


@pytest.mark.parametrize("finish", ["null", '"length"'])
def test_nothing_comes_after_the_finish_reason(finish: str) -> None:
    reader = GenerationStreamReader(prompt_tokens=1)
    reader.feed('{"choices":[{"text":"a","finish_reason":"stop"}]}')
    with pytest.raises(EngineUnavailable, match="went on"):
        reader.feed(f'{{"choices":[{{"text":"b","finish_reason":{finish}}}]}}')
