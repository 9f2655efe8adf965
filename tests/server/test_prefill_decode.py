"""A whole hand-off over HTTP: the same tokens as one engine alone, and the work where it belongs."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from microserving.engine.fake_runner import TINY_LAYOUT
from microserving.protocol.generation_stream import GenerationStreamReader
from microserving.protocol.microserving import stream_fields
from microserving.protocol.responses import Usage
from microserving.protocol.sse import SSEParser

from .engines import MODEL, Running

SAMPLING: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "seed": 7, "top_k": 50}]
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 300]


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(256), k=length)


def alone(engine: Running, prompt: list[int], **fields: Any) -> list[int]:
    """The tokens of one engine."""
    body = {"model": MODEL, "prompt": prompt, "return_token_ids": True, "max_tokens": 12, **fields}
    response = engine.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return list(response.json()["choices"][0]["token_ids"])


def hand_off(
    prefill: Running, decode: Running, prompt: list[int], end: int, **fields: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """prep_recv and remote_send; their answers."""
    received = decode.verb("prep_recv", prompt=prompt, end=end, **fields)
    assert received.status_code == 200, received.text
    answer = received.json()
    sent = prefill.verb(
        "remote_send",
        prompt=prompt,
        begin=answer["prefix_matched_length"],
        end=end,
        kv_addr_info=answer["kv_append_metadata"],
        recv_rank=0,
        **fields,
    )
    assert sent.status_code == 200, sent.text
    return answer, sent.json()


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("length", LENGTHS)
def test_parity_with_one_engine(
    prefill: Running, decode: Running, length: int, sampling: dict[str, Any]
) -> None:
    prompt = prompt_of(length)
    expected = alone(prefill, prompt, **sampling)
    assert alone(decode, prompt, **sampling) == expected
    for end in sorted({-1, length, length // 2, 0}):
        name = f"r-{length}-{end}"
        hand_off(prefill, decode, prompt, end, request_id=name)
        answer = decode.verb(
            "start_generate",
            prompt=prompt,
            begin=end,
            max_tokens=12,
            request_id=name,
            return_token_ids=True,
            **sampling,
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == expected, (length, end)


@pytest.mark.parametrize(("length", "end"), [(100, 99), (100, 40), (33, 33), (5, 0)])
def test_the_work_is_where_it_belongs(prefill: Running, decode: Running, length: int, end: int) -> None:
    prompt, salt = prompt_of(length), f"work-{length}-{end}"  # nobody else's cached prefixes
    before = [engine.load()["counters"] for engine in (prefill, decode)]
    received, sent = hand_off(prefill, decode, prompt, end, request_id="w", cache_salt=salt)
    assert received["prefix_matched_length"] == 0
    assert (received["prompt_length"], received["request_id"]) == (length, "w")
    assert 0 < received["lease_ttl_s"] <= 30
    nbytes = end * TINY_LAYOUT.bytes_per_token
    assert (sent["tokens_computed"], sent["tokens_sent"], sent["bytes_sent"]) == (end, end, nbytes)
    assert sent["prefix_matched_length"] == 0
    decode.verb("start_generate", prompt=prompt, begin=end, max_tokens=3, request_id="w", cache_salt=salt)
    after = [engine.load()["counters"] for engine in (prefill, decode)]
    change = [
        {k: b[k] - a[k] for k in b if isinstance(b[k], int)} for a, b in zip(before, after, strict=True)
    ]
    assert change[0]["prompt_tokens_computed"] == change[0]["tokens_sent"] == end
    assert change[0]["bytes_sent"] == nbytes
    assert change[0]["output_tokens"] == 0
    # When everything was received the last position is computed again: its logits are needed.
    assert change[1]["prompt_tokens_computed"] == max(length - end, 1)
    assert change[1]["tokens_received"] == end
    assert change[1]["output_tokens"] == 3


def test_a_stream_tells_all_that_a_chunk_holds(prefill: Running, decode: Running) -> None:
    prompt = prompt_of(40)
    expected = alone(prefill, prompt, temperature=0)
    hand_off(prefill, decode, prompt, -1, user="by-user")
    body = {
        "model": MODEL,
        "prompt": prompt,
        "begin": -1,
        "user": "by-user",
        "max_tokens": 12,
        "temperature": 0,
    }
    with decode.http.stream(
        "POST", "/microserving/start_generate", json={**body, **stream_fields()}
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        parser, reader = SSEParser(), GenerationStreamReader(prompt_tokens=40)
        data = [event for part in response.iter_raw() for event in parser.feed(part)]
    chunks = [chunk for event in data for chunk in reader.feed(event)]
    assert reader.done
    assert [token for chunk in chunks for token in chunk.token_ids] == expected
    assert "".join(chunk.text for chunk in chunks) == "".join(map(chr, expected))
    last = chunks[-1]
    assert (last.finish_reason, last.prompt_tokens, last.completion_tokens) == ("length", 40, 12)
    usages = [json.loads(event).get("usage") for event in data[:-1]]
    assert [usage for usage in usages if usage] == [Usage(40, completion_tokens=12).body()]


def test_nothing_to_send(prefill: Running, decode: Running) -> None:
    _, sent = hand_off(prefill, decode, prompt_of(5), 0, request_id="n")
    assert (sent["tokens_computed"], sent["tokens_sent"], sent["bytes_sent"]) == (0, 0, 0)
    assert decode.verb("abort", request_id="n").json() == {"aborted": True}


def test_text_and_ids_are_the_same_prompt(prefill: Running, decode: Running) -> None:
    received = decode.verb("prep_recv", prompt="hello", end=-1, request_id="t").json()
    sent = prefill.verb(
        "remote_send",
        prompt=[list(b"hello")],
        begin=0,
        end=4,
        kv_addr_info=received["kv_append_metadata"],
        recv_rank=0,
    )
    assert sent.json()["tokens_sent"] == 4
    answer = decode.verb("start_generate", prompt=["hello"], begin=4, request_id="t", temperature=0)
    assert answer.json()["usage"] == Usage(5, completion_tokens=16).body()


def test_an_unknown_id_is_a_new_request(prefill: Running) -> None:
    prompt = prompt_of(20)
    answer = prefill.verb(
        "start_generate", prompt=prompt, begin=0, temperature=0, max_tokens=12, return_token_ids=True
    )
    assert answer.json()["choices"][0]["token_ids"] == alone(prefill, prompt, temperature=0)


def test_many_at_once(prefill: Running, decode: Running) -> None:
    """Eight interleaved hand-offs give what each gives alone."""
    prompts = [prompt_of(length) for length in (3, 16, 20, 33, 40, 50, 64, 70)]
    expected = [alone(prefill, prompt, temperature=0) for prompt in prompts]
    for i, prompt in enumerate(prompts):
        hand_off(prefill, decode, prompt, len(prompt) // 2, request_id=f"m-{i}")
    streams = []
    for i, prompt in enumerate(prompts):
        body = {"prompt": prompt, "begin": len(prompt) // 2, "request_id": f"m-{i}", "temperature": 0}
        request = decode.http.build_request(
            "POST", "/microserving/start_generate", json={**body, "max_tokens": 12, **stream_fields()}
        )
        streams.append(decode.http.send(request, stream=True))
    for response, tokens in zip(streams, expected, strict=True):
        events = SSEParser().feed(response.read())
        response.close()
        ids = [c["token_ids"] for event in events[:-1] for c in json.loads(event)["choices"]]
        assert list(itertools.chain.from_iterable(ids)) == tokens
