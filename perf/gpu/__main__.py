"""Measure the kernels on a GPU: `python -m perf.gpu [--json FILE] [--table FILE]`.

Needs torch, PyCUDA and what `make kernels` wrote (build/kernels); compiles nothing. Every shape is
checked against the oracle, then timed: a graph of launches over matrices that together are more
than four times L2, median of 20 replays, beside torch's FP16 product and a plain copy in the same
process. At most 8 minutes. `--dry-run` does all of it with small shapes on this CPU, where the
seconds mean nothing. Exit codes: 0 every gate holds, 1 one is missed or a result is wrong, 2 there
is no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels import dispatch, plans, reference
from kernels.build import BuildError
from kernels.launch import KernelError
from kernels.quant import Packed
from perf import machine, output
from perf.gpu import cases
from perf.gpu.labs import DryLab, GpuLab

if TYPE_CHECKING:
    from collections.abc import Callable

    from perf.gpu.labs import Lab

CHECKED_ROWS = 64


class Bench:
    """One shape: its matrices, and what each route does with them."""

    def __init__(self, lab: Lab, k: int, outputs: int) -> None:
        self.lab, self.k, self.outputs = lab, k, outputs
        count = cases.buffers(cases.weight_bytes(k, outputs), lab.l2_bytes)
        self.matrices = [lab.matrix(k, outputs, cases.GROUP) for _ in range(count)]
        plain = cases.buffers(2 * k * outputs, lab.l2_bytes)
        self.plain = [lab.empty((outputs, k), "f16") for _ in range(plain)]

    def works(self, route: str, x: Any, out: Any) -> list[Callable[[], None]]:
        """Return the launches of one turn over all matrices."""
        backend, m = self.lab.backend, x.shape[0]
        if route == "torch":
            return [self.lab.matmul(x, w, out) for w in self.plain]
        if route == "dequant":
            first = [plans.dequant(backend, w, self.plain[0]) for w in self.matrices]
            then = self.lab.matmul(x, self.plain[0], out)
            return [lambda plan=plan: (backend.run(plan), then()) for plan in first]  # type: ignore[misc]
        if route == "gemv":
            made = [plans.gemv(backend, w, x, out) for w in self.matrices]
        else:
            shares = plans.gemm_shares(backend, self.outputs, self.k, paired=False)
            floats, counts = plans.gemm_workspace(self.outputs, m, shares, paired=False)
            partial = self.lab.empty((floats,), "f32")
            counters = self.lab.empty((counts,), "u32")
            made = [
                plans.gemm(backend, w, x, out, partial=partial, counters=counters, shares=shares)
                for w in self.matrices
            ]
        return [lambda plan=plan: backend.run(plan) for plan in made]  # type: ignore[misc]

    def check(self, route: str, m: int) -> str | None:
        """Return what is wrong with a route's result on the last matrix, if anything."""
        x, out = self.lab.halves((m, self.k)), self.lab.empty((m, self.outputs), "f16")
        self.lab.seconds(self.works(route, x, out))
        w = self.matrices[-1]
        codes, meta = self.lab.fetch(w.codes), self.lab.fetch(w.meta)
        some = Packed(codes[:CHECKED_ROWS], meta[:, :CHECKED_ROWS], self.k, w.group, w.minima)
        given = self.lab.fetch(x)
        got = self.lab.fetch(out)[:, :CHECKED_ROWS].astype(np.float64)
        exact, size = reference.linear(some, given), reference.scale_of(some, given)
        wrong = np.abs(got - exact) > 1e-3 * size + np.abs(exact) * 2.0**-10
        return (
            f"{route} m={m} {self.k}x{self.outputs}: {wrong.sum()} wrong" if wrong.any() else None
        )

    def dequant_check(self) -> str | None:
        """Return what is wrong with the unpacked weights, if anything: every bit counts."""
        w, out = self.matrices[0], self.plain[0]
        self.lab.seconds([lambda: self.lab.backend.run(plans.dequant(self.lab.backend, w, out))])
        codes, meta = self.lab.fetch(w.codes), self.lab.fetch(w.meta)
        some = Packed(codes[:CHECKED_ROWS], meta[:, :CHECKED_ROWS], self.k, w.group, w.minima)
        got = self.lab.fetch(out)[:CHECKED_ROWS]
        same = np.array_equal(got.view(np.uint16), reference.dequant(some).view(np.uint16))
        return None if same else f"dequant {self.k}x{self.outputs}: not bit-equal"


def routes(m: int) -> list[str]:
    """Return which routes can take m rows."""
    few = ["gemv"] if m <= plans.GEMV_M_MAX else []
    some = ["gemm"] if m <= plans.GEMM_M_MAX else []
    return [*few, *some, "dequant"]


def measure(lab: Lab, shapes: list[tuple[int, int]], rows_of_x: tuple[int, ...]) -> dict[str, Any]:
    """Return every figure, what was wrong and the crossover."""
    copy = lab.copy_bytes_per_s()
    wrong: list[str | None] = []
    table: dict[tuple[int, int], dict[int, dict[Any, float]]] = {}
    rival: dict[tuple[tuple[int, int], int], float] = {}
    dequant = launch_us = 0.0
    for shape in shapes:
        bench = Bench(lab, *shape)
        wrong.append(bench.dequant_check())
        out = bench.plain[-1]
        unpack = [plans.dequant(lab.backend, w, out) for w in bench.matrices]
        spent = lab.seconds([lambda plan=plan: lab.backend.run(plan) for plan in unpack])  # type: ignore[misc]
        if shape == shapes[0]:
            dequant = cases.dequant_bytes(*shape) / spent / copy
            launch_us = lab.launch_seconds(unpack[0]) * 1e6
        for m in rows_of_x:
            x, y = lab.halves((m, shape[0])), lab.empty((m, shape[1]), "f16")
            wrong += [bench.check(route, m) for route in routes(m)]
            table.setdefault(shape, {})[m] = {
                route: lab.seconds(bench.works(route, x, y)) for route in routes(m)
            }
            rival[shape, m] = lab.seconds(bench.works("torch", x, y))
    limits = dispatch.crossover(table[shapes[0]])
    found = [
        cases.Row(*shape, m, taken, seconds[taken], rival[shape, m], copy)
        for shape, by_m in table.items()
        for m, seconds in by_m.items()
        for taken in [_taken(lab, limits, m, shape[0])]
    ]
    return {
        "copy_bytes_per_s": copy, "dequant_share": dequant, "launch_us": launch_us,
        "rows": found, "seconds": table, "crossover": limits,
        "wrong": [line for line in wrong if line],
    }  # fmt: skip


def _taken(lab: Lab, limits: dispatch.Crossover, m: int, k: int) -> str:
    most = lab.backend.shared_bytes_max
    return dispatch.route({lab.name: limits}, lab.name, m=m, k=k, shared_bytes_max=most)


def show(found: dict[str, Any]) -> str:
    """Return the table."""
    copy, share = found["copy_bytes_per_s"] / 1e12, found["dequant_share"]
    launch = found["launch_us"]
    table = [f"copy {copy:.2f} TB/s, dequant {share:.2f} of it, launch {launch:.1f} us"]
    table += [
        f"{row.k:6} x {row.outputs:<6} m {row.m:<4} {row.route:8} {row.seconds * 1e6:9.1f} us "
        f"{row.share:5.2f} of copy {row.times:6.2f}x torch"
        for row in found["rows"]
    ]
    return "\n".join(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="perf.gpu", description=__doc__)
    parser.add_argument("--kernels", type=Path, default=Path("build/kernels"))
    output.add_json(parser)
    parser.add_argument("--table", type=Path, help="put the crossover into this table")
    parser.add_argument("--dry-run", action="store_true", help="small shapes, on this CPU")
    options = parser.parse_args()
    lab: Lab
    try:
        lab = DryLab() if options.dry_run else GpuLab(options.kernels)
    except (KernelError, BuildError, ImportError, RuntimeError, AssertionError) as problem:
        print(f"perf.gpu: no GPU to measure on: {problem}", file=sys.stderr)
        return 2
    shapes = [(256, 72), (136, 64)] if options.dry_run else [cases.BIG, cases.MIDDLE]
    found = measure(lab, shapes, (1, 8, 65) if options.dry_run else cases.ROWS)
    lines = found["wrong"] + (
        [] if options.dry_run
        else cases.missed(found["rows"], found["dequant_share"], found["launch_us"])
    )  # fmt: skip
    result = found | {
        "machine": machine.facts(), "gpu": lab.facts, "missed": lines,
        "rows": [
            dataclasses.asdict(row) | {"share": row.share, "times": row.times}
            for row in found["rows"]
        ],
        "seconds": {f"{k}x{n}": by_m for (k, n), by_m in found["seconds"].items()},
        "crossover": dataclasses.asdict(found["crossover"]),
    }  # fmt: skip
    output.put(options.json, result, show(found))
    if options.table:
        table = json.loads(options.table.read_text(encoding="utf-8"))
        table["devices"][lab.name] = result["crossover"]
        options.table.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    for line in lines:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
