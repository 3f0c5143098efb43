"""Sealing a request on the way out: what goes into the envelope, what stands outside.

The layer between taking a request and sending it on, for pools that seal (`pools.*.seal`). Each
attempt is sealed anew, when its endpoint is chosen and its connection leased. Nothing of the
client's head goes on but method, target, type and class, which the envelope holds, and the few
fields that an envelope's outside may have (docs/envelope.md, "On the way out").

The model's name stands outside, so a body that may name one is held until it is whole; what is
above `limits.collect_bytes` counts against `limits.sealing_bytes`.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from proxy.attempt import SealedAttempt
from proxy.errors import RequestError
from proxy.http.body import BodyError, model_of
from proxy.reception import Reception
from proxy.sm4.caller import Recipient, accept
from proxy.sm4.cipher import NONCE_BYTES
from proxy.sm4.envelope import MEDIA_TYPE, RequestPrelude, media_type
from proxy.sm4.keyring import is_id
from proxy.sm4.sealer import RequestSealer, SingleTooLargeError

if TYPE_CHECKING:
    from proxy.exchange import End
    from proxy.http.http1 import ResponseHead
    from proxy.qos.pools import Endpoint
    from proxy.sm4.sealer import StreamSealer
    from proxy.upstream import UpstreamConnection

_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"

log = logging.getLogger(__name__)


class ToSeal:
    """What each attempt seals. `head`: the outer lines that are the same for all of them."""

    __slots__ = ("body", "head", "model", "prelude")

    def __init__(self, prelude: RequestPrelude, model: str, head: bytes, body: bytes) -> None:
        self.prelude: Final = prelude
        self.model: Final = model
        self.head: Final = head
        self.body: Final = body


def names_model(content_type: str) -> bool:
    """Say whether bodies of this type can name a model (docs/envelope.md, "Header")."""
    kind = media_type(content_type)
    return kind == "application/json" or kind.endswith("+json") or kind == "multipart/form-data"


def sealable(
    method: bytes, target: bytes, content_type: bytes, qos: str, body: bytes
) -> tuple[RequestPrelude, str]:
    """Return prelude and model; raises RequestError for what cannot stand in an envelope."""
    kind = content_type.decode("latin-1")
    try:
        model = model_of(body, kind)
    except BodyError as problem:
        raise RequestError(
            "invalid_request", f"the request cannot be sealed: {problem}", param="model"
        ) from None
    if not is_id(model, empty=True):
        raise RequestError(
            "invalid_request",
            "the request cannot be sealed: its model's name is not at most 255 printable "
            "characters without space",
            param="model",
        )
    prelude = RequestPrelude(method.decode("latin-1"), target.decode("latin-1"), kind, qos)
    try:
        prelude.encode()
    except ValueError:
        raise RequestError(
            "invalid_request",
            "the request cannot be sealed: its method, target or Content-Type cannot stand in "
            "an envelope",
        ) from None
    return prelude, model


class Outbound(Reception):
    """The layer that seals what goes on. Raises RequestError where that cannot be done."""

    _to_seal: ToSeal | None = None
    _attempt: SealedAttempt | None = None
    _sealing_held = 0  # of `limits.sealing_bytes`
    _streaming = False
    _body_whole = False
    _connection: UpstreamConnection | None = None
    _pieces: list[bytes]  # of a body that waits: to be whole, or for a connection

    # -- before an endpoint is chosen

    def hold_to_seal(self) -> bool:
        """Hold a body above `limits.collect_bytes` until it is whole; False: it streams through.

        Raises RequestError.
        """
        lane, context = self.lane, self.context
        if lane.seals and not names_model(self._kind().decode("latin-1")):
            return False
        size = self.request_body_bytes - self._sealing_held
        if not context.sealing.take(size):
            context.counters.limit_hits["limits.sealing_bytes"] += 1
            raise RequestError(
                "envelope_busy", "too many large bodies wait to be sealed (limits.sealing_bytes)"
            )
        self._sealing_held += size
        return True

    def prepare_to_seal(self, body: bytes) -> None:
        """Take a request that is whole, or the head of one that streams. Raises RequestError."""
        request = self.request
        if self._intake is None:
            coding = request.fields.get(b"content-encoding")
            if coding is not None and coding.lower() != b"identity":
                raise RequestError(
                    "invalid_request",
                    "the request cannot be sealed: an envelope does not say Content-Encoding",
                    param="Content-Encoding",
                )
            if b"content-type" in request.repeated:
                raise RequestError(
                    "invalid_request",
                    "the request cannot be sealed: Content-Type came twice",
                    param="Content-Type",
                )
        kind = self._kind() if body or self._streaming else b""
        prelude, model = sealable(self.method, self.target, kind, self.lane.qos, body)
        self._to_seal = ToSeal(prelude, model, self._outer_lines(model), body)

    def _kind(self) -> bytes:
        intake = self._intake
        if intake is not None:
            return intake.content_type
        return self.request.fields.get(b"content-type", b"")

    def _outer_lines(self, model: str) -> bytes:
        fields = self.request.fields
        path = self.target.partition(b"?")[0].partition(b"#")[0]
        lines = [b"POST %b HTTP/1.1\r\nContent-Type: %b\r\n" % (path, MEDIA_TYPE.encode())]
        if model:
            lines.append(b"X-Model-Id: %b\r\n" % model.encode())
        lines.append(b"traceparent: %b\r\n" % self.traceparent)
        if self.joined and b"tracestate" in fields:
            lines.append(b"tracestate: %b\r\n" % fields[b"tracestate"])
        if b"x-request-id" in fields:
            lines.append(b"X-Request-Id: %b\r\n" % fields[b"x-request-id"])
        return b"".join(lines)

    # -- one attempt

    def send_sealed(self, connection: UpstreamConnection, now_ns: int) -> None:
        """Seal the request to the endpoint that was chosen, and write it."""
        context, job, endpoint = self.context, self._to_seal, connection.endpoint
        recipient = self._recipient(endpoint)
        if job is None or recipient is None:
            self._unsent(connection, "the pool's settings changed while it waited; try again")
            return
        now_ms = context.clock.sealing_ms()
        derived = recipient.key(now_ms)
        if derived is None:
            name = f"pools.{self.lane.route.name}.seal.keys"
            due = context.alarms.note("no_sealing_key", endpoint.url, context.clock.mono_ns())
            if due is not None:
                context.counters.alarms += 1
                log.error("%s: no key is valid now, or all are spent: %s", name, endpoint.url)
            self._unsent(connection, f"no key to seal with is valid now ({name})")
            return
        seal = self.lane.route.settings.seal
        sealer = RequestSealer(
            derived,
            model=job.model,
            mac=seal.mac,
            nonce=os.urandom(NONCE_BYTES),
            now_ms=now_ms,
            signer=derived.signer() if seal.sign else None,
        )
        pool, counts = self.lane.route.name, context.counters.requests_sealed
        counts[pool] = counts.get(pool, 0) + 1
        if self._intake is None:
            key = derived.key
            self.envelope = key.kid.hex(), key.suite, sealer.signed, sealer.mac
        self._attempt = attempt = SealedAttempt(self, connection, sealer, self.method)
        connection.lessee = attempt
        self.downstream.deadline_ns = now_ns + context.times.first_byte_ns
        if self._streaming:
            self._send_stream(attempt, connection, sealer.stream(job.prelude))
            return
        try:
            sealed = sealer.single(job.prelude, job.body)
        except SingleTooLargeError:
            stream = sealer.stream(job.prelude)
            attempt.send_whole(self._outer(_CHUNKED, endpoint), stream, job.body, derived.key.pad)
            return
        transport = connection.transport
        assert transport is not None, "leased after it was lost"
        length = b"Content-Length: %d\r\n\r\n" % len(sealed)
        transport.write(self._outer(length, endpoint) + sealed)
        if transport.is_closing():  # the peer had reset it: nothing was taken
            connection.write_failed = True
        connection.request_whole = True

    def _send_stream(
        self, attempt: SealedAttempt, connection: UpstreamConnection, stream: StreamSealer
    ) -> None:
        pieces, self._pieces = self._pieces, []
        outer = self._outer(_CHUNKED, connection.endpoint)
        attempt.send_begins(outer, stream, b"".join(pieces))
        if self._body_whole:
            attempt.send_piece(b"", last=True)
            self.request_sent(connection)
        elif not connection.write_paused:
            self.downstream.hold_body(hold=False)

    def send_sealed_piece(self, data: bytes) -> None:
        """Send more of a body that streams through, or keep it until there is a connection."""
        connection, attempt = self._connection, self._attempt
        if connection is None or attempt is None:
            if data:
                self._pieces.append(data)
            return
        attempt.send_piece(data, last=self._body_whole)
        if self._body_whole:
            self.request_sent(connection)

    def request_sent(self, connection: UpstreamConnection) -> None:
        """Note that the last byte of the request was written."""
        connection.request_whole = True
        context = self.context
        self.downstream.deadline_ns = context.clock.mono_ns() + context.times.first_byte_ns

    def _recipient(self, endpoint: Endpoint) -> Recipient | None:
        """Return whom to seal to there; an endpoint may be newer than this request's settings."""
        route = self.lane.route
        found = route.recipients.get(endpoint.url)
        if found is None:
            found = self.context.current.context.routes[route.name].recipients.get(endpoint.url)
        return found

    def _outer(self, framing: bytes, endpoint: Endpoint) -> bytes:
        """Return the outer head of one attempt."""
        job, lane, fields = self._to_seal, self.lane, self.request.fields
        assert job is not None
        address = endpoint.address
        host = lane.host
        if not host:
            host = b"localhost" if isinstance(address, str) else b"%b:%d" % _authority(address)
        asked = fields.get(b"accept", b"").decode("latin-1")
        events = lane.route.settings.seal.events
        return b"%bHost: %b\r\nAccept: %b\r\n%b" % (
            job.head,
            host,
            accept(asked, events=events).encode("latin-1"),
            framing,
        )

    def _unsent(self, connection: UpstreamConnection, why: str) -> None:
        """End the exchange: it cannot be sealed to that endpoint."""
        self._connection = None
        connection.give_back()
        self.refuse(RequestError("no_upstream", why), keep=True)

    # -- what an attempt tells

    def answer_comes(self) -> None:
        """Note progress of an answer that is released when it is whole."""
        if not self.downstream.write_paused:
            context = self.context
            soon_ns = context.clock.mono_ns() + context.times.stream_idle_ns
            self.downstream.deadline_ns = max(self.downstream.deadline_ns, soon_ns)

    def answer_refused(self, endpoint: Endpoint, reason: str) -> None:
        """Count an answer that is no envelope for its request; log it where `alarms` says so."""
        context = self.context
        row, failures = (self.lane.route.name, reason), context.counters.answer_failures
        failures[row] = failures.get(row, 0) + 1
        due = context.alarms.note(f"answer:{reason}", endpoint.url, context.clock.mono_ns())
        if due is not None:
            context.counters.alarms += 1
            log.warning("answers refused: reason=%s endpoint=%s count=%d", reason, *due)

    def give_back_sealing(self) -> None:
        """Give the held bytes back; the attempt is over."""
        self._attempt = None
        if self._sealing_held:
            self.context.sealing.give_back(self._sealing_held)
            self._sealing_held = 0

    # -- what `Dispatch` and `Relay` do

    def no_envelope(self, problem: RequestError, *, fault: bool) -> None:
        """End the exchange for an answer that is no envelope."""

    def upstream_head(self, head: ResponseHead) -> None:
        """See `Lessee`."""

    def upstream_whole(self, head: ResponseHead, body: bytes) -> None:
        """See `Lessee`."""

    def upstream_body(self, data: bytes) -> None:
        """See `Lessee`."""

    def upstream_pause(self) -> None:
        """See `Lessee`."""

    def upstream_end(self) -> None:
        """See `Lessee`."""

    def upstream_lost(self, end: End, *, answered: bool, unwritten: bool) -> None:
        """See `Lessee`."""

    def upstream_writable(self, *, writable: bool) -> None:
        """See `Lessee`."""


def _authority(address: tuple[str, int]) -> tuple[bytes, int]:
    host, port = address
    return (f"[{host}]" if ":" in host else host).encode(), port
