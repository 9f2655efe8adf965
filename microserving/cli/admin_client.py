"""Talks to a router's admin routes, for the sub-commands that change a running cluster."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from microserving.errors import ConfigError, EngineUnavailable, error_from_body

_TIMEOUT_S = 120.0
"""A deployment tries the program first; draining an engine waits for its requests."""
_NOT_ADMIN = (401, 404)
"""What the routes for clients answer here, with or without API keys. The admin routes say so when it is they."""


def add_admin_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--admin",
        metavar="URL|SOCKET",
        help="where the router's admin routes are (default: the cluster that `microserving up` runs here)",
    )
    parser.add_argument(
        "--admin-key-file", type=Path, metavar="PATH", help="file with the key of the admin routes"
    )
    add_json_flag(parser)


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="write JSON, for programs")


class AdminClient:
    """address: a URL, a socket's path, or None for the one cluster that runs on this machine. Raises ConfigError."""

    def __init__(self, address: str | None, key_file: Path | None) -> None:
        self._address = _only_cluster() if address is None else address
        self._headers = {} if key_file is None else {"authorization": f"Bearer {_key(key_file)}"}

    @classmethod
    def of(cls, options: argparse.Namespace) -> AdminClient:
        """As the flags say."""
        return cls(options.admin, options.admin_key_file)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object that the route answers with. Raises what an error answer stands for, EngineUnavailable when
        nobody answers."""
        import httpx

        is_url = "://" in self._address
        if not is_url and not Path(self._address).is_socket():
            raise EngineUnavailable(f"no router answers at {self._address}: there is no such socket")
        transport = httpx.HTTPTransport(uds=None if is_url else self._address)
        base = self._address if is_url else "http://router"
        try:
            with httpx.Client(transport=transport, base_url=base, timeout=_TIMEOUT_S) as client:
                answer = client.request(method, path, json=body, headers=self._headers)
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise EngineUnavailable(
                f"no router answers at {self._address}: {error} (one that is being restarted takes some seconds)"
            ) from error
        return _object(answer.status_code, answer.text, self._address)


def write_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def write_table(rows: list[tuple[str, ...]]) -> None:
    """Columns side by side, the last one as long as it likes."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        sys.stdout.write("  ".join(cells).rstrip() + "\n")


def _object(status: int, text: str, address: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise EngineUnavailable(f"{address} is no router's admin address (status {status})")
    if status >= 400:
        error = body.get("error")
        error = error if isinstance(error, dict) else {}
        if status in _NOT_ADMIN and "admin" not in str(error.get("message")):
            raise ConfigError(
                f"there are no admin routes at {address}: start the router with --admin-port or --admin-socket, and "
                "name that with --admin"
            )
        raise error_from_body(status, error)
    return body


def _only_cluster() -> str:
    from microserving.cluster.runtime_dir import admin_sockets, card_of

    sockets = admin_sockets()
    if not sockets:
        raise ConfigError(
            "no cluster runs here (`microserving up` starts one); --admin names a router elsewhere"
        )
    if len(sockets) > 1:
        choices = [f"{socket} ({card_of(socket) or 'starting'})" for socket in sockets]
        raise ConfigError(f"several clusters run here; choose with --admin: {', '.join(choices)}")
    return str(sockets[0])


def _key(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the admin key file {path}: {error}") from error
