"""Requests at times that do not depend on the answers, by class; prints what came of them.

    python -m perf.openloop PORT SECONDS SEED CONNECTIONS CLASS=RATE...

Arrivals are a Poisson process. Latency counts from the intended time, so what waits for this
program counts too. One line of JSON for each class: sent, outcomes by code, quantiles of the
served ones. A request that finds no connection is `unsent`; nothing is left out.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter, deque
from typing import Any, cast

import uvloop

TICK_S = 0.001
SETTLE_S = 35.0  # the longest deadline, and an answer
BODY = b'{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":64}'


class Tally:
    """One class: what was sent, and what came back."""

    def __init__(self, qos: str, rate: float) -> None:
        self.qos = qos
        self.rate = rate
        self.sent = 0
        self.outcomes: Counter[str] = Counter()
        self.served_s: list[float] = []
        self.next_s = 0.0
        self.request = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nX-QoS-Class: {qos}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
        ).encode() + BODY

    def result(self) -> dict[str, Any]:
        """Return the figures."""
        served = sorted(self.served_s)

        def quantile(q: float) -> float | None:
            return round(served[int(q * (len(served) - 1))] * 1000, 3) if served else None

        return {
            "qos": self.qos,
            "rate": self.rate,
            "sent": self.sent,
            "outcomes": dict(self.outcomes),
            "p50_ms": quantile(0.5),
            "p99_ms": quantile(0.99),
            "most_ms": quantile(1.0),
        }


class Line(asyncio.Protocol):
    """One connection; it carries one request at a time."""

    def __init__(self, idle: deque[Line], loop: asyncio.AbstractEventLoop) -> None:
        self._idle = idle
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._tally: Tally | None = None
        self._at_s = 0.0
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, tally: Tally, at_s: float) -> None:
        """Send a request that was due at `at_s`."""
        assert self._transport is not None
        self._tally, self._at_s = tally, at_s
        self._transport.write(tally.request)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        tally = self._tally
        if not found or tally is None:
            return
        lower = head.lower()
        length = int(lower.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if len(body) < length:
            return
        self._buffer = b""
        if head[9:12] == b"200":
            tally.outcomes["ok"] += 1
            tally.served_s.append(self._loop.time() - self._at_s)
        else:
            code = lower.partition(b"x-tongguan-error: ")[2].split(b"\r\n", 1)[0].decode()
            tally.outcomes[code or head[9:12].decode()] += 1
        self._tally = None
        self._idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        del exc
        self._transport = None
        if self._tally is not None:
            self._tally.outcomes["lost"] += 1
            self._tally = None
        elif self in self._idle:
            self._idle.remove(self)

    @property
    def busy(self) -> bool:
        """Say whether a request is out."""
        return self._tally is not None

    def give_up(self) -> None:
        """Count a request that is still out."""
        if self._tally is not None:
            self._tally.outcomes["unanswered"] += 1


async def run(
    port: int, seconds: float, seed: int, connections: int, rates: dict[str, float]
) -> list[Tally]:
    """Send for so long, wait for the last answers, return the tallies."""
    loop = asyncio.get_running_loop()
    due = random.Random(seed)
    idle: deque[Line] = deque()
    lines: list[Line] = []
    for _ in range(connections):
        _, line = await loop.create_connection(lambda: Line(idle, loop), "127.0.0.1", port)
        lines.append(line)
        idle.append(line)
    tallies = [Tally(qos, rate) for qos, rate in rates.items()]
    start_s = loop.time()
    for tally in tallies:
        tally.next_s = start_s + due.expovariate(tally.rate)
    end_s = start_s + seconds
    while (now_s := loop.time()) < end_s:
        for tally in tallies:
            while tally.next_s <= now_s:
                tally.sent += 1
                if idle:
                    idle.pop().ask(tally, tally.next_s)
                else:
                    tally.outcomes["unsent"] += 1
                tally.next_s += due.expovariate(tally.rate)
        await asyncio.sleep(TICK_S)
    until_s = loop.time() + SETTLE_S
    while any(line.busy for line in lines) and loop.time() < until_s:  # noqa: ASYNC110 - many ends
        await asyncio.sleep(0.01)
    for line in lines:
        line.give_up()
    return tallies


if __name__ == "__main__":
    own_port, own_seconds, own_seed, own_connections, *classes = sys.argv[1:]
    wanted = {name: float(rate) for name, _, rate in (c.partition("=") for c in classes)}
    done = uvloop.run(
        run(int(own_port), float(own_seconds), int(own_seed), int(own_connections), wanted)
    )
    for one in done:
        print(json.dumps(one.result()))
