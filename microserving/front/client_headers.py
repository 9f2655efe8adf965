"""Which of a client's headers a router program may see: hints for routing, never what proves who somebody is.

A program's author writes log lines and forwards what he likes, so the set is chosen by what may leave, not by what must
not: names that begin with ``x-``, and a few that are known to be harmless. Of those, whatever smells of a credential or
an address is left out all the same. Count and sizes are bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_HEADERS = 16
MAX_NAME_CHARS = 64
MAX_VALUE_CHARS = 256
"""A longer value is left out, not cut: half a value is another value."""

_NAMED = frozenset({b"accept-language", b"traceparent", b"tracestate", b"user-agent"})
_REFUSED = re.compile(r"auth|token|key|secret|cookie|credential|passw|signature|cert|jwt|csrf|forwarded|-ip$")
_PRINTABLE = re.compile(r"[\x20-\x7e]*")


def routing_headers(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The headers for programs, by lower-case name. headers: as ASGI has them (names in lower case).

    The first ``MAX_HEADERS`` that qualify; of several with one name the first.
    """
    found: dict[str, str] = {}
    for raw_name, raw_value in headers:
        if not raw_name.startswith(b"x-") and raw_name not in _NAMED:
            continue
        name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
        if name not in found and _may_pass(name, value):
            found[name] = value
            if len(found) == MAX_HEADERS:
                break
    return found


def _may_pass(name: str, value: str) -> bool:
    return (
        len(name) <= MAX_NAME_CHARS
        and len(value) <= MAX_VALUE_CHARS
        and _REFUSED.search(name) is None
        and _PRINTABLE.fullmatch(value) is not None
    )
