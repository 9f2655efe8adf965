"""The real launcher over fake programs, as a process of its own: `fake_launcher.py JSON`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from microserving.cluster import supervisor
from microserving.cluster.config import parse_cluster_config
from microserving.cluster.launcher import Commands, LaunchOptions, run_cluster
from microserving.cluster.topology import EngineNode, RouterNode
from microserving.errors import StartupError
from microserving.observability.console import Console

FAKE = str(Path(__file__).with_name("fake_node.py"))


class FakeCommands(Commands):
    def __init__(self, modes: dict[str, str]) -> None:
        self._modes = modes

    def fetch(self, model: str, cache_dir: Path | None) -> tuple[str, ...]:
        return (FAKE, "model", self._modes.get("model", "done"), "0")

    def check_program(self, node: RouterNode) -> tuple[str, ...]:
        return (FAKE, "program", self._modes.get("program", "done"), "0")

    def engine(self, node: EngineNode) -> tuple[str, ...]:
        mode = self._modes.get(node.config.node_id, "ok")
        return (FAKE, node.config.node_id, mode, str(node.address.port))

    def router(self, node: RouterNode) -> tuple[str, ...]:
        return (FAKE, "router", self._modes.get("router", "ok"), str(node.address.port))


def main() -> int:
    task = json.loads(sys.argv[1])
    supervisor.FIRST_RESTART_S = task.get("first_restart_s", 0.05)
    supervisor.FIRST_STOP_S = task.get("first_stop_s", 1.0)
    supervisor.STOP_GRACE_S = task.get("stop_grace_s", 3.0)
    options = LaunchOptions(
        runtime_base=Path(task["base"]),
        ready_file=Path(task["base"]) / "ready.json",
        start_timeout_s=task.get("start_timeout_s", 30.0),
        log_dir=Path(task["log_dir"]) if "log_dir" in task else None,
    )
    console = Console(verbose=task.get("verbose", True))
    config = parse_cluster_config(task["config"], "test.toml")
    try:
        return run_cluster(config, options, console, FakeCommands(task["modes"]))
    except StartupError as error:
        console.line(f"microserving: error: {error.message}")
        return 1


sys.exit(main())
