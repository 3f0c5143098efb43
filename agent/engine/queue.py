"""Who of one class is served next: preempted sequences first, then fair between tenants. Pure.

Start-time fair queueing by tokens: a request's tag is the later of the class's virtual time and
its tenant's last finish; the smallest tag goes first, and the virtual time moves to it. So a tenant
with a hundred requests delays another's first one by at most one of its own, and a tenant alone is
served in order of arrival. What ran before comes back in its old order, before all that never ran.
"""

from __future__ import annotations

import bisect
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent.engine.scheduler import Seq

# Finish times kept of tenants that have nothing here: the oldest are forgotten, in their favour.
TENANTS_MAX: Final = 1024


class ClassQueue:
    """Waiting sequences of one class; the caller bounds how many."""

    def __init__(self) -> None:
        self._preempted: list[Seq] = []
        self._tenants: dict[str, deque[tuple[float, Seq]]] = {}
        self._finish: dict[str, float] = {}
        self._virtual = 0.0

    def __len__(self) -> int:
        return len(self._preempted) + sum(len(queue) for queue in self._tenants.values())

    def __iter__(self) -> Iterator[Seq]:
        yield from self._preempted
        for queue in self._tenants.values():
            yield from (seq for _, seq in queue)

    @property
    def preempted(self) -> tuple[Seq, ...]:
        """Those that ran before, best first; they may hold blocks."""
        return tuple(self._preempted)

    def push(self, seq: Seq) -> None:
        """Queue a sequence that has not run."""
        tag = max(self._virtual, self._finish.get(seq.tenant, 0.0))
        self._finish[seq.tenant] = tag + seq.tokens_max
        if len(self._finish) > TENANTS_MAX:
            self._forget()
        self._tenants.setdefault(seq.tenant, deque()).append((tag, seq))

    def put_back(self, seq: Seq) -> None:
        """Queue a sequence that was preempted."""
        bisect.insort(self._preempted, seq, key=lambda s: s.arrival)

    def head(self) -> Seq | None:
        """Return who is next, or None."""
        if self._preempted:
            return self._preempted[0]
        first = self._first()
        return self._tenants[first][0][1] if first is not None else None

    def pop(self) -> Seq:
        """Take who is next; there must be one."""
        if self._preempted:
            return self._preempted.pop(0)
        first = self._first()
        assert first is not None
        tag, seq = self._tenants[first].popleft()
        self._virtual = max(self._virtual, tag)
        self._tidy(first)
        return seq

    def remove(self, seq: Seq) -> bool:
        """Forget a sequence; says whether it was here."""
        if seq in self._preempted:
            self._preempted.remove(seq)
            return True
        queue = self._tenants.get(seq.tenant, deque())
        for entry in queue:
            if entry[1] is seq:
                queue.remove(entry)
                self._tidy(seq.tenant)
                return True
        return False

    def _first(self) -> str | None:
        if not self._tenants:
            return None
        heads = ((queue[0][0], queue[0][1].arrival, name) for name, queue in self._tenants.items())
        return min(heads)[2]

    def _tidy(self, tenant: str) -> None:
        if not self._tenants[tenant]:
            del self._tenants[tenant]
        if not self._tenants:
            # Nobody waits: what anybody had before is no debt.
            self._finish.clear()
            self._virtual = 0.0

    def _forget(self) -> None:
        idle = sorted(
            (finish, name) for name, finish in self._finish.items() if name not in self._tenants
        )
        for _, name in idle[: max(1, len(self._finish) - TENANTS_MAX)]:
            del self._finish[name]
