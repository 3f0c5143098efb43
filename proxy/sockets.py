"""What asyncio has no word for: bytes that the peer has not taken, a peer that left, an end by RST.

Thin and stateless; each works on a transport that may have lost its socket by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import struct
import sys
import termios
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

_RESET = struct.pack("ii", 1, 0)  # linger for 0 s


def descriptor(transport: asyncio.Transport) -> int:
    """Return the socket's descriptor; -1 when it is closed or closing."""
    endpoint = transport.get_extra_info("socket")
    return -1 if endpoint is None or transport.is_closing() else endpoint.fileno()


def untaken(transport: asyncio.Transport) -> int:
    """Return the written bytes that the peer has not acknowledged: ours and the kernel's."""
    endpoint = transport.get_extra_info("socket")
    queued = 0
    if endpoint is not None:
        with contextlib.suppress(OSError):
            raw = fcntl.ioctl(endpoint.fileno(), termios.TIOCOUTQ, bytes(4))
            queued = int.from_bytes(raw, sys.byteorder)
    return transport.get_write_buffer_size() + queued


def peer_left(transport: asyncio.Transport) -> bool:
    """Say whether the peer has closed or half-closed; for a transport that is not read now."""
    endpoint = transport.get_extra_info("socket")
    if endpoint is None:
        return True
    poll = select.poll()
    poll.register(endpoint.fileno(), select.POLLRDHUP)  # errors are told unasked
    return bool(poll.poll(0))


def reset(transport: asyncio.Transport) -> None:
    """End with RST: where FIN would be the regular end, only this tells that there was none."""
    endpoint = transport.get_extra_info("socket")
    if endpoint is not None and endpoint.family != socket.AF_UNIX:
        with contextlib.suppress(OSError):
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()


def bound(host: str, port: int, *, shared: bool) -> socket.socket | None:
    """Return a socket bound to a numeric address; None: `host` is a name. Raises OSError.

    `shared`: with others of SO_REUSEPORT. A loop that is given a host loads all of IDNA for it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.inet_pton(family, host)
    except OSError:
        return None
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as asyncio does
        sock.bind((host, port))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock
