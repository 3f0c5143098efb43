"""The one interface for key material: what envelopes are opened with, and what audit writes with.

A *provider* is where keys come from (a file, a directory of mounted secrets, a key service, a
PKCS#11 token). It is asked by one thread that is never the data loop, and it may block. What it
gives is a *key set*: everything it held at one moment. A change arrives as another whole set: the
thread that looks for changes (`proxy/reload.py`) compares `mark()`, calls `load()`, and hands the
set to the data loop, where it is `context.keys`. Who keeps a secret for longer than a request asks
the newest set again. Nothing here logs; what is raised never shows key bytes.

Names, and what a version is:

| name | what | version |
| --- | --- | --- |
| `envelope/<kid>` | root R of one envelope key, 32 bytes | the kid: never issued twice |
| `prompt/<tenant>` | key of a tenant's prompt and output hashes, 32 bytes | as counted, or "1" |
| `chain/<seed id>` | what a chain's keys start from, 32 bytes | the seed id; the last is in use |
| `checkpoint/<name>/<scheme>` | private key that signs checkpoints, 32 bytes | the key's name |
| `auditor/public` | the auditor's public key, X25519 or SM2: no secret | "1" |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from proxy.discreet import Discreet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from proxy.keys.file import KeyFile
    from proxy.sm4.keyring import EnvelopeKey

NEVER_MS = (1 << 63) - 1


class KeySourceError(Exception):
    """Keys cannot be had, or are refused; says where and what to do, never a secret."""


class CannotDestroyError(KeySourceError):
    """This provider cannot destroy that secret; says who can."""


class Secret(Discreet, frozen=True):
    """One version of one named secret; times in unix ms, inclusive. `scheme`: of a signing key."""

    shown = ("name", "version", "not_before_ms", "not_after_ms", "scheme")

    name: str
    version: str
    value: bytes
    not_before_ms: int = 0
    not_after_ms: int = NEVER_MS
    scheme: str = ""


class State(msgspec.Struct, frozen=True):
    """How a provider is. `reason` is one of few words, `problem` a line for people; empty when ok.

    `since_ms`: unix ms at which it became so. `lease_until_ms`: when what it gave ends to be good,
    if nothing more is heard of it (`NEVER_MS`: it does not end).
    """

    ok: bool
    since_ms: int
    reason: str = ""
    problem: str = ""
    lease_until_ms: int = NEVER_MS


class Standing:
    """What a provider notes of itself. `wall_ms` tells the time; written by one thread."""

    __slots__ = ("_state", "_wall_ms")

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        self._wall_ms = wall_ms
        self._state = State(ok=True, since_ms=wall_ms())

    def good(self, lease_until_ms: int = NEVER_MS) -> None:
        """Note that the source answered, and until when that holds."""
        since_ms = self._state.since_ms if self._state.ok else self._wall_ms()
        self._state = State(ok=True, since_ms=since_ms, lease_until_ms=lease_until_ms)

    def degraded(self, reason: str, problem: object = "") -> None:
        """Note that it did not; the first time counts, the last reason is told."""
        before = self._state
        since_ms = self._wall_ms() if before.ok else before.since_ms
        self._state = State(
            ok=False,
            since_ms=since_ms,
            reason=reason,
            problem=str(problem),
            lease_until_ms=before.lease_until_ms,
        )

    def state(self) -> State:
        """Return what was noted last."""
        return self._state


class KeySet:
    """What a provider held at one moment. Only `forget_envelope_keys` changes it."""

    __slots__ = ("_audiences", "_contents", "_versions")

    def __init__(
        self,
        contents: KeyFile,
        *,
        versions: Mapping[str, str] | None = None,
        audiences: frozenset[str] = frozenset(),
    ) -> None:
        """`versions` by name, where the provider counts them; `audiences`: of keys withdrawn."""
        if contents.revoked:
            revoked = frozenset(contents.revoked)
            rows = tuple(key for key in contents.envelope_keys if key.kid not in revoked)
            contents = replace(contents, envelope_keys=rows)
        self._contents = contents
        self._versions = versions or {}
        found = frozenset(key.audience for key in contents.envelope_keys)
        self._audiences = found or audiences

    def envelope_keys(self) -> list[EnvelopeKey]:
        """Return every envelope key of this audience, old and announced ones too.

        Whoever took them calls `forget_envelope_keys`; after that there are none.
        """
        return list(self._contents.envelope_keys)

    def forget_envelope_keys(self) -> None:
        """Keep no root: the ring has them, and deletes each when its grace ends."""
        self._contents = replace(self._contents, envelope_keys=())

    def audiences(self) -> frozenset[str]:
        """Return the audiences that the envelope keys are or were for."""
        return self._audiences

    def revoked(self) -> frozenset[bytes]:
        """Return the kids that are revoked: no envelope key is one of them."""
        return frozenset(self._contents.revoked)

    def prompt_key(self, tenant: str) -> bytes | None:
        """Return the tenant's 32-byte key for prompt and output hashes, or None."""
        return self._contents.prompt_keys.get(tenant)

    def chain_seed(self) -> tuple[str, bytes] | None:
        """Return (seed id, 32 bytes) the audit chain's keys start from, or None."""
        seeds = self._contents.chain_seeds
        return seeds[-1] if seeds else None

    def chain_turn(self) -> str:
        """Return the word at whose change the audit chain goes on to its next key; "": none."""
        return self._contents.chain_turn

    def auditor_public(self) -> bytes | None:
        """Return the auditor's public key, or None: 32 bytes of X25519, or 64 of SM2."""
        return self._contents.auditor_public

    def checkpoint_keys(self) -> tuple[tuple[str, str, bytes], ...]:
        """Return (name, scheme, private key) of everyone who signs checkpoints."""
        return self._contents.checkpoint_keys

    def secrets(self) -> Iterator[Secret]:
        """Yield everything by name, in order of issue within a kind (see the module)."""
        contents = self._contents
        for key in contents.envelope_keys:
            kid = key.kid.hex()
            yield Secret(
                f"envelope/{kid}", kid, key.root, key.not_before_ms, key.not_after_ms, key.scheme
            )
        for tenant, value in contents.prompt_keys.items():
            name = f"prompt/{tenant}"
            yield Secret(name, self._versions.get(name, "1"), value)
        for seed_id, value in contents.chain_seeds:
            yield Secret(f"chain/{seed_id}", seed_id, value)
        for name, scheme, value in contents.checkpoint_keys:
            yield Secret(f"checkpoint/{name}/{scheme}", name, value, scheme=scheme)
        if contents.auditor_public is not None:
            yield Secret("auditor/public", "1", contents.auditor_public)

    def get(self, name: str) -> Secret | None:
        """Return one secret by its name, or None."""
        return next((secret for secret in self.secrets() if secret.name == name), None)


class KeyProvider(Protocol):
    """A source of keys. One thread calls it, never the data loop; `state` may be asked by any."""

    @property
    def kind(self) -> str:
        """The name of `keys.provider`."""

    def load(self) -> KeySet:
        """Return what there is now; raises `KeySourceError`, and then nothing has changed."""

    def mark(self) -> object:
        """Return what differs from the last one when `load` may give something else. Cheap."""

    def destroy(self, name: str) -> None:
        """Destroy every version of a secret where it is kept, so that it cannot be had again.

        Copies made elsewhere are not reached (docs/keys.md says for each provider what it
        destroys). Raises `CannotDestroyError` where the provider cannot, `KeySourceError` where it
        failed or there is no such secret.
        """

    def state(self) -> State:
        """Say how the source is: ok, or degraded since when and why."""

    def close(self) -> None:
        """End what it runs: threads, sessions. Nothing is asked of it after."""
