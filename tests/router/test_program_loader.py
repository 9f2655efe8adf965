"""Whatever is wrong with a program's file is one line that starts with file and line."""

from __future__ import annotations

import asyncio
import gc
import sys
import textwrap
import weakref
from pathlib import Path

import pytest

from microserving.errors import ProgramError
from microserving.program.testing import Call, FakeCluster, collect, make_request
from microserving.router.program_loader import (
    MAX_PROGRAM_BYTES,
    load_program,
    read_program,
    shipped_programs,
    source_of,
    summary,
)

HEAD = "from microserving.program import Program\n"
ROUTE = "    async def route(self, request, cluster):\n        yield None\n"
GOOD = f"{HEAD}class Mine(Program):\n    factor: float = 0.5\n{ROUTE}"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(text))
    return path


def refusal(path: Path, **settings: object) -> str:
    """The message without the folder."""
    with pytest.raises(ProgramError) as caught:
        load_program(str(path), settings)
    return caught.value.message.replace(f"{path.parent}/", "")


def test_shipped_programs_load_by_name() -> None:
    assert {"round_robin", "prefill_decode", "balanced_prefill_decode"} <= set(shipped_programs())
    for name in shipped_programs():
        loaded = load_program(name)
        assert loaded.name == name
        assert len(loaded.path.read_text().splitlines()) < 60


def test_a_file_with_settings(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    loaded = load_program(str(path), {"factor": 0.25})
    assert (loaded.name, loaded.path, loaded.line) == ("mine", path, 2)
    assert loaded.instance.factor == 0.25  # type: ignore[attr-defined]


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    """Same size, same second: no cache of Python's may answer."""
    path = write(tmp_path, GOOD)
    assert load_program(str(path)).instance.factor == 0.5  # type: ignore[attr-defined]
    path.write_text(GOOD.replace("0.5", "0.7"))
    assert load_program(str(path)).instance.factor == 0.7  # type: ignore[attr-defined]
    assert not list(tmp_path.glob("__pycache__"))


def test_future_annotations_and_helpers(tmp_path: Path) -> None:
    text = """\
        from __future__ import annotations
        from dataclasses import dataclass
        from microserving.program import Cluster, Fraction, Program, Request
        @dataclass
        class Helper:
            size: int = 1
        class _Base(Program):
            factor: Fraction = 0.5
        class Mine(_Base):
            async def route(self, request: Request, cluster: Cluster):
                yield None
        """
    assert load_program(str(write(tmp_path, text))).instance.factor == 0.5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{HEAD}class Mine(Program):\n    def route(:\n", "mine.py:3: SyntaxError: invalid syntax"),
        ("import os\nimport nowhere_to_be_found\n", "mine.py:2: ModuleNotFoundError: No module named"),
        ("x = 1\n\ny = x / 0\n", "mine.py:3: ZeroDivisionError: division by zero"),
        ("def f():\n    raise ValueError('a\\nb')\nf()\n", "mine.py:2: ValueError: a b"),
        ("raise SystemExit(3)\n", "mine.py:1: SystemExit: 3"),
        ("\0", "mine.py:1: SyntaxError: source code string cannot contain null bytes"),
        ("", "mine.py:1: there is no subclass of Program in this file"),
        (HEAD, "mine.py:1: there is no subclass of Program in this file"),
        (
            f"{HEAD}class A(Program):\n{ROUTE}\nclass B(Program):\n{ROUTE}",
            "mine.py:6: a file holds one program, this one has 2: A, B",
        ),
        (f"{HEAD}\nclass Mine(Program):\n    pass\n", "mine.py:3: Mine has no route(self, request, cluster)"),
        (
            f"{HEAD}class Mine(Program):\n    x: int = 1\n    async def route(self, request, cluster):\n        pass\n",
            "mine.py:4: route must be an async generator",
        ),
        (
            f"{HEAD}class Mine(Program):\n    def route(self, request, cluster):\n        yield 1\n",
            "mine.py:3: route must be an async generator",
        ),
        (f"{HEAD}class Mine(Program):\n    route = 3\n", "mine.py:2: route must be an async generator"),
        (
            f"{HEAD}class Mine(Program):\n    async def route(self, request):\n        yield 1\n",
            "mine.py:3: route must take (self, request, cluster)",
        ),
        (
            f"{HEAD}class Mine(Program):\n    x: float = 1\n    y: float = 'no'\n{ROUTE}",
            "mine.py:4: Mine: default of setting 'y' is wrong",
        ),
        (
            f"{HEAD}class Mine(Program):\n    x: Nowhere = 1\n{ROUTE}",
            "mine.py:3: NameError: name 'Nowhere' is not defined",
        ),
        (
            "import os\nfrom microserving.router.app import Router\n",
            "mine.py:2: a program may not import microserving.router.app, only microserving.program and "
            "microserving.policies of this project (errors are in microserving.program)",
        ),
        (
            "from microserving import engine, program\n",
            "mine.py:1: a program may not import microserving.engine",
        ),
        ("import os, microserving\n", "mine.py:1: a program may not import microserving, only"),
        (
            "from microserving.programs import x\n",
            "mine.py:1: a program may not import microserving.programs",
        ),
        (
            f"{HEAD}def f():\n    import microserving.server.run as r\n",
            "mine.py:3: a program may not import microserving.server.run",
        ),
        ("from . import helper\n", "mine.py:1: a program is a file by itself"),
        (
            f"{HEAD}class Mine(Program):\n{ROUTE}    def plan(self, cluster):\n        pass\n",
            "mine.py:5: plan must be `async def`",
        ),
        (
            f"{HEAD}class Mine(Program):\n{ROUTE}    async def plan(self):\n        pass\n",
            "mine.py:5: plan must take (self, cluster)",
        ),
        (
            f"{HEAD}class Mine(Program):\n    def __init__(self):\n        self.x = 1 / 0\n{ROUTE}",
            "mine.py:4: ZeroDivisionError",
        ),
    ],
)
def test_a_wrong_file_names_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    before = set(sys.modules)
    found = refusal(path)
    assert found.startswith(message)
    assert "\n" not in found
    assert set(sys.modules) - before == set()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"factr": 1}, "mine.py:2: Mine has no setting 'factr' (settings: factor)"),
        ({"factor": "much"}, "mine.py:3: Mine: setting 'factor' is wrong: Input should be a valid number"),
    ],
)
def test_wrong_settings_name_the_line(tmp_path: Path, settings: dict[str, object], message: str) -> None:
    assert refusal(write(tmp_path, GOOD), **settings).startswith(message)


def test_allowed_imports(tmp_path: Path) -> None:
    text = f"""\
import asyncio, json, numpy
from microserving import policies, program
from microserving.policies import POLICIES
from microserving.program.settings import Fraction
{GOOD}"""
    assert load_program(str(write(tmp_path, text))).line == 6


def test_nothing_of_an_unloaded_program_stays(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    before = set(sys.modules)
    loaded = load_program(str(path))
    assert len(set(sys.modules) - before) == 1
    instance = weakref.ref(type(loaded.instance))
    loaded.unload()
    loaded.unload()
    del loaded
    gc.collect()
    assert set(sys.modules) == before
    assert instance() is None


def test_a_huge_file_is_no_program(tmp_path: Path) -> None:
    path = write(tmp_path, f"# {'x' * MAX_PROGRAM_BYTES}\n")
    with pytest.raises(ProgramError, match=r"mine\.py: a router program may have at most 1048576 bytes"):
        load_program(str(path))


@pytest.mark.parametrize("says", [b"", b"# -*- coding: latin-1 -*-"])
def test_a_program_is_a_text_in_utf_8(says: bytes, tmp_path: Path) -> None:
    """Whatever it says of itself: it is sent, and kept, as text."""
    path = tmp_path / "mine.py"
    path.write_bytes(says + b"\n# \xe9\n" + textwrap.dedent(GOOD).encode())
    assert refusal(path) == "mine.py:2: not a text in UTF-8"
    path.write_bytes(says + b"\n# \xc3\xa9\n" + textwrap.dedent(GOOD).encode())
    source = read_program(str(path))
    assert source_of(path, str(source.deployment({})["source"]).encode()) == source
    assert load_program(str(path)).name == "mine"


def test_the_shipped_programs_have_a_summary() -> None:
    assert summary("round_robin") == "Data parallel: every engine serves whole requests, one after the other."
    assert all(summary(name) for name in shipped_programs())


@pytest.mark.parametrize("program", ["nothing_like_this", "no/such/file.py", "round-robin"])
def test_a_missing_program_names_the_shipped_ones(program: str) -> None:
    with pytest.raises(ProgramError, match=f"there is no router program {program!r}: .*round_robin"):
        load_program(program)


def test_only_python_files_are_programs(tmp_path: Path) -> None:
    path = tmp_path / "1p1d.toml"
    path.write_text("nodes = []\n")
    with pytest.raises(
        ProgramError, match=r"1p1d\.toml is no router program: a program is a \.py file; .*--config"
    ):
        load_program(str(path))


def test_a_folder_is_no_program(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="there is no router program"):
        load_program(str(tmp_path))


def test_the_example_of_the_design_runs(tmp_path: Path) -> None:
    """Word for word, without annotations on ``route``'s result."""
    text = """\
        from microserving.program import Program, Request, Cluster

        class BalancedPrefillDecode(Program):
            pd_balance_factor: float = 0.1                      # typed settings

            async def route(self, request: Request, cluster: Cluster):
                prefill = cluster.prefill.least_loaded()
                decode = cluster.decode.least_loaded()
                end = request.split(self.pd_balance_factor)
                received = await decode.prep_recv(request, end=end)
                await prefill.remote_send(request, to=received)  # returns at once when everything was matched
                async for chunk in decode.start_generate(request, begin=end):
                    yield chunk

            async def plan(self, cluster: Cluster): ...
        """
    program = load_program(str(write(tmp_path, text)), {"pd_balance_factor": 0.5}).instance
    cluster = FakeCluster()
    chunks = asyncio.run(collect(program.route(make_request(range(10)), cluster)))
    assert [chunk.text for chunk in chunks] == ["Hello", " world"]
    assert cluster["prefill-0"].calls == [Call("remote_send", "request-0", 0, 5)]
