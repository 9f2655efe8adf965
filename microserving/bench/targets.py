"""Who is measured: an OpenAI address, and behind it perhaps a router of ours that tells more and takes programs.

Owns the connections to it. Does not know what is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx

from microserving.bench.client import FailedRequestError, HttpWire, try_to_measure
from microserving.bench.measurement import Measured
from microserving.errors import ConfigError, EngineUnavailable

_CONTROL_TIMEOUT_S = 120.0
"""A deployment tries the program first."""
_IDLE_TIMEOUT_S = 60.0
_IDLE_PROBE_S = 0.1


@dataclass(frozen=True, slots=True)
class Program:
    """What a router is given before each run. body: of `/admin/program/deploy`."""

    name: str
    settings: Mapping[str, str | int | float | bool]
    body: Mapping[str, Any]


class Target:
    """label: of the lines in tables and charts. admin: the router's admin socket. Close it."""

    def __init__(
        self,
        label: str,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        admin: str | None = None,
        program: Program | None = None,
        salted: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """salted: each run has a `cache_salt` of its own, so that none finds what another one left in a prefix cache; so
        too when ``connect`` finds a server of ours.
        about: what else the report says of it. Raises ConfigError for what is no URL."""
        self.label = label
        self.model = model
        self.salted = salted
        self.about = {"url": base_url, **(about or {})}
        self.wire = HttpWire(base_url, api_key=api_key, timeout_s=timeout_s)
        self._program = program
        self._root = self.wire.url.removesuffix("/v1")
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._http = httpx.AsyncClient(timeout=_CONTROL_TIMEOUT_S, headers=headers, trust_env=False)
        transport = None if admin is None else httpx.AsyncHTTPTransport(uds=admin)
        self._admin = httpx.AsyncClient(timeout=_CONTROL_TIMEOUT_S, transport=transport, trust_env=False)

    async def close(self) -> None:
        await self.wire.close()
        await self._http.aclose()
        await self._admin.aclose()

    async def connect(self) -> None:
        """Find out the model, unless it is known, and whether the server is one of ours, which know `cache_salt`. Raises
        EngineUnavailable, ConfigError."""
        try:
            answer = await self._http.get(f"{self.wire.url}/models")
            served = answer.json()["data"][0]
            self.salted = self.salted or served.get("owned_by") == "microserving"
            self.model = self.model or str(served["id"])
        except httpx.HTTPError as error:
            raise EngineUnavailable(
                f"{self.label}: nobody answers at {self.about['url']}: {_words(error)}"
            ) from error
        except (AttributeError, ValueError, KeyError, IndexError, TypeError) as error:
            if self.model is not None:
                return
            raise ConfigError(
                f"{self.label}: /models tells no model (status {answer.status_code}); name it with --model"
            ) from error

    async def prepare(self) -> None:
        """Put its program in charge. Raises ConfigError when the router refuses it, EngineUnavailable without one."""
        if self._program is None:
            return
        body = dict(self._program.body)
        try:
            answer = await self._admin.post("http://router/admin/program/deploy", json=body)
        except httpx.HTTPError as error:
            raise EngineUnavailable(f"{self.label}: its router does not answer: {_words(error)}") from error
        if answer.status_code != 200:
            raise ConfigError(f"{self.label}: {_refused(answer)}")

    async def ask(self, path: str, body: Mapping[str, Any]) -> Measured:
        """One request outside of a run. Raises ConfigError when it fails."""
        record = Measured(0, 0.0)
        try:
            await try_to_measure(self.wire, path, body, record, asyncio.get_running_loop().time)
        except FailedRequestError as error:
            words = ": ".join(filter(None, (error.kind, error.message)))
            raise ConfigError(f"{self.label}: a first request failed: {words}") from None
        return record

    async def stats(self) -> dict[str, Any] | None:
        """`/router/stats`; None where there is no router of ours."""
        with suppress(httpx.HTTPError, ValueError):
            answer = await self._http.get(f"{self._root}/router/stats")
            stats = answer.json() if answer.status_code == 200 else None
            return stats if isinstance(stats, dict) and "requests_in_flight" in stats else None
        return None

    async def settle(self) -> None:
        """Until nothing that was cancelled runs any more, as far as it tells."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_TIMEOUT_S):
                while (stats := await self.stats()) is not None and stats["requests_in_flight"]:  # noqa: ASYNC110 - over HTTP
                    await asyncio.sleep(_IDLE_PROBE_S)


def _words(error: httpx.HTTPError) -> str:
    """Some have none of their own."""
    return str(error) or type(error).__name__


def _refused(answer: httpx.Response) -> str:
    """What the router says against a program."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"its router takes no program (status {answer.status_code})"


@dataclass(frozen=True, slots=True)
class Transfers:
    """What hand-offs moved and cost during a run. transfer_ms: of writing, by request; exposed_ms: what of it (and of
    the hand-shakes) delayed the answer; hidden_ms: what did not. Sums in milliseconds."""

    hand_offs: int
    tokens_sent: int
    bytes_sent: int
    transfer_ms: float
    exposed_ms: float

    @property
    def hidden_ms(self) -> float:
        return max(0.0, self.transfer_ms - self.exposed_ms)

    def as_dict(self) -> dict[str, Any]:
        names = ("hand_offs", "tokens_sent", "bytes_sent", "transfer_ms", "exposed_ms", "hidden_ms")
        return {name: getattr(self, name) for name in names}


def transfers_between(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> Transfers | None:
    """From two answers of ``Target.stats``; None when they do not tell, as when the router began to count anew."""
    if before is None or after is None or "transfers" not in before or "transfers" not in after:
        return None
    if after["transfers"]["hand_offs"] < before["transfers"]["hand_offs"]:
        return None
    names = ("hand_offs", "tokens_sent", "bytes_sent", "transfer_ms", "exposed_ms")
    return Transfers(*(after["transfers"][name] - before["transfers"][name] for name in names))


def disturbance_between(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str | None:
    """Why a run between two answers of ``Target.stats`` did not measure what it should; None when it seems to have done.
    A router takes back a program that fails, and one that was started again has its first one."""
    if before is None:
        return None
    if after is None:
        return "its router did not answer any more"
    one, other = (
        {name: stats.get("program", {}).get(name) for name in ("name", "settings", "version")}
        for stats in (before, after)
    )
    if one != other:
        return f"its router went over to another program: {other['name']}, version {other['version']}"
    return None
