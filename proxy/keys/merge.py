"""Several key files that are one: what a directory of secrets, or a folder of a service, holds.

Pure. Together they have to make sense: what stands in two of them has to be the same in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from proxy.keys.file import KeyFile, KeyFileError
from proxy.keys.pace import breathe
from proxy.keys.rotate import GRACE_MS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from proxy.sm4.keyring import EnvelopeKey


def merged(files: Mapping[str, KeyFile]) -> KeyFile:
    """Return one sidecar's contents of several, by name; raises `KeyFileError` naming one.

    Chain seeds are in order of the names: the last one is in use. Whether a kid stands twice with
    different contents is the ring's to see.
    """
    prompt_keys: dict[str, bytes] = {}
    seeds: dict[str, bytes] = {}
    signs: dict[tuple[str, str], bytes] = {}
    auditor: bytes | None = None
    rows = [files[name] for name in sorted(files)]
    for name, file in sorted(files.items()):
        breathe()
        if file.role != "sidecar":
            raise KeyFileError(f"{name}: made for the {file.role}, not for a sidecar")
        _add(prompt_keys, file.prompt_keys.items(), name, "prompt key")
        _add(seeds, file.chain_seeds, name, "chain seed")
        _add(signs, (((n, s), key) for n, s, key in file.checkpoint_keys), name, "checkpoint key")
        if file.auditor_public not in {None, auditor} and auditor is not None:
            raise KeyFileError(f"{name}: auditor_public is another one than in an earlier file")
        auditor = file.auditor_public or auditor
    return KeyFile(
        role="sidecar",
        envelope_keys=tuple(key for file in rows for key in file.envelope_keys),
        prompt_keys=prompt_keys,
        chain_seeds=tuple(seeds.items()),
        auditor_public=auditor,
        auditor_private=None,
        checkpoint_keys=tuple((n, s, key) for (n, s), key in signs.items()),
        verify_keys=tuple(
            dict.fromkeys(line for n in sorted(files) for line in files[n].verify_keys)
        ),
        revoked=tuple(dict.fromkeys(kid for file in rows for kid in file.revoked)),
        chain_turn=" ".join(file.chain_turn for file in rows if file.chain_turn),
    )


def _add(into: dict[Any, bytes], rows: Iterable[tuple[Any, bytes]], name: str, what: str) -> None:
    for key, value in rows:
        if into.setdefault(key, value) != value:
            raise KeyFileError(f"{name}: a {what} of an earlier file, with other contents")


def first_end_ms(keys: Iterable[EnvelopeKey]) -> int | None:
    """Return when the first of these keys is to be forgotten, in unix ms; None: no keys."""
    return min((key.not_after_ms + GRACE_MS for key in keys), default=None)


def in_grace(file: KeyFile, now_ms: int) -> KeyFile:
    """Return a file's contents without the keys whose grace is over."""
    rows = tuple(key for key in file.envelope_keys if now_ms <= key.not_after_ms + GRACE_MS)
    return file if len(rows) == len(file.envelope_keys) else replace(file, envelope_keys=rows)
