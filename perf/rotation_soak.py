"""Rotate and revoke under load: `python -m perf.rotation_soak --minutes 10 --json FILE`.

A sidecar serves sealed requests, whole and streamed, from several clients at once, while its key is
followed by another every few seconds, the clients go over to it, and the one before is revoked. Not
one request may be lost: each has a whole answer with the right bytes. After each revocation the
time is taken until the old key is refused: at most a second, the median of all (one alone may be
late on a busy machine, and says so). Nothing is restarted.
Exit codes: 0 all holds, 1 a request was lost or a gate missed, 2 the run could not be made.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from perf import machine, output, process
from proxy.client import AnswerError, Sm4Transport
from proxy.keys.file import read

CLIENTS = 4
ROTATE_S = 4.0
REVOKED_S = 1.0
GATES = {"lost": 0, "revoked_s": REVOKED_S}
QUESTION = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
ANSWER = json.dumps({"choices": [{"message": {"role": "assistant", "content": "x" * 2000}}]})
EVENTS = 20
EVENT = 'data: {"choices":[{"index":0,"delta":{"content":"word "}}]}\n\n'
STREAM = EVENT * EVENTS + "data: [DONE]\n\n"
PROBLEMS_KEPT = 20


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers whole or as a stream, always the same."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_POST(self) -> None:
        """See http.server."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        if b'"stream"' not in body:
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(ANSWER)))
            self.end_headers()
            self.wfile.write(ANSWER.encode())
            return
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in [EVENT] * EVENTS + ["data: [DONE]\n\n"]:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event.encode()))
            time.sleep(0.002)
        self.wfile.write(b"0\r\n\r\n")


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


class Load:
    """Clients that ask until they are told to stop, each with the newest key file."""

    def __init__(self, url: str, keys: Path) -> None:
        self.url = url
        self.keys = keys
        self.generation = 0
        self.answered = 0
        self.lost: list[str] = []
        self.seen = [0] * CLIENTS
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]

    def start(self) -> None:
        """Begin to ask."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End all clients, each after its request."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30)

    def renewed(self) -> None:
        """Have every client take the newest key; return when the last one has."""
        self.generation += 1
        end = time.monotonic() + 30
        while any(seen != self.generation for seen in self.seen) and time.monotonic() < end:
            time.sleep(0.01)

    def _run(self, number: int) -> None:
        stream = json.dumps(json.loads(QUESTION) | {"stream": True})
        while not self._stop.is_set():
            mine = self.generation
            with httpx.Client(transport=Sm4Transport(self.keys), timeout=30) as client:
                self.seen[number] = mine
                asked = 0
                while mine == self.generation and not self._stop.is_set():
                    asked += 1
                    whole = asked % 3 != 0
                    self._ask(client, QUESTION if whole else stream, ANSWER if whole else STREAM)

    def _ask(self, client: httpx.Client, question: str, expected: str) -> None:
        try:
            answer = client.post(f"{self.url}/v1/chat/completions", content=question)
            problem = "" if (answer.status_code, answer.text) == (200, expected) else "other bytes"
            problem = problem and f"{problem}, status {answer.status_code}"
        except (httpx.HTTPError, AnswerError, ValueError) as caught:
            problem = f"{type(caught).__name__}: {caught}"
        with self._lock:
            self.answered += not problem
            if problem:
                self.lost.append(problem)


def tongguan(*words: str) -> None:
    """Run a command of ours; raises CalledProcessError."""
    subprocess.run(
        [sys.executable, "-m", "proxy.cli", *words],
        cwd=machine.ROOT,
        check=True,
        capture_output=True,
    )


class Probe:
    """Asks with one key again and again, until it is refused; begins before it is revoked."""

    def __init__(self, url: str, keys: Path) -> None:
        self.refused_s = 0.0  # by the monotonic clock; 0: not yet
        self._url = url
        self._client = httpx.Client(transport=Sm4Transport(keys), timeout=30)
        self._end_s = time.monotonic() + 60
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._client as client:
            while time.monotonic() < self._end_s:
                asked_s = time.monotonic()
                taken = False
                with contextlib.suppress(httpx.HTTPError, AnswerError):
                    url = f"{self._url}/v1/chat/completions"
                    taken = client.post(url, content=QUESTION).status_code == 200
                if not taken:
                    self.refused_s = asked_s
                    return
                time.sleep(0.02)

    def refused(self) -> float:
        """Return when it was, or when this gave up."""
        self._thread.join()
        return self.refused_s or time.monotonic()


def soak(folder: Path, minutes: float) -> dict[str, Any]:
    """Run it; return what was seen. Raises PeerError or CalledProcessError."""
    keys = folder / "keys"
    tongguan("keys", "new", "--dir", str(keys), "--audience", "local/default/soak")
    engine = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    engine.daemon_threads = True
    threading.Thread(target=engine.serve_forever, args=(0.05,), daemon=True).start()
    door, admin, log = free_port(), free_port(), folder / "sidecar.log"
    environment = {
        "TONGGUAN_DOORS_APP": "",
        "TONGGUAN_DOORS_SEALED": f"127.0.0.1:{door}",
        "TONGGUAN_DOORS_ADMIN": f"127.0.0.1:{admin}",
        "TONGGUAN_POOLS_SHARED_ENDPOINTS": f"http://127.0.0.1:{engine.server_address[1]}",
        "TONGGUAN_QOS_LIMITS_URL": "",
        "TONGGUAN_KEYS_FILE": str(keys / "sidecar.json"),
        "TONGGUAN_AUDIT_DIR": str(folder / "audit"),
        "TONGGUAN_ENVELOPE_FENCE_S": "0",
    }
    cores = sorted(os.sched_getaffinity(0))
    child = process.spawn([sys.executable, "-m", "proxy"], cores[0], log, environment)
    load = Load(f"http://127.0.0.1:{door}", keys / "client.json")
    took: list[float] = []
    try:
        process.wait_until(lambda: process.ask(admin, path="/readyz", get=True) == 200, child, log)
        memory_mb = process.rss_mb(child.pid)
        load.start()
        end = time.monotonic() + minutes * 60
        while time.monotonic() < end and not load.lost:
            took.append(_rotated(load, keys))
            time.sleep(ROTATE_S / 2)
        load.stop()
        grown_mb = process.rss_mb(child.pid) - memory_mb
    finally:
        load.stop()
        code = process.stop(child)
        engine.shutdown()
    tongguan("audit", "verify", str(folder / "audit"), "--keys", str(keys / "auditor.json"))
    return {
        "rotations": len(took),
        "answered": load.answered,
        "lost": len(load.lost),
        "problems": load.lost[:PROBLEMS_KEPT],
        "revoked_s": round(statistics.median(took), 3),
        "revoked_most_s": round(max(took), 3),
        "memory_grown_mb": round(grown_mb, 1),
        "exit_code": code,
    }


def _rotated(load: Load, keys: Path) -> float:
    """Follow the key by another and revoke it; return how long it was taken after that."""
    old = keys.parent / "old.json"
    shutil.copy(keys / "client.json", old)
    kid = max(read(old).envelope_keys, key=lambda row: row.not_before_ms).kid.hex()
    tongguan("keys", "rotate", "--dir", str(keys), "--now")
    time.sleep(ROTATE_S / 2)  # the receiver has it before the first client uses it
    load.renewed()
    probe = Probe(load.url, old)
    tongguan("keys", "revoke", "--dir", str(keys), kid)
    # From when the file was written: what the command took is not the sidecar's.
    written_s = time.monotonic() - (time.time() - (keys / "sidecar.json").stat().st_mtime)
    refused_s = probe.refused()
    load.renewed()
    return max(0.0, refused_s - written_s)


def main(argv: list[str] | None = None) -> int:
    """Run, print, write; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    output.add_json(parser)
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="tongguan-rotation-"))
    try:
        found = soak(folder, options.minutes)
    except (OSError, process.PeerError, subprocess.CalledProcessError) as problem:
        print(f"perf.rotation_soak: {problem}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    problems = [f"{name}: {found[name]}, at most {most}" for name, most in GATES.items()
                if found[name] > most]  # fmt: skip
    problems += ["it did not end by itself"] if found["exit_code"] else []
    result = {
        "what": "rotation_soak",
        "machine": machine.facts() | machine.sidecar(),
        "parameters": {"minutes": options.minutes, "clients": CLIENTS, "rotate_s": ROTATE_S},
        "gates": GATES,
        "found": found,
        "missed": problems,
    }
    output.put(options.json, result, "\n".join(f"{n:28}{v!s:>10}" for n, v in found.items()))
    for line in problems:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
