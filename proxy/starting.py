"""Starting the audit chain, and the spans.

Whose chain it is, under which keys, and what its genesis says. Without `audit.dir` there is none,
and that is logged; with it and without what it needs the sidecar does not start.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from proxy.audit.trace_id import SEQUENCES
from proxy.config import WORKERS_MAX, Settings, describe, split_endpoint
from proxy.recorder import Recorder
from proxy.settings import SettingsError, StartError, one_line

if TYPE_CHECKING:
    from proxy.audit.agent_call import AgentAddress
    from proxy.audit.setup import ChainSeed
    from proxy.audit.signing import NoteSigner
    from proxy.audit.witness import WitnessClient
    from proxy.clock import SystemClock
    from proxy.context import Context
    from proxy.keys.provider import KeySet
    from proxy.leasing import Leasing

# An agent that starts with its sidecars has this long.
SEED_TRIES, SEED_PAUSE_S = 6, 0.5

log = logging.getLogger(__name__)


def start_audit(
    settings: Settings,
    context: Context,
    keys: KeySet | None,
    clock: SystemClock,
    node: str,
    worker: int | None,
    *,
    leased: bool = False,
) -> None:
    """Give `context` its chain; `worker`: which of several this is. Raises StartError.

    `leased`: trace ids are the agent's, which the genesis says.
    """
    row = settings.audit
    if not row.enabled or not row.dir:
        log.warning("audit is off: audit.dir is not set")
        return
    origin = _origin(settings, clock, node, worker)
    seed = _chain_seed(settings, keys, origin)
    auditor = None if keys is None else keys.auditor_public()
    mode = row.token_ids or "sealed"
    if mode == "sealed" and auditor is None:
        raise StartError(
            "token ids are sealed to the auditor, but the key file has no auditor key: "
            "make one, or set audit.token_ids to commit, plain or off"
        )
    from proxy.audit.setup import AuditError, ChainConfig  # noqa: PLC0415 - only with a chain
    from proxy.audit.writer import AuditWriter  # noqa: PLC0415

    signers = _signers(keys)
    config = ChainConfig(
        dir=Path(row.dir),
        origin=origin,
        seed_id=seed.id,
        seed=seed.value,
        escrow=seed.escrow,
        alg=row.alg,
        token_ids=mode,
        auditor_public=auditor,
        on_failure=row.on_failure,
        flush_ms=row.flush_ms,
        flush_records=row.flush_records,
        segment_bytes=row.segment_bytes,
        heartbeat_s=row.heartbeat_s,
        rotate_s=row.rotate_s,
        rotate_records=row.rotate_records,
        genesis=_genesis(settings, leased=leased),
        signers=signers,
        witnesses=_witnesses(settings, signers),
    )
    try:
        context.audit = AuditWriter.start(config, clock, context.loop, context.gauges)
    except (AuditError, OSError) as problem:
        raise StartError(f"audit.dir: {problem}") from None
    if row.retention_days:
        from proxy.audit.retention import Retention  # noqa: PLC0415 - only with a chain

        context.retention = Retention(context.audit, Path(row.dir), row.retention_days, clock)
        context.retention.start()
    context.recorder = Recorder(context.loop, context.audit, context.tracer)
    if context.tracer is not None:
        context.audit.on_durable = context.tracer.durable
    context.observing.enabled = True


def start_tracing(settings: Settings, context: Context, node: str) -> None:
    """Give `context` its tracer, before its chain; raises StartError."""
    if not settings.tracing.endpoint:
        return
    from proxy.spans.outbox import Outbox  # noqa: PLC0415 - only with a collector
    from proxy.spans.tracer import Tracer  # noqa: PLC0415

    try:
        from proxy.spans.otlp import OtlpCollector  # noqa: PLC0415 - an extra

        collector = OtlpCollector(settings, node)
    except ImportError as problem:
        raise StartError(
            f"tracing.endpoint is set, but OpenTelemetry is not in this image ({problem}): "
            "install tongguan[otel], or empty it"
        ) from None
    except (SettingsError, OSError) as problem:
        raise StartError(str(problem)) from None
    outbox = Outbox(collector, settings.tracing.queue)
    outbox.start()
    context.tracer = Tracer(settings.tracing, context.clock, outbox)
    context.sampled_below = context.tracer.bound


async def stop_tracing(context: Context) -> None:
    """Bring over what is left, within `tracing.flush_s`; after the chain has ended."""
    tracer = context.tracer
    if tracer is None:
        return
    tracer.close()
    flush_s = context.settings.tracing.flush_s
    await context.loop.run_in_executor(None, tracer.outbox.stop, flush_s)


def agent_of(settings: Settings) -> AgentAddress | None:
    """Return the node's agent, None where none is set; raises StartError."""
    row = settings.audit
    if not row.agent:
        return None
    from proxy.audit.agent_call import AgentAddress  # noqa: PLC0415 - only with an agent

    try:
        secret = one_line(row.agent_authorization_file, "audit.agent_authorization_file")
    except SettingsError as problem:
        raise StartError(str(problem)) from None
    return AgentAddress(split_endpoint(row.agent), secret)


def start_lease(settings: Settings, context: Context, machine: int) -> Leasing | None:
    """Take trace ids from the agent, if one is set; `machine` is theirs without a lease."""
    agent = agent_of(settings)
    if agent is None:
        return None
    from proxy.leasing import Leasing  # noqa: PLC0415 - only with an agent

    ids = context.trace_ids
    leasing = Leasing(agent, ids, context.loop, lambda: ids.move(machine, 0, SEQUENCES))
    leasing.start()
    return leasing


def _chain_seed(settings: Settings, keys: KeySet | None, origin: str) -> ChainSeed:
    agent = agent_of(settings) if settings.audit.seeds == "agent" else None
    if agent is None:
        seed = None if keys is None else keys.chain_seed()
        if seed is None:
            raise StartError("audit.dir is set, but no chain seed: set keys.file")
        from proxy.audit.setup import ChainSeed  # noqa: PLC0415 - only with a chain

        return ChainSeed(*seed)
    from proxy.audit.agent_call import AgentError, chain_seed  # noqa: PLC0415 - only with an agent

    for left in range(SEED_TRIES - 1, -1, -1):
        try:
            return chain_seed(agent, origin)
        except AgentError as problem:
            if problem.refused or not left:
                raise StartError(
                    f"audit.seeds: the agent at {settings.audit.agent} gives no seed: {problem}"
                ) from None
            time.sleep(SEED_PAUSE_S)  # before anything is served
    raise AssertionError


def _signers(keys: KeySet | None) -> tuple[NoteSigner, ...]:
    rows = () if keys is None else keys.checkpoint_keys()
    if not rows:
        log.warning("audit checkpoints are not signed: the key file has no checkpoint_keys")
        return ()
    from proxy.audit.signing import NoteSigner  # noqa: PLC0415 - 6 MB of RSS

    try:
        return tuple(NoteSigner(*row) for row in rows)
    except ValueError as problem:
        raise StartError(f"keys.file: checkpoint_keys: {problem}") from None


def _witnesses(settings: Settings, signers: tuple[NoteSigner, ...]) -> tuple[WitnessClient, ...]:
    row = settings.audit
    if not row.witness:
        return ()
    if not signers:
        raise StartError("audit.witness is set, but the key file has no checkpoint_keys")
    from proxy.audit.note import COSIGNATURE, Keyset, NoteError, parse_keys  # noqa: PLC0415
    from proxy.audit.witness import WitnessClient  # noqa: PLC0415 - only with a witness

    try:
        trusted = Keyset(parse_keys("\n".join(row.witness_keys)))
    except NoteError as problem:
        raise StartError(f"audit.witness_keys: {problem}") from None
    if len(trusted.of_kind(COSIGNATURE)) < len(trusted):
        raise StartError("audit.witness_keys: a key that is no witness's")
    files = [file if file != "-" else "" for file in row.witness_authorization_file]
    files += [""] * (len(row.witness) - len(files))
    shown = [one_line(file, "audit.witness_authorization_file") for file in files]
    return tuple(
        WitnessClient(
            split_endpoint(endpoint),
            [signer.key.line() for signer in signers],
            name=endpoint,
            authorization=authorization,
            trusted=trusted if len(trusted) else None,
            late_s=row.witness_late_s,
        )
        for endpoint, authorization in zip(row.witness, shown, strict=False)
    )


def _origin(settings: Settings, clock: SystemClock, node: str, worker: int | None) -> str:
    identity = settings.identity
    start_ns = clock.wall_ns()
    if worker is not None:  # two that start in one moment are two chains
        start_ns = start_ns // WORKERS_MAX * WORKERS_MAX + worker
    if identity.pod_uid:
        place = f"{identity.namespace}/{identity.pod}/{identity.pod_uid}"
        return f"{identity.cluster}/{place}/{start_ns}"
    return f"{identity.pod or node}/{os.getpid()}/{start_ns}"


def _genesis(settings: Settings, *, leased: bool) -> dict[str, object]:
    return {
        "config_sha256": config_digest(settings),
        "image": settings.identity.image,
        "clock_source": "wall at start + boottime",
        "clock_bound_ms": 5000,
        "machine_source": "agent_lease" if leased else "node_name",
        "prompt_hash_mode": settings.audit.prompt_hash_mode,
    }


def config_digest(settings: Settings) -> str:
    """Return what names these settings in the chain."""
    plain = orjson.dumps(describe(settings), option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(plain).hexdigest()
