"""What kill -9 takes from an audit chain: the loss window, at random moments.

    python -m perf.killing [--points N] [--seed N] [--dir DIR] [--json [FILE]]

At each point a process of its own writes a chain, a record every fifth of a millisecond, and notes
in shared memory when it appended each one, and which it was told are durable. It is killed at a
random moment, its start included, and the log is held against what it noted. At the end a last
process starts and closes in order, and the whole directory is verified.

Gates: no record is lost that was reported durable, and none before one that is kept; the records
lost were appended within the group interval and one sync under way before the end (95 of 100
points: a process that does not get a core is late); the log verifies. Exit codes: 0 every gate
holds, 1 one is missed, 2 no run could be made.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import os
import random
import re
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf import machine, output
from perf.audit import SEED, SIGNER, chain_config, record_text
from proxy.audit.verify import verify_directory
from proxy.audit.writer import AuditWriter
from proxy.clock import SystemClock

if TYPE_CHECKING:
    from collections.abc import Callable

POINTS = 200
RECORDS_MAX = 4096
EVERY_S = 0.0002
FLUSH_MS = 5
# How long a process may live; a fourth of them are killed before, or while, they start.
START_S, RUN_S = 0.08, 0.12
_HEAD = struct.Struct("=QQd")  # appended, durable (counts), the longest sync in seconds
_AT = struct.Struct("=Q")
_TRACE = re.compile(rb'"trace_id":"1-00001-(\d{4})"')


class Notes:
    """Shared memory that outlives the process that writes it."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _HEAD.size + RECORDS_MAX * _AT.size)

    def appended(self, number: int) -> None:
        """Note that a record was appended now."""
        at = _HEAD.size + number * _AT.size
        _AT.pack_into(self._map, at, time.monotonic_ns())
        _, durable, longest = _HEAD.unpack_from(self._map)
        _HEAD.pack_into(self._map, 0, number + 1, durable, longest)

    def durable(self, count: int, longest_s: float) -> None:
        """Note that so many are durable."""
        appended = _HEAD.unpack_from(self._map)[0]
        _HEAD.pack_into(self._map, 0, appended, count, longest_s)

    def read(self) -> tuple[list[int], int, float]:
        """Return (when each was appended, how many were durable, the longest sync)."""
        count, durable, longest_s = _HEAD.unpack_from(self._map)
        times = [_AT.unpack_from(self._map, _HEAD.size + n * _AT.size)[0] for n in range(count)]
        return times, durable, longest_s


async def _write(directory: Path, origin: str, notes: Notes) -> None:
    config = chain_config(directory, origin=origin, flush_ms=FLUSH_MS)
    writer = AuditWriter.start(config, SystemClock(), asyncio.get_running_loop())
    stats, told, longest_s = writer.stats, 0, 0.0

    async def tell(ticket: int, number: int) -> None:
        nonlocal told
        await writer.durable(ticket)
        told = max(told, number + 1)
        notes.durable(told, longest_s)

    tasks = set()
    before = stats.sync_seconds_total
    for number in range(RECORDS_MAX):
        ticket = writer.append_request(record_text(number, trace_id=f"1-00001-{number:04d}"))
        notes.appended(number)
        task = asyncio.create_task(tell(ticket, number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        await asyncio.sleep(EVERY_S)
        longest_s = max(longest_s, stats.sync_seconds_total - before)
        before = stats.sync_seconds_total
    await asyncio.sleep(60)  # it is killed


def _forked(child: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(1)
    return pid


def _point(directory: Path, number: int, rng: random.Random) -> dict[str, Any]:
    """Write, kill, compare: one point."""
    notes, origin = Notes(), f"kill/{number}"
    pid = _forked(lambda: asyncio.run(_write(directory, origin, notes)))
    if rng.random() < 0.25:
        time.sleep(rng.random() * START_S)
    else:
        while not notes.read()[0]:
            time.sleep(0.001)
        time.sleep(rng.random() * RUN_S)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    times, durable, longest_s = notes.read()
    kept = _kept(directory, origin)
    lost = [at for n, at in enumerate(times) if n not in kept]
    return {
        "appended": len(times),
        "durable": durable,
        "durable_lost": sum(n not in kept for n in range(durable)),
        "holes": sum(n not in kept for n in range(max(kept, default=-1))),
        "lost": len(lost),
        "window_ms": (times[-1] - lost[0]) / 1e6 if lost else 0.0,
        "sync_ms": longest_s * 1e3,
    }


def _kept(directory: Path, origin: str) -> set[int]:
    """Return the numbers of the records that stand in the chain, whole."""
    mark = f'"origin":"{origin}"'.encode()
    kept: set[int] = set()
    for chain in directory.iterdir():
        for path in chain.glob("*.log"):
            with path.open("rb") as file:
                if mark not in file.readline():
                    break
                for line in file:
                    found = _TRACE.search(line)
                    if found and line.endswith(b"\n"):
                        kept.add(int(found[1]))
    return kept


async def _last(directory: Path) -> None:
    config = chain_config(directory, origin="kill/last")
    writer = AuditWriter.start(config, SystemClock(), asyncio.get_running_loop())
    await writer.close()


def measure(directory: Path, points: int, seed: int) -> dict[str, Any]:
    """Kill that many processes; return what was lost, and the log's verdict at the end."""
    from proxy.audit.epochs import MacKeys
    from proxy.audit.note import Keyset

    rng = random.Random(seed)
    rows = [_point(directory, number, rng) for number in range(points)]
    asyncio.run(_last(directory))
    result = verify_directory(directory, MacKeys({"perf": SEED}), pinned=Keyset([SIGNER.key]))
    windows = sorted(row["window_ms"] for row in rows)
    late = sum(row["window_ms"] > FLUSH_MS + row["sync_ms"] for row in rows)
    return {
        "points": points,
        "flush_ms": FLUSH_MS,
        "killed_at_start": sum(not row["appended"] for row in rows),
        "appended": sum(row["appended"] for row in rows),
        "durable": sum(row["durable"] for row in rows),
        "durable_lost": sum(row["durable_lost"] for row in rows),
        "holes": sum(row["holes"] for row in rows),
        "lost": sum(row["lost"] for row in rows),
        "window_ms_p50": windows[len(windows) // 2],
        "window_ms_p95": windows[len(windows) * 95 // 100],
        "window_ms_max": windows[-1],
        "sync_ms_max": max(row["sync_ms"] for row in rows),
        "beyond_interval_and_sync": late,
        "chains": len(result.chains),
        "verdict": result.verdict,
    }


def run(args: argparse.Namespace) -> int:
    """Measure, print, keep."""
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="killing-") as folder:
        found = measure(Path(folder), args.points, args.seed)
    gates = {
        "durable_lost": found["durable_lost"] == 0,
        "holes": found["holes"] == 0,
        "beyond_interval_and_sync": found["beyond_interval_and_sync"] <= args.points * 5 // 100,
        "verdict": found["verdict"] == "ok",
    }
    result = {"machine": machine.facts(), "seed": args.seed, "results": found, "gates": gates}
    verdicts = {name: "   holds" if held else "   MISSED" for name, held in gates.items()}
    table = [f"{name:28}{value!s:>12}{verdicts.get(name, '')}" for name, value in found.items()]
    output.put(args.json, result, "\n".join(table))
    return 0 if all(gates.values()) else 1


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.killing", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--points", type=int, default=POINTS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="on the disk to measure")
    output.add_json(parser)
    try:
        return run(parser.parse_args())
    except (OSError, RuntimeError) as problem:
        sys.stderr.write(f"perf.killing: {problem}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
