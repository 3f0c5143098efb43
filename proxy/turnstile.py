"""A gate on the loop: lets requests through at the end of a turn, a bounded number of P2 a turn.

Requests that came in one turn of the loop are sorted by class before any of them goes, once places
are few. P2's work, refusals too, is cut into turns, so that a flood of it delays nobody for longer
than a turn. The gate decides; this calls it.

Bounds: tickets by the gate; refusals that wait for their turn by the doors' connections.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

    from proxy.clock import Clock
    from proxy.qos.admission import Gate, Refusal, Waiter
    from proxy.qos.classes import QosClass

GRANTS_A_TURN = 64
P2_A_TURN = 8
REFUSALS_A_TURN = 16


class Turnstile:
    """See the module. Owned by the data loop."""

    __slots__ = ("_clock", "_due", "_loop", "_refused", "_started", "gate")

    def __init__(
        self,
        gate: Gate,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        started: dict[QosClass, int],
    ) -> None:
        self.gate = gate
        self._loop = loop
        self._clock = clock
        self._started = started
        self._due = False
        self._refused: deque[tuple[Waiter, Refusal]] = deque()

    def schedule(self) -> None:
        """Let go who may, at the end of this turn of the loop."""
        if not self._due:
            self._due = True
            self._loop.call_soon(self._turn)

    def turn_away(self, waiter: Waiter, refusal: Refusal) -> None:
        """Refuse it in its turn, not at once."""
        self._refused.append((waiter, refusal))
        self.schedule()

    def _turn(self) -> None:
        self._due = False
        gate, refused = self.gate, self._refused
        now_ns = self._clock.mono_ns()
        p2_left = P2_A_TURN
        try:
            for _ in range(GRANTS_A_TURN):
                ticket = gate.next(now_ns, p2=p2_left > 0)
                if ticket is None:
                    break
                tier = ticket.tier
                if tier.qos == "P2":
                    p2_left -= 1
                if now_ns < ticket.deadline_ns:
                    ticket.waiter.granted(now_ns)
                else:
                    started = self._started[tier.qos]
                    refusal = gate.refuse(tier, "queue_deadline", now_ns, started)
                    ticket.waiter.turned_away(refusal)
            for _ in range(min(len(refused), REFUSALS_A_TURN)):
                waiter, refusal = refused.popleft()
                waiter.turned_away(refusal)
        finally:
            # Whatever one of them did, the others keep their turn.
            if refused or gate.may_go():
                self.schedule()
