"""Trace-id leases: (machine, block of sequences) for each sidecar of the node, no two alike.

Pure. A trace id is `<ms>-<machine>-<sequence>`; all of a node's sidecars have the agent's machine
number, and each the sequences of a block of its own. A lease lasts `TTL_S` from its last renewal;
a block is given again `QUIET_S` after its lease ended, when whoever held it has long stopped.

    asked with        the lease is           answer
    a lease           its holder's, alive    the same, renewed
    a lease           unknown, or over       another block
    none              -                      a free block, or 507
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.seeds import RefusedError
from proxy.audit.trace_id import MACHINES, SEQUENCES

if TYPE_CHECKING:
    from collections.abc import Mapping

# 50 ids a ms for each of 200 processes; beyond 50 the ids' ms runs ahead of the clock.
BLOCK = 50
BLOCKS = SEQUENCES // BLOCK
TTL_S = 3600
QUIET_S = 120


@dataclass(frozen=True, slots=True)
class Lease:
    """Who has a block, and until when (Unix time)."""

    id: str
    block: int
    until_s: int

    @property
    def first(self) -> int:
        """The first sequence of the block."""
        return self.block * BLOCK


def check_machine(machine: int) -> int:
    """Return a machine number; raises ValueError."""
    if not 0 <= machine < MACHINES:
        raise ValueError(f"a machine number is 0 to {MACHINES - 1}")
    return machine


def grant(leases: Mapping[int, Lease], lease_id: str, fresh_id: str, now_s: int) -> Lease:
    """Return the lease to keep; `fresh_id` names it if it is a new one. Raises `RefusedError`."""
    held = find(leases, lease_id)
    if held is not None and now_s < held.until_s:
        return replace(held, until_s=now_s + TTL_S)
    for block in range(BLOCKS):
        taken = leases.get(block)
        if taken is None or now_s >= taken.until_s + QUIET_S:
            return Lease(fresh_id, block, now_s + TTL_S)
    raise RefusedError(507, f"{BLOCKS} leases are out")


def find(leases: Mapping[int, Lease], lease_id: str) -> Lease | None:
    """Return a lease by its id."""
    return next((lease for lease in leases.values() if lease.id == lease_id), None)
