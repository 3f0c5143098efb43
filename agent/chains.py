"""What the agent does for audit chains of its sidecars, as routes: witness, seeds, leases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent.chains_api import ChainsApi
from agent.witness_api import WitnessApi

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.routing import Route
    from starlette.types import Scope

    from agent.lease_store import LeaseStore
    from agent.metrics import Metrics
    from agent.seed_store import SeedStore
    from agent.witness_store import WitnessStore


@dataclass(frozen=True, slots=True)
class Chains:
    """What is kept on this node for chains; None: that is not done here."""

    witness: WitnessStore | None = None
    leases: LeaseStore | None = None
    seeds: SeedStore | None = None
    witness_token: bytes = field(default=b"", repr=False)

    def routes(
        self, believed: Callable[[Scope, dict[bytes, bytes]], bool], metrics: Metrics
    ) -> list[Route]:
        """Return the routes; `believed` says of a caller whether it may ask."""
        routes: list[Route] = []
        if self.witness is not None:
            routes += WitnessApi(self.witness, believed, metrics, self.witness_token).routes()
        if self.leases is not None:
            routes += ChainsApi(self.seeds, self.leases, believed, metrics).routes()
        return routes
