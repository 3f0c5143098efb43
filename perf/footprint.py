"""What a peer takes before and beside the load: start, memory, and how fast it lets go.

Each peer is alone on its core; the fake engine is on the other. Nothing here is a rate, so a busy
machine disturbs the times only.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from perf import peers, process, report
from perf.process import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PEER_CORE = 0
COLD_STARTS = 5
HELD_CONNECTIONS = 64
GROWTHS = 3  # what an allocator keeps of freed blocks differs from start to start
GONE_TIMES = 5
GONE_S = 1.0  # who has not told the upstream by then does not tell it
STALL_MB, STALL_QUIET_S, STALL_S = 200, 0.3, 10.0
CHECKPOINT_S = 12.0  # written 10 s after the first record
SYNCS, SYNC_GAP_S, LINE_BYTES = 40, 0.05, 900  # 20 a second, as the streams of the load

Figures = dict[str, float]


def start(peer: peers.Peer, ports: peers.Ports) -> subprocess.Popen[bytes]:
    """Start one peer and wait for its first 200."""
    log = ports.folder / f"{peer.name}.log"
    child = process.spawn(peer.command, PEER_CORE, log, peer.environment)
    try:
        process.wait_until(lambda: process.ask(peer.port) == 200, child, log, peer.start_s)
    except PeerError as problem:
        process.stop(child)
        raise PeerError(f"{peer.name} {problem}") from None
    return child


def cold_start(peer: peers.Peer, ports: peers.Ports, doors: list[tuple[int, str]]) -> Figures:
    """Return seconds, and CPU seconds, from process start until every door answers 200."""
    starts: list[report.Round] = []
    for _ in range(COLD_STARTS):
        waiting = list(doors)

        def ready(waiting: list[tuple[int, str]] = waiting) -> bool:
            waiting[:] = [
                (port, path)
                for port, path in waiting
                if process.ask(port, path=path, get=path == "/livez") != 200
            ]
            return not waiting

        log = ports.folder / f"{peer.name}.log"
        begun = time.perf_counter()
        child = process.spawn(peer.command, PEER_CORE, log, peer.environment)
        try:
            process.wait_until(ready, child, log, peer.start_s)
            wall = time.perf_counter() - begun
            ran, waited = process.cpu_ns(child.pid)
            starts.append({"total": 1, "wall": wall, "cpu": ran / 1e9, "wait": waited / 1e9})
        finally:
            process.stop(child)
    figures = {"cold_start_s": "wall", "cold_start_cpu_s": "cpu", "cold_start_waited_s": "wait"}
    return {name: report.median(starts, metric) or 0.0 for name, metric in figures.items()}


def rss_after_one_each(peer: peers.Peer, ports: peers.Ports) -> Figures:
    """Return MB resident after start, and after one request a door, a checkpoint and a scrape."""
    child = start(peer, ports)
    try:
        figures = {"rss_mb_started": process.rss_mb(child.pid)}
        if peer.name in peers.SIDECARS:
            log, admin = ports.folder / f"{peer.name}.log", ports.admin_of(peer.name)
            process.wait_until(
                lambda: process.ask(admin, path="/readyz", get=True) == 200, child, log
            )
            if peer.name == "tongguan":
                ask_sealed(ports)
                figures["checkpoints"] = _checkpoints(ports)
            if process.ask(admin, path="/metrics", get=True) != 200:
                raise PeerError(f"{peer.name}: /metrics does not answer")
        figures["rss_mb"] = process.rss_mb(child.pid)
        return figures
    finally:
        process.stop(child)


def ask_sealed(ports: peers.Ports) -> None:
    """Send one sealed request from a process of its own."""
    url, keys = f"http://127.0.0.1:{ports.sealed}", str(ports.client_keys)
    command = [sys.executable, "-m", "perf.sealed", url, keys]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=peers.HERE.parent
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise PeerError(f"the sealed door: {lines[-1] if lines else done.returncode}")


def _checkpoints(ports: peers.Ports) -> float:
    """Wait for a checkpoint in the chain; return how many there are, 0 when none came."""
    end = time.monotonic() + CHECKPOINT_S
    while time.monotonic() < end:
        newest = max(ports.audit.glob("*/*.log"), key=lambda file: file.stat().st_mtime)
        if found := newest.read_bytes().count(b'"kind":"checkpoint"'):
            return found
        time.sleep(0.1)
    return 0


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), 10)


def _request(model: str, *, stream: bool) -> bytes:
    body = json.dumps({"model": model, "stream": stream, "messages": []}).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    )


def _read_until(sock: socket.socket, mark: bytes) -> None:
    """Read until `mark` has come. Raises PeerError when the connection ends first."""
    tail = b""
    while mark not in tail:
        data = sock.recv(1 << 18)
        if not data:
            raise PeerError("a connection ended early")
        tail = tail[-len(mark) :] + data


def stats(ports: peers.Ports) -> dict[str, int]:
    """Return the fake engine's counters."""
    connection = http.client.HTTPConnection("127.0.0.1", ports.backend, timeout=5)
    try:
        connection.request("GET", "/stats")
        counters: dict[str, int] = json.loads(connection.getresponse().read())
        return counters
    finally:
        connection.close()


def growth(peer: peers.Peer, ports: peers.Ports) -> Figures:
    """Return MB by which memory grows: with 64 connections, and with one reader that stalls."""
    child = start(peer, ports)
    try:
        before = process.rss_mb(child.pid)
        with ExitStack() as held:
            sockets = [held.enter_context(_connected(peer.port)) for _ in range(HELD_CONNECTIONS)]
            for sock in sockets:
                sock.sendall(_request("m-json", stream=False))
            for sock in sockets:
                _read_until(sock, b'"fp_0123456789"}')
            figures = {"rss_growth_64_mb": process.rss_mb(child.pid) - before}
        with _connected(peer.port) as sock:  # what a first stream takes is no growth
            sock.sendall(_request("m-big1", stream=True))
            _read_until(sock, b"\r\n0\r\n\r\n")
        before, sent = process.rss_mb(child.pid), stats(ports)["sent"]
        with _connected(peer.port) as sock:
            sock.sendall(_request(f"m-big{STALL_MB}", stream=True))
            taken = _stalled(ports) - sent
            figures["rss_growth_stalled_mb"] = process.rss_mb(child.pid) - before
            figures["stalled_taken_mb"] = taken / (1 << 20)
        return figures
    finally:
        process.stop(child)


def _stalled(ports: peers.Ports) -> int:
    """Wait until the engine can send no more; return the bytes it has sent."""
    seen, since, end = -1, time.monotonic(), time.monotonic() + STALL_S
    while time.monotonic() < end:
        now = stats(ports)["sent"]
        # The counters' own answers are a few hundred bytes.
        if now - seen > 1 << 14:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > STALL_QUIET_S:
            break
        time.sleep(0.02)
    return seen


def gone(peer: peers.Peer, ports: peers.Ports) -> Figures:
    """Return ms from a client's close until the engine sees it, while it speaks and is silent.

    A peer that does not tell the engine within a second has no figure.
    """
    child = start(peer, ports)
    figures = {}
    try:
        for name, model, mark in (
            ("gone_ms", "m-hang", b"data: "),
            ("gone_silent_ms", "m-mute", b""),
        ):
            times = []
            for _ in range(GONE_TIMES):
                with suppress(TimeoutError):
                    times.append(_leave(peer.port, ports, model, mark))
            if len(times) == GONE_TIMES:
                figures[name] = statistics.median(times)
                figures[name.replace("_ms", "_max_ms")] = max(times)
        return figures
    finally:
        process.stop(child)


def _leave(port: int, ports: peers.Ports, model: str, mark: bytes) -> float:
    """Begin a stream, close it; return ms until the engine saw that. Raises TimeoutError."""
    before = stats(ports)
    with _connected(port) as sock:
        sock.sendall(_request(model, stream=True))
        if mark:
            _read_until(sock, mark)
        _poll(lambda: stats(ports)["live"] > before["live"])
        closed_ns = time.monotonic_ns()
    _poll(lambda: stats(ports)["aborted"] > before["aborted"])
    return (stats(ports)["aborted_ns"] - closed_ns) / 1e6


def _poll(check: Callable[[], bool]) -> None:
    end = time.monotonic() + GONE_S
    while not check():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.002)


def lone_sync(directory: Path) -> float:
    """Return CPU us of one append and fdatasync on this disk, made as far apart as streams end.

    No audit trail that syncs what stands alone is cheaper: `LINE_BYTES`, `SYNCS` of them, one each
    `SYNC_GAP_S`; the median.
    """
    costs = []
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        for _ in range(SYNCS):
            time.sleep(SYNC_GAP_S)
            before_ns = time.thread_time_ns()
            os.write(file.fileno(), b"x" * LINE_BYTES)
            os.fdatasync(file.fileno())
            costs.append((time.thread_time_ns() - before_ns) / 1000)
    return statistics.median(costs)


def of(peer: peers.Peer, ports: peers.Ports, *, whole: bool) -> Figures:
    """Return a peer's cold start and memory; `whole`: its growth and letting go too."""
    doors = [(peer.port, "/v1/chat/completions")]
    if peer.name in peers.SIDECARS:
        doors.append((ports.admin_of(peer.name), "/livez"))
    found = {**cold_start(peer, ports, doors), **rss_after_one_each(peer, ports)}
    if whole and not peer.alone:
        grown = [growth(peer, ports) for _ in range(GROWTHS)]
        found |= {name: statistics.median(one[name] for one in grown) for name in grown[0]}
        found |= gone(peer, ports)
    return found
