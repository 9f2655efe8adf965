"""`microserving`: picks the sub-command, and is the last wall for errors.

Exit status: 0 done, 1 could not start (one line says why), 2 wrong usage, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import NoReturn

import microserving
from microserving.errors import MicroservingError

COMMANDS = {
    "up": "start a whole cluster on this machine: engines, router, model",
    "serve": "start one engine",
    "router": "start a router that runs a program over engines",
    "program": "check router programs, and deploy them to a running cluster",
    "engines": "list, add, remove or change the engines of a running cluster",
    "requests": "what became of a running cluster's latest requests, and why",
    "bench": "measure servers and patterns, and compare them",
    "model": "fetch, list or show models",
}
"""Sub-command -> one line of help. Module `microserving.cli.NAME` has `add_arguments(parser)` and `run(options)`."""

_DESCRIPTION = """\
Serve language models with engines that expose three verbs (prep_recv, remote_send, start_generate) and a router that
is a program you write.

  microserving up                          everything on this machine, at http://127.0.0.1:8000/v1
  microserving serve --port 8001           one engine, an OpenAI server of its own
  microserving router --program FILE ...   your router program in front of engines
"""


class _SubcommandParser(argparse.ArgumentParser):
    """Its arguments are added when it is used, because adding them imports the sub-command."""

    def __init__(self, *, command: str, **settings: object) -> None:
        super().__init__(**settings)  # type: ignore[arg-type]  # handed through from add_parser
        self._command: str | None = command

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]  # argparse's overloads
        if self._command is not None:
            command, self._command = self._command, None
            module = importlib.import_module(f"microserving.cli.{command}")
            module.add_arguments(self)
            self.set_defaults(run=module.run, parser=self)
        self._refuse_unknown_flags(sys.argv[1:] if args is None else args)
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:  # refused here, not by the top-level parser, whose usage would be of no help
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def _refuse_unknown_flags(self, words: Sequence[str]) -> None:
        """Else what follows such a flag is taken for the name of an action, and the message does not name the flag."""
        known = {flag for action in self._actions for flag in action.option_strings}
        ends = {"--", *self._actions_of_its_own()}
        own = itertools.takewhile(lambda word: word not in ends, words)
        unknown = [word for word in own if word.startswith("--") and word.partition("=")[0] not in known]
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")

    def _actions_of_its_own(self) -> Iterable[str]:
        """As `compare` of `microserving bench`; their flags are theirs."""
        return next((a.choices for a in self._actions if a.choices and not a.option_strings), ())

    def error(self, message: str) -> NoReturn:
        """One line of usage: the whole of it has dozens of flags."""
        usage = f"usage: {self.prog} [OPTIONS]   ({self.prog} --help explains them)"
        self.exit(2, f"{usage}\n{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; sub-commands are filled in when they are parsed."""
    parser = argparse.ArgumentParser(
        prog="microserving", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"microserving {microserving.__version__}")
    _add_common_arguments(parser)
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_SubcommandParser
    )
    for name, line in COMMANDS.items():
        sub = commands.add_parser(
            name,
            command=name,
            help=line,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        _add_common_arguments(sub)
    return parser


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    # SUPPRESS: the flag may stand before or after the sub-command, and one must not reset the other.
    parser.add_argument(
        "-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="show debug output"
    )
    parser.add_argument(
        "--debug",
        action="store_true",
        default=argparse.SUPPRESS,
        help="show a traceback when something fails",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: the process's) and return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    try:
        options = build_parser().parse_args(arguments)
        options.verbose = getattr(options, "verbose", False)
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as ``__main__`` left it; now there is a wall
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return int(options.run(options) or 0)
    except MicroservingError as error:
        return _fail(error.message, debug)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output is gone; keep Python from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:  # noqa: BLE001 - the last wall: a bug is one line, unless --debug asks for more
        return _fail(f"{type(error).__name__}: {error} (a bug; --debug shows where)", debug)


def _fail(message: str, debug: bool) -> int:
    if debug:
        traceback.print_exc(file=sys.stderr)
    sys.stderr.write(f"microserving: error: {' '.join(message.split())}\n")
    return 1
