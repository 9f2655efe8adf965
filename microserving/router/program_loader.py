"""Loads a router program from a file, a shipped one by name, or from text, and checks all that can be checked before
it runs.

Every fault is a ProgramError whose message starts with ``file:line:``. Does not run programs (``dry_run``).
"""

from __future__ import annotations

import ast
import inspect
import sys
import traceback
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import microserving
from microserving.errors import ProgramError
from microserving.program import Program
from microserving.router.program_imports import forbidden_import

SHIPPED_DIR = Path(microserving.__file__).resolve().parent.parent / "router_programs"
"""Next to the package, in a checkout and in an installation."""
MAX_PROGRAM_BYTES = 2**20

_MODULE_PREFIX = "router_program_"


@dataclass(frozen=True, slots=True, eq=False)
class LoadedProgram:
    """A program ready to run; compared by identity. name: the file's stem. line: where its class begins.

    source: what it was made of; None for a class that was given as it is. settings: those that were given.
    """

    name: str
    path: Path
    line: int
    instance: Program
    source: ProgramSource | None = None
    settings: Mapping[str, object] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"

    def locate(self, error: BaseException) -> str:
        """``file:line`` of the program's own innermost line that ``error`` passed; its class when it passed none."""
        line = _own_line(error, self.path)
        return self.where if line is None else f"{self.path}:{line}"

    def unload(self) -> None:
        """Forget its module. Idempotent; what still runs of it goes on."""
        _forget_module(type(self.instance).__module__)


@dataclass(frozen=True, slots=True)
class ProgramSource:
    """A program's text, in UTF-8, and errors that point into it. path: what messages call the file; it is not read
    again."""

    path: Path
    text: bytes

    def fault(self, line: int, message: str, *, param: str | None = None) -> ProgramError:
        return ProgramError(f"{self.path}:{line}: {message}", param=param)

    def deployment(self, settings: Mapping[str, object]) -> dict[str, object]:
        """The body of `/admin/program/deploy`: a shipped program by its name; else the text, since the router may run
        elsewhere."""
        if self.path.parent == SHIPPED_DIR:
            return {"path": self.path.stem, "settings": dict(settings)}
        return {"path": str(self.path), "source": self.text.decode("utf-8"), "settings": dict(settings)}

    def failure(self, error: BaseException, *, fallback: int) -> ProgramError:
        """One line for an exception that came out of the text, at the innermost line of the text itself."""
        if isinstance(error, SyntaxError) and error.filename == str(self.path):
            line, reason = error.lineno, error.msg
        else:
            line, reason = _own_line(error, self.path), str(error)
        message = " ".join(f"{type(error).__name__}: {reason}".split()).removesuffix(":")
        return self.fault(line or fallback, message)

    def line_of(self, cls: type, setting: str | None = None) -> int:
        """Where the class, or the setting in it, is written; the class when it does not have the setting itself."""
        for node in ast.walk(ast.parse(self.text)):
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


def shipped_programs() -> list[str]:
    """The names that ``load_program`` knows without a file, sorted."""
    return sorted(path.stem for path in SHIPPED_DIR.glob("*.py"))


def summary(name: str) -> str:
    """The first paragraph of a shipped program's docstring, as one line."""
    tree = ast.parse((SHIPPED_DIR / f"{name}.py").read_bytes())
    return " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())


def load_program(program: str, settings: Mapping[str, object] | None = None) -> LoadedProgram:
    """The program in the file ``program``, or the shipped one of that name, with its settings. Raises as
    ``load_source``."""
    return load_source(read_program(program), settings)


def read_program(program: str) -> ProgramSource:
    """The text of the file ``program``, or of the shipped program of that name. Raises: ProgramError."""
    path = _find(program)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_PROGRAM_BYTES + 1)
    except OSError as error:
        raise ProgramError(f"cannot read the router program {path}: {error.strerror}") from error
    return source_of(path, text)


def source_of(path: Path, text: bytes) -> ProgramSource:
    """A text from elsewhere. path: what messages call it. Raises: ProgramError when it is too long, or no UTF-8 (whatever
    it says of itself: it travels, and is kept, as text)."""
    if len(text) > MAX_PROGRAM_BYTES:
        raise ProgramError(f"{path}: a router program may have at most {MAX_PROGRAM_BYTES} bytes")
    source = ProgramSource(path, text)
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        line = text[: error.start].count(b"\n") + 1
        raise source.fault(line, "not a text in UTF-8") from error
    return source


def load_source(source: ProgramSource, settings: Mapping[str, object] | None = None) -> LoadedProgram:
    """The program in ``source`` with its settings.

    Raises: ProgramError; ``param`` names the setting when one is wrong. Nothing of a refused program stays loaded.
    """
    module = _execute(source)
    try:
        return _instantiate(module, source, settings or {})
    except BaseException:
        _forget_module(module.__name__)
        raise


def _instantiate(module: ModuleType, source: ProgramSource, settings: Mapping[str, object]) -> LoadedProgram:
    cls = _only_program(module, source)
    _check_route(cls, source)
    _check_plan(cls, source)
    try:
        instance = cls(**settings)
    except ProgramError as error:
        raise source.fault(source.line_of(cls, error.param), error.message, param=error.param) from error
    except (Exception, SystemExit) as error:  # the wall: a program may raise anything
        raise source.failure(error, fallback=source.line_of(cls)) from error
    line = source.line_of(cls)
    return LoadedProgram(source.path.stem, source.path, line, instance, source, dict(settings))


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


def _execute(source: ProgramSource) -> ModuleType:
    """Import without Python's caches: a file that was just changed is read anew, under a name of its own."""
    module = ModuleType(f"{_MODULE_PREFIX}{source.path.stem}_{uuid.uuid4().hex}")
    module.__file__ = str(source.path)
    sys.modules[module.__name__] = module  # dataclasses and annotations look their module up here
    try:
        tree = ast.parse(source.text, str(source.path))
        if (forbidden := forbidden_import(tree)) is not None:
            raise source.fault(*forbidden)
        exec(compile(tree, str(source.path), "exec", dont_inherit=True), module.__dict__)
    except ProgramError:
        _forget_module(module.__name__)
        raise
    except (Exception, SystemExit) as error:  # the wall: a program may raise anything
        _forget_module(module.__name__)
        raise source.failure(error, fallback=1) from error
    return module


def _forget_module(name: str) -> None:
    if name.startswith(_MODULE_PREFIX):
        sys.modules.pop(name, None)


def _own_line(error: BaseException, path: Path) -> int | None:
    """The innermost line in ``path`` that ``error`` passed."""
    frames = traceback.walk_tb(error.__traceback__)
    own = [line for frame, line in frames if frame.f_code.co_filename == str(path)]
    return own[-1] if own else None


def _only_program(module: ModuleType, source: ProgramSource) -> type[Program]:
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
        raise source.fault(1, "there is no subclass of Program in this file")
    if len(classes) > 1:
        names = ", ".join(cls.__name__ for cls in classes)
        message = f"a file holds one program, this one has {len(classes)}: {names}"
        raise source.fault(source.line_of(classes[1]), message)
    return classes[0]


def _check_route(cls: type[Program], source: ProgramSource) -> None:
    if cls.route is Program.route:
        raise source.fault(source.line_of(cls), f"{cls.__name__} has no route(self, request, cluster)")
    line = _line_of_method(cls, cls.route, source)
    if not inspect.isasyncgenfunction(cls.route):
        raise source.fault(line, "route must be an async generator: `async def` with a `yield` in it")
    try:
        inspect.signature(cls.route).bind(None, None, None)
    except TypeError as error:
        raise source.fault(line, f"route must take (self, request, cluster): {error}") from error


def _check_plan(cls: type[Program], source: ProgramSource) -> None:
    line = _line_of_method(cls, cls.plan, source)
    if not inspect.iscoroutinefunction(cls.plan):
        raise source.fault(line, "plan must be `async def` without a `yield` in it")
    try:
        inspect.signature(cls.plan).bind(None, None)
    except TypeError as error:
        raise source.fault(line, f"plan must take (self, cluster): {error}") from error


def _line_of_method(cls: type[Program], method: object, source: ProgramSource) -> int:
    """The class's line when the method is written elsewhere."""
    code = getattr(method, "__code__", None)
    if code is not None and code.co_filename == str(source.path):
        line: int = code.co_firstlineno
        return line
    return source.line_of(cls)
