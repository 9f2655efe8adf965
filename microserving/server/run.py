"""An engine process from its configuration: bind the port, open the model, serve until a signal.

Logs (at debug level when each stage of the start began) and reports progress; never prints.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from microserving.engine.config import EngineConfig
from microserving.engine.model_runner import TVMModelRunner
from microserving.errors import ConfigError
from microserving.front import bind_listener, run_on_uvloop
from microserving.model_files.catalog import open_model
from microserving.model_files.model_config import ModelConfig
from microserving.protocol.kv_descriptor import check_secret
from microserving.protocol.kv_layout import KVLayout
from microserving.server.node import EngineNode, EngineParts
from microserving.server.tokenizers import open_tokenizer
from microserving.transports import Transport, create_transport

Progress = Callable[[str, float], None]
"""(stage, fraction done in [0, 1])."""

SWITCH_INTERVAL_S: Final = 0.0005
"""The HTTP thread shares the GIL with the engine's; the default of 5 ms would add up to that to every chunk."""
TRANSPORT: Final = "shared_memory"
_OPENING: Final = "opening the model"
_logger = logging.getLogger(__name__)


def run_engine(
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM. Raises StartupError; a busy port is found before the model is opened.

    on_ready: called once with the port when requests are taken.
    A SIGTERM that comes before the engine serves raises SystemExit (status 143). For the main thread.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    report = logged(progress or _silent)
    with (
        _sigterm_unwinds(),
        contextlib.closing(bind_listener(config.serving_bind, config.port)) as listener,
    ):
        transport = create_transport(TRANSPORT, runtime_dir=config.runtime_dir)
        with contextlib.closing(transport):
            node = EngineNode(config, open_parts(config, transport, report))
            _logger.debug("start: serving from %.2f s on", process_age_s())
            run_on_uvloop(node.serve(listener, on_ready=on_ready))


def open_parts(config: EngineConfig, transport: Transport, progress: Progress) -> EngineParts:
    """Find, load and compile what ``config`` names. Takes seconds to minutes. Raises StartupError."""
    secret = read_secret(config.cluster_secret_file)
    progress(_OPENING, 0.0)
    model = open_model(config.model, config.cache_dir, _fractions(progress))
    progress(_OPENING, 0.25)
    tokenizer = open_tokenizer(config, model)  # before the weights: a model without one is found at once
    progress(_OPENING, 0.5)
    model_hash = model.model_hash
    layout = kv_layout(model.config, config)
    total_pages = config.kv_cache_bytes // layout.bytes_per_page
    if total_pages < 1:
        raise ConfigError(
            f"kv_cache_bytes is {config.kv_cache_bytes}, but one page has {layout.bytes_per_page} bytes"
        )
    progress(_OPENING, 0.75)
    pool_memory = transport.allocate(total_pages * layout.bytes_per_page)
    progress(_OPENING, 1.0)
    with model.naming():
        runner = TVMModelRunner.create(
            model.weights,
            layout=layout,
            total_pages=total_pages,
            pool_memory=pool_memory,
            threads=config.threads,
            cache_dir=config.cache_dir,
            progress=progress,
        )
    return EngineParts(
        runner=runner,
        tokenizer=tokenizer,
        transport=transport,
        layout=layout,
        model_name=next(iter(config.served_model_name), model.name),
        model_hash=model_hash,
        secret=secret,
    )


def kv_layout(model: ModelConfig, config: EngineConfig) -> KVLayout:
    """How the model's K/V lies in this engine's pages."""
    return KVLayout(
        layers=model.num_layers,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=config.page_size,
        dtype=config.kv_dtype,
        activations=config.activations,
    )


def read_secret(path: Path | None) -> bytes | None:
    """The cluster secret in a file, without white space around it; None when no file is named.

    Raises ConfigError when it cannot be read or is too short: now, not after minutes of loading.
    """
    if path is None:
        return None
    try:
        return check_secret(path.read_bytes().strip())
    except OSError as error:
        raise ConfigError(f"cannot read the cluster secret file {path}: {error.strerror}") from None


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM as an exception, so that half-made files and sockets are removed; ``serve_app`` takes it over later."""
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)  # the status that a shell shows for a process which the signal ended


def logged(progress: Progress) -> Progress:
    """``progress``, which also logs when each stage began."""
    last = ""

    def report(stage: str, fraction: float) -> None:
        nonlocal last
        if stage != last:
            _logger.debug("start: %s from %.2f s on", stage, process_age_s())
            last = stage
        progress(stage, fraction)

    return report


def process_age_s() -> float:
    """Seconds since this process was started (imports count); 0.0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), ticks since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError):
        return 0.0


def _fractions(progress: Progress) -> Callable[[str, int, int], None]:
    """``progress`` for those who report (stage, done, total)."""
    return lambda stage, done, total: progress(stage, done / total if total > 0 else 0.0)


def _silent(_stage: str, _fraction: float) -> None:
    """Nobody wants to know."""
