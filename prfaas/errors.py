"""Every error of prfaas: the name says who is to blame and in which phase.

The wire tables at the end are read both ways, so an error that crosses HTTP or gRPC comes out as
the class that went in. Foreign exceptions are translated only at the border they come in by.
"""

from __future__ import annotations

from typing import ClassVar


class PrfaasError(Exception):
    """Base of all errors; `kind` is the stable machine-readable name, `message` is for people."""

    kind: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        phase: str | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.phase = phase
        self.field = field


class InvalidRequest(PrfaasError):
    """The caller's request is wrong; `param` names the field."""

    kind = "invalid_request_error"
    http_status = 400
    grpc_code = "INVALID_ARGUMENT"


class ContextTooLong(InvalidRequest):
    """Prompt plus answer do not fit the model's context; the message has both numbers."""

    kind = "context_length_exceeded"


class UnknownModel(PrfaasError):
    """No engine serves the model named in the request."""

    kind = "model_not_found"
    http_status = 404
    grpc_code = "NOT_FOUND"


class NotFound(PrfaasError):
    """No such route or object."""

    kind = "not_found"
    http_status = 404
    grpc_code = "UNIMPLEMENTED"


class BodyTooLarge(PrfaasError):
    """The HTTP body is over the limit."""

    kind = "request_too_large"
    http_status = 413
    grpc_code = "OUT_OF_RANGE"


class Unauthorized(PrfaasError):
    """Missing or wrong credentials, or a signature that does not verify."""

    kind = "authentication_error"
    http_status = 401
    grpc_code = "UNAUTHENTICATED"


class Forbidden(PrfaasError):
    """The caller is known, but may not have this; `param` names what."""

    kind = "permission_error"
    http_status = 403
    grpc_code = "PERMISSION_DENIED"


class RateLimited(PrfaasError):
    """The caller has used up what it may; `param` names the limit, try again after
    `retry_after_s`.
    """

    kind = "rate_limit_exceeded"
    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"


class Overloaded(PrfaasError):
    """A bounded queue is full here; try again after `retry_after_s`."""

    kind = "overloaded"
    http_status = 503
    grpc_code = "RESOURCE_EXHAUSTED"


class PrefillUnavailable(PrfaasError):
    """No allowed place could prefill this request (peers failed and local was not granted)."""

    kind = "prefill_unavailable"
    http_status = 503
    grpc_code = "FAILED_PRECONDITION"


class PeerUnavailable(PrfaasError):
    """A peer or its link could not be reached, or the connection broke."""

    kind = "peer_unavailable"
    http_status = 503
    grpc_code = "UNAVAILABLE"


class SessionLost(PeerUnavailable):
    """The instance knows nothing of a session that was to go on: it has started anew."""

    kind = "session_lost"


class PrefillTimeout(PrfaasError):
    """A phase (`connect`, `first_frame`, `progress`, `total`) of remote prefill ran out of time."""

    kind = "prefill_timeout"
    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"


class EngineUnavailable(PrfaasError):
    """The engine behind this process is gone or not ready."""

    kind = "engine_unavailable"
    http_status = 502
    grpc_code = "ABORTED"


class CorruptKv(PrfaasError):
    """KV bytes failed a check (crc, sizes, counts at the seal)."""

    kind = "corrupt_kv"
    http_status = 502
    grpc_code = "DATA_LOSS"


class ProtocolError(PrfaasError):
    """The other side broke the wire or port protocol."""

    kind = "protocol_error"
    http_status = 502
    grpc_code = "UNKNOWN"


class IncompatibleLayout(PrfaasError):
    """The two sides cannot exchange KV; `field` names what differs."""

    kind = "incompatible_layout"
    http_status = 502
    grpc_code = "PERMISSION_DENIED"


class StateUnavailable(PrfaasError):
    """The store that gateways share could not be reached, or refused."""

    kind = "state_unavailable"
    http_status = 503
    grpc_code = "UNAVAILABLE"


class Cancelled(PrfaasError):
    """The caller went away, or asked to stop."""

    kind = "cancelled"
    http_status = 499
    grpc_code = "CANCELLED"


class ConfigError(PrfaasError):
    """A setting is wrong; the message names the key."""

    kind = "config_error"
    grpc_code = "INTERNAL"


def _all_subclasses(cls: type[PrfaasError]) -> list[type[PrfaasError]]:
    found = [cls]
    for sub in cls.__subclasses__():
        found.extend(_all_subclasses(sub))
    return found


BY_KIND: dict[str, type[PrfaasError]] = {cls.kind: cls for cls in _all_subclasses(PrfaasError)}


def from_kind(
    kind: str,
    message: str,
    *,
    param: str | None = None,
    retry_after_s: float | None = None,
    phase: str | None = None,
    field: str | None = None,
) -> PrfaasError:
    """The error class for a `kind` that came over a wire; an unknown kind is a ProtocolError."""
    cls = BY_KIND.get(kind)
    if cls is None:
        cls, message = ProtocolError, f"unknown error kind {kind!r}: {message}"
    return cls(message, param=param, retry_after_s=retry_after_s, phase=phase, field=field)


def openai_body(error: PrfaasError) -> dict[str, object]:
    """The error in OpenAI's shape, as the official client parses it."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.kind,
        }
    }
