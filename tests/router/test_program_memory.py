"""A router that is started again has the program that was deployed last, and what can go wrong with the file."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from microserving.errors import ConfigError
from microserving.program.testing import FakeCluster
from microserving.router.config import Setting
from microserving.router.program_host import HostSettings, ProgramHost
from microserving.router.program_loader import load_program, load_source, source_of
from microserving.router.program_memory import ProgramMemory

from .test_admin import Admin, with_admin

TEXT = """\
from microserving.program import *
class Mine(Program):
    share: float = 0.5
    async def route(self, request, cluster):
        self.share = 1.0
        async for chunk in cluster.decode.least_loaded().start_generate(request):
            yield chunk
"""


class Started:
    """The programs of one router's life, over a state file."""

    def __init__(
        self,
        path: Path | None,
        program: str = "round_robin",
        settings: Mapping[str, Setting] | None = None,
        kept: int = 3,
    ) -> None:
        memory = ProgramMemory(path, program, settings or {})
        self.recalled = memory.recall()
        if self.recalled is None:
            loaded = load_program(program, settings)
        else:
            loaded = self.recalled.versions[-1].program
        self.host = ProgramHost(loaded, FakeCluster(), HostSettings(kept=kept))
        if self.recalled is not None:
            self.host.resume(self.recalled.versions, self.recalled.last_number)
        self.host.on_change = lambda: memory.remember(self.host)

    def deploy(self, name: str, text: str | None = TEXT, **settings: object) -> None:
        if text is None:
            self.host.switch(load_program(name, settings))
        else:
            self.host.switch(load_source(source_of(Path(f"/there/{name}.py"), text.encode()), settings))

    @property
    def versions(self) -> list[tuple[int, str]]:
        """The newest first; the last of ``kept`` is in charge."""
        return [(version.number, version.program.name) for version in reversed(self.host.kept)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


def test_a_deployment_outlives_the_router(path: Path) -> None:
    first = Started(path)
    first.deploy("mine", share=0.25)
    since = first.host.current.since
    again = Started(path)
    assert again.versions == [(2, "mine"), (1, "round_robin")]
    assert again.host.current.since == since
    assert vars(again.host.program.instance) == {"share": 0.25}
    assert again.host.program.where == "/there/mine.py:2"
    again.deploy("prefix_aware", None, exact=True)
    third = Started(path)
    assert third.versions == [(3, "prefix_aware"), (2, "mine"), (1, "round_robin")]
    assert vars(third.host.program.instance) == {"exact": True}


def test_settings_are_kept_as_they_were_given(path: Path) -> None:
    """Not as a program changed them while it worked."""
    first = Started(path)
    first.deploy("mine", share=0.25)
    vars(first.host.program.instance)["share"] = 1.0
    first.deploy("other")
    first.host.roll_back()
    assert vars(Started(path).host.program.instance) == {"share": 0.25}


def test_settings_without_bounds_are_kept_too(path: Path) -> None:
    """Which JSON has no numbers for, but TOML."""
    inf = float("inf")
    Started(path, "adaptive", {"ttft_ms": inf}).deploy("mine", share=-inf)
    again = Started(path, "adaptive", {"ttft_ms": inf})
    assert again.versions == [(2, "mine"), (1, "adaptive")]
    assert vars(again.host.program.instance) == {"share": -inf}


def test_a_rollback_counts_too(path: Path) -> None:
    first = Started(path)
    first.deploy("one")
    first.deploy("two")
    first.host.roll_back()
    again = Started(path)
    assert again.versions == [(2, "one"), (1, "round_robin")]
    again.deploy("three")
    assert again.versions[0] == (4, "three")  # 3 was another one
    again.host.roll_back()
    again.host.roll_back()
    assert not path.exists()
    assert Started(path).versions == [(1, "round_robin")]


def test_as_many_are_kept_as_for_rollbacks(path: Path) -> None:
    first = Started(path, kept=2)
    for number in range(5):
        first.deploy(f"p{number}")
    assert Started(path, kept=2).versions == [(6, "p4"), (5, "p3"), (4, "p2")]


@pytest.mark.parametrize(
    ("program", "settings"), [("prefix_aware", {}), ("round_robin", {"exact": True}), ("mine.py", {})]
)
def test_another_configuration_is_a_newer_decision(
    program: str, settings: dict[str, Setting], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Started(path).deploy("mine")
    assert ProgramMemory(path, program, settings).recall() is None
    assert "the configuration names another program, or other settings" in caplog.text
    assert Started(path).versions == [(1, "round_robin")]  # for good


def test_who_deploys_and_who_starts_may_be_in_different_directories(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own.py"
    own.write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    Started(path, "own.py").deploy("mine")
    own.unlink()  # not needed any more
    monkeypatch.chdir("/")
    assert Started(path, str(own)).versions == [(2, "mine"), (1, "own")]


def test_the_file_is_whole_and_private(path: Path) -> None:
    Started(path).deploy("mine", TEXT + "# é\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    state = json.loads(path.read_text("utf-8"))
    assert [version["source"] for version in state["versions"]] == [None, TEXT + "# é\n"]


BROKEN: dict[str, tuple[str, str]] = {
    "empty": ("", "JSON"),
    "cut": ('{"format": 1', "JSON"),
    "no object": ("[]", "object"),
    "another format": ('{"format": 2, "configured": {}, "last_version": 1, "versions": []}', "format"),
    "an unknown field": (
        '{"configured": {"program": "p", "settings": {}, "x": 1}, "last_version": 1, "versions": []}',
        "configured.x: Extra inputs",
    ),
}


@pytest.mark.parametrize(("text", "reason"), list(BROKEN.values()), ids=list(BROKEN))
def test_a_broken_file_is_told_and_ignored(
    text: str, reason: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(text)
    started = Started(path)
    assert started.versions == [(1, "round_robin")]
    [record] = caplog.records
    assert (record.levelno, record.getMessage().startswith(f"{path} is ignored")) == (logging.ERROR, True)
    assert reason in record.getMessage()
    started.deploy("mine")
    assert Started(path).versions == [(2, "mine"), (1, "round_robin")]


def test_a_file_that_others_may_write_is_not_executed(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Started(path).deploy("mine")
    path.chmod(0o620)
    assert Started(path).recalled is None
    assert "others may write it" in caplog.text


def test_a_directory_is_no_file(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.mkdir()
    started = Started(path)
    assert started.recalled is None
    caplog.clear()
    started.deploy("mine")
    assert "version 2 (mine) is not remembered" in caplog.text
    assert started.versions == [(2, "mine"), (1, "round_robin")]
    assert os.listdir(path.parent) == [path.name]


def test_without_a_file_there_is_no_memory_and_without_a_directory_no_start(tmp_path: Path) -> None:
    started = Started(None)
    started.deploy("mine")
    started.host.roll_back()
    with pytest.raises(ConfigError, match="there is no such directory"):
        ProgramMemory(tmp_path / "none" / "state.json", "round_robin", {})


def test_a_version_that_does_not_load_any_more_is_left_out(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Started(path)
    first.deploy("one")
    first.deploy("two")
    state = json.loads(path.read_text())
    state["versions"][-1]["source"] = "import nothing_of_the_kind"
    path.write_text(json.dumps(state))
    assert Started(path).versions == [(2, "one"), (1, "round_robin")]
    assert "version 3 cannot be loaded any more: /there/two.py:1: ModuleNotFoundError" in caplog.text
    state["versions"][-2]["path"], state["versions"][-2]["source"] = "gone", None
    path.write_text(json.dumps(state))
    assert Started(path).recalled is None


def test_a_whole_router_remembers(path: Path) -> None:
    seen: list[int] = []

    async def deploys(admin: Admin) -> None:
        body = {"path": "mine.py", "source": TEXT, "settings": {"share": 0.25}}
        seen.append((await admin.deploy(**body))["in_charge"]["version"])

    async def has_it(admin: Admin) -> None:
        status = await admin.ask("GET", "/admin/program")
        assert [(v["version"], v["name"], v["settings"]) for v in status["versions"]] == [
            (2, "mine", {"share": 0.25}),
            (1, "round_robin", {}),
        ]
        answer = await admin.public.post("/v1/completions", json={"prompt": [5, 6], "max_tokens": 2})
        assert answer.status_code == 200, answer.text
        await admin.ask("POST", "/admin/program/rollback")

    async def is_back(admin: Admin) -> None:
        assert (await admin.ask("GET", "/admin/program"))["in_charge"]["name"] == "round_robin"

    for scenario in (deploys, has_it, is_back):
        with_admin(scenario, program_state_file=str(path))
    assert seen == [2]


def test_a_program_that_fails_after_the_restart_is_rolled_back(path: Path) -> None:
    """Its trial begins anew."""
    Started(path).deploy("mine")

    async def scenario() -> None:
        again = Started(path)
        for _ in range(3):
            again.host.release(again.host.acquire(), "program_failed")
        assert again.versions == [(1, "round_robin")]
        await again.host.stop()

    asyncio.run(scenario())
    assert not path.exists()
