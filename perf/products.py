"""Products with four-bit weights on this CPU, ours beside torch's: `python -m perf.products`.

The default model's FFN matrices, as many as it has layers, one after the other, so that they come
from memory as in a step; 1, 8 and 32 rows of x, float32 in and out, since the engine computes in
float32. One thread, CPU time, interleaved rounds. Beside each time stands the greatest error
against float64, as a share of |x||w|. Exit codes: 0 our error is within its bound and our time,
over all of the FFN, at most 5 % above torch's with four bits at 1 and 8 rows; 1 it is not; 2 no
extension.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from kernels import cpu, quant, reference
from perf import machine, output
from perf.rounds import Row, interleaved

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

# name: rows, k
SHAPES = {"gate and up": (3072, 576), "down": (576, 1536)}
BATCHES = (1, 8, 32)
LAYERS = 30
GROUP = 32
OURS = "kernels.cpu, four bits"
THEIRS = "torch int4, bfloat16"
SLACK = 1.05  # runs differ by so much
ERROR_MAX = 1e-3


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to multiply: a pass over all layers, and one product as float64."""

    run: Callable[[], object]
    product: Callable[[], NDArray[np.float64]]


def packed(rng: np.random.Generator, rows: int, k: int) -> quant.Packed:
    """Return random weights like a model's: some 0.05 in size, minima about half the range."""
    q = rng.integers(0, 16, (rows, k), np.uint8)
    scale = rng.uniform(0.005, 0.02, (rows, k // GROUP)).astype(np.float16)
    return quant.pack(q, scale, (scale * -7.6).astype(np.float16), GROUP, minima=True)


def weights(matrix: quant.Packed) -> NDArray[np.float64]:
    """Return what the format says, unrounded."""
    halves = matrix.meta.view("<f2").astype(np.float64)
    group = np.arange(matrix.k) // GROUP
    scale, offset = halves[:, 0::2].T[:, group], halves[:, 1::2].T[:, group]
    exact: NDArray[np.float64] = reference.codes(matrix) * scale + offset
    return exact


def torch_int4(matrix: quant.Packed, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's packed form: w = (q - 8) * scale + zero."""
    halves = torch.from_numpy(matrix.meta.view("<f2").astype(np.float32))
    scale, offset = halves[:, 0::2], halves[:, 1::2]
    both = torch.stack((scale, offset + 8 * scale), -1).contiguous().to(dtype)
    codes = torch.from_numpy(reference.codes(matrix).astype(np.int32))
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu  # noqa: SLF001 - torch names it so
    return pack(codes, 1), both


def contestants(matrices: list[quant.Packed], m: int, x: torch.Tensor) -> dict[str, Contestant]:
    """Return every way for these matrices and x [m, k]."""
    rows = matrices[0].codes.shape[0]
    made = [cpu.four_bits(matrix) for matrix in matrices]
    y = np.empty((m, rows), np.float32)
    given = x.numpy()

    def ours() -> None:
        for matrix in made:
            matrix.linear(given, y, 1)

    def first_of_ours() -> NDArray[np.float64]:
        made[0].linear(given, y, 1)
        return y.astype(np.float64)

    ways = {OURS: Contestant(ours, first_of_ours)}
    ways[THEIRS] = int4_way(matrices, x, torch.bfloat16)
    if m == 1:  # without vectors: some 25 times as slow
        ways["torch int4, float32"] = int4_way(matrices, x, torch.float32)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        plain = [torch.from_numpy(weights(matrix)).to(dtype) for matrix in matrices]
        ways[f"torch linear, {name}"] = linear_way(plain, x)
    return ways


def int4_way(matrices: list[quant.Packed], x: torch.Tensor, dtype: torch.dtype) -> Contestant:
    """Return torch's int4 product, computed in `dtype`."""
    made = [torch_int4(matrix, dtype) for matrix in matrices]
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001 - torch names it so

    def product(codes: torch.Tensor, both: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = multiply(x.to(dtype), codes, GROUP, both).float()
        return out

    return Contestant(
        lambda: [product(*each) for each in made], lambda: product(*made[0]).double().numpy()
    )


def linear_way(plain: list[torch.Tensor], x: torch.Tensor) -> Contestant:
    """Return torch's product with unpacked weights, computed in their type."""

    def product(w: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.to(w.dtype), w).float()

    return Contestant(
        lambda: [product(w) for w in plain], lambda: product(plain[0]).double().numpy()
    )


def measure(rounds: int, layers: int) -> list[dict[str, Any]]:
    """Return one entry for each shape, batch and contestant."""
    rng = np.random.default_rng(0)
    entries = []
    for shape, (rows, k) in SHAPES.items():
        matrices = [packed(rng, rows, k) for _ in range(layers)]
        exact = weights(matrices[0])
        for m in BATCHES:
            x = torch.from_numpy(rng.normal(0, 1, (m, k)).astype(np.float32))
            with torch.inference_mode():
                ways = contestants(matrices, m, x)
                times = interleaved({name: w.run for name, w in ways.items()}, OURS, rounds)
                errors = {name: error(w.product(), x, exact) for name, w in ways.items()}
            entries += [entry(shape, m, name, times[name], errors[name], layers) for name in ways]
    return entries


def entry(shape: str, m: int, name: str, row: Row, off: float, layers: int) -> dict[str, Any]:
    """Return a contestant's entry; us a product."""
    times = asdict(row) | {"us": round(row.us / layers, 2), "ratio": round(row.ratio, 3)}
    return {"shape": shape, "rows_of_x": m, "name": name, **times, "error": float(f"{off:.2g}")}


def error(got: NDArray[np.float64], x: torch.Tensor, w: NDArray[np.float64]) -> float:
    """Return the greatest error as a share of |x||w|."""
    wide = x.double().numpy()
    size = np.linalg.norm(wide, axis=1)[:, None] * np.linalg.norm(w, axis=1)[None, :]
    return float((np.abs(got - wide @ w.T) / size).max())


def missed(entries: list[dict[str, Any]]) -> list[str]:
    """Return one line for each thing that ours is not."""
    lines = [
        f"{each['shape']}, {each['rows_of_x']} rows: error {each['error']:g}, at most {ERROR_MAX:g}"
        for each in entries
        if each["name"] == OURS and not each["error"] <= ERROR_MAX
    ]
    for m in BATCHES[:2]:
        ours, theirs = (
            sum(e["us"] for e in entries if e["name"] == name and e["rows_of_x"] == m)
            for name in (OURS, THEIRS)
        )
        if not ours <= SLACK * theirs:
            lines.append(f"{m} rows: {ours:.0f} us a layer, torch {theirs:.0f}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="perf.products", description=__doc__)
    output.add_json(parser)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--layers", type=int, default=LAYERS, help="matrices of each shape")
    options = parser.parse_args()
    if not cpu.AVAILABLE:
        print("perf.products: needs AVX2, FMA, F16C and kernels.cpu built", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    entries = measure(options.rounds, options.layers)
    lines = missed(entries)
    result = {
        "machine": machine.facts() | {"torch": importlib.metadata.version("torch")},
        "parameters": {"rounds": options.rounds, "layers": options.layers, "group": GROUP},
        "entries": entries,
        "missed": lines,
    }
    table = [f"{'':12} {'rows':>4}  {'':24} {'us':>8} {'of ours':>8} {'error':>8}"]
    table += [
        f"{each['shape']:12} {each['rows_of_x']:4}  {each['name']:24} {each['us']:8.1f}"
        f" {each['ratio']:8.2f} {each['error']:8.1g}"
        for each in entries
    ]
    output.put(options.json, result, "\n".join(table))
    for line in lines:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
