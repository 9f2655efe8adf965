"""Stands for an engine, a router or the model fetcher in launcher tests: `fake_node.py NAME MODE PORT`.

ok: /ready answers 200. unready: 503 for ever. stubborn: like ok, but ignores SIGTERM. log-and-die: some lines, then
status 3. error: the one line of a process that cannot start. hang: no server, with a child of its own. done: ends.
affinity: like ok, and says its cores. slow-term: like ok, takes a while to end, and says so. warn: like ok, with a warning.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status if self.path == "/ready" else 404)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def end_slowly(*_: object) -> None:
    time.sleep(0.1)
    print("ends", flush=True)
    sys.exit(0)


def main(name: str, mode: str, port: int) -> None:
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if mode == "slow-term":
        signal.signal(signal.SIGTERM, end_slowly)
    print(f"pid {os.getpid()} group {os.getpgid(0)}", flush=True)
    if mode == "done":
        return
    if mode == "error":
        print("microserving: error: the model is broken", flush=True)
        sys.exit(1)
    if mode == "log-and-die":
        print("\n".join(f"line {number}" for number in range(30)), flush=True)
        sys.exit(3)
    if mode == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"pid {child.pid} child", flush=True)
        print("[progress] fetching 10%", flush=True)
        child.wait()
    if mode == "affinity":
        print(f"cores {sorted(os.sched_getaffinity(0))}", flush=True)
    if mode == "warn":
        print("2026-01-01T00:00:00.000+00:00 WARNING engine the pool is small", flush=True)
        print("2026-01-01T00:00:00.000+00:00 INFO engine nothing to see", flush=True)
    Handler.status = 503 if mode == "unready" else 200
    server = HTTPServer(("127.0.0.1", port), Handler)
    print("serving", flush=True)
    server.serve_forever()


main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
