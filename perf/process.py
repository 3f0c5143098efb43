"""Start a peer pinned to a core, ask it, and read what it costs from /proc. Linux only."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

START_S = 30.0
POLL_S = 0.001
ASK = json.dumps({"model": "m-json", "messages": [{"role": "user", "content": "hi"}]})


class PeerError(Exception):
    """A peer cannot take part; the message is one line."""


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Start children inside: they stay on this core, which they take over from this thread."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def spawn(
    command: list[str], core: int, log: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command pinned to `core`, in a session of its own, its output in `log`."""
    with log.open("wb") as sink, on_core(core):
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )


def ask(port: int, *, path: str = "/v1/chat/completions", get: bool = False) -> int:
    """Send one request; return its status, 0 when nobody answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("GET" if get else "POST", path, None if get else ASK, headers)
        answer = connection.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):
        return 0
    else:
        return answer.status
    finally:
        connection.close()


def wait_until(
    ready: Callable[[], bool],
    process: subprocess.Popen[bytes],
    log: Path,
    patience_s: float = START_S,
) -> float:
    """Wait for `ready`; return the seconds it took. Raises PeerError when it never is."""
    start = time.perf_counter()
    while not ready():
        spent = time.perf_counter() - start
        if process.poll() is not None or spent > patience_s:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise PeerError(f"did not start: {lines[-1] if lines else 'it said nothing'}")
        time.sleep(POLL_S)
    return time.perf_counter() - start


def stop(process: subprocess.Popen[bytes], patience_s: float = 5.0) -> int:
    """End a child's own process group; return its exit code."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 15)
    try:
        return process.wait(patience_s)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        return process.wait()


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def cpu_ns(pid: int) -> tuple[int, int]:
    """Return (on a CPU, waiting for one) of a process tree in ns, all its threads."""
    ran = waited = 0
    for one in tree(pid):
        with suppress(OSError):
            for task in Path(f"/proc/{one}/task").iterdir():
                fields = (task / "schedstat").read_text().split()
                ran, waited = ran + int(fields[0]), waited + int(fields[1])
    return ran, waited


def rss_mb(pid: int) -> float:
    """Return the resident set of a process tree, in MiB as `top` and Kubernetes show it."""
    total_kib = 0
    for one in tree(pid):
        with suppress(OSError):
            rollup = Path(f"/proc/{one}/smaps_rollup").read_text(encoding="ascii")
            rows = (line.split() for line in rollup.splitlines())
            total_kib += sum(int(row[1]) for row in rows if row[0] == "Rss:")
    return total_kib / 1024
