"""What the sidecar asks of whoever holds its keys.

A provider is asked at start and at reload, never on a request's way. What it returns is secret but
for the auditor's public key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from proxy.sm4.keyring import EnvelopeKey


class KeyProvider(Protocol):
    """A source of keys."""

    def envelope_keys(self) -> list[EnvelopeKey]:
        """Return every envelope key of this audience, old and announced ones too.

        Whoever took them calls `forget_envelope_keys`; after that there are none.
        """
        ...

    def forget_envelope_keys(self) -> None:
        """Keep no root: the ring has them, and deletes each when its grace ends."""
        ...

    def audiences(self) -> frozenset[str]:
        """Return the audiences that the envelope keys are or were for."""
        ...

    def prompt_key(self, tenant: str) -> bytes | None:
        """Return the tenant's 32-byte key for prompt and output hashes, or None."""
        ...

    def chain_seed(self) -> tuple[str, bytes] | None:
        """Return (seed id, 32 bytes) the audit chain's keys start from, or None."""
        ...

    def auditor_public(self) -> bytes | None:
        """Return the auditor's X25519 public key, 32 raw bytes, or None."""
        ...

    def checkpoint_keys(self) -> tuple[tuple[str, str, bytes], ...]:
        """Return (name, scheme, private key) of everyone who signs checkpoints."""
        ...
