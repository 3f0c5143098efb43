"""What is measured on a GPU, and what has to come out: numbers and comparisons, no device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

GROUP = 128
BIG, MIDDLE = (8192, 28672), (4096, 14336)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LAUNCH_US_MAX = 5.0
# Beyond the crossover the route (unpack, then torch's product) may lose this much to torch's alone.
NEVER_BELOW = 0.95


@dataclass(frozen=True, slots=True)
class Gate:
    """Least share of copy bandwidth and least times torch's FP16, for a shape and rows of x."""

    share: float
    times: float


# (k, outputs), rows of x: what is asked for.
GATES: Mapping[tuple[tuple[int, int], int], Gate] = {
    (BIG, 1): Gate(0.80, 3.0),
    (MIDDLE, 1): Gate(0.65, 2.5),
    (BIG, 8): Gate(0.0, 2.8),
    (BIG, 16): Gate(0.0, 2.5),
    (BIG, 32): Gate(0.0, 2.0),
    (BIG, 64): Gate(0.0, 1.3),
}
DEQUANT_SHARE_MIN = 0.90


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of the table; `route` is the kernel that dispatch takes."""

    k: int
    outputs: int
    m: int
    route: str
    seconds: float
    rival_seconds: float
    copy_bytes_per_s: float

    @property
    def times(self) -> float:
        """How many times as fast as torch's FP16 product."""
        return self.rival_seconds / self.seconds

    @property
    def share(self) -> float:
        """The share of copy bandwidth at which the four-bit weights were read."""
        return weight_bytes(self.k, self.outputs) / self.seconds / self.copy_bytes_per_s


def weight_bytes(k: int, outputs: int, group: int = GROUP) -> int:
    """Return bytes of codes and scales."""
    return outputs * (-(-k // 32) * 16 + -(-k // group) * 4)


def dequant_bytes(k: int, outputs: int) -> int:
    """Return bytes that unpacking reads and writes."""
    return weight_bytes(k, outputs) + 2 * k * outputs


def buffers(bytes_each: int, l2_bytes: int) -> int:
    """Return how many matrices are used in turn, so that none is found in L2: over 4 times it."""
    return max(2, -(-4 * l2_bytes // bytes_each) + 1)


def missed(rows: Iterable[Row], dequant_share: float, launch_us: float) -> list[str]:
    """Return one line for each gate that does not hold."""
    lines = []
    if dequant_share < DEQUANT_SHARE_MIN:
        lines.append(f"dequant: {dequant_share:.2f} of copy, min {DEQUANT_SHARE_MIN}")
    if launch_us > LAUNCH_US_MAX:
        lines.append(f"launch: {launch_us:.1f} us, max {LAUNCH_US_MAX}")
    for row in rows:
        where = f"{row.k}x{row.outputs} m={row.m} ({row.route})"
        gate = GATES.get(((row.k, row.outputs), row.m))
        if gate and row.share < gate.share:
            lines.append(f"{where}: {row.share:.2f} of copy, min {gate.share}")
        if gate and row.times < gate.times:
            lines.append(f"{where}: {row.times:.2f}x torch, min {gate.times}")
        if row.route == "dequant" and row.times < NEVER_BELOW:
            lines.append(f"{where}: {row.times:.2f}x torch, min {NEVER_BELOW}")
    return lines
