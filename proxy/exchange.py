"""One request's machine: what is known of it, and how it may end.

Owns the outcome taxonomy. Whatever happens to a request arrives here as an `End`; the table says,
by how far the answer had got, which outcome the audit record names and what may still be written
to the client. It never touches a socket or a clock.

Invariants: an exchange closes exactly once; after the first answer byte no second head is written;
an answer that was cut never ends like a whole one (docs/sidecar.md, "Answers of our own").

    how far      reading -> waiting -> begun -> done
    may write    REPLY      REPLY      EVENT when between two SSE events, else CUT
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from proxy.errors import Code, Outcome
    from proxy.qos.classes import PoolName, QosClass


class Progress(IntEnum):
    """How far the answer has got."""

    READING = 0  # the request is not whole yet
    WAITING = 1  # sent, or being sent; no answer head written
    BEGUN = 2  # an answer head was written
    DONE = 3


class End(Enum):
    """What ended an exchange."""

    ANSWERED = "answered"
    CLIENT_GONE = "client_gone"
    CLIENT_STALLED = "client_stalled"
    REQUEST_FAILED = "request_failed"  # its body went wrong after an early answer had begun
    NO_UPSTREAM = "no_upstream"
    UPSTREAM_RESET = "upstream_reset"
    UPSTREAM_PROTOCOL = "upstream_protocol"
    UPSTREAM_ENVELOPE = "upstream_envelope"  # what came is no envelope for this request
    UPSTREAM_TIMEOUT = "upstream_timeout"
    DRAIN_EXPIRED = "drain_expired"


class Action(Enum):
    """What may still be written to the client."""

    NOTHING = "nothing"
    REPLY = "reply"  # a whole answer of our own
    EVENT = "event"  # one SSE error event, then the regular end
    CUT = "cut"  # close without the regular end


class Closing:
    """The verdict: audit outcome, error code for the answer (None: none of ours), action."""

    __slots__ = ("action", "code", "outcome")

    def __init__(self, outcome: Outcome, code: Code | None, action: Action) -> None:
        self.outcome: Final = outcome
        self.code: Final = code
        self.action: Final = action


# End -> (outcome before a head was written, outcome after it, error code, is the client there)
_ENDS: dict[End, tuple[Outcome, Outcome, Code | None, bool]] = {
    End.ANSWERED: ("ok", "ok", None, False),
    End.CLIENT_GONE: ("client_gone", "client_gone", None, False),
    End.CLIENT_STALLED: ("client_stalled", "client_stalled", None, False),
    End.REQUEST_FAILED: ("rejected", "rejected", "invalid_request", True),
    End.NO_UPSTREAM: ("upstream_error", "upstream_error", "no_upstream", True),
    End.UPSTREAM_RESET: ("upstream_error", "truncated", "upstream_reset", True),
    End.UPSTREAM_PROTOCOL: ("upstream_error", "truncated", "upstream_protocol", True),
    End.UPSTREAM_ENVELOPE: ("upstream_error", "truncated", "upstream_envelope", True),
    End.UPSTREAM_TIMEOUT: ("timeout", "timeout", "upstream_timeout", True),
    End.DRAIN_EXPIRED: ("shed", "truncated", "draining", True),
}

PHASE_NAMES = {
    Progress.READING: "before_first_byte",
    Progress.WAITING: "before_first_byte",
    Progress.BEGUN: "streaming",
    Progress.DONE: "done",
}


def closing(end: End, progress: Progress, *, event_stream: bool, between_events: bool) -> Closing:
    """Return how an exchange ends.

    `event_stream`: the answer that has begun is one; `between_events`: the last byte handed to
    the client closed an event, or none was begun.
    """
    before, after, code, present = _ENDS[end]
    begun = progress >= Progress.BEGUN
    outcome = after if begun else before
    if not present:
        action = Action.CUT if end is End.CLIENT_STALLED and begun else Action.NOTHING
    elif not begun:
        action = Action.REPLY
    elif event_stream and between_events:
        action = Action.EVENT
    else:
        action = Action.CUT
    return Closing(outcome, code, action)


class Exchange:
    """Facts about one request, from its head to its record. Times: monotonic ns.

    One object lives for each request; `Observation`, `Replier`, `Reception`, `Dispatch` and `Relay`
    add their layer to it, in this order, each in its own file. What most requests never set are
    class attributes: all this is made on the hot path.
    """

    closed = False
    qos: QosClass = "P1"
    pool: PoolName = "shared"
    asked = ""  # the class asked for, where the tenant's cap lowered it
    cost = 1  # what it is estimated to take of an upstream; fixed before it is sent on
    tenant = ""
    trace_id = ""
    traceparent = b""
    joined = False  # it came with the request
    status = 0
    request_body_bytes = 0
    answered_bytes = 0
    place_ns = 0
    dispatch_ns = 0
    first_byte_ns = 0
    end_ns = 0
    tunnelled: tuple[int, int] | None = None  # bytes from and to the client after a 101

    door = ""
    method = b""
    target = b""
    start_ns = 0

    def __init__(self) -> None:
        self.progress = Progress.READING

    def since_start_us(self, at_ns: int) -> int | None:
        """Return microseconds from the accepted head to `at_ns`; None if that never came (0)."""
        return (at_ns - self.start_ns) // 1000 if at_ns else None

    def finish(self) -> None:
        """Close it; a second call is our bug."""
        assert not self.closed, "an exchange closes exactly once"
        self.closed = True
