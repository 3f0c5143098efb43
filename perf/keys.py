"""What many keys cost: loading, memory, a request's look-up, a reload beside the data loop.

    python -m perf.keys [--keys N] [--secrets N] [--rounds N] [--json FILE]

Gates: a directory of N key files with 100 000 keys in all is loaded in 1 s of CPU and 64 MB of
memory, peak included, in a process of its own (the best of the rounds: others on the machine only
add); look-up and policy of a kid take 1 us a request; a volume of 1 000 secrets that is swapped
whole is read anew without the loop standing for more than 5 ms (the median of the rounds' longest;
beside it stands how long the loop stood without a reload, which is the machine's doing).
Exit codes: 0 every gate holds, 1 a gate is missed, 2 the run could not be made.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perf import machine, output
from proxy.keys.directory import DirectoryProvider
from proxy.keys.file import KeyFile, encode
from proxy.keys.pace import breathe
from proxy.sm4.keyring import EnvelopeKey, Keyring

if TYPE_CHECKING:
    from collections.abc import Iterable

KEYS, SHARDS, SECRETS, ROUNDS = 100_000, 100, 1_000, 5
DAY_MS = 86_400_000
LOOKUPS = 200_000
TICK_S = 0.0005
SETTLE_S = 0.2
# Name: the most.
GATES = {"load_s": 1.0, "load_mb": 64.0, "lookup_us": 1.0, "reload_stall_ms": 5.0}


def key(number: int, now_ms: int) -> EnvelopeKey:
    """Return a fresh key of a client of its own."""
    return EnvelopeKey(
        kid=number.to_bytes(8, "big"),
        root=os.urandom(32),
        client=f"spiffe://cluster.local/ns/team/sa/client-{number}",
        audience="local/default/perf",
        tenant=f"tenant-{number % 50}",
        suite=1,
        digest="sha256",
        not_before_ms=now_ms - number,
        not_after_ms=now_ms + DAY_MS + number,
    )


def written(folder: Path, keys: Iterable[EnvelopeKey], files: int) -> None:
    """Write the keys into so many key files."""
    folder.mkdir(parents=True)
    rows = list(keys)
    for at in range(files):
        part = rows[at::files]
        path = folder / f"{at:05}.json"
        path.touch(0o600)
        path.write_bytes(encode(KeyFile("sidecar", tuple(part), {}, (), None, None)))


def _memory_kb(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise OSError(f"no {name} in /proc/self/status")


def load_here(folder: Path) -> dict[str, float]:
    """Load a directory as a sidecar does at its start; say what it took in this process."""
    provider = DirectoryProvider(folder)
    Keyring(())
    gc.collect()
    before_kb = _memory_kb("VmRSS:")
    wall, cpu = time.perf_counter(), time.process_time()
    keys = provider.load()
    ring = Keyring(keys.envelope_keys())
    keys.forget_envelope_keys()
    spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    return spent | {
        "keys": len(ring),
        "resident_mb": (_memory_kb("VmRSS:") - before_kb) / 1000,
        "peak_mb": (_memory_kb("VmHWM:") - before_kb) / 1000,
    }


def _loading(folder: Path, rounds: int) -> dict[str, float]:
    found = []
    for _ in range(rounds):
        command = [sys.executable, "-m", "perf.keys", "--load", str(folder)]
        done = subprocess.run(command, cwd=machine.ROOT, check=True, capture_output=True)
        found.append(json.loads(done.stdout))
    best = min(found, key=lambda row: row["cpu_s"])
    return {
        "load_s": best["cpu_s"],
        "load_wall_s": min(row["wall_s"] for row in found),
        "load_mb": statistics.median(row["peak_mb"] for row in found),
        "load_resident_mb": statistics.median(row["resident_mb"] for row in found),
        "load_us_a_key": best["cpu_s"] * 1e6 / best["keys"],
    }


def _looking_up(keys: list[EnvelopeKey], now_ms: int, rounds: int) -> dict[str, float]:
    """What `proxy/sm4/opener.py` asks of the ring for each request whose kid was derived."""
    ring = Keyring(keys)
    hot = [row.kid for row in keys[:1024]]
    for kid in hot:
        ring.get(kid)
    kids = hot * (LOOKUPS // len(hot) + 1)

    def asked() -> float:
        begin = time.process_time()
        for kid in kids:
            derived = ring.get(kid)
            assert derived is not None
            policy = derived.key
            if policy.suite != 1 or not ring.accepts(policy, now_ms) or derived.spent():
                raise AssertionError
        return (time.process_time() - begin) * 1e6 / len(kids)

    return {"lookup_us": min(asked() for _ in range(rounds))}


def swap(volume: Path, generation: int, keys: Iterable[EnvelopeKey], files: int) -> None:
    """Mount another generation as Kubernetes does: all files anew, then one rename."""
    name = f"..generation-{generation}"
    written(volume / name, keys, files)
    link = volume / "..data_tmp"
    link.symlink_to(name)
    link.replace(volume / "..data")
    before = volume / f"..generation-{generation - 1}"
    if before.exists():
        shutil.rmtree(before)


class _Loop:
    """A loop that notes the longest it stood, beside a thread that reads keys."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due_s = loop.time()
        self.longest_s = 0.0
        self._tick()

    def _tick(self) -> None:
        now_s = self._loop.time()
        self.longest_s = max(self.longest_s, now_s - self._due_s)
        self._due_s = now_s + TICK_S
        self._loop.call_later(TICK_S, self._tick)


async def _stood(
    provider: DirectoryProvider, ring: Keyring, now_ms: int, *, reload: bool
) -> tuple[float, float]:
    """Return (the longest that the loop stood, how long the reload took) in ms."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    took: list[float] = []

    def read() -> None:
        begin = time.perf_counter()
        plan = ring.plan(provider.load().envelope_keys(), now_ms=now_ms, rest=breathe)
        loop.call_soon_threadsafe(ring.take, plan)
        took.append(time.perf_counter() - begin)
        loop.call_soon_threadsafe(done.set)

    watch = _Loop(loop)
    await asyncio.sleep(SETTLE_S / 4)
    watch.longest_s = 0.0
    if reload:
        threading.Thread(target=read, name="reload").start()
        await done.wait()
    else:
        await asyncio.sleep(SETTLE_S)
    return watch.longest_s * 1000, (took[0] * 1000 if took else 0.0)


def _reloading(folder: Path, secrets: int, now_ms: int, rounds: int) -> dict[str, float]:
    import uvloop

    volume = folder / "volume"
    volume.mkdir()
    rows = [key(number, now_ms) for number in range(secrets)]
    swap(volume, 0, rows, secrets)
    provider = DirectoryProvider(volume)
    ring = Keyring(provider.load().envelope_keys())
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)  # as proxy/lifecycle.py
    quiet, stood, took = [], [], []
    for number in range(1, rounds + 1):
        # Every secret is another one: nothing that is known already makes it quicker.
        swap(volume, number, (key(number * secrets + at, now_ms) for at in range(secrets)), secrets)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            quiet.append(runner.run(_stood(provider, ring, now_ms, reload=False))[0])
            longest, spent = runner.run(_stood(provider, ring, now_ms, reload=True))
        assert len(ring) == secrets
        stood.append(longest)
        took.append(spent)
    return {
        "reload_stall_ms": statistics.median(stood),
        "reload_stall_most_ms": max(stood),
        "reload_took_ms": statistics.median(took),
        "without_reload_stall_ms": statistics.median(quiet),
    }


def measure(keys: int, shards: int, secrets: int, rounds: int) -> dict[str, float]:
    """Make all of it in a directory of its own; return the numbers by name."""
    now_ms = time.time_ns() // 1_000_000
    folder = Path(tempfile.mkdtemp(prefix="tongguan-keys-"))
    try:
        rows = [key(number, now_ms) for number in range(keys)]
        written(folder / "many", rows, shards)
        found = _loading(folder / "many", rounds)
        found |= _looking_up(rows, now_ms, rounds)
        del rows
        return found | _reloading(folder, secrets, now_ms, rounds)
    finally:
        shutil.rmtree(folder)


def missed(found: dict[str, float]) -> list[str]:
    """Return a line for each gate that does not hold."""
    return [
        f"{name}: {found[name]:.3g}, at most {most:g}"
        for name, most in GATES.items()
        if not found[name] <= most
    ]


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--shards", type=int, default=SHARDS)
    parser.add_argument("--secrets", type=int, default=SECRETS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    output.add_json(parser)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.load is not None:
        print(json.dumps(load_here(options.load)))
        return 0
    try:
        found = measure(options.keys, options.shards, options.secrets, options.rounds)
    except (OSError, subprocess.CalledProcessError) as problem:
        print(f"perf.keys: {problem}", file=sys.stderr)
        return 2
    problems = missed(found)
    result: dict[str, Any] = {
        "what": "keys",
        "machine": machine.facts(),
        "parameters": {name: getattr(options, name) for name in ("keys", "shards", "secrets")}
        | {"rounds": options.rounds},
        "gates": GATES,
        "found": {name: round(value, 3) for name, value in found.items()},
        "missed": problems,
    }
    output.put(options.json, result, "\n".join(f"{n:28}{v:10.3f}" for n, v in found.items()))
    for line in problems:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
