"""Measure what looking at memory costs: `python -m perf.memory [--json FILE] [--looks N]`.

A real `MemoryWatch` looks at this machine, again and again, and its heat map is drawn; the labelled
out-of-memory cases are explained. CPU time of the process, not wall time, so a busy machine changes
little. Exit codes: 0 every gate holds, 1 one is missed.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.engine.types import EngineStats
from agent.memory.admission import shortage
from agent.memory.evidence import TEXT_BYTES_MAX, from_stats, from_text
from agent.memory.oom import explain
from agent.memory.pressure import POOLS_MAX, HeatMap, png, svg
from agent.memory.watch import MemoryWatch
from agent.node import Node
from perf import machine, output
from perf.engine import rss_mib

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = Path(__file__).resolve().parents[1] / "tests" / "scenarios" / "oom.toml"
# figure: (limit, unit); every one is a maximum.
GATES: dict[str, tuple[float, str]] = {
    "look_ms": (4.0, "ms CPU"),
    "look_share_percent": (0.4, "% of a core at one look a second"),
    "rss_growth_mib": (4.0, "MiB over all looks"),
    "heat_rss_mib": (4.0, "MiB, 64 pools of 240 columns"),
    "svg_ms": (50.0, "ms CPU, 64 pools"),
    "png_ms": (50.0, "ms CPU, 64 pools"),
    "admission_us": (50.0, "us CPU"),
    "explain_ms": (10.0, "ms CPU, the slowest labelled case"),
    "explain_1mib_ms": (3000.0, "ms CPU, a log of 1 MiB"),
}


def cpu_ms(call: Callable[[], Any], times: int) -> float:
    """Return the median CPU milliseconds of a call."""
    taken = []
    for _ in range(times):
        began = time.process_time_ns()
        call()
        taken.append((time.process_time_ns() - began) / 1e6)
    return statistics.median(taken)


def engine_stats() -> EngineStats:
    return EngineStats(
        running=4, waiting=9, waiting_limit=256, sequences_limit=16, kv_blocks_total=640,
        kv_blocks_used=300, kv_blocks_cached=50, prompt_tokens_total=1, generation_tokens_total=1,
        prefix_tokens_queried_total=1, prefix_tokens_hit_total=1, preemptions_total=0,
        steps_total=1, step_seconds_total=1.0, finished_total={}, kv_block_bytes=737_280,
        kv_block_tokens=16, kv_blocks_touched=360, kv_blocks_promised=420,
    )  # fmt: skip


def full_map() -> HeatMap:
    heat = HeatMap(columns=240, bucket_s=15)
    for column in range(240):
        heat.observe(column * 15, {f"pool{i}": ((column * 7 + i) % 101) / 100
                                   for i in range(POOLS_MAX)})  # fmt: skip
    return heat


def measure(looks: int) -> dict[str, float]:
    """Return all figures."""
    watch = MemoryWatch(Node(0), sample_s=1.0, window_s=3600.0)
    for _ in range(50):
        watch.look()
    assert watch.latest is not None
    report = watch.latest
    gc.collect()
    before = rss_mib("VmRSS")
    look = cpu_ms(watch.look, looks)
    gc.collect()
    growth = rss_mib("VmRSS") - before

    gc.collect()
    before = rss_mib("VmRSS")
    heat = full_map()
    gc.collect()
    heat_rss = rss_mib("VmRSS") - before
    table, stats = heat.table(), engine_stats()

    cases = tomllib.loads(CASES.read_text(encoding="utf-8"))["case"]
    slowest = max(
        cpu_ms(
            lambda c=case: explain(
                from_stats(c["stats"]) if "stats" in c else from_text(c["text"])
            ),
            3,
        )
        for case in cases
    )
    text = next(case["text"] for case in cases if "text" in case)
    log = ("INFO a line as a server writes them, one after the other\n" * 20_000) + text
    return {
        "look_ms": look,
        "look_share_percent": look / 10,
        "rss_growth_mib": max(0.0, growth),
        "heat_rss_mib": max(0.0, heat_rss),
        "svg_ms": cpu_ms(lambda: svg(table), 20),
        "png_ms": cpu_ms(lambda: png(table), 20),
        "admission_us": 1e3 * cpu_ms(
            lambda: [shortage(stats, report, tokens=600, reserve_bytes=64 << 20,
                              now_unix_s=report.at_unix_s) for _ in range(1000)], 5) / 1000,
        "explain_ms": slowest,
        "explain_1mib_ms": cpu_ms(lambda: explain(from_text(log[-TEXT_BYTES_MAX:])), 3),
    }  # fmt: skip


def missed(figures: dict[str, float]) -> list[str]:
    """Return one line for each gate that does not hold."""
    return [
        f"{name}: {figures[name]:.3f}, at most {limit:g} {unit}"
        for name, (limit, unit) in GATES.items()
        if not figures[name] <= limit
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="perf.memory", description=__doc__)
    output.add_json(parser)
    parser.add_argument("--looks", type=int, default=5000)
    options = parser.parse_args()
    figures = {name: round(value, 4) for name, value in measure(options.looks).items()}
    lines = missed(figures)
    result = {
        "machine": machine.facts(),
        "parameters": {"looks": options.looks},
        "figures": figures,
        "missed": lines,
    }
    table = [
        f"{name:20} {value:10.4f}   max {GATES[name][0]:g} {GATES[name][1]}"
        for name, value in figures.items()
    ]
    output.put(options.json, result, "\n".join(table))
    for line in lines:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
