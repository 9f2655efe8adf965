"""The verbs with the prefix cache, resumes and deadlines over HTTP: what the router's side builds on."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from microserving.protocol.generation_stream import GenerationStreamReader
from microserving.protocol.microserving import stream_fields
from microserving.protocol.sse import SSEParser

from .engines import MODEL, Running, engines, make_node
from .test_prefill_decode import alone, hand_off, prompt_of


def usage_of(answer: dict[str, Any]) -> tuple[int, int, int]:
    usage = answer["usage"]
    return (
        usage["prompt_tokens"],
        usage["completion_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def generate(engine: Running, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "begin": 0, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
    answer = engine.verb("start_generate", **body | fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_second_hand_off_moves_only_what_is_new(prefill: Running, decode: Running) -> None:
    prompt, salt = prompt_of(301), {"cache_salt": "second"}
    hand_off(prefill, decode, prompt, -1, request_id="one", **salt)
    first = generate(decode, prompt, begin=-1, request_id="one", **salt)
    assert usage_of(first) == (301, 12, 0)
    longer = [*prompt, *prompt_of(40)]
    received, sent = hand_off(prefill, decode, longer, -1, request_id="two", **salt)
    assert received["prefix_matched_length"] == 301, "the decode engine also kept what it generated from"
    assert (sent["prefix_matched_length"], sent["tokens_computed"], sent["tokens_sent"]) == (300, 40, 39)
    second = generate(decode, longer, begin=-1, request_id="two", **salt)
    assert usage_of(second) == (341, 12, 301)
    assert second["choices"][0]["token_ids"] == alone(prefill, longer, temperature=0, cache_salt="other")


@pytest.mark.case("PD-28")
def test_a_prompt_that_is_cached_needs_no_hand_off(prefill: Running, decode: Running) -> None:
    prompt = prompt_of(120)
    expected = generate(decode, prompt)["choices"][0]["token_ids"]
    before = prefill.load()["counters"]
    for name in ("again-1", "again-2"):
        received = decode.verb("prep_recv", prompt=prompt, end=-1, request_id=name).json()
        assert received["prefix_matched_length"] == 119
        assert generate(decode, prompt, begin=-1, request_id=name)["choices"][0]["token_ids"] == expected
    matched = decode.verb("match_prefix", prompt=[*prompt, 5]).json()["prefix_matched_length"]
    assert matched == 120 + (expected[0] == 5)
    assert generate(decode, prompt, begin=119)["choices"][0]["token_ids"] == expected
    assert prefill.load()["counters"] == before


def test_a_context_migrates(prefill: Running, decode: Running) -> None:
    prompt = prompt_of(77)
    salt = {"cache_salt": "migrated"}
    hand_off(prefill, decode, prompt, len(prompt), request_id="m", **salt)
    committed = decode.verb("commit", request_id="m")
    assert committed.json() == {"request_id": "m", "cached_tokens": 77}
    error = decode.verb("commit", request_id="m").json()["error"]
    assert (error["param"], error["code"]) == ("request_id", "lease_invalid")
    answer = generate(decode, [*prompt, 3], **salt)
    assert usage_of(answer) == (78, 12, 77)


def test_committing_what_has_not_arrived(decode: Running) -> None:
    assert decode.verb("prep_recv", prompt="hello", end=4, request_id="early").status_code == 200
    assert decode.verb("commit", request_id="early").status_code == 409
    assert decode.verb("commit", request_id="nobody").status_code == 409
    assert decode.verb("commit").json()["error"]["param"] == "request_id"
    decode.verb("abort", request_id="early")


def test_another_salt_is_another_request(decode: Running) -> None:
    assert decode.verb("prep_recv", prompt="hello", end=0, request_id="s", cache_salt="a").status_code == 200
    error = decode.verb("start_generate", prompt="hello", begin=0, request_id="s").json()["error"]
    assert error["param"] == "cache_salt"
    decode.verb("abort", request_id="s")


@pytest.mark.case("PD-34")
@pytest.mark.parametrize("stream", [False, True])
def test_a_resume_over_the_wire(decode: Running, stream: bool) -> None:
    prompt = prompt_of(20)
    whole = generate(decode, prompt)["choices"][0]
    for cut in (1, 7, 12):
        fields = {"resume_output_ids": whole["token_ids"][:cut]}
        if not stream:
            answer = generate(decode, prompt, **fields)
            choice = answer["choices"][0]
            assert (choice["text"], choice["token_ids"]) == (whole["text"][cut:], whole["token_ids"][cut:])
            assert (usage_of(answer)[1], choice["finish_reason"]) == (12, "length")
            continue
        body = {"model": MODEL, "prompt": prompt, "begin": 0, "temperature": 0, "max_tokens": 12}
        response = decode.post("/microserving/start_generate", body | fields | stream_fields())
        reader = GenerationStreamReader(len(prompt), cut)
        chunks = [c for event in SSEParser().feed(response.content) for c in reader.feed(event)]
        assert "".join(chunk.text for chunk in chunks) == whole["text"][cut:]
        assert [token for chunk in chunks for token in chunk.token_ids] == whole["token_ids"][cut:]
        assert all(chunk.completion_tokens > cut for chunk in chunks if chunk.token_ids)
        assert chunks[-1].completion_tokens == 12


def test_a_bad_resume(decode: Running) -> None:
    for ids in ([256], [-1], "1", [1] * 13):
        answer = decode.verb("start_generate", prompt="a", begin=0, max_tokens=12, resume_output_ids=ids)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "resume_output_ids")


@pytest.mark.case("PD-34")
def test_a_preempted_generation_comes_back_only_when_asked_for() -> None:
    """A pool that is too small for two: the newer one is given back, and goes on exactly."""
    node = make_node("small", _fake(), pages=8, memory_threshold=1.0)
    with engines(node, make_node("other", _fake())) as (small, other):
        prompts = [prompt_of(20), prompt_of(21)]
        expected = [alone(other, prompt, temperature=0, max_tokens=90) for prompt in prompts]
        answers: list[dict[str, Any]] = [{}, {}]

        def ask(i: int) -> None:
            fields = {"preemption": "return", "max_tokens": 90}
            answers[i] = generate(small, prompts[i], **fields)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reasons = [answer["choices"][0]["finish_reason"] for answer in answers]
        assert sorted(reasons) in (["length", "preempt"], ["length", "length"])
        for prompt, answer, tokens in zip(prompts, answers, expected, strict=True):
            ids = answer["choices"][0]["token_ids"]
            assert ids == tokens[: len(ids)]
            if answer["choices"][0]["finish_reason"] == "preempt":
                rest = generate(other, prompt, max_tokens=90, resume_output_ids=ids)
                assert [*ids, *rest["choices"][0]["token_ids"]] == tokens
        both = small.post(
            "/v1/completions",
            {"prompt": prompts, "max_tokens": 90, "temperature": 0, "return_token_ids": True},
        ).json()
        assert [choice["token_ids"] for choice in both["choices"]] == expected
        small.wait_idle()


def _fake() -> Any:
    from microserving.transports.fake import FakeTransport

    return FakeTransport()


# --- deadlines -------------------------------------------------------------------------------------------------------


def check_deadline(response: Any) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_deadlines_of_every_verb() -> None:
    """The engine is busy with a step that does not end: nobody waits longer than he said."""
    from microserving.transports.fake import FakeNetwork, FakeTransport

    network, go_on = FakeNetwork(), threading.Event()
    prefill = make_node("prefill-0", FakeTransport(network=network))
    decode = make_node("decode-0", FakeTransport(network=network), pages=8, reserve_wait_s=20)
    with engines(prefill, decode) as (p, d):
        try:
            received = d.verb("prep_recv", prompt=prompt_of(100), end=100, request_id="r").json()
            check_deadline(d.verb("prep_recv", prompt=prompt_of(90), end=90, request_id="w", timeout=0.2))
            fields = {"begin": 0, "end": 100, "kv_addr_info": received["kv_append_metadata"], "recv_rank": 0}
            p.runner.before_run = lambda _: go_on.wait(10) and None
            threading.Timer(0.5, go_on.set).start()
            check_deadline(
                p.verb("remote_send", prompt=prompt_of(100), timeout=0.2, request_id="r", **fields)
            )
            d.wait_for(reserved=0)  # the receiver was told
            assert d.verb("prep_recv", prompt=prompt_of(90), end=90, request_id="w").status_code == 200
            d.verb("abort", request_id="w")
        finally:
            go_on.set()
            p.runner.before_run = None
        p.wait_idle()
        d.wait_idle()


def test_a_generation_ends_at_its_deadline(decode: Running) -> None:
    decode.runner.before_run = lambda _: threading.Event().wait(0.02) and None
    try:
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 500, "timeout": 0.3}
        check_deadline(decode.post("/v1/completions", body))
        events = SSEParser().feed(decode.post("/v1/completions", body | {"stream": True}).content)
        assert json.loads(events[-1])["error"]["code"] == "deadline_exceeded"
        assert len(events) > 2
    finally:
        decode.runner.before_run = None


# --- bounded -----------------------------------------------------------------------------------------------------------


@pytest.mark.case("PD-07")
def test_who_gets_no_pages_or_no_place_is_told_when_to_come_again() -> None:
    node = make_node("small", _fake(), pages=8, reserve_wait_s=0.1, max_batch_size=1, ingestion_queue_size=2)
    with engines(node) as (small,):
        assert small.verb("prep_recv", prompt=prompt_of(100), end=100, request_id="r").status_code == 200
        refused = small.verb("prep_recv", prompt=prompt_of(99), end=99)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "kv_exhausted")
        assert int(refused.headers["retry-after"]) >= 1
        small.verb("abort", request_id="r")

        go_on = threading.Event()
        small.runner.before_run = lambda _: go_on.wait(10) and None
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 2}
        answers: list[int] = []
        callers = [
            threading.Thread(target=lambda: answers.append(small.post("/v1/completions", body).status_code))
            for _ in range(3)
        ]
        callers[0].start()
        small.wait_for(running=1)
        for caller in callers[1:]:
            caller.start()
        small.wait_for(running=1, waiting=2)
        refused = small.post("/v1/completions", body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        go_on.set()
        for caller in callers:
            caller.join()
        assert answers == [200] * 3
        small.wait_idle()
