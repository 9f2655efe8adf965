"""A benchmark client that people use, against the router: what it counts is what we count.

`aiperf` is too large for the tests' own dependencies (130 packages). The test runs where its command is on the path, or
named by MICROSERVING_AIPERF: `python -m venv DIR && DIR/bin/pip install aiperf`, then MICROSERVING_AIPERF=DIR/bin/aiperf.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import Cluster
from .processes import MODEL, PLAIN, counters, difference, environment, wait_idle

COMMAND = os.environ.get("MICROSERVING_AIPERF") or shutil.which("aiperf")
REQUESTS = 8


@pytest.fixture
def tokenizer_dir(cluster: Cluster, tmp_path: Path) -> Path:
    """The model's tokenizer as `transformers` reads it."""
    document = httpx.get(f"{cluster.decode}/microserving/tokenizer", timeout=30, verify=PLAIN).json()
    files = {
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": document["chat_template"]}
            | document["special_tokens"]
        ),
        "tokenizer.json": document["tokenizer"],
        "config.json": '{"model_type": "llama"}',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.skipif(COMMAND is None, reason="aiperf is not installed (see the module's docstring)")
@pytest.mark.case("MT-07")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_aiperf_counts_what_we_count(
    endpoint: str, cluster: Cluster, tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Answers that end early, by a stop, and have no usage in any chunk with text."""
    folder = tmp_path_factory.mktemp("aiperf")
    before = counters(cluster.decode)
    ended = subprocess.run(
        [
            *(
                str(COMMAND),
                "profile",
                "-m",
                MODEL,
                "-u",
                cluster.router,
                "--endpoint-type",
                endpoint,
                "--streaming",
            ),
            *("--tokenizer", str(tokenizer_dir), "--request-count", str(REQUESTS), "--concurrency", "4"),
            *(
                "--isl",
                "30",
                "--isl-stddev",
                "0",
                "--osl",
                "12",
                "--random-seed",
                "1",
                "--ui",
                "none",
                "--export-level",
                "records",
            ),
            *("--extra-inputs", "temperature:0", "--extra-inputs", "stop:th", "--use-server-token-count"),
            *("--output-artifact-dir", str(folder)),
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    records = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]
    assert len(records) == REQUESTS
    assert all(record.get("error") is None for record in records)
    wait_idle(cluster.engines)
    generated = difference(before, counters(cluster.decode), "output_tokens")
    assert (
        _total(records, "usage_completion_tokens") == _total(records, "output_sequence_length") == generated
    )
    assert REQUESTS <= generated < 12 * REQUESTS  # some ended early
    if endpoint == "completions":  # of a chat the client does not count the template
        assert _total(records, "usage_prompt_tokens") == 30 * REQUESTS


def _total(records: list[dict[str, Any]], name: str) -> int:
    return sum(int(record["metrics"][name]["value"]) for record in records)
