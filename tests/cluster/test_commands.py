"""The command lines of the launcher's children, as the real command line reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from microserving.cli import main as cli
from microserving.cluster.config import parse_cluster_config
from microserving.cluster.launcher import Commands, welcome
from microserving.cluster.topology import Topology, plan

PROGRAM = """\
from microserving.program import *
class Mine(Program):
    share: Fraction = 0.5
    word: str = "a"
    async def route(self, request, cluster):
        assert len(cluster.prefill) == 3 and len(cluster.decode) == 2 and len(cluster.all) == 4
        async for chunk in cluster.all.round_robin().start_generate(request):
            yield chunk
"""


def topology(program: Path) -> Topology:
    roles = {"p": "prefill", "q": "prefill", "d": "decode", "h": "hybrid"}
    section = {"program": str(program), "settings": {"share": 0.25, "word": "b c"}, "address": "127.0.0.1:0"}
    data = {"nodes": [{"id": name, "role": role} for name, role in roles.items()], "router": section}
    config = parse_cluster_config(data, "x")
    return plan(config, secret_file=Path("/s"), runtime_dir=Path("/r"), cache_dir=None, cpus=(0, 1))


def test_the_program_is_tried_as_the_cluster_will_run_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PROGRAM)
    node = topology(path).router
    assert node is not None
    module, name, *arguments = Commands().check_program(node)
    assert (module, name) == ("-m", "microserving")
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out == f"{path}: ok (Mine; share=0.25, word=b c)\n"


def test_who_has_a_router_reads_how_to_change_its_program(tmp_path: Path) -> None:
    lines = "\n".join(welcome(topology(tmp_path / "mine.py")))
    assert "microserving program deploy FILE" in lines
    alone = parse_cluster_config({"nodes": [{"id": "a"}]}, "x")
    one = plan(alone, secret_file=Path("/s"), runtime_dir=Path("/r"), cache_dir=None, cpus=(0, 1))
    assert "program deploy" not in "\n".join(welcome(one))
