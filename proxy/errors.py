"""Every answer of our own, as one table.

A *code* is API: clients match on it, `X-Tongguan-Error` carries it, metrics count it. Each code has
one HTTP status, one OpenAI error type, one audit outcome and one party at fault. Nothing else in
the house picks a status.

Invariants: a message never holds key bytes, plaintext or prompts; 429 and 503 always carry an
integer `Retry-After` of at least 1 (docs/sidecar.md, "Answers of our own").
"""

from __future__ import annotations

from typing import Final, Literal

import orjson

Fault = Literal["downstream", "local", "upstream"]
Code = Literal[
    "invalid_request",
    "envelope_rejected",
    "envelope_stale",
    "unauthorized",
    "method_not_allowed",
    "request_timeout",
    "payload_too_large",
    "headers_too_large",
    "rate_limited",
    "queue_full",
    "queue_deadline",
    "no_upstream",
    "audit_unavailable",
    "draining",
    "envelope_cache_full",
    "envelope_busy",
    "upstream_reset",
    "upstream_protocol",
    "upstream_envelope",
    "upstream_timeout",
    "internal_error",
]
Outcome = Literal[
    "ok",
    "client_gone",
    "client_stalled",
    "upstream_error",
    "truncated",
    "shed",
    "rejected",
    "timeout",
]


class ErrorKind:
    """One row: what a code means on the wire and in the audit record."""

    __slots__ = ("code", "fault", "outcome", "status", "type")

    def __init__(self, code: str, status: int, kind: str, outcome: Outcome, fault: Fault) -> None:
        self.code: Final = code
        self.status: Final = status
        self.type: Final = kind
        self.outcome: Final = outcome
        self.fault: Final = fault


def _table(*rows: ErrorKind) -> dict[str, ErrorKind]:
    return {row.code: row for row in rows}


ERRORS = _table(
    ErrorKind("invalid_request", 400, "invalid_request_error", "rejected", "downstream"),
    ErrorKind("envelope_rejected", 400, "invalid_request_error", "rejected", "downstream"),
    ErrorKind("envelope_stale", 400, "invalid_request_error", "rejected", "downstream"),
    ErrorKind("unauthorized", 401, "authentication_error", "rejected", "downstream"),
    ErrorKind("method_not_allowed", 405, "invalid_request_error", "rejected", "downstream"),
    ErrorKind("request_timeout", 408, "timeout_error", "timeout", "downstream"),
    ErrorKind("payload_too_large", 413, "invalid_request_error", "rejected", "downstream"),
    ErrorKind("headers_too_large", 431, "invalid_request_error", "rejected", "downstream"),
    ErrorKind("rate_limited", 429, "rate_limit_error", "shed", "local"),
    ErrorKind("queue_full", 503, "overloaded_error", "shed", "local"),
    ErrorKind("queue_deadline", 503, "overloaded_error", "shed", "local"),
    ErrorKind("no_upstream", 503, "overloaded_error", "upstream_error", "upstream"),
    ErrorKind("audit_unavailable", 503, "server_error", "shed", "local"),
    ErrorKind("draining", 503, "overloaded_error", "shed", "local"),
    ErrorKind("envelope_cache_full", 503, "overloaded_error", "shed", "local"),
    ErrorKind("envelope_busy", 503, "overloaded_error", "shed", "local"),
    ErrorKind("upstream_reset", 502, "server_error", "upstream_error", "upstream"),
    ErrorKind("upstream_protocol", 502, "server_error", "upstream_error", "upstream"),
    ErrorKind("upstream_envelope", 502, "server_error", "upstream_error", "upstream"),
    ErrorKind("upstream_timeout", 504, "timeout_error", "timeout", "upstream"),
    ErrorKind("internal_error", 500, "server_error", "upstream_error", "local"),
)

REASON_PHRASES = {
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    413: "Content Too Large",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
}


class RequestError(Exception):
    """A request ends with an answer of our own.

    `code` is a row of `ERRORS`; `message` is for a person and names the limit and its setting where
    one was hit; `param` names the offending field, if one is. `retry_helps`: the answer may differ
    once `retry_after_s` is over.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: int = 1,
        retry_helps: bool = True,
    ) -> None:
        super().__init__(message)
        self.code: Code = code
        self.kind = ERRORS[code]
        self.message = message
        self.param = param
        self.retry_after_s = max(1, retry_after_s)
        self.retry_helps = retry_helps

    def body(self) -> bytes:
        """Return the JSON body in OpenAI's form."""
        return error_body(self.kind, self.message, self.param)


def error_body(kind: ErrorKind, message: str, param: str | None = None) -> bytes:
    """Return `{"error": {message, type, param, code}}` as bytes."""
    return orjson.dumps(
        {"error": {"message": message, "type": kind.type, "param": param, "code": kind.code}}
    )
