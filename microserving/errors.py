"""Every exception of the project, and the HTTP status that each one becomes.

    MicroservingError
    ├── RequestError                 the client's fault; nothing was changed
    │   ├── InvalidRequest           a bad field or index (``param`` names it)
    │   ├── ContextLengthExceeded    prompt + max_tokens do not fit the context
    │   ├── Unauthorized
    │   ├── ModelNotFound            unknown model (or route)
    │   ├── RequestConflict          a live request already has this id
    │   ├── RequestAborted           somebody asked the engine to stop it
    │   ├── LeaseError               the reservation is unknown, expired or incomplete
    │   ├── PayloadTooLarge
    │   └── RateLimited
    ├── ServiceError                 not the client's fault; another try may succeed
    │   ├── EngineUnavailable        an engine failed or cannot be reached
    │   │   └── ShuttingDown         the server was told to stop: nobody's error
    │   ├── TransferFailed           KV did not arrive whole at the receiver
    │   ├── Overloaded               a bounded queue is full
    │   │   └── KVExhausted          not enough free KV pages
    │   ├── NoEngine                 no engine of the wanted role is known to be up
    │   ├── Preempted                the engine gave a generation back (never reaches a client)
    │   └── DeadlineExceeded
    ├── StartupError                 the process cannot start; one line for the user
    │   ├── ConfigError
    │   ├── ModelLoadError
    │   └── ProgramError             a router program that cannot be loaded
    └── InternalError                a bug of ours

A message may be shown to clients: it never holds a path, an address or a traceback.
``StartupError`` is the exception: it goes to the terminal of who started the process, or deploys a program.
"""

from __future__ import annotations

from typing import ClassVar, Final

MAX_LOAD_ERROR_CHARS: Final = 1000


class MicroservingError(Exception):
    """Base class. ``param`` is the request field at fault, ``code`` a stable machine-readable word.

    logged: whoever knew most about it has written it to the log already.
    """

    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.logged = False


class RequestError(MicroservingError):
    """The request cannot be served as it is."""


class InvalidRequest(RequestError):
    code = "invalid_value"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class Unauthorized(RequestError):
    code = "invalid_api_key"


class ModelNotFound(RequestError):
    code = "model_not_found"


class RequestConflict(RequestError):
    code = "request_id_in_use"


class RequestAborted(RequestError):
    code = "request_aborted"


class LeaseError(RequestError):
    code = "lease_invalid"


class PayloadTooLarge(RequestError):
    code = "payload_too_large"


class RateLimited(RequestError):
    code = "rate_limit_exceeded"


class ServiceError(MicroservingError):
    """The request was fine; the service could not do it."""


class EngineUnavailable(ServiceError):
    code = "engine_unavailable"


class ShuttingDown(EngineUnavailable):
    code = "shutting_down"

    def __init__(
        self,
        message: str = "the server is shutting down",
        *,
        param: str | None = None,
        retry_after_s: float | None = 1.0,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)


class TransferFailed(ServiceError):
    code = "transfer_failed"


class Overloaded(ServiceError):
    code = "overloaded"


class KVExhausted(Overloaded):
    code = "kv_exhausted"


class NoEngine(ServiceError):
    code = "no_engine"


class Preempted(ServiceError):
    code = "preempted"


class DeadlineExceeded(ServiceError):
    code = "deadline_exceeded"


class StartupError(MicroservingError):
    """Ends the process with one line and a non-zero exit status."""


class ConfigError(StartupError):
    pass


class ModelLoadError(StartupError):
    """Always one printable line: what it quotes comes from files that anybody may have made."""

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(_one_line(message), param=param, retry_after_s=retry_after_s)


def _one_line(text: str) -> str:
    """``text`` with escapes for what cannot be printed, its middle left out when it is very long."""
    if len(text) > MAX_LOAD_ERROR_CHARS:
        half = MAX_LOAD_ERROR_CHARS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class ProgramError(StartupError):
    code = "program_refused"


class InternalError(MicroservingError):
    code = "internal_error"


HTTP_STATUS: dict[type[MicroservingError], int] = {
    InvalidRequest: 400,
    ContextLengthExceeded: 400,
    Unauthorized: 401,
    ModelNotFound: 404,
    RequestConflict: 409,
    RequestAborted: 409,
    LeaseError: 409,
    PayloadTooLarge: 413,
    RateLimited: 429,
    ProgramError: 400,
    EngineUnavailable: 502,
    ShuttingDown: 503,
    TransferFailed: 502,
    Overloaded: 503,
    KVExhausted: 503,
    NoEngine: 503,
    Preempted: 503,
    DeadlineExceeded: 504,
    InternalError: 500,
}
"""Leaf exception -> HTTP status. A class that is not here answers 500."""

ERROR_TYPES: dict[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
"""HTTP status -> ``error.type``; every other status is a ``server_error``."""


def http_status(error: MicroservingError) -> int:
    """The HTTP status that ``error`` answers with."""
    return HTTP_STATUS.get(type(error), 500)


def error_body(error: MicroservingError) -> dict[str, dict[str, str | None]]:
    """The JSON body of an error answer, in OpenAI's shape."""
    status = http_status(error)
    return {
        "error": {
            "message": error.message,
            "type": ERROR_TYPES.get(status, "server_error"),
            "param": error.param,
            "code": error.code,
        }
    }


def error_from_body(status: int, error: dict[str, object]) -> MicroservingError:
    """The exception that a peer's error answer stands for: the inverse of ``error_body``.

    An unknown ``code`` falls back to the class of the status: 4xx -> ``InvalidRequest``, else ``EngineUnavailable``.
    """
    by_code = {cls.code: cls for cls in HTTP_STATUS if cls.code is not None}
    message = str(error.get("message") or f"the engine answered {status}")
    param = error.get("param")
    cls = by_code.get(str(error.get("code")))
    if cls is None:
        cls = InvalidRequest if 400 <= status < 500 else EngineUnavailable
    return cls(message, param=param if isinstance(param, str) else None)
