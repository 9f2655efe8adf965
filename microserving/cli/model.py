"""`microserving model`: fetch, list and show models. What was asked for goes to stdout, progress to stderr."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from microserving.errors import ModelLoadError
from microserving.model_files import (
    CATALOG,
    DEFAULT_MODEL,
    ModelInfo,
    default_cache_dir,
    fetch,
    list_models,
    open_model,
    show,
)
from microserving.observability.console import Console

Action = Callable[[argparse.Namespace], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Models: a name of the catalog, a GGUF file, or a Hugging Face directory (safetensors)."
    )
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", required=True, parser_class=argparse.ArgumentParser
    )
    texts: Mapping[str, tuple[Action, str]] = {
        "fetch": (run_fetch, "download a model into the cache, with a checksum; say where it is"),
        "list": (run_list, "the catalog and what is in the cache"),
        "show": (run_show, "shape, number formats and fingerprint of one model"),
    }
    for name, (action, line) in texts.items():
        sub = actions.add_parser(name, help=line, description=line, allow_abbrev=False)
        sub.set_defaults(action=action)
        sub.add_argument(
            "--cache-dir",
            type=Path,
            metavar="DIR",
            help=f"where models are kept (default: {default_cache_dir()})",
        )
        if name != "list":
            sub.add_argument(
                "model", nargs="?", default=DEFAULT_MODEL, help="default: %(default)s", metavar="MODEL"
            )


def run(options: argparse.Namespace) -> int:
    action: Action = options.action
    return action(options)


def run_fetch(options: argparse.Namespace) -> int:
    """A file or directory is only checked; a catalog model is fetched when it is not there whole."""
    signal.signal(signal.SIGTERM, _leave)
    console = Console(verbose=options.verbose)

    def progress(what: str, done: int, total: int) -> None:
        console.progress(f"{what} ({total / 1e6:.0f} MB)", done / total if total else 1.0)

    if options.model.lower() in CATALOG:
        path = fetch(options.model, options.cache_dir, progress)
    else:
        path = open_model(options.model, options.cache_dir).source_path
    sys.stdout.write(f"{path}\n")
    return 0


def run_list(options: argparse.Namespace) -> int:
    """One line a model: name, size, licence, where it is."""
    rows = [("NAME", "SIZE", "LICENSE", "WHERE")]
    for info in list_models(options.cache_dir):
        where = info.error or (str(info.path) if info.path is not None else "not fetched")
        rows.append((info.name, _megabytes(info), info.license or "-", where))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        sys.stdout.write("  ".join([*cells, row[3]]).rstrip() + "\n")
    return 0


def run_show(options: argparse.Namespace) -> int:
    """`key: value` lines. A model that cannot be used is an error, one that is not fetched is not."""
    info = show(options.model, options.cache_dir)
    kinds = ", ".join(f"{kind} x {count}" for kind, count in sorted(info.kinds.items()))
    tokenizer, chat_template, fault = _text_facts(info)
    facts = {
        "name": info.name,
        "path": "not fetched" if info.path is None else str(info.path),
        "size": _megabytes(info),
        "license": info.license,
        "architecture": info.architecture,
        "parameters": None if info.parameters is None else f"{info.parameters:,}",
        "max_context": info.max_context,
        "tensors": kinds or None,
        "model_hash": info.model_hash,
        "tokenizer": tokenizer,
        "chat_template": chat_template,
    }
    for key, value in facts.items():
        if value is not None:
            sys.stdout.write(f"{key}: {value}\n")
    if info.error is not None:
        raise ModelLoadError(f"{info.name}: {info.error}")
    if fault is not None:
        raise fault
    return 0


def _text_facts(info: ModelInfo) -> tuple[str | None, str | None, ModelLoadError | None]:
    """What there is to say of tokenizer and chat template, and why the model cannot be used for want of a tokenizer."""
    from microserving.tokenizer import Tokenizer

    if info.opened is None:
        return None, None, None
    try:
        tokenizer = Tokenizer.load(info.opened)
    except ModelLoadError as error:
        return "none", "none, as there is no tokenizer", error
    unavailable = tokenizer.chat_unavailable
    return f"{tokenizer.vocab_size:,} tokens", "yes" if unavailable is None else f"none: {unavailable}", None


def _megabytes(info: ModelInfo) -> str:
    return f"{info.size_bytes / 1e6:.1f} MB"


def _leave(number: int, _frame: FrameType | None) -> None:
    """SIGTERM as an exception, so that a partial download is removed."""
    sys.exit(128 + number)
