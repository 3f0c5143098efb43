"""Which kernel computes a product, by a table of measured crossovers.

A decision and no more. The table is `cuda/crossover.json`, written by `python -m perf.gpu --table`:
for each device's name, up to how many rows of x the multiply-add kernel and the tensor-core kernel
are the fastest. A device that nobody measured gets `UNMEASURED`, which is careful: multiply-adds
for the few rows they were made for, tensor cores up to 32, and beyond that the weights are unpacked
for an ordinary product.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from kernels.plans import GEMM_M_MAX, GEMV_M_MAX, gemv_shared_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Route = Literal["gemv", "gemm", "dequant"]


@dataclass(frozen=True, slots=True)
class Crossover:
    """Up to how many rows of x each kernel is taken; `gemm` may be less than `gemv`."""

    gemv: int
    gemm: int

    def __post_init__(self) -> None:
        if not 0 <= self.gemv <= GEMV_M_MAX or not 0 <= self.gemm <= GEMM_M_MAX:
            raise ValueError(f"a crossover beyond what the kernels take: {self}")


UNMEASURED: Final = Crossover(gemv=GEMV_M_MAX, gemm=32)


def read(path: Path) -> dict[str, Crossover]:
    """Return the table by device name; raises ValueError for a malformed one."""
    table = json.loads(path.read_text(encoding="utf-8"))
    try:
        return {name: Crossover(**numbers) for name, numbers in table["devices"].items()}
    except (KeyError, TypeError, AttributeError) as problem:
        raise ValueError(f"{path.name} is no table of crossovers: {problem}") from None


def route(
    table: Mapping[str, Crossover],
    device: str,
    *,
    m: int,
    k: int,
    shared_bytes_max: int,
    paired: bool = False,
) -> Route:
    """Return the kernel for x of m rows; one that cannot take this shape is never named."""
    limits = table.get(device, UNMEASURED)
    fits = gemv_shared_bytes(m, k, paired=paired) <= shared_bytes_max
    if m <= limits.gemv and fits:
        return "gemv"
    if m <= limits.gemm and k % 8 == 0:
        return "gemm"
    return "dequant"


def crossover(seconds: Mapping[int, Mapping[Route, float]]) -> Crossover:
    """Return the limits out of measured seconds by rows of x and route.

    A kernel is taken up to the last of the leading run of rows at which it is the fastest; where
    the tensor cores win from the first row on, `gemv` is 0.
    """
    gemv = gemm = 0
    for m in sorted(seconds):
        best = min(seconds[m], key=lambda name: seconds[m][name])
        if best == "gemv" and gemm == 0:
            gemv = m
        elif best != "dequant":
            gemm = m
        else:
            break
    return Crossover(gemv=gemv, gemm=gemm)
