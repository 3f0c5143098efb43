"""From a finished request to its spans. Pure: random bits are an argument.

    request (server)        head accepted -> end; child of the client's span, if it named one
    ├ queue                 head accepted -> place
    ├ upstream wait         place -> connection
    ├ the model's (client)  connection -> end
    │ ├ first byte          connection -> first body byte
    │ └ stream              first body byte -> end
    └ audit write           record made -> on disk

A traceparent that came was passed on as it was, so the upstream's spans are the client's children,
beside ours. One that we made names the model's span: the upstream's spans are its children.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from proxy.spans import conventions as names

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.spans.finished import Finished

Kind = Literal["server", "client", "internal"]
Value = str | int


@dataclass(slots=True)
class Span:
    """One span. Times are wall ns; `error`: what `error.type` says, empty if all went well."""

    name: str
    kind: Kind
    trace_id: int
    span_id: int
    parent_id: int  # 0: none
    start_ns: int
    end_ns: int
    remote: bool = False  # the parent is another process's
    error: str = ""
    attributes: dict[str, Value] = field(default_factory=dict)


def spans(done: Finished, bits: Callable[[int], int]) -> list[Span]:
    """Return a request's spans, its own first. `bits(n)` gives n random bits."""
    trace_id = int(done.traceparent[3:35], 16)
    named_id = int(done.traceparent[36:52], 16)
    root_id = bits(64) or 1
    end_ns = done.end_ns
    made = [
        Span(
            f"{done.method} {done.route}" if done.route else done.method,
            "server",
            trace_id,
            root_id,
            named_id if done.came else 0,
            done.start_ns,
            end_ns,
            remote=done.came,
            error=_error(done),
            attributes=_request(done),
        )
    ]

    def child(name: str, start_ns: int, until_ns: int, parent_id: int = root_id) -> None:
        """Add one, if it began; what never came lasted until the end."""
        if start_ns:
            until_ns = max(until_ns or end_ns, start_ns)
            made.append(
                Span(name, "internal", trace_id, bits(64) or 1, parent_id, start_ns, until_ns)
            )

    connected = done.dispatch_ns if done.place_ns else 0
    child(names.QUEUE, done.start_ns, done.place_ns or done.dispatch_ns)
    child(names.WAIT, done.place_ns, connected)
    if connected:
        model_id = (bits(64) or 1) if done.came else named_id
        model = Span(
            f"{done.operation} {done.model}".strip() or done.method,
            "client",
            trace_id,
            model_id,
            root_id,
            connected,
            end_ns,
            error=_error(done),
            attributes=_model(done),
        )
        made.append(model)
        child(names.FIRST_BYTE, connected, done.first_byte_ns, model_id)
        child(names.STREAM, done.first_byte_ns, end_ns, model_id)
    if done.recorded_ns and not done.lost:
        child(names.AUDIT, done.recorded_ns, done.durable_ns)
    elif done.recorded_ns:
        made.append(
            Span(
                names.AUDIT,
                "internal",
                trace_id,
                bits(64) or 1,
                root_id,
                done.recorded_ns,
                done.recorded_ns,
                error="audit_unavailable",
                attributes={names.ERROR_TYPE: "audit_unavailable"},
            )
        )
    return made


def _error(done: Finished) -> str:
    """Return `error.type`; a client that left is no error of the request's."""
    if done.outcome not in {"ok", "client_gone"}:
        return done.outcome
    return str(done.status) if done.status >= 500 else ""


def _request(done: Finished) -> dict[str, Value]:
    return _told(
        {
            names.METHOD: done.method,
            names.SCHEME: "http",
            names.ROUTE: done.route,
            names.STATUS: done.status,
            names.ERROR_TYPE: _error(done),
            names.RECORD: done.trace_id,
            names.DOOR: done.door,
            names.QOS: done.qos,
            names.QOS_ASKED: done.asked,
            names.POOL: done.pool,
            names.OUTCOME: done.outcome,
            names.PHASE: done.phase,
            names.TENANT: done.tenant,
            names.KEPT: done.why,
        }
    )


def _model(done: Finished) -> dict[str, Value]:
    told = _told(
        {
            names.OPERATION: done.operation,
            names.PROVIDER: names.PROVIDER_VALUE if done.operation else "",
            names.REQUEST_MODEL: done.model,
            names.RESPONSE_MODEL: done.served_model,
            names.ERROR_TYPE: _error(done),
            names.POOL: done.pool,
        }
    )
    for name, of in ((names.INPUT_TOKENS, "prompt"), (names.OUTPUT_TOKENS, "completion")):
        if of in done.usage:  # a reported 0 stays 0
            told[name] = done.usage[of]
    return told


def _told(rows: dict[str, Value]) -> dict[str, Value]:
    """Return what is known: unknown is absent."""
    return {name: value for name, value in rows.items() if value not in {"", 0}}
