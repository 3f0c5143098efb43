"""What the engine thread hands to the HTTP loop: the deltas of one request, coalesced.

The engine thread calls `put` and never waits; the loop awaits `take` and gets everything that has
come since. At most one wake-up is on its way at a time, however many deltas arrive. What may pile
up is bounded by `pending_tokens`: a reader that falls that far behind ends its own request and
disturbs nobody else's. A request that collects the whole answer is bounded by its max_tokens and
passes no limit. Once given up, the generation is cancelled and nothing more is kept.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from agent.engine.types import Delta, FinishReason, Generation

Why = Literal["gone", "stalled", "behind", "draining"]


class AbandonedError(Exception):
    """Nobody wants the rest.

    The client is gone, has stalled (does not read), is behind (by too many tokens), or the agent
    is draining.
    """

    def __init__(self, why: Why) -> None:
        super().__init__(why)
        self.why: Why = why


@dataclass(frozen=True, slots=True)
class Batch:
    """Deltas since the last `take`, joined; `error` is set exactly with finish reason "error"."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    error: str | None


class Inbox:
    """One request's deltas. `put` from any thread; the rest from the loop's only."""

    __slots__ = (
        "_finish",
        "_generation",
        "_ids",
        "_lock",
        "_loop",
        "_on_behind",
        "_on_tokens",
        "_pending_tokens",
        "_texts",
        "_wake",
        "_waking",
        "_why",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        on_tokens: Callable[[int], None],
        on_behind: Callable[[], None],
    ) -> None:
        """Make an empty inbox.

        `on_tokens` is called in the engine's thread with the count of each step, `on_behind` in
        the loop when the reader has fallen too far behind.
        """
        self._loop = loop
        self._pending_tokens: int | None = None
        self._on_tokens = on_tokens
        self._on_behind = on_behind
        self._generation: Generation | None = None
        self._lock = threading.Lock()
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._finish: Delta | None = None
        self._wake = asyncio.Event()
        self._waking = False
        self._why: Why | None = None

    def bound(self, pending_tokens: int) -> None:
        """Set how many tokens may pile up; without a call there is no bound here."""
        self._pending_tokens = pending_tokens

    def attach(self, generation: Generation) -> None:
        """Set what to cancel when the request is given up."""
        self._generation = generation
        if self._why is not None:
            generation.cancel()

    def put(self, delta: Delta) -> None:
        """Take one delta from the engine thread."""
        self._on_tokens(len(delta.token_ids))
        with self._lock:
            if self._why is not None:
                return
            if delta.text:
                self._texts.append(delta.text)
            self._ids.extend(delta.token_ids)
            if delta.finish_reason is not None:
                self._finish = delta
            behind = self._pending_tokens is not None and len(self._ids) > self._pending_tokens
            if behind:
                self._drop("behind")
            elif self._waking:
                return
            self._waking = True
        if behind and self._generation is not None:
            self._generation.cancel()
        try:
            self._loop.call_soon_threadsafe(self._wake_up)
        except RuntimeError:
            return  # the loop has closed: the process is ending and nobody waits

    def _wake_up(self) -> None:
        self._wake.set()
        if self._why == "behind":
            self._on_behind()

    def abandon(self, why: Why) -> None:
        """End the request early; the first reason stays."""
        with self._lock:
            if self._why is None:
                self._drop(why)
        if self._generation is not None:
            self._generation.cancel()
        self._wake.set()

    def _drop(self, why: Why) -> None:
        self._why = why
        self._texts.clear()
        self._ids.clear()

    async def take(self) -> Batch:
        """Wait for the next deltas and return them; raises `AbandonedError`."""
        await self._wake.wait()
        self._wake.clear()
        with self._lock:
            self._waking = False
            if self._why is not None:
                raise AbandonedError(self._why)
            finish = self._finish
            batch = Batch(
                "".join(self._texts),
                tuple(self._ids),
                finish.finish_reason if finish else None,
                finish.error if finish else None,
            )
            self._texts.clear()
            self._ids.clear()
        return batch

    def check(self) -> None:
        """Raise `AbandonedError` if the request has been given up."""
        if self._why is not None:
            raise AbandonedError(self._why)
