"""What an operator is told of keys while the sidecar runs: alarms, states, numbers.

`look` is called by the thread that looks for changes, so that the data loop has no work with it;
other threads only read the numbers. Kids are no secret: they stand at the head of every envelope.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from proxy.keys.expiry import expiring
from proxy.keys.pace import breathe

if TYPE_CHECKING:
    from proxy.keys.provider import KeyProvider, State
    from proxy.sm4.keyring import Keyring

EXPIRY_EVERY_MS = 10_000
AGAIN_MS = 3_600_000
ALARMS_MAX = 1024

log = logging.getLogger(__name__)


class KeyWatch:
    """See the module."""

    def __init__(self, provider: KeyProvider, alarm_ahead_ms: int) -> None:
        self.provider = provider
        self.ring: Keyring | None = None
        self.expiring = 0
        self.alarms = 0
        self.revoked = 0
        self._ahead_ms = alarm_ahead_ms
        self._next_ms = 0
        self._told: dict[bytes, int] = {}
        self._degraded = False

    def look(self, now_ms: int) -> None:
        """Tell what is new: once an hour for each key that ends, once for each change of state."""
        self._tell_state(self.provider.state())
        if self.ring is None or now_ms < self._next_ms:
            return
        self._next_ms = now_ms + EXPIRY_EVERY_MS
        due = expiring(self.ring, now_ms, self._ahead_ms, breathe)
        self.expiring = len(due)
        kids = {key.kid for key in due}
        self._told = {kid: at_ms for kid, at_ms in self._told.items() if kid in kids}
        for key in due[:ALARMS_MAX]:
            if now_ms - self._told.get(key.kid, -AGAIN_MS) >= AGAIN_MS:
                self._told[key.kid] = now_ms
                self.alarms += 1
                log.warning(
                    "key ends and nothing follows it: kid=%s client=%s in_s=%d; run: "
                    "tongguan keys rotate",
                    key.kid.hex(),
                    key.client,
                    (key.not_after_ms - now_ms) // 1000,
                )

    def _tell_state(self, state: State) -> None:
        if state.ok == (not self._degraded):
            return
        self._degraded = not state.ok
        if self._degraded:
            # A line for people: which path and which answer, as the provider said it.
            log.warning("keys degraded: %s", state.problem or state.reason)
        else:
            log.info("keys: the provider is well again")

    def notes(self, now_ms: int) -> list[str]:
        """Return what readyz should say of the keys, besides which are live."""
        notes, state = [], self.provider.state()
        if not state.ok:
            since_s = max(0, now_ms - state.since_ms) // 1000
            notes.append(f"keys_degraded={state.reason} since_s={since_s}")
        if self.expiring:
            notes.append(f"keys_expiring={self.expiring}")
        return notes
