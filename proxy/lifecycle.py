"""Start and drain, in order.

Start: settings, admin door, app door, keys, audit chain, sealed door, fence. Drain (`POST /drain`):
readyz false, the sealed door refuses. SIGTERM: the same, then wait until the last request ends or
the grace is over, error endings for what is left, final record, exit 0. A second signal ends now.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
from typing import TYPE_CHECKING, cast

from proxy.admin import AdminDoor
from proxy.audit.rekeying import changes, follow
from proxy.audit.trace_id import MACHINES, TraceIds, machine_from_node
from proxy.clock import SystemClock
from proxy.config import Settings, split_address
from proxy.context import Context
from proxy.health import CLOCK_BEHIND_MS, TICK_NS, Health
from proxy.lending import Lender
from proxy.limits import LimitsPoll
from proxy.metrics import built
from proxy.reload import Loaded, Source, Watcher, changed
from proxy.sealing import all_keys, drop_expired, let_seal
from proxy.server import Downstream
from proxy.settings import SettingsError, StartError, one_line
from proxy.sm4.cipher import choose_tier, tier
from proxy.sockets import bound
from proxy.starting import (
    config_digest,
    start_audit,
    start_lease,
    start_tracing,
    stop_tracing,
)

if TYPE_CHECKING:
    from proxy.leasing import Leasing
    from proxy.outlet import DoorName
    from proxy.tls import TlsDoor
    from proxy.workers import Worker

TICK_S = TICK_NS / 1e9
FLUSH_EVERY_TICKS = 10
DROP_KIDS_EVERY_TICKS = 600
CLOSE_S = 1.0  # for connections to flush their last bytes

log = logging.getLogger(__name__)


class Sidecar:
    """One sidecar process."""

    def __init__(
        self,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        source: Source,
        worker: Worker | None = None,
    ) -> None:
        self._settings = settings  # as they were at the start
        self._source = source
        self._worker = worker
        self._loop = loop
        self._clock = SystemClock()
        identity = settings.identity
        self._node = identity.node or socket.gethostname()
        self._context = Context(settings, self._clock, loop, self._node)
        self._machine = machine_from_node(self._node)
        if worker is not None:
            self._machine = (self._machine + worker.index) % MACHINES
            self._context.trace_ids = TraceIds(self._machine)
        self._leasing: Leasing | None = None
        self._health = Health(self._context, self._clock)
        self._servers: list[asyncio.Server] = []
        self._admin: AdminDoor | None = None
        self._watcher: Watcher | None = None
        self._tls: TlsDoor | None = None
        self._limits = LimitsPoll(self._context)
        self._draining = False
        self.unwritten = False  # at the end, records that the disk did not take
        self._stopping = asyncio.Event()
        self._signals = 0
        self._ticks = 0
        self._tick_due_s = 0.0

    async def run(self) -> None:
        """Start, serve until a signal, drain. Raises StartError or SettingsError."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        try:
            await self._start()
            await self._stopping.wait()
            await self._drain()
        finally:
            await self._stop()

    # -- start

    async def _start(self) -> None:
        settings, context, worker = self._settings, self._context, self._worker
        doors = settings.doors
        if worker is not None:
            doors = worker.doors(settings)
            self._loop.add_reader(worker.parent, self._on_orphaned)
        try:
            choose_tier(settings.envelope.sm4_tier)
        except ValueError as problem:
            raise SettingsError([f"envelope.sm4_tier: {problem}"]) from None
        if doors.admin:
            try:
                token = one_line(doors.admin_token_file, "doors.admin_token_file")
            except SettingsError as problem:
                raise StartError(str(problem)) from None
            siblings = worker.siblings() if worker is not None and worker.first else None
            self._admin = AdminDoor(self._health, token, self._start_drain, self._rotate, siblings)
            try:
                self._admin.start(doors.admin)
            except OSError as problem:
                raise StartError(_port_problem("doors.admin", doors.admin, problem)) from None
        # Seen before it is read: what changes from here on is a reload.
        self._watcher = Watcher(self._source, settings, self._loop, self._reloaded)
        try:
            loaded = self._source.credentials(settings)
        except SettingsError as problem:
            raise StartError(str(problem)) from None
        for name, field in loaded.authorization.items():
            context.routes[name].authorization = field
        for name, trusted in loaded.trust.items():
            context.routes[name].upstreams.tls = trusted
        context.sealing_ring.replace(all_keys(loaded.sealing))
        let_seal(context.sealing_ring, context.routes.values(), loaded.sealing)
        keys = context.keys = loaded.keys
        watch = self._health.keys = self._source.watch
        context.counters.loaded_wall_s = self._clock.wall_ms() / 1000
        start_tracing(settings, context, self._node)
        index = None if worker is None else worker.index
        self._leasing = start_lease(settings, context, self._machine)
        leased = self._leasing is not None and self._leasing.held
        start_audit(settings, context, keys, self._clock, self._node, index, leased=leased)
        context.lender = Lender(self._loop)
        if doors.app:
            await self._open("app", doors.app)
        if doors.sealed and keys is not None:
            from proxy.channel import start_channel  # noqa: PLC0415 - only with keys

            start_channel(context, self._health, keys)
            if loaded.tls is not None:
                from proxy.tls import TlsDoor  # noqa: PLC0415 - only with TLS

                self._tls = TlsDoor(settings.tls, loaded.tls, self._loop, context.counters)
            if watch is not None and context.receiver is not None:
                watch.ring = context.receiver.keyring
                watch.revoked = len(keys.revoked())
            await self._open("sealed", doors.sealed)
        elif doors.sealed:
            log.warning("sealed door closed: no keys, neither keys.file nor another keys.provider")
        self._tick_due_s = self._loop.time()
        context.judge_pools(self._clock.mono_ns())
        self._tick()
        self._health.started = True
        self._watcher.start()
        if worker is not None:
            worker.serving()
        self._limits.start()
        # What was made at start lives as long as the process: no collection has to look at it. The
        # few cycles among it that do not are not worth the time before the first request.
        gc.freeze()
        # Requests make no cycles; their objects die by reference count, so look less often.
        gc.set_threshold(10_000, 20, 20)
        gc.enable()
        log.info(
            "serving: app=%s sealed=%s admin=%s sm4=%s path=%s audit=%s",
            doors.app or "off",
            doors.sealed if doors.sealed and keys is not None else "off",
            doors.admin or "off",
            tier(),
            built(),
            "on" if context.audit is not None else "off",
        )

    async def _open(self, door: DoorName, address: str) -> None:
        host, port = split_address(address)
        context, worker = self._context, self._worker
        shared = worker is not None and worker.shares(door, context.settings)
        tls = self._tls if door == "sealed" else None

        def made() -> asyncio.Protocol:
            # One by its methods; as a subclass it could not be compiled to a native class.
            return cast("asyncio.Protocol", Downstream(context.current.context, door))

        factory = made if tls is None else lambda: tls.wrap(made)
        backlog = self._settings.doors.backlog
        create = self._loop.create_server
        try:
            sock = bound(host, port, shared=shared)
            if sock is not None:
                server = await create(factory, sock=sock, backlog=backlog)
            else:
                server = await create(
                    factory, host, port, backlog=backlog, reuse_address=True, reuse_port=shared
                )
        except OSError as problem:
            raise StartError(_port_problem(f"doors.{door}", address, problem)) from None
        self._servers.append(server)
        self._health.listeners[door] = server

    # -- settings

    def _on_hangup(self) -> None:
        if self._watcher is not None:
            self._watcher.reload()

    def _reloaded(self, loaded: Loaded | SettingsError) -> None:
        """Take what was read, all of it, or say why not and go on as before."""
        context, counters = self._context, self._context.counters
        try:
            if isinstance(loaded, SettingsError):
                raise loaded
            rekeyed = changes(context.keys, loaded.keys)
            made = context.renewed(loaded)
        except (SettingsError, ValueError, OSError) as problem:
            log.warning("not reloaded, nothing has changed: %s", problem)
            counters.reloads["failed"] += 1
            return
        self._context = made
        if self._tls is not None and loaded.tls is not None:
            self._tls.renew(loaded.tls)
        made.draining |= self._draining
        before, settings = context.settings, made.settings
        if settings.log_level != before.log_level:
            logging.getLogger().setLevel(settings.log_level.upper())
        log.info("reloaded: changed=%s", ",".join(changed(before, settings)) or "no setting")
        if loaded.kept:
            log.warning("not changed before a restart: %s", ", ".join(loaded.kept))
        if made.audit is not None:
            made.audit.append(
                "decision", {"what": "reload", "config_sha256": config_digest(settings)}
            )
            follow(made.audit, rekeyed, own_seed=settings.audit.seeds == "keys")
        counters.loaded_wall_s = self._clock.wall_ms() / 1000
        counters.reloads["ok"] += 1

    # -- time

    def _tick(self) -> None:
        # First of all, so that nothing below can stop time.
        self._loop.call_later(TICK_S, self._tick)
        context = self._context
        now_ns = self._clock.mono_ns()
        now_s = self._loop.time()
        context.counters.loop_lag_ns = max(0, int((now_s - self._tick_due_s) * 1e9))
        self._health.last_tick_ns = now_ns
        for connections in context.connections.values():
            late = [c for c in connections if c.deadline_ns <= now_ns]
            for connection in late:
                connection.on_deadline()
        for route in context.routes.values():
            route.upstreams.tick(now_ns)
        context.wall_offset_ns = self._clock.wall_ns() - now_ns
        self._ticks += 1
        if self._ticks % FLUSH_EVERY_TICKS == 0:
            context.flush_rejected()
            behind_ms = self._clock.behind_ms()
            if behind_ms > CLOCK_BEHIND_MS:
                context.clock_is_behind(behind_ms)
            if context.audit is not None:
                context.audit.watch()
            context.judge_pools(now_ns)
            if self._ticks % DROP_KIDS_EVERY_TICKS == 0:
                if context.receiver is not None:
                    context.receiver.keyring.drop_expired(self._clock.wall_ms())
                now_ms = self._clock.sealing_ms()
                drop_expired(context.sealing_ring, context.routes.values(), now_ms)
            for connections in context.connections.values():
                for connection in list(connections):
                    connection.check_total(now_ns)
        self._tick_due_s = now_s + TICK_S

    # -- end

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            log.warning("second signal: ending now")
            os._exit(0)
        log.info("draining: at most %g s", self._context.settings.timeouts.drain_s)
        self._stopping.set()

    def _on_orphaned(self) -> None:
        assert self._worker is not None
        self._loop.remove_reader(self._worker.parent)
        log.critical("the supervisor is gone")
        self._on_signal()

    def _start_drain(self) -> None:
        # From the admin thread, and before its answer: who asks readyz next must see it.
        self._draining = True
        self._context.draining = True

    def _rotate(self) -> bool:
        # From the admin thread.
        audit = self._context.audit
        if audit is None or not audit.available:
            return False
        self._loop.call_soon_threadsafe(audit.rotate)
        return True

    async def _drain(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
        context = self._context
        context.draining = True
        deadline_s = self._loop.time() + context.settings.timeouts.drain_s
        while self._busy() and self._loop.time() < deadline_s:  # noqa: ASYNC110 - many ends, one wait
            await asyncio.sleep(TICK_S / 2)
        context.closing = True
        for server in self._servers:
            server.close()
        left = self._busy()
        for connections in context.connections.values():
            for connection in list(connections):
                connection.expire()
        if left:
            context.counters.limit_hits["timeouts.drain_s"] += left
            log.warning("drain grace over: %d requests were cut", left)

    def _busy(self) -> int:
        return sum(
            connection.busy
            for connections in self._context.connections.values()
            for connection in connections
        )

    async def _stop(self) -> None:
        context = self._context
        self._health.started = False
        context.signatures.close()
        if self._tls is not None:
            self._tls.close()
        await self._limits.stop()
        for server in self._servers:
            server.close()
        deadline_s = self._loop.time() + CLOSE_S
        while any(context.connections.values()) and self._loop.time() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for route in context.routes.values():
            await route.upstreams.close()
        if context.lender is not None:
            context.lender.close()
        if context.shared_replay is not None:
            await context.shared_replay.close()
        if context.retention is not None:
            await context.retention.stop()
        if context.audit is not None:
            from proxy.audit.setup import AuditUnavailableError  # noqa: PLC0415 - loaded by now

            context.flush_rejected()
            if context.recorder is not None:
                context.recorder.flush()
            try:
                await context.audit.close()
            except AuditUnavailableError as problem:
                log.critical("audit: %s", problem)
                self.unwritten = True
        await stop_tracing(context)
        if self._leasing is not None:
            await self._loop.run_in_executor(None, self._leasing.stop)
        if self._admin is not None:
            self._admin.stop()
        self._source.close()


def _port_problem(name: str, address: str, problem: OSError) -> str:
    return f"{name}: cannot listen on {address}: {problem.strerror}; is another one running?"
