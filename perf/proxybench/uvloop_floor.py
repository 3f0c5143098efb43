"""What Python and its loop cost before a line of a proxy: `python uvloop_floor.py PORT`.

A bare asyncio Protocol on uvloop that calls upon nobody: it looks for a head's end and its
Content-Length, and answers 200 with as much JSON as the fake engine does.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import uvloop

BODY = b'{"content":"%b"}' % (b"a" * 1008)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
    len(BODY),
    BODY,
)
LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d+)")


class Answering(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep where to answer."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class

    def data_received(self, data: bytes) -> None:
        """Answer each request that is whole."""
        self._held += data
        while (at := self._held.find(b"\r\n\r\n")) >= 0:
            found = LENGTH.search(self._held, 0, at)
            end = at + 4 + (int(found[1]) if found else 0)
            if len(self._held) < end:
                return
            self._held = self._held[end:]
            self._transport.write(ANSWER)


async def serve(port: str) -> None:
    """Serve until the process is ended."""
    await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", int(port))
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
