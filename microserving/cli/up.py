"""`microserving up`: a whole cluster on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from microserving.cli.settings import add_set_flag
from microserving.cluster.config import ClusterConfig, load_cluster_config, parse_cluster_config
from microserving.model_files.catalog import default_cache_dir

DEFAULT_CLUSTER = {
    "cluster": {"name": "1p1d"},
    "router": {"program": "prefill_decode"},
    "nodes": [{"id": "prefill-0", "role": "prefill"}, {"id": "decode-0", "role": "decode"}],
}
"""What runs without --config: the same as `configs/1p1d.toml`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = """\
Start a cluster on this machine and keep it running: fetch the model, start the engines and the router, wait until all
is ready, restart what dies. Ctrl-C stops everything and leaves nothing behind.

Without --config: a prefill engine, a decode engine and a router in front of them (configs/1p1d.toml)."""
    parser.add_argument(
        "--config",
        "--cluster-config",
        "--distributed-config",
        type=Path,
        metavar="FILE",
        help="cluster file (TOML)",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="model of the catalog, GGUF file or Hugging Face directory, instead of the file's",
    )
    parser.add_argument(
        "--port", type=_port, metavar="N", help="port that clients use, instead of the file's"
    )
    parser.add_argument("--program", metavar="FILE_OR_NAME", help="router program, instead of the file's")
    add_set_flag(
        parser, "; wins over [router.settings], which count only without --program (they are for the file's)"
    )
    parser.add_argument(
        "--cache-dir",
        type=Path,
        metavar="DIR",
        help=f"where models and compiled code are kept (default: {default_cache_dir()})",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="keep each process's log here (default: removed at the end)",
    )
    parser.add_argument(
        "--ready-file",
        type=Path,
        metavar="FILE",
        help="write a JSON file with URL and pids when all is ready",
    )
    parser.add_argument(
        "--start-timeout",
        type=_seconds,
        default=900.0,
        metavar="S",
        help="seconds until a process must be ready (default: %(default)g)",
    )
    parser.add_argument("--dry-run", action="store_true", help="show the effective configuration and end")


def run(options: argparse.Namespace) -> int:
    from microserving.cluster.launcher import LaunchOptions, run_cluster
    from microserving.observability.console import Console

    launch = LaunchOptions(
        cache_dir=_absolute(options.cache_dir),
        log_dir=options.log_dir,
        ready_file=options.ready_file,
        start_timeout_s=options.start_timeout,
        dry_run=options.dry_run,
    )
    console = Console(verbose=options.verbose, plain_step=0.25)
    return run_cluster(effective_config(options), launch, console)


def effective_config(options: argparse.Namespace) -> ClusterConfig:
    """The file (or the default cluster), with what the command line says instead. Raises ConfigError."""
    if options.config is None:
        config = parse_cluster_config(DEFAULT_CLUSTER, "the default cluster")
    else:
        config = load_cluster_config(options.config)
    return config.with_overrides(
        model=options.model, port=options.port, program=options.program, settings=dict(options.settings)
    )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.expanduser().absolute()


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port number (0 to 65535)")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds above 0")
    return seconds
