"""A Jinja2 sandbox with bounds on time, steps and sizes: a chat template comes with a model file and is not trusted.

Jinja2's own immutable sandbox stops attribute walks and huge ranges. This adds, for one rendering at a time: a
limit of CPU time (not of wall time: a busy machine must not refuse a chat) and of steps, charged by every loop
iteration, call, filter and comparison; a bound on what one operation may build, or go through where it looks into nested
values; and a bound on the output, which is streamed. Knows nothing of chats.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any, ClassVar

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_SOURCE_CHARS = 64 * 2**10
MAX_STRING = 8 * 2**20
MAX_BUILT = 64 * 2**20
MAX_OUTPUT_CHARS = 8 * 2**20
MAX_STEPS = 2_000_000
MAX_INTEGER_ARGUMENT = 100_000
MAX_INTEGER_BITS = 4096
MAX_CPU_S = 0.5
MAX_ITEMS = 200_000
"""Items of a nested value, an item that it holds twice counted twice."""
MAX_SLOW_CHARS = 2**16
MAX_FOLDED = 2**20
"""What the compiler may make of constants in advance; the rest is made when rendered."""

# Filters whose work grows much faster than copying their text, and filters that do not look into the items they hand on.
_SLOW_FILTERS = frozenset({"urlize", "wordwrap", "striptags", "pprint", "xmlattr", "title", "wordcount"})
_SHALLOW_FILTERS = frozenset(
    {"length", "count", "list", "first", "last", "default", "d", "items", "reverse", "batch", "slice", "safe"}
    | {"map", "select", "selectattr", "reject", "rejectattr", "attr", "random"}
)
_SHALLOW_TESTS = frozenset(
    {"defined", "undefined", "none", "string", "number", "mapping", "iterable", "sequence"}
)

# A format width of five digits or more, one taken from an argument, or a nested field.
_WIDE_FORMAT = re.compile(r"[0-9]{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{")


class Budget:
    """What one rendering may still use. Not shared between threads."""

    def __init__(self, built: int = MAX_BUILT) -> None:
        self._deadline = time.thread_time() + MAX_CPU_S
        self._most_built = built
        self._steps = 0
        self._built = 0

    def tick(self) -> None:
        """Charge one step; raises SecurityError when steps or time are used up."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise SecurityError("the template takes too many steps")
        if time.thread_time() > self._deadline:
            raise SecurityError("the template takes too long")

    def build(self, size: int) -> None:
        """Charge a string or list of ``size`` elements that is about to be built."""
        self.tick()
        self._built += size
        if size > MAX_STRING or self._built > self._most_built:
            raise SecurityError("the template builds too much text")


_BUDGET: ContextVar[Budget] = ContextVar("template_budget")


def _budget() -> Budget:
    found = _BUDGET.get(None)
    return Budget() if found is None else found


def _sized(value: object) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _inner(value: object) -> Collection[object] | None:
    """What a value shows of others when it is written or compared; None for a plain one."""
    if value is None or isinstance(value, str | int | float):
        return None
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, Namespace):
        return list(vars(value).values())
    if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView):
        return value
    return None


def _weigh(*values: object) -> None:
    """Raises SecurityError when going through all of ``values`` to their ends would take too long.

    A value that holds another one twice, which holds a third one twice, and so on, is small and endless.
    """
    items, chars, queue = 0, 0, list(values)
    while queue:
        value = queue.pop()
        chars += _sized(value)
        inner = _inner(value)
        if inner is None:
            continue
        items += len(inner)
        if items > MAX_ITEMS or chars > MAX_STRING:
            raise SecurityError("the template goes through too large a value")
        queue.extend(inner)


def _check_arguments(arguments: Iterable[object]) -> None:
    for argument in arguments:
        if isinstance(argument, int) and abs(argument) > MAX_INTEGER_ARGUMENT:
            raise SecurityError(f"the number {str(argument)[:20]} is too large an argument")


def _check_format(text: object) -> None:
    if isinstance(text, str) and _WIDE_FORMAT.search(text):
        raise SecurityError("a format string is too wide")


def _charge_joining(budget: Budget, separator: object, items: object) -> None:
    if isinstance(items, list | tuple):
        budget.build(sum(map(_sized, items)) + _sized(separator) * len(items))


def _charge_replacing(budget: Budget, text: object, arguments: tuple[object, ...]) -> None:
    if isinstance(text, str) and len(arguments) >= 2:
        old, new = str(arguments[0]), str(arguments[1])
        budget.build(len(text) + text.count(old) * len(new))


def _charge_indenting(budget: Budget, text: object, arguments: Iterable[object]) -> None:
    widths = [arg if isinstance(arg, int) else _sized(arg) for arg in arguments]
    if isinstance(text, str):
        budget.build(len(text) + (text.count("\n") + 1) * max([4, *widths]))


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, charged before it runs. ``wraps`` keeps Jinja2's mark of what is passed as first argument."""
    passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        budget = _budget()
        subject, rest = args[passed], (*args[passed + 1 :], *kwargs.values())
        _check_arguments(rest)
        budget.build(_sized(subject) + sum(abs(item) for item in rest if isinstance(item, int)))
        if name not in _SHALLOW_FILTERS:
            _weigh(subject, *rest)
        if name in _SLOW_FILTERS and len(str(subject)) > MAX_SLOW_CHARS:
            raise SecurityError(f"the filter {name!r} is given too long a text")
        if name == "join":
            subject = subject if isinstance(subject, str | list | tuple) else list(guard_loop(subject))
            args = (*args[:passed], subject, *args[passed + 1 :])
            _charge_joining(budget, rest[0] if rest else "", list(subject))
        elif name == "replace":
            _charge_replacing(budget, subject, rest)
        elif name in ("indent", "wordwrap"):
            _charge_indenting(budget, subject, rest)
        elif name == "format":
            _check_format(subject)
        elif name == "sum" and any(isinstance(argument, list | tuple) for argument in rest):
            raise SecurityError("only numbers can be summed")
        return function(*args, **kwargs)

    return call


def _guarded_test(name: str, function: Any) -> Callable[..., Any]:
    """A test such as ``in``, charged before it runs."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _budget().tick()
        if name not in _SHALLOW_TESTS:
            _weigh(*args, *kwargs.values())
        return function(*args, **kwargs)

    return call


def guard_value(value: Any) -> Any:
    """The same value, and a step: in front of a slice."""
    _budget().tick()
    return value


def guard_whole(value: Any) -> Any:
    """The same value, and a step: in front of what may look through all of it (``in``, ``==``, output)."""
    _budget().tick()
    _weigh(value)
    return value


def guard_loop(iterable: Iterable[Any]) -> Iterator[Any]:
    """The same items; every one is a step."""
    budget = _budget()
    for item in iterable:
        budget.tick()
        yield item


def guard_concat(*parts: object) -> str:
    """The ``~`` operator."""
    _weigh(*parts)
    texts = [part if isinstance(part, str) else str(part) for part in parts]
    _budget().build(sum(map(len, texts)))
    return "".join(texts)


def _join_output(parts: Iterable[str]) -> str:
    """How a macro, a set block or a call block joins its output."""
    texts = list(parts)
    _budget().build(sum(map(len, texts)))
    return "".join(texts)


_GUARDS = (guard_loop, guard_value, guard_whole, guard_concat)


class _Generation(Extension):
    """Hugging Face's ``{% generation %}`` block, which marks the assistant's text: its body, unchanged."""

    tags = {"generation"}  # noqa: RUF012 - as the base class declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """Hugging Face's settings for chat templates, inside the bounds of this module."""

    intercepted_binops: ClassVar[frozenset[str]] = frozenset({"*", "**", "+", "%"})  # type: ignore[misc]
    concat = staticmethod(_join_output)
    guard_loop = staticmethod(guard_loop)
    guard_concat = staticmethod(guard_concat)
    guard_value = staticmethod(guard_value)
    guard_whole = staticmethod(guard_whole)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=guard_whole,
        )
        self.globals.pop("lipsum", None)
        self.filters = {name: _guarded_filter(name, function) for name, function in self.filters.items()}
        self.tests = {name: _guarded_test(name, function) for name, function in self.tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Guarding().visit(tree)
        return tree

    def _generate(
        self, source: nodes.Template, name: str | None, filename: str | None, defer_init: bool = False
    ) -> str:
        token = _BUDGET.set(Budget(MAX_FOLDED))
        try:
            return super()._generate(source, name, filename, defer_init)
        finally:
            _BUDGET.reset(token)

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add or replace a filter, inside the same bounds as Jinja2's own."""
        self.filters[name] = _guarded_filter(name, function)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget = _budget()
        budget.tick()
        if not isinstance(function, Macro) and function not in _GUARDS:
            _weigh(*args, *kwargs.values())
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str):
            self._charge_method(budget, function.__name__, owner, args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def _charge_method(
        self, budget: Budget, name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Charge a method of a string before it runs."""
        _check_arguments((*args, *kwargs.values()))
        budget.build(len(text))
        if name == "join" and args:
            _charge_joining(budget, text, args[0])
        elif name == "replace":
            _charge_replacing(budget, text, args)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``text.format``, found as an attribute: Jinja2's safe version, unless the text asks for wide fields."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget()
        if operator == "*":
            _charge_product(budget, left, right)
        elif operator == "**":
            _charge_power(left, right)
        elif operator == "+":
            budget.build(_sized(left) + _sized(right))
        elif isinstance(left, str):
            _check_format(left)
            _weigh(right)
            _check_arguments(right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)


def _charge_product(budget: Budget, left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        if isinstance(times, int) and _sized(many):
            budget.build(_sized(many) * max(times, 0))
    if isinstance(left, int) and isinstance(right, int) and _bits(left) + _bits(right) > MAX_INTEGER_BITS:
        raise SecurityError("the template computes too large a number")


def _charge_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and _bits(base) * exponent > MAX_INTEGER_BITS:
        raise SecurityError("the template computes too large a number")


def _bits(value: int) -> int:
    return value.bit_length()


def _guard_call(name: str, arguments: list[Any], near: nodes.Node) -> nodes.Expr:
    """A call of this environment's function ``name``, which a template cannot shadow."""
    call = nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)
    call.set_lineno(near.lineno, override=True)
    call.set_environment(near.environment)  # type: ignore[arg-type]
    return call


class _Guarding(NodeTransformer):
    """Puts guarded calls around what the compiler would write as plain Python."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - the visitor's naming
        self.generic_visit(node)
        node.iter = _guard_call("guard_loop", [node.iter], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - the visitor's naming
        self.generic_visit(node)
        return _guard_call("guard_concat", node.nodes, node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802 - the visitor's naming
        self.generic_visit(node)
        node.expr = _guard_call("guard_whole", [node.expr], node)
        for operand in node.ops:
            operand.expr = _guard_call("guard_whole", [operand.expr], node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 - the visitor's naming
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _guard_call("guard_value", [node.node], node)
        return node


def render(template: Template, variables: Mapping[str, object]) -> str:
    """The template's output; raises SecurityError beyond a bound and whatever else the template raises."""
    token = _BUDGET.set(Budget())
    try:
        pieces: list[str] = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_OUTPUT_CHARS:
                raise SecurityError("the template writes too much text")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _BUDGET.reset(token)
