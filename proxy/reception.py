"""Taking a request: its class and place, or its envelope, and the head that goes upstream.

The class is known with the head, unless a rule has to see the body. A place is taken when the body
has come, so a slow upload holds none; where there is none, the request waits in its gate's queue.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from proxy.errors import RequestError
from proxy.http.body import view
from proxy.http.peek import PEEK_BYTES, peek
from proxy.intake import SealedIntake, too_large_sealed
from proxy.opening import Opening
from proxy.qos.admission import Ticket
from proxy.qos.classes import UnknownClassError
from proxy.qos.rules import choose, tokens
from proxy.replier import Replier

if TYPE_CHECKING:
    from proxy.context import Context
    from proxy.http.http1 import RequestHead
    from proxy.lanes import Lane, Tenant
    from proxy.qos.admission import Refusal, Tier
    from proxy.sm4.opener import OpenedRequest

TENANT_BYTES_MAX = 255
VCHAR = bytes(range(0x21, 0x7F))
EARLY_LOOK_BYTES = 64 << 10  # a body above it is not taken in for a queue that is full
_TRACESTATE = re.compile(rb"(?i)(?:(?<=\n)|^)tracestate:[^\r\n]*\r\n")
REFUSED = {
    "queue_full": "no place is left and the queue of class {qos} is full; try again in {s} s",
    "queue_deadline": "no place got free within the deadline of class {qos}; try again in {s} s",
    "early": "class {qos} drains too slowly for this request's deadline; try again in {s} s",
}


class Reception(Replier):
    """The layer that takes a request, in clear or sealed. Raises RequestError where it refuses."""

    _intake: SealedIntake | None = None
    _place: Tier | None = None  # where it counts as in flight
    _ticket: Ticket | None = None  # while it waits for that
    _opening: Opening | None = None  # while it waits for its `open` record
    _undecided: Tenant | None = None  # until a rule has seen the body

    def open(self) -> None:
        """Take the head: class and place, or the envelope's outer form. Raises RequestError."""
        context, head = self.context, self.request
        sealed = self.door == "sealed"
        if sealed:
            if context.draining:
                raise RequestError(
                    "draining",
                    "this sidecar takes no new sealed requests",
                    retry_helps=context.shared_replay is not None,  # replicas have its audience
                )
            self._intake = SealedIntake(context, self.downstream.peer, head)
        length = head.content_length or 0
        if length > context.body_bytes_max:
            raise too_large(context)
        if sealed and length > context.budget.share_bytes:
            raise too_large_sealed(context)
        if not sealed:
            self.tenant = context.own_tenant
            if self.downstream.gateway:
                self.tenant = named_tenant(head) or context.own_tenant
            fields = head.fields
            self._admit(fields.get(b"x-qos-class"), repeated=b"x-qos-class" in head.repeated)

    def _admit(self, asked: bytes | None, *, repeated: bool) -> None:
        """Class it, if that can be done without its body. Raises RequestError."""
        context = self.context
        tenant = context.tenant(self.tenant)
        lane = tenant.known.get(asked)
        if lane is None or repeated:
            try:
                lane = tenant.lane(asked, repeated=repeated, qos=context.settings.qos)
            except UnknownClassError as problem:
                raise RequestError("invalid_request", str(problem), param="X-QoS-Class") from None
            if lane is None:
                self._undecided = tenant
                return
        self.prompt_key = tenant.prompt_key
        self._classed(lane)

    def _decide(self, tenant: Tenant, body: bytes, length: int, model: str = "") -> None:
        """Class it by the rules; `body`: all of it, or what came first. Raises RequestError."""
        self._undecided = None
        seen = peek(body, length, model)
        rule = choose(tenant.rules, seen)
        lane = tenant.default
        if rule is not None:
            lane = tenant.known[rule.qos.encode()]
            self.context.counters.rule_matches[rule.number - 1] += 1
        self.prompt_key = tenant.prompt_key
        self._classed(lane)

    def _glimpse(self, pieces: list[bytes], *, whole: bool) -> bool:
        """Class an undecided request when enough of its body has come; False: not yet.

        Raises RequestError.
        """
        tenant, size = self._undecided, self.request_body_bytes
        if tenant is None or (size < PEEK_BYTES and not whole):
            return tenant is None
        length = size if whole else max(size, self.request.content_length or 0)
        self._decide(tenant, b"".join(pieces), length)
        return True

    def _classed(self, lane: Lane) -> None:
        context, request = self.context, self.request
        self.lane = lane
        self.trace_id = context.trace_ids.next(
            (self.start_ns + context.wall_offset_ns) // 1_000_000
        )
        came = request.fields.get(b"traceparent")
        self.traceparent = context.traceparent(came)
        self.joined = self.traceparent is came
        context.counters.started[lane.qos] += 1
        if context.blocks_on_audit and context.audit_blocked():
            raise RequestError("audit_unavailable", "no audit record can be written")
        if lane.tier.checks or lane.bucket is not None:
            self._check(lane)

    def _check(self, lane: Lane) -> None:
        """Refuse what a rate forbids, and a large body that is yet to come to a full queue."""
        tier, request = lane.tier, self.request
        now_ns = self.context.clock.mono_ns()
        for bucket in (tier.bucket, lane.bucket):
            if bucket is not None and not bucket.take(now_ns):
                if bucket is not tier.bucket and tier.bucket is not None:
                    tier.bucket.give_back()
                whose = "class" if bucket is tier.bucket else "tenant"
                self.context.counters.rate_limited[lane.qos, whose] += 1
                raise RequestError(
                    "rate_limited",
                    f"more than {bucket.rate:g} requests a second of this {whose}",
                    retry_after_s=bucket.wait_s(now_ns),
                )
        if tier.full and self._intake is None:
            length = request.content_length or 0
            if request.expect or request.chunked or length > EARLY_LOOK_BYTES:
                started = self.context.counters.started[lane.qos]
                tier.came += 1
                raise shed(tier.gate.refuse(tier, "queue_full", now_ns, started))

    # -- a place

    def _enter(self, body: bytes) -> bool:
        """Take a place; False: it waits, or is refused in its turn. Raises RequestError."""
        lane = self.lane
        tier = lane.tier
        if lane.weighs:
            self.cost = self._cost(body)
        gate, pool = tier.gate, tier.pool
        if pool.inflight < tier.bound and gate.inflight < tier.direct:
            pool.inflight += 1
            gate.inflight += 1
            self._place = tier
            return True
        overflow = lane.overflow
        if overflow is not None and self._spill(overflow):
            self._move(overflow)
            return not self.closed
        self._line_up(tier, body)
        return False

    def _spill(self, overflow: Lane) -> bool:
        """Take a place in another pool instead; False: that has none that is free at once."""
        tier, lane = overflow.tier, self.lane
        gate, pool = tier.gate, tier.pool
        # P0 is bound by what the pool can hold, not by what is measured or waits there.
        bound = pool.inflight_max if lane.qos == "P0" else tier.bound
        if pool.inflight >= bound or (lane.qos != "P0" and gate.inflight >= tier.direct):
            return False
        self._leave_place(self.context.clock.mono_ns())
        pool.inflight += 1
        gate.inflight += 1
        self._place = tier
        lane.route.state.overflows += 1
        return True

    def _line_up(self, tier: Tier, body: bytes) -> None:
        context = self.context
        gate, now_ns = tier.gate, context.clock.mono_ns()
        started = context.counters.started[tier.qos]
        cost = self.cost if self.lane.weighs else self._cost(body)
        taken = gate.enter(tier, self, cost, self.start_ns, now_ns, started)
        if isinstance(taken, Ticket):
            self._ticket = taken
            self.downstream.deadline_ns = taken.deadline_ns
            if gate.may_go():
                context.turnstiles[tier.qos].schedule()
            return
        tier.pool.refused += 1
        if tier.qos != "P2":
            raise shed(taken)
        context.turnstiles[tier.qos].turn_away(self, taken)

    def _cost(self, body: bytes) -> int:
        """Return the tokens it may take: the prompt's, by its length, and the answer's."""
        answer = self.context.settings.qos.default_max_tokens
        seen = view(body) if body else None
        if seen is None:
            return tokens(max(len(body), self.request.content_length or 0)) + answer
        prompt = seen.prompt
        size = len(body) if prompt is None else prompt[1] - prompt[0]
        return tokens(size) + (answer if seen.max_tokens is None else seen.max_tokens)

    def granted(self, now_ns: int) -> None:
        """See `Waiter`."""
        del now_ns
        ticket = self._ticket
        assert ticket is not None, "granted without a ticket"
        self._ticket = None
        self._place = ticket.tier
        self._go_on()

    def _go_on(self) -> None:
        """Send on what has its place: now, or when its `open` record is on disk (`audit.sync`)."""
        context = self.context
        audit = context.audit
        if not self.lane.opens or audit is None:
            self._lease()
            return
        self._bound_wait(context.clock.mono_ns())
        self._opening = Opening(context, self.lane.qos, self._opened)
        self._opening.begin(audit, self.trace_id, self.tenant, self.traceparent)

    def _opened(self, durable: bool) -> None:  # noqa: FBT001 - a value, not a switch
        """Send it on, or refuse it where policy demands a record that could not be written."""
        self._opening = None
        if durable or not self.context.blocks_on_audit:
            self._lease()
            return
        self.dispatch_ns = self.context.clock.mono_ns()  # until then it waited
        text = "its audit record is not on disk, and is to be before it is sent on (audit.sync)"
        self.refuse(RequestError("audit_unavailable", text), keep=True)

    def turned_away(self, refusal: Refusal) -> None:
        """See `Waiter`."""
        if self.closed:
            return
        if self._ticket is not None:
            self._ticket = None
            self.dispatch_ns = self.context.clock.mono_ns()  # until then it waited
        self.refuse(shed(refusal), keep=True)

    def _run_out(self, ticket: Ticket) -> None:
        """End a wait that has reached its deadline."""
        context, tier = self.context, ticket.tier
        started = context.counters.started[tier.qos]
        self.turned_away(tier.gate.run_out(ticket, context.clock.mono_ns(), started))

    def _bound_wait(self, now_ns: int) -> None:
        """Let the class's deadline hold until a connection is leased; P0 has none."""
        context = self.context
        wait_ns = context.gates.tiers[self.lane.qos].terms.wait_ns
        if wait_ns:
            by_ns = self.start_ns + wait_ns
            if by_ns <= now_ns:  # its upload took that long: it may connect all the same
                by_ns = now_ns + int(context.settings.timeouts.connect_s * 1e9)
            self.downstream.deadline_ns = by_ns

    def _waited_too_long(self) -> bool:
        """End a request that has no connection by its class's deadline; False: it has none."""
        context = self.context
        tier = context.gates.tiers[self.lane.qos]
        if self.dispatch_ns or not tier.terms.wait_ns:
            return False
        now_ns = self.dispatch_ns = context.clock.mono_ns()  # until then it waited
        started = context.counters.started[tier.qos]
        tier.came += 1
        self.refuse(shed(tier.gate.refuse(tier, "queue_deadline", now_ns, started)), keep=True)
        return True

    def _answer_began(self, place: Tier, now_ns: int) -> None:
        """Tell the gate how long the first byte took."""
        gate = place.gate
        if gate.first_byte(self.dispatch_ns, now_ns) and gate.waiting:
            self.context.turnstiles[place.qos].schedule()

    def _leave_place(self, now_ns: int) -> None:
        """Give back the place, or the place in the queue."""
        place, ticket = self._place, self._ticket
        if place is not None:
            self._place = None
            gate = place.gate
            place.pool.inflight -= 1
            gate.inflight -= 1
            if gate.waiting:
                self.context.turnstiles[place.qos].schedule()
        elif ticket is not None:
            self._ticket = None
            ticket.tier.gate.leave(ticket, now_ns)

    # -- what `Dispatch` and `Relay` do

    def _lease(self) -> None:
        """Take an endpoint, and a connection to it."""

    def _move(self, lane: Lane) -> None:
        """Let another pool serve it."""

    def refuse(self, problem: RequestError, *, keep: bool) -> None:
        """End with an answer of our own, decided before the upstream answered."""

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
        if self._undecided is not None:
            model = self.request.fields.get(b"x-model-id", b"").decode("latin-1")
            self._decide(self._undecided, opened.body, len(opened.body), model)
        return opened.body

    def _head(self, lines: bytes, framing: bytes) -> bytes:
        """Return the head to send upstream; `lines` are the client's that go on."""
        lane, fields = self.lane, self.request.fields
        if not self.joined and b"tracestate" in fields:  # it belongs to the traceparent that came
            lines = _TRACESTATE.sub(b"", lines)
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


def named_tenant(head: RequestHead) -> str:
    """Return the tenant that a gateway's request names, or empty. Raises RequestError."""
    value = head.fields.get(b"x-tenant-id")
    if value is None:
        return ""
    # Two values have been joined by ", ", so there is a space in them.
    if not 0 < len(value) <= TENANT_BYTES_MAX or value.translate(None, VCHAR):
        raise RequestError(
            "invalid_request",
            "X-Tenant-Id is not one value of at most 255 printable characters without space",
            param="X-Tenant-Id",
        )
    return value.decode("ascii")


def shed(refusal: Refusal) -> RequestError:
    """Return the answer to a request that admission refused."""
    return RequestError(
        "queue_full" if refusal.reason == "queue_full" else "queue_deadline",
        REFUSED[refusal.reason].format(qos=refusal.qos, s=refusal.retry_after_s),
        retry_after_s=refusal.retry_after_s,
        retry_helps=refusal.retry_helps,
    )


def too_large(context: Context) -> RequestError:
    """Return the refusal of a body over the limit, counted."""
    limit = context.body_bytes_max
    context.counters.limit_hits["limits.body_bytes"] += 1
    return RequestError(
        "payload_too_large", f"the request body is larger than {limit} bytes (limits.body_bytes)"
    )
