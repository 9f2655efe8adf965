"""`/metrics` of an engine: true figures, no client's values, always the same series."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from .engines import Running
from .test_prefill_decode import hand_off, prompt_of


def scrape(engine: Running) -> dict[tuple[str, ...], float]:
    """(name, label values ...) -> value."""
    response = engine.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name.removeprefix("microserving_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def test_the_figures_are_the_loads(prefill: Running, decode: Running) -> None:
    hand_off(prefill, decode, prompt_of(60), -1, request_id="m", cache_salt="metrics")
    during = scrape(decode)
    assert (during["leases", "arrived"], during["leases", "writing"]) == (1, 0)
    assert during["kv_pages", "reserved"] == 4
    fields = {"prompt": prompt_of(60), "begin": -1, "max_tokens": 3, "request_id": "m"}
    decode.verb("start_generate", cache_salt="metrics", **fields)
    decode.wait_idle()
    got, load = scrape(decode), decode.load()
    counters = load["counters"]
    pages = ("free", "cached", "running", "reserved", "quarantined")
    assert sum(got["kv_pages", state] for state in pages) == load["total_pages"] == 48
    assert all(got["kv_pages", state] == load[f"{state}_pages"] for state in pages)
    for metric, counter in [
        ("prompt_tokens_computed_total", "prompt_tokens_computed"),
        ("output_tokens_total", "output_tokens"),
        ("tokens_received_total", "tokens_received"),
        ("prefix_query_tokens_total", "prefix_query_tokens"),
        ("prefix_hit_tokens_total", "prefix_hit_tokens"),
        ("evicted_pages_total", "evicted_pages"),
        ("preemptions_total", "preemptions"),
        ("aborts_total", "aborts"),
    ]:
        assert got[metric,] == counters[counter], metric
    for ending, number in counters["requests_finished"].items():
        assert got["requests_finished_total", ending] == number
    assert scrape(prefill)["tokens_sent_total",] == prefill.load()["counters"]["tokens_sent"]
    assert got["engine_ttft_seconds_count",] >= 1
    assert got["engine_itl_seconds_count",] >= 2
    assert got["engine_itl_seconds_bucket", "+Inf"] == got["engine_itl_seconds_count",]
    assert got["step_seconds_count", "decode"] >= 2
    assert got["metric_errors_total",] == 0
    assert [key[1:] for key in got if key[0] == "build_info"]


@pytest.mark.case("MT-03")
@pytest.mark.case("SC-24")
def test_what_clients_send_is_in_no_label(decode: Running) -> None:
    before = scrape(decode)
    for i in range(30):
        secret = f"secret-{i}"
        body = {"prompt": "ab", "max_tokens": 1, "user": secret, "request_id": secret, "cache_salt": secret}
        headers = {"authorization": f"Bearer {secret}", "x-request-id": secret}
        assert decode.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert decode.http.post("/v1/completions", json=body | {"model": secret}).status_code == 404
        decode.verb("abort", request_id=secret)
        decode.http.get(f"/{secret}")
    decode.post("/v1/completions", {"prompt": "ab", "max_tokens": 1, "n": 3})
    after = scrape(decode)
    assert set(after) == set(before)
    assert "secret" not in decode.http.get("/metrics").text
    finished = ("requests_finished_total", "length")
    assert after[finished] - before[finished] == 33, "each choice is a generation of the engine"
