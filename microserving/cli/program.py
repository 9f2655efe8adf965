"""`microserving program`: check router programs, put them in charge of a running cluster, and go back."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from microserving.cli.admin_client import AdminClient, add_admin_flags, add_json_flag, write_json, write_table
from microserving.cli.settings import add_set_flag

Action = Callable[[argparse.Namespace], int]

_GONE: dict[str, Any] = {"attempts": 0, "ok": "-", "failed": "-"}
_FILE_HELP = "a Python file, or the name of a program that comes with microserving"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Router programs: Python files with one class whose `route` serves a request.

  microserving program list                    what comes with microserving
  microserving program show round_robin        its text, to copy and change
  microserving program check mine.py           what is wrong with it, with file and line; runs it on engines in memory
  microserving program check mine.py --faults  the same, and what it does when engines fail and clients leave
  microserving program deploy mine.py          put it in charge of the running cluster; running requests go on
  microserving program rollback                put the one before in charge again"""
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", required=True, parser_class=argparse.ArgumentParser
    )
    _add_offline(actions)
    _add_online(actions)


def run(options: argparse.Namespace) -> int:
    action: Action = options.action
    return action(options)


def _add_offline(actions: Any) -> None:
    check = _add(
        actions, "check", run_check, "load a program and try it on engines in memory; deploys nothing"
    )
    check.add_argument("program", metavar="FILE", help=_FILE_HELP)
    add_set_flag(check)
    for role, count in (("prefill", 1), ("decode", 1), ("hybrid", 0)):
        text = f"{role} engines in memory (default: %(default)s)"
        check.add_argument(f"--{role}", type=int, default=count, metavar="N", help=text)
    check.add_argument(
        "--faults",
        action="store_true",
        help="then let engines fail, and clients leave, at every await of the program (in virtual time; two engines of "
        "each role at least)",
    )
    add_json_flag(check)
    add_json_flag(_add(actions, "list", run_list, "the programs that come with microserving"))
    show = _add(actions, "show", run_show, "the text of a program, ready to copy")
    show.add_argument("program", metavar="NAME", help=_FILE_HELP)


def _add_online(actions: Any) -> None:
    deploy = _add(actions, "deploy", run_deploy, "check a program and put it in charge of a running cluster")
    deploy.add_argument("program", metavar="FILE", help=_FILE_HELP)
    add_set_flag(deploy)
    rollback = _add(actions, "rollback", run_rollback, "put the program before this one in charge again")
    status = _add(
        actions, "status", run_status, "what is in charge of a running cluster, and what was before"
    )
    for parser in (deploy, rollback, status):
        add_admin_flags(parser)


def _add(actions: Any, name: str, action: Action, line: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=line, description=line, allow_abbrev=False
    )
    parser.set_defaults(action=action)
    return parser


def run_check(options: argparse.Namespace) -> int:
    """Raises ProgramError with file and line when the program is not good."""
    counts = (options.prefill, options.decode, options.hybrid)
    settings = dict(options.settings)
    if not options.faults:
        return check(options.program, settings, counts, as_json=options.json)
    return check_faults(options.program, settings, counts, as_json=options.json)


def check(
    program: str,
    settings: Mapping[str, Any],
    counts: tuple[int, int, int] = (1, 1, 0),
    *,
    as_json: bool = False,
) -> int:
    """Say that a program is good. counts: of prefill, decode and hybrid engines. Raises ProgramError when it is not."""
    from microserving.router.dry_run import DryRun, Roles, dry_run
    from microserving.router.program_loader import read_program

    facts = dry_run(DryRun(read_program(program), dict(settings), Roles(*counts)))
    if as_json:
        write_json({"program": program, "class": facts.name, "settings": facts.settings})
        return 0
    shown = ", ".join(f"{name}={value}" for name, value in facts.settings.items())
    sys.stdout.write(f"{program}: ok ({'; '.join(filter(None, [facts.name, shown]))})\n")
    return 0


def check_faults(
    program: str, settings: Mapping[str, Any], counts: tuple[int, int, int], *, as_json: bool = False
) -> int:
    """Try a program with every fault, and tell of it. 1 when it is not sound. Raises ProgramError as ``check`` does."""
    from microserving.router.dry_run import DryRun, Roles, dry_run
    from microserving.router.program_loader import read_program
    from microserving.testing import check_program

    dry_run(DryRun(read_program(program), dict(settings), Roles(*counts)))
    prefill, decode, hybrid = (max(2, count) if count else 0 for count in counts)
    report = check_program(
        program, settings=settings, cluster=(prefill, decode, hybrid), progress=_progress()
    )
    if as_json:
        write_json(report.as_dict())
    else:
        sys.stdout.write(f"{report}\n")
    return 0 if report.ok else 1


def _progress() -> Callable[[int, int], None] | None:
    """Shows on a terminal how many of the runs are done."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, planned: int) -> None:
        if done % 10 == 0 or done == planned:
            shown = "" if done == planned else f"{done} of {planned} runs"
            sys.stderr.write(f"\r\x1b[K{shown}")
            sys.stderr.flush()

    return show


def run_list(options: argparse.Namespace) -> int:
    """One line a program: its name and what it does."""
    from microserving.router.program_loader import shipped_programs, summary

    programs = {name: summary(name) for name in shipped_programs()}
    if options.json:
        write_json([{"name": name, "summary": text} for name, text in programs.items()])
    else:
        write_table(list(programs.items()))
    return 0


def run_show(options: argparse.Namespace) -> int:
    """The text, to be redirected into a file."""
    from microserving.router.program_loader import read_program

    sys.stdout.write(read_program(options.program).text.decode("utf-8", "replace"))
    return 0


def run_deploy(options: argparse.Namespace) -> int:
    """The text is sent, not the name of the file: the router may run elsewhere."""
    from microserving.router.program_loader import read_program

    body = read_program(options.program).deployment(dict(options.settings))
    status = AdminClient.of(options).call("POST", "/admin/program/deploy", body)
    return _tell(status, options)


def run_rollback(options: argparse.Namespace) -> int:
    status = AdminClient.of(options).call("POST", "/admin/program/rollback")
    return _tell(status, options)


def run_status(options: argparse.Namespace) -> int:
    """The versions, the newest first."""
    status = AdminClient.of(options).call("GET", "/admin/program")
    if options.json:
        write_json(status)
        return 0
    rows: list[tuple[str, ...]] = [
        ("VERSION", "PROGRAM", "STATE", "SINCE", "RUNNING", "OK", "FAILED", "SETTINGS")
    ]
    rows += [_row(version) for version in _with_rolled_back(status)]
    write_table(rows)
    if (last := status["last_rollback"]) is not None:
        how, why = ("automatically", f": {last['reason']}") if last["automatic"] else ("by hand", "")
        sys.stdout.write(
            f"\nversion {last['version']} ({last['name']}) was rolled back {how} at {_clock(last['at'])}{why}\n"
        )
    return 0


def _with_rolled_back(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All versions, the newest first, and the one that was rolled back last, which the router may have forgotten."""
    versions: dict[int, dict[str, Any]] = {version["version"]: version for version in status["versions"]}
    if (last := status["last_rollback"]) is not None:
        forgotten = {"version": last["version"], "name": last["name"], "since": last["at"], "settings": {}}
        versions[last["version"]] = (
            _GONE | versions.get(last["version"], forgotten) | {"state": "rolled_back"}
        )
    return [versions[number] for number in sorted(versions, reverse=True)]


def _tell(status: Mapping[str, Any], options: argparse.Namespace) -> int:
    if options.json:
        write_json(status)
        return 0
    now = status["in_charge"]
    shown = _shown_settings(now["settings"])
    sys.stdout.write(f"version {now['version']} is in charge: {now['name']}{shown and f' ({shown})'}\n")
    return 0


def _row(version: Mapping[str, Any]) -> tuple[str, ...]:
    counts = [str(version[name]) for name in ("attempts", "ok", "failed")]
    state = version["state"].replace("_", " ")
    head = (str(version["version"]), version["name"], state, _clock(version["since"]))
    return (*head, *counts, _shown_settings(version["settings"]) or "-")


def _shown_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _clock(unix_time: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_time))
