"""Asking the node agent for its limits, twice a second.

Quiet when nobody answers, and where nobody listens it asks less often: a sidecar needs no agent.
One connection is kept; an answer has 64 KiB and half a second. What an answer means is
`qos.limits`' business.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from proxy.config import split_url
from proxy.http.chunked import ChunkError, ChunkReader
from proxy.http.http1 import HeadError, parse_response
from proxy.qos.limits import LimitsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.context import Context
    from proxy.qos.admission import Gate

EVERY_S = 0.5
UNANSWERED_S = 4.0  # where nobody has listened for a while
ANSWER_BYTES_MAX = 64 << 10


class NoLimitsError(Exception):
    """Somebody answered, but not with limits."""


class LimitsPoll:
    """One task, from `start` to `stop`."""

    def __init__(self, context: Context) -> None:
        self._current = context.current
        self._loop = context.loop
        self._url = ""
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._task: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._task = self._loop.create_task(self._run())

    async def stop(self) -> None:
        """End the task and its connection."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if self._expiry is not None:
            self._expiry.cancel()
        self._close()

    async def _run(self) -> None:
        loop, asked = self._loop, self._current.context.gates.agent
        every_s = EVERY_S
        while True:
            begun_s = loop.time()
            try:
                url = self._current.context.settings.qos.limits_url
                if url != self._url:  # a reload may change it
                    self._url = url
                    self._close()
                if url:
                    async with asyncio.timeout(EVERY_S):
                        self._take(await self._ask(url))
                every_s = EVERY_S
            except (OSError, TimeoutError, EOFError, NoLimitsError) as problem:
                asked.absent += 1
                self._close()
                refused = isinstance(problem, ConnectionRefusedError)
                every_s = min(UNANSWERED_S, 2 * every_s) if refused else EVERY_S
            except (HeadError, ChunkError, asyncio.LimitOverrunError):
                asked.malformed += 1
                self._close()
            except LimitsError:
                pass  # counted
            await asyncio.sleep(max(0.0, begun_s + every_s - loop.time()))

    async def _ask(self, url: str) -> bytes:
        (host, port), path = split_url(url)
        if self._streams is None:
            self._streams = await asyncio.open_connection(host, port, limit=ANSWER_BYTES_MAX)
        reader, writer = self._streams
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        raw = await reader.readuntil(b"\r\n\r\n")
        head = parse_response(raw, self._current.context.head_limits, b"GET", 0)
        if head is None or head.status != 200:
            raise NoLimitsError
        if head.chunked:
            return await self._chunks(reader)
        if head.content_length is None or head.content_length > ANSWER_BYTES_MAX:
            raise NoLimitsError
        text = await reader.readexactly(head.content_length)
        if not head.keep_alive:
            self._close()
        return text

    async def _chunks(self, reader: asyncio.StreamReader) -> bytes:
        chunks, text = ChunkReader(), b""
        while not chunks.done:
            data = await reader.read(ANSWER_BYTES_MAX)
            if not data:
                raise EOFError
            chunks.feed(data)
            text += b"".join(chunks.pieces)
            if len(text) > ANSWER_BYTES_MAX:
                raise NoLimitsError
        return text

    def _take(self, text: bytes) -> None:
        context = self._current.context
        asked = context.gates.agent
        now_ns = context.clock.mono_ns()
        workers = max(1, context.settings.workers)
        self._wake(asked.take(text, context.gates.tiers.values(), now_ns, workers))
        self._arm(now_ns)

    def _expire(self) -> None:
        context = self._current.context
        now_ns = context.clock.mono_ns()
        self._wake(context.gates.agent.expire(context.gates.tiers.values(), now_ns))
        self._arm(now_ns)

    def _arm(self, now_ns: int) -> None:
        """Set the timer for the limit that gets too old next."""
        context = self._current.context
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        until_ns = context.gates.agent.next_ns()
        if until_ns:
            self._expiry = context.loop.call_later((until_ns - now_ns) / 1e9, self._expire)

    def _wake(self, changed: Iterable[Gate]) -> None:
        for gate in changed:
            if gate.may_go():
                self._current.context.turnstiles[gate.lined[0].qos].schedule()

    def _close(self) -> None:
        streams, self._streams = self._streams, None
        if streams is not None:
            with contextlib.suppress(OSError):
                streams[1].close()
