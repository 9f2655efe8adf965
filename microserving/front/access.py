"""Who may ask, and how much: API keys, and limits for each client.

A client is the name of its key; without keys its address. Keys are compared by digests under a secret of this process,
so the time taken tells nothing of them; they are never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from microserving.errors import ConfigError, RateLimited, Unauthorized
from microserving.front.channel import Header

OPEN_PATHS: Final = frozenset({"/health", "/ready"})
"""All that is served without a key."""
MIN_KEY_CHARS: Final = 16
MAX_CLIENTS: Final = 10_000
"""Whose use is remembered: the least recent one is forgotten."""

current_client: ContextVar[str] = ContextVar("microserving_client", default="")
"""The client that the running request is served for."""


class ApiKeys:
    """keys: (name, key). Raises ConfigError for a key that is too short, or there twice."""

    def __init__(self, keys: Iterable[tuple[str, str]]) -> None:
        self._secret = secrets.token_bytes(32)
        self._names: dict[bytes, str] = {}
        for name, key in keys:
            if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"the API key {name!r} must be {MIN_KEY_CHARS} printable characters or more"
                )
            if self._names.setdefault(self._digest(key.encode("ascii")), name) != name:
                raise ConfigError(f"the API key {name!r} is there twice")
        if not self._names:
            raise ConfigError("there is no API key")

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """One key a line, with or without a name before it; empty lines and those that begin with # do not count."""
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not ASCII text"
            raise ConfigError(f"cannot read the API keys in {path}: {reason}") from None
        keys = []
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) > 2:
                raise ConfigError(
                    f"{path}, line {number}: a name and a key, or a key, not {len(words)} words"
                )
            keys.append((words[0] if len(words) == 2 else f"key-{number}", words[-1]))
        return cls(keys)

    def identify(self, headers: Sequence[Header]) -> str:
        """The name of the key that a request brings. Raises Unauthorized."""
        given = [value for name, value in headers if name == b"authorization"]
        if len(given) == 1:
            scheme, _, key = given[0].partition(b" ")
            name = self._names.get(self._digest(key.strip(b" "))) if scheme.lower() == b"bearer" else None
            if name is not None:
                return name
        raise Unauthorized("an API key is needed: send it as `Authorization: Bearer KEY`")

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, hashlib.sha256)


def read_bearer(path: Path) -> bytes:
    """The value of the authorization header for the first key in a file. Raises ConfigError."""
    ApiKeys.read(path)
    lines = map(str.split, path.read_text(encoding="ascii").splitlines())
    key = next(words[-1] for words in lines if words and not words[0].startswith("#"))
    return b"Bearer " + key.encode("ascii")


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Of one client; None = none. requests_per_minute may come at once, then evenly."""

    max_concurrent: int | None = None
    requests_per_minute: int | None = None


@dataclass(slots=True)
class _Use:
    running: int
    tokens: float
    at: float


class Access:
    """Every request ``enter``s, and ``leave``s when that returned. Used on the event loop only."""

    def __init__(
        self,
        keys: ApiKeys | None,
        limits: ClientLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keys = keys
        self._limits = limits or ClientLimits()
        self._clock = clock
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    def identify(self, headers: Sequence[Header], address: str) -> str:
        """Who asks. Raises Unauthorized."""
        return address if self._keys is None else self._keys.identify(headers)

    def enter(self, headers: Sequence[Header], address: str) -> str:
        """A request begins; whose it is. Raises Unauthorized, RateLimited."""
        client = self.identify(headers, address)
        limits = self._limits
        if limits.max_concurrent is not None or limits.requests_per_minute is not None:
            self._count(client, limits)
        return client

    def leave(self, client: str) -> None:
        """It ended."""
        use = self._uses.get(client)
        if use is not None:
            use.running -= 1

    def _count(self, client: str, limits: ClientLimits) -> None:
        now, rate = self._clock(), limits.requests_per_minute
        use = self._uses.get(client)
        if use is None:
            self._forget()
            use = self._uses[client] = _Use(0, float(rate or 0), now)
        self._uses.move_to_end(client)
        if limits.max_concurrent is not None and use.running >= limits.max_concurrent:
            raise RateLimited(
                f"at most {limits.max_concurrent} requests at once for one client", retry_after_s=1.0
            )
        if rate is not None:
            use.tokens = min(float(rate), use.tokens + (now - use.at) * rate / 60)
            use.at = now
            if use.tokens < 1.0:
                wait_s = (1.0 - use.tokens) * 60 / rate
                raise RateLimited(f"at most {rate} requests a minute for one client", retry_after_s=wait_s)
            use.tokens -= 1.0
        use.running += 1

    def _forget(self) -> None:
        while len(self._uses) >= MAX_CLIENTS:
            idle = next((client for client, use in self._uses.items() if not use.running), None)
            if idle is None:
                return
            del self._uses[idle]
