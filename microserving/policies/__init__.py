"""Routing policies: which of several engines takes the next request.

A policy is a pure function over candidates and a ``Situation``; it knows no network. ``POLICIES`` names them all. Beside
them: estimates that programs split prompts by, the index of prompt prefixes, and the watch over latency objectives.
"""

from __future__ import annotations

from microserving.policies.base import Candidate, EngineLoad, Policy, Situation
from microserving.policies.estimates import NOMINAL_OUTPUT_TOKENS, balanced_end, decoding_s, prompt_length
from microserving.policies.objectives import ObjectiveWatch, Shift
from microserving.policies.prefix import prefix_aware
from microserving.policies.prefix_index import PrefixIndex
from microserving.policies.registry import NEED_REQUEST, POLICIES
from microserving.policies.simple import least_loaded, most_free_memory, power_of_two, round_robin

__all__ = [
    "NEED_REQUEST",
    "NOMINAL_OUTPUT_TOKENS",
    "POLICIES",
    "Candidate",
    "EngineLoad",
    "ObjectiveWatch",
    "Policy",
    "PrefixIndex",
    "Shift",
    "Situation",
    "balanced_end",
    "decoding_s",
    "least_loaded",
    "most_free_memory",
    "power_of_two",
    "prefix_aware",
    "prompt_length",
    "round_robin",
]
