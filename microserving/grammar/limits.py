"""What is refused before a grammar is compiled: what would take long, much memory, or the whole stack.

Pure functions over texts, with Python's own costs bounded by the texts' size. They raise ``ValueError`` with a message
for the client. Whether a grammar is right is the compiler's business: what these cannot read they let pass.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from microserving.grammar.lark_limits import check_lark_text
from microserving.grammar.regex_size import check_regex_size
from microserving.protocol.generation import Grammar
from microserving.protocol.structured import MAX_GRAMMAR_BYTES, MAX_REGEX_BYTES

MAX_DEPTH: Final = 64
"""Nesting of a schema's JSON (as of a request's body)."""
MAX_TOTAL_DEPTH: Final = 1_000
"""Nesting when every ``$ref`` is followed once. The compiler recurses: at 3,000 it overflows a stack of 8 MiB."""
MAX_NODES: Final = 32_768
_COMPILER_OPTIONS: Final = "x-guidance"
"""llguidance's key of a schema: it could, for one, let pass keywords that are not enforced."""


def check_text(grammar: Grammar) -> None:
    """Its length. Raises ValueError."""
    size = len(grammar.text.encode(errors="replace"))
    limit = MAX_REGEX_BYTES if grammar.kind == "regex" else MAX_GRAMMAR_BYTES
    if size > limit:
        raise ValueError(f"it has {size} bytes, more than {limit}")


def check_limits(grammar: Grammar) -> None:
    """What it becomes. Its length was checked. Raises ValueError."""
    if grammar.kind == "regex":
        check_regex_size(grammar.text)
    elif grammar.kind == "json_schema":
        schema = _parsed(grammar.text)
        if isinstance(schema, dict) and _COMPILER_OPTIONS in schema:
            raise ValueError(f"{_COMPILER_OPTIONS!r} is not supported")
        check_schema(schema)
    elif grammar.kind == "lark":
        for schema in check_lark_text(grammar.text):
            check_schema(schema)


def check_schema(schema: Any) -> None:
    """Nesting, size and patterns of a JSON Schema. Raises ValueError."""
    targets: set[str] = set()
    total = _check_part(schema, targets)
    seen: set[str] = set()
    while targets - seen:
        for reference in targets - seen:
            seen.add(reference)
            total += _check_part(_resolve(schema, reference), targets)
            if total > MAX_TOTAL_DEPTH:
                raise ValueError(f"its references are nested deeper than {MAX_TOTAL_DEPTH} levels")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:
        raise ValueError("it is not valid JSON") from None


def _check_part(part: Any, targets: set[str]) -> int:
    """The nesting of ``part``; what it refers to is added to ``targets``."""
    deepest = 0
    for count, (node, depth) in enumerate(_nodes(part)):
        deepest = max(deepest, depth)
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
        if count > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES} parts")
        if isinstance(node, dict):
            _check_object(node, targets)
    return deepest


def _nodes(root: Any) -> Iterator[tuple[Any, int]]:
    """Every value in ``root`` with its depth, from 1."""
    waiting = [(root, 1)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        waiting.extend((child, depth + 1) for child in children)


def _check_object(node: Mapping[str, Any], targets: set[str]) -> None:
    reference, pattern, by_name = node.get("$ref"), node.get("pattern"), node.get("patternProperties")
    if isinstance(reference, str):
        targets.add(reference)
    patterns = [pattern, *(by_name if isinstance(by_name, dict) else ())]
    for text in patterns:
        if isinstance(text, str):
            check_regex_size(text)


def _resolve(schema: Any, reference: str) -> Any:
    """The part of ``schema`` that a JSON pointer names; None when there is none, which the compiler will say."""
    node = schema
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isdecimal() and len(name) < 8:
            node = node[int(name)] if int(name) < len(node) else None
        else:
            return None
    return node
