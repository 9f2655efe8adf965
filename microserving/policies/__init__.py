"""Routing policies: which of several engines takes the next request.

A policy is a pure function over candidates and a ``Situation``; it knows no network. ``POLICIES`` names them all. Beside
them: the split of a prompt between two engines by what comes for them, the index of prompt prefixes, and the watch over
latency objectives.
"""

from __future__ import annotations

from microserving.policies.base import Candidate, EngineLoad, Policy, Situation
from microserving.policies.demand import Arrivals, Demand
from microserving.policies.estimates import NOMINAL_OUTPUT_TOKENS, prompt_length
from microserving.policies.objectives import ObjectiveWatch, Shift
from microserving.policies.prefix import prefix_aware
from microserving.policies.prefix_index import PrefixIndex
from microserving.policies.registry import NEED_REQUEST, POLICIES
from microserving.policies.simple import least_loaded, most_free_memory, power_of_two, round_robin
from microserving.policies.split import balanced_end, is_mostly_cached

__all__ = [
    "NEED_REQUEST",
    "NOMINAL_OUTPUT_TOKENS",
    "POLICIES",
    "Arrivals",
    "Candidate",
    "Demand",
    "EngineLoad",
    "ObjectiveWatch",
    "Policy",
    "PrefixIndex",
    "Shift",
    "Situation",
    "balanced_end",
    "is_mostly_cached",
    "least_loaded",
    "most_free_memory",
    "power_of_two",
    "prefix_aware",
    "prompt_length",
    "round_robin",
]
