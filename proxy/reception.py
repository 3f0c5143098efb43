"""Taking a request: its class and place, or its envelope, and the head that goes upstream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.errors import RequestError
from proxy.intake import SealedIntake, too_large_sealed
from proxy.qos.classes import UnknownClassError
from proxy.replier import Replier

if TYPE_CHECKING:
    from proxy.context import Context
    from proxy.sm4.opener import OpenedRequest


class Reception(Replier):
    """The layer that takes a request, in clear or sealed. Raises RequestError where it refuses."""

    _intake: SealedIntake | None = None
    _placed = False

    def open(self) -> None:
        """Take the head: class and place, or the envelope's outer form. Raises RequestError."""
        context, head = self.context, self.request
        sealed = self.door == "sealed"
        if sealed:
            if context.draining:
                raise RequestError("draining", "this sidecar takes no new sealed requests")
            self._intake = SealedIntake(context, self.downstream.peer, head)
        length = head.content_length or 0
        if length > context.body_bytes_max:
            raise too_large(context)
        if sealed and length > context.budget.share_bytes:
            raise too_large_sealed(context)
        if not sealed:
            self.tenant = context.own_tenant
            fields = head.fields
            self._admit(fields.get(b"x-qos-class"), repeated=b"x-qos-class" in head.repeated)

    def _admit(self, asked: bytes | None, *, repeated: bool) -> None:
        """Class it and take a place in its pool. Raises RequestError."""
        context = self.context
        tenant = context.tenant(self.tenant)
        lane = tenant.known.get(asked)
        if lane is None or repeated:
            try:
                lane = tenant.lane(asked, repeated=repeated, qos=context.settings.qos)
            except UnknownClassError as problem:
                raise RequestError("invalid_request", str(problem), param="X-QoS-Class") from None
        self.lane = lane
        self.trace_id = context.trace_ids.next(
            (self.start_ns + context.wall_offset_ns) // 1_000_000
        )
        self.traceparent = context.traceparent(self.request.fields.get(b"traceparent"))
        self.prompt_key = tenant.prompt_key
        qos = lane.qos
        context.counters.started[qos] += 1
        if context.blocks_on_audit and context.audit_blocked():
            raise RequestError("audit_unavailable", "no audit record can be written")
        if not lane.route.state.admit(lane.bound):
            overflow = lane.overflow
            if overflow is None or not overflow.route.state.admit(overflow.bound):
                context.counters.queue_full[qos] += 1
                raise RequestError("queue_full", f"pool {lane.route.name} has no place left")
            lane.route.state.overflows += 1
            self.lane = overflow
        self._placed = True

    def _open_envelope(self, intake: SealedIntake, opened: OpenedRequest) -> bytes:
        """Take what was opened and return its body; from here on every answer is sealed."""
        self.sealer = opened.sealer
        self.tenant = opened.tenant
        self.method = opened.method.encode()
        self.target = opened.target.encode()
        if opened.method in {"CONNECT", "TRACE"}:
            raise RequestError("method_not_allowed", f"{opened.method} is not forwarded")
        self.envelope = intake.facts(opened)
        intake.opened()
        longest = max(len(opened.target), len(opened.method), len(opened.content_type))
        if longest > self.context.head_limits.field_bytes:
            raise RequestError(
                "headers_too_large", "a line of the prelude is over limits.field_bytes"
            )
        self._admit(opened.qos.strip(" ").encode() or None, repeated=False)
        return opened.body

    def _head(self, lines: bytes, framing: bytes) -> bytes:
        """Return the head to send upstream; `lines` are the client's that go on."""
        lane, fields = self.lane, self.request.fields
        host = lane.host
        if not host:
            sealed = self._intake is not None
            host = lane.route.endpoint_host if sealed else fields.get(b"host", b"localhost")
        return b"%b %b HTTP/1.1\r\nHost: %b\r\n%b%btraceparent: %b\r\n%b" % (
            self.method,
            self.target,
            host,
            lines,
            lane.request_fields,
            self.traceparent,
            framing,
        )


def too_large(context: Context) -> RequestError:
    """Return the refusal of a body over the limit, counted."""
    limit = context.body_bytes_max
    context.counters.limit_hits["limits.body_bytes"] += 1
    return RequestError(
        "payload_too_large", f"the request body is larger than {limit} bytes (limits.body_bytes)"
    )
