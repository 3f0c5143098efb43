"""Real processes on loopback: an agent, and what tests ask of it."""

import collections
import contextlib
import os
import random
import socket
import subprocess
import sys
import time

import httpx

OFFSETS = (80, 81, 90, 100, 190)
REDIS = 70
WAIT_S = 60
BASES = range(17_000, 32_000)
WORKERS = 8  # of pytest: each has its own part of the bases
given = collections.deque(maxlen=96)


def free_base():
    """Return a base port whose ports are free, below the ephemeral range.

    Nothing holds them until the server has started, so the last ones are not given again, and each
    of pytest's workers has bases of its own.
    """
    bases, worker = BASES, os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None:
        size = len(BASES) // WORKERS
        first = int(worker.removeprefix("gw")) % WORKERS * size
        bases = BASES[first : first + size - OFFSETS[-1]]
    for _ in range(200):
        base = random.choice(bases)
        ports = [base + offset for offset in (REDIS, *OFFSETS)]
        if not set(given).isdisjoint(ports):
            continue
        with contextlib.ExitStack() as held:
            try:
                for port in ports:
                    sock = held.enter_context(socket.socket())
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        given.extend(ports)
        return base
    raise AssertionError("no free ports")


def environment(**variables):
    """Return the environment less anything of ours, and `variables`."""
    ours = {n: v for n, v in os.environ.items() if not n.startswith("TONGGUAN_")}
    return ours | variables


class AgentProcess:
    """`python -m agent` with settings by variables; a context manager that leaves nothing."""

    def __init__(self, log, **settings):
        base = free_base()
        self.url = f"http://127.0.0.1:{base + 100}"
        self.admin_url = f"http://127.0.0.1:{base + 190}"
        variables = {
            "listen": f"127.0.0.1:{base + 100}",
            "admin": f"127.0.0.1:{base + 190}",
            "threads": "1",
            **settings,
        }
        self.log_path = log
        self.environ = environment(
            **{f"TONGGUAN_AGENT_{name.upper()}": str(v) for name, v in variables.items()}
        )

    def __enter__(self):
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agent"], env=self.environ, stdout=log, stderr=log
            )
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)
        self.admin = httpx.Client(base_url=self.admin_url, timeout=WAIT_S, trust_env=False)
        return self

    def __exit__(self, *_):
        self.client.close()
        self.admin.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(WAIT_S)

    @property
    def log(self):
        return self.log_path.read_text()

    def until(self, check):
        """Wait until `check()` gives something true; connection errors count as not yet."""
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            with contextlib.suppress(httpx.TransportError):
                if result := check():
                    return result
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        raise AssertionError(f"it did not happen in {WAIT_S} s; {self.log}")

    def ready(self):
        self.until(lambda: self.admin.get("/readyz").status_code == 200)
        return self

    def metric(self, name):
        """Return the sum of a metric's samples."""
        lines = self.admin.get("/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{")]
        return sum(values)
