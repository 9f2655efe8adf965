"""An engine process over a fake model: prints its port when it serves. Every step takes 10 ms. Arguments: FIELD=SECONDS
of the engine's configuration.

Run as ``python -m tests.server.engine_process`` or by path.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from microserving.front import bind_listener, run_on_uvloop
from microserving.transports.fake import FakeTransport
from tests.server.engines import make_node


def main() -> None:
    config = {field: float(value) for field, _, value in (text.partition("=") for text in sys.argv[1:])}
    listener = bind_listener("127.0.0.1", 0)
    node, runner = make_node("engine-0", FakeTransport(), **config)
    runner.before_run = lambda _: threading.Event().wait(0.01)  # type: ignore[assignment,func-returns-value]
    print(listener.getsockname()[1], flush=True)
    run_on_uvloop(node.serve(listener))
    print("ended", [thread.name for thread in threading.enumerate()], flush=True)


main()
