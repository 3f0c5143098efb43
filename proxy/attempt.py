"""One attempt at a sealed request: the lessee of its connection, between that and the relay.

It writes the envelope and opens what comes back; to the relay the answer looks as if it had come in
clear. Whatever is no envelope for this request ends the exchange and yields no content. A retry is
another attempt, with an envelope of its own.

Bounds: of a body that is here as a whole, what is sealed ahead is what the socket takes and one
piece more; of an answer, a single envelope or one frame is held (`sm4.answer`), of an unsealed one
`CLEAR_BYTES_MAX`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from proxy.errors import RequestError
from proxy.exchange import End
from proxy.http.chunked import LAST_CHUNK, frame
from proxy.http.http1 import ResponseHead
from proxy.sm4.caller import CLEAR_BYTES_MAX, answer_opener, clear_code, pieces
from proxy.sm4.envelope import EnvelopeError, ResponsePrelude

if TYPE_CHECKING:
    from collections.abc import Iterator

    from proxy.outbound import Outbound
    from proxy.qos.pools import Endpoint
    from proxy.sm4.answer import AnswerOpener
    from proxy.sm4.sealer import RequestSealer, StreamSealer
    from proxy.upstream import UpstreamConnection

# Fields outside the answer's envelope that go on to the client: hints, whoever wrote them.
_HINTS = re.compile(
    rb"(?im)^(?:date|retry-after|server-timing|x-request-id|x-should-retry"
    rb"|x-tongguan-upstream-error):[^\r\n]*\r\n"
)
_NOTHING: frozenset[bytes] = frozenset()
# Codes of the next hop with which trying again cannot help.
_FINAL = frozenset(("payload_too_large", "headers_too_large", "envelope_rejected"))


class SealedAttempt:
    """See the module. A `Lessee`."""

    def __init__(
        self,
        relay: Outbound,
        connection: UpstreamConnection,
        sealer: RequestSealer,
        method: bytes,
    ) -> None:
        self.method = b"POST"  # how the connection reads the answer's head
        self._relay = relay
        self._connection = connection
        self._sealer = sealer
        self._asked = method
        self._stream: StreamSealer | None = None
        self._rest: Iterator[bytes] | None = None  # of a body that is here as a whole
        self._next = b""
        self._outer: ResponseHead | None = None
        self._opener: AnswerOpener | None = None
        self._clear = b""
        self._begun = False

    # -- the request

    def send_whole(self, head: bytes, stream: StreamSealer, body: bytes, pad: int) -> None:
        """Send a large body that is here, as fast as the connection takes it."""
        self._stream = stream
        self._rest = pieces(pad, body)
        self._next = next(self._rest)
        self._connection.write(head + frame(stream.head()))
        self._pump()

    def send_begins(self, head: bytes, stream: StreamSealer, data: bytes) -> None:
        """Send the beginning of a body that streams through."""
        self._stream = stream
        self._connection.write(head + frame(stream.head()) + frame(stream.data(data)))

    def send_piece(self, data: bytes, *, last: bool) -> None:
        """Send more of a body that streams through."""
        stream = self._stream
        assert stream is not None, "a piece before the beginning"
        if last:
            self._connection.write(frame(stream.last(data)) + LAST_CHUNK)
        elif data:
            self._connection.write(frame(stream.data(data)))

    def _pump(self) -> None:
        connection, stream, rest = self._connection, self._stream, self._rest
        assert stream is not None
        while rest is not None and not connection.write_paused:
            data = self._next
            self._next = next(rest, b"")
            if self._next:
                connection.write(frame(stream.data(data)))
            else:
                rest = self._rest = None
                connection.write(frame(stream.last(data)) + LAST_CHUNK)
                self._relay.request_sent(connection)

    # -- what the connection tells

    def upstream_ready(self, connection: UpstreamConnection) -> None:
        """See `Lessee`: the relay itself waits for a connection."""
        raise AssertionError(connection.reused)

    def upstream_refused(self, endpoint: Endpoint) -> None:
        """See `Lessee`: the relay itself waits for a connection."""
        raise AssertionError(endpoint.url)

    def may_switch(self, head: ResponseHead) -> bool:
        """See `Lessee`: an envelope asks for no other protocol."""
        del head
        return False

    def upstream_switches(
        self, connection: UpstreamConnection, head: ResponseHead, early: bytes
    ) -> None:
        """See `Lessee`."""
        del connection, early
        raise AssertionError(head.status)

    def upstream_writable(self, *, writable: bool) -> None:
        """See `Lessee`: go on with a body that is here, or let more of it come."""
        if self._rest is None:
            self._relay.upstream_writable(writable=writable)
        elif writable:
            self._pump()

    def upstream_pause(self) -> None:
        """See `Lessee`."""
        self._relay.upstream_pause()

    def upstream_head(self, head: ResponseHead) -> None:
        """See `Lessee`: of an answer that is not sealed no more than its error code is read."""
        self._outer = head
        fields = head.fields
        kind, coding = fields.get(b"content-type"), fields.get(b"content-encoding")
        try:
            self._opener = answer_opener(
                self._sealer,
                head.status,
                None if kind is None else kind.decode("latin-1"),
                None if coding is None else coding.decode("latin-1"),
            )
        except EnvelopeError as problem:
            self._refuse(problem.reason)
            return
        if self._opener is None and head.status < 400:
            self._refuse_clear()

    def upstream_body(self, data: bytes) -> None:
        """See `Lessee`: hand on what was opened, each frame after its tag."""
        opener, outer = self._opener, self._outer
        assert outer is not None, "body before head"
        if opener is None:
            self._clear += data[:CLEAR_BYTES_MAX]
            if len(self._clear) >= CLEAR_BYTES_MAX:
                self._refuse_clear()
            return
        try:
            released = opener.feed(data)
            if not self._begun:
                prelude = opener.prelude
                if prelude is None:
                    if opener.collecting:
                        self._relay.answer_comes()
                    return
                head = self._inner(prelude, None)
                self._begun = True
                self._relay.upstream_head(head)
        except EnvelopeError as problem:
            self._refuse(problem.reason)
            return
        if released and self._connection.lessee is self:
            self._relay.upstream_body(released[0] if len(released) == 1 else b"".join(released))

    def upstream_whole(self, head: ResponseHead, body: bytes) -> None:
        """See `Lessee`: all of the answer has come at once."""
        self.upstream_head(head)
        opener = self._opener
        if self._relay.closed:
            return
        if opener is None:
            self._clear = body[:CLEAR_BYTES_MAX]
            self._refuse_clear()
            return
        try:
            released = opener.feed(body)
            released.append(opener.finish())
            prelude = opener.prelude
            assert prelude is not None
            inner = b"".join(released)
            self._relay.upstream_whole(self._inner(prelude, len(inner)), inner)
        except EnvelopeError as problem:
            self._refuse(problem.reason)

    def upstream_end(self) -> None:
        """See `Lessee`: the HTTP body has ended; whether the envelope has, is asked here."""
        opener = self._opener
        if opener is None:
            self._refuse_clear()
            return
        try:
            body = opener.finish()
            if self._begun:
                self._relay.upstream_end()
                return
            prelude = opener.prelude
            assert prelude is not None
            head = self._inner(prelude, len(body))
        except EnvelopeError as problem:
            self._refuse(problem.reason)
            return
        self._relay.upstream_whole(head, body)

    def upstream_lost(self, end: End, *, answered: bool, unwritten: bool) -> None:
        """See `Lessee`."""
        if self._outer is not None and self._opener is None:
            self._refuse_clear()
            return
        self._relay.upstream_lost(end, answered=answered, unwritten=unwritten)

    # -- what it means

    def _inner(self, prelude: ResponsePrelude, length: int | None) -> ResponseHead:
        """Return the answer's head as its envelope says it; raises `EnvelopeError`."""
        status, outer = prelude.status, self._outer
        assert outer is not None
        if not 200 <= status <= 599:  # interim answers end nothing; others do not exist
            raise EnvelopeError("bad_prelude")
        fields: dict[bytes, bytes] = {}
        lines = b"".join(_HINTS.findall(outer.lines))
        kind = prelude.content_type.encode()
        if kind:
            fields[b"content-type"] = kind
            lines = b"Content-Type: %b\r\n%b" % (kind, lines)
        return ResponseHead(
            status,
            _phrase(status),
            1,
            length,
            length is None,
            True,
            self._asked == b"HEAD" or status in (204, 304),
            None,
            fields,
            _NOTHING,
            lines,
            0,
        )

    def _refuse(self, reason: str) -> None:
        """End the exchange: what came is no envelope for this request."""
        relay = self._relay
        relay.answer_refused(self._connection.endpoint, reason)
        if reason == "truncated" and self._begun:
            # Like any answer that stops early, whoever has stopped it.
            relay.upstream_lost(End.UPSTREAM_RESET, answered=True, unwritten=False)
            return
        text = f"the next hop's answer is refused: no good envelope ({reason})"
        relay.no_envelope(RequestError("upstream_envelope", text), fault=True)

    def _refuse_clear(self) -> None:
        """End the exchange: the answer is not sealed. Its status and code are hints, no more."""
        relay, outer = self._relay, self._outer
        assert outer is not None
        code = clear_code(self._clear)
        relay.answer_refused(self._connection.endpoint, "unsealed")
        named = f"HTTP {outer.status}" if code is None else f"HTTP {outer.status}, {code}"
        problem = RequestError(
            "upstream_envelope",
            f"the next hop did not answer with an envelope ({named})",
            retry_helps=code not in _FINAL,
        )
        # What the request itself brought about says nothing about who answered.
        own = 400 <= outer.status < 500 and not (code or "").startswith("envelope_")
        relay.no_envelope(problem, fault=not own)


def _phrase(status: int) -> bytes:
    from http import HTTPStatus  # noqa: PLC0415 - with the first answer of a sealed door

    try:
        return HTTPStatus(status).phrase.encode()
    except ValueError:
        return b""
