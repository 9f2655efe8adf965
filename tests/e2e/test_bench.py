"""`microserving bench` with clusters of its own: programs in turns on one cluster, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import PAGE_BYTES
from .processes import MODEL, REPOSITORY, environment

CLUSTER = f"""\
[cluster]
name = "small"

[[nodes]]
id = "prefill-0"
role = "prefill"
resources.memory_bytes = {96 * PAGE_BYTES}
resources.cpus = "{{first}}"

[[nodes]]
id = "decode-0"
role = "decode"
resources.memory_bytes = {96 * PAGE_BYTES}
resources.cpus = "{{last}}"
"""
PROMPT, OUTPUT = 33, 6


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    cores = sorted(os.sched_getaffinity(0))
    (folder / "small.toml").write_text(CLUSTER.format(first=cores[0], last=cores[-1]))
    command = [
        sys.executable, "-m", "microserving", "bench", "--config", str(folder / "small.toml"),
        "--program", "prefill_decode", "--program", "balanced_prefill_decode:pd_balance_factor=0.5",
        "--concurrency", "1", "--requests", "2", "--warmup", "0", "--no-keep-load", "--tokenizer", MODEL,
        "--input", str(PROMPT), "--output", str(OUTPUT), "--json", str(folder / "a.json"),
    ]  # fmt: skip
    home = {"TMPDIR": str(folder), "XDG_RUNTIME_DIR": str(folder)}
    ran = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment() | home,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert list(folder.glob("microserving-up-*")) == []
    result: dict[str, Any] = json.loads((Path(folder) / "a.json").read_text())
    return result


def test_each_program_was_measured(report: dict[str, Any]) -> None:
    labels = ["prefill_decode", "balanced_prefill_decode:pd_balance_factor=0.5"]
    assert [run["label"] for run in report["runs"]] == labels
    assert [target["program"] for target in report["targets"]] == [
        "prefill_decode",
        "balanced_prefill_decode",
    ]
    assert {target["model"] for target in report["targets"]} == {MODEL}


def test_tokens_are_those_asked_for_and_came_one_by_one(report: dict[str, Any]) -> None:
    for run in report["runs"]:
        assert run["summary"]["disagreeing"] == run["summary"]["no_usage"] == 0
        for request in run["requests"]:
            assert PROMPT - 3 <= request["prompt_tokens"] <= PROMPT  # whole words
            assert request["output_tokens"] == OUTPUT
            assert 1 <= len(request["pieces"]) <= OUTPUT


def test_hand_offs_are_told(report: dict[str, Any]) -> None:
    """Plain 1P1D sends all of a prompt but its last token; with 0.5 half of it. No run finds what another one left."""
    for run, share in zip(report["runs"], (1.0, 0.5), strict=True):
        tokens = sum(request["prompt_tokens"] for request in run["requests"])
        transfers = run["transfers"]
        assert transfers["hand_offs"] == 2
        assert transfers["tokens_sent"] == pytest.approx(tokens * share, abs=2)
        assert transfers["bytes_sent"] == transfers["tokens_sent"] * PAGE_BYTES // 16
        assert transfers["exposed_ms"] >= transfers["transfer_ms"] > 0
        assert transfers["hidden_ms"] == 0
