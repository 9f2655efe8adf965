"""`python -m microserving`, which is also the `microserving` command.

Ctrl-C ends the process silently until ``main`` catches it: there is nothing to clean up while we import.
"""

from __future__ import annotations

import signal
import sys

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not when it is ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from microserving.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
