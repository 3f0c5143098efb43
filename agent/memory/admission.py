"""Whether a request's KV fits into memory that is really there: pure.

A CPU's KV pool is address space whose pages come when they are first written, and a cgroup's limit
kills whoever writes one too many. So a request is refused while the pages that all requests
together may still touch are more than the headroom less a reserve. A GPU's pool is there from the
start; there the reserve alone must be free, for what a step needs beside the pool.

What a request will generate is not known: at most `PREDICTED_TOKENS` count, and `max_tokens` where
it is less. Most answers are shorter; the reserve covers one that is longer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from agent.engine.types import EngineStats
    from agent.memory.topology import Topology

PREDICTED_TOKENS: Final = 512
# A report older than this says nothing about now.
STALE_S: Final = 5.0
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why a request is refused: bytes it and the others may still touch, bytes there are."""

    needed_bytes: int
    left_bytes: int
    where: str

    def __str__(self) -> str:
        """Say it to the caller: no name, no path."""
        return (
            f"this request and those before it may need {self.needed_bytes / _MIB:.0f} MiB more, "
            f"and {max(0, self.left_bytes) / _MIB:.0f} MiB are left ({self.where})"
        )


def predicted_tokens(prompt_tokens: int, max_tokens: int) -> int:
    """Return how many tokens of KV a request is taken to need."""
    return prompt_tokens + min(max_tokens, PREDICTED_TOKENS)


def shortage(
    stats: EngineStats, report: Topology, *, tokens: int, reserve_bytes: int, now_unix_s: float
) -> Shortage | None:
    """Return why a request of `tokens` would not fit, or None: let it in.

    A stale report lets everybody in: what cannot be seen is no reason to refuse.
    """
    if not 0 <= now_unix_s - report.at_unix_s <= STALE_S or not stats.kv_block_tokens:
        return None
    if report.backend != "cpu":
        return _on_device(report, reserve_bytes)
    blocks = -(-tokens // stats.kv_block_tokens)
    # Free blocks are taken before cached ones are given up, so cached ones are not to be had.
    others = max(stats.kv_blocks_promised, stats.kv_blocks_used) + stats.kv_blocks_cached
    new = min(stats.kv_blocks_total, others + blocks) - stats.kv_blocks_touched
    needed = max(0, new) * stats.kv_block_bytes
    left = report.host.headroom_bytes - reserve_bytes
    if needed == 0 or needed <= left:
        return None
    group = report.host.cgroup
    limited = group is not None and group.limit_bytes is not None
    return Shortage(needed, left, "the container's limit" if limited else "the machine's memory")


def _on_device(report: Topology, reserve_bytes: int) -> Shortage | None:
    for device in report.devices:
        torch = device.allocator
        if torch is None or torch.reserved_bytes is None or torch.allocated_bytes is None:
            continue
        left = device.driver.free_bytes + torch.reserved_bytes - torch.allocated_bytes
        if left < reserve_bytes:
            return Shortage(reserve_bytes, left, device.id)
    return None
