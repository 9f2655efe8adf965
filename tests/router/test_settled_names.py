"""Names and defaults of the router that are settled: what users, dashboards and other issues rely on."""

from __future__ import annotations

from typing import get_args

import pytest

from microserving.policies import POLICIES
from microserving.router.admission import MAX_PROMPT_TOKENS, Action, AdmissionSettings, LoadLevel
from microserving.router.app import Router, _admission_settings, _dispatching, _host_settings
from microserving.router.circuit import CircuitSettings
from microserving.router.config import RouterConfig
from microserving.router.dispatch import DispatchSettings
from microserving.router.engine_client import EngineTimeouts
from microserving.router.health import REFRESH_GAP_S, ProbeSettings
from microserving.router.ledger import RequestState
from microserving.router.program_host import HostSettings
from microserving.router.program_loader import shipped_programs

CONFIG = RouterConfig(program="prefill_decode", prefill_peers=("p:1",), decode_peers=("d:1",))


def test_names() -> None:
    assert get_args(RequestState) == ("waiting_for_prefill", "handoff_to_decode", "decoding", "complete")
    assert get_args(LoadLevel) == ("low", "moderate", "high", "critical")
    assert get_args(Action) == ("queue", "reject")
    assert set(POLICIES) == {
        "round_robin",
        "least_loaded",
        "most_free_memory",
        "prompt_length",
        "prefix_aware",
        "power_of_two",
    }
    assert shipped_programs() == [
        "adaptive",
        "balanced_prefill_decode",
        "context_migration",
        "prefill_decode",
        "prefix_aware",
        "round_robin",
    ]


def test_bounds() -> None:
    assert MAX_PROMPT_TOKENS == 2**20
    assert REFRESH_GAP_S == 0.25
    assert CONFIG.probe_connect_timeout_s == 0.5
    assert CONFIG.hedge_after_s is None
    assert CONFIG.serving_bind == CONFIG.admin_bind == "127.0.0.1"
    assert CONFIG.admin_port == 0


@pytest.mark.case("CF-05")
def test_a_default_is_the_same_wherever_it_is_written() -> None:
    """The configuration's are those of the parts that it configures."""
    assert _dispatching(CONFIG) == DispatchSettings()
    assert _admission_settings(CONFIG) == AdmissionSettings()
    assert _host_settings(CONFIG) == HostSettings()
    router = Router(CONFIG)
    assert router._monitor._settings == ProbeSettings()
    assert router._registry._timeouts == EngineTimeouts()
    assert router._registry._circuit == CircuitSettings()
