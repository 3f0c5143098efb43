"""The next key of a client, announced ahead, and the end of one: `keys rotate` and `keys revoke`.

Pure. The receiver's file gets it first and the sealer's after; both know it ten minutes before it
begins, so that neither is ever without the other's key. What is derived from a key lives on in both
until its grace is over; only then it leaves the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from proxy.keys.file import KeyFileError
from proxy.keys.issue import DAY_MS, NOT_BEFORE_SLACK_MS

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from proxy.keys.file import KeyFile
    from proxy.sm4.keyring import EnvelopeKey

AHEAD_MS = 600_000
# Three windows of the longest setting there is (envelope.window_s).
GRACE_MS = 3 * 600_000


def rotate(
    sidecar: KeyFile,
    client: KeyFile,
    *,
    now_ms: int,
    random: Callable[[int], bytes],
    days: int | None = None,
    at_once: bool = False,
) -> tuple[dict[str, KeyFile], EnvelopeKey]:
    """Return both files with the next key in, by role, and that key as the client has it.

    It is as the client's newest, but for kid, root and times; it lasts as long as that one, or
    `days`. Its signature pair stays: that is who the client is. With `at_once` it begins now, not
    in ten minutes: where the one before must not be used any longer. Raises `KeyFileError` for
    files that do not belong together, or where a next key is announced already.
    """
    if not client.envelope_keys:
        raise KeyFileError("the client's file has no key to follow; make one with: keys new")
    last = max(client.envelope_keys, key=lambda key: key.not_before_ms)
    known = {key.kid for key in sidecar.envelope_keys}
    if last.kid not in known:
        raise KeyFileError(f"kid {last.kid.hex()} of the client's file is not in the sidecar's")
    if last.not_before_ms > now_ms and not at_once:
        raise KeyFileError(f"kid {last.kid.hex()} is announced already and has not begun")
    begin_ms = now_ms - NOT_BEFORE_SLACK_MS if at_once else now_ms + AHEAD_MS
    span_ms = last.not_after_ms - last.not_before_ms if days is None else days * DAY_MS
    fresh = replace(
        last,
        kid=random(8),
        root=random(32),
        not_before_ms=begin_ms,
        not_after_ms=begin_ms + span_ms,
    )
    files = {
        "sidecar": replace(
            sidecar,
            envelope_keys=(*_live(sidecar, now_ms), replace(fresh, sign_private=b"")),
        ),
        "client": replace(client, envelope_keys=(*_live(client, now_ms), fresh)),
    }
    return files, fresh


def revoke(path: Path, data: bytes, kid: bytes) -> tuple[bytes, bool]:
    """Return a key file without a kid, and whether it was in; a sidecar's names it as revoked.

    The other secrets stay as they are written, wrapped ones too. Raises `KeyFileError`.
    """
    try:
        document = msgspec.json.decode(data, type=dict[str, Any])
        rows: list[dict[str, Any]] = document.get("envelope_keys", [])
        kept = [row for row in rows if row["kid"] != kid.hex()]
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError, RecursionError):
        raise KeyFileError(f"{path}: not a JSON key file") from None
    document["envelope_keys"] = kept
    if document.get("role") == "sidecar":
        named = [text for text in document.get("revoked", []) if text != kid.hex()]
        document["revoked"] = [*named, kid.hex()]
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n", kept != rows


def _live(file: KeyFile, now_ms: int) -> tuple[EnvelopeKey, ...]:
    """Return the keys whose grace is not over."""
    return tuple(key for key in file.envelope_keys if now_ms <= key.not_after_ms + GRACE_MS)
