"""The command line: help, wrong usage, one line for every error."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders
from tokenizers.models import BPE

import microserving
from microserving.cli import main as cli
from microserving.cli import router, serve, up
from microserving.cli.flags import shown_default
from microserving.cluster.command_line import flag_name, to_flags
from microserving.engine.config import EngineConfig
from microserving.errors import StartupError
from microserving.router.config import RouterConfig
from tests.reference.model_builder import write_tiny_hf


def module_with(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    module = ModuleType(name)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def test_help_names_every_command(run: Any) -> None:
    ran = run("--help")
    assert ran.status == 0
    for name, line in cli.COMMANDS.items():
        assert f"{name}  " in ran.out
        assert line in ran.out


@pytest.mark.parametrize(
    "command", [[], *[[name] for name in cli.COMMANDS], ["model", "fetch"], ["model", "show"]]
)
def test_every_command_has_help(run: Any, command: list[str]) -> None:
    ran = run(*command, "--help")
    assert ran.status == 0
    assert "--help" in ran.out
    assert ran.err == ""


@pytest.mark.case("CF-05")
@pytest.mark.parametrize(
    ("command", "model", "texts", "skip", "in_force"),
    [
        ("serve", EngineConfig, serve.HELP_TEXTS, frozenset(), serve.in_force()),
        ("router", RouterConfig, router.HELP_TEXTS, router.OTHER_FORM, router.IN_FORCE),
    ],
)
def test_every_field_is_a_flag_with_its_default(
    run: Any,
    command: str,
    model: Any,
    texts: dict[str, str],
    skip: frozenset[str],
    in_force: dict[str, object],
) -> None:
    assert set(texts) == set(model.model_fields) - skip
    help_text = " ".join(run(command, "--help").out.split())
    options = help_text.partition("options:")[2]
    for name in texts:
        assert f" {flag_name(name)}" in options
        assert f" {texts[name]} ({shown_default(model.model_fields[name], in_force.get(name))})" in options


def test_shown_defaults_are_those_of_the_models() -> None:
    config = EngineConfig()
    assert shown_default(EngineConfig.model_fields["port"]) == f"default: {config.port}"
    assert shown_default(EngineConfig.model_fields["threads"]) == f"default: {config.threads}"
    assert shown_default(EngineConfig.model_fields["cache_dir"]) == "default: none"
    assert shown_default(EngineConfig.model_fields["cache_dir"], "/c") == "default: /c"
    assert shown_default(RouterConfig.model_fields["program"]) == "must be given"


def test_serve_runs_with_what_the_flags_say(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran_with: list[EngineConfig] = []
    module_with(
        monkeypatch, "microserving.server.run", run_engine=lambda config, **_: ran_with.append(config)
    )
    wanted = EngineConfig(
        model="m.gguf",
        port=0,
        node_role="decode",
        node_id="decode-7",
        threads=3,
        kv_dtype="float32",
        page_size=32,
        lease_ttl_s=1.5,
        cache_dir=Path("/c d"),
        strict_fields=True,
    )
    assert run("serve", *to_flags(wanted)).status == 0
    assert run("serve").status == 0
    assert ran_with == [wanted, EngineConfig()]


def test_router_runs_with_what_the_flags_say(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran_with: list[RouterConfig] = []
    module_with(
        monkeypatch, "microserving.router.run", run_router=lambda config, **_: ran_with.append(config)
    )
    wanted = RouterConfig.model_validate(
        {
            "program": "p.py",
            "prefill_peers": ["http://a:1", "http://b:2"],
            "decode_peers": ["http://c:3"],
            "probe_misses": 2,
            "program_settings": {"f": 0.5, "n": 3, "on": True, "text": "0.5", "word": "x y"},
        }
    )
    settings = ["--set=f=0.5", "--set=n=3", "--set=on=true", '--set=text="0.5"', "--set", "word=x y"]
    flags = to_flags(wanted, skip={"program_settings"})
    assert run("router", *flags, *settings).status == 0
    assert ran_with == [wanted]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "error: the following arguments are required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["serve", "--port", "90000"], "argument --port: Input should be less than or equal to 65535"),
        (["serve", "--port", "x"], "argument --port: invalid int value: 'x'"),
        (["serve", "--node-role", "router"], "argument --node-role: invalid choice: 'router'"),
        (["serve", "--node-id", "a b"], "argument --node-id: String should match pattern"),
        (["serve", "--lease-ttl-s", "0"], "argument --lease-ttl-s: Input should be greater than 0"),
        (["serve", "--lease-ttl-s", "1e9"], "argument --lease-ttl-s: Input should be less than or equal to 3600"),
        (["serve", "--chunk", "5"], "unrecognized arguments: --chunk"),
        (["router"], "the following arguments are required: --program"),
        (["router", "--program", "x"], "no engine is named: prefill_peers and decode_peers are both empty"),
        (["router", "--program", "x", "--decode-peers", "ftp://x"], "argument --decode-peers: 'ftp://x' is not the address of an engine"),
        (["router", "--program", "x", "--set", "y"], "argument --set: 'y' is not KEY=VALUE"),
        (["up", "--port", "65536"], "argument --port: '65536' is not a port number (0 to 65535)"),
        (["up", "--start-timeout", "nan"], "argument --start-timeout: 'nan' is not a time in seconds above 0"),
        (["model", "steal"], "invalid choice: 'steal'"),
    ],
)  # fmt: skip
def test_wrong_usage_ends_with_2(run: Any, arguments: list[str], error: str) -> None:
    ran = run(*arguments)
    assert ran.status == 2
    assert error in ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["up", "--config", "/no/x.toml"], "cannot read /no/x.toml: No such file or directory"),
        (["serve", "--node-role", "prefill", "--serving-bind", "0.0.0.0"], "a prefill engine listens on 0.0.0.0, beyond this machine, only with --cluster-secret-file (at least 16 bytes)"),
        (["router", "--program", "x", "--decode-peers", "h:1", "--serving-bind", "::"], "a router listens on ::, beyond this machine, only with --cluster-secret-file (at least 16 bytes)"),
        (["serve", "--cluster-secret-file", "/no/s"], "cannot read the cluster secret file /no/s: No such file or directory"),
        (["model", "show", "/no/model"], "model '/no/model' was not found"),
    ],
)  # fmt: skip
def test_what_cannot_start_is_one_line(
    run: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], error: str
) -> None:
    module_with(monkeypatch, "microserving.server.run", run_engine=None)
    module_with(monkeypatch, "microserving.router.run", run_router=None)
    ran = run(*arguments)
    assert ran.status == 1
    assert ran.err.startswith(f"microserving: error: {error}")
    assert ran.err.count("\n") == 1


def fails_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run_engine(config: EngineConfig, **_: Any) -> None:
        raise error

    module_with(monkeypatch, "microserving.server.run", run_engine=run_engine)


def test_a_startup_error_is_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, StartupError("the port\nis busy"))
    ran = run("serve")
    assert (ran.status, ran.err) == (1, "microserving: error: the port is busy\n")


def test_a_bug_is_one_line_and_a_hint(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, KeyError("x"))
    ran = run("serve")
    assert ran.status == 1
    assert ran.err == "microserving: error: KeyError: 'x' (a bug; --debug shows where)\n"


@pytest.mark.parametrize("arguments", [["--debug", "serve"], ["serve", "--debug"]])
def test_debug_shows_the_traceback(run: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    fails_with(monkeypatch, KeyError("x"))
    ran = run(*arguments)
    assert "Traceback (most recent call last)" in ran.err
    assert "in run_engine" in ran.err


def test_ctrl_c_is_quiet(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_with(monkeypatch, KeyboardInterrupt())
    ran = run("serve")
    assert (ran.status, ran.err) == (130, "")


@pytest.mark.parametrize("arguments", [["-v", "serve"], ["serve", "-v"], ["--verbose", "serve"]])
def test_verbose_may_stand_before_or_after(
    run: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    levels: list[str] = []
    monkeypatch.setattr("microserving.observability.configure_logging", levels.append)
    module_with(monkeypatch, "microserving.server.run", run_engine=lambda *_, **__: None)
    assert run(*arguments).status == 0
    assert levels == ["DEBUG"]


def test_router_check_names_what_is_wrong_with_a_program(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "p.py"
    path.write_text("x = 1\ny = nowhere\n")
    ran = run("router", "--program", str(path), "--decode-peers", "h:1", "--check")
    assert ran.status == 1
    assert ran.err.startswith(f"microserving: error: {path}:2: ")
    assert "nowhere" in ran.err


def test_router_check_needs_no_peers_and_says_what_is_good(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "my_program.py"
    path.write_text(
        "from microserving.program import Program, Fraction\n"
        "class MyProgram(Program):\n"
        "    pd_balance_factor: Fraction = 0.1\n"
        "    async def route(self, request, cluster):\n"
        "        async for chunk in cluster.all.round_robin().start_generate(request):\n"
        "            yield chunk\n"
    )
    ran = run("router", "--program", str(path), "--check")
    assert (ran.status, ran.out, ran.err) == (0, f"{path}: ok (MyProgram; pd_balance_factor=0.1)\n", "")
    ran = run("router", "--program", str(path), "--set=pd_balance_factor=0.25", "--check")
    assert ran.out == f"{path}: ok (MyProgram; pd_balance_factor=0.25)\n"
    ran = run("router", "--program", "round_robin", "--decode-peers", "h:1", "--check")
    assert (ran.status, ran.out) == (0, "round_robin: ok (RoundRobin)\n")
    ran = run("router", "--program", str(path), "--set=pd_balance_factor=2", "--check")
    assert ran.status == 1
    assert f"{path}:3: " in ran.err


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "--chunk", "5"],
        ["serve", "--port", "x"],
        ["router"],
        ["up", "--st", "1"],
        ["model", "list", "--x"],
    ],
)
def test_wrong_usage_shows_the_usage_of_the_sub_command(run: Any, command: list[str]) -> None:
    lines = run(*command).err.splitlines()
    assert lines[0].startswith(f"usage: microserving {command[0]} ")
    assert len(lines) == 2
    assert lines[1].startswith(f"microserving {command[0]}")


def test_serve_says_when_it_is_ready_with_few_lines_before(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_engine(config: EngineConfig, *, progress: Any, on_ready: Any) -> None:
        for percent in range(101):
            progress("weights", percent / 100)
        on_ready(8001)

    module_with(monkeypatch, "microserving.server.run", run_engine=run_engine)
    lines = run("serve", "--node-id=prefill-0", "--port=0").err.splitlines()
    assert lines[-1] == "prefill-0 ready at http://127.0.0.1:8001"
    assert lines[:-1] == [f"[progress] weights {percent}%" for percent in (0, 25, 50, 75, 100)]


def test_version_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "microserving", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert result.stdout == f"microserving {microserving.__version__}\n"


def test_up_takes_what_the_command_line_says_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text('model.name = "m"\nrouter.program = "p"\nnodes = [{ id = "a" }]\n')
    options = argparse.Namespace(config=path, model="m2", port=9, program="p2", settings=[("f", 0.3)])
    config = up.effective_config(options)
    assert config.router is not None
    assert (config.model.name, config.router.address, config.router.program) == ("m2", "127.0.0.1:9", "p2")
    assert config.router.settings == {"f": 0.3}


def test_up_takes_settings_of_the_program(run: Any) -> None:
    ran = run(
        "up", "--dry-run", "--port=0", "--program=balanced_prefill_decode", "--set=f=0.3", "--set", "w=x y"
    )
    assert ran.status == 0
    assert "router.program_settings = {'f': 0.3, 'w': 'x y'} (given)" in ran.out


@pytest.mark.case("CF-03")
def test_a_dry_run_shows_the_effective_configuration(run: Any) -> None:
    ran = run("up", "--dry-run", "--port", "0", "--model", "m")
    assert ran.status == 0
    assert "nodes.prefill-0.model = 'm' (given)" in ran.out
    assert "nodes.decode-0.node_role = 'decode' (given)" in ran.out
    assert "router.program = 'prefill_decode' (given)" in ran.out


def test_model_show_tells_of_tokenizer_and_chat_template(run: Any, tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "hf")
    without = run("model", "show", str(directory))
    assert without.status == 1
    assert "tokenizer: none\nchat_template: none, as there is no tokenizer\n" in without.out
    assert without.err.startswith(f"microserving: error: {directory}: there is no tokenizer.json")
    library = Library(BPE(vocab={token: i for i, token in enumerate("abc")}, merges=[]))
    library.decoder = decoders.ByteLevel()
    library.save(str(directory / "tokenizer.json"))
    shown = run("model", "show", str(directory))
    assert shown.status == 0
    assert "tokenizer: 3 tokens\nchat_template: none: the model has no chat template\n" in shown.out
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert "chat_template: yes\n" in run("model", "show", str(directory)).out


def test_model_list_and_show_without_any_model(run: Any, tmp_path: Path) -> None:
    listed = run("model", "list", "--cache-dir", str(tmp_path))
    assert listed.status == 0
    assert "smollm2-135m-instruct" in listed.out
    assert "not fetched" in listed.out
    shown = run("model", "show", "--cache-dir", str(tmp_path))
    assert shown.status == 0
    assert "path: not fetched" in shown.out
