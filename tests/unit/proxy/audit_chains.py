"""Real chains for the audit tests: written by the real writer, on a real file system."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from proxy.audit.check import MacKeys
from proxy.audit.record import request_members, usage_members
from proxy.audit.verify import verify_directory
from proxy.audit.writer import AuditWriter, ChainConfig
from proxy.clock import ManualClock

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from proxy.audit.findings import Result

SEED = bytes(range(32))
KEYS = MacKeys({"seed1": SEED})
START_MS = 1_767_225_600_000


def config(directory: Path, **changes: Any) -> ChainConfig:
    values: dict[str, Any] = {
        "dir": directory,
        "origin": "local/default/pod/uid/1",
        "seed_id": "seed1",
        "seed": SEED,
        "alg": "s256",
        "token_ids": "off",
        "auditor_public": None,
        "on_failure": "degrade",
        "flush_ms": 1,
        "flush_records": 256,
        "segment_bytes": 64 << 20,
        "heartbeat_s": 30,
        "genesis": {"config_sha256": "0" * 64, "image": "sha256:1"},
        **changes,
    }
    return ChainConfig(**values)


def request(number: int, **changes: Any) -> dict[str, object]:
    values: dict[str, Any] = {
        "trace_id": f"{START_MS}-00001-{number:04d}",
        "tenant": "t-1",
        "qos": "P1",
        "status": 200,
        "outcome": "ok",
        "phase": "done",
        "total_us": 1000 + number,
        "model": "m",
        "pool": "shared",
        "prompt_hash": f"{number:064x}",
        "usage": usage_members(12, 0, 12),
        **changes,
    }
    return request_members(**values)


def run(scene: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(scene())


async def crash(writer: AuditWriter) -> None:
    """End a writer as kill -9 does: nothing more is written, the lock is gone."""
    if writer._pending:
        with contextlib.suppress(Exception):
            await writer.durable(writer._pending.last_ticket)
    writer._heartbeat.cancel()
    if writer._timer is not None:
        writer._timer.cancel()
    writer._jobs.put(None)
    writer._thread.join()


def write_chain(
    directory: Path,
    records: int = 5,
    *,
    close: bool = True,
    ids: bool = False,
    start_ms: int = START_MS,
    step_ms: int = 1000,
    **changes: Any,
) -> Path:
    """Write a chain of genesis, requests and `closed`; returns its directory."""

    async def scene() -> Path:
        clock = ManualClock(start_ms)
        loop = asyncio.get_running_loop()
        writer = AuditWriter.start(config(directory, **changes), clock, loop)
        for number in range(records):
            clock.advance_ms(step_ms)
            writer.append("request", request(number), [number, 7, 2] if ids else None)
        if close:
            await writer.close()
        else:
            await crash(writer)
        return writer.dir

    return run(scene)


def verdict(directory: Path, keys: MacKeys | None = KEYS) -> tuple[str, int | None]:
    result = verify(directory, keys)
    return result.verdict, result.first.seq if result.first else None


def verify(directory: Path, keys: MacKeys | None = KEYS, **options: Any) -> Result:
    return verify_directory(directory, keys, **options)


def classes(directory: Path, keys: MacKeys | None = KEYS) -> list[tuple[str, int]]:
    found = verify(directory, keys).public()["findings"]
    return [(finding["class"], finding["seq"]) for finding in found]
