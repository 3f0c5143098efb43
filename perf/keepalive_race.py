"""Requests at the moment at which an upstream closes its idle connections: how many are lost.

    python -m perf.keepalive_race [--peers tongguan,repeatable,nginx] [--rounds 10] [--json FILE]

For each peer and for each way to close (FIN, RST) `CLIENTS` connections ask at once, `--rounds`
times. The upstream answers whatever it has read; it counts how often it has had each request.
What is not installed is left out and named. Exit codes: 0 nothing came twice and the sidecar with
`repeatable = true` lost nothing, 1 it did, 2 the run could not be made.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import random
import select
import socket
import struct
import sys
import threading
import time
from collections import Counter

from perf import output
from perf.machine import facts
from perf.peers import Peer, Ports, make
from perf.process import PeerError, ask, spawn, stop, wait_until

BASE_PORT = 21400
CLIENTS = 25
IDLE_S = 0.25
SPREAD_S = 0.002
WAIT_S = 20.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, no time: close sends RST
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
ENDS = ("FIN", "RST")
# Row's name -> (peer, more variables).
ROWS: dict[str, tuple[str, dict[str, str]]] = {
    "tongguan": ("tongguan-passthrough", {}),
    "repeatable": (
        "tongguan-passthrough",
        {"TONGGUAN_POOLS_SHARED_REPEATABLE": "true", "TONGGUAN_POOLS_SHARED_RETRY_PERCENT": "100"},
    ),
    "nginx": ("nginx", {}),
    "haproxy": ("haproxy", {}),
    "envoy": ("envoy", {}),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One peer's result: of `posts` requests at that moment, lost and had twice."""

    peer: str
    end: str
    posts: int
    lost: int
    lost_though_had: int
    twice: int


def read_message(connection: socket.socket, buffer: bytes) -> tuple[bytes, bytes] | None:
    """Return (body, what came after it) of one HTTP message; None at the connection's end."""
    while b"\r\n\r\n" not in buffer:
        data = connection.recv(1 << 16)
        if not data:
            return None
        buffer += data
    head, _, rest = buffer.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    size = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
    while len(rest) < size:
        data = connection.recv(1 << 16)
        if not data:
            return None
        rest += data
    return head.split(b"\r\n")[0] + b"\n" + rest[:size], rest[size:]


class Racing:
    """The upstream: it closes all connections that are idle at `moment`."""

    def __init__(self, port: int) -> None:
        self.moment = math.inf
        self.by_reset = False
        self.had: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", port), backlog=256)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        born = time.monotonic()
        with contextlib.suppress(OSError):
            while self._asked(connection, born):
                message = read_message(connection, b"")
                if message is None:
                    break
                body = message[0].partition(b"\n")[2]
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    number = json.loads(body)["number"]
                    with self._lock:
                        self.had[number] += 1
                connection.sendall(OK)
        if self.by_reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.close()

    def _asked(self, connection: socket.socket, born: float) -> bool:
        while not born < self.moment <= time.monotonic():
            left = self.moment - time.monotonic()
            if select.select([connection], [], [], min(left, 0.02) if left > 0 else 0.02)[0]:
                return True
        return False

    def close(self) -> None:
        """Stop listening; closing alone would wait for the thread in accept."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def post(port: int, held: socket.socket | None, number: int) -> tuple[socket.socket | None, int]:
    """Ask once; return the connection, if it may be used again, and the status (0: none)."""
    body = b'{"number":%d}' % number
    head = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    connection = held or socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    try:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
        message = read_message(connection, b"")
    except OSError:
        message = None
    if message is None:
        connection.close()
        return None, 0
    status = int(message[0].split(b" ")[1])
    if status != 200:  # some close after an error of their own
        connection.close()
        return None, status
    return connection, status


def race(upstream: Racing, port: int, rounds: int) -> dict[int, int]:
    """Return the status of each request that was sent at the moment, by its number."""
    statuses: dict[int, int] = {}
    barrier = threading.Barrier(CLIENTS)

    def run(index: int) -> None:
        dice = random.Random(index)
        connection: socket.socket | None = None
        for turn in range(rounds):
            number = index * rounds + turn
            upstream.moment = math.inf
            barrier.wait(WAIT_S)
            connection, _ = post(port, connection, -1 - number)
            barrier.wait(WAIT_S)
            if index == 0:
                upstream.moment = time.monotonic() + IDLE_S
            barrier.wait(WAIT_S)
            moment = upstream.moment + dice.uniform(-SPREAD_S, SPREAD_S)
            time.sleep(max(0.0, moment - time.monotonic()))
            connection, statuses[number] = post(port, connection, number)
            barrier.wait(WAIT_S)
        if connection is not None:
            connection.close()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses


def measure(name: str, peer: Peer, more: dict[str, str], rounds: int, backend: int) -> list[Row]:
    """Race one peer both ways."""
    log = Ports(backend).folder / f"race-{name}.log"
    rows = []
    for end in ENDS:
        upstream = Racing(backend)
        process = spawn(peer.command, 0, log, {**peer.environment, **more})
        try:
            wait_until(lambda: ask(peer.port) == 200, process, log)
            upstream.by_reset = end == "RST"
            statuses = race(upstream, peer.port, rounds)
        finally:
            stop(process)
            upstream.close()
        lost = [number for number, status in statuses.items() if status != 200]
        rows.append(
            Row(
                peer=name,
                end=end,
                posts=len(statuses),
                lost=len(lost),
                lost_though_had=sum(upstream.had[number] > 0 for number in lost),
                twice=sum(upstream.had[number] > 1 for number in statuses),
            )
        )
    return rows


def main() -> int:
    """Run it; return the exit code."""
    parser = argparse.ArgumentParser(description="Requests at the moment of an idle close.")
    parser.add_argument("--peers", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=10, help=f"of {CLIENTS} requests each")
    parser.add_argument("--port", type=int, default=BASE_PORT, help="first of a row of ports")
    output.add_json(parser)
    options = parser.parse_args()
    names = options.peers.split(",")
    if unknown := set(names) - set(ROWS):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    rows: list[Row] = []
    for name in names:
        try:
            maker, more = ROWS[name]
            peer = make(maker, Ports(options.port))
            rows += measure(name, peer, more, options.rounds, options.port)
        except (PeerError, OSError) as problem:
            print(f"{name}: left out: {problem}", file=sys.stderr)
    if not rows:
        return 2
    table = [f"{'peer':12} {'end':4} {'posts':>6} {'lost':>6} {'of them had':>12} {'twice':>6}"]
    table += [
        f"{row.peer:12} {row.end:4} {row.posts:6} {row.lost:6} "
        f"{row.lost_though_had:12} {row.twice:6}"
        for row in rows
    ]
    result = {"machine": facts(), "rows": [dataclasses.asdict(row) for row in rows]}
    output.put(options.json, result, "\n".join(table))
    ours = [row for row in rows if row.peer in ("tongguan", "repeatable")]
    return int(any(row.twice or (row.peer == "repeatable" and row.lost) for row in ours))


if __name__ == "__main__":
    sys.exit(main())
