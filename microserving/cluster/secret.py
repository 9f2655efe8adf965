"""The cluster secret: making one, and the rule who may run without."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from microserving.errors import ConfigError
from microserving.protocol.addresses import is_loopback

MIN_SECRET_BYTES = 16


def create_secret_file(directory: Path) -> Path:
    """Write a fresh random secret (64 hex digits, mode 0600) into ``directory`` and return its path."""
    path = directory / "cluster-secret"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    return path


def check_secret(role: str, host: str, secret_file: Path | None) -> None:
    """Raises ConfigError when ``role`` on ``host`` may not start with this secret.

    prefill, decode and router listen beyond loopback only with a secret; hybrid needs none. A file that is named must
    be readable and hold at least ``MIN_SECRET_BYTES``.
    """
    if secret_file is None:
        if role != "hybrid" and not is_loopback(host):
            what = role if role == "router" else f"{role} engine"
            raise ConfigError(
                f"a {what} listens on {host}, beyond this machine, only with --cluster-secret-file "
                f"(at least {MIN_SECRET_BYTES} bytes)"
            )
        return
    try:
        size = len(secret_file.read_bytes().strip())
    except OSError as error:
        raise ConfigError(f"cannot read the cluster secret file {secret_file}: {error.strerror}") from error
    if size < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the cluster secret in {secret_file} is {size} bytes; it needs at least {MIN_SECRET_BYTES}"
        )
