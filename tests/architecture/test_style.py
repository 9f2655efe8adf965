"""Rules of STYLE that a machine can hold: sizes, annotations, names that must not be called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted([*(ROOT / "microserving").rglob("*.py"), *(ROOT / "router_programs").glob("*.py")])

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500

LONG_FUNCTIONS: dict[str, str] = {}
"""`path::function` -> why it is longer. Code written in TVMScript (see ``is_kernel``) is not counted."""

LONG_FILES: dict[str, str] = {}
"""path -> why it is longer."""

BANNED_CALLS = {"eval", "exec", "print", "breakpoint", "__import__"}
ALLOWED_CALLS = {
    ("microserving/router/program_loader.py", "exec"): "it runs the user's router program",
}
BANNED_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle", "joblib"}
BANNED_ATTRIBUTES = {("torch", "load"), ("multiprocessing", "shared_memory")}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in SOURCES:
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text(encoding="utf-8"))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """(qualified name, function), also nested ones. A function inside a function is `outer().inner`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield f"{prefix}{node.name}", node
            yield from functions(node, f"{prefix}{node.name}().")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def is_kernel(node: ast.AST) -> bool:
    """Whether it is TVMScript: a function or class under a decorator such as `@T.prim_func` or `@I.ir_module`."""
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and any(
        ast.unparse(decorator).split(".")[0] in {"T", "R", "I", "tirx"} for decorator in node.decorator_list
    )


def length(node: ast.AST) -> int:
    """Lines of a function without the kernels inside it."""
    if is_kernel(node):
        return 0
    kernels = [child for child in ast.walk(node) if is_kernel(child)]
    outer = [k for k in kernels if not any(k is not other and k in ast.walk(other) for other in kernels)]
    return lines(node) - sum(lines(kernel) for kernel in outer)


def lines(node: ast.AST) -> int:
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    return int(last - first + 1)


def test_functions_are_short() -> None:
    long = {
        f"{path}::{name}": length(node)
        for path, tree in parsed()
        for name, node in functions(tree)
        if length(node) > MAX_FUNCTION_LINES
    }
    assert {name: size for name, size in long.items() if name not in LONG_FUNCTIONS} == {}
    assert set(LONG_FUNCTIONS) <= set(long), "take shortened functions off the list"


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    }
    assert {path: lines for path, lines in long.items() if path not in LONG_FILES} == {}
    assert set(LONG_FILES) <= set(long), "take shortened files off the list"


def test_modules_say_what_they_own() -> None:
    missing = [
        path
        for path, tree in parsed()
        if not (ast.get_docstring(tree) or "").strip() or (ast.get_docstring(tree) or "").startswith("TODO")
    ]
    assert missing == []


def test_public_functions_are_annotated() -> None:
    wrong = [
        f"{path}::{name}"
        for path, tree in parsed()
        for name, node in functions(tree)
        if is_public(name) and not is_annotated(node) and not is_untyped_override(path, name)
    ]
    assert wrong == []


def is_public(name: str) -> bool:
    """Not private, not inside a function."""
    return "()" not in name and not name.split(".")[-1].startswith("_")


def is_annotated(node: Function) -> bool:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    named = [argument for argument in arguments if argument.arg not in {"self", "cls"}]
    starred = [argument for argument in (node.args.vararg, node.args.kwarg) if argument is not None]
    return node.returns is not None and all(argument.annotation for argument in named + starred)


def is_untyped_override(path: str, name: str) -> bool:
    """argparse's overloads have no annotation that an override could repeat."""
    return (path, name) == ("microserving/cli/main.py", "_SubcommandParser.parse_known_args")


def test_nothing_unpickles_evaluates_or_prints() -> None:
    wrong = []
    for path, tree in parsed():
        for node in ast.walk(tree):
            banned = banned_use(node)
            if banned and (path, banned) not in ALLOWED_CALLS:
                wrong.append(f"{path}:{getattr(node, 'lineno', 0)}: {banned}")
    assert wrong == []


def banned_use(node: ast.AST) -> str | None:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_CALLS:
        return node.func.id
    if isinstance(node, ast.Import):
        names = {alias.name.split(".")[0] for alias in node.names} & BANNED_MODULES
        return next(iter(names), None)
    if isinstance(node, ast.ImportFrom):
        names = {node.module or ""} & BANNED_MODULES
        pairs = {(node.module or "", alias.name) for alias in node.names} & BANNED_ATTRIBUTES
        return next(iter(names), None) or (str(next(iter(pairs))) if pairs else None)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        pair = (node.value.id, node.attr)
        return ".".join(pair) if pair in BANNED_ATTRIBUTES else None
    return None
