"""Loads a router program from a file, or a shipped one by name, and checks all that can be checked before it runs.

Every fault is a ProgramError whose message starts with ``file:line:``. Does not run programs.
"""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import microserving
from microserving.errors import ProgramError
from microserving.program import Program

SHIPPED_DIR = Path(microserving.__file__).resolve().parent.parent / "router_programs"
"""Next to the package, in a checkout and in an installation."""


@dataclass(frozen=True, slots=True)
class LoadedProgram:
    """A program ready to run. name: the file's stem. line: where its class begins."""

    name: str
    path: Path
    line: int
    instance: Program

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    def locate(self, error: BaseException) -> str:
        """``file:line`` of the program's own innermost line that ``error`` passed; its class when it passed none."""
        frames = traceback.walk_tb(error.__traceback__)
        own = [line for frame, line in frames if frame.f_code.co_filename == str(self.path)]
        return f"{self.path}:{own[-1]}" if own else self.where


def shipped_programs() -> list[str]:
    """The names that ``load_program`` knows without a file, sorted."""
    return sorted(path.stem for path in SHIPPED_DIR.glob("*.py"))


def load_program(program: str, settings: Mapping[str, object] | None = None) -> LoadedProgram:
    """The program in the file ``program``, or the shipped one of that name, with its settings.

    Raises: ProgramError; ``param`` names the setting when one is wrong.
    """
    file = _ProgramFile.read(_find(program))
    cls = _only_program(_execute(file), file)
    _check_route(cls, file)
    try:
        instance = cls(**(settings or {}))
    except ProgramError as error:
        raise file.fault(file.line_of(cls, error.param), error.message, param=error.param) from error
    except Exception as error:  # the wall: a program may raise anything
        raise file.failure(error, fallback=file.line_of(cls)) from error
    return LoadedProgram(name=file.path.stem, path=file.path, line=file.line_of(cls), instance=instance)


@dataclass(frozen=True, slots=True)
class _ProgramFile:
    """The text that was loaded (the file may change later), and errors that point into it."""

    path: Path
    source: bytes

    @classmethod
    def read(cls, path: Path) -> _ProgramFile:
        try:
            return cls(path, path.read_bytes())
        except OSError as error:
            raise ProgramError(f"cannot read the router program {path}: {error.strerror}") from error

    def line_of(self, cls: type, setting: str | None = None) -> int:
        """Where the class, or the setting in it, is written; the class when it does not have the setting itself."""
        for node in ast.walk(ast.parse(self.source)):
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                lines = [
                    item.lineno
                    for item in node.body
                    if isinstance(item, ast.AnnAssign)
                    and isinstance(item.target, ast.Name)
                    and item.target.id == setting
                ]
                return lines[0] if lines else node.lineno
        return 1

    def fault(self, line: int, message: str, *, param: str | None = None) -> ProgramError:
        return ProgramError(f"{self.path}:{line}: {message}", param=param)

    def failure(self, error: BaseException, *, fallback: int) -> ProgramError:
        """One line for an exception that came out of the file, at the innermost line of the file itself."""
        if isinstance(error, SyntaxError) and error.filename == str(self.path):
            line, reason = error.lineno, error.msg
        else:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame.lineno for frame in frames if frame.filename == str(self.path)]
            line, reason = (own[-1] if own else None), str(error)
        message = " ".join(f"{type(error).__name__}: {reason}".split())
        return self.fault(line or fallback, message)


def _find(program: str) -> Path:
    """An identifier is the name of a shipped program; everything else is a file."""
    shipped = SHIPPED_DIR / f"{program}.py"
    if program.isidentifier() and shipped.is_file():
        return shipped
    path = Path(program).expanduser().absolute()
    if program.isidentifier() or not path.is_file():
        names = ", ".join(shipped_programs())
        raise ProgramError(f"there is no router program {program!r}: give a file, or one of {names}")
    if path.suffix != ".py":
        hint = "; a cluster file goes to `microserving up --config`" if path.suffix == ".toml" else ""
        raise ProgramError(f"{program} is no router program: a program is a .py file{hint}")
    return path


def _execute(file: _ProgramFile) -> ModuleType:
    """Import without Python's caches: a file that was just changed is read anew, under a name of its own."""
    module = ModuleType(f"router_program_{file.path.stem}_{uuid.uuid4().hex}")
    module.__file__ = str(file.path)
    sys.modules[module.__name__] = module  # dataclasses and annotations look their module up here
    try:
        exec(compile(file.source, str(file.path), "exec", dont_inherit=True), module.__dict__)
    except (Exception, SystemExit) as error:  # the wall: a program may raise anything
        del sys.modules[module.__name__]
        raise file.failure(error, fallback=1) from error
    return module


def _only_program(module: ModuleType, file: _ProgramFile) -> type[Program]:
    """The one Program subclass defined in the file; classes with a leading underscore are helpers."""
    found = [
        value
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, Program)
        and value.__module__ == module.__name__
        and not name.startswith("_")
    ]
    classes = list(dict.fromkeys(found))
    if not classes:
        raise file.fault(1, "there is no subclass of Program in this file")
    if len(classes) > 1:
        names = ", ".join(cls.__name__ for cls in classes)
        raise file.fault(
            file.line_of(classes[1]), f"a file holds one program, this one has {len(classes)}: {names}"
        )
    return classes[0]


def _check_route(cls: type[Program], file: _ProgramFile) -> None:
    route = cls.route
    if route is Program.route:
        raise file.fault(file.line_of(cls), f"{cls.__name__} has no route(self, request, cluster)")
    line = route.__code__.co_firstlineno if inspect.isfunction(route) else file.line_of(cls)
    if not inspect.isasyncgenfunction(route):
        raise file.fault(line, "route must be an async generator: `async def` with a `yield` in it")
    try:
        inspect.signature(route).bind(None, None, None)
    except TypeError as error:
        raise file.fault(line, f"route must take (self, request, cluster): {error}") from error
