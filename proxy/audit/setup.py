"""What a chain is started with, and what its writer counts."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from proxy.audit.canonical import encode, fit
from proxy.audit.layout import remote_filesystem
from proxy.audit.recover import survey
from proxy.audit.wrap import usable_public
from proxy.discreet import Discreet

if TYPE_CHECKING:
    from pathlib import Path

    from proxy.audit.chain import Alg
    from proxy.audit.checkpoint import Witness
    from proxy.audit.ids import TokenIds
    from proxy.audit.recover import Survey
    from proxy.audit.signing import NoteSigner

log = logging.getLogger(__name__)

CHECKPOINT_RECORDS = 1000
CHECKPOINT_S = 10
# What `append` returns for a record it had to drop.
LOST = -1


class AuditError(Exception):
    """The chain cannot be started, or was used wrongly; the text is for a person."""


class AuditUnavailableError(Exception):
    """The chain cannot be written now."""


class ChainConfig(Discreet, frozen=True):
    """What a chain is started with; sizes in bytes, times in the unit of their name.

    `auditor_public` is an X25519 key of 32 bytes or an SM2 key of 64; `genesis` has at least
    `config_sha256` and `image`.
    All `signers` sign every checkpoint; without one there are none. The key goes on after
    `rotate_records` records or `rotate_s`; 0: not for that reason. `escrow` is a note of the seed
    for the auditor.
    """

    shown = ("dir", "origin", "seed_id")

    dir: Path
    origin: str
    seed_id: str
    seed: bytes
    alg: Alg
    token_ids: TokenIds
    auditor_public: bytes | None
    on_failure: Literal["block", "degrade"]
    flush_ms: int
    flush_records: int
    segment_bytes: int
    heartbeat_s: int
    genesis: dict[str, object]
    signers: tuple[NoteSigner, ...] = ()
    witnesses: tuple[Witness, ...] = ()
    checkpoint_records: int = CHECKPOINT_RECORDS
    checkpoint_s: int = CHECKPOINT_S
    rotate_records: int = 0
    rotate_s: int = 0
    escrow: str = ""

    def unseeded(self) -> ChainConfig:
        """Return what the writer keeps: who has the seed has every key."""
        return msgspec.structs.replace(self, seed=b"")


class ChainSeed(Discreet, frozen=True):
    """What a chain's first key is made of; `escrow` is empty for a seed of the key provider's."""

    shown = ("id", "escrow")

    id: str
    value: bytes
    escrow: str = ""


class AuditStats(msgspec.Struct):
    """Plain counters for the metrics collector; `pending` is a level, `lost` a total.

    `checkpoint_seq` is the seq of the last checkpoint, -1 where there is none.
    """

    records: int = 0
    bytes: int = 0
    syncs: int = 0
    sync_seconds_total: float = 0.0
    lost: int = 0
    pending: int = 0
    failures: int = 0
    head_seq: int = -1
    checkpoints: int = 0
    checkpoint_seq: int = -1
    pruned_records: int = 0
    pruned_bytes: int = 0
    rotations: int = 0


def looked_over(config: ChainConfig) -> Survey:
    """Return what lies where the chain is to be; raises `AuditError` where none can be started."""
    checked(config)
    try:
        config.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        remote = remote_filesystem(config.dir)
        if remote:
            raise AuditError(f"{config.dir} is on {remote}; a chain needs a local file system")
        return survey(config.dir)
    except OSError as problem:
        raise AuditError(f"audit directory {config.dir}: {problem}") from problem


def checked(config: ChainConfig) -> ChainConfig:
    """Return the config; raises `AuditError` for what no chain can be started with."""
    if config.token_ids == "sealed":  # noqa: S105 - a mode
        if config.auditor_public is None:
            raise AuditError(
                "token ids are sealed to the auditor, and no auditor key is there: give one "
                "(auditor's public key in the key file) or set audit.token_ids to "
                "commit, plain or off"
            )
        if not usable_public(config.auditor_public):
            raise AuditError(
                "the auditor's public key is no usable X25519 key of 32 bytes or SM2 key of 64"
            )
    if len(config.seed) != 32:
        raise AuditError("a chain seed is 32 bytes")
    missing = {"config_sha256", "image"} - config.genesis.keys()
    if missing:
        raise AuditError(f"genesis lacks {', '.join(sorted(missing))}")
    return config


def genesis_members(config: ChainConfig, found: Survey) -> dict[str, Any]:
    """Return the members of the genesis record behind what lies on the volume."""
    genesis: dict[str, Any] = {
        "clock_source": "unknown",
        "clock_bound_ms": -1,
        **config.genesis,
        "checkpoint_records": config.checkpoint_records,
        "checkpoint_s": config.checkpoint_s,
        "heartbeat_s": config.heartbeat_s,
        "required_signers": [signer.key.line() for signer in config.signers],
        "prev_size": found.prev_size,
    }
    if config.escrow:
        genesis["escrow_sha256"] = hashlib.sha256(config.escrow.encode()).hexdigest()
    if found.prev_origin is not None:
        genesis["prev_origin"] = found.prev_origin
    if found.prev_note_sha256 is not None:
        genesis["prev_note_sha256"] = found.prev_note_sha256
    return genesis


def config_digest(settings: dict[str, Any]) -> str:
    """Return `config_sha256` of plain settings (secrets masked), for the genesis."""
    return hashlib.sha256(encode(fit(settings))).hexdigest()


def works(error: OSError | None, *, before: bool) -> bool:
    """Return whether the disk works, and say in the log where that is another than `before`."""
    if error is not None and before:
        log.critical("audit records cannot be written, it is tried again: %s", error)
    elif error is None and not before:
        log.warning("audit records are written again")
    return error is None
