"""A hand-off really moves the work: counters on both engines, bytes on the wire, and the layer-wise overlap."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .conftest import Cluster
from .processes import MODEL, completion, counters, difference, load, wait_idle
from .prompts import ids

# SmolLM2-135M, written down here from its model card: nothing of ours is asked for these.
LAYERS, KV_HEADS, HEAD_DIM, FP16 = 30, 3, 64, 2


def window_end(length: int, factor: float) -> int:
    """The split of WIRE: all but the last token for 0, else int((1 - f) * length)."""
    return length - 1 if factor < 1e-5 else min(int((1 - factor) * length), length - 1)


@pytest.mark.case("PD-52")
@pytest.mark.parametrize("length", [1, 2, 16, 17, 100, 300])
@pytest.mark.parametrize("factor", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_each_engine_computed_its_part(
    length: int, factor: float, cluster: Cluster, router_for: Callable[[str, float | None], str]
) -> None:
    url = router_for("balanced_prefill_decode", factor)
    prefill, decode = counters(cluster.prefill), counters(cluster.decode)
    salt = secrets.token_hex(8)  # nothing is cached
    prompt = ids(length, seed=length)
    completion(url, prompt=prompt, max_tokens=3, temperature=0, ignore_eos=True, cache_salt=salt)
    after_prefill, after_decode = counters(cluster.prefill), counters(cluster.decode)
    end = window_end(length, factor)
    assert difference(prefill, after_prefill, "prompt_tokens_computed") == end
    assert difference(prefill, after_prefill, "tokens_sent") == end
    assert difference(prefill, after_prefill, "bytes_sent") == end * LAYERS * 2 * KV_HEADS * HEAD_DIM * FP16
    assert difference(prefill, after_prefill, "output_tokens") == 0
    assert difference(decode, after_decode, "prompt_tokens_computed") == length - end
    assert difference(decode, after_decode, "tokens_received") == end
    assert difference(decode, after_decode, "tokens_sent") == 0
    assert difference(decode, after_decode, "output_tokens") == 3
    wait_idle(cluster.engines)


def remote_send(cluster: Cluster, length: int, **extra: Any) -> dict[str, Any]:
    """prep_recv, remote_send and abort of one prompt, by hand; the answer of remote_send."""
    salt = secrets.token_hex(8)  # nothing is cached
    body = {"model": MODEL, "prompt": ids(length), "request_id": f"by-hand-{length}", "cache_salt": salt}
    with httpx.Client(timeout=60) as client:
        received = client.post(
            f"{cluster.decode}/microserving/prep_recv", json={**body, "end": length}
        ).json()
        response = client.post(
            f"{cluster.prefill}/microserving/remote_send",
            json={
                **body, **extra, "begin": 0, "end": length, "recv_rank": 0,
                "kv_addr_info": received["kv_append_metadata"],
            },
        )  # fmt: skip
        client.post(f"{cluster.decode}/microserving/abort", json={"request_id": body["request_id"]})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_remote_send_says_what_it_did(cluster: Cluster) -> None:
    answer = remote_send(cluster, 64)
    assert (answer["tokens_computed"], answer["tokens_sent"], answer["prefix_matched_length"]) == (64, 64, 0)
    assert answer["bytes_sent"] == 64 * LAYERS * 2 * KV_HEADS * HEAD_DIM * FP16
    assert "layer_times_ns" not in answer


def test_layers_are_sent_while_the_next_ones_are_computed(cluster: Cluster) -> None:
    exposed = []
    for _ in range(5):
        answer = remote_send(cluster, 512, include_layer_times=True)
        for step in answer["layer_times_ns"]:
            assert len(step) == LAYERS
            put_end, layer_end = [times[1] for times in step], [times[2] for times in step]
            assert put_end[0] < layer_end[2]
            assert all(end < following for end, following in zip(put_end, layer_end, strict=True))
            assert layer_end == sorted(layer_end)
            assert all(begin <= end for begin, end, _ in step)
        exposed.append(answer["exposed_ms"] / answer["prefill_ms"])
    assert statistics.median(exposed) < 0.10, exposed
    wait_idle(cluster.engines)
    assert load(cluster.decode)["total_pages"] > 0
