"""Leases on disk: a restarted agent gives nobody a block that somebody still has. Blocking."""

from __future__ import annotations

import secrets
from dataclasses import replace as changed
from typing import TYPE_CHECKING

import orjson

from agent.leases import Lease, check_machine, find, grant
from agent.seed_store import ChainsError
from agent.witness_store import replace

if TYPE_CHECKING:
    from pathlib import Path

NAME = "leases"


class LeaseStore:
    """See the module; called by one thread."""

    def __init__(self, directory: Path, machine: int) -> None:
        """Read what is there; raises `ChainsError`, ValueError for a bad machine number."""
        self.machine = check_machine(machine)
        self._path = directory / NAME
        self.leases: dict[int, Lease] = {}
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._path.exists():
                for row in orjson.loads(self._path.read_bytes()):
                    self.leases[row["block"]] = Lease(row["id"], row["block"], row["until_s"])
        except OSError as problem:
            raise ChainsError(f"agent.chains_dir: {self._path}: {problem.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise ChainsError(
                f"agent.chains_dir: {self._path} is damaged; remove it once no sidecar of this "
                "node runs"
            ) from None

    def grant(self, lease_id: str, now_s: int) -> Lease:
        """Give or renew a lease, durably; raises `RefusedError`, OSError."""
        lease = grant(self.leases, lease_id, secrets.token_hex(8), now_s)
        self._keep(lease)
        return lease

    def release(self, lease_id: str, now_s: int) -> None:
        """End a lease; raises OSError."""
        lease = find(self.leases, lease_id)
        if lease is not None and lease.until_s > now_s:
            self._keep(changed(lease, until_s=now_s))

    def _keep(self, lease: Lease) -> None:
        after = self.leases | {lease.block: lease}
        rows = [{"id": r.id, "block": r.block, "until_s": r.until_s} for r in after.values()]
        replace(self._path, orjson.dumps(rows))
        self.leases = after
