"""What the benchmark of routers makes of its turns. No router is started."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def benchmark() -> ModuleType:
    """`benchmarks/router.py`, under a name that is not also that of a folder of tests."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "router.py"
    spec = importlib.util.spec_from_file_location("router_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


router = benchmark()
OURS, PEERS = router.OURS, router.PEERS


def turn(rps32: float, p50_us: float, cpu_per_event: float) -> Any:
    return router.Turn(rps32, p50_us, 100.0, cpu_per_event, 10.0, 20.0)


TURNS = {
    OURS: [turn(900, 300, 40), turn(1000, 200, 60), turn(100, 900, 90)],  # the last round was a busy one
    PEERS[0]: [turn(800, 200, 50), turn(1000, 210, 30), turn(50, 600, 60)],
    PEERS[1]: [turn(450, 100, 20), turn(2000, 100, 40), turn(40, 450, 45)],
}


def test_ratios_are_those_of_each_round_to_its_faster_peer() -> None:
    """900/800, 1000/2000, 100/50; 300/100, 200/100, 900/450; 40/20, 60/30, 90/45."""
    assert router.ratios(TURNS) == pytest.approx({"rps32": 1.125, "p50": 2.0, "cpu_per_event": 2.0})


def test_the_result_has_what_readers_look_for() -> None:
    result = json.loads(json.dumps(router.report(TURNS, {"streams": 1000, "errors": 0})))
    assert set(result["ratio"]) == {"rps32", "p50", "cpu_per_event"}
    assert result["rps32"] == 900
    assert result["rps32_over_mlc"] == 3.0
    assert set(result["peers"]) == set(PEERS)
    assert result["peers"][PEERS[0]]["rps32"] == 800
    assert result["streams"]["errors"] == 0
    alone = router.report({OURS: TURNS[OURS]}, None)
    assert (alone["peers"], "ratio" in alone, "streams" in alone) == ({}, False, False)
