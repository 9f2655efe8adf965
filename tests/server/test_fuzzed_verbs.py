"""The verbs under messages that no router sends: nothing without the key; with it only 2xx and 4xx, and nothing kept."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from microserving.cluster.secret import check_secret
from microserving.errors import ConfigError
from microserving.transports.fake import FakeTransport

from .engines import MODEL, engines, make_node

KEY = "sk-0123456789abcdef"
MESSAGES = 2000
VERBS = ("prep_recv", "remote_send", "start_generate", "commit", "abort", "renew", "match_prefix")
READS = ("info", "load", "tokenizer")
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 5, 2**31, -(2**31) - 1, 2**63, 2**64, 1.5, 1e308, "", "a", "\ud800", "\0"),
    *(
        "x" * 300,
        [],
        [[]],
        [0],
        [255, 256],
        [-1],
        ["a", "b"],
        [None],
        {},
        {"a": {"a": []}},
        {"type": "regex"},
    ),
)
FIELDS = (
    *(
        "model",
        "prompt",
        "begin",
        "end",
        "kv_addr_info",
        "recv_rank",
        "request_id",
        "user",
        "n",
        "max_tokens",
        "seed",
    ),
    *(
        "temperature",
        "top_p",
        "top_k",
        "stop",
        "stop_token_ids",
        "logit_bias",
        "logprobs",
        "prompt_logprobs",
        "stream",
    ),
    *(
        "stream_options",
        "timeout",
        "cache_salt",
        "metadata",
        "resume_output_ids",
        "preemption",
        "grammar",
        "echo",
    ),
    *(
        "best_of",
        "suffix",
        "debug_config",
        "min_tokens",
        "ignore_eos",
        "return_token_ids",
        "response_format",
        "x",
    ),
)


def message(rng: random.Random, metadata: str) -> bytes:
    """A whole body, some of whose fields are odd; or one that is not JSON, cut or altered."""
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": rng.choice(["hello", [104, 105], "a" * 40]),
        "begin": rng.choice([0, 0, 0, -1]),
        "end": rng.choice([-1, 2, 5]),
        "kv_addr_info": rng.choice([metadata, "x", altered(rng, metadata)]),
        "recv_rank": 0,
        "request_id": f"r{rng.randrange(4)}",
        "max_tokens": rng.randrange(4),
        "stream": rng.random() < 0.3,
    }
    for name in rng.sample(FIELDS, rng.choice([0, 0, 0, 1, 1, 3])):
        body[name] = rng.choice(ODD)
    if not isinstance(limit := body["max_tokens"], int) or limit > 4:
        body["stop_token_ids"] = list(range(256))  # the model may say anything, but not for long
    text = json.dumps(body).encode()
    return altered(rng, text.decode()).encode("latin-1") if rng.random() < 0.1 else text


def altered(rng: random.Random, text: str) -> str:
    """One character is another one, or the end is missing."""
    at = rng.randrange(len(text))
    return text[:at] if rng.random() < 0.3 else text[:at] + chr(rng.randrange(256)) + text[at + 1 :]


@pytest.fixture
def guarded(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEY + "\n")
    return path


@pytest.mark.case("SC-03")
def test_without_the_key_no_verb_does_anything(guarded: Path) -> None:
    with engines(make_node("e", FakeTransport(), api_key_file=guarded)) as (engine,):
        for headers in ({}, {"authorization": "Bearer sk-0123456789abcdeg"}, {"x-admin-key": KEY}):
            for verb in VERBS:
                body = {"prompt": "hello", "begin": 0, "end": 4, "request_id": "r"}
                answer = engine.http.post(f"/microserving/{verb}", json=body, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), verb
            for name in READS:
                assert engine.http.get(f"/microserving/{name}", headers=headers).status_code == 401, name
        engine.http.headers["authorization"] = f"Bearer {KEY}"
        load = engine.load()
        assert load["free_pages"] == load["total_pages"]
        engine.wait_idle()


@pytest.mark.case("SC-03")
@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_without_a_secret_nobody_beyond_this_machine_is_served(role: str) -> None:
    """What tells engines of a cluster apart from strangers is the secret; without one they listen on loopback only."""
    for host in ("0.0.0.0", "::", "192.0.2.1", "host.example"):
        with pytest.raises(ConfigError, match="only with --cluster-secret-file"):
            check_secret(role, host, None)
    for host in ("127.0.0.1", "::1"):
        check_secret(role, host, None)


@pytest.mark.case("SC-03")
def test_fuzzed_messages_are_served_or_refused_and_nothing_stays(guarded: Path) -> None:
    rng = random.Random(3)
    with engines(make_node("e", FakeTransport(), pages=128, api_key_file=guarded)) as (engine,):
        engine.http.headers["authorization"] = f"Bearer {KEY}"
        metadata, ids = "x", set()
        counts: dict[tuple[str, int], int] = {}
        for _ in range(MESSAGES):
            verb, body = rng.choice(VERBS), message(rng, metadata)
            answer = engine.http.post(f"/microserving/{verb}", content=body)
            assert 200 <= answer.status_code < 300 or 400 <= answer.status_code < 500, (
                verb,
                body,
                answer.text,
            )
            assert "internal_error" not in answer.text, (verb, body)
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
            elif verb == "prep_recv":
                metadata = answer.json()["kv_append_metadata"]
                ids.add(answer.json()["request_id"])
            key = (verb, answer.status_code // 100)
            counts[key] = counts.get(key, 0) + 1
        for request_id in ids:
            engine.verb("abort", request_id=request_id)
        engine.wait_idle()
        # The messages are neither all wrong nor all right.
        assert all(counts[verb, 4] > 20 for verb in VERBS), sorted(counts.items())
        assert all(counts.get((verb, 2), 0) > 2 for verb in VERBS if verb != "remote_send"), sorted(
            counts.items()
        )
