"""Every policy by name: one line each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from microserving.policies.base import Policy
from microserving.policies.estimates import prompt_length
from microserving.policies.prefix import prefix_aware
from microserving.policies.simple import least_loaded, most_free_memory, power_of_two, round_robin

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "round_robin": round_robin,
        "least_loaded": least_loaded,
        "most_free_memory": most_free_memory,
        "prompt_length": prompt_length,
        "prefix_aware": prefix_aware,
        "power_of_two": power_of_two,
    }
)

NEED_REQUEST = frozenset({"prompt_length", "prefix_aware"})
"""Policies that have nothing to go by without a request."""
