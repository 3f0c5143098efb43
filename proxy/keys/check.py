"""Is a source of keys what a sidecar needs: what is live, what ends when, what is wrong. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from proxy.keys.expiry import expiring
from proxy.sm4.keyring import Keyring, KeyringError, check_signatures

if TYPE_CHECKING:
    from proxy.keys.provider import KeySet
    from proxy.sm4.keyring import EnvelopeKey

KEYS_SHOWN_MAX = 100


@dataclass(frozen=True, slots=True)
class Report:
    """`problems` make a sidecar useless, now or soon; `notes` are worth a thought. No secrets."""

    keys: tuple[dict[str, Any], ...]
    counts: dict[str, int]
    prompt_keys_for: tuple[str, ...]
    chain_seed_id: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def report(keys: KeySet, now_ms: int, *, alarm_ahead_ms: int) -> Report:
    """Return what is to be said of a source's keys at a time in unix ms."""
    rows = sorted(keys.envelope_keys(), key=lambda key: key.not_after_ms)
    problems: list[str] = []
    try:
        ring = Keyring(rows)
        check_signatures(rows)
    except KeyringError as problem:
        ring = Keyring(())
        problems.append(str(problem))
    states = [state(key.not_before_ms, key.not_after_ms, now_ms) for key in rows]
    counts = {name: states.count(name) for name in ("live", "not yet", "expired")}
    counts["revoked"] = len(keys.revoked())
    if not counts["live"]:
        problems.append("no envelope key is live: the sealed door opens nothing")
    if len(keys.audiences()) > 1:
        names = ", ".join(sorted(keys.audiences())[:4])
        problems.append(f"one receiver has one audience, these keys name: {names}")
    problems += [
        f"kid {key.kid.hex()} of {key.client} ends in {(key.not_after_ms - now_ms) // 1000} s and "
        "nothing follows it"
        for key in expiring(ring, now_ms, alarm_ahead_ms, lambda: None)[:KEYS_SHOWN_MAX]
    ]
    seed = keys.chain_seed()
    tenants = tuple(s.name.partition("/")[2] for s in keys.secrets() if s.name[:7] == "prompt/")
    missing = (
        (seed is None, "no chain seed: no audit chain"),
        (keys.auditor_public() is None, "no auditor key: token ids cannot be sealed"),
        (not tenants, "no prompt keys: records have no hashes"),
        (not keys.checkpoint_keys(), "no checkpoint keys: the chain is not signed"),
    )
    return Report(
        keys=tuple(_row(key, found) for key, found in zip(rows, states, strict=True)),
        counts=counts,
        prompt_keys_for=tenants,
        chain_seed_id=seed[0] if seed is not None else "",
        problems=tuple(problems),
        notes=tuple(text for is_missing, text in missing if is_missing),
    )


def _row(key: EnvelopeKey, found: str) -> dict[str, Any]:
    return {
        "kid": key.kid.hex(),
        "state": found,
        "client": key.client,
        "not_before_ms": key.not_before_ms,
        "not_after_ms": key.not_after_ms,
    }


def state(not_before_ms: int, not_after_ms: int, now_ms: int) -> str:
    """Return what a key is now: live, not yet, expired."""
    if now_ms < not_before_ms:
        return "not yet"
    return "live" if now_ms <= not_after_ms else "expired"
