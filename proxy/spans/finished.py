"""What is kept of a finished request until its spans are made: no bytes of it, no name of a tenant.

A tenant's pseudonym is a MAC under its prompt key (docs/tracing.md): stable for whoever
looks, opened by the auditor who holds the key, by nobody once the key is destroyed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from proxy.audit.chain import mac
from proxy.exchange import PHASE_NAMES
from proxy.spans import conventions as names

if TYPE_CHECKING:
    from proxy.observe import Observation
    from proxy.spans.sampling import Why

TEXT_MAX = 256


@dataclass(slots=True)
class Finished:
    """Times are wall ns; 0: that never came."""

    why: Why
    traceparent: bytes
    came: bool  # the client's own traceparent
    trace_id: str
    door: str
    method: str
    route: str
    operation: str
    qos: str
    asked: str
    pool: str
    status: int
    outcome: str
    phase: str
    tenant: str
    model: str
    served_model: str
    usage: dict[str, int]
    start_ns: int
    place_ns: int
    dispatch_ns: int
    first_byte_ns: int
    end_ns: int
    recorded_ns: int = 0
    durable_ns: int = 0
    lost: bool = False  # there is no record of it, or none on disk yet


def finished(exchange: Observation, outcome: str, why: Why, wall_offset_ns: int) -> Finished:
    """Return what spans are made of. `wall_offset_ns`: wall time less monotonic time."""

    def wall(mono_ns: int) -> int:
        return mono_ns + wall_offset_ns if mono_ns else 0

    method = exchange.method.decode("latin-1")
    path = exchange.target.partition(b"?")[0].decode("latin-1")
    operation = names.ROUTES.get(path)
    return Finished(
        why=why,
        traceparent=exchange.traceparent,
        came=exchange.joined,
        trace_id=exchange.trace_id,
        door=exchange.door,
        method=method if method in names.METHODS else names.OTHER_METHOD,
        route="" if operation is None else path,
        operation=operation or "",
        qos=exchange.qos,
        asked=exchange.asked,
        pool=exchange.pool,
        status=exchange.status,
        outcome=outcome,
        phase=PHASE_NAMES[exchange.progress],
        tenant=pseudonym(exchange.prompt_key, exchange.tenant),
        model=(exchange.model or "")[:TEXT_MAX],
        served_model=(exchange.served_model or "")[:TEXT_MAX],
        usage=exchange.usage() or {},
        start_ns=wall(exchange.start_ns),
        place_ns=wall(exchange.place_ns),
        dispatch_ns=wall(exchange.dispatch_ns),
        first_byte_ns=wall(exchange.first_byte_ns),
        end_ns=wall(exchange.end_ns),
    )


@lru_cache(maxsize=1024)
def pseudonym(prompt_key: bytes | None, tenant: str) -> str:
    """Return what stands for a tenant in spans; empty without its key."""
    if prompt_key is None:
        return ""
    return mac("s256", prompt_key).hex(b"tongguan trace tenant\0" + tenant.encode())[:16]
