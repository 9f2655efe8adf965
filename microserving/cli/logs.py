"""Log lines of the processes that the command line starts."""

from __future__ import annotations

import logging

from microserving import observability


def start_logging(verbose: bool) -> None:
    """INFO and above (verbose: DEBUG) to stderr; of the HTTP client library only what went wrong."""
    observability.configure_logging("DEBUG" if verbose else "INFO")
    for library in ("httpx", "httpcore"):
        logging.getLogger(library).setLevel(logging.WARNING)
