"""Who may import whom. The order is the design; a new edge against it fails here."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "microserving"

LEVELS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "observability"}),
    frozenset({"protocol", "scheduler"}),
    frozenset({"model_files"}),
    frozenset({"tokenizer"}),
    frozenset({"transports", "grammar"}),
    frozenset({"front", "policies"}),
    frozenset({"program"}),
    frozenset({"engine"}),
    frozenset({"server", "router"}),
    frozenset({"cluster", "testing"}),
    frozenset({"bench"}),
    frozenset({"cli"}),
)
"""Lower may not import higher; those on one level may not import each other."""

LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
TOP_FILES = {"__init__", "__main__"}


def package_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """`engine` for `microserving/engine/kernels/x.py`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, full module name) of every import in the file, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write absolute imports"
            yield node.lineno, node.module or ""
            # `from microserving import engine` imports a package by its name.
            if node.module == "microserving":
                yield from ((node.lineno, f"microserving.{alias.name}") for alias in node.names)


def test_every_part_has_a_level() -> None:
    parts = {part_of(path) for path in package_files()} - TOP_FILES
    assert parts <= set(LEVEL_OF), "a new package needs a place in LEVELS (and in the design)"


def test_imports_go_one_way() -> None:
    wrong = []
    for path in package_files():
        part = part_of(path)
        if part in TOP_FILES:
            continue
        for line, module in imported_modules(path):
            names = module.split(".")
            if names[0] != "microserving" or len(names) == 1 or names[1] not in LEVEL_OF:
                continue
            if names[1] != part and LEVEL_OF[names[1]] >= LEVEL_OF[part]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} imports {names[1]}")
    assert not wrong, "\n".join(wrong)


def test_router_never_imports_engine_or_server() -> None:
    """`engine` is below `router` in the order, but the router is model-free."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in package_files()
        if part_of(path) in {"router", "program", "policies", "front"}
        for line, module in imported_modules(path)
        if module.startswith(("microserving.engine", "microserving.server", "tvm"))
    ]
    assert not wrong, "\n".join(wrong)


def test_scheduler_is_pure() -> None:
    banned = {"tvm", "tvm_ffi", "asyncio", "anyio", "time", "datetime", "threading", "socket", "logging"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in (PACKAGE / "scheduler").rglob("*.py")
        for line, module in imported_modules(path)
        if module.split(".")[0] in banned
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_engine_imports_tvm() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in package_files()
        if part_of(path) != "engine"
        for line, module in imported_modules(path)
        if module.split(".")[0] in {"tvm", "tvm_ffi"}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sorted((ROOT / "router_programs").glob("*.py")), ids=lambda path: path.stem)
def test_router_programs_use_only_their_interface(path: Path) -> None:
    wrong = [
        f"{path.name}:{line}: {module}"
        for line, module in imported_modules(path)
        if not (
            module.split(".")[0] in sys.stdlib_module_names
            or module in {"microserving.program", "microserving.policies"}
            or module.startswith(("microserving.program.", "microserving.policies."))
        )
    ]
    assert not wrong, "\n".join(wrong)
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60


def modules_after(code: str) -> set[str]:
    """The names in ``sys.modules`` after ``code`` ran in a fresh interpreter."""
    script = f"import sys, json\n{code}\nsys.stdout.write(json.dumps(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    import json

    return set(json.loads(result.stdout))


HEAVY = ("tvm", "tvm_ffi", "microserving.engine", "microserving.server", "microserving.transports")
WEIGHT_CODE = (
    "microserving.model_files.weights",
    "microserving.model_files.gguf_weights",
    "microserving.model_files.safetensors",
    "microserving.model_files.safetensors_weights",
)


def loaded(modules: set[str], banned: tuple[str, ...]) -> set[str]:
    return {name for name in modules if any(name == b or name.startswith(b + ".") for b in banned)}


def test_a_router_process_loads_no_engine_code() -> None:
    """Everything that `microserving router` loads: all modules of the router, and the sub-command."""
    code = (
        "import importlib, pkgutil, microserving.router\n"
        "for m in pkgutil.walk_packages(microserving.router.__path__, 'microserving.router.'):\n"
        "    importlib.import_module(m.name)\n"
        "import microserving.cli.main, microserving.cli.router, microserving.cluster.secret\n"
    )
    assert loaded(modules_after(code), HEAVY + WEIGHT_CODE) == set()


def test_the_launcher_loads_no_tvm() -> None:
    modules = modules_after("import microserving.cluster.launcher, microserving.cli.up")
    assert loaded(modules, ("tvm", "tvm_ffi")) == set()


def test_help_loads_next_to_nothing() -> None:
    modules = modules_after("from microserving.cli.main import build_parser; build_parser().format_help()")
    assert loaded(modules, (*HEAVY, "pydantic", "numpy", "httpx", "fastapi")) == set()
