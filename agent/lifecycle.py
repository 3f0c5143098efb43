"""Start and stop of the agent, in order.

Start: listen everywhere (a taken address fails before anything slow), admin door, API (answers 503
while the model loads), load the model in a thread of its own. Stop: on the first SIGTERM or SIGINT
not ready, no new connections, running requests get `grace_s` and then an error ending, the engine
closes, exit 0. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import uvicorn
import uvloop

from agent.admin import AdminThread
from agent.api import Api
from agent.chains import Chains
from agent.config import Agent, TokenError, auditor_key, read_token, upstream_targets
from agent.engine.types import Engine, EngineError
from agent.lease_store import LeaseStore
from agent.listen import HEAD_BYTES, DoorLimits, ListenError, door, open_tcp, open_unix
from agent.memory.watch import MemoryWatch
from agent.metrics import Metrics
from agent.node import Node
from agent.seed_store import ChainsError, SeedStore
from agent.upstream_watch import UpstreamWatch
from agent.witness_store import WitnessError, WitnessStore
from proxy.audit.trace_id import machine_from_node
from proxy.audit.wrap import usable_public
from proxy.keys.memory import no_core_dumps

log = logging.getLogger("tongguan.agent")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_SETTINGS = 2
EXIT_IO = 3
# After grace a running request has this long to write its error ending.
_LAST_WORDS_S = 2

Report = Callable[[str, float], None]
Load = Callable[[Agent, Report], Engine]


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours know about grace and the engine."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class _Run:
    settings: Agent
    node: Node
    server: uvicorn.Server
    api: Api
    signals: int = 0
    exit_code: int = EXIT_OK


def serve(settings: Agent, load: Load, *, console: IO[str]) -> int:
    """Run the agent until it is told to stop; return its exit code.

    `load` brings the model up in a thread of its own and reports (stage, share done).
    """
    opened: list[socket.socket] = []
    try:
        token = read_token(settings.token_file)
        chains = _chains(settings)
        if settings.listen:
            opened.append(open_tcp(settings.listen, "agent.listen", settings.backlog))
        if settings.socket:
            opened.append(open_unix(settings.socket, "agent.socket", settings.backlog))
        sockets = list(opened)
        if settings.admin:
            opened.append(open_tcp(settings.admin, "agent.admin", settings.backlog))
    except (TokenError, ListenError, WitnessError, ChainsError) as problem:
        for sock in opened:
            sock.close()
        # A person's mistake, not ours: a line, no traceback.
        console.write(f"tongguan agent: {problem}\n")
        return EXIT_IO

    node = Node(time.monotonic_ns())
    metrics = Metrics(node)
    api = Api(node, settings, metrics, token, chains)
    admin = AdminThread(opened[-1], node, metrics) if settings.admin else None
    server = api_server(settings, api, metrics)
    run = _Run(settings, node, server, api)
    watch, upstreams = _watch(settings, node), _upstreams(settings, node)
    where = ", ".join(a for a in (settings.listen, settings.socket) if a)
    log.info("listening on %s; admin on %s", where, settings.admin or "no port")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_run(run, sockets, load, console, admin))
    finally:
        if settings.socket:
            with contextlib.suppress(OSError):
                Path(settings.socket).unlink()
    if node.engine is not None:
        node.engine.close()
    if admin:
        admin.stop()
    for thread in (watch, upstreams):
        if thread:
            thread.stop()
    log.info("stopped")
    if node.engine is None and node.failure is None:
        # The loader still runs inside a C library; it cannot be waited for or stopped.
        logging.shutdown()
        os._exit(run.exit_code)
    return run.exit_code


def _watch(settings: Agent, node: Node) -> MemoryWatch | None:
    if not settings.memory_sample_s:
        return None
    watch = MemoryWatch(node, sample_s=settings.memory_sample_s, window_s=settings.memory_window_s)
    node.memory = watch
    watch.start()
    return watch


def _upstreams(settings: Agent, node: Node) -> UpstreamWatch | None:
    targets = upstream_targets(settings.upstreams)
    if not targets:
        return None
    watch = UpstreamWatch(targets, every_s=settings.upstream_poll_s)
    node.upstreams = watch
    node.sections["upstreams"] = watch.section
    watch.start()
    return watch


def _chains(settings: Agent) -> Chains:
    """Return what is kept for sidecars' chains; raises `WitnessError` and others."""
    witness = WitnessStore(Path(settings.witness_dir)) if settings.witness_dir else None
    peers = read_token(settings.witness_token_file, "agent.witness_token_file")
    if not settings.chains_dir:
        return Chains(witness, witness_token=peers)
    no_core_dumps()
    directory = Path(settings.chains_dir)
    public = auditor_key(settings.auditor_public)
    if public and not usable_public(public):
        raise ChainsError("agent.auditor_public: no key that can be used here")
    machine = settings.machine
    if machine < 0:
        # Not a number that a sidecar without a lease may make of the same name.
        machine = machine_from_node(f"lease:{socket.gethostname()}")
    seeds = SeedStore(directory, public) if public else None
    return Chains(witness, LeaseStore(directory, machine), seeds, peers)


def api_server(settings: Agent, api: Api, metrics: Metrics) -> uvicorn.Server:
    """Return the server of the API, without signal handlers; call `serve(sockets=…)` on it."""
    return _Server(
        uvicorn.Config(
            api.application(),
            http=door(
                DoorLimits(
                    connections=settings.connections,
                    head_s=settings.head_s,
                    on_limit=lambda name: metrics.limits.labels(name).inc(),
                    on_count=metrics.connections.set,
                    on_error=lambda code: metrics.errors.labels(code).inc(),
                )
            ),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(settings.keepalive_s),
            timeout_graceful_shutdown=int(settings.grace_s) + _LAST_WORDS_S + 1,
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
    )


async def _run(
    run: _Run,
    sockets: list[socket.socket],
    load: Load,
    console: IO[str],
    admin: AdminThread | None,
) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, run, number)
    if admin:  # who sees the probes answer may send a signal
        admin.start()
    loader = threading.Thread(
        target=_load, args=(run, loop, load, console), name="load", daemon=True
    )
    async with asyncio.TaskGroup() as tasks:
        beat = tasks.create_task(_beat(run.node))
        loader.start()
        await run.server.serve(sockets=sockets)
        beat.cancel()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)


async def _beat(node: Node) -> None:
    while True:
        node.beat_ns = time.monotonic_ns()
        await asyncio.sleep(1)


def _load(run: _Run, loop: asyncio.AbstractEventLoop, load: Load, console: IO[str]) -> None:
    """Bring the model up; runs in its own thread."""
    started = time.monotonic()
    progress = _Progress(run.node, console)
    try:
        engine = load(run.settings, progress.report)
    except (EngineError, ValueError) as problem:
        _post(loop, _on_failure, run, str(problem))
        return
    except Exception as problem:
        log.exception("loading the model failed")
        _post(loop, _on_failure, run, f"{type(problem).__name__}: {problem}")
        return
    finally:
        progress.end()
    info = engine.info
    log.info(
        "model %s: %s, %.0f M parameters, %s on %s, context %d, loaded in %.1f s",
        info.id,
        info.architecture,
        info.parameters / 1e6,
        info.dtype,
        info.device,
        info.context_length,
        time.monotonic() - started,
    )
    if info.device == "cpu":
        log.info("no GPU is used: the model runs on the CPU")
    _post(loop, run.node.loaded, engine, run.settings.model_names)


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has closed: the agent was told to stop
        loop.call_soon_threadsafe(call, *args)


def _on_failure(run: _Run, reason: str) -> None:
    log.error("the model could not be loaded: %s", reason)
    run.node.failure = reason
    run.exit_code = EXIT_FAILED
    run.server.should_exit = True


def _on_signal(run: _Run, number: int) -> None:
    run.signals += 1
    if run.signals > 1:
        log.warning("second signal: ending now")
        logging.shutdown()
        os._exit(128 + number)
    log.info(
        "%s: %d requests run, they have %g s",
        signal.Signals(number).name,
        run.api.running,
        run.settings.grace_s,
    )
    run.node.draining = True
    run.server.should_exit = True
    asyncio.get_running_loop().call_later(run.settings.grace_s, run.api.abandon_all)


class _Progress:
    """Shows loading: one moving line on a terminal, else a log line each stage."""

    def __init__(self, node: Node, console: IO[str]) -> None:
        self._node = node
        self._console = console
        self._terminal = console.isatty()

    def report(self, stage: str, share: float) -> None:
        """Take how far loading is: `share` from 0 to 1 of `stage`."""
        if stage != self._node.stage and not self._terminal:
            log.info("loading: %s", stage)
        self._node.stage = stage
        self._node.progress = min(1.0, max(0.0, share))
        if self._terminal:
            bar = "#" * int(30 * self._node.progress)
            self._console.write(f"\r\x1b[Kloading {stage:<12} [{bar:<30}] {share:4.0%}")
            self._console.flush()

    def end(self) -> None:
        """Clear the line."""
        if self._terminal:
            self._console.write("\r\x1b[K")
            self._console.flush()


def log_to_stderr(level: str) -> None:
    """Send log lines to standard error, ours at `level`, libraries' from warning up."""
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("tongguan").setLevel(level.upper())
