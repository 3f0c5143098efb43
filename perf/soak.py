"""Load, deaths, and then nothing may be left: `python -m perf.soak --minutes 10 --json FILE`.

A sidecar with keys and an audit chain serves 70 % of what its core can do: requests and streams
from the load generator, beside them clients that leave at any moment, while the engine behind it is
killed and started again. At the end everything stops and the run says whether memory stayed flat,
every slot was given back, every upstream connection closed, the chain holds and has a record of
every request. It is no measurement: a busy machine does not disturb what it says.
Exit codes: 0 all holds, 1 something is left or missing, 2 the run could not be made.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf import chaos, machine, output, peers, process, report
from perf.process import PeerError
from proxy.metrics import OUTCOMES

if TYPE_CHECKING:
    from collections.abc import Sequence

PEER_CORE, LOAD_CORE = 0, 1
PORT_BASE = 22000
# The load generators' share of the core; what the leaving clients cost comes on top, about a tenth.
LOAD = 0.6
# Requests and streams a second to begin with, and at most.
FIRST = {"json": 300.0, "stream": 40.0}
TOP = {"json": 6000.0, "stream": 400.0}
SLICE_S = 10.0
SHED_MOST = 0.1  # of a slice's requests
STREAM = ["-s", "-m", "m-n64-g10"]
THREADS = 4
SAMPLE_S = 0.5
WARM_SHARE = 1 / 3  # memory grows until every path was used once
SPANS = 24  # of the time after it, for the slope
SETTLE_S = 30.0
# Idle upstream connections are let go soon, so that the end of the run can see it.
KEEPALIVE_S = 2
GAUGES = ("connections", "pool_inflight", "pool_idle_connections", "unverified_bytes",
          "observed_bytes", "audit_pending")  # fmt: skip


def growth_mb(samples: Sequence[tuple[float, float]]) -> float:
    """Return by how much a line through (seconds, MB) rises over them.

    Of each of a few spans of time the least counts, since what is held for a while is no leak; of
    these the median of all pairs' slopes (Theil and Sen), which a few high ones do not bend.
    """
    step = max(1, len(samples) // SPANS)
    spans = [samples[at : at + step] for at in range(0, len(samples), step)]
    points = [min(span, key=lambda point: point[1]) for span in spans]
    slopes = [(b - a) / (t - s) for (s, a), (t, b) in combinations(points, 2) if t > s]
    return statistics.median(slopes) * (samples[-1][0] - samples[0][0]) if slopes else 0.0


def upstream_sockets(pid: int, port: int) -> int:
    """Return how many sockets a process holds towards a port of this machine."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(entry.readlink()))
    rows = (row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(row[2].endswith(f":{port:04X}") and f"socket:[{row[9]}]" in own for row in rows)


def descriptors(pid: int) -> int:
    """Return how many files a process holds open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


class Metrics:
    """One scrape of the admin door."""

    def __init__(self, port: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            self._lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()

    def sum(self, name: str, mark: str = "") -> float:
        """Return the sum of a metric's samples whose labels have `mark`."""
        full = f"tongguan_proxy_{name}"
        rows = (line for line in self._lines if line.startswith((f"{full} ", f"{full}{{")))
        return sum(float(row.rsplit(" ", 1)[1]) for row in rows if mark in row)


class Engine:
    """The fake engine, killed and started again."""

    def __init__(self, ports: peers.Ports) -> None:
        self._ports = ports
        self._log = ports.folder / "backend.log"
        self._child: subprocess.Popen[bytes] | None = None
        self.deaths = 0

    def start(self) -> None:
        """Start and wait until it answers."""
        command = [str(peers.WORK / "backend"), str(self._ports.backend)]
        self._child = process.spawn(command, LOAD_CORE, self._log)
        process.wait_until(lambda: process.ask(self._ports.backend) == 200, self._child, self._log)

    def stop(self) -> None:
        """Kill it."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()

    def die(self, rng: random.Random) -> None:
        """Kill it, leave it dead for a moment, start it again."""
        self.stop()
        time.sleep(rng.random() * 0.5)
        self.start()
        self.deaths += 1


def next_rates(rate: dict[str, float], load: float, shed: float) -> dict[str, float]:
    """Return the rates for the next slice, so that it takes its share of the core.

    A busy machine makes the engine slow, and the sidecar then refuses what would wait too long.
    That is cheap: where more than a tenth was shed, `load` says nothing and the rates go down.
    """
    step = 0.7 if shed > SHED_MOST else min(1.5, max(0.5, LOAD / max(load, 0.01)))
    return {name: min(TOP[name], one * step) for name, one in rate.items()}


def _loads(port: int, rate: dict[str, float], seconds: float) -> list[subprocess.Popen[bytes]]:
    length = ["-d", f"{seconds:g}", "-w", "0"]
    return [
        _loadgen(port, ["-c", "64", "-r", str(rate["json"]), *length]),
        _loadgen(port, ["-c", "512", "-r", str(rate["stream"]), *STREAM, *length]),
    ]


def _figures(loads: list[subprocess.Popen[bytes]]) -> list[dict[str, float]]:
    return [json.loads(load.communicate()[0]) for load in loads]


def _loadgen(port: int, options: list[str]) -> subprocess.Popen[bytes]:
    command = [str(peers.WORK / "loadgen"), "-p", str(port), *options]
    with process.on_core(LOAD_CORE):
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )


class Soak:
    """One run over a sidecar that was started for it."""

    def __init__(self, seconds: float, seed: int, ports: peers.Ports, mb_max: float) -> None:
        self.seconds, self.seed, self.ports, self.mb_max = seconds, seed, ports, mb_max
        self.engine = Engine(ports)
        self.samples: list[tuple[float, float]] = []
        self.facts: dict[str, Any] = {}

    def run(self) -> list[report.Gate]:
        """Load, stop, look; return what has to hold."""
        peer = peers.make("tongguan", self.ports)
        settings = {"TONGGUAN_ENVELOPE_FENCE_S": "0"}
        for pool in ("DEDICATED", "SHARED", "BEST_EFFORT"):
            settings[f"TONGGUAN_POOLS_{pool}_KEEPALIVE_S"] = str(KEEPALIVE_S)
        log = self.ports.folder / "tongguan.log"
        self.engine.start()
        try:
            child = process.spawn(peer.command, PEER_CORE, log, {**peer.environment, **settings})
            try:
                process.wait_until(lambda: process.ask(peer.port) == 200, child, log)
                gates = self._under_load(peer.port, child)
                gates += self._after(child.pid)
                child.send_signal(signal.SIGTERM)
                code = child.wait(60)
            finally:
                process.stop(child)
        finally:
            self.engine.stop()
        text = log.read_text(errors="replace")
        errors = sum(" ERROR " in line or "Traceback" in line for line in text.splitlines())
        gates.append(report.Gate("exit code after the drain", code, 0, ""))
        gates.append(report.Gate("errors in the log", errors, 0, ""))
        return gates + self._chain()

    def _under_load(self, port: int, child: subprocess.Popen[bytes]) -> list[report.Gate]:
        """Serve until the time is over; return what is said about it."""
        rng = random.Random(self.seed)
        deaths = chaos.Deaths(
            port, self.ports.sealed, self.ports.client_keys, threads=THREADS, seed=self.seed
        )
        killer_over = threading.Event()
        killer = threading.Thread(target=self._kill, args=(rng, killer_over))
        began_ns, began = process.cpu_ns(child.pid)[0], time.monotonic()
        try:
            deaths.start()
            killer.start()
            served = self._slices(port, child)
        finally:
            killer_over.set()
            deaths.stop()
            killer.join()
        spent_s = (process.cpu_ns(child.pid)[0] - began_ns) / 1e9
        kept = [point for point in self.samples if point[0] >= self.seconds * WARM_SHARE]
        self.facts |= {
            "load": round(spent_s / (time.monotonic() - began), 3),
            **served,
            "clients_left": dict(sorted(deaths.counts.items())),
            "engine_deaths": self.engine.deaths,
            "rss_mb_after_warm_up": round(kept[0][1], 2),
            "rss_mb_at_the_end": round(kept[-1][1], 2),
            "hung": dict(deaths.hung),
        }
        for problem in deaths.unexpected:
            raise PeerError(f"a client thread ended: {problem}")
        return [
            report.Gate("RSS growth after the warm-up", growth_mb(kept), self.mb_max, "MB"),
            report.Gate("clients without an end", sum(deaths.hung.values()), 0, ""),
            report.Gate("engine deaths", self.engine.deaths, 1, "", at_least=True),
        ]

    def _slices(self, port: int, child: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Load in slices until the time is over, each at the rates that the last one suggests."""
        rate, began = dict(FIRST), time.monotonic()
        served, failed, shed = Counter[str](), Counter[str](), self._shed()
        while (left := self.seconds - (time.monotonic() - began)) > 0:
            spent_ns, slice_began = process.cpu_ns(child.pid)[0], time.monotonic()
            loads = _loads(port, rate, min(SLICE_S, self.seconds / 6, left))
            try:
                while any(load.poll() is None for load in loads):
                    if child.poll() is not None:
                        raise PeerError(f"the sidecar ended with {child.returncode}")
                    self.samples.append((time.monotonic() - began, process.rss_mb(child.pid)))
                    time.sleep(SAMPLE_S)
            finally:
                for load in loads:
                    process.stop(load)
            total = 0
            for name, figures in zip(FIRST, _figures(loads), strict=True):
                served[name] += int(figures["total"])
                failed[name] += int(figures["not_200"])
                total += int(figures["total"])
            spent_s = (process.cpu_ns(child.pid)[0] - spent_ns) / 1e9
            load = spent_s / (time.monotonic() - slice_began)
            before, shed = shed, self._shed()
            rate = next_rates(rate, load, (shed - before) / max(1, total))
        return {
            "served": dict(served),
            "not_200": dict(failed),
            "last_rates_per_s": {name: round(one) for name, one in rate.items()},
        }

    def _shed(self) -> float:
        return Metrics(self.ports.admin).sum("requests_total", 'outcome="shed"')

    def _kill(self, rng: random.Random, over: threading.Event) -> None:
        longest = min(15.0, self.seconds / 4)
        while not over.wait(rng.uniform(longest / 4, longest)):
            self.engine.die(rng)

    def _after(self, pid: int) -> list[report.Gate]:
        """Wait until all is let go; return what is left."""
        end = time.monotonic() + SETTLE_S
        while True:
            metrics = Metrics(self.ports.admin)
            left = {name: metrics.sum(name) for name in GAUGES}
            sockets = upstream_sockets(pid, self.ports.backend)
            if not (any(left.values()) or sockets) or time.monotonic() > end:
                break
            time.sleep(0.1)
        self.facts["finished"] = metrics.sum("requests_total")
        self.facts["outcomes"] = {
            name: metrics.sum("requests_total", f'outcome="{name}"') for name in OUTCOMES
        }
        self.facts["descriptors"] = descriptors(pid)
        lost = metrics.sum("audit_lost_total")
        return [
            *(report.Gate(f"left: {name}", value, 0, "") for name, value in left.items()),
            report.Gate("left: upstream sockets", sockets, 0, ""),
            report.Gate("records lost", lost, 0, ""),
        ]

    def _chain(self) -> list[report.Gate]:
        """Verify the chain; return whether it holds and has every request."""
        auditor = self.ports.client_keys.with_name("auditor.json")
        command = [sys.executable, "-c", "from proxy.cli import main; main()", "audit", "verify"]
        done = subprocess.run(
            [*command, str(self.ports.audit), "--keys", str(auditor)],
            check=False,
            capture_output=True,
            text=True,
            cwd=peers.HERE.parent,
        )
        self.facts["verify"] = (done.stdout + done.stderr).strip().splitlines()[-3:]
        records = 0
        for file in self.ports.audit.glob("*/*.log"):
            with file.open("rb") as lines:
                records += sum(b'"kind":"request"' in line for line in lines)
        missing = self.facts["finished"] - records
        self.facts["records"] = records
        return [
            report.Gate("audit verify", done.returncode, 0, "exit code"),
            report.Gate("requests without a record", abs(missing), 0, ""),
        ]


def run(arguments: argparse.Namespace) -> int:
    """Make the whole run."""
    if own := peers.own_variables_set():
        raise PeerError(f"unset {', '.join(own)}: shipped defaults are what is soaked")
    if len(os.sched_getaffinity(0)) < 2:
        raise PeerError("two cores are needed: one for the sidecar, one for the load")
    peers.build_tools()
    seconds, seed = arguments.minutes * 60, arguments.seed
    made_of = {"machine": machine.facts(), "sidecar": machine.sidecar()}  # before a long time
    soak = Soak(seconds, seed, peers.Ports(arguments.port_base), arguments.mb)
    gates = soak.run()
    outcome = {
        "what": "perf.soak",
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        **made_of,
        "parameters": {"seconds": seconds, "seed": seed},
        "facts": soak.facts,
        "gates": [report.gate_row(gate) for gate in gates],
        "rss_mb": [
            [round(at, 1), round(mb, 2)]
            for at, mb in soak.samples[:: len(soak.samples) // 120 or 1]
        ],
    }
    table = "\n".join([json.dumps(soak.facts, indent=1), *report.gate_lines(gates)])
    output.put(arguments.json, outcome, table)
    return 0 if all(gate.ok for gate in gates) else 1


def main() -> int:
    """Parse and run; what goes wrong is one line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.soak", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long it loads (10)")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 31), help="of the deaths"
    )
    parser.add_argument("--mb", type=float, default=2.0, help="growth of memory allowed (2)")
    parser.add_argument("--port-base", type=int, default=PORT_BASE, help="first of 44 ports")
    output.add_json(parser)
    try:
        return run(parser.parse_args())
    except (PeerError, subprocess.CalledProcessError) as problem:
        sys.stderr.write(f"perf.soak: {problem}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
