"""One HTTP exchange of the API: its body read within limits, its answer sent within limits.

A `Call` sends a head once, then parts or one whole body; an error becomes an answer while nothing
has been sent and an event of the stream afterwards. Every wait has a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from agent.answers import event
from agent.errors import DRAINING, QUEUE_FULL, TIMED_OUT, TOO_LARGE, ApiError
from agent.inbox import AbandonedError, Inbox
from agent.listen import transport_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from agent.config import Agent
    from agent.metrics import Metrics, RequestTimes

log = logging.getLogger("tongguan.agent.api")

# An early answer's unread body is read and dropped up to here; beyond it the connection closes.
DISCARD_BYTES = 64 << 20


class ClientGoneError(Exception):
    """The client left before its request was whole."""


@dataclass(slots=True)
class Bodies:
    """How many bytes of bodies are held at the moment, all calls together."""

    held: int = 0


@dataclass(slots=True)
class Call:
    """One request on its way: who asks, and what has been sent."""

    scope: Scope
    receive: Receive
    send: Send
    settings: Agent
    metrics: Metrics
    bodies: Bodies
    inbox: Inbox
    times: RequestTimes
    qos_class: str
    request_id: str
    tenant: str = ""
    begun: bool = field(default=False, init=False)
    close: bool = field(default=False, init=False)
    _held: int = field(default=0, init=False)
    _extra: list[tuple[bytes, bytes]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        # An early answer reads on, so that it is not lost in a reset, but not for ever.
        headers = dict(self.scope["headers"])
        long = int(headers.get(b"content-length", b"0")) > DISCARD_BYTES
        self.close = long or b"transfer-encoding" in headers

    async def read_body(self) -> bytes:
        """Return the whole body; raises `ApiError` (408, 413, 503) and `ClientGoneError`.

        The body counts in `bodies` until `let_go`, which is to be called whatever happens here.
        """
        limit = self.settings.body_bytes
        if int(dict(self.scope["headers"]).get(b"content-length", b"0")) > limit:
            await self._discard()
            raise self._too_large()
        body = bytearray()
        more = True
        while more:
            try:
                async with asyncio.timeout(self.settings.body_idle_s):
                    message: Any = await self.receive()
            except TimeoutError:
                self.metrics.limits.labels("body_idle_s").inc()
                self.close = True
                raise ApiError(
                    TIMED_OUT,
                    f"no part of the body for {self.settings.body_idle_s:g} s (agent.body_idle_s)",
                ) from None
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            piece = message.get("body", b"")
            self._held += len(piece)
            self.bodies.held += len(piece)
            if self.bodies.held > self.settings.bodies_bytes:
                self.metrics.limits.labels("bodies_bytes").inc()
                raise ApiError(QUEUE_FULL, "too many request bytes at once (agent.bodies_bytes)")
            body += piece
            more = message.get("more_body", False)
            if len(body) > limit:
                if more:
                    await self._discard()
                raise self._too_large()
        self.close = False
        return bytes(body)

    async def _discard(self) -> None:
        """Read and drop the rest where the connection closes with the answer.

        Closing over unread bytes resets the connection (RFC 9112 section 9.6), and the answer is
        lost; elsewhere the server reads on behind the answer. At most `DISCARD_BYTES` within
        `body_idle_s`. A client that awaits `100 Continue` sends nothing, and is not to be told to.
        """
        headers = dict(self.scope["headers"])
        closes = self.close or b"close" in headers.get(b"connection", b"").lower()
        if not closes or b"expect" in headers:
            return
        left = DISCARD_BYTES
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.body_idle_s):
                while left > 0:
                    message: Any = await self.receive()
                    left -= len(message.get("body", b""))
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return

    def let_go(self) -> None:
        """Count the body no more: it has become token ids, or an error."""
        self.bodies.held -= self._held
        self._held = 0

    def _too_large(self) -> ApiError:
        self.metrics.limits.labels("body_bytes").inc()
        limit = self.settings.body_bytes
        return ApiError(TOO_LARGE, f"the body has more than {limit} bytes (agent.body_bytes)")

    async def watch(self) -> None:
        """Await the client's end and give up its request, whatever it waits for."""
        while True:
            message: Any = await self.receive()
            if message["type"] == "http.disconnect":
                self.inbox.abandon("gone")
                return

    async def begin(self, status: int, kind: bytes, *, length: int | None = None) -> None:
        """Send the head."""
        headers = [
            (b"content-type", kind),
            (b"x-request-id", self.request_id.encode("latin-1")),
            (b"x-qos-class", self.qos_class.encode()),
            *self._extra,
        ]
        if length is None:
            headers += [
                (b"cache-control", b"no-cache, no-transform"),
                (b"x-accel-buffering", b"no"),
            ]
        else:
            headers.append((b"content-length", str(length).encode()))
        self.begun = True
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def part(self, body: bytes, *, more: bool) -> None:
        """Send a part within `client_stall_s`; raises `AbandonedError`."""
        try:
            async with asyncio.timeout(self.settings.client_stall_s):
                await self.send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            self.metrics.limits.labels("client_stall_s").inc()
            raise AbandonedError("stalled") from None

    async def whole(self, status: int, body: bytes) -> None:
        """Send a JSON answer; raises `AbandonedError`."""
        await self.begin(status, b"application/json", length=len(body))
        await self.part(body, more=False)

    async def fail(self, error: ApiError) -> None:
        """Answer with an error, or end a stream that has begun with an error event."""
        self.metrics.errors.labels(error.kind.code).inc()
        with contextlib.suppress(AbandonedError):
            if self.begun:
                # Never a fabricated [DONE]: the client must see that this is no normal end.
                await self.part(event(orjson.loads(error.body())), more=False)
                return
            if error.kind.status == 503:
                self._extra.append((b"retry-after", str(error.retry_after_s).encode()))
            if self.close:
                self._extra.append((b"connection", b"close"))
            await self.whole(error.kind.status, error.body())

    async def end_abandoned(self, end: AbandonedError) -> None:
        """End a request that nobody wants any more."""
        self.metrics.abandoned.labels(end.why).inc()
        if end.why == "draining":
            await self.fail(ApiError(DRAINING, "the agent is shutting down", retry_after_s=5))
            return
        if end.why == "behind":
            self.metrics.limits.labels("pending_tokens").inc()
        if end.why != "gone":
            log.info("a client does not read; its request %s is ended", self.request_id)
        abort(self.scope)


def abort(scope: Scope) -> None:
    """Drop a connection: close() would wait for a buffer that nobody empties."""
    transport = transport_of(scope)
    if transport is not None:
        transport.abort()
