"""How large a grammar in Lark is: its rules, and its terminals with everything in them written out.

Rules are the parser's, which has limits of its own for each step; terminals become expressions of the lexer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from microserving.grammar.regex_size import MAX_SIZE, check_regex_size, repetitions

MAX_RULES: Final = 500
"""The compiler recurses over rules that name rules: at 3,000 it overflows a stack of 8 MiB."""
MAX_TERMINAL_DEPTH: Final = 64
_TOKEN: Final = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |/(?P<regex>(?:\\.|[^/\\])+)/[a-z]*
    |(?P<open_end>["/])
    |(?P<special><[^>\n]{0,128}>)
    |(?P<define>[?!]?(?P<name>[A-Za-z_][A-Za-z0-9_-]*)(?:\.-?[0-9]{1,9})?\s{0,16}(?:\[[^\]\n]{0,256}\])?\s{0,16}:)
    |(?P<word>[A-Za-z_][A-Za-z0-9_-]*)
    |(?P<open>[(\[])|(?P<close>[)\]])
    |(?P<repeat>[*+?]|[{~]\s{0,16}(?P<least>[0-9]{1,9})\s{0,16}(?:(?:,|\.\.)\s{0,16}(?P<most>[0-9]{0,9}))?\s{0,16}\}?)
    |(?P<other>\s+|.)""",
    re.VERBOSE | re.DOTALL,
)
_SCHEMA: Final = re.compile(r"%json\s*(?=[{])")

Body = list[re.Match[str]]


def check_lark_text(text: str) -> list[Any]:
    """The JSON Schemas that stand in a grammar. Raises ValueError when the grammar is too large."""
    schemas, text = _cut_schemas(text)
    rules = _rules(text)
    if len(rules) > MAX_RULES:
        raise ValueError(f"it has more than {MAX_RULES} rules")
    terminals = {name: body for name, body in rules if name.isupper()}
    sizes: dict[str, int] = {}
    for name in terminals:
        _terminal_size(name, terminals, sizes, 0)
    return schemas


def _cut_schemas(text: str) -> tuple[list[Any], str]:
    """``%json {...}``: what the braces hold, and the text without them."""
    schemas, kept, at = [], [], 0
    decoder = json.JSONDecoder()
    while (found := _SCHEMA.search(text, at)) is not None:
        kept.append(text[at : found.start()])
        try:
            schema, at = decoder.raw_decode(text, found.end())
        except RecursionError:
            raise ValueError("a schema in it is nested too deeply") from None
        except ValueError:
            raise ValueError("a schema in it is not valid JSON") from None
        schemas.append(schema)
    return schemas, "".join([*kept, text[at:]])


def _rules(text: str) -> list[tuple[str, Body]]:
    rules: list[tuple[str, Body]] = []
    for token in _TOKEN.finditer(text):
        if token["define"] is not None:
            rules.append((token["name"], []))
        elif rules and token.lastgroup != "comment":
            rules[-1][1].append(token)
        if token["open_end"] is not None:
            raise ValueError("a string or an expression in it is not closed")
        if token["regex"] is not None:
            check_regex_size(token["regex"])
    return rules


def _terminal_size(name: str, terminals: Mapping[str, Body], sizes: dict[str, int], depth: int) -> int:
    """Symbols of a terminal with everything in it written out; 1 for one that is not defined here."""
    if name in sizes:
        return sizes[name]
    if depth > MAX_TERMINAL_DEPTH:
        raise ValueError(f"its terminals are nested deeper than {MAX_TERMINAL_DEPTH} levels")
    groups, last = [0], 0
    for token in terminals.get(name, ()):
        if token["open"]:
            groups[-1] += last
            groups.append(0)
            last = 0
        elif token["close"] and len(groups) > 1:
            last += groups.pop()
        elif token["repeat"]:
            last *= repetitions(token)
        elif (size := _symbols(token, terminals, sizes, depth)) is not None:
            groups[-1] += last
            last = size
        if sum(groups) + last > MAX_SIZE:
            raise ValueError(f"a terminal with its repetitions has more than {MAX_SIZE} symbols")
    sizes[name] = sum(groups) + last
    return sizes[name]


def _symbols(
    token: re.Match[str], terminals: Mapping[str, Body], sizes: dict[str, int], depth: int
) -> int | None:
    if token["word"] is not None:
        return _terminal_size(token["word"], terminals, sizes, depth + 1)
    text = token["string"] or token["regex"]
    return None if text is None else len(text)
