"""Making keys: what a set of files holds, and writing it so that it is whole or not there.

`issue` is pure (random bytes and the time are arguments); `earlier` and `write` touch the disk: a
temporary file of mode 0600 each, fsync, and only when all are written are they renamed into place.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from proxy.keys.file import MODE, KeyFile, KeyFileError, encode, read
from proxy.sm4.keyring import EnvelopeKey
from proxy.sm4.signature import draw

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

FILE_NAMES = {"sidecar": "sidecar.json", "client": "client.json", "auditor": "auditor.json"}
DAYS_DEFAULT = 30
DAY_MS = 86_400_000
# Clocks differ: a key is valid a moment before it was made.
NOT_BEFORE_SLACK_MS = 60_000


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What keys to make: the first tenant is the client's."""

    audience: str
    client: str
    tenants: tuple[str, ...]
    suite: int = 1
    days: int = DAYS_DEFAULT
    digest: str = "sha256"
    sign: str = ""
    require_mac: bool = False
    require_signature: bool = False
    checkpoints: tuple[str, ...] = ("ed25519",)
    auditor: str = "x25519"


def issue(
    order: Order,
    *,
    now_ms: int,
    random: Callable[[int], bytes],
    before: KeyFile | None = None,
) -> dict[str, KeyFile]:
    """Return the files' contents by role; raises ValueError for an order that cannot be filled.

    `random(n)` gives n bytes from the operating system. `before` is the auditor's file that these
    keys follow: what records already written need stays (its chain seeds, the tenants' prompt keys,
    the auditor's pair, the public keys of checkpoints), the envelope key, the chain seed in use and
    the key that signs checkpoints are fresh.
    """
    from proxy.audit.signing import NoteSigner  # noqa: PLC0415 - issuing only

    kid, root = random(8), random(32)
    sign_private, sign_public = draw(order.sign, random) if order.sign else (b"", b"")
    key = EnvelopeKey(
        kid=kid,
        root=root,
        client=order.client,
        audience=order.audience,
        tenant=order.tenants[0],
        suite=order.suite,
        digest=order.digest,
        not_before_ms=now_ms - NOT_BEFORE_SLACK_MS,
        not_after_ms=now_ms + order.days * DAY_MS,
        require_mac=order.require_mac,
        require_signature=order.require_signature,
        scheme=order.sign,
        sign_public=sign_public,
    )
    prompt_keys = dict(before.prompt_keys) if before else {}
    for tenant in order.tenants:
        if tenant not in prompt_keys:
            prompt_keys[tenant] = random(32)
    seed = (random(8).hex(), random(32))
    seeds = (*before.chain_seeds, seed) if before else (seed,)
    private = before.auditor_private if before else None
    public = before.auditor_public if before else None
    if private is None or public is None:
        private, public = _auditor_pair(order.auditor, random)
    name = f"tongguan-{random(4).hex()}"
    signs = tuple((name, scheme, draw(scheme, random)[0]) for scheme in order.checkpoints)
    lines = before.verify_keys if before else ()
    lines = (*lines, *(NoteSigner(*row).key.line() for row in signs))
    return {
        "sidecar": KeyFile("sidecar", (key,), prompt_keys, (seed,), public, None, signs),
        "client": KeyFile("client", (replace(key, sign_private=sign_private),), {}, (), None, None),
        "auditor": KeyFile("auditor", (), prompt_keys, seeds, public, private, (), lines),
    }


def _auditor_pair(scheme: str, random: Callable[[int], bytes]) -> tuple[bytes, bytes]:
    """Return (private, public) of an auditor's new pair: x25519 or sm2."""
    if scheme == "sm2":
        private, public = draw("sm2", random)
        return private, public
    from cryptography.hazmat.primitives.asymmetric.x25519 import (  # noqa: PLC0415 - issuing only
        X25519PrivateKey,
    )

    private = random(32)
    return private, X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def earlier(directory: Path) -> KeyFile | None:
    """Return the auditor's file of the set in `directory`, or None if no set is there.

    Raises `KeyFileError` where what is there cannot be carried on: a file that is refused or of
    another set, or no auditor's file. Raises OSError.
    """
    paths = {role: directory / name for role, name in FILE_NAMES.items()}
    files = {role: read(path) for role, path in paths.items() if path.exists()}
    if not files:
        return None
    for role, file in files.items():
        if file.role != role:
            raise KeyFileError(f"{paths[role]}: made for the {file.role}, not for the {role}")
    auditor = files.get("auditor")
    if auditor is None:
        raise KeyFileError(
            f"{paths['auditor']} is not there, and without it what was written before could not be "
            "verified any more; bring it back, or begin anew with another --dir"
        )
    if auditor.auditor_private is None or not auditor.chain_seeds:
        raise KeyFileError(f"{paths['auditor']}: lacks the auditor's private key or chain seeds")
    other = _stranger(files, auditor)
    if other:
        raise KeyFileError(
            f"{directory}: {other} are of different sets; move away what does not belong here, or "
            "begin anew with another --dir"
        )
    return auditor


def _stranger(files: Mapping[str, KeyFile], auditor: KeyFile) -> str:
    """Return the names of two files that were not made together, or ""."""
    sidecar, client = files.get("sidecar"), files.get("client")
    if sidecar is None:
        return ""
    ours = (
        sidecar.auditor_public in {None, auditor.auditor_public}
        and set(sidecar.chain_seeds) <= set(auditor.chain_seeds)
        and sidecar.prompt_keys.items() <= auditor.prompt_keys.items()
    )
    if not ours:
        return f"{FILE_NAMES['sidecar']} and {FILE_NAMES['auditor']}"
    if client is not None:
        kids = {key.kid for key in sidecar.envelope_keys}
        if not any(key.kid in kids for key in client.envelope_keys):
            return f"{FILE_NAMES['sidecar']} and {FILE_NAMES['client']}"
    return ""


def write(
    directory: Path,
    files: Mapping[str, KeyFile],
    *,
    force: bool,
    suffix: str,
    finish: Callable[[str, bytes], bytes] = lambda _role, data: data,
) -> list[Path]:
    """Write the files and return their paths; `suffix` is unique to this call.

    `finish(role, data)` returns what of a file is written: so a token wraps it.

    Without `force`, raises `KeyFileError` if one is there already. With it they are replaced: give
    `issue` what `earlier` found. Raises OSError.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    targets = {role: directory / FILE_NAMES[role] for role in files}
    for target in targets.values():
        if target.exists() and not force:
            raise KeyFileError(
                f"{target} is there already; --force gives its set a fresh envelope key and chain "
                "seed"
            )
    temporary: dict[str, Path] = {}
    try:
        for role, file in files.items():
            path = directory / f".{FILE_NAMES[role]}.{suffix}"
            write_new(path, finish(role, encode(file)))
            temporary[role] = path
        # The auditor's first: it verifies what comes under either set, should we end in between.
        for role in sorted(temporary, key=lambda role: role != "auditor"):
            temporary[role].replace(targets[role])
    except BaseException:
        for path in temporary.values():
            path.unlink(missing_ok=True)
        raise
    _sync_directory(directory)
    return list(targets.values())


def replace_file(path: Path, data: bytes, *, suffix: str) -> None:
    """Put `data` in the place of a key file, whole or not at all; raises OSError."""
    temporary = path.with_name(f".{path.name}.{suffix}")
    write_new(temporary, data)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Write a key file that must not be there, mode 0600, durably; raises OSError."""
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
