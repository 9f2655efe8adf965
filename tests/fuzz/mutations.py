"""Seeded damage to files: raw bytes, and JSON documents. Knows no format beyond that."""

from __future__ import annotations

import copy
import json
import re
from random import Random
from typing import Any

_NESTED = re.compile(r'"@nested:(.):([0-9]+)@"')
EXTREMES = (0, 1, 127, 255, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)


def damaged(random: Random, data: bytes, header: int) -> bytes:
    """One to three mutations, most of them in the first ``header`` bytes."""
    raw = bytearray(data)
    for _ in range(random.randint(1, 3)):
        raw = random.choice(_BYTE_MUTATIONS)(random, raw, min(header, len(raw)))
    return bytes(raw)


def _place(random: Random, raw: bytearray, header: int) -> int:
    return random.randrange(max(1, header if random.random() < 0.9 else len(raw)))


def _flip(random: Random, raw: bytearray, header: int) -> bytearray:
    for _ in range(random.choice((1, 1, 2, 8))):
        if raw:
            raw[_place(random, raw, header) % len(raw)] ^= 1 << random.randrange(8)
    return raw


def _cut(random: Random, raw: bytearray, header: int) -> bytearray:
    return raw[: _place(random, raw, header)]


def _integer(random: Random, raw: bytearray, header: int) -> bytearray:
    at, size = _place(random, raw, header), random.choice((1, 2, 4, 8, 8))
    raw[at : at + size] = (random.choice(EXTREMES) % 256**size).to_bytes(size, "little")
    return raw


def _span(random: Random, raw: bytearray, header: int) -> tuple[int, int]:
    at = _place(random, raw, header)
    return at, at + random.choice((1, 4, 8, 16, 64, 1000))


def _remove(random: Random, raw: bytearray, header: int) -> bytearray:
    begin, end = _span(random, raw, header)
    return raw[:begin] + raw[end:]


def _repeat(random: Random, raw: bytearray, header: int) -> bytearray:
    begin, end = _span(random, raw, header)
    return raw[:end] + raw[begin:end] * random.choice((1, 1, 3, 200)) + raw[end:]


def _move(random: Random, raw: bytearray, header: int) -> bytearray:
    begin, end = _span(random, raw, header)
    at = _place(random, raw, header)
    return raw[:at] + raw[begin:end] + raw[at:]


def _fill(random: Random, raw: bytearray, header: int) -> bytearray:
    begin, end = _span(random, raw, header)
    end = min(end, len(raw))
    raw[begin:end] = bytes([random.choice((0, 0x20, 0x80, 0xC3, 0xFF))]) * max(0, end - begin)
    return raw


def _insert(random: Random, raw: bytearray, header: int) -> bytearray:
    at = _place(random, raw, header)
    return raw[:at] + random.randbytes(random.choice((1, 4, 8, 100))) + raw[at:]


_BYTE_MUTATIONS = (_flip, _cut, _integer, _integer, _remove, _repeat, _move, _fill, _insert)


def extreme_value(random: Random) -> Any:
    """Something that a JSON document may hold and a reader does not expect."""
    kind = random.randrange(8)
    if kind == 0:
        return random.choice((None, True, False, [], {}, "", [[]], {"": None}))
    if kind == 1:
        return random.choice((1, -1)) * random.choice((*EXTREMES, 10**30, 10**400, 10**4000))
    if kind == 2:
        return random.choice((0.5, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan")))
    if kind == 3:
        return random.choice(
            ("\ud800", "\0", "a\nb\r\x1b[31m", "\u2028", "x" * 100_000, "é" * 3, "../x", "<s>")
        )
    if kind == 4:
        return [random.choice((0, "a", None, 2**40))] * random.choice((1, 3, 20_000))
    if kind == 5:
        return {f"k{i}": i for i in range(random.choice((1, 10, 5_000)))}
    return nested(random.choice((5, 100, 500, 50_000)), random.choice("[{"))


def nested(depth: int, bracket: str) -> Any:
    """A text of that depth is put in by ``json_text``, which a recursive encoder could not write."""
    return f"@nested:{bracket}:{depth}@"


def json_text(document: Any) -> bytes:
    """The document's text; lone surrogates become escapes, ``nested`` becomes what it says."""
    return _NESTED.sub(_written_out, json.dumps(document)).encode()


def _written_out(match: re.Match[str]) -> str:
    opening, closing = ("[", "]") if match[1] == "[" else ('{"a":', "}")
    return opening * int(match[2]) + "1" + closing * int(match[2])


def changed_document(random: Random, document: Any) -> Any:
    """A copy with one to three places changed, removed, wrapped, or exchanged with others."""
    result = copy.deepcopy(document)
    for _ in range(random.randint(1, 3)):
        result = _changed_once(random, result)
    return result


def _changed_once(random: Random, document: Any) -> Any:
    holders = [holder for holder in _holders(document) if holder]
    if not holders:
        return extreme_value(random)
    holder = _weighted(random, holders)
    key = random.choice(list(holder)) if isinstance(holder, dict) else random.randrange(len(holder))
    what = random.randrange(6)
    if what == 0:
        del holder[key]
    elif what == 1:
        holder[key] = random.choice(([holder[key]], {"a": holder[key]}, str(holder[key])[:1000]))
    elif what == 2:
        other = _weighted(random, holders)
        values = list(other.values()) if isinstance(other, dict) else other
        holder[key] = copy.deepcopy(random.choice(values))
    elif what == 3 and isinstance(holder, list):
        holder.extend([holder[key]] * random.choice((1, 2, 5_000)))
    else:
        holder[key] = extreme_value(random)
    return document


def _holders(document: Any) -> list[Any]:
    """Every object and list, each once, outermost first."""
    found, queue = [], [document]
    while queue:
        item = queue.pop()
        if isinstance(item, dict | list):
            found.append(item)
            queue.extend(item.values() if isinstance(item, dict) else item[:50])
    return found


def _weighted(random: Random, holders: list[Any]) -> Any:
    """Objects more often than the many small lists."""
    objects = [holder for holder in holders if isinstance(holder, dict)]
    return random.choice(objects if objects and random.random() < 0.7 else holders)
