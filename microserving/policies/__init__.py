"""Routing policies: which of several engines takes the next request.

A policy is a plain function over candidates; it owns no state and knows no network. ``POLICIES`` names them all.
"""

from __future__ import annotations

from microserving.policies.base import Candidate, EngineLoad, Policy
from microserving.policies.registry import POLICIES
from microserving.policies.simple import least_loaded, most_free_memory, round_robin

__all__ = [
    "POLICIES",
    "Candidate",
    "EngineLoad",
    "Policy",
    "least_loaded",
    "most_free_memory",
    "round_robin",
]
