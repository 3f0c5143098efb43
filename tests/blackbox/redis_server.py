"""Debian's redis-server as a process of a test's own."""

import shutil
import signal
import socket
import subprocess
import time

import pytest

from tests.blackbox.harness import stop
from tests.blackbox.node import REDIS, free_base

PROGRAM = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="capability: redis-server")
WAIT_S = 20


class RedisServer:
    """A context manager; `kill`, `start`, `stall` and `go_on` do what they say to the process."""

    def __init__(self, *options):
        self.port = free_base() + REDIS
        self.options = options
        self.process = None

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self):
        command = [PROGRAM, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no", "--daemonize", "no", *self.options]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    return self
            except OSError:
                assert self.process.poll() is None, "redis-server did not start"
                time.sleep(0.01)
        raise AssertionError("redis-server does not listen")

    def kill(self):
        self.process.kill()
        self.process.wait(WAIT_S)

    def stall(self):
        stop(self.process.pid)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    def ask(self, *words, password=None):
        """Send one command; return the first line of its answer."""
        with socket.create_connection(("127.0.0.1", self.port), WAIT_S) as sock:
            lines = [("AUTH", password)] if password else []
            for line in [*lines, words]:
                sock.sendall(
                    f"*{len(line)}\r\n".encode()
                    + b"".join(b"$%d\r\n%b\r\n" % (len(w), w.encode()) for w in line)
                )
                answer = sock.recv(1 << 16)
        return answer.decode()

    def keys(self):
        return [line for line in self.ask("KEYS", "*").split("\r\n") if line.startswith("smx1:")]

    def __enter__(self):
        return self.start()

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.go_on()
            self.kill()
