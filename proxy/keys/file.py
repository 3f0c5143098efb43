"""Keys in a JSON file that only its owner can read (docs/keys.md).

One layout for three roles: `sidecar.json` holds all a receiver needs, `client.json` a caller's
envelope key and nothing else, `auditor.json` the auditor's pair with the prompt keys and chain
seeds. A file that anybody else may read, or that somebody else owns, is refused. No message shows
key bytes or says where in a key the fault lies.
"""

from __future__ import annotations

import os
import re
import stat
from sys import intern
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.discreet import Discreet
from proxy.keys.pace import breathe, uncollected
from proxy.keys.provider import KeySourceError
from proxy.sm4.keyring import KID_BYTES, PAD_BYTES_DEFAULT, ROOT_BYTES, EnvelopeKey, KeyringError
from proxy.sm4.signature import PUBLIC_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FORMAT = "tongguan-keys/1"
ROLES = ("sidecar", "client", "auditor")
FILE_BYTES_MAX = 4 << 20
MODE = 0o600
_FORBIDDEN_BITS = 0o077


class KeyFileError(KeySourceError):
    """A key file is refused; the message names the file and what to do, never a secret."""


class _KeyRow(msgspec.Struct, forbid_unknown_fields=True):
    kid: str
    root: str
    client: str
    audience: str
    tenant: str
    suite: int
    digest: str
    not_before_ms: int
    not_after_ms: int
    pad: int = PAD_BYTES_DEFAULT
    writers: int = 1
    require_mac: bool = False
    require_signature: bool = False
    # Not written where there are none: sidecars of before know no such members.
    scheme: str | msgspec.UnsetType = msgspec.UNSET
    sign_public: str | msgspec.UnsetType = msgspec.UNSET
    sign_private: str | msgspec.UnsetType = msgspec.UNSET


class _SeedRow(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    seed: str


class _SignerRow(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    scheme: str
    private: str


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: str
    role: str
    # As they stand: a row becomes a key before the next one is looked at.
    envelope_keys: list[msgspec.Raw] = []
    prompt_keys: dict[str, str] = {}
    chain_seeds: list[_SeedRow] = []
    auditor_public: str = ""
    auditor_private: str = ""
    checkpoint_keys: list[_SignerRow] = []
    verify_keys: list[str] = []
    # Not written where there are none: sidecars of before know no such members.
    revoked: list[str] = []
    chain_turn: str = ""


class KeyFile(Discreet, frozen=True):
    """A key file's contents. `chain_seeds` in order of issue: the last one is in use.

    `checkpoint_keys` (name, scheme, private) sign every checkpoint, all of them; `verify_keys` are
    the public keys of signers and witnesses, as lines of the signed-note format. `revoked`: kids
    that are never to be used again, wherever else they stand. `chain_turn`: at another word than
    the one before a living audit chain goes on to its next key.
    """

    shown = ("role",)

    role: str
    envelope_keys: tuple[EnvelopeKey, ...]
    prompt_keys: Mapping[str, bytes]
    chain_seeds: tuple[tuple[str, bytes], ...]
    auditor_public: bytes | None
    auditor_private: bytes | None
    checkpoint_keys: tuple[tuple[str, str, bytes], ...] = ()
    verify_keys: tuple[str, ...] = ()
    revoked: tuple[bytes, ...] = ()
    chain_turn: str = ""


def read(path: Path) -> KeyFile:
    """Read a key file of any role; raises `KeyFileError`, or OSError if it cannot be opened."""
    return parse(path, read_bytes(path))


def read_bytes(path: Path, *, directory: int | None = None, mounted: bool = False) -> bytes:
    """Return what a key file holds; raises `KeyFileError`, or OSError if it cannot be opened.

    `directory`: a descriptor that `path`'s last part is looked up in. `mounted`: see
    `check_access`.
    """
    # The descriptor that is checked is the one that is read: a name may change in between.
    name = path if directory is None else path.name
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    try:
        groups = frozenset({os.getegid(), *os.getgroups()}) if mounted else frozenset()
        check_access(path, os.fstat(descriptor), os.geteuid(), groups)
        data = b""
        while len(data) <= FILE_BYTES_MAX and (part := os.read(descriptor, FILE_BYTES_MAX + 1)):
            data += part
    finally:
        os.close(descriptor)
    if len(data) > FILE_BYTES_MAX:
        raise KeyFileError(f"{path}: larger than {FILE_BYTES_MAX} bytes, no key file")
    return data


def check_access(
    path: Path, status: os.stat_result, uid: int, groups: frozenset[int] = frozenset()
) -> None:
    """Raise `KeyFileError` unless this is a plain file of `uid` or root that nobody else reads.

    What root owns may be read by one of `groups`: so Kubernetes mounts a secret for a process that
    is not root (`fsGroup`).
    """
    if not stat.S_ISREG(status.st_mode):
        raise KeyFileError(f"{path}: not a regular file")
    if status.st_uid not in {uid, 0}:
        raise KeyFileError(
            f"{path}: owned by uid {status.st_uid}, not by this user ({uid}) or root; "
            f"run: chown {uid} {path}"
        )
    mode = stat.S_IMODE(status.st_mode)
    forbidden = _FORBIDDEN_BITS
    if groups and status.st_uid == 0 and status.st_gid in groups:
        forbidden &= ~stat.S_IRGRP
    if mode & forbidden:
        raise KeyFileError(
            f"{path}: mode {mode:04o} lets others at the keys; run: chmod 600 {path}"
        )


def parse(path: Path, data: bytes) -> KeyFile:
    """Return the contents of a key file's bytes; `path` is for messages. Raises `KeyFileError`."""
    try:
        document = msgspec.json.decode(data, type=_Document)
    except msgspec.ValidationError as problem:
        raise KeyFileError(f"{path}: {_shape_fault(str(problem))}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise KeyFileError(
            f"{path}: not a JSON key file; make one with: tongguan keys new"
        ) from None
    if document.format != FORMAT:
        raise KeyFileError(f"{path}: format: expected {FORMAT}")
    if document.role not in ROLES:
        raise KeyFileError(f"{path}: role: expected sidecar, client or auditor")
    try:
        with uncollected():
            keys = _envelope_keys(document.envelope_keys)
        _check_role(document.role, keys)
        return KeyFile(
            role=document.role,
            envelope_keys=keys,
            prompt_keys={
                tenant: _secret(f"prompt_keys[{i}]", text)
                for i, (tenant, text) in enumerate(document.prompt_keys.items())
            },
            chain_seeds=tuple(
                (_seed_id(i, row.id), _secret(f"chain_seeds[{i}].seed", row.seed))
                for i, row in enumerate(document.chain_seeds)
            ),
            auditor_public=_auditor(document.auditor_public),
            auditor_private=_optional("auditor_private", document.auditor_private),
            checkpoint_keys=tuple(
                (row.name, row.scheme, _secret(f"checkpoint_keys[{i}].private", row.private))
                for i, row in enumerate(document.checkpoint_keys)
            ),
            verify_keys=tuple(document.verify_keys),
            revoked=tuple(
                _bytes(f"revoked[{i}]", kid, KID_BYTES) for i, kid in enumerate(document.revoked)
            ),
            chain_turn=_word("chain_turn", document.chain_turn),
        )
    except KeyringError as problem:
        raise KeyFileError(f"{path}: {problem}") from None


def _word(name: str, text: str) -> str:
    if text and not (len(text) <= 64 and text.isascii() and text.isalnum()):
        raise KeyringError(f"{name}: expected at most 64 letters and digits")
    return text


def _check_role(role: str, keys: tuple[EnvelopeKey, ...]) -> None:
    if role == "sidecar" and any(key.sign_private for key in keys):
        raise KeyringError(
            "envelope_keys: sign_private is the client's alone; a receiver that has it could sign "
            "in the client's name"
        )


_PLAIN_NAMES = {"str": "text", "int": "a whole number", "bool": "true or false",
                "array": "a list", "object": "an object"}  # fmt: skip
_AT = re.compile(r"(.*?)(?: - at `(?:key in )?\$\.?(.*)`)?", re.DOTALL)
_MEMBER = re.compile(r"Object (contains unknown|missing required) field `(.*)`", re.DOTALL)
_TYPES = re.compile(r"Expected `(\w+)`, got `\w+`")


def _shape_fault(text: str, within: str = "") -> str:
    """Say in our words which member msgspec stumbled on; it names types, so no value is shown."""
    found = _AT.fullmatch(text)
    assert found is not None  # the pattern's first part takes anything
    what, where = found[1], ".".join(part for part in (within, found[2]) if part)
    if member := _MEMBER.fullmatch(what):
        name = member[2].encode("unicode_escape").decode()[:64]
        full = f"{where}.{name}" if where else name
        return f"{full}: " + ("missing" if member[1].startswith("missing") else "no such member")
    types = _TYPES.fullmatch(what)
    kind = _PLAIN_NAMES.get(types[1], types[1]) if types else "another value"
    return f"{where or 'the file'}: expected {kind}"


def _bytes(name: str, text: str, size: int) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    # fromhex skips spaces, so the text's length is checked too: a key is written in one way.
    if len(value) != size or len(text) != 2 * size:
        if text.startswith("pkcs11:"):
            raise KeyringError(f"{name}: wrapped by a PKCS#11 token: set keys.provider to pkcs11")
        raise KeyringError(f"{name}: expected {2 * size} hexadecimal digits")
    return value


def _secret(name: str, text: str) -> bytes:
    return _bytes(name, text, 32)


def _optional(name: str, text: str) -> bytes | None:
    return _secret(name, text) if text else None


def _auditor(text: str) -> bytes | None:
    """Return an auditor's public key: X25519 of 32 bytes, or SM2 of 64."""
    if len(text) == 2 * PUBLIC_BYTES["sm2"]:
        return _bytes("auditor_public", text, PUBLIC_BYTES["sm2"])
    return _optional("auditor_public", text)


def _seed_id(index: int, text: str) -> str:
    # It stands in the audit records' key_id, whose parts are separated by dots.
    if not 1 <= len(text) <= 64 or not text.isascii() or not text.isalnum():
        raise KeyringError(f"chain_seeds[{index}].id: expected 1-64 letters and digits")
    return text


_DECODER = msgspec.json.Decoder(_KeyRow)
_ROWS_AT_ONCE = 32


def _envelope_keys(rows: list[msgspec.Raw]) -> tuple[EnvelopeKey, ...]:
    """Return the keys; one that is there twice, with different contents, is refused."""
    known: dict[bytes, EnvelopeKey] = {}
    decode = _DECODER.decode
    for number, raw in enumerate(rows):
        if number % _ROWS_AT_ONCE == 0:
            breathe()
        try:
            row = decode(raw)
            key = _plain_key(row) or _envelope_key(row)
        except KeyringError as problem:
            raise KeyringError(f"envelope_keys[{number}].{problem}") from None
        except msgspec.ValidationError as problem:
            fault = _shape_fault(str(problem), f"envelope_keys[{number}]")
            raise KeyringError(fault) from None
        same = known.setdefault(key.kid, key)
        if same is not key and same != key:
            raise KeyringError(f"kid {key.kid.hex()} is known already, with other contents")
    return tuple(known.values())


def _plain_key(row: _KeyRow) -> EnvelopeKey | None:
    """Return a key without a signature's; None: look closer, it has one or something is wrong."""
    if row.scheme or row.sign_public or row.sign_private:
        return None
    if len(row.kid) != 2 * KID_BYTES or len(row.root) != 2 * ROOT_BYTES:
        return None
    try:
        kid, root = bytes.fromhex(row.kid), bytes.fromhex(row.root)
    except ValueError:
        return None
    if len(kid) != KID_BYTES or len(root) != ROOT_BYTES:
        return None
    return EnvelopeKey(
        kid,
        root,
        row.client,
        # The same few in a hundred thousand keys: one of each is kept.
        intern(row.audience),
        intern(row.tenant),
        row.suite,
        intern(row.digest),
        row.not_before_ms,
        row.not_after_ms,
        row.pad,
        row.writers,
        row.require_mac,
        row.require_signature,
    )


def _envelope_key(row: _KeyRow) -> EnvelopeKey:
    scheme = row.scheme or ""
    return EnvelopeKey(
        _bytes("kid", row.kid, 8),
        _bytes("root", row.root, 32),
        row.client,
        row.audience,
        row.tenant,
        row.suite,
        row.digest,
        row.not_before_ms,
        row.not_after_ms,
        row.pad,
        row.writers,
        row.require_mac,
        row.require_signature,
        scheme,
        _public("sign_public", row) if scheme or row.sign_public else b"",
        _secret("sign_private", row.sign_private) if row.sign_private else b"",
    )


def _public(name: str, row: _KeyRow) -> bytes:
    text = row.sign_public or ""
    size = PUBLIC_BYTES.get(row.scheme or "", 0)
    # Of an unknown scheme: the key is refused for that, or for a public key without one.
    return _bytes(name, text, size) if size else text.encode()


def _raw_row(**members: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(_KeyRow(**members)))


def encode(file: KeyFile) -> bytes:
    """Return a key file's bytes."""
    document = _Document(
        format=FORMAT,
        role=file.role,
        envelope_keys=[
            _raw_row(
                kid=key.kid.hex(),
                root=key.root.hex(),
                client=key.client,
                audience=key.audience,
                tenant=key.tenant,
                suite=key.suite,
                digest=key.digest,
                not_before_ms=key.not_before_ms,
                not_after_ms=key.not_after_ms,
                pad=key.pad,
                writers=key.writers,
                require_mac=key.require_mac,
                require_signature=key.require_signature,
                scheme=key.scheme or msgspec.UNSET,
                sign_public=key.sign_public.hex() or msgspec.UNSET,
                sign_private=key.sign_private.hex() or msgspec.UNSET,
            )
            for key in file.envelope_keys
        ],
        prompt_keys={tenant: key.hex() for tenant, key in file.prompt_keys.items()},
        chain_seeds=[_SeedRow(id=seed_id, seed=seed.hex()) for seed_id, seed in file.chain_seeds],
        auditor_public=file.auditor_public.hex() if file.auditor_public else "",
        auditor_private=file.auditor_private.hex() if file.auditor_private else "",
        checkpoint_keys=[
            _SignerRow(name=name, scheme=scheme, private=private.hex())
            for name, scheme, private in file.checkpoint_keys
        ],
        verify_keys=list(file.verify_keys),
        revoked=[kid.hex() for kid in file.revoked],
        chain_turn=file.chain_turn,
    )
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
