"""Is the sidecar live, is it ready, and what should an operator know.

Pure over the context's state: each reason is a short machine-readable word with a number where one
helps (docs/sidecar.md, "Doors").
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.qos.pools import STATE_NAMES

if TYPE_CHECKING:
    import asyncio

    from proxy.clock import SystemClock
    from proxy.config import Settings
    from proxy.context import Context
    from proxy.keys.watch import KeyWatch

TICK_NS = 100_000_000  # how often the data loop reports
CLOCK_BEHIND_MS = 5_000
KIDS_TOLD_MAX = 32


class Health:
    """See the module."""

    def __init__(self, context: Context, clock: SystemClock) -> None:
        self._current = context.current
        self._clock = clock
        self.started = False
        self.fence_until_ms = 0
        self.last_tick_ns = clock.mono_ns()  # set by the data loop itself, read by other threads
        self.listeners: dict[str, asyncio.AbstractServer] = {}
        self.keys: KeyWatch | None = None

    @property
    def context(self) -> Context:
        """The newest context."""
        return self._current.context

    @property
    def settings(self) -> Settings:
        """The newest settings."""
        return self._current.context.settings

    def dead(self) -> list[str]:
        """Return why the process should be restarted; empty: it is live."""
        silent_ns = self._clock.mono_ns() - self.last_tick_ns
        if self.started and silent_ns > self.settings.timeouts.loop_stuck_s * 1e9:
            return [f"loop_stuck_s={silent_ns // 1_000_000_000}"]
        return []

    def lag_ms(self) -> int:
        """Return how late the data loop is now, by its own report; 0: in time."""
        if not self.started:
            return 0
        return max(0, self._clock.mono_ns() - self.last_tick_ns - TICK_NS) // 1_000_000

    def unready(self) -> list[str]:
        """Return why no traffic should come; empty: ready."""
        context = self.context
        reasons = self.dead()
        if not self.started:
            reasons.append("starting")
        if context.draining:
            reasons.append("draining")
        else:
            closed = (name for name, server in self.listeners.items() if not server.is_serving())
            reasons += (f"door_closed={name}" for name in closed)
        left_ms = self.fence_until_ms - self._clock.wall_ms()
        if context.receiver is not None and left_ms >= 0:
            reasons.append(f"start_fence_ms={left_ms}")
        if context.shared_replay is not None and not context.shared_replay.available:
            reasons.append("replay_store_lost")
        if context.audit_blocked():
            reasons.append("audit_unavailable")
        if self._unwitnessed():
            reasons += self._witness_troubles()
        if self._clock.behind_ms() > CLOCK_BEHIND_MS:
            reasons.append(f"clock_behind_ms={self._clock.behind_ms()}")
        receiver = context.receiver
        if receiver is not None and not receiver.keyring.live(self._clock.wall_ms()):
            reasons.append("no_live_kid")
        return reasons

    def _witness_troubles(self) -> list[str]:
        audit = self.context.audit
        witnesses = audit.witnesses if audit is not None else ()
        return [f"{w.trouble}: {w.name}" for w in witnesses if w.trouble]

    def _unwitnessed(self) -> bool:
        """Say whether policy stops traffic: no witness can be reached, or one refuses.

        One of several that is away is a note: a peer's outage must not empty other nodes.
        """
        audit = self.context.audit
        if audit is None or self.settings.audit.on_failure != "block" or not audit.witnesses:
            return False
        troubles = [witness.trouble for witness in audit.witnesses]
        return all(troubles) or "witness_refused" in troubles

    def notes(self) -> list[str]:
        """Return what does not stop traffic but should be known."""
        context = self.context
        notes = []
        if context.audit is None:
            notes.append("audit_off")
        elif not context.audit.available:
            notes.append("audit_degraded")
        if not self._unwitnessed():
            notes += self._witness_troubles()
        if context.settings.audit.prompt_hash_mode == "plain":
            notes.append("prompt_hashes_plain: a dictionary can open them")
        if context.receiver is not None and not context.settings.envelope.fence_s:
            notes.append("start_fence_off: an envelope may be taken again after a restart")
        if context.receiver is None:
            notes.append("sealed_door_closed")
        if self.keys is not None:
            notes += self.keys.notes(self._clock.wall_ms())
        now_ms = self._clock.sealing_ms()
        for name, route in context.routes.items():
            notes.extend(
                f"no_sealing_key: {url} of {name}"
                for url, recipient in route.recipients.items()
                if not recipient.in_time(now_ms)
            )
            notes.extend(
                f"endpoint_{STATE_NAMES[endpoint.state]}: {endpoint.url} of {name}"
                for endpoint in route.state.endpoints
                if endpoint.state
            )
        return notes

    def kids(self) -> dict[str, object]:
        """Return which kids are live: how many, and some of them by name."""
        receiver = self.context.receiver
        if receiver is None:
            return {"live": 0, "kids": []}
        now_ms = self._clock.wall_ms()
        kids = receiver.keyring.live_kids(now_ms, KIDS_TOLD_MAX)
        return {"live": receiver.keyring.live(now_ms), "kids": [kid.hex() for kid in kids]}
