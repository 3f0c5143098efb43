"""An engine of so many slots: each answer takes its time, the rest wait in order, as with a GPU.

    python -m perf.slots PORT SLOTS MILLISECONDS

It prints nothing. A request whose client has left gives its turn away, running or waiting.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import cast

import uvloop

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Slots:
    """The places, and who waits for one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slots: int, each_s: float) -> None:
        self._loop = loop
        self._free = slots
        self._each_s = each_s
        self._waiting: deque[Asked] = deque()

    def ask(self, asked: Asked) -> None:
        """Serve a request now, or when its turn comes."""
        if self._free:
            self._free -= 1
            self._loop.call_later(self._each_s, self._done, asked)
        else:
            self._waiting.append(asked)

    def _done(self, asked: Asked) -> None:
        asked.answer()
        while self._waiting:
            following = self._waiting.popleft()
            if following.there:
                self._loop.call_later(self._each_s, self._done, following)
                return
        self._free += 1


class Asked(asyncio.Protocol):
    """A connection; one request at a time, as a proxy sends them."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    @property
    def there(self) -> bool:
        """Say whether the client still waits."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        del exc
        self._transport = None

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if found:
            lower = head.lower()
            at = lower.find(b"content-length:")
            length = 0 if at < 0 else int(lower[at + 15 :].split(b"\r\n", 1)[0])
            if len(body) >= length:
                self._buffer = b""
                self._slots.ask(self)

    def answer(self) -> None:
        """Send the answer, if the client is there."""
        if self._transport is not None:
            self._transport.write(ANSWER)


async def serve(port: int, slots: int, each_s: float) -> None:
    """Serve until killed."""
    loop = asyncio.get_running_loop()
    places = Slots(loop, slots, each_s)
    server = await loop.create_server(lambda: Asked(places), "127.0.0.1", port, backlog=2048)
    await server.serve_forever()


if __name__ == "__main__":
    own_port, own_slots, own_ms = sys.argv[1:]
    uvloop.run(serve(int(own_port), int(own_slots), float(own_ms) / 1000))
