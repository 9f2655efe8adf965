"""What operators see of a process. Log lines for now; knows nothing of what is logged."""

from microserving.observability.logging import (
    LogFormat,
    configure_logging,
    current_request_id,
    escape_controls,
    request_id_scope,
)

__all__ = ["LogFormat", "configure_logging", "current_request_id", "escape_controls", "request_id_scope"]
