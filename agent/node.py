"""What the process can do right now: the one place the API, the admin door and the start agree on.

Written by the API loop's thread and the loader, read from any thread. Each attribute is replaced
whole, so a reader sees an old or a new value, never half of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent.errors import DRAINING, INTERNAL, MODEL_LOADING, ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from agent.engine.types import Engine
    from agent.memory.watch import MemoryWatch
    from agent.upstream_watch import UpstreamWatch

# The API loop stamps itself once a second; a loop that has not for so long is stuck.
STUCK_S = 30


class Node:
    """State of one agent: loading, then ready, then draining."""

    __slots__ = (
        "beat_ns", "draining", "engine", "failure", "memory", "names", "progress", "sections",
        "stage", "upstreams",
    )  # fmt: skip

    def __init__(self, beat_ns: int) -> None:
        self.engine: Engine | None = None
        self.memory: MemoryWatch | None = None
        self.upstreams: UpstreamWatch | None = None
        # What other parts of the agent report about themselves, by name; None: not running here.
        self.sections: dict[str, Callable[[], Mapping[str, object] | None]] = {}
        self.names: tuple[str, ...] = ()
        self.failure: str | None = None
        self.draining = False
        self.progress = 0.0
        self.stage = "starting"
        self.beat_ns = beat_ns

    def loaded(self, engine: Engine, names: tuple[str, ...]) -> None:
        """Take the engine; `names` empty: the model's own name."""
        self.names = names or (engine.info.id,)
        self.progress = 1.0
        self.engine = engine

    def not_ready(self) -> list[str]:
        """Return why no request would be served; empty: ready."""
        reasons = []
        if self.failure is not None:
            reasons.append(f"model failed: {self.failure}")
        elif self.engine is None:
            reasons.append(f"model loading: {self.stage} {self.progress:.0%}")
        if self.draining:
            reasons.append("draining")
        return reasons

    def alive(self, now_ns: int) -> bool:
        """Say whether the API loop runs."""
        return now_ns - self.beat_ns < STUCK_S * 1_000_000_000

    def require_engine(self) -> Engine:
        """Return the engine or raise the `ApiError` that says why there is none."""
        if self.draining:
            raise ApiError(DRAINING, "the agent is shutting down", retry_after_s=5)
        if self.failure is not None:
            raise ApiError(INTERNAL, "the model could not be loaded; the agent's log says why")
        if self.engine is None:
            raise ApiError(
                MODEL_LOADING,
                f"the model is loading ({self.stage} {self.progress:.0%})",
                retry_after_s=2,
            )
        return self.engine
