"""The counters that a program keeps itself: what goes up and comes back while a request is served must always come back.

Looks at numbers and the sizes of containers in the program's attributes, its class's and its module's globals. A value
that only grows (a total, a cache) is no gauge.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sized
from types import FunctionType, ModuleType

from microserving.program import Program

Values = dict[str, object]


def read_values(program: Program) -> Values:
    """Name, as the program's text has it, -> a number, the numbers in a list or dict, or a size."""
    return {name: value for name, held in _variables(program) if (value := _value(held)) is not None}


class Gauges:
    """``watch`` during a run without a fault finds them; ``astray`` compares the two ends of another run."""

    def __init__(self, before: Values) -> None:
        self._before = before
        self._moved: set[str] = set()

    def watch(self, now: Values) -> None:
        self._moved |= {name for name, value in now.items() if not _same(self._before.get(name), value)}

    def settle(self, after: Values) -> frozenset[str]:
        """The run is over: the names of those that are back."""
        return frozenset(name for name in self._moved if _same(self._before.get(name), after.get(name)))


def astray(gauges: frozenset[str], before: Values, after: Values) -> list[str]:
    """In words, those that did not come back."""
    return [
        f"the program's {name} does not come back to what it was before the requests"
        for name in sorted(gauges)
        if not _same(before.get(name), after.get(name))
    ]


def _same(one: object, other: object) -> bool:
    """What is not there yet is zero, or empty."""
    return (one or None) == (other or None)


def _variables(program: Program) -> Iterator[tuple[str, object]]:
    cls = type(program)
    yield from ((f"self.{name}", value) for name, value in vars(program).items())
    yield from (
        (f"{cls.__name__}.{name}", value) for name, value in vars(cls).items() if _is_data(name, value)
    )
    module = sys.modules.get(cls.__module__)
    if module is not None:
        yield from ((name, value) for name, value in vars(module).items() if _is_data(name, value))


def _is_data(name: str, value: object) -> bool:
    return not name.startswith("__") and not isinstance(value, FunctionType | ModuleType | type | str | tuple)


def _value(held: object) -> object | None:
    if isinstance(held, int | float):
        return held
    if isinstance(held, Mapping) and _are_numbers(held.values()):
        return {key: number for key, number in held.items() if number}
    if isinstance(held, list) and _are_numbers(held):
        return list(held)
    if isinstance(held, Sized) and not isinstance(held, str | bytes | tuple | type):
        return len(held)
    return None


def _are_numbers(values: object) -> bool:
    items = list(values)  # type: ignore[call-overload]
    return all(isinstance(item, int | float) for item in items)
