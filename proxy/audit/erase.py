"""Erasing a tenant: its prompt key is destroyed, and the log says so.

The order makes a crash harmless: what is to be erased is written down (`.erasing-<ref>` in the
audit directory), the key is destroyed wherever it was named, the log's `erased` record is durable,
and only then the note goes. Asked again, it goes on from there. The record is the running sidecar's
where one sees the key go, else of a short chain of our own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
from msgspec.structs import replace

from proxy.audit.chain import LINE_BYTES
from proxy.audit.layout import chain_dirs, is_locked, open_regular, segments, sync_dir
from proxy.audit.reader import stored_lines
from proxy.audit.rekeying import PROMPT, key_ref

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from proxy.config_audit import Audit
    from proxy.keys.provider import KeyProvider, KeySet

POLL_S = 0.2
_NOTE = ".erasing-"


class EraseError(Exception):
    """Nothing, or not all, was erased; says what and what to do."""


@dataclass(frozen=True, slots=True)
class Erased:
    """Where the log says it."""

    key_ref: str
    origin: str
    seq: int


def find_erased(directory: Path, ref: str, *, living: bool = False) -> Erased | None:
    """Return the `erased` record of a key; `living`: only chains that a process holds."""
    wanted = orjson.dumps(ref)
    for chain in reversed(chain_dirs(directory)):
        if living and not is_locked(chain):
            continue
        for _, path in reversed(segments(chain)):
            with open_regular(path) as file:
                for _, raw in stored_lines(file):
                    if b'"kind":"erased"' not in raw or wanted not in raw:
                        continue
                    record = _record(raw)
                    if record.get("kind") == "erased" and record.get("key_ref") == ref:
                        return Erased(ref, record["origin"], record["seq"])
    return None


def erased_keys(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the `erased` records of a directory by tenant, oldest first; raises OSError."""
    found: dict[str, list[dict[str, Any]]] = {}
    chains = [directory] if segments(directory) else chain_dirs(directory)
    for chain in chains:
        for _, path in segments(chain):
            with open_regular(path) as file:
                for _, raw in stored_lines(file):
                    if b'"kind":"erased"' in raw:
                        record = _record(raw)
                        if record.get("kind") == "erased":
                            found.setdefault(str(record.get("tenant", "")), []).append(record)
    return found


def _record(raw: bytes) -> dict[str, Any]:
    try:
        record = orjson.loads(raw[:LINE_BYTES].partition(b"\t")[0])
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def begin(directory: Path, tenant: str, keys: Sequence[bytes]) -> list[str]:
    """Write down what is to be erased; returns the references, earlier unfinished ones too."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    refs = {key_ref(key) for key in keys}
    for ref in refs:
        path = directory / f"{_NOTE}{ref.partition(':')[2]}"
        with path.open("wb") as file:
            file.write(orjson.dumps({"tenant": tenant, "key_ref": ref}))
            file.flush()
            os.fsync(file.fileno())
    sync_dir(directory)
    for path in directory.glob(f"{_NOTE}*"):
        note = _record(path.read_bytes())
        if note.get("tenant") == tenant and isinstance(note.get("key_ref"), str):
            refs.add(note["key_ref"])
    return sorted(refs)


def finish(directory: Path, ref: str) -> None:
    """Forget what is erased and said."""
    (directory / f"{_NOTE}{ref.partition(':')[2]}").unlink(missing_ok=True)
    sync_dir(directory)


def held_in(keys: KeySet | None, tenant: str) -> bytes | None:
    """Return the tenant's prompt key, if the provider has it."""
    return None if keys is None else keys.prompt_key(tenant)


def peek(path: Path, tenant: str) -> bytes | None:
    """Return the tenant's prompt key if a key file holds it; raises `KeySourceError`, OSError."""
    from proxy.keys.file import read  # noqa: PLC0415 - msgspec

    return read(path).prompt_keys.get(tenant)


def destroy_in_file(path: Path, tenant: str) -> None:
    """Write a key file of any role again without the tenant's prompt key.

    Raises `KeySourceError`, OSError.
    """
    from proxy.keys.file import encode, read  # noqa: PLC0415 - msgspec
    from proxy.keys.issue import replace_file  # noqa: PLC0415

    contents = read(path)
    if tenant in contents.prompt_keys:
        left = {name: value for name, value in contents.prompt_keys.items() if name != tenant}
        data = encode(replace(contents, prompt_keys=left))
        replace_file(path, data, suffix=f"{time.time_ns()}.{os.getpid()}")


def destroy(provider: KeyProvider | None, tenant: str) -> None:
    """Destroy the key where the provider keeps it; raises `KeySourceError`."""
    if provider is not None:
        provider.destroy(PROMPT + tenant)


def say(
    row: Audit,
    directory: Path,
    tenant: str,
    ref: str,
    keys: KeySet | None,
    *,
    wait_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Erased:
    """Return the `erased` record: there already, of a running sidecar, or of a chain of our own.

    Raises `EraseError`.
    """
    found = find_erased(directory, ref)
    deadline_s = time.monotonic() + wait_s
    while found is None and _somebody_writes(directory) and time.monotonic() < deadline_s:
        sleep(POLL_S)
        found = find_erased(directory, ref, living=True)
    return found or asyncio.run(_own_chain(row, directory, tenant, ref, keys))


def _somebody_writes(directory: Path) -> bool:
    return any(is_locked(chain) for chain in chain_dirs(directory))


async def _own_chain(
    row: Audit, directory: Path, tenant: str, ref: str, keys: KeySet | None
) -> Erased:
    from proxy.audit.setup import AuditError, AuditUnavailableError, ChainConfig  # noqa: PLC0415
    from proxy.audit.signing import NoteSigner  # noqa: PLC0415 - 6 MB of RSS
    from proxy.audit.writer import AuditWriter  # noqa: PLC0415
    from proxy.clock import SystemClock  # noqa: PLC0415

    seed = None if keys is None else keys.chain_seed()
    if keys is None or seed is None:
        raise EraseError(
            f"{ref} is destroyed, and no chain says so yet: the provider has no chain seed; start "
            "a sidecar on this directory and ask again"
        )
    clock = SystemClock()
    config = ChainConfig(
        dir=directory,
        origin=f"{socket.gethostname()}/{os.getpid()}/{clock.wall_ns()}",
        seed_id=seed[0],
        seed=seed[1],
        alg=row.alg,
        token_ids="off",  # noqa: S106 - a mode
        auditor_public=None,
        on_failure=row.on_failure,
        flush_ms=row.flush_ms,
        flush_records=row.flush_records,
        segment_bytes=row.segment_bytes,
        heartbeat_s=row.heartbeat_s,
        genesis={"config_sha256": "", "image": "", "what": "audit erase"},
        signers=tuple(NoteSigner(*signer) for signer in keys.checkpoint_keys()),
    )
    try:
        writer = AuditWriter.start(config, clock, asyncio.get_running_loop())
        seq = writer.append("erased", {"key_ref": ref, "tenant": tenant})
        await writer.close()
    except (AuditError, AuditUnavailableError, ValueError) as problem:
        raise EraseError(f"{ref} is destroyed, and no chain says so yet: {problem}") from None
    return Erased(ref, config.origin, seq)
