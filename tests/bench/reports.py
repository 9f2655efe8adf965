"""Reports of runs with known latencies."""

from __future__ import annotations

from typing import Any

from microserving.bench.measurement import Measured
from microserving.bench.statistics import Slo, summarize

LABELS = ("data parallel", "1P1D <&>")


def records(jct: float, count: int = 9) -> list[Measured]:
    """Requests due one a second, with two tokens after half of their time, and a warm-up before them."""
    found = []
    for number in range(-1, count):
        due = float(number + 1)
        pieces = [due + jct / 2, due + jct * 0.9]
        found.append(
            Measured(
                number, due, counted=number >= 0, sent=due + 0.001, pieces=pieces, completed=pieces[-1], ended=due + jct,
                prompt_tokens=600, output_tokens=2, piece_tokens=2, usage=True, finish="length",
            )
        )  # fmt: skip
    return found


def run(label: str, rate: float | None, jct: float, *more: Measured) -> dict[str, Any]:
    measured = [*records(jct), *more]
    return {
        "label": label,
        "load": "2 at once" if rate is None else f"{rate:g}/s",
        "rate": rate,
        "arrivals": {"kind": "closed", "concurrency": 2} if rate is None else {"kind": "poisson", "rate": rate},
        "began_at": 0.0,
        "duration_s": 10.0,
        "client_cpu_s": 0.1,
        "stopped": False,
        "summary": summarize(measured, Slo(jct=2.0)).as_dict(),
        "transfers": {"hand_offs": 4, "tokens_sent": 8, "bytes_sent": 2_500_000, "transfer_ms": 8.0, "exposed_ms": 6.0, "hidden_ms": 2.0},
        "requests": [record.as_dict() for record in measured],
    }  # fmt: skip


def report(*runs: dict[str, Any], **more: Any) -> dict[str, Any]:
    machine = {"processor": "p", "cores": [0, 1]}
    head = {
        "format": 1,
        "made_at": 0.0,
        "stopped": False,
        "seed": 0,
        "sessions": 9,
        "warmup": 1,
        "machine": machine,
    }
    return {**head, "workload": {"name": "synthetic", "input": "600"}, "runs": list(runs), **more}


BOTH = report(
    *(run(label, rate, (1 + place) * rate) for rate in (0.5, 1.0) for place, label in enumerate(LABELS))
)
