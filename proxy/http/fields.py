"""Which fields a head shows, which go on to the other side, which end here.

Tables over lower-case names, one set for requests and one for responses. What a name means is
remembered by the exact bytes that came, so that the usual spelling costs one dict lookup; that
memory is bounded (`LEARNED_MAX` names of at most `LEARNED_NAME_MAX` bytes).
"""

from __future__ import annotations

TCHAR = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

HOP = (
    b"connection",
    b"keep-alive",
    b"proxy-connection",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
    b"http2-settings",
)
UPSTREAM_ERROR = b"x-tongguan-error"
# Fields for every hop that matter to who is asked, by whom, or what the body is.
END_TO_END = frozenset(
    (
        b"accept",
        b"authorization",
        b"cache-control",
        b"content-encoding",
        b"content-length",
        b"content-range",
        b"content-type",
        b"cookie",
        b"expect",
        b"forwarded",
        b"host",
        b"idempotency-key",
        b"location",
        b"range",
        b"retry-after",
        b"sec-websocket-accept",
        b"server-timing",
        b"set-cookie",
        b"traceparent",
        b"tracestate",
        b"via",
        b"x-api-key",
        b"x-forwarded-for",
        b"x-forwarded-host",
        b"x-forwarded-proto",
        b"x-model-id",
        b"x-qos-class",
        b"x-request-id",
        b"x-tenant-id",
        b"x-tongguan-error",
    )
)
# Options that need no look at the other fields: they name none, or one that is dropped anyway.
PLAIN_OPTIONS = frozenset((b"close", *HOP))

_COMMON = (
    b"accept-encoding",
    b"authorization",
    b"cache-control",
    b"date",
    b"server",
    b"user-agent",
)
LEARNED_MAX = 1024
LEARNED_NAME_MAX = 64

Rule = tuple[bytes | None, bool]
"""A name's lower case if it is watched; whether its line goes on."""


class Names:
    """What to do with each field name, memoised by its exact bytes; bounded."""

    __slots__ = ("_dropped", "_watched", "known", "table")

    def __init__(self, watched: tuple[bytes, ...], dropped: tuple[bytes, ...]) -> None:
        self.table = watched, dropped
        self._watched = frozenset(watched)
        self._dropped = frozenset(dropped)
        self.known: dict[bytes, Rule] = {}
        # The names that matter are there before a client can fill the table with others.
        for name in (*watched, *dropped, *_COMMON):
            self.learn(name)
            self.learn(name.title())

    def learn(self, name: bytes) -> Rule | None:
        """Return the rule of a name not seen before; None if it is no token."""
        if not name or name.translate(None, TCHAR):
            return None
        lower = name.lower()
        rule = (lower if lower in self._watched else None, lower not in self._dropped)
        if len(self.known) < LEARNED_MAX and len(name) <= LEARNED_NAME_MAX:
            self.known[name] = rule
        return rule


REQUEST = Names(
    watched=(
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"expect",
        b"upgrade",
        b"content-type",
        b"content-encoding",
        b"accept",
        b"x-qos-class",
        b"x-tenant-id",
        b"x-model-id",
        b"x-request-id",
        b"traceparent",
        b"tracestate",
    ),
    dropped=(
        *HOP,
        b"content-length",
        b"host",
        b"expect",
        b"x-qos-class",
        b"x-tenant-id",
        b"traceparent",
        # CGI-like servers read "_" and "-" as the same (RFC 3875 section 4.1.18).
        b"content_length",
        b"transfer_encoding",
        b"x_qos_class",
        b"x_tenant_id",
    ),
)
RESPONSE = Names(
    watched=(
        b"content-type",
        b"content-encoding",
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"keep-alive",
        b"server-timing",
        b"x-accel-buffering",
        b"cache-control",
        b"retry-after",
        b"upgrade",
        b"sec-websocket-accept",
        UPSTREAM_ERROR,
    ),
    dropped=(
        *HOP,
        b"content-length",
        b"x-qos-class",
        b"x-qos-pool",
        b"x-trace-id",
        UPSTREAM_ERROR,
    ),
)
