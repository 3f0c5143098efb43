"""Making keys: what a set of files holds, and writing it so that it is whole or not there.

`issue` is pure (random bytes and the time are arguments); `write` touches the disk: a temporary
file of mode 0600 each, fsync, and only when all are written are they renamed into place.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.keys.file import MODE, KeyFile, KeyFileError, encode
from proxy.sm4.keyring import EnvelopeKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

FILE_NAMES = {"sidecar": "sidecar.json", "client": "client.json", "auditor": "auditor.json"}
DAYS_DEFAULT = 30
DAY_MS = 86_400_000
# Clocks differ: a key is valid a moment before it was made.
NOT_BEFORE_SLACK_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What keys to make: the first tenant is the client's."""

    audience: str
    client: str
    tenants: tuple[str, ...]
    suite: int = 1
    days: int = DAYS_DEFAULT


def issue(order: Order, *, now_ms: int, random: Callable[[int], bytes]) -> dict[str, KeyFile]:
    """Return the files' contents by role; raises `KeyringError` for a malformed order.

    `random(n)` gives n bytes from the operating system.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import (  # noqa: PLC0415 - issuing only
        X25519PrivateKey,
    )

    key = EnvelopeKey(
        kid=random(8),
        root=random(32),
        client=order.client,
        audience=order.audience,
        tenant=order.tenants[0],
        suite=order.suite,
        digest="sha256",
        not_before_ms=now_ms - NOT_BEFORE_SLACK_MS,
        not_after_ms=now_ms + order.days * DAY_MS,
    )
    prompt_keys = {tenant: random(32) for tenant in order.tenants}
    seeds = ((random(8).hex(), random(32)),)
    private = random(32)
    public = X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()
    return {
        "sidecar": KeyFile("sidecar", (key,), prompt_keys, seeds, public, None),
        "client": KeyFile("client", (key,), {}, (), None, None),
        "auditor": KeyFile("auditor", (), prompt_keys, seeds, public, private),
    }


def write(directory: Path, files: Mapping[str, KeyFile], *, force: bool, suffix: str) -> list[Path]:
    """Write the files and return their paths; `suffix` is unique to this call.

    Without `force`, raises `KeyFileError` if one is there already. With it, an auditor's file that
    was there is kept as `auditor.json.<suffix>`: old records can be opened with nothing else.
    Raises OSError.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    targets = {role: directory / FILE_NAMES[role] for role in files}
    for target in targets.values():
        if target.exists() and not force:
            raise KeyFileError(f"{target} is there already; --force replaces the keys in it")
    temporary: list[Path] = []
    try:
        for role, file in files.items():
            path = directory / f".{FILE_NAMES[role]}.{suffix}"
            _write_new(path, encode(file))
            temporary.append(path)
        auditor = targets.get("auditor")
        if auditor is not None and auditor.exists():
            auditor.replace(directory / f"{auditor.name}.{suffix}")
        for path, target in zip(temporary, targets.values(), strict=True):
            path.replace(target)
    except BaseException:
        for path in temporary:
            path.unlink(missing_ok=True)
        raise
    _sync_directory(directory)
    return list(targets.values())


def _write_new(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            # The umask may have taken bits away, never added any; state the mode all the same.
            os.fchmod(file.fileno(), MODE)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
