"""What operators see of a process: log lines, and figures (``metrics``). Knows nothing of what is told."""

from microserving.observability.logging import (
    LogFormat,
    configure_logging,
    current_request_id,
    escape_controls,
    request_id_scope,
)

__all__ = ["LogFormat", "configure_logging", "current_request_id", "escape_controls", "request_id_scope"]
