"""The answer to one client: which form it takes, and its bytes on the way.

Chooses between clear and sealed, whole and streamed, from the upstream's head; writes the head
once, the body as it comes, the regular end once. When a sealed request was opened, everything that
leaves here is sealed, our own errors included (docs/envelope.md, "Order on receipt").
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Literal, Protocol

from proxy.answer import (
    Answer,
    Bodiless,
    Lengthed,
    SealedStream,
    answer_head,
    own_fields,
    sealed_fields,
    unlengthed,
)
from proxy.errors import ERRORS, RequestError, error_body
from proxy.exchange import Progress
from proxy.observe import WHOLE_ANSWER_BYTES, Observation
from proxy.sm4.envelope import SINGLE_BYTES_MAX
from proxy.sm4.sealer import SingleTooLargeError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable

    from proxy.context import Context
    from proxy.errors import Code
    from proxy.http.http1 import RequestHead, ResponseHead
    from proxy.lanes import Lane
    from proxy.sm4.sealer import ResponseSealer

BEGUN = Progress.BEGUN
_TAIL, _LAST_TAIL = b"\r\n", b"Connection: close\r\n\r\n"
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = "   JanFebMarAprMayJunJulAugSepOctNovDec"
MESSAGES: dict[Code, str] = {
    "no_upstream": "no endpoint of the pool accepted a connection",
    "upstream_reset": "the upstream closed the connection before its answer was whole",
    "upstream_protocol": "the upstream's answer is not valid HTTP/1.1",
    "upstream_envelope": "the next hop's answer is not the envelope that this request asked for",
    "upstream_timeout": "the upstream sent nothing in time",
    "invalid_request": "the rest of the request's body was malformed, too large or too slow",
    "draining": "this sidecar is shutting down",
    "internal_error": "the sidecar failed; see its log",
}


def http_date(wall_s: float) -> bytes:
    """Return an IMF-fixdate (RFC 9110 section 5.6.7)."""
    t = time.gmtime(wall_s)
    return (
        f"{_DAYS[t.tm_wday]}, {t.tm_mday:02d} {_MONTHS[3 * t.tm_mon :][:3]} {t.tm_year:04d} "
        f"{t.tm_hour:02d}:{t.tm_min:02d}:{t.tm_sec:02d} GMT"
    ).encode()


class Client(Protocol):
    """The client's connection, as a request sees it."""

    door: Literal["app", "sealed"]
    peer: str
    gateway: bool
    deadline_ns: int
    write_paused: bool

    def hold_body(self, *, hold: bool) -> None:
        """Stop or go on reading the request's body."""

    def write(self, data: bytes) -> None:
        """Send answer bytes."""

    def write_all(self, parts: Iterable[bytes]) -> None:
        """Send answer bytes in one call."""

    def unread(self) -> int:
        """Return the answer bytes that the client has not taken."""
        ...

    def lendable(self) -> int:
        """Return the descriptor if nothing waits to be written, -1 otherwise."""
        ...

    def hand_over(self) -> tuple[asyncio.Transport, bytes]:
        """Give the transport away, and the bytes that came after the request."""
        ...

    def must_close(self) -> bool:
        """Say whether the connection closes after this answer."""
        ...

    def reply(
        self, problem: RequestError, *, keep: bool, extra: bytes = b"", bodiless: bool = False
    ) -> None:
        """Send a whole answer of our own in clear and end the exchange."""

    def answer_done(self, *, keep: bool) -> None:
        """Go on to the next request, or close."""

    def cut(self, *, reset: bool) -> None:
        """End the connection at once."""


class Replier(Observation):
    """The layer that answers. `sealer` is set once the request's envelope was opened."""

    context: Context
    downstream: Client
    request: RequestHead
    lane: Lane  # set by admission, before anything is answered but a refusal in clear
    sealer: ResponseSealer | None = None
    answer: Answer | None = None
    _collected: list[bytes] | None = None  # an answer that has to be whole first
    _collected_bytes = 0
    _out: list[bytes]  # one write for all that one read of the upstream gave

    # -- an upstream's answer

    def answer_begins(self, head: ResponseHead) -> None:
        """Choose the form; write the head unless the body has to be whole first."""
        if self.sealer is not None:
            if head.bodiless or not self.event_stream:
                self._collected = []
                return
            accept = self.request.fields.get(b"accept", b"")
            self._begin_stream(self.sealer, as_events=b"text/event-stream" in accept.lower())
        elif head.bodiless:
            # RFC 9110 section 8.6: no Content-Length in a 204.
            self._begin(head, Bodiless(None if head.status == 204 else head.content_length))
        elif self.needs_whole_answer:
            self._collected = []
        elif head.content_length is None or (self.changes_length and self.event_stream):
            self._begin(head, unlengthed(self.request.minor))
        else:
            self._begin(head, Lengthed(head.content_length))

    def answer_whole(self, head: ResponseHead, body: bytes) -> None:
        """Write an answer in clear that is there as a whole."""
        self.progress = BEGUN
        self._out.append(self._clear_head(head, b"Content-Length: %d\r\n" % len(body), body))

    def _begin(self, head: ResponseHead, answer: Answer) -> None:
        self.answer = answer
        self.progress = BEGUN
        self._out.append(self._clear_head(head, answer.framing()))

    def _clear_head(self, head: ResponseHead, framing: bytes, body: bytes = b"") -> bytes:
        fields, dispatch_ns = self.lane.answer_fields, self.dispatch_ns
        return answer_head(
            head.status,
            head.reason,
            head.lines,
            framing,
            self.stream_fields + fields if self.event_stream else fields,
            self.trace_id,
            dispatch_ns - self.start_ns,
            self.context.clock.mono_ns() - dispatch_ns,
            _LAST_TAIL if self._must_close() else _TAIL,
            body,
        )

    def switch_head(self, head: ResponseHead) -> bytes:
        """Return the head that tells the client of a tunnel (RFC 9110 section 15.2.2)."""
        self.progress = BEGUN
        return b"HTTP/1.1 101 %b\r\n%bConnection: upgrade\r\nUpgrade: %b\r\n%b\r\n" % (
            head.reason,
            head.lines,
            head.upgrade or b"",
            self.own_fields(),
        )

    def _begin_stream(self, sealer: ResponseSealer, *, as_events: bool) -> None:
        stream = sealer.stream(
            self.status,
            self.content_type,
            nonce=os.urandom(12),
            now_ms=self.context.clock.wall_ms(),
            carrier="sse" if as_events else "raw",
        )
        answer = self.answer = SealedStream(stream, unlengthed(self.request.minor))
        self.progress = BEGUN
        head = self._sealed_head(answer.framing(), event_stream=as_events)
        self._out.append(head + answer.start())

    def _sealed_head(self, framing: bytes, *, event_stream: bool) -> bytes:
        return b"".join(
            (
                b"HTTP/1.1 200 OK\r\n",
                sealed_fields(event_stream=event_stream),
                framing,
                self.own_fields(),
                b"Connection: close\r\n\r\n" if self._must_close() else b"\r\n",
            )
        )

    def answer_data(self, data: bytes) -> None:
        """Write body bytes, or hold them until the body is whole."""
        answer = self.answer
        if answer is not None:
            if data:
                self._out.append(answer.data(data))
            return
        assert self._collected is not None, "body before head"
        self._collected.append(data)
        self._collected_bytes += len(data)
        whole = self.needs_whole_answer and self._collected_bytes <= WHOLE_ANSWER_BYTES
        if self.sealer is not None and self._collected_bytes > SINGLE_BYTES_MAX and not whole:
            self._overflow(self.sealer, b"".join(self._collected))
        elif self.sealer is None and self._collected_bytes > WHOLE_ANSWER_BYTES:
            # Too large to hold: it goes on as it is, with the ids that were asked for.
            collected, self._collected = self._collected, None
            head = self.answer_head
            assert head is not None
            length = head.content_length
            self._begin(
                head, unlengthed(self.request.minor) if length is None else Lengthed(length)
            )
            self._out.append(b"".join(map(self._begun().data, collected)))

    def _begun(self) -> Answer:
        assert self.answer is not None
        return self.answer

    def _overflow(self, sealer: ResponseSealer, data: bytes) -> None:
        """Too large for a single envelope: a stream of raw frames instead."""
        self._collected = None
        self._begin_stream(sealer, as_events=False)
        self._out.append(self._begun().data(data))

    def answer_ends(self) -> None:
        """Write the regular end."""
        if self.answer is None:
            assert self._collected is not None, "end before head"
            body = self.without_ids(b"".join(self._collected))
            self._collected = None
            self._whole(body)
            return
        answer = self.answer
        rest = self.observe_end()
        tail = (answer.data(rest) if rest else b"") + answer.end()
        if tail:
            self._out.append(tail)

    def _whole(self, body: bytes) -> None:
        head = self.answer_head
        assert head is not None
        if self.sealer is None:
            self.answer_whole(head, body)
            return
        try:
            self._single(self.sealer, head.status, self.content_type, body)
        except SingleTooLargeError:
            self._overflow(self.sealer, body)
            self._out.append(self._begun().end())

    def _single(self, sealer: ResponseSealer, status: int, kind: str, body: bytes) -> None:
        now_ms = self.context.clock.wall_ms()
        sealed = sealer.single(status, kind, body, nonce=os.urandom(12), now_ms=now_ms)
        framing = b"Content-Length: %d\r\n" % len(sealed)
        self.progress = BEGUN
        self._out.append(self._sealed_head(framing, event_stream=False) + sealed)

    def flush(self) -> None:
        """Write what is held for one write."""
        out = self._out
        if not out:
            return
        self._out = []
        if len(out) == 1:
            self.downstream.write(out[0])
        else:
            self.downstream.write_all(out)

    # -- answers and endings of our own

    def reply(self, problem: RequestError, *, keep: bool) -> None:
        """Write a whole answer of our own and end the exchange on the connection."""
        if self.sealer is not None:
            self._single(self.sealer, problem.kind.status, "application/json", problem.body())
            self.hand_back(keep=keep)
            return
        extra = self.own_fields() if self.trace_id else b""
        if problem.kind.code == "envelope_stale":
            extra += b"Date: %b\r\n" % http_date(self.context.clock.wall_ms() / 1000)
        self.downstream.reply(
            problem,
            keep=keep and bool(self.request.minor),
            extra=extra,
            bodiless=self.request.method == b"HEAD",
        )

    def error_event(self, code: Code) -> None:
        """End a begun event stream between two events: one error event, then the regular end."""
        answer = self._begun()
        event = b"data: " + error_body(ERRORS[code], MESSAGES[code]) + b"\n\n"
        self._out.append(answer.data(event) + answer.end())

    @property
    def ends_by_close(self) -> bool:
        """Say whether only the connection's end tells the client that the answer is whole."""
        return self.answer is not None and self.answer.ends_by_close

    def hand_back(self, *, keep: bool = True) -> None:
        """Hand the connection back for the next request, or close it."""
        self.flush()
        keep = keep and not self.ends_by_close and not self._must_close()
        self.downstream.answer_done(keep=keep)

    def _must_close(self) -> bool:
        return not self.request.minor or self.downstream.must_close()

    def own_fields(self) -> bytes:
        """Return the fields that every answer of a classed request carries."""
        if not self.trace_id:
            return b""  # refused before it was classed
        queue_ns = upstream_ns = 0
        if self.dispatch_ns:
            queue_ns = self.dispatch_ns - self.start_ns
            upstream_ns = self.context.clock.mono_ns() - self.dispatch_ns
        return own_fields(self.lane.answer_fields, self.trace_id, queue_ns, upstream_ns)
