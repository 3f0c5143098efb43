"""What a hop through the sidecar costs, beside other proxies, a bare relay and no hop at all.

    python -m perf.proxy --setup                     compile the tools, install Envoy (perf/work)
    python -m perf.proxy --peers relay,envoy,haproxy,nginx [--rounds N] [--json [FILE]]
    python -m perf.proxy --peers all --json FILE --resume [--plot PNG]    all peers, all gates

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
from typing import TYPE_CHECKING, Any

from perf import footprint, machine, output, peers, process, promises, report
from perf.process import PeerError

if TYPE_CHECKING:
    from collections.abc import Iterator

LOAD_CORE = 1
PORT_BASE = 21000
EVENTS_A_STREAM = 65  # 64 and [DONE]
DEFAULT = "direct,relay,envoy,tongguan"
APART_ROUNDS, APART_SECONDS = 2, 3.0

Results = dict[str, dict[str, list[dict[str, float]]]]


def tests(seconds: float) -> dict[str, list[str]]:
    """Return each test's load options."""
    base = ["-d", f"{seconds:g}", "-w", "0.5"]
    return {
        "closed": ["-c", "64", *base],
        "open": ["-c", "32", "-r", "500", *base],
        "sse10": ["-c", "32", "-r", "20", "-s", "-m", "m-n64-g10", "-d", f"{seconds:g}", "-w", "1"],
    }


def tests_apart() -> dict[str, list[str]]:
    """Return the load options for peers that bear little."""
    base = ["-d", f"{APART_SECONDS:g}", "-w", "1"]
    return {
        "closed": ["-c", "64", *base],
        "sse10": ["-c", "32", "-r", "5", "-s", "-m", "m-n64-g10", *base],
    }


def load(port: int, options: list[str], pid: int | None) -> dict[str, float]:
    """Run the load generator once; return its figures and what the peer spent meanwhile."""
    before = process.cpu_ns(pid) if pid else (0, 0)
    start = time.perf_counter()
    command = [str(peers.WORK / "loadgen"), "-p", str(port), *options]
    with process.on_core(LOAD_CORE):
        done = subprocess.run(command, check=False, capture_output=True, text=True)
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
    contestants: list[peers.Peer],
    ports: peers.Ports,
    loads: dict[str, list[str]],
    rounds: int,
    results: Results,
) -> Iterator[None]:
    """Start every peer, run interleaved rounds until there are so many, stop every peer.

    Yields after each round; `results` then holds it too.
    """
    done = min(len(results.get(p.name, {}).get(t, ())) for p in contestants for t in loads)
    if done >= rounds:
        return
    running: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for peer in contestants:
            if peer.command:
                running[peer.name] = footprint.start(peer, ports)
        for number in range(done, rounds):
            taken = [
                (peer.name, test, load(peer.port, options, pid_of(running, peer)))
                for test, options in loads.items()
                for peer in contestants
            ]
            for name, test, figures in taken:
                results.setdefault(name, {}).setdefault(test, []).append(figures)
            sys.stderr.write(f"round {number + 1} of {rounds} done\n")
            yield
    finally:
        for child in running.values():
            process.stop(child)


def pid_of(running: dict[str, subprocess.Popen[bytes]], peer: peers.Peer) -> int | None:
    """Return a peer's process id; None for `direct`."""
    return running[peer.name].pid if peer.name in running else None


def cells(row: dict[str, Any], columns: dict[str, str]) -> list[float | None]:
    """Return the row's figures of these columns."""
    return [row.get(name) for name in columns.values()]


def show(outcome: dict[str, Any]) -> str:
    """Return the run as text."""
    rows, feet = outcome["peers"], outcome["footprint"]
    rates = {
        "CPU us/req": "cpu_us_per_request", "req/s": "requests_per_s",
        "CPU us @500/s": "cpu_us_at_500_rps", "p50 us @500/s": "p50_us_at_500_rps",
        "CPU us/event": "cpu_us_per_event", "event p50 us": "event_p50_us", "wait": "wait",
    }  # fmt: skip
    small = {
        "start s": "cold_start_s", "start CPU s": "cold_start_cpu_s",
        "RSS MB start": "rss_mb_started", "RSS MB": "rss_mb",
    }  # fmt: skip
    if outcome["whole"]:
        small |= {
            "+MB 64 conns": "rss_growth_64_mb", "+MB stalled": "rss_growth_stalled_mb",
            "gone ms": "gone_ms", "gone, silent ms": "gone_silent_ms",
        }  # fmt: skip
    lines = [
        report.table(["peer", *rates], [[name, *cells(row, rates)] for name, row in rows.items()]),
        "",
        report.table(
            ["peer", *small], [[name, *cells(foot, small)] for name, foot in feet.items()]
        ),
        "",
    ]
    for slow, beside in outcome["apart"].items():
        columns = {"CPU us/req": "cpu_us_per_request", "CPU us/event": "cpu_us_per_event"}
        body = [[name, *cells(row, columns)] for name, row in beside["peers"].items()]
        lines += [report.table([f"apart, with {slow}", *columns], body), ""]
    beside = {
        "req x relay": "cpu_us_per_request / relay",
        "req x envoy": "cpu_us_per_request / envoy",
        "req x haproxy": "cpu_us_per_request / haproxy",
        "@500/s x envoy": "cpu_us_at_500_rps / envoy",
        "event x relay": "cpu_us_per_event / relay",
        "event x envoy": "cpu_us_per_event / envoy",
        "added p50 x envoy": "added p50 at 500 rps / envoy",
    }
    ratios = outcome["ratios"].items()
    lines += [report.table(["ratios", *beside], [[n, *cells(r, beside)] for n, r in ratios]), ""]
    lines += report.gate_lines(outcome["gates"])
    lines += [f"left out: {name}: {why}" for name, why in outcome["absent"].items()]
    alone = outcome["lone_sync_us"]
    share = f"{alone / EVENTS_A_STREAM:.1f} us an event"
    lines.append(f"one record's append and fdatasync, alone: {alone:.0f} us of CPU, {share}")
    if feet.get("tongguan", {}).get("checkpoints") == 0:
        lines.append("no checkpoint was written: its memory is not in the figures")
    waits = [row["wait"] for row in rows.values() if row["wait"] is not None]
    if waits and max(waits) > report.DISTURBED:
        share = f"{max(waits):.0%}"
        lines.append(f"disturbed: a peer waited {share} for its core; latencies mean nothing")
    return "\n".join(lines)


def with_ours(names: list[str]) -> list[str]:
    """Return who takes part: where only others are named, they stand beside both of ours."""
    if set(names) & set(peers.SIDECARS):
        return names
    return [*dict.fromkeys(("direct", *names)), *peers.SIDECARS]


class Run:
    """One run: what is measured, what is known already, and where it is kept.

    After each step the whole is written to `--json FILE`; `--resume` goes on from a run there that
    was not completed, when commit, machine and parameters are the same.
    """

    def __init__(self, arguments: argparse.Namespace, ports: peers.Ports) -> None:
        self.arguments = arguments
        self.ports = ports
        self.contestants: list[peers.Peer] = []
        self.absent: dict[str, str] = {}
        everybody = arguments.peers == "all"
        for name in list(peers.MAKERS) if everybody else with_ours(arguments.peers.split(",")):
            try:
                self.contestants.append(peers.make(name, ports))
            except PeerError as problem:
                if not everybody:
                    raise
                self.absent[name] = str(problem)
        names = {peer.name for peer in self.contestants}
        self.whole = promises.PLAIN in names
        self.fixed: dict[str, Any] = {
            "what": "perf.proxy",
            "machine": machine.facts(),
            "sidecar": machine.sidecar(),
            "parameters": {
                "rounds": arguments.rounds,
                "seconds": arguments.seconds,
                "peers": [peer.name for peer in self.contestants],
                "tests": {n: " ".join(o) for n, o in tests(arguments.seconds).items()},
                "tests_apart": {n: " ".join(o) for n, o in tests_apart().items()},
            },
        }
        self.complete = False
        self.lone_sync_us = 0.0
        self.feet: dict[str, dict[str, float]] = {}
        self.rounds: Results = {}
        self.apart: dict[str, Results] = {}
        if arguments.resume and arguments.json and arguments.json.exists():
            self._take_up(json.loads(arguments.json.read_text(encoding="utf-8")))

    def _take_up(self, known: dict[str, Any]) -> None:
        if known.get("complete"):
            return
        if any(known.get(name) != value for name, value in self.fixed.items()):
            sys.stderr.write("not resumed: the file is of another commit, machine or command\n")
            return
        self.feet, self.rounds = known["footprint"], known["rounds"]
        self.apart = {name: found["rounds"] for name, found in known["apart"].items()}

    def steps(self) -> Iterator[None]:
        """Measure; yields after each step that can be kept."""
        fast = [peer for peer in self.contestants if not peer.slow]
        with process.on_core(footprint.PEER_CORE):
            self.lone_sync_us = footprint.lone_sync(self.ports.folder)
        for peer in fast:
            if peer.command and peer.name not in self.feet:
                self.feet[peer.name] = footprint.of(peer, self.ports, whole=self.whole)
                sys.stderr.write(f"start and memory of {peer.name} done\n")
                yield
        loaded = [peer for peer in fast if not peer.alone]
        if loaded:
            loads = tests(self.arguments.seconds)
            yield from measure(loaded, self.ports, loads, self.arguments.rounds, self.rounds)
        for slow in [peer for peer in self.contestants if peer.slow]:
            beside = [peer for peer in fast if peer.name in peers.SIDECARS]
            results = self.apart.setdefault(slow.name, {})
            rounds = measure([slow, *beside], self.ports, tests_apart(), APART_ROUNDS, results)
            try:
                for _ in rounds:
                    yield
            except PeerError as problem:
                self.absent[slow.name] = str(problem)
                del self.apart[slow.name]

    def outcome(self) -> dict[str, Any]:
        """Return all that is known now; `gates` are objects still."""
        rows = report.summary(self.rounds)
        apart = {name: report.summary(results) for name, results in self.apart.items()}
        gates = (
            promises.whole(rows, self.feet, apart)
            if self.whole
            else promises.short(rows, self.feet)
        )
        return {
            **self.fixed,
            "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "complete": self.complete,
            "whole": self.whole,
            "absent": self.absent,
            "lone_sync_us": self.lone_sync_us,
            "peers": rows,
            "footprint": self.feet,
            "apart": {n: {"peers": r, "rounds": self.apart[n]} for n, r in apart.items()},
            "ratios": report.ratios(rows),
            "gates": gates,
            "rounds": self.rounds,
        }

    def keep(self) -> None:
        """Write what is known to the file, if there is one."""
        target: Path | None = self.arguments.json
        if target not in (None, output.OUT):
            output.keep(target, plain(self.outcome()))


def plain(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return a run as it is kept: gates as rows."""
    return outcome | {"gates": [report.gate_row(gate) for gate in outcome["gates"]]}


def set_up(names: str) -> None:
    """Compile the tools, install what these peers and the plot need."""
    peers.build_tools()
    needed = [peers.NEEDS[n] for n in names.split(",") if n in peers.NEEDS]
    for environment in peers.ENVIRONMENTS if names == "all" else needed:
        peers.set_up(environment)


def draw(kept: Path, target: Path) -> None:
    """Draw a kept run in the environment that has matplotlib."""
    python = peers.installed("plot", "python")
    command = [python, "-m", "perf.plot", str(kept.resolve()), str(target.resolve())]
    subprocess.run(command, check=True, cwd=peers.HERE.parent)


def run(arguments: argparse.Namespace) -> int:
    """Make the whole run."""
    if arguments.json == output.OUT and (arguments.plot or arguments.resume):
        raise PeerError("--plot and --resume need a file that --json keeps: name it")
    if arguments.plot and not arguments.json:
        raise PeerError("--plot draws what --json keeps: name both")
    if arguments.setup:
        set_up(arguments.peers)
        return 0
    if len(os.sched_getaffinity(0)) < 2:
        raise PeerError("two cores are needed: one for the proxies, one for the load")
    if own := peers.own_variables_set():
        raise PeerError(f"unset {', '.join(own)}: shipped defaults are what is measured")
    peers.build_tools()
    ports = peers.Ports(arguments.port_base)
    whole = Run(arguments, ports)
    log = ports.folder / "backend.log"
    backend = process.spawn([str(peers.WORK / "backend"), str(ports.backend)], LOAD_CORE, log)
    try:
        process.wait_until(lambda: process.ask(ports.backend) == 200, backend, log)
        for _ in whole.steps():
            whole.keep()
    finally:
        process.stop(backend)
    whole.complete = True
    whole.keep()
    outcome = whole.outcome()
    output.put(arguments.json, plain(outcome), show(outcome))
    if arguments.plot:
        draw(arguments.json, arguments.plot)
    return 0 if all(gate.ok for gate in outcome["gates"]) else 1


def main() -> int:
    """Parse and run; what goes wrong is one line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.proxy", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--setup", action="store_true", help="compile the tools, install the peers")
    parser.add_argument(
        "--peers",
        default=DEFAULT,
        help=f"comma-separated, of {', '.join(peers.MAKERS)}; or all. Both sidecars, and direct, "
        "where neither sidecar is named",
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (5)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of one round (1.5)")
    parser.add_argument("--port-base", type=int, default=PORT_BASE, help="first of 44 ports")
    output.add_json(parser)
    parser.add_argument("--plot", type=Path, help="also draw it, as PNG, from the --json file")
    parser.add_argument("--resume", action="store_true", help="go on from what --json holds")
    try:
        return run(parser.parse_args())
    except (PeerError, subprocess.CalledProcessError) as problem:
        sys.stderr.write(f"perf.proxy: {problem}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
