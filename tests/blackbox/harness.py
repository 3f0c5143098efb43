"""The sidecar as a process between raw sockets: a scriptable upstream, a byte-exact client.

Nothing here uses the sidecar's own HTTP code: a parser shared by both sides would agree with itself
about wrong bytes.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.blackbox.node import environment, free_base

# What happens at all happens soon; tests/mutants.py, where much does not happen, waits less.
WAIT_S = int(os.environ.get("BLACKBOX_WAIT_S", "20"))
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, no time: close sends RST
OK_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n"
OK = OK_HEAD + b"{}"
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
# Runs the sidecar under a file size limit: its first argument.
LIMITED = """
import resource, runpy, sys
size = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
runpy.run_module("proxy", run_name="__main__")
"""


def chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


def until(check, what="it", wait_s=WAIT_S):
    """Return the first true result of `check()`."""
    end = time.monotonic() + wait_s
    while time.monotonic() < end:
        if result := check():
            return result
        time.sleep(0.005)
    raise AssertionError(f"{what} did not happen in {wait_s} s")


def stop(pid):
    """Stop a process and wait until it stands: a thread goes on until it has taken the signal."""
    os.kill(pid, signal.SIGSTOP)

    def stands():
        files = Path("/proc").glob(f"{pid}/task/*/stat")
        return all(file.read_text().rpartition(") ")[2].startswith("T") for file in files)

    until(stands, f"{pid} to stand")


class Wire:
    """One end of a TCP connection: bytes in, bytes out, nothing hidden."""

    def __init__(self, sock):
        self.sock = sock
        self.buffer = b""
        sock.settimeout(WAIT_S)
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, *parts):
        for part in parts:
            self.sock.sendall(part)
        return self

    def fill(self):
        """Read once; False at the end of the connection, ConnectionError at a reset."""
        data = self.sock.recv(1 << 18)
        self.buffer += data
        return bool(data)

    def take(self, size):
        while len(self.buffer) < size:
            if not self.fill():
                raise EOFError(self.buffer)
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return data

    def take_until(self, mark):
        """Return the bytes up to and with `mark`; None if the connection ends cleanly before."""
        while mark not in self.buffer:
            if not self.fill():
                if self.buffer:
                    raise EOFError(self.buffer)
                return None
        end = self.buffer.index(mark) + len(mark)
        data, self.buffer = self.buffer[:end], self.buffer[end:]
        return data

    def rest(self):
        """Return (bytes up to the connection's end, whether it was a clean FIN)."""
        try:
            while self.fill():
                pass
            clean = True
        except ConnectionError:
            clean = False
        data, self.buffer = self.buffer, b""
        return data, clean

    def line(self):
        line = self.take_until(b"\r\n")
        if line is None:
            raise EOFError("closed inside a chunked body")
        return line

    def chunked(self):
        """Return (payload, raw bytes) of a chunked body."""
        payload = raw = b""
        while True:
            line = self.line()
            raw += line
            size = int(line.split(b";")[0], 16)
            if not size:
                break
            data = self.take(size + 2)
            raw += data
            payload += data[:-2]
        while (line := self.line()) != b"\r\n":
            raw += line
        return payload, raw + b"\r\n"

    def ended(self):
        """Wait for the peer to go; return the monotonic time at which that was seen."""
        with contextlib.suppress(ConnectionError):
            while self.sock.recv(1 << 16):
                pass
        return time.monotonic()

    def reset(self):
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.sock.close()

    def close(self):
        # Shut down too: a thread blocked in recv would keep the connection open.
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Head:
    """A head as it came: start line and field lines, nothing normalised."""

    def __init__(self, raw):
        self.raw = raw
        lines = raw[:-4].split(b"\r\n")
        self.line = lines[0]
        self.lines = lines[1:]

    def all(self, name):
        """Return the values of a field, in order."""
        rows = (line.partition(b":") for line in self.lines)
        return [v.strip(b" \t") for n, _, v in rows if n.lower() == name.lower().encode()]

    def get(self, name):
        values = self.all(name)
        assert len(values) <= 1, (name, values)
        return values[0] if values else None

    @property
    def names(self):
        return [line.partition(b":")[0] for line in self.lines]


class Answer(Head):
    """A response, body taken apart by its framing."""

    body = b""
    raw_body = b""
    interim = 0  # answers of 1xx before it

    @property
    def status(self):
        return int(self.line.split(b" ")[1])

    @property
    def trace_id(self):
        return self.get("X-Trace-Id").decode()

    def error(self):
        """Return our error's code, after checking its form."""
        assert self.get("Content-Type") == b"application/json"
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert self.get("X-Tongguan-Error") == error["code"].encode()
        if self.status in {429, 503}:
            assert int(self.get("Retry-After")) >= 1
        return error["code"]


class Client(Wire):
    """A client connection."""

    def __init__(self, port, *, receive_buffer=None, source=None):
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(WAIT_S)
        if source is not None:
            sock.bind((source, 0))
        try:
            sock.connect(("127.0.0.1", port))
        except OSError:
            sock.close()
            raise
        super().__init__(sock)

    def head(self):
        raw = self.take_until(b"\r\n\r\n")
        if raw is None:
            raise EOFError("closed before an answer")
        return Answer(raw)

    def answer(self, method="GET"):
        """Read one final answer with its body; interim ones are skipped."""
        answer, interim = self.head(), 0
        while answer.status < 200:
            answer, interim = self.head(), interim + 1
        answer.interim = interim
        if method == "HEAD" or answer.status in {204, 304}:
            return answer
        if answer.get("Transfer-Encoding") is not None:
            assert answer.get("Transfer-Encoding") == b"chunked"
            assert answer.get("Content-Length") is None
            answer.body, answer.raw_body = self.chunked()
        elif answer.get("Content-Length") is not None:
            answer.body = answer.raw_body = self.take(int(answer.get("Content-Length")))
        else:
            answer.body, clean = self.rest()
            assert clean, "an answer that ends by close was reset"
        return answer


def post(body, *fields, target=b"/v1/chat/completions", version=b"1.1"):
    """Return a POST of JSON as bytes."""
    lines = b"".join(field + b"\r\n" for field in fields)
    return (
        b"POST %b HTTP/%b\r\nHost: app.test\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n%b\r\n%b" % (target, version, len(body), lines, body)
    )


def get(target=b"/", *fields):
    lines = b"".join(field + b"\r\n" for field in fields)
    return b"GET %b HTTP/1.1\r\nHost: app.test\r\n%b\r\n" % (target, lines)


def answer_with(body, status=b"200 OK", kind=b"application/json"):
    """Return an answer with a Content-Length as bytes."""
    return b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        kind,
        len(body),
        body,
    )


class Seen(Head):
    """A request as the upstream saw it; `body()` reads its body when the script wants it."""

    def __init__(self, raw, wire):
        super().__init__(raw)
        self.wire = wire
        self.payload = None
        self.raw_body = b""

    def body(self):
        if self.payload is None:
            if self.get("Transfer-Encoding") is not None:
                self.payload, self.raw_body = self.wire.chunked()
            else:
                self.payload = self.raw_body = self.wire.take(int(self.get("Content-Length") or 0))
        return self.payload

    def reply(self, *parts):
        """Read the request's body, then send bytes."""
        self.body()
        self.wire.send(*parts)


def ok(seen):
    seen.reply(OK)


class Upstream:
    """A server on loopback: for each request on each connection it runs `script(seen)`.

    `seen` collects the requests, `wires` the connections. A script that ends with its connection
    closed ends that connection's thread.
    """

    def __init__(self, path=None):
        if path is None:
            self.listener = socket.create_server(("127.0.0.1", 0), backlog=256)
            self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        else:
            self.listener = socket.socket(socket.AF_UNIX)
            self.listener.bind(str(path))
            self.listener.listen()
        self.wires = []
        self.answering(ok)
        threading.Thread(target=self._accept, daemon=True).start()

    def answering(self, script):
        """Set the script, forget what was seen."""
        self.seen = []
        self.problems = []
        self.script = script if callable(script) else lambda seen: seen.reply(script)
        return self

    def _accept(self):
        while True:
            try:
                sock, _ = self.listener.accept()
            except OSError:
                return
            wire = Wire(sock)
            self.wires.append(wire)
            threading.Thread(target=self._serve, args=(wire,), daemon=True).start()

    def _serve(self, wire):
        wire.sock.settimeout(None)
        try:
            while (raw := wire.take_until(b"\r\n\r\n")) is not None:
                seen = Seen(raw, wire)
                self.seen.append(seen)
                self.script(seen)
                if wire.sock.fileno() < 0:
                    return
                seen.body()
        except (OSError, EOFError):
            pass  # the sidecar left, or the script closed
        except Exception as problem:  # noqa: BLE001 - shown by the test that caused it
            self.problems.append(problem)
        finally:
            wire.close()

    def last(self):
        """Return the newest request, waiting for it."""
        until(lambda: self.seen, "a request upstream")
        return self.seen[-1]

    def close(self):
        self.listener.close()
        for wire in self.wires:
            wire.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def new_keys(folder, *arguments):
    """Make key files as an operator does; return their folder."""
    command = [sys.executable, "-m", "proxy.cli", "keys", "new", "--dir", str(folder), *arguments]
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    return folder


class Sidecar:
    """`python -m proxy --config FILE`; a context manager that leaves no process.

    `variables` are settings as they stand in the environment, without the prefix. `file_bytes`:
    no file may grow beyond that, as on a full disk.
    """

    def __init__(self, folder, upstream_url, *, keys=None, toml="", file_bytes=None, **variables):
        base = free_base()
        self.app, self.sealed, self.admin = base + 80, base + 81, base + 90
        self.folder = Path(folder)
        self.folder.mkdir(exist_ok=True)
        self.keys = keys
        self.audit_dir = self.folder / "audit"
        self.log_path = self.folder / "log"
        self.config = self.folder / "tongguan.toml"
        self.config.write_text(toml)
        values = {
            "DOORS_APP": f"127.0.0.1:{self.app}",
            "DOORS_SEALED": f"127.0.0.1:{self.sealed}",
            "DOORS_ADMIN": f"127.0.0.1:{self.admin}",
        }
        for pool in ("DEDICATED", "SHARED", "BEST_EFFORT"):
            values[f"POOLS_{pool}_ENDPOINTS"] = upstream_url
        if keys is not None:
            self.audit_dir.mkdir(exist_ok=True)
            values["KEYS_FILE"] = str(keys / "sidecar.json")
            values["AUDIT_DIR"] = str(self.audit_dir)
            values["ENVELOPE_FENCE_S"] = "0"
        values |= {name: str(value) for name, value in variables.items()}
        self.environ = environment(**{f"TONGGUAN_{name}": v for name, v in values.items()})
        self.command = [sys.executable, "-m", "proxy", "--config", str(self.config)]
        if file_bytes is not None:
            self.command[1:3] = ["-c", LIMITED, str(file_bytes)]
        self.process = None

    def spawn(self):
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.environ,
                stdout=log,
                stderr=log,
            )
        return self

    def start(self):
        """Spawn and wait until it serves."""
        self.spawn()

        def serving():
            assert self.process.poll() is None, self.log
            return "serving:" in self.log_since

        self._log_start = len(self.log)
        until(serving, "serving")
        return self

    @property
    def log(self):
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def log_since(self):
        return self.log[self._log_start :]

    def signal(self, number):
        self.process.send_signal(number)

    def ended(self, wait_s=WAIT_S):
        """Wait for the process to end; return its exit code."""
        return self.process.wait(wait_s)

    def kill(self):
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
        if self.process is not None:
            self.process.wait(WAIT_S)

    def __enter__(self):
        return self.start()

    def __exit__(self, kind, *_):
        self.kill()
        if kind is None:
            # An exception in a callback kills no process: only the log tells.
            bad = [line for line in self.log.splitlines() if " ERROR " in line or "Trace" in line]
            assert bad == [], self.log

    def idle(self):
        """Wait until nothing is held for any request."""
        names = ("pool_inflight", "unverified_bytes", "connections")
        for name in names:
            until(lambda n=name: self.metric(f"tongguan_proxy_{n}") == 0, f"no {name}")
        return True

    def client(self, **options):
        return Client(self.app, **options)

    def ask(self, data, method="POST"):
        """Send bytes on a fresh connection to the plain door; return the answer."""
        with self.client() as client:
            return client.send(data).answer(method)

    def admin_ask(self, method, path, body=b"", *fields):
        lines = b"".join(field + b"\r\n" for field in fields)
        with Client(self.admin) as client:
            client.send(
                b"%b %b HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n%b\r\n%b"
                % (method.encode(), path.encode(), len(body), lines, body)
            )
            return client.answer(method)

    def metric(self, name, **labels):
        """Return the sum of a metric's samples that have these labels."""
        text = self.admin_ask("GET", "/metrics").body.decode()
        marks = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.split("{")[0].split(" ")[0] == name and all(mark in line for mark in marks)
        )

    def resident_bytes(self):
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def records(self):
        """Return all whole audit records of all chains, oldest chain first."""
        return [json.loads(line.split(b"\t")[0]) for line in self.lines()]

    def lines(self):
        files = sorted(self.audit_dir.glob("*/*.log"))
        return [line for f in files for line in f.read_bytes().splitlines() if b"\t" in line]

    def record(self, value, member="trace_id"):
        """Return the request record with this trace id (or other member), waiting for it."""

        def find():
            records = [r for r in self.records() if r["kind"] != "open"]
            found = [r for r in records if r.get(member) == value]
            assert len(found) <= 1, "two records for one request"
            return found

        return until(find, f"the record with {member} {value}")[0]


def tongguan(*arguments):
    """Run the `tongguan` command; return the finished process."""
    command = [sys.executable, "-m", "proxy.cli", *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
