"""What SM4-GCM costs beside AES-256-GCM, as Python gets them: one call a message, CPU time.

    python -m perf.sm4 [--tier T] [--rounds N] [--json FILE]

The base of every ratio is `AESGCM` of `cryptography` with a 256-bit key, in the same round. Method,
limits and what the rows mean: perf/README.md, docs/sm4.md.
Exit codes: 0 every gate holds, 1 a gate is missed, 2 the run could not be made.
"""

from __future__ import annotations

import argparse
import datetime as dt
import os
import sys
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kernels import sm4
from perf import machine, output, report, rounds, sm4steps
from proxy.sm4 import cipher

if TYPE_CHECKING:
    from collections.abc import Callable

AES, OPENSSL_SM4 = "aes-256", "cryptography"
SIZES = (200, 256, 1024, 4096, 65536, 1 << 20)
AAD = bytes(range(32))
MANY, MANY_BYTES = 64, 200
BULK_BYTES = 65536
GOAL_SLACK = 1.3  # a goal without a gate of its own gates at so many times itself
TOP = "gfni-avx512"

# Ratio to AES-256 by tier and size: goal, and the gate where it has one of its own.
GOALS: dict[str, dict[int, tuple[float, float]]] = {
    TOP: {
        200: (0.45, 0.65), 256: (0.45, 0.65), 1024: (0.60, 0.80), 4096: (1.0, 1.25),
        65536: (2.4, 3.0), 1 << 20: (3.0, 4.0),
    },
    "gfni-avx2": {
        size: (goal, goal * GOAL_SLACK)
        for size, goal in {200: 1.3, 256: 1.3, 1024: 2.0, 4096: 4.0, 65536: 20.0}.items()
    },
    "aesni-avx2": {
        size: (goal, goal * GOAL_SLACK)
        for size, goal in {200: 1.6, 256: 1.6, 1024: 2.9, 4096: 6.0, 65536: 25.0}.items()
    },
}  # fmt: skip
# Times faster than SM4-GCM of `cryptography`: goal, gate. For the top tier.
TIMES_FASTER = {200: (20, 12), 4096: (30, 20), 65536: (40, 25)}
GB_PER_S = (6.0, 4.0)
# Through the envelope's code, suite 1 beside suite 2: goals; for the top tier.
STEP_GOALS = {
    "request 1024": 0.9,
    "request 4096": 1.0,
    "request 65536": 1.2,
    "event 200": 0.55,
}

Rows = dict[str, dict[str, rounds.Row]]


def _calls(aead: Any, size: int) -> dict[str, Callable[[], object]]:
    """Return one seal and one open of `size` bytes, each a single Python call."""
    nonce, plaintext = os.urandom(12), os.urandom(size)
    seal = aead.encrypt if isinstance(aead, AESGCM) else aead.seal
    opened = aead.decrypt if isinstance(aead, AESGCM) else aead.open
    sealed = seal(nonce, plaintext, AAD)
    return {
        "seal": partial(seal, nonce, plaintext, AAD),
        "open": partial(opened, nonce, sealed, AAD),
    }


def ciphers(tiers: list[str]) -> dict[str, Any]:
    """Return the contestants: AES-256, `cryptography`'s SM4, then each tier."""
    key = os.urandom(16)
    cipher.choose_tier(cipher.CRYPTOGRAPHY)
    slow = cipher.aead(cipher.SM4_GCM, key)
    return {
        AES: AESGCM(os.urandom(32)),
        OPENSSL_SM4: slow,
        **{name: sm4.Sm4Gcm(key, name) for name in tiers},
    }


def measure_calls(tiers: list[str], number: int) -> Rows:
    """Return rows of seal and open at every size."""
    contestants = ciphers(tiers)
    found: Rows = {}
    for size in SIZES:
        calls = {name: _calls(aead, size) for name, aead in contestants.items()}
        for what in ("seal", "open"):
            own = {name: pair[what] for name, pair in calls.items()}
            found[f"{what} {size}"] = rounds.interleaved(own, AES, number)
    return found


def measure_many(tiers: list[str], number: int) -> dict[str, rounds.Row]:
    """Return rows of 64 chunks of 200 B: one call of ours, 64 calls of the others."""
    nonces = [os.urandom(12) for _ in range(MANY)]
    chunks = [os.urandom(MANY_BYTES) for _ in range(MANY)]
    aes, key = AESGCM(os.urandom(32)), os.urandom(16)

    def one_by_one() -> None:
        for nonce, chunk in zip(nonces, chunks, strict=True):
            aes.encrypt(nonce, chunk, None)

    own = {name: partial(sm4.Sm4Gcm(key, name).seal_many, nonces, chunks) for name in tiers}
    return rounds.interleaved({AES: one_by_one, **own}, AES, number)


def native_gb_per_s(name: str, number: int) -> float:
    """Return GB/s at 64 KiB: `seal_into` a buffer that is there, so nothing is allocated."""
    source, target = os.urandom(BULK_BYTES), bytearray(BULK_BYTES + cipher.TAG_BYTES)
    call = partial(sm4.Sm4Gcm(os.urandom(16), name).seal_into, os.urandom(12), source, target, AAD)
    row = rounds.interleaved({name: call}, name, number)[name]
    return BULK_BYTES / row.us / 1e3


def gates(name: str, outcome: dict[str, Any]) -> list[report.Gate]:
    """Return what is promised of one tier; of the top one also the rest."""
    calls: Rows = outcome["calls"]
    found = [
        report.Gate(f"{name}: {what} {size}, beside AES-256", calls[f"{what} {size}"][name].ratio,
                    gate, "x", goal=goal)
        for size, (goal, gate) in GOALS.get(name, {}).items()
        for what in ("seal", "open")
    ]  # fmt: skip
    if name != TOP:
        return found
    for size, (goal, gate) in TIMES_FASTER.items():
        for what in ("seal", "open"):
            rows = calls[f"{what} {size}"]
            faster = rows[OPENSSL_SM4].us / rows[name].us
            title = f"{name}: {what} {size}, times faster than cryptography's SM4"
            found.append(report.Gate(title, faster, gate, "x", at_least=True, goal=goal))
    native = outcome["native_gb_per_s"].get(name)
    goal, gate = GB_PER_S
    title = f"{name}: 64 KiB"
    found.append(report.Gate(title, native, gate, "GB/s", at_least=True, goal=goal))
    for step, rows in outcome["steps"].items():
        aim = STEP_GOALS.get(step.removesuffix(" mac"))
        if aim is not None:
            title = f"{name}: {step}, beside suite 2"
            found.append(report.Gate(title, rows["suite 1"].ratio, aim * GOAL_SLACK, "x", goal=aim))
    return found


def show(outcome: dict[str, Any], found: list[report.Gate]) -> str:
    """Return the run as text."""
    tiers = outcome["tiers"]
    facts = outcome["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in outcome["versions"].items())
    names = [AES, OPENSSL_SM4, *tiers]
    table = [
        [what, *(f"{rows[n].us:.3g} ({rows[n].ratio:.2f})" for n in names)]
        for what, rows in outcome["calls"].items()
    ]
    many = outcome["many"]
    columns = [AES, *tiers]
    lines = [
        f"{facts['cpu']}, Python {facts['python']}, {versions}, commit {facts['commit']}",
        f"tier in use: {outcome['tier']}; us a call (ratio to AES-256-GCM of cryptography)",
        report.table(["call", *names], table),
        "",
        f"{MANY} chunks of {MANY_BYTES} B, us: "
        + ", ".join(f"{n} {many[n].us:.3g} ({many[n].ratio:.2f})" for n in columns),
        "64 KiB native, GB/s: "
        + ", ".join(f"{n} {v:.2f}" for n, v in outcome["native_gb_per_s"].items()),
        "",
        report.table(
            ["envelope step, us", "suite 1", "suite 2", "ratio"],
            [
                [step, rows["suite 1"].us, rows["suite 2"].us, rows["suite 1"].ratio]
                for step, rows in outcome["steps"].items()
            ],
        ),
        "",
    ]
    for what, t in outcome["timing_t"].items():
        word = "no dependence seen" if abs(t) < sm4steps.T_SUSPECT else "SUSPECT"
        lines.append(f"t-test, {what}: t = {t:.1f} ({word}; reported, not a gate)")
    lines.append("")
    lines += report.gate_lines(found)
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> int:
    """Make the whole run."""
    if not sm4.AVAILABLE:
        sys.stderr.write("perf.sm4: kernels.sm4 was not built here; nothing of ours to measure\n")
        return 2
    usable = list(sm4.TIERS)
    if arguments.tier and arguments.tier not in usable:
        sys.stderr.write(f"perf.sm4: no such tier here; there are {', '.join(usable)}\n")
        return 2
    tiers = [arguments.tier] if arguments.tier else usable
    number = arguments.rounds
    outcome: dict[str, Any] = {
        "what": "perf.sm4",
        "when": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine.facts(),
        "versions": {"cryptography": version("cryptography")},
        "parameters": {"rounds": number, "round_ns": rounds.ROUND_NS, "aad_bytes": len(AAD)},
        "tiers": tiers,
        "calls": measure_calls(tiers, number),
        "many": measure_many(tiers, number),
        "native_gb_per_s": {name: native_gb_per_s(name, number) for name in tiers},
    }
    outcome["tier"] = cipher.choose_tier(tiers[0])
    outcome["steps"] = sm4steps.measure(number)
    outcome["timing_t"] = sm4steps.timing(tiers[0])
    found = [gate for name in tiers for gate in gates(name, outcome)]
    table = show(outcome, found)
    outcome["gates"] = [report.gate_row(gate) for gate in found]
    output.put(arguments.json, outcome, table, default=asdict)
    return 0 if all(gate.ok for gate in found) else 1


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.sm4", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--tier", help="measure this tier alone (default: all usable here)")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved rounds (15)")
    output.add_json(parser)
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
