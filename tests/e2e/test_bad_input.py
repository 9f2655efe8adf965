"""Bad input through every door: the right 4xx that names the field, and the same processes still serve, holding no page."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .conftest import Cluster
from .processes import MODEL, completion, wait_idle
from .prompts import ids

LENGTH = 40
BASE: dict[str, Any] = {"model": MODEL, "prompt": ids(LENGTH), "max_tokens": 2, "temperature": 0}


@pytest.fixture
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30) as client:
        yield client


@pytest.fixture(autouse=True)
def still_right(cluster: Cluster) -> Iterator[None]:
    """After each test: same processes, nothing held, same answer."""
    yield
    wait_idle(cluster.engines)
    assert cluster.process.popen.poll() is None
    answer = completion(cluster.router, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert "Paris" in answer["choices"][0]["text"]


def refused(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The error object of an answer that must be ``status`` in OpenAI's shape, without any internals in it."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    if param is not None:
        assert error["param"] == param, error
    assert not any(word in response.text for word in ("Traceback", "/home/", "/tmp/", '.py"', "127.0.0.1:"))
    return error


def prep_recv(http: httpx.Client, cluster: Cluster, request_id: str, **fields: Any) -> httpx.Response:
    body = {**BASE, "request_id": request_id, "end": LENGTH - 1, **fields}
    return http.post(f"{cluster.decode}/microserving/prep_recv", json=body)


def remote_send(http: httpx.Client, cluster: Cluster, metadata: object, **fields: Any) -> httpx.Response:
    body = {
        **BASE, "request_id": "sender", "begin": 0, "end": LENGTH - 1, "recv_rank": 0, "kv_addr_info": metadata,
        **fields,
    }  # fmt: skip
    return http.post(f"{cluster.prefill}/microserving/remote_send", json=body)


def abort(http: httpx.Client, cluster: Cluster, request_id: str) -> None:
    for url in cluster.engines:
        assert http.post(f"{url}/microserving/abort", json={"request_id": request_id}).status_code == 200


@pytest.fixture(autouse=True)
def nothing_left_behind(http: httpx.Client, cluster: Cluster, still_right: None) -> Iterator[None]:
    """A test that failed half-way does not make the next ones fail."""
    yield
    for request_id in (
        "bad-end",
        "window",
        "twice",
        "victim",
        "ranges",
        "early",
        "bad-prompt",
        "long",
        "model",
    ):
        abort(http, cluster, request_id)


@pytest.mark.parametrize("end", [LENGTH + 1, 400, -LENGTH - 1, 2**31, 2**63, 2**64, "3", 1.5, True, [1]])
def test_prep_recv_bad_end(end: object, http: httpx.Client, cluster: Cluster) -> None:
    refused(prep_recv(http, cluster, "bad-end", end=end), 400, "end")


@pytest.mark.case("PD-46")
def test_a_window_beyond_the_prompt_is_explained(http: httpx.Client, cluster: Cluster) -> None:
    error = refused(prep_recv(http, cluster, "window", end=400), 400, "end")
    assert "400" in error["message"]
    assert str(LENGTH) in error["message"]


def test_a_live_id_is_a_conflict(http: httpx.Client, cluster: Cluster) -> None:
    assert prep_recv(http, cluster, "twice").status_code == 200
    refused(prep_recv(http, cluster, "twice"), 409)
    abort(http, cluster, "twice")


def resigned(cluster: Cluster, metadata: str, **changes: object) -> str:
    """The descriptor with fields changed (None: signature left out) and signed with the cluster's own secret."""
    fields = {**json.loads(base64.b64decode(metadata)), **changes}
    unsigned = {name: value for name, value in fields.items() if name != "hmac"}
    canonical = json.dumps(unsigned, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    if "hmac" not in changes:
        fields["hmac"] = hmac.new(cluster.secret, canonical.encode(), hashlib.sha256).hexdigest()
    return base64.b64encode(json.dumps(fields).encode()).decode()


@pytest.mark.case("PD-24")
def test_bad_descriptors(http: httpx.Client, cluster: Cluster) -> None:
    metadata = prep_recv(http, cluster, "victim").json()["kv_append_metadata"]
    fields = json.loads(base64.b64decode(metadata))
    for garbage in (
        "",
        "@@@@",
        "AAAA",
        base64.b64encode(b"{}").decode(),
        "x" * 500_000,
        5,
        None,
        metadata[:-4],
    ):
        refused(remote_send(http, cluster, garbage), 400, "kv_addr_info")
    refused(remote_send(http, cluster, "x" * 10_000_000), 413)
    for changes in (
        {"hmac": None},
        {"hmac": "0" * 64},
        {"layout_hash": "0" * 16},
        {"model_hash": "0" * 16},
        {"segments": [1, 0, LENGTH - 2]},
        {"segments": [1, 2**31 - 100, LENGTH - 1]},
        {"nbytes": fields["nbytes"] * 2},
    ):
        refused(remote_send(http, cluster, resigned(cluster, metadata, **changes)), 400)
    refused(remote_send(http, cluster, resigned(cluster, metadata, expires_at=1.0)), 409)
    # The very same descriptor, signed by our own helper, is accepted: the refusals above had their own reasons.
    assert remote_send(http, cluster, resigned(cluster, metadata)).status_code == 200
    abort(http, cluster, "victim")


def test_bad_ranges_of_remote_send(http: httpx.Client, cluster: Cluster) -> None:
    metadata = prep_recv(http, cluster, "ranges").json()["kv_append_metadata"]
    for fields, param in (
        ({"end": LENGTH - 2}, None),
        ({"end": LENGTH + 5}, "end"),
        ({"begin": 3}, None),
        ({"begin": -1}, None),
        ({"begin": 30, "end": 20}, None),
        ({"recv_rank": 7}, "recv_rank"),
        ({"recv_rank": -1}, "recv_rank"),
    ):
        refused(remote_send(http, cluster, metadata, **fields), 400, param)
    # A refused send changed nothing: the right one still works, and so does the generation behind it.
    assert remote_send(http, cluster, metadata).status_code == 200
    body = {**BASE, "request_id": "ranges", "begin": LENGTH - 1}
    assert http.post(f"{cluster.decode}/microserving/start_generate", json=body).status_code == 200


@pytest.mark.case("PD-11")
def test_start_generate_before_the_kv_arrived(http: httpx.Client, cluster: Cluster) -> None:
    assert prep_recv(http, cluster, "early", cache_salt="early").status_code == 200
    body = {**BASE, "request_id": "early", "begin": LENGTH - 1, "cache_salt": "early"}
    refused(http.post(f"{cluster.decode}/microserving/start_generate", json=body), 409)
    abort(http, cluster, "early")
    refused(http.post(f"{cluster.decode}/microserving/start_generate", json=body), 409)


def test_abort_is_idempotent_and_takes_unknown_ids(http: httpx.Client, cluster: Cluster) -> None:
    for _ in range(3):
        abort(http, cluster, "never-seen")


def test_start_generate_of_an_unknown_id(http: httpx.Client, cluster: Cluster) -> None:
    """A new request when it asks for the whole prompt; refused when it counts on KV that is not there."""
    body = {**BASE, "request_id": "brand-new"}
    response = http.post(f"{cluster.decode}/microserving/start_generate", json={**body, "begin": 0})
    assert response.status_code == 200
    direct = completion(cluster.router, **{k: v for k, v in BASE.items() if k != "model"})
    assert response.json()["choices"][0]["text"] == direct["choices"][0]["text"]
    other = {**body, "begin": LENGTH - 1, "cache_salt": "nothing is cached under this"}
    refused(http.post(f"{cluster.decode}/microserving/start_generate", json=other), 400, "begin")


@pytest.mark.case("API-21")
@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], ["a", ""], None, 5, {"a": 1}, [-1], [10**9], [1.5], [True]]
)
def test_bad_prompts(prompt: object, http: httpx.Client, cluster: Cluster, hybrid: str) -> None:
    for url in (cluster.router, hybrid):
        response = http.post(
            f"{url}/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 2}
        )
        assert refused(response, 400)["param"].startswith("prompt")
    response = prep_recv(http, cluster, "bad-prompt", prompt=prompt, end=0)
    assert refused(response, 400)["param"].startswith("prompt")


def test_over_long_prompts(http: httpx.Client, cluster: Cluster, hybrid: str) -> None:
    long = {"model": MODEL, "prompt": [7] * 9000, "max_tokens": 2}
    for url in (cluster.router, hybrid):
        for stream in (False, True):
            error = refused(http.post(f"{url}/v1/completions", json={**long, "stream": stream}), 400)
            assert error["code"] == "context_length_exceeded"
    refused(prep_recv(http, cluster, "long", prompt=[7] * 9000, end=-1), 400)


def test_unknown_models_and_routes(http: httpx.Client, cluster: Cluster, hybrid: str) -> None:
    for url in (cluster.router, hybrid):
        for stream in (False, True):
            body = {**BASE, "model": "gpt-17", "stream": stream}
            assert refused(http.post(f"{url}/v1/completions", json=body), 404)["code"] == "model_not_found"
        refused(http.get(f"{url}/v1/nothing"), 404)
    refused(prep_recv(http, cluster, "model", model="gpt-17"), 404)


@pytest.mark.case("API-26")
@pytest.mark.parametrize("body", [b"", b"{", b'{"model":"x",,}', b"\xff\xfe{}", b"[]", b"null", b'{"a":NaN}'])
def test_broken_json(body: bytes, http: httpx.Client, cluster: Cluster) -> None:
    for url, path in (
        (cluster.router, "/v1/completions"),
        (cluster.router, "/v1/chat/completions"),
        (cluster.router, "/v1/responses"),
        (cluster.decode, "/microserving/prep_recv"),
        (cluster.prefill, "/microserving/remote_send"),
        (cluster.decode, "/microserving/start_generate"),
        (cluster.decode, "/microserving/abort"),
    ):
        refused(http.post(url + path, content=body, headers={"content-type": "application/json"}), 400)
