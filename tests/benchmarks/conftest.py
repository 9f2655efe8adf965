"""Benchmarks are scripts that import their neighbours by bare names; last on the path, they hide nothing."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
