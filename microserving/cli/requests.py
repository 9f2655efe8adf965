"""`microserving requests`: what became of a running cluster's latest requests."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from microserving.cli.admin_client import AdminClient, add_admin_flags, write_json, write_table

_BEFORE_ID = re.compile(r"^(cmpl-|chatcmpl-|resp_)")
"""What the answers of each API put before it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
What became of the latest requests: those that run, then those that ended, the newest first. With an ID (an answer's
`id`, or the beginning of one) also which engines did what for it, and why it was, or was not, disaggregated."""
    parser.add_argument("id", nargs="?", default="", metavar="ID", help="show the attempts of this request")
    parser.add_argument("-n", "--limit", type=int, default=20, help="requests to show (default: %(default)s)")
    add_admin_flags(parser)


def run(options: argparse.Namespace) -> int:
    asked = urlencode({"request_id": _BEFORE_ID.sub("", options.id), "limit": options.limit})
    answer = AdminClient.of(options).call("GET", f"/admin/requests?{asked}")
    if options.json:
        write_json(answer)
        return 0
    write_table(
        [
            ("REQUEST", "STARTED", "STATE", "PROMPT", "OUTPUT", "TTFT", "TOOK", "TRIED"),
            *map(_row, answer["requests"]),
        ]
    )
    if options.id:
        attempts = [attempt for request in answer["requests"] for attempt in request["attempts"]]
        write_table(
            [("PROGRAM", "PREFILL", "DECODE", "CACHED", "SENT", "ERROR", "WHY"), *map(_attempt, attempts)]
        )
    return 0


def _row(request: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        request["request_id"],
        request["started"][:19],
        request["outcome"] or request["state"],
        str(request["prompt_tokens"]),
        str(request["output_tokens"]),
        _seconds(request["ttft_s"]),
        _seconds(request["duration_s"]),
        str(len(request["attempts"])),
    )


def _attempt(attempt: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        attempt["program"],
        attempt["prefill"] or "-",
        attempt["decode"] or "-",
        str(attempt["prefix_matched_length"]),
        str(attempt["tokens_sent"]),
        attempt["error"] or "-",
        attempt["why"],
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
