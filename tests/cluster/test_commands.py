"""The command lines of the launcher's children, as the real command line reads them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from microserving.cli import main as cli
from microserving.cluster.config import parse_cluster_config
from microserving.cluster.launcher import Commands
from microserving.cluster.topology import Topology, plan
from microserving.cluster.welcome import welcome

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


def topology(program: Path, **router: str) -> Topology:
    roles = {"p": "prefill", "q": "prefill", "d": "decode", "h": "hybrid"}
    section = {
        "program": str(program),
        "settings": {"share": 0.25, "word": "b c"},
        "address": "127.0.0.1:0",
    } | router
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
    assert "microserving program deploy FILE  " in lines
    assert "--admin /r/admin.sock" in lines
    keyed = "\n".join(welcome(topology(tmp_path / "mine.py", admin_key_file="/my key")))
    assert "microserving program deploy FILE --admin-key-file '/my key' " in keyed
    alone = parse_cluster_config({"nodes": [{"id": "a"}]}, "x")
    one = plan(alone, secret_file=Path("/s"), runtime_dir=Path("/r"), cache_dir=None, cpus=(0, 1))
    assert "program deploy" not in "\n".join(welcome(one))


def test_what_is_pasted_brings_the_key_and_does_not_show_it(tmp_path: Path) -> None:
    """Run by a shell as it stands, with a `curl` and a `python` that tell what they were given."""
    keys = tmp_path / "the keys"
    keys.write_text("# ours\n\n  #old xxx\n ann sk-0123456789abcdef\nsk-second-second\n")
    lines = welcome(topology(tmp_path / "mine.py", api_key_file=str(keys)))
    assert "sk-" not in "\n".join(lines)
    first = next(i for i, line in enumerate(lines) if line.startswith("  export "))
    end = next(i for i, line in enumerate(lines) if line.startswith("    -d "))
    script = "curl() { printf '%s\\n' \"$@\"; }\n" + "\n".join(lines[first : end + 1])
    given = subprocess.run(
        ["sh", "-ec", script], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "Authorization: Bearer sk-0123456789abcdef" in given
    assert '  client = OpenAI(base_url="' in "\n".join(lines)
    assert lines[lines.index("  import os") + 2].endswith('api_key=os.environ["MICROSERVING_API_KEY"])')
