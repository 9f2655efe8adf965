"""What a router program may import of this project: the rule, and the first import that breaks it.

The rest of the project may change at any time, and some of it must never be loaded into a router. Packages of others
are the program's own business. This is a rule for programs, no wall against them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

ALLOWED = ("microserving.program", "microserving.policies")
_OURS = "microserving"
_INSTEAD = f"only {' and '.join(ALLOWED)} of this project (errors are in {ALLOWED[0]})"


def forbidden_import(tree: ast.Module) -> tuple[int, str] | None:
    """(line, what is wrong with it) of the first import that a program may not have; None when there is none.

    Imports inside functions count, those by ``importlib`` are not seen.
    """
    return min(_forbidden(tree), default=None)


def _forbidden(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            yield node.lineno, "a program is a file by itself: there is nothing for a relative import"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            wrong = [module for module in _modules(node) if not _is_allowed(module)]
            if wrong:
                yield node.lineno, f"a program may not import {wrong[0]}, {_INSTEAD}"


def _modules(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The full names; ``from microserving import x`` imports ``microserving.x``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.module == _OURS:
        yield from (f"{_OURS}.{alias.name}" for alias in node.names)
    else:
        yield node.module or ""


def _is_allowed(module: str) -> bool:
    if module.split(".")[0] != _OURS:
        return True
    return any(module == name or module.startswith(f"{name}.") for name in ALLOWED)
