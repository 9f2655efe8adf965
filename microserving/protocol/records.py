"""Data classes that are made for every request or token.

``dataclass(frozen=True)`` sets each field by a call, which makes an object of eight fields cost as much as a dozen calls
of functions. What is frozen here is so for the type checker only: at run time nobody is kept from setting a field, and
nobody may.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """A data class with slots, equality and a hash, whose objects are not to be changed."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
