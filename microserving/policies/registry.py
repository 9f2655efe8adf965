"""Every policy by name: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from microserving.policies.base import Policy
from microserving.policies.simple import least_loaded, most_free_memory, round_robin

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "round_robin": round_robin,
        "least_loaded": least_loaded,
        "most_free_memory": most_free_memory,
    }
)
