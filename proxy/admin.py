"""The admin door: livez, readyz, metrics, config, drain, log level, the audit chain's next key.

Runs in a thread with a loop of its own, so that a probe is answered while the data loop is busy or
stuck, which is when it matters. It only reads what the data loop writes; what it changes it hands
over with `call_soon_threadsafe`. Guarded paths answer loopback, or a bearer token compared in
constant time.

Bounds: 64 connections of at most 30 s each, one request of at most 17 KiB on each. A connection
more ends the oldest: those who keep connections open would else keep the kubelet's probes out, and
have the pod restarted.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, cast

import orjson

from proxy.answer import own_answer
from proxy.config import describe, split_address
from proxy.errors import REASON_PHRASES, RequestError
from proxy.http.http1 import HeadError, HeadLimits, RequestHead, parse_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry

    from proxy.health import Health
    from proxy.workers import Siblings

HEAD_LIMITS = HeadLimits(head_bytes=16 << 10, field_bytes=8 << 10, fields=64)
CONNECTIONS_MAX = 64
IDLE_S = 30.0
BODY_BYTES_MAX = 1024
JSON = b"application/json"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
NO_STORE = b"Cache-Control: no-store\r\n"
NOT_FOUND = 404  # the one status here that no error of ours has
LEVELS = ("debug", "info", "warning", "error")

log = logging.getLogger(__name__)


class Admin(asyncio.Protocol):
    """One connection: one request, one answer, close."""

    def __init__(self, door: AdminDoor) -> None:
        self._door = door
        self._buffer = b""
        self._continued = False
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        transport = cast("asyncio.Transport", transport)  # uvloop's are none by inheritance
        self._transport = transport
        self._door.take(self)
        self._timer = asyncio.get_running_loop().call_later(IDLE_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        del exc
        self._door.connections.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()

    def turn_out(self) -> None:
        """End it: another one came, and it is the oldest."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._buffer += data
        transport = self._transport
        assert transport is not None
        head_only = self._buffer.lstrip(b"\r\n").startswith(b"HEAD ")
        try:
            head = parse_request(self._buffer, HEAD_LIMITS)
            if head is None:
                return
            length = head.content_length or 0
            if length > BODY_BYTES_MAX or head.chunked:
                raise RequestError("payload_too_large", "too large")  # noqa: TRY301 - one exit
            if len(self._buffer) - head.size < length:
                if head.expect and not self._continued:
                    self._continued = True
                    transport.write(CONTINUE)
                return
            body = self._buffer[head.size : head.size + length]
            status, kind, answer = self._door.answer(head, body, self._peer(), self._buffer)
        except (HeadError, RequestError) as problem:
            refusal = RequestError(problem.code, str(problem))
            out = own_answer(refusal, extra=NO_STORE, close=True, bodiless=head_only)
        else:
            out = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b%b%b" % (
                status,
                REASON_PHRASES.get(status, "OK").encode(),
                kind,
                len(answer),
                b"X-Tongguan-Error: invalid_request\r\n" if status == NOT_FOUND else b"",
                NO_STORE,
                b"Connection: close\r\n\r\n",
            )
            if not head_only:
                out += answer
        transport.write(out)
        transport.close()

    def _peer(self) -> str:
        assert self._transport is not None
        peer = self._transport.get_extra_info("peername")
        return peer[0] if isinstance(peer, tuple) else ""


class AdminDoor:
    """The door and its thread. `start` returns when it listens."""

    def __init__(
        self,
        health: Health,
        token: bytes,
        on_drain: Callable[[], None],
        on_rotate: Callable[[], bool],
        siblings: Siblings | None = None,
        loop_name: str = "admin",
    ) -> None:
        self._health = health
        self._siblings = siblings
        self._private = False
        self._token = token
        self._on_drain = on_drain
        self._on_rotate = on_rotate
        self._registry: CollectorRegistry | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=loop_name, daemon=True)
        self._server: asyncio.Server | None = None
        self.connections: dict[Admin, None] = {}  # the oldest first

    def take(self, connection: Admin) -> None:
        """Note a connection; beyond the bound the oldest one ends."""
        if len(self.connections) >= CONNECTIONS_MAX:
            oldest = next(iter(self.connections))
            del self.connections[oldest]
            self._health.context.counters.admin_turned_out += 1
            oldest.turn_out()
        self.connections[connection] = None

    def start(self, address: str) -> None:
        """Listen on `host:port` or `unix:/path`, which only this user can reach; raises OSError."""
        if address.startswith("unix:"):
            Path(address.removeprefix("unix:")).unlink(missing_ok=True)  # of one that ended
        self._thread.start()
        opening = self._open(address)
        self._server = asyncio.run_coroutine_threadsafe(opening, self._loop).result()

    async def _open(self, address: str) -> asyncio.Server:
        path = address.removeprefix("unix:")
        if path != address:
            self._private = True
            return await self._loop.create_unix_server(lambda: Admin(self), path)
        host, port = split_address(address)
        return await self._loop.create_server(lambda: Admin(self), host, port, reuse_address=True)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def stop(self) -> None:
        """Close the door and end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(2.0)

    def answer(
        self, head: RequestHead, body: bytes, peer: str, raw: bytes
    ) -> tuple[int, bytes, bytes]:
        """Return (status, content type, body)."""
        path = head.target.partition(b"?")[0]
        get = head.method in (b"GET", b"HEAD")
        if path == b"/livez" and get:
            problems = self._health.dead()
            if self._siblings is not None:
                problems += self._siblings.stuck()
            report = {"live": not problems, "reasons": problems, "lag_ms": self._health.lag_ms()}
            return (503 if problems else 200), JSON, orjson.dumps(report)
        if path == b"/readyz" and get:
            reasons, notes = self._health.unready(), self._health.notes()
            if self._siblings is not None:
                reasons += self._siblings.unready()
                notes += self._siblings.notes()
            ready: dict[str, object] = {"ready": not reasons, "reasons": reasons, "notes": notes}
            ready["keys"] = self._health.kids()
            return (503 if reasons else 200), JSON, orjson.dumps(ready)
        if path == b"/metrics" and get:
            return 200, b"text/plain; version=0.0.4; charset=utf-8", self._metrics()
        if path not in (b"/config", b"/drain", b"/loglevel", b"/audit/rotate"):
            return NOT_FOUND, JSON, RequestError("invalid_request", "no such path").body()
        if not self._allowed(peer, raw[: head.size]):
            raise RequestError("unauthorized", "only from loopback or with the bearer token")
        if path == b"/config" and get:
            return 200, JSON, orjson.dumps(describe(self._health.settings))
        if path == b"/drain" and head.method == b"POST":
            self._on_drain()
            self._tell(head, b"")
            return 200, JSON, b'{"draining":true}'
        if path == b"/audit/rotate" and head.method == b"POST":
            rotating = self._on_rotate()
            self._tell(head, b"")
            if not rotating:
                raise RequestError("audit_unavailable", "there is no chain that can be written now")
            return 200, JSON, b'{"rotating":true}'
        if path == b"/loglevel" and head.method == b"POST":
            level = body.strip().decode("latin-1").lower()
            if level not in LEVELS:
                raise RequestError("invalid_request", "expected one of " + ", ".join(LEVELS))
            logging.getLogger().setLevel(level.upper())
            self._tell(head, level.encode())
            return 200, JSON, orjson.dumps({"level": level})
        raise RequestError("method_not_allowed", "not with this method")

    def _tell(self, head: RequestHead, body: bytes) -> None:
        if self._siblings is not None:
            self._siblings.tell(head.method + b" " + head.target, body)

    def _allowed(self, peer: str, head: bytes) -> bool:
        if self._private:
            return True
        try:
            if ipaddress.ip_address(peer).is_loopback:
                return True
        except ValueError:
            return False
        if not self._token:
            return False
        for row in head.split(b"\r\n"):
            name, _, value = row.partition(b":")
            if name.lower() == b"authorization":
                return hmac.compare_digest(value.strip(), b"Bearer " + self._token)
        return False

    def _metrics(self) -> bytes:
        from prometheus_client import (  # noqa: PLC0415 - only a scrape pays for it
            CollectorRegistry,
            ProcessCollector,
            generate_latest,
        )

        from proxy.scrape import Collector  # noqa: PLC0415

        if self._registry is None:
            self._registry = CollectorRegistry()
            self._registry.register(Collector(self._health.context, self._health.keys))
            ProcessCollector(registry=self._registry)
        text = generate_latest(self._registry)
        return text if self._siblings is None else self._siblings.metrics(text.decode()).encode()
