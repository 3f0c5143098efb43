"""What a hop through the sidecar costs, beside Envoy, a bare relay and no hop at all.

    python -m perf.proxy --setup                     compile the tools, install Envoy (perf/work)
    python -m perf.proxy --peers relay,envoy,direct,tongguan [--rounds N] [--json FILE]

The proxies run on core 0, load and backend on core 1; rounds are short and interleaved, so that
what disturbs the machine disturbs all. Method and traps: perf/README.md.
Exit codes: 0 every gate holds, 1 a gate is missed, 2 the run could not be made.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from perf import machine, peers, process, report
from perf.process import PeerError

PEER_CORE, LOAD_CORE = 0, 1
PORT_BASE = 21000
EVENTS_A_STREAM = 65  # 64 and [DONE]
COLD_STARTS = 5
FENCE_S = 30.0  # the sealed door opens after its start fence (10 s by default)
GATE_CPU, GATE_RSS_MB, GATE_COLD_S = 1.2, 44.0, 0.3

Results = dict[str, dict[str, list[dict[str, float]]]]


def tests(seconds: float) -> dict[str, list[str]]:
    """Return each test's load options."""
    base = ["-d", f"{seconds:g}", "-w", "0.5"]
    return {
        "closed": ["-c", "64", *base],
        "open": ["-c", "32", "-r", "500", *base],
        "sse10": ["-c", "32", "-r", "20", "-s", "-m", "m-n64-g10", "-d", f"{seconds:g}", "-w", "1"],
    }


def load(port: int, options: list[str], pid: int | None) -> dict[str, float]:
    """Run the load generator once; return its figures and what the peer spent meanwhile."""
    before = process.cpu_ns(pid) if pid else (0, 0)
    start = time.perf_counter()
    done = subprocess.run(
        [str(peers.WORK / "loadgen"), "-p", str(port), *options],
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=process.pinned(LOAD_CORE),
    )
    wall_ns = (time.perf_counter() - start) * 1e9
    after = process.cpu_ns(pid) if pid else (0, 0)
    if done.returncode:
        raise PeerError(f"load failed: {done.stderr.strip() or done.returncode}")
    figures: dict[str, float] = json.loads(done.stdout)
    if pid:
        spent_us = (after[0] - before[0]) / 1e3
        figures["cpu_us"] = spent_us / max(1, figures["total"])
        figures["cpu_us_per_event"] = figures["cpu_us"] / EVENTS_A_STREAM
        figures["peer_wait"] = (after[1] - before[1]) / wall_ns
        figures["wait"] += figures["peer_wait"]
    return figures


def measure(
    contestants: list[peers.Peer], ports: peers.Ports, rounds: int, seconds: float
) -> Results:
    """Start every peer, run interleaved rounds, stop every peer."""
    running: dict[str, subprocess.Popen[bytes]] = {}
    results: Results = {peer.name: {} for peer in contestants}
    try:
        for peer in contestants:
            if peer.command:
                running[peer.name] = start(peer, ports)
        for number in range(rounds):
            for test, options in tests(seconds).items():
                for peer in contestants:
                    pid = running[peer.name].pid if peer.name in running else None
                    figures = load(peer.port, options, pid)
                    results[peer.name].setdefault(test, []).append(figures)
            sys.stderr.write(f"round {number + 1} of {rounds} done\n")
    finally:
        for child in running.values():
            process.stop(child)
    return results


def start(peer: peers.Peer, ports: peers.Ports) -> subprocess.Popen[bytes]:
    """Start one peer and wait for its first 200."""
    log = ports.folder / f"{peer.name}.log"
    child = process.spawn(peer.command, PEER_CORE, log, peer.environment)
    try:
        process.wait_until(lambda: process.ask(peer.port) == 200, child, log)
    except PeerError as problem:
        process.stop(child)
        raise PeerError(f"{peer.name} {problem}") from None
    return child


def cold_start(
    peer: peers.Peer, ports: peers.Ports, doors: list[tuple[int, str]]
) -> dict[str, float]:
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
            process.wait_until(ready, child, log)
            wall = time.perf_counter() - begun
            ran, waited = process.cpu_ns(child.pid)
            starts.append({"total": 1, "wall": wall, "cpu": ran / 1e9, "wait": waited / 1e9})
        finally:
            process.stop(child)
    figures = {"cold_start_s": "wall", "cold_start_cpu_s": "cpu", "cold_start_waited_s": "wait"}
    return {name: report.median(starts, metric) or 0.0 for name, metric in figures.items()}


def rss_after_one_each(peer: peers.Peer, ports: peers.Ports) -> dict[str, float]:
    """Return MB resident after start, and after one request a door and one scrape."""
    child = start(peer, ports)
    try:
        figures = {"rss_mb_started": process.rss_mb(child.pid)}
        if peer.name == "tongguan":
            log = ports.folder / f"{peer.name}.log"
            admin = ports.admin
            process.wait_until(
                lambda: process.ask(admin, path="/readyz", get=True) == 200, child, log
            )
            ask_sealed(ports)
            if process.ask(admin, path="/metrics", get=True) != 200:
                raise PeerError("tongguan: /metrics does not answer")
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


def footprint(contestants: list[peers.Peer], ports: peers.Ports) -> dict[str, dict[str, float]]:
    """Return cold start and memory, each peer alone on its core."""
    found = {}
    for peer in contestants:
        if peer.command:
            doors = [(peer.port, "/v1/chat/completions")]
            if peer.name == "tongguan":
                doors.append((ports.admin, "/livez"))
            found[peer.name] = {
                **cold_start(peer, ports, doors),
                **rss_after_one_each(peer, ports),
            }
    return found


def gates(
    rows: dict[str, dict[str, float | None]], feet: dict[str, dict[str, float]]
) -> list[report.Gate]:
    """Return the sidecar's promises over this run; none when it did not take part."""
    if "tongguan" not in rows:
        return []
    own, small = rows["tongguan"], feet.get("tongguan", {})
    found = [
        report.Gate("RSS, one request a door, one scrape", small.get("rss_mb"), GATE_RSS_MB, "MB"),
        report.Gate("app door and /livez answer", small.get("cold_start_s"), GATE_COLD_S, "s"),
        report.Gate("failed requests", own["failed"], 0, ""),
    ]
    if "envoy" in rows:
        cost = report.ratio(own["cpu_us_per_request"], rows["envoy"]["cpu_us_per_request"])
        found.insert(0, report.Gate("CPU/request beside Envoy", cost, GATE_CPU, "x"))
    return found


def show(outcome: dict[str, Any]) -> str:
    """Return the run as text."""
    rows, feet = outcome["peers"], outcome["footprint"]
    columns = {
        "CPU us/req": "cpu_us_per_request", "req/s": "requests_per_s",
        "CPU us @500/s": "cpu_us_at_500_rps", "p50 us @500/s": "p50_us_at_500_rps",
        "CPU us/event": "cpu_us_per_event", "event p50 us": "event_p50_us", "wait": "wait",
    }  # fmt: skip
    small = {
        "start s": "cold_start_s", "start CPU s": "cold_start_cpu_s",
        "RSS MB start": "rss_mb_started", "RSS MB": "rss_mb",
    }  # fmt: skip
    body = [
        [name, *(row[c] for c in columns.values())]
        + [feet.get(name, {}).get(c) for c in small.values()]
        for name, row in rows.items()
    ]
    lines = [report.table(["peer", *columns, *small], body), ""]
    for peer, values in outcome["ratios"].items():
        pairs = (f"{name} {value:.2f}x" for name, value in values.items() if value is not None)
        lines.append(f"{peer}: " + ", ".join(pairs))
    lines.append("")
    for gate in outcome["gates"]:
        word = "ok    " if gate["ok"] else "MISSED"
        value = "not measured" if gate["value"] is None else f"{gate['value']:.3g} {gate['unit']}"
        lines.append(f"{word} {gate['name']}: {value} (at most {gate['limit']:g} {gate['unit']})")
    waits = [row["wait"] for row in rows.values() if row["wait"] is not None]
    if waits and max(waits) > report.DISTURBED:
        share = f"{max(waits):.0%}"
        lines.append(f"disturbed: a peer waited {share} for its core; latencies mean nothing")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Make the whole run."""
    if len(os.sched_getaffinity(0)) < 2:
        raise PeerError("two cores are needed: one for the proxies, one for the load")
    if own := peers.own_variables_set():
        raise PeerError(f"unset {', '.join(own)}: shipped defaults are what is measured")
    peers.build_tools()
    if arguments.setup:
        peers.set_up_envoy()
        return 0
    ports = peers.Ports(arguments.port_base)
    contestants = [peers.make(name, ports) for name in arguments.peers.split(",")]
    log = ports.folder / "backend.log"
    backend = process.spawn([str(peers.WORK / "backend"), str(ports.backend)], LOAD_CORE, log)
    try:
        process.wait_until(lambda: process.ask(ports.backend) == 200, backend, log)
        feet = footprint(contestants, ports)
        rounds = measure(contestants, ports, arguments.rounds, arguments.seconds)
    finally:
        process.stop(backend)
    rows = report.summary(rounds)
    found = gates(rows, feet)
    outcome = {
        "what": "perf.proxy",
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine.facts(),
        "parameters": {
            "rounds": arguments.rounds,
            "seconds": arguments.seconds,
            "tests": {name: " ".join(words) for name, words in tests(arguments.seconds).items()},
        },
        "peers": rows,
        "footprint": feet,
        "ratios": report.ratios(rows),
        "gates": [
            {"name": g.name, "value": g.value, "limit": g.limit, "unit": g.unit, "ok": g.ok}
            for g in found
        ],
        "rounds": rounds,
    }
    sys.stdout.write(show(outcome) + "\n")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(outcome, indent=1) + "\n", encoding="utf-8")
    return 0 if all(gate.ok for gate in found) else 1


def main() -> int:
    """Parse and run; what goes wrong is one line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.proxy", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--setup", action="store_true", help="compile the tools, install Envoy")
    parser.add_argument(
        "--peers",
        default="direct,relay,envoy,tongguan",
        help=f"comma-separated, of {', '.join(peers.MAKERS)}",
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (5)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one round (1.5)")
    parser.add_argument("--port-base", type=int, default=PORT_BASE, help="first of 43 ports")
    parser.add_argument("--json", type=Path, help="also write the whole result to this file")
    try:
        return run(parser.parse_args())
    except (PeerError, subprocess.CalledProcessError) as problem:
        sys.stderr.write(f"perf.proxy: {problem}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
