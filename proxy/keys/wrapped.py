"""Key files whose secrets are wrapped: each is text that only the token that made it can open.

    pkcs11:<label of the wrapping key>:<hex of IV (12 bytes), ciphertext (32), tag (16)>

stands where 64 hexadecimal digits would; everything else of a key file is as ever. What is wrapped
is bound to its name (`proxy/keys/provider.py`), so that one cannot be put in another's place. Pure:
the token is a function.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.keys.file import KeyFileError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SCHEME = "pkcs11"
IV_BYTES, SECRET_BYTES, TAG_BYTES = 12, 32, 16
_TEXT = re.compile(r"pkcs11:([A-Za-z0-9._/-]{1,255}):([0-9a-f]{120})")


def split(text: str) -> tuple[str, bytes] | None:
    """Return (label, wrapped bytes) of a wrapped secret's text, or None if it is none."""
    found = _TEXT.fullmatch(text)
    return None if found is None else (found[1], bytes.fromhex(found[2]))


def join(label: str, wrapped: bytes) -> str:
    """Return a wrapped secret's text."""
    text = f"{SCHEME}:{label}:{wrapped.hex()}"
    assert split(text) == (label, wrapped)
    return text


def bound_to(name: str) -> bytes:
    """Return what a secret of that name is authenticated with."""
    return b"tongguan-keys/1\0" + name.encode()


def is_wrapped(data: bytes) -> bool:
    """Say whether something in a key file is wrapped."""
    return b'"pkcs11:' in data


def converted(path: Path, data: bytes, convert: Callable[[str, str], str | None]) -> bytes:
    """Return a key file's bytes with `convert(name, text)` in the place of each secret's text.

    None: the member is taken out. Members that are no key file's are left as they are: who parses
    the result says so. Raises `KeyFileError` for what is no JSON object.
    """
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise KeyFileError(f"{path}: not a JSON key file") from None
    for row, member, name in list(_secrets(document)):
        text = convert(name, row[member])
        if text is None:
            del row[member]
        else:
            row[member] = text
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _secrets(document: Any) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Yield (table, member, name) of each secret that stands in a document as text."""
    if not isinstance(document, dict):
        return
    for row in _tables(document.get("envelope_keys")):
        yield from _named(row, "root", f"envelope/{row.get('kid')}")
    prompts = document.get("prompt_keys")
    if isinstance(prompts, dict):
        for tenant in prompts:
            yield from _named(prompts, tenant, f"prompt/{tenant}")
    for row in _tables(document.get("chain_seeds")):
        yield from _named(row, "seed", f"chain/{row.get('id')}")
    for row in _tables(document.get("checkpoint_keys")):
        yield from _named(row, "private", f"checkpoint/{row.get('name')}/{row.get('scheme')}")


def _tables(rows: Any) -> Iterator[dict[str, Any]]:
    if isinstance(rows, list):
        yield from (row for row in rows if isinstance(row, dict))


def _named(
    row: dict[str, Any], member: str, name: str
) -> Iterator[tuple[dict[str, Any], str, str]]:
    if isinstance(row.get(member), str):
        yield row, member, name
