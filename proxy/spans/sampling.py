"""Which finished requests become spans. Pure.

Decided at the end of a request, when all is known of it: whatever went wrong is kept, and a P0
request that broke its promise; of the rest a share, by its trace id. So all that sample by the
same ids with no smaller share keep the same traces (OpenTelemetry's `TraceIdRatioBased`).
"""

from __future__ import annotations

from typing import Literal, get_args

Why = Literal["error", "p0_late", "ratio"]
WHYS: tuple[Why, ...] = get_args(Why)


def bound_of(ratio: float) -> int:
    """Return what the low 64 bits of a trace id have to be below."""
    return round(ratio * (1 << 64))


def why_kept(
    *,
    traceparent: bytes,
    outcome: str,
    status: int,
    qos: str,
    first_byte_ns: int,
    late_ns: int,
    bound: int,
) -> Why | None:
    """Return why a request is kept; None: it is not.

    `first_byte_ns`: from the head to the first body byte, or to the end where none came.
    """
    if outcome != "ok" or status >= 500:
        return "error"
    if qos == "P0" and first_byte_ns > late_ns:
        return "p0_late"
    return "ratio" if int(traceparent[19:35], 16) < bound else None
