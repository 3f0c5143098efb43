"""What sealing on the way out costs: two hops in clear beside the same two hops sealed.

    python -m perf.outward [--rounds N] [--json FILE]

The app's sidecar runs on core 0, once as a pass-through and once with `pools.*.seal`; client, the
next hop's sidecar and a fake engine run on core 1. Every request is a 4 KiB prompt, every answer a
stream. Without gates: it shows a cost. Method and traps: perf/README.md.
Exit codes: 0 measured, 2 the run could not be made.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from perf import channel, machine, output, peers, process, report
from perf.process import PeerError
from perf.rounds import midmean
from proxy.sm4 import cipher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PORT_BASE = 21300
CLEAR, SEALED = "clear", "sealed"
PACES = ("back to back", "10 ms gaps")
WARM_UP = 20
POOLS = ("dedicated", "shared", "best_effort")

Results = dict[str, dict[str, list[channel.Figures]]]


def settings(folder: Path, endpoint: int, *, app: int, admin: int, more: str = "") -> list[str]:
    """Write a sidecar's settings; return its command. Nothing is audited: that is not asked."""
    folder.mkdir()
    pools = "".join(
        f'[pools.{pool}]\nendpoints = ["http://127.0.0.1:{endpoint}"]\n{more}' for pool in POOLS
    )
    (folder / "tongguan.toml").write_text(
        f'[doors]\napp = "127.0.0.1:{app}"\nsealed = "127.0.0.1:{app + 1}"\n'
        f'admin = "127.0.0.1:{admin}"\n{pools}'
    )
    return [sys.executable, "-m", "proxy", "--config", str(folder)]


@contextlib.contextmanager
def running(ports: peers.Ports) -> Iterator[dict[str, tuple[int, int]]]:
    """Run all of it; yield (pid, port) of the app's sidecar by contestant."""
    folder = ports.folder / "outward"
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    folder.mkdir()
    keys = channel.make_keys(folder)
    base = ports.backend
    far = settings(folder / "far", base, app=base + 10, admin=base + 12)
    (folder / "far" / "tongguan.toml").open("a").write(
        f'[keys]\nfile = "{keys["sidecar"]}"\n[envelope]\nfence_s = 0\n'
    )
    seal = f'seal.keys = ["{keys[channel.SM4]}"]\n'
    near = {
        CLEAR: settings(folder / CLEAR, base + 10, app=base + 20, admin=base + 22),
        SEALED: settings(folder / SEALED, base + 11, app=base + 30, admin=base + 32, more=seal),
    }
    environment = {"PYTHONPATH": str(peers.HERE.parent)}
    with contextlib.ExitStack() as stack:

        def start(command: list[str], core: int, name: str, port: int, path: str) -> int:
            log = folder / f"{name}.log"
            peer = process.spawn(command, core, log, environment)
            stack.callback(process.stop, peer)
            get = path != channel.PATH
            process.wait_until(lambda: process.ask(port, path=path, get=get) == 200, peer, log)
            return peer.pid

        engine = [str(peers.WORK / "backend"), str(base)]
        start(engine, channel.LOAD_CORE, "backend", base, channel.PATH)
        start(far, channel.LOAD_CORE, "far", base + 12, "/readyz")
        yield {
            name: (start(command, channel.PEER_CORE, name, port + 2, "/readyz"), port)
            for (name, command), port in zip(near.items(), (base + 20, base + 30), strict=True)
        }


def measure(near: dict[str, tuple[int, int]], rounds: int) -> Results:
    """Return figures of interleaved rounds by pace and contestant."""
    results: Results = {pace: {name: [] for name in near} for pace in PACES}
    with contextlib.ExitStack() as stack:
        callers = {}
        for name, (_, port) in near.items():
            callers[name] = channel.Caller(port, None)
            stack.callback(callers[name].close)
        for number in range(WARM_UP + rounds):
            order = list(near) if number % 2 else list(near)[::-1]
            for pace in PACES:
                for name in order:
                    figures = channel.one(callers[name], pace, near[name][0])
                    if number >= WARM_UP:
                        results[pace][name].append(figures)
    return results


def compare(results: Results) -> dict[str, dict[str, float]]:
    """Return middle costs by pace, and sealed over clear."""
    found: dict[str, dict[str, float]] = {}
    for pace, rows in results.items():
        row = found[pace] = {}
        for metric in ("latency_ms", "cpu_ms"):
            for name, figures in rows.items():
                row[f"{name} {metric}"] = midmean([one[metric] for one in figures])
            row[f"{SEALED} / {CLEAR} {metric}"] = (
                row[f"{SEALED} {metric}"] / row[f"{CLEAR} {metric}"]
            )
    return found


def show(outcome: dict[str, Any]) -> str:
    """Return the run as text."""
    facts = outcome["machine"]
    lines = [f"{facts['cpu']}, Python {facts['python']}, commit {facts['commit']}"]
    lines.append(f"tier {outcome['tier']}")
    for pace, row in outcome["paces"].items():
        title = f"{pace} ({channel.PACES[pace][1]} events)"
        body: list[list[float | str | None]] = [
            [name, row[f"{name} latency_ms"], row[f"{name} cpu_ms"]] for name in (CLEAR, SEALED)
        ]
        body.append(["ratio", *(row[f"{SEALED} / {CLEAR} {m}"] for m in ("latency_ms", "cpu_ms"))])
        lines += ["", report.table([title, "latency ms", "CPU ms of the app's sidecar"], body)]
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Make the whole run."""
    if len(os.sched_getaffinity(0)) < 2:
        raise PeerError("two cores are needed: one for the sidecar, one for the load")
    if own := peers.own_variables_set():
        raise PeerError(f"unset {', '.join(own)}: shipped defaults are what is measured")
    facts = machine.facts()
    peers.build_tools()
    with running(peers.Ports(arguments.port_base)) as near:
        os.sched_setaffinity(0, {channel.LOAD_CORE})
        results = measure(near, arguments.rounds)
    outcome = {
        "what": "perf.outward",
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": facts,
        "tier": cipher.choose_tier(cipher.AUTO),
        "parameters": {"rounds": arguments.rounds, "prompt_bytes": channel.PROMPT_BYTES},
        "paces": compare(results),
    }
    output.put(arguments.json, outcome, show(outcome))
    return 0


def main() -> int:
    """Parse and run; what goes wrong is one line."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.outward", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--rounds", type=int, default=300, help="interleaved rounds (300)")
    parser.add_argument("--port-base", type=int, default=PORT_BASE, help="first of 43 ports")
    output.add_json(parser)
    try:
        return run(parser.parse_args())
    except (PeerError, subprocess.CalledProcessError, OSError) as problem:
        sys.stderr.write(f"perf.outward: {problem}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
