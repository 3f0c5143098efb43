"""What another key set means for the audit chain: the next seed, and tenants whose keys are gone.

`changes` decides; `follow` tells the chain. A provider's new chain seed is gone on to by a `rotate`
record, so a key service turns the chain's key whenever it issues a seed; or whenever it says
another word (`chain_turn`), also where the seed is the agent's. A tenant's prompt key that is there
no more was destroyed as far as this sidecar goes: an `erased` record says which.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from proxy.discreet import Discreet

if TYPE_CHECKING:
    from proxy.audit.writer import AuditWriter
    from proxy.keys.provider import KeySet

PROMPT = "prompt/"
_REF_HEX = 32


class Changes(Discreet, frozen=True):
    """`seed` is the chain seed to go on to, `erased` (tenant, key reference) of keys that went.

    `turn`: the chain is to go on to its next key.
    """

    shown = ("turn", "erased")

    seed: tuple[str, bytes] | None = None
    turn: bool = False
    erased: tuple[tuple[str, str], ...] = ()


def key_ref(key: bytes) -> str:
    """Return the name of a prompt key in the log: it tells the key to nobody, and proves which."""
    return "prompt:" + hashlib.sha256(b"tongguan prompt key\0" + key).hexdigest()[:_REF_HEX]


def changes(before: KeySet | None, now: KeySet | None) -> Changes:
    """Return what went on between two key sets; a set that is not there says nothing."""
    if before is None or now is None:
        return Changes()
    old, new = before.chain_seed(), now.chain_seed()
    seed = new if new is not None and old is not None and new[0] != old[0] else None
    there = {secret.name for secret in now.secrets()}
    gone = [
        (secret.name.removeprefix(PROMPT), key_ref(secret.value))
        for secret in before.secrets()
        if secret.name.startswith(PROMPT) and secret.name not in there
    ]
    turn = now.chain_turn() not in ("", before.chain_turn())
    return Changes(seed, turn=turn, erased=tuple(gone))


def follow(audit: AuditWriter, found: Changes, *, own_seed: bool) -> None:
    """Write down what changed; `own_seed`: the chain's seed is the provider's."""
    for tenant, ref in found.erased:
        audit.append("erased", {"key_ref": ref, "tenant": tenant})
    if found.erased:
        from proxy.audit import hashes  # noqa: PLC0415 - loaded by now

        hashes.forget_keys()
    seed = found.seed if own_seed else None
    if seed is not None or found.turn:
        audit.rotate_to(seed)
