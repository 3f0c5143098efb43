"""Whom each pool seals to on the way out (docs/envelope.md, "On the way out").

An audience is one live receiver, so each endpoint has its own keys unless replicas share one. The
files are read on the thread that reads settings; what was read is taken together with them. All
pools share one ring: a kid that seals for several of them is spent for all at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from proxy.settings import SettingsError
from proxy.sm4.caller import Recipient
from proxy.sm4.keyring import EnvelopeKey, Keyring, KeyringError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from proxy.config import Pool
    from proxy.lanes import Route
    from proxy.qos.classes import PoolName

KeysByUrl = dict[str, tuple[EnvelopeKey, ...]]


def read_keys(name: str, pool: Pool) -> KeysByUrl:
    """Return the keys to seal with to each endpoint's URL; raises SettingsError."""
    from proxy.keys.file import KeyFileError  # noqa: PLC0415 - only with keys

    problems: list[str] = []
    files: dict[str, tuple[EnvelopeKey, ...]] = {}
    for file in dict.fromkeys(pool.seal.keys):
        try:
            files[file] = _client_keys(file, sign=pool.seal.sign)
        except (KeyFileError, KeyringError, OSError) as problem:
            text = str(problem) if file in str(problem) else f"{file}: {problem}"
            problems.append(f"pools.{name}.seal.keys: {text}")
    if problems:
        raise SettingsError(problems)
    names = pool.seal.keys * (len(pool.endpoints) if len(pool.seal.keys) == 1 else 1)
    return {url: files[file] for url, file in zip(pool.endpoints, names, strict=True)}


def _client_keys(file: str, *, sign: bool) -> tuple[EnvelopeKey, ...]:
    from proxy.keys.file import KeyFileError, read  # noqa: PLC0415 - only with keys

    found = read(Path(file))
    if found.role != "client":
        raise KeyFileError(f"{file}: made for the {found.role}, not for a client")
    keys = found.envelope_keys
    audiences = {key.audience for key in keys}
    if len(audiences) != 1:
        raise KeyFileError(
            f"{file}: expected envelope keys for one audience, there are {len(audiences)} audiences"
        )
    for key in keys:
        derived = Keyring([key]).get(key.kid)
        assert derived is not None
        signs = derived.signer() is not None and sign
        if key.require_signature and not signs:
            why = "it has no sign_private" if sign else "seal.sign is false"
            raise KeyFileError(f"{file}: kid {key.kid.hex()} demands a signature, and {why}")
    return keys


def all_keys(sealing: Mapping[PoolName, KeysByUrl]) -> list[EnvelopeKey]:
    """Return every key of every pool, each once."""
    found: dict[EnvelopeKey, None] = {}
    for keys in sealing.values():
        for rows in keys.values():
            for key in rows:
                found[key] = None
    return list(found)


def sealing_problems(sealing: Mapping[PoolName, KeysByUrl]) -> list[str]:
    """Return the problem of files that disagree about a kid."""
    try:
        Keyring(all_keys(sealing))
    except KeyringError as problem:
        return [f"pools.*.seal.keys: {problem}"]
    return []


def let_seal(ring: Keyring, routes: Iterable[Route], sealing: Mapping[PoolName, KeysByUrl]) -> None:
    """Let the routes seal with these keys and no others; `ring` knows them by now."""
    for route in routes:
        keys = sealing.get(route.name, {})
        route.recipients = {url: Recipient(ring, rows) for url, rows in keys.items()}
        for endpoint in route.state.endpoints:
            endpoint.sealed = endpoint.url in keys


def drop_expired(ring: Keyring, routes: Iterable[Route], now_ms: int) -> None:
    """Forget keys whose grace has ended, and all that was derived."""
    ring.drop_expired(now_ms)
    for route in routes:
        for recipient in route.recipients.values():
            recipient.key(now_ms)
