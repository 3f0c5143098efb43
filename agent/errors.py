"""The API's errors: the sidecar's table and type where it has them, a few rows of the agent's own.

A message names fields, types and limits, never a value from a prompt.
"""

from __future__ import annotations

from proxy.errors import ERRORS, ErrorKind, error_body

MODEL_NOT_FOUND = ErrorKind(
    "model_not_found", 404, "invalid_request_error", "rejected", "downstream"
)
UNKNOWN_URL = ErrorKind("unknown_url", 404, "invalid_request_error", "rejected", "downstream")
CONTEXT_EXCEEDED = ErrorKind(
    "context_length_exceeded", 400, "invalid_request_error", "rejected", "downstream"
)
MODEL_LOADING = ErrorKind("model_loading", 503, "overloaded_error", "shed", "local")
OUT_OF_MEMORY = ErrorKind("out_of_memory", 503, "overloaded_error", "shed", "local")
CONNECTION_LIMIT = ErrorKind("connection_limit", 503, "overloaded_error", "shed", "local")
INVALID = ERRORS["invalid_request"]
TOO_LARGE = ERRORS["payload_too_large"]
TIMED_OUT = ERRORS["request_timeout"]
BAD_METHOD = ERRORS["method_not_allowed"]
QUEUE_FULL = ERRORS["queue_full"]
DRAINING = ERRORS["draining"]
INTERNAL = ERRORS["internal_error"]


class ApiError(Exception):
    """The request ends with an error answer; `retry_after_s` is sent with 503 only."""

    def __init__(
        self, kind: ErrorKind, message: str, *, param: str | None = None, retry_after_s: int = 1
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.param = param
        self.retry_after_s = max(1, retry_after_s)

    def body(self) -> bytes:
        """Return the JSON body in OpenAI's form."""
        return error_body(self.kind, self.message, self.param)
