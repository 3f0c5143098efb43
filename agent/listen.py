"""Listening sockets of the agent and the connection class on top of uvicorn's.

uvicorn's HTTP/1.1 protocol has no bound on how long a head may take and answers a malformed one in
plain text; this subclass bounds both, counts connections, and lets a handler see its connection
(to tell a trusted peer, and to drop one that does not read).
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from agent.errors import CONNECTION_LIMIT, INVALID
from proxy.config import split_address
from proxy.errors import REASON_PHRASES, ErrorKind, error_body

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

HEAD_BYTES = 64 << 10
SLICE_BYTES = 8 << 10
SLICE_LINES = 1024
UNREAD_BYTES = 1 << 20
_SOCKET_MODE = 0o660  # the file's group may connect; belief is another matter (peer uid)


class ListenError(Exception):
    """An address cannot be listened on; the message names it and the setting."""


def open_tcp(address: str, setting: str, backlog: int) -> socket.socket:
    """Return a listening socket; raises `ListenError`."""
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle off only where the protocol is named; with it every answer waits 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(backlog)
    except OSError as problem:
        sock.close()
        raise ListenError(_why(address, setting, problem)) from None
    sock.setblocking(False)
    return sock


def open_unix(path: str, setting: str, backlog: int) -> socket.socket:
    """Return a listening unix socket, in place of one that a dead process left behind."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(path)
        except OSError as problem:
            if problem.errno != errno.EADDRINUSE or _is_taken(path):
                raise
            Path(path).unlink()
            sock.bind(path)
        Path(path).chmod(_SOCKET_MODE)
        sock.listen(backlog)
    except OSError as problem:
        sock.close()
        raise ListenError(_why(path, setting, problem)) from None
    sock.setblocking(False)
    return sock


def _is_taken(path: str) -> bool:
    """Say whether what lies at `path` must be left alone: a living socket, or no socket at all."""
    if not Path(path).is_socket():
        return True
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # something is there that is not ours to remove
        return True


def _why(address: str, setting: str, problem: OSError) -> str:
    if problem.errno == errno.EADDRINUSE:
        return f"{setting}: {address} is in use"
    return f"{setting}: cannot listen on {address}: {problem.strerror or problem}"


def peer_uid(transport: asyncio.Transport | None) -> int | None:
    """Return the uid at the other end of a unix socket; None for any other connection."""
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family != socket.AF_UNIX:
        return None
    with contextlib.suppress(OSError):
        # struct ucred of unix(7): pid, uid, gid.
        size = struct.calcsize("3i")
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return int(struct.unpack("3i", raw)[1])
    return None


@dataclass(slots=True)
class DoorLimits:
    """What one connection may do, and who is told when it hits a limit."""

    connections: int
    head_s: float
    on_limit: Callable[[str], None]
    on_count: Callable[[int], None]
    on_error: Callable[[str], None]


class _Door(H11Protocol):
    limits: DoorLimits
    _head_timer: asyncio.TimerHandle | None = None
    _unread: bytearray

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unread = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "transport": transport}
        self.limits.on_count(len(self.connections))
        if len(self.connections) > self.limits.connections:
            self.limits.on_limit("connections")
            message = f"{self.limits.connections} connections are open (agent.connections)"
            self._refuse(CONNECTION_LIMIT, message, b"retry-after: 1\r\n")
            return
        self._head_timer = self.loop.call_later(self.limits.head_s, self._head_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unread.clear()
        self._stop_head_timer()
        super().connection_lost(exc)
        self.limits.on_count(len(self.connections))

    def data_received(self, data: bytes) -> None:
        """Take what has arrived, a slice a turn of the loop where it has very many lines.

        A quarter MiB of chunks of one byte would hold everybody up for most of a second.
        """
        if self._unread:
            self._unread += data
            if len(self._unread) > UNREAD_BYTES:
                self.eof_received()
            else:
                self.transport.pause_reading()
        elif len(data) > SLICE_BYTES and data.count(b"\n") > SLICE_LINES:
            self._unread += data
            self._take_slice()
        else:
            self._take(data)

    def eof_received(self) -> None:
        """Take what is left at once: nothing may overtake it."""
        if self._unread:
            data = bytes(self._unread)
            self._unread.clear()
            self._take(data)

    def _take_slice(self) -> None:
        data = bytes(self._unread[:SLICE_BYTES])
        del self._unread[:SLICE_BYTES]
        if not data:
            return  # the connection is lost, or it has ended
        self._take(data)
        if self._unread:
            # uvicorn reads on when the application has taken its part; not before this is in.
            self.transport.pause_reading()
            self.loop.call_soon(self._take_slice)
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def _take(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._answering():
            self._stop_head_timer()
        elif self._head_timer is None and not self.transport.is_closing():
            # Part of the next head, or the rest of a body that was answered early.
            self._head_timer = self.loop.call_later(self.limits.head_s, self._head_late)

    def _answering(self) -> bool:
        cycle = cast("RequestResponseCycle | None", self.cycle)  # None before the first head
        return cycle is not None and not cycle.response_complete

    def send_400_response(self, msg: str) -> None:
        """Answer a head that is no HTTP/1.1 (RFC 9112), in the form every error has."""
        if self._answering():
            self.transport.close()  # junk behind a request that is being answered
            return
        self._refuse(INVALID, msg, b"")

    def _refuse(self, kind: ErrorKind, message: str, extra: bytes) -> None:
        body = error_body(kind, message)
        self.limits.on_error(kind.code)
        self.transport.write(
            f"HTTP/1.1 {kind.status} {REASON_PHRASES[kind.status]}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n".encode()
            + extra
            + b"\r\n"
            + body
        )
        self.transport.close()

    def _head_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.limits.on_limit("head_s")
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def door(limits: DoorLimits) -> type[asyncio.Protocol]:
    """Return the connection class for uvicorn, bound to `limits`."""
    return type("Door", (_Door,), {"limits": limits})


def transport_of(scope: Any) -> asyncio.Transport | None:
    """Return the connection of an ASGI scope that came through `door`."""
    # uvloop's transports are no subclass of asyncio's; they only behave alike.
    return cast("asyncio.Transport | None", scope.get("state", {}).get("transport"))
