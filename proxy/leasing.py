"""The lease under a process's trace ids: taken at start, renewed by a thread, given back.

With one, no other process of the node makes the same ids. Without (no agent is set, or it gives
none, or the lease ran out), the machine part is a number made of the node's name, and two nodes, or
processes, may share it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from proxy.audit.agent_call import AgentError, trace_lease

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from proxy.audit.agent_call import AgentAddress, TraceLease
    from proxy.audit.trace_id import TraceIds

START_TIMEOUT_S = 2.0
# Renewed at a sixth of its time, and tried again this often until it is over.
RENEWALS = 6
RETRY_S = 10.0

log = logging.getLogger(__name__)


class Leasing:
    """See the module. `held` is read by anybody."""

    def __init__(
        self,
        agent: AgentAddress,
        ids: TraceIds,
        loop: asyncio.AbstractEventLoop,
        without: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`without` gives the ids back what they had without a lease; called on the loop."""
        self._agent = agent
        self._ids = ids
        self._loop = loop
        self._without = without
        self._clock = clock
        self._lease: TraceLease | None = None
        self._ttl_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trace-lease", daemon=True)

    @property
    def held(self) -> bool:
        """Whether a lease is held."""
        return self._lease is not None

    def start(self) -> None:
        """Take a lease now, if the agent answers in time; go on asking in any case."""
        self._renew(START_TIMEOUT_S, at_once=True)
        if self._lease is None:
            log.warning("no trace-id lease from the agent yet: the node's name stands for it")
        self._thread.start()

    def stop(self) -> None:
        """Give the lease back."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(START_TIMEOUT_S)
        lease, self._lease = self._lease, None
        if lease is not None:
            try:
                self._agent.ask("/chains/release", {"lease": lease.id}, START_TIMEOUT_S)
            except AgentError as problem:
                log.debug("lease not given back: %s", problem)

    def _run(self) -> None:
        while not self._stop.wait(self._pause_s()):
            self._renew(START_TIMEOUT_S)

    def _pause_s(self) -> float:
        if self._lease is None:
            return RETRY_S
        left_s = self._lease.until_s - self._clock()
        return max(1.0, min(left_s, self._ttl_s / RENEWALS))

    def _renew(self, timeout_s: float, *, at_once: bool = False) -> None:
        before, now_s = self._lease, self._clock()
        try:
            lease = trace_lease(self._agent, before.id if before else "", now_s, timeout_s)
        except AgentError as problem:
            log.debug("trace-id lease: %s", problem)
            if before is not None and now_s >= before.until_s:
                log.warning("the trace-id lease ran out: the node's name stands for it")
                self._lease = None
                self._on_loop(self._without, at_once=at_once)
            return
        self._ttl_s = lease.until_s - now_s
        self._lease = lease
        if before is None or lease.id != before.id:
            move = self._ids.move
            self._on_loop(lambda: move(lease.machine, lease.first, lease.count), at_once=at_once)

    def _on_loop(self, call: Callable[[], None], *, at_once: bool) -> None:
        if at_once:
            call()
        else:
            self._loop.call_soon_threadsafe(call)
