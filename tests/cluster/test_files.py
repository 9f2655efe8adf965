"""The runtime directory, the secret, and config models as flags."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from microserving.cluster.command_line import to_flags
from microserving.cluster.processes import LogFile
from microserving.cluster.runtime_dir import runtime_dir
from microserving.cluster.secret import check_secret, create_secret_file
from microserving.engine.config import EngineConfig
from microserving.errors import ConfigError, StartupError


def test_runtime_dir_is_private_and_removed(tmp_path: Path) -> None:
    def fail_inside() -> None:
        with runtime_dir(tmp_path) as path:
            assert path.parent == tmp_path
            assert path.stat().st_mode & 0o777 == 0o700
            (path / "socket").touch()
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert list(tmp_path.iterdir()) == []


def test_a_live_runtime_dir_is_left_alone(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from microserving.cluster.runtime_dir import runtime_dir\n"
        "with runtime_dir(pathlib.Path(sys.argv[1])) as path:\n"
        "    print(path, flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        with runtime_dir(tmp_path) as ours:
            assert theirs.is_dir()
            assert ours != theirs
        other.kill()
        other.wait()
        with runtime_dir(tmp_path) as ours:
            assert list(tmp_path.iterdir()) == [ours], "the dead one's is removed"


def test_only_our_own_directories_are_removed(tmp_path: Path) -> None:
    (tmp_path / "microserving-up-notes").mkdir()
    (tmp_path / "microserving-up-file").touch()
    (tmp_path / "microserving-up-link").symlink_to(tmp_path / "microserving-up-notes")
    with runtime_dir(tmp_path):
        pass
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["microserving-up-file", "microserving-up-link", "microserving-up-notes"]


def test_a_base_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot make a runtime directory"), runtime_dir(tmp_path / "no"):
        pass


def test_secret_file(tmp_path: Path) -> None:
    path = create_secret_file(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(path.read_text())) == 32
    check_secret("prefill", "0.0.0.0", path)


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_beyond_loopback_a_secret_is_needed(role: str) -> None:
    check_secret(role, "127.0.0.1", None)
    what = role if role == "router" else f"{role} engine"
    with pytest.raises(ConfigError, match=f"a {what} listens on 0.0.0.0, beyond this machine, only with"):
        check_secret(role, "0.0.0.0", None)


def test_a_hybrid_needs_no_secret() -> None:
    check_secret("hybrid", "0.0.0.0", None)


def test_a_secret_is_16_bytes_or_more(tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(b"a" * 15 + b"\n")
    with pytest.raises(ConfigError, match="is 15 bytes; it needs at least 16"):
        check_secret("hybrid", "127.0.0.1", path)
    path.write_bytes(b"a" * 16)
    check_secret("router", "0.0.0.0", path)
    with pytest.raises(ConfigError, match="cannot read the cluster secret file"):
        check_secret("hybrid", "127.0.0.1", tmp_path / "no")


def test_to_flags_gives_what_was_set() -> None:
    config = EngineConfig(
        port=0, kv_dtype="float32", strict_fields=True, cache_dir=Path("/c"), max_context=None
    )
    assert to_flags(config) == ["--port=0", "--kv-dtype=float32", "--cache-dir=/c", "--strict-fields"]
    assert to_flags(EngineConfig(strict_fields=False)) == ["--no-strict-fields"]


def test_log_file_starts_anew_when_it_is_full(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log")
    line = "a" * (2**20 - 1)
    for _ in range(17):
        log.write(line)
    assert (tmp_path / "x.log.1").stat().st_size == 16 * 2**20
    assert (tmp_path / "x.log").stat().st_size == 2**20
    log.write("\udcff")  # not encodable: must not end the launcher
    assert os.path.getsize(tmp_path / "x.log") > 2**20
