"""Config models as command-line flags: field ``kv_dtype`` is ``--kv-dtype``. Both directions use the same names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel


def flag_name(field: str) -> str:
    """``--kv-dtype`` for ``kv_dtype``."""
    return "--" + field.replace("_", "-")


def to_flags(config: BaseModel, skip: Iterable[str] = ()) -> list[str]:
    """The flags that give ``config`` again: every field that was set explicitly, except None and ``skip``."""
    flags: list[str] = []
    for field in type(config).model_fields:
        value = getattr(config, field)
        if field in config.model_fields_set and field not in skip and value is not None:
            flags += _one_flag(field, value)
    return flags


def _one_flag(field: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flag_name(field) if value else "--no-" + flag_name(field)[2:]]
    if isinstance(value, tuple):
        return [f"{flag_name(field)}={','.join(value)}"]
    if isinstance(value, (str, int, float, Path)):
        return [f"{flag_name(field)}={value}"]
    raise TypeError(f"{field} has no command-line form: {value!r}")
