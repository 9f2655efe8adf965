"""``host:port`` addresses: reading them, choosing free ports, finding busy ones before anything is started."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from microserving.errors import StartupError


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address to listen on. port 0 = any free port; an IPv6 host is held without brackets."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{bracketed(self.host)}:{self.port}"

    @property
    def url(self) -> str:
        """The URL that a process on this machine reaches it by."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{bracketed(host)}:{self.port}"


def bracketed(host: str) -> str:
    """``host`` as it stands in a URL."""
    return f"[{host}]" if ":" in host else host


def parse_address(text: str) -> Address:
    """Raises ValueError that says what is wrong."""
    host, separator, port = text.rpartition(":")
    if not separator or not host:
        raise ValueError(f"{text!r} is not host:port")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{text!r} has no port number between 0 and 65535")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r}: an IPv6 host stands in brackets, as in [::1]:8000")
    if not host or any(c.isspace() or c in "/@?#" or not c.isprintable() for c in host):
        raise ValueError(f"{text!r} is not host:port")
    return Address(host, int(port))


def claim_ports(wanted: Mapping[str, Address]) -> dict[str, Address]:
    """The same addresses with every port 0 replaced by a free one, all different.

    wanted: owner (as the user knows it) -> address. Raises StartupError when one cannot be listened on. The ports are
    not held: another process may still take one before its owner listens.
    """
    claimed: dict[str, Address] = {}
    with ExitStack() as held:
        # Fixed ports first, so that a port chosen for a 0 is never one that the file names.
        for owner in sorted(wanted, key=lambda name: wanted[name].port == 0):
            sock = held.enter_context(_bind(owner, wanted[owner]))
            claimed[owner] = Address(wanted[owner].host, sock.getsockname()[1])
    return {owner: claimed[owner] for owner in wanted}


def _bind(owner: str, address: Address) -> socket.socket:
    try:
        infos = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (socket.gaierror, UnicodeError) as error:
        raise StartupError(f"{owner}: the host of {address} is not known") from error
    family, kind, protocol, _, place = infos[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else a port in TIME_WAIT looks busy
        sock.bind(place)
        sock.listen(1)  # with SO_REUSEADDR only listen() tells that somebody else listens
    except OSError as error:
        sock.close()
        raise StartupError(f"{owner}: {_reason(address, error)}") from error
    return sock


def _reason(address: Address, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {address.port} on {address.host} is already in use"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{address.host} is not an address of this machine"
    if error.errno == errno.EACCES:
        return f"port {address.port} needs more rights than this user has"
    return f"cannot listen on {address}: {error.strerror}"
