"""The flags of `microserving bench`, and how their values are read. What they mean together is ``bench``'s business."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

ValueT = TypeVar("ValueT")

WORKLOADS = {
    "synthetic": "independent prompts of English text",
    "shared-prefix": "prompts that begin with one of --prefixes texts of --prefix-tokens",
    "chat": "conversations of --turns turns, each sending all that was said",
    "trace": "the requests of --trace, at their times",
    "mix": "traffic that changes: one --phase after the other, again and again",
}


def add_target_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--base-url", action="append", default=[], metavar="[LABEL=]URL",
        help="an OpenAI server, as http://host:port/v1; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--config", action="append", default=[], type=Path, metavar="FILE",
        help="a cluster file; the cluster is started for the measurement; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--program", action="append", default=[], metavar="NAME[:KEY=VALUE,...]",
        help="a router program to deploy to each --config before its run; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--model", metavar="NAME", help="the model's name in requests (default: what the server has)"
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="default: the environment's MICROSERVING_API_KEY or OPENAI_API_KEY"
    )
    group.add_argument(
        "--timeout", type=_positive, default=600.0, metavar="S",
        help="seconds after which a request has failed (default: %(default)g)",
    )  # fmt: skip
    group.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="where --config finds models and compiled code"
    )


def add_workload_flags(group: argparse._ArgumentGroup) -> None:
    described = "; ".join(f"{name}: {text}" for name, text in WORKLOADS.items())
    group.add_argument(
        "--workload", choices=WORKLOADS, default="synthetic", help=f"{described} (default: synthetic)"
    )
    lengths = "N, uniform:A:B, normal:MEAN:DEVIATION, lognormal:MEDIAN:SIGMA, exponential:MEAN"
    group.add_argument(
        "--input", type=_parsed("lengths", "Lengths"), default="600", metavar="TOKENS",
        help=f"length of prompts (shared-prefix: of what follows the prefix; chat: of a message): {lengths} (default: 600)",
    )  # fmt: skip
    group.add_argument(
        "--output", type=_parsed("lengths", "Lengths"), default="60", metavar="TOKENS",
        help="length of answers, likewise (default: 60)",
    )  # fmt: skip
    group.add_argument(
        "--prefix-tokens", type=_count, default=400, metavar="N", help="of each prefix (default: %(default)s)"
    )
    group.add_argument(
        "--prefixes", type=_count, default=4, metavar="N", help="of shared-prefix (default: %(default)s)"
    )
    group.add_argument(
        "--turns", type=_count, default=4, metavar="N", help="of a conversation (default: %(default)s)"
    )
    group.add_argument(
        "--think",
        type=_not_negative,
        default=0.0,
        metavar="S",
        help="mean seconds between turns (default: 0)",
    )
    group.add_argument(
        "--system-tokens",
        type=_none_or_more,
        default=0,
        metavar="N",
        help="of a chat's system message (default: none)",
    )
    group.add_argument(
        "--phase", type=_parsed("workloads", "Phase"), action="append", default=[], metavar="IN/OUTxN",
        help="of a mix: N requests of these lengths, as in 600/20x30; given several times",
    )  # fmt: skip
    group.add_argument(
        "--trace", type=Path, metavar="FILE",
        help="JSONL: timestamp, output_tokens, and prompt, messages or input_tokens",
    )  # fmt: skip
    group.add_argument("--trace-ms", action="store_true", help="its timestamps are milliseconds, not seconds")
    group.add_argument("--speed", type=_positive, metavar="X", help="replay it X times as fast")
    _add_body_flags(group)


def _add_body_flags(group: argparse._ArgumentGroup) -> None:
    """What the requests of every workload have."""
    group.add_argument(
        "--endpoint", choices=("completions", "chat"), default="completions", help="default: completions"
    )
    group.add_argument("--temperature", type=_not_negative, default=0.6, metavar="X", help="default: 0.6")
    group.add_argument("--top-p", type=_share, default=0.9, metavar="X", help="default: 0.9")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="answers have the full length (default; not every server has that field)",
    )  # fmt: skip
    group.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="more fields for each request"
    )
    group.add_argument(
        "--tokenizer", metavar="MODEL",
        help="a model of the catalog, GGUF file or directory to measure prompts with; else the server's usage tells how "
        "long a token is, and prompts are a few per cent off",
    )  # fmt: skip


def add_load_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--rate", type=_list_of(_positive), default=[], metavar="R,...",
        help="requests a second (chat: conversations), at random times; several: one run for each",
    )  # fmt: skip
    group.add_argument("--constant", action="store_true", help="evenly spaced instead of random times")
    group.add_argument(
        "--concurrency", type=_list_of(_count), default=[], metavar="N,...",
        help="instead of --rate: so many clients, each sending when its last answer has ended",
    )  # fmt: skip
    group.add_argument(
        "--requests", type=_count, metavar="N",
        help="counted requests of a run (chat: conversations; default: 60, of a trace all)",
    )  # fmt: skip
    group.add_argument(
        "--warmup",
        type=_none_or_more,
        metavar="N",
        help="requests before them (default: a sixth; of a trace none)",
    )
    group.add_argument(
        "--keep-load", action=argparse.BooleanOptionalAction, default=True,
        help="go on sending until the counted ones have ended (default)",
    )  # fmt: skip
    group.add_argument(
        "--max-concurrency",
        type=_count,
        metavar="N",
        help="of this client; what waits for it is late, and counts so",
    )
    group.add_argument("--max-run", type=_positive, metavar="S", help="end each run after so many seconds")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of times and texts (default: 0)")


def add_output_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo", type=_parsed("statistics", "Slo"), metavar="ttft=2s,tpot=100ms",
        help="objectives of ttft, tpot, itl (p99 of a request) and jct; goodput counts the requests that meet all",
    )  # fmt: skip
    group.add_argument("--json", type=Path, metavar="FILE", help="everything, each request included")
    group.add_argument(
        "--html", type=Path, metavar="FILE", help="a page with charts, of nothing but this file"
    )
    group.add_argument(
        "--svg", type=Path, metavar="FILE", help="the latencies against the rate, as one picture"
    )


def _parsed(module: str, name: str) -> Callable[[str], Any]:
    """The ``parse`` of a class of the bench, imported when it is used; its reason is argparse's message."""

    def parse(text: str) -> Any:
        import importlib

        try:
            return getattr(importlib.import_module(f"microserving.bench.{module}"), name).parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse


def _list_of(one: Callable[[str], ValueT]) -> Callable[[str], list[ValueT]]:
    return lambda text: [one(part) for part in text.split(",")]


def _positive(text: str) -> float:
    value = _finite(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _not_negative(text: str) -> float:
    value = _finite(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or more")
    return value


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _share(text: str) -> float:
    value = _not_negative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1")
    return value


def _none_or_more(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or more")
    return int(text)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value
