"""Real chains for the audit tests: written by the real writer, on a real file system."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from proxy.audit.canonical import TEXT_BYTES, clean_text
from proxy.audit.epochs import MacKeys
from proxy.audit.record import usage_members
from proxy.audit.request import RequestText, request_text
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


def facts(number: int, **changes: Any) -> dict[str, Any]:
    return {
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


def request(number: int, **changes: Any) -> RequestText:
    return request_text(**facts(number, **changes))


def as_table(number: int, **changes: Any) -> dict[str, object]:
    """Return a request's members as a table: what its text has to say, made the plain way."""
    return request_members(**facts(number, **changes))


def _text(text: str) -> str:
    return text if len(text) <= TEXT_BYTES and text.isascii() else clean_text(text)


def request_members(
    *,
    trace_id: str,
    tenant: str,
    qos: str,
    status: int,
    outcome: str,
    phase: str,
    queue_us: int | None = None,
    first_byte_us: int | None = None,
    total_us: int | None = None,
    traceparent: str | None = None,
    model: str | None = None,
    served_model: str | None = None,
    pool: str | None = None,
    envelope: tuple[str, int, bool, bool] | None = None,
    prompt_hash: str | None = None,
    params_hash: str | None = None,
    body_hash: str | None = None,
    output_hash: str | None = None,
    output_len: int | None = None,
    usage: dict[str, int] | None = None,
    qos_asked: str | None = None,
    tunnelled: tuple[int, int] | None = None,
) -> dict[str, object]:
    members: dict[str, object] = {
        "trace_id": trace_id,
        "tenant": _text(tenant),
        "qos": qos,
        "status": status,
        "outcome": outcome,
        "phase": phase,
    }
    times = {}
    if queue_us is not None:
        times["queue"] = queue_us
    if first_byte_us is not None:
        times["first_byte"] = first_byte_us
    if total_us is not None:
        times["total"] = total_us
    members["times_us"] = times
    if traceparent is not None:
        members["traceparent"] = _text(traceparent)
    if model is not None:
        members["model"] = _text(model)
    if served_model is not None:
        members["served_model"] = _text(served_model)
    if pool is not None:
        members["pool"] = pool
    if prompt_hash is not None:
        members["prompt_hash"] = prompt_hash
    if params_hash is not None:
        members["params_hash"] = params_hash
    if body_hash is not None:
        members["body_hash"] = body_hash
    if output_hash is not None:
        members["output_hash"] = output_hash
    if qos_asked is not None:
        members["qos_asked"] = _text(qos_asked)
    if output_len is not None:
        members["output_len"] = output_len
    if usage:
        members["usage"] = usage
    if tunnelled is not None:
        members["tunnel"] = {"sent": tunnelled[0], "received": tunnelled[1]}
    if envelope is not None:
        kid, suite, signature, mac = envelope
        members["envelope"] = {
            "kid": _text(kid), "suite": suite, "signature": signature, "mac": mac,
        }  # fmt: skip
    return members


def run(scene: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    return asyncio.run(scene())


async def crash(writer: AuditWriter) -> None:
    """End a writer as kill -9 does: nothing more is written, the lock is gone."""
    if writer._pending:
        with contextlib.suppress(Exception):
            await writer.durable(writer._pending._ticket)
    writer._heartbeat.cancel()
    if writer._timer is not None:
        writer._timer.cancel()
    writer._syncer.end()
    writer._syncer.join()


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
            writer.append_request(request(number), [number, 7, 2] if ids else None)
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
