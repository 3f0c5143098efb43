"""How an answer is written to the client: in clear or sealed, by length, in chunks, or to the end.

Each class turns body bytes into the bytes of the HTTP message. Pure: nonces and times are
arguments. A `head` is written once, before anything else; `end` once, after everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import wire
from proxy.errors import REASON_PHRASES
from proxy.http.chunked import LAST_CHUNK, frame

if TYPE_CHECKING:
    from proxy.errors import RequestError
    from proxy.sm4.sealer import StreamSealer

ENVELOPE_TYPE = b"application/x-sm4-envelope"
_SEALED_COMMON = b"Cache-Control: no-store, no-transform\r\nX-Accel-Buffering: no\r\n"


class Answer:
    """One way to write an answer; this one: a body in clear, as it comes."""

    ends_by_close = False  # True: only the connection's end delimits it

    def framing(self) -> bytes:
        """Return the header fields that say where the body ends: none."""
        return b""

    def start(self) -> bytes:
        """Nothing."""
        return b""

    def data(self, body: bytes) -> bytes:
        """The bytes themselves."""
        return body

    def end(self) -> bytes:
        """Nothing."""
        return b""


class Lengthed(Answer):
    """A body whose length is known."""

    def __init__(self, length: int) -> None:
        self._length = length

    def framing(self) -> bytes:
        """Content-Length."""
        return b"Content-Length: %d\r\n" % self._length


class Bodiless(Answer):
    """An answer to HEAD, 204 or 304; `length` is what a GET would have sent, if known."""

    def __init__(self, length: int | None) -> None:
        self._length = length

    def framing(self) -> bytes:
        """Content-Length where the upstream gave one."""
        return b"" if self._length is None else b"Content-Length: %d\r\n" % self._length

    def data(self, body: bytes) -> bytes:
        """Nothing: there is no body."""
        del body
        return b""


class Chunked(Answer):
    """A body of unknown length to an HTTP/1.1 client."""

    def framing(self) -> bytes:
        """Transfer-Encoding."""
        return b"Transfer-Encoding: chunked\r\n"

    def data(self, body: bytes) -> bytes:
        """One chunk."""
        return frame(body)

    def end(self) -> bytes:
        """The last chunk."""
        return LAST_CHUNK


class UntilClose(Answer):
    """A body of unknown length to an HTTP/1.0 client (RFC 9112 section 6.3, rule 8)."""

    ends_by_close = True


class SealedStream(Answer):
    """Frames of an envelope, in an event stream or raw, inside another answer form."""

    def __init__(self, sealer: StreamSealer, outer: Chunked | UntilClose) -> None:
        self._sealer = sealer
        self._outer = outer
        self.ends_by_close = outer.ends_by_close

    def framing(self) -> bytes:
        """Return the outer form's."""
        return self._outer.framing()

    def start(self) -> bytes:
        """Return the envelope's header; the prelude goes with the first data."""
        return self._outer.data(self._sealer.head())

    def data(self, body: bytes) -> bytes:
        """One or more frames."""
        return self._outer.data(self._sealer.data(body))

    def end(self) -> bytes:
        """Return the last frame, then the outer end."""
        return self._outer.data(self._sealer.last()) + self._outer.end()


def sealed_fields(*, event_stream: bool) -> bytes:
    """Return the outer header fields of a sealed answer: hints only, none from the upstream."""
    kind = b"text/event-stream" if event_stream else ENVELOPE_TYPE
    return b"Content-Type: " + kind + b"\r\n" + _SEALED_COMMON


def unlengthed(minor: int) -> Chunked | UntilClose:
    """Return the form for a body of unknown length to an HTTP/1.`minor` client."""
    return Chunked() if minor else UntilClose()


def _milliseconds(ns: int) -> bytes:
    """Return ms with three digits, rounded to the nearest us."""
    us = (ns + 500) // 1000
    return b"%d.%03d" % (us // 1000, us % 1000)


def own_fields(fields: bytes, trace_id: str, queue_ns: int, upstream_ns: int) -> bytes:
    """Return the field lines of every answer of a classed request; `fields` ends in a name."""
    return b"%b%b\r\nServer-Timing: queue;dur=%b, upstream;dur=%b\r\n" % (
        fields,
        trace_id.encode(),
        _milliseconds(queue_ns),
        _milliseconds(upstream_ns),
    )


def _answer_head(
    status: int,
    reason: bytes,
    lines: bytes,
    framing: bytes,
    fields: bytes,
    trace_id: str,
    queue_ns: int,
    upstream_ns: int,
    tail: bytes,
    body: bytes,
) -> bytes:
    """Return the head of an upstream's answer for the client, and the `body` that is here."""
    own = own_fields(fields, trace_id, queue_ns, upstream_ns)
    return b"HTTP/1.1 %d %b\r\n%b%b%b%b%b" % (status, reason, lines, framing, own, tail, body)


answer_head = wire.answer_heads(_answer_head)


def own_answer(problem: RequestError, *, extra: bytes, close: bool, bodiless: bool) -> bytes:
    """Return a whole answer of our own in clear; `extra` are field lines."""
    kind = problem.kind
    body = problem.body()
    retry = b"Retry-After: %d\r\n" % problem.retry_after_s if kind.status in {429, 503} else b""
    if not problem.retry_helps:
        retry += b"x-should-retry: false\r\n"
    return (
        b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        b"X-Tongguan-Error: %b\r\n%b%b%b\r\n%b"
        % (
            kind.status,
            REASON_PHRASES[kind.status].encode(),
            len(body),
            kind.code.encode(),
            retry,
            b"Connection: close\r\n" if close else b"",
            extra,
            b"" if bodiless else body,
        )
    )
