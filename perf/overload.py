"""What classes get when more comes than an upstream does: P0 beside a flood, and 1.2x for a while.

    python -m perf.overload [--seconds N] [--json FILE]

The upstream has 32 slots of 20 ms each, so it does 1 600 requests a second; all three pools point
to it. The sidecar has shipped defaults but for that, and P0 is granted. Method: perf/README.md.
Exit codes: 0 every gate holds, 1 a gate is missed, 2 the run could not be made.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import subprocess
import sys
import urllib.request
from statistics import median
from typing import TYPE_CHECKING, Any

from perf import machine, output, peers, process
from perf.process import PeerError
from perf.report import Gate, gate_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER_CORE, LOAD_CORE = 0, 1
PORT_BASE = 21300
SLOTS, EACH_MS = 32, 20
CAPACITY = SLOTS * 1000 / EACH_MS
FLOOD, P0_RATE, ROUNDS, ROUND_S = 4.0, 100.0, 3, 10.0
OVERLOAD = 1.2
MIX = {"P0": 0.2, "P1": 0.4, "P2": 0.4}
CONNECTIONS, P0_CONNECTIONS = 700, 100
# The promises.
FLOOD_P99 = 1.5
P1_SHED, P1_P99_MS, P2_EARLY = 0.003, 2500.0, 0.05


@contextlib.contextmanager
def sidecar(ports: peers.Ports) -> Iterator[int]:
    """Run the upstream and a sidecar before it; yield the sidecar's port."""
    logs = ports.folder
    logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "perf.slots", str(ports.backend), str(SLOTS), str(EACH_MS)]
    upstream = process.spawn(command, LOAD_CORE, logs / "slots.log")
    try:
        log = logs / "slots.log"
        process.wait_until(lambda: process.ask(ports.backend) == 200, upstream, log)
        peer = peers.make("tongguan", ports)
        settings = logs / "tongguan" / "tongguan.toml"
        granted = '\n[tenants.default]\nmax_class = "P0"\n'
        settings.write_text(settings.read_text(encoding="utf-8") + granted, encoding="utf-8")
        log = logs / "sidecar.log"
        child = process.spawn(peer.command, PEER_CORE, log, peer.environment)
        try:
            process.wait_until(lambda: process.ask(peer.port) == 200, child, log)
            yield peer.port
        finally:
            process.stop(child)
    finally:
        process.stop(upstream)


class Load:
    """Open-loop requests from a process of their own."""

    def __init__(
        self, port: int, seconds: float, seed: int, connections: int, rates: dict[str, float]
    ) -> None:
        arguments = [str(port), str(seconds), str(seed), str(connections)]
        classes = [f"{qos}={rate:g}" for qos, rate in rates.items()]
        with process.on_core(LOAD_CORE):
            self._child = subprocess.Popen(
                [sys.executable, "-m", "perf.openloop", *arguments, *classes],
                stdout=subprocess.PIPE,
                start_new_session=True,
                cwd=peers.HERE.parent,
            )

    def figures(self) -> dict[str, dict[str, Any]]:
        """Wait for the end; return the figures of each class."""
        out, _ = self._child.communicate()
        if self._child.returncode:
            raise PeerError(f"the load ended with {self._child.returncode}")
        rows = [json.loads(line) for line in out.splitlines()]
        return {row["qos"]: row for row in rows}


def metric(ports: peers.Ports, name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ports.admin}/metrics") as answer:
        text = answer.read().decode()
    marks = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.split("{")[0].split(" ")[0] == name and all(mark in line for mark in marks)
    )


def beside_a_flood(ports: peers.Ports, seed: int) -> dict[str, Any]:
    """Measure P0 alone and beside a flood of P2, in turn."""
    rows = []
    with sidecar(ports) as port:
        for number in range(ROUNDS):
            at = seed + 10 * number
            alone = Load(port, ROUND_S, at, P0_CONNECTIONS, {"P0": P0_RATE}).figures()["P0"]
            flood = Load(port, ROUND_S + 1, at + 1, CONNECTIONS, {"P2": FLOOD * CAPACITY})
            beside = Load(port, ROUND_S, at + 2, P0_CONNECTIONS, {"P0": P0_RATE}).figures()["P0"]
            rows.append({"alone": alone, "beside": beside, "flood": flood.figures()["P2"]})
        limit = metric(ports, "tongguan_proxy_adaptive_limit")
    return {"rounds": rows, "limit_at_the_end": limit}


def overloaded(ports: peers.Ports, seconds: float, seed: int) -> dict[str, Any]:
    """Send 1.2 times what the upstream does, all classes mixed."""
    rates = {qos: OVERLOAD * CAPACITY * share for qos, share in MIX.items()}
    with sidecar(ports) as port:
        classes = Load(port, seconds, seed, CONNECTIONS, rates).figures()
        for qos, row in classes.items():
            row["early"] = metric(ports, "tongguan_proxy_shed_total", qos=qos, reason="early")
        limit = metric(ports, "tongguan_proxy_adaptive_limit")
    return {"seconds": seconds, "classes": classes, "limit_at_the_end": limit}


def lost(row: dict[str, Any]) -> int:
    """Return how many requests of a class were not served."""
    return int(row["sent"]) - int(row["outcomes"].get("ok", 0))


def missing(row: dict[str, Any]) -> int:
    """Return how far the outcomes are from what was sent; each request has one."""
    return abs(int(row["sent"]) - sum(row["outcomes"].values()))


def gates(flood: dict[str, Any], overload: dict[str, Any]) -> list[Gate]:
    """Return the promises, with what was measured."""
    rounds, rows = flood["rounds"], overload["classes"]
    ratios = [r["beside"]["p99_ms"] / r["alone"]["p99_ms"] for r in rounds]
    p0_lost = sum(lost(r["alone"]) + lost(r["beside"]) for r in rounds)
    every = [row for r in rounds for row in r.values()] + list(rows.values())
    p1, p2 = rows["P1"], rows["P2"]
    return [
        Gate("P0 p99 beside a P2 flood of 4x, to P0 alone", median(ratios), FLOOD_P99, "x"),
        Gate("P0 lost beside the flood", p0_lost, 0, "requests"),
        Gate("P0 lost at 1.2x", lost(rows["P0"]), 0, "requests"),
        Gate("P1 lost at 1.2x", lost(p1) / p1["sent"], P1_SHED, "of all"),
        Gate("P1 p99 at 1.2x", p1["p99_ms"], P1_P99_MS, "ms"),
        Gate("P2 refused early at 1.2x", p2["early"] / p2["sent"], P2_EARLY, "of all"),
        Gate("requests without an outcome", sum(map(missing, every)), 0, "requests"),
    ]


def run(arguments: argparse.Namespace) -> int:
    """Measure, print, keep; return the exit code."""
    if own := peers.own_variables_set():
        raise PeerError(f"unset {', '.join(own)}: with them, defaults are not the defaults")
    ports = peers.Ports(arguments.port_base)
    flood = beside_a_flood(ports, arguments.seed)
    overload = overloaded(ports, arguments.seconds, arguments.seed)
    found = gates(flood, overload)
    result = {
        "what": "overload",
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine.facts(),
        "parameters": {
            "slots": SLOTS,
            "each_ms": EACH_MS,
            "flood": FLOOD,
            "p0_rate": P0_RATE,
            "overload": OVERLOAD,
            "mix": MIX,
            "seed": arguments.seed,
        },
        "flood": flood,
        "overload": overload,
        "gates": [
            {"name": g.name, "value": g.value, "limit": g.limit, "unit": g.unit, "ok": g.ok}
            for g in found
        ],
    }
    output.put(arguments.json, result, "\n".join(gate_lines(found)))
    return 0 if all(gate.ok for gate in found) else 1


def main() -> int:
    """Parse and run; what goes wrong is one line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.overload", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of 1.2x overload (60)")
    parser.add_argument("--seed", type=int, default=1, help="of the arrivals")
    parser.add_argument("--port-base", type=int, default=PORT_BASE, help="first of 44 ports")
    output.add_json(parser)
    try:
        return run(parser.parse_args())
    except (PeerError, subprocess.CalledProcessError) as problem:
        sys.stderr.write(f"perf.overload: {problem}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
