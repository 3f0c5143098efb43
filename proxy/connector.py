"""The upstream connections of one pool: made, kept while idle, ended.

A connection that is idle is taken again, the one used last first. Its peer may close it at any
moment; the loop usually tells, and one that has been idle for longer than a tick is asked before it
is used. Connections are given up before their peer's own idle time is over, where it announced one
(`Keep-Alive: timeout`).

Bounds: idle connections per endpoint; connecting tasks by the pool's in-flight limit; each attempt
to connect, TLS included, by `timeouts.connect_s`; one log line a minute and endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
from collections import deque
from typing import TYPE_CHECKING, cast

from proxy.upstream import UpstreamConnection

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.http.http1 import HeadLimits
    from proxy.qos.pools import Endpoint
    from proxy.upstream import Lessee

LOG_EVERY_NS = 60_000_000_000
TLS_CLOSE_S = 1.0  # for the peer's close_notify
_TIMEOUT = re.compile(rb"(?i)(?:^|[,;\s])timeout\s*=\s*\"?([0-9]{1,9})(?![0-9])")

log = logging.getLogger(__name__)


def trust(ca_file: str) -> ssl.SSLContext:
    """Return what https endpoints are verified by: a file's certificates, or the system's.

    Called only where there is such an endpoint: loading takes time and memory. Raises OSError, of
    which ssl.SSLError is one.
    """
    context = ssl.create_default_context(cafile=ca_file or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def below(keep_alive: bytes) -> int | None:
    """Return how long (ns) to keep a connection whose peer announces this; None: it does not say.

    A second less than it says, or half of less than two: the announcement is as old as its way.
    """
    found = _TIMEOUT.search(keep_alive)
    if found is None:
        return None
    ms = int(found[1]) * 1000
    return max(ms - 1000, ms // 2) * 1_000_000


class Upstreams:
    """The connections of one pool."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: HeadLimits,
        urls: Iterable[str],
        *,
        connect_s: float,
        keepalive_s: float,
        idle_max: int,
    ) -> None:
        self._loop = loop
        self._limits = limits
        self._connect_s = connect_s
        self._keepalive_ns = int(keepalive_s * 1e9)
        self._below_ns: dict[str, int] = {}  # by endpoint, where its peer announced less
        self._idle_max = idle_max
        # By URL of an endpoint; one that is not here is no longer an endpoint.
        self._idle: dict[str, deque[UpstreamConnection]] = {url: deque() for url in urls}
        self._connecting: set[asyncio.Task[None]] = set()
        self._ahead: set[asyncio.Task[None]] = set()  # opening before a request needs it
        self._open: set[UpstreamConnection] = set()
        self._logged_ns: dict[str, int] = {}
        self.tls: ssl.SSLContext | None = None  # what https endpoints are verified by
        self.connects = 0
        self.connect_failures = 0
        self.connect_timeouts = 0
        self.late_closes = 0
        self.found_closed = 0
        self.now_ns = 0  # advanced by the owner's tick: idle ages need no finer clock

    def renew(
        self,
        limits: HeadLimits,
        urls: Iterable[str],
        *,
        connect_s: float,
        keepalive_s: float,
        idle_max: int,
        tls: ssl.SSLContext | None,
    ) -> None:
        """Take other settings; idle connections to endpoints that are gone are closed."""
        self._limits = limits
        self._connect_s = connect_s
        self._keepalive_ns = int(keepalive_s * 1e9)
        self._idle_max = idle_max
        self.tls = tls
        before, self._idle = self._idle, {}
        for url in urls:
            self._idle[url] = before.pop(url, deque[UpstreamConnection]())
        for url, gone in before.items():
            self._below_ns.pop(url, None)
            self._logged_ns.pop(url, None)
            for connection in gone:
                if connection.transport is not None:
                    connection.transport.close()

    def idle(self, endpoint: Endpoint) -> UpstreamConnection | None:
        """Return the connection that was used last and is still open, no longer idle."""
        idle = self._idle.get(endpoint.url)
        while idle:
            connection = idle.pop()
            transport = connection.transport
            if transport is None or transport.is_closing():
                continue
            # Asking costs a system call, so a connection that was used within this tick (100 ms)
            # is believed: peers close after seconds, and a busy pool never asks.
            if connection.idle_since_ns == self.now_ns or connection.quiet():
                return connection
            self.found_closed += 1
            transport.abort()
        return None

    def connect(self, endpoint: Endpoint, lessee: Lessee) -> None:
        """Make a connection and lease it to `lessee`."""
        task = self._loop.create_task(self._connect(endpoint, lessee))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def keep_open(self, endpoint: Endpoint, count: int) -> None:
        """Open connections ahead of need until `count` are idle; called once a second."""
        idle = self._idle.get(endpoint.url)
        if idle is None:
            return
        missing = min(count, self._idle_max) - len(idle) - len(self._ahead)
        for _ in range(missing):
            task = self._loop.create_task(self._open_ahead(endpoint))
            self._ahead.add(task)
            task.add_done_callback(self._ahead.discard)

    async def _open_ahead(self, endpoint: Endpoint) -> None:
        connection = await self._try(endpoint)
        if connection is not None:
            self._open.add(connection)
            self.put_back(connection)

    async def _connect(self, endpoint: Endpoint, lessee: Lessee) -> None:
        connection = await self._try(endpoint)
        if connection is None:
            lessee.upstream_refused(endpoint)
            return
        self._open.add(connection)
        connection.lessee = lessee
        lessee.upstream_ready(connection)

    async def _try(self, endpoint: Endpoint) -> UpstreamConnection | None:
        self.connects += 1
        try:
            async with asyncio.timeout(self._connect_s):
                return await self._made(endpoint)
        except (OSError, TimeoutError) as problem:
            self.connect_failures += 1
            self.connect_timeouts += isinstance(problem, TimeoutError)
            self._log(endpoint, problem)
            return None

    async def _made(self, endpoint: Endpoint) -> UpstreamConnection:
        def factory() -> asyncio.Protocol:
            # One by its methods; as a subclass it could not be compiled to a native class.
            return cast("asyncio.Protocol", UpstreamConnection(self, endpoint, self._limits))

        loop, address = self._loop, endpoint.address
        if isinstance(address, str):
            made = await loop.create_unix_connection(factory, address)
        elif not endpoint.tls:
            made = await loop.create_connection(factory, *address)
        else:
            made = await loop.create_connection(
                factory,
                *address,
                ssl=self.tls,
                server_hostname=address[0],
                ssl_handshake_timeout=self._connect_s,
                ssl_shutdown_timeout=TLS_CLOSE_S,
            )
        return cast("UpstreamConnection", made[1])

    def _log(self, endpoint: Endpoint, problem: OSError) -> None:
        last_ns = self._logged_ns.get(endpoint.url)
        if last_ns is None or self.now_ns - last_ns >= LOG_EVERY_NS:
            self._logged_ns[endpoint.url] = self.now_ns
            why = str(problem) or "timed out (timeouts.connect_s)"
            log.warning("no connection to %s: %s", endpoint.url, why)

    def announced(self, endpoint: Endpoint, keep_alive: bytes) -> None:
        """Note how long an endpoint's server keeps idle connections."""
        limit_ns = below(keep_alive)
        if limit_ns is not None and limit_ns < self._keepalive_ns:
            self._below_ns[endpoint.url] = limit_ns

    def put_back(self, connection: UpstreamConnection) -> None:
        """Keep a connection whose answer is whole, if there is room."""
        idle = self._idle.get(connection.endpoint.url)
        if idle is None or len(idle) >= self._idle_max:
            assert connection.transport is not None
            connection.transport.close()
            return
        connection.reused = True
        connection.answered = connection.request_whole = False
        connection.idle_since_ns = self.now_ns
        connection.resume()
        idle.append(connection)

    def forget(self, connection: UpstreamConnection) -> None:
        """Drop a connection that has ended."""
        self._open.discard(connection)
        idle = self._idle.get(connection.endpoint.url)
        if idle is not None and connection in idle:
            idle.remove(connection)

    def tick(self, now_ns: int) -> None:
        """Close connections that have been idle too long; the oldest lie first."""
        self.now_ns = now_ns
        for url, idle in self._idle.items():
            limit_ns = self._below_ns.get(url, self._keepalive_ns)
            while idle and now_ns - idle[0].idle_since_ns > limit_ns:
                transport = idle.popleft().transport
                if transport is not None:
                    transport.close()

    def idle_count(self) -> int:
        """Return how many connections wait for a request."""
        return sum(len(idle) for idle in self._idle.values())

    async def close(self) -> None:
        """End every connection."""
        tasks = [*self._connecting, *self._ahead]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._open):
            connection.abandon()
