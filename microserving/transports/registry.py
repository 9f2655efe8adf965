"""The transports by name. A transport's module is imported only when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from microserving.errors import ConfigError
from microserving.transports.base import Transport

TRANSPORTS: Mapping[str, str] = {
    "shared_memory": "microserving.transports.shared_memory:SharedMemoryTransport",
    "fake": "microserving.transports.fake:FakeTransport",
}
"""name -> "module:class". Every class takes ``runtime_dir``."""


def default_runtime_dir() -> Path:
    """Where the shared-memory transport keeps its sockets when nobody says where."""
    return import_module("microserving.transports.shared_memory.sockets").default_runtime_dir()  # type: ignore[no-any-return]


def create_transport(name: str, *, runtime_dir: Path | None = None) -> Transport:
    """A new transport. runtime_dir: where it keeps its sockets (None = the transport's default).

    Raises ConfigError for an unknown name.
    """
    try:
        module, _, attribute = TRANSPORTS[name].partition(":")
    except KeyError:
        raise ConfigError(f"unknown transport {name!r}; there are: {', '.join(sorted(TRANSPORTS))}") from None
    transport: Transport = getattr(import_module(module), attribute)(runtime_dir=runtime_dir)
    return transport
