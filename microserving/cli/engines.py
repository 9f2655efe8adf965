"""`microserving engines`: which engines a running cluster's router uses, and changing that while requests run."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, get_args
from urllib.parse import quote

from microserving.cli.admin_client import AdminClient, add_admin_flags, write_json, write_table

Action = Callable[[argparse.Namespace], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
The engines that a running router uses. An ENGINE is a node id (prefill-0) or a URL.

  microserving engines list
  microserving engines add http://127.0.0.1:8003 --role decode
  microserving engines set-role prefill-0 hybrid        new requests see it in both pools
  microserving engines drain decode-1                   no new requests; waits for those that run (undrain: back)
  microserving engines remove decode-1                  drain it, then forget it (--now does not wait)"""
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", required=True, parser_class=argparse.ArgumentParser
    )
    _add(actions, "list", run_list, "the engines, their roles and states")
    add = _add(actions, "add", run_add, "use one more engine")
    add.add_argument("url", metavar="URL", help="http://host:port of an engine")
    add.add_argument(
        "--role", choices=_roles(), default="hybrid", help="its pool (default: %(default)s, both)"
    )
    remove = _add(actions, "remove", run_remove, "finish what runs on an engine, then forget it")
    remove.add_argument("engine", metavar="ENGINE")
    remove.add_argument("--now", action="store_true", help="do not wait for the requests that run on it")
    drain = _add(actions, "drain", run_drain, "give an engine no new requests")
    drain.add_argument("engine", metavar="ENGINE")
    undrain = _add(actions, "undrain", run_undrain, "give a drained engine requests again")
    undrain.add_argument("engine", metavar="ENGINE")
    set_role = _add(actions, "set-role", run_set_role, "move an engine into another pool")
    set_role.add_argument("engine", metavar="ENGINE")
    set_role.add_argument("role", choices=_roles())


def run(options: argparse.Namespace) -> int:
    action: Action = options.action
    return action(options)


def run_list(options: argparse.Namespace) -> int:
    return _tell(AdminClient.of(options).call("GET", "/admin/engines"), options)


def run_add(options: argparse.Namespace) -> int:
    body = {"url": options.url, "role": options.role}
    return _tell(AdminClient.of(options).call("POST", "/admin/engines", body), options)


def run_remove(options: argparse.Namespace) -> int:
    path = f"{_path(options.engine)}?drain={'false' if options.now else 'true'}"
    return _tell(AdminClient.of(options).call("DELETE", path), options)


def run_drain(options: argparse.Namespace) -> int:
    return _tell(AdminClient.of(options).call("POST", f"{_path(options.engine)}/drain"), options)


def run_undrain(options: argparse.Namespace) -> int:
    return _tell(AdminClient.of(options).call("POST", f"{_path(options.engine)}/undrain"), options)


def run_set_role(options: argparse.Namespace) -> int:
    body = {"role": options.role}
    return _tell(AdminClient.of(options).call("PATCH", _path(options.engine), body), options)


def _add(actions: Any, name: str, action: Action, line: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=line, description=line, allow_abbrev=False
    )
    parser.set_defaults(action=action)
    add_admin_flags(parser)
    return parser


def _roles() -> tuple[str, ...]:
    from microserving.program import EngineRole

    return get_args(EngineRole)


def _path(engine: str) -> str:
    return f"/admin/engines/{quote(engine, safe='')}"


def _tell(answer: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Every route answers with all engines, as they are now."""
    if options.json:
        write_json(answer)
        return 0
    rows: list[tuple[str, ...]] = [("ENGINE", "ROLE", "STATE", "REQUESTS", "URL", "REASON")]
    rows += [_row(engine) for engine in answer["engines"]]
    write_table(rows)
    return 0


def _row(engine: Mapping[str, Any]) -> tuple[str, ...]:
    name = engine["id"] or "-"
    return (
        name,
        engine["role"],
        engine["state"],
        str(engine["in_flight"]),
        engine["url"],
        engine["reason"] or "-",
    )
