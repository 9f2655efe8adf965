"""``--set KEY=VALUE``: a router program's settings on the command line."""

from __future__ import annotations

import argparse
import json
import math

Setting = str | int | float | bool


def add_set_flag(parser: argparse.ArgumentParser, more: str = "") -> None:
    """The flag; its values are (key, value) pairs in ``options.settings``. more: what else help says."""
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        type=parse_setting,
        metavar="KEY=VALUE",
        help=f"a setting of the program, as in --set pd_balance_factor=0.1; may be given several times{more}",
    )


def parse_setting(text: str) -> tuple[str, Setting]:
    """``key=value``; a value that is a JSON number, true, false or "text" is read as that, else it is text as it is."""
    key, separator, raw = text.partition("=")
    if not separator or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return key, raw
    if isinstance(value, float) and not math.isfinite(value):
        return key, raw  # no JSON could carry it; whoever wants a number tells why not
    return key, value if isinstance(value, (str, int, float, bool)) else raw
