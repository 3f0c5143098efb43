"""Keyed hashes of prompts, parameters and outputs (docs/audit.md, "Hashes").

`key` is the tenant's prompt key; None is the plain mode: bare SHA-256 over the same bytes, which a
dictionary can open. Pure; nothing is kept but hash states, and the text of choices behind the
first, up to a bound.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from typing import Protocol

BUFFER_BYTES = 4 << 20
CHOICES = 128

_SURROGATES = re.compile("[\ud800-\udfff]")


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...

    def hexdigest(self) -> str: ...


def _new(key: bytes | None) -> _Hash:
    return hashlib.sha256() if key is None else hmac.new(key, digestmod="sha256")


def params_hash(key: bytes | None, *parts: bytes) -> str:
    """Return the hash of parts, each framed as u32 big-endian length || bytes; hex."""
    state = _new(key)
    for part in parts:
        state.update(struct.pack(">I", len(part)))
        state.update(part)
    return state.hexdigest()


def prompt_hash(key: bytes | None, prompt: bytes, model: bytes, temperature: bytes) -> str:
    """Return the prompt's hash, hex: the exact bytes received, nothing re-encoded."""
    return params_hash(key, prompt, model, temperature)


class OutputHasher:
    """The hash of what the client was handed: choices in index order, joined by 0x00.

    Choice 0 goes straight into the hash; text of others waits, at most `BUFFER_BYTES` together and
    `CHOICES` choices: beyond that the output has a length but no hash.
    """

    __slots__ = ("_buffered", "_hash", "_length", "_others", "_over")

    def __init__(self, key: bytes | None) -> None:
        self._hash = _new(key)
        self._length = 0
        self._buffered = 0
        self._others: dict[int, list[bytes]] = {}
        self._over = False

    def feed(self, index: int, text: str) -> None:
        """Take a content delta of one choice."""
        try:
            data = text.encode()
        except UnicodeEncodeError:
            data = _SURROGATES.sub("\ufffd", text).encode()
        self._length += len(data)
        if index == 0:
            self._hash.update(data)
        elif not 0 < index < CHOICES or self._buffered + len(data) > BUFFER_BYTES:
            self._over = True
        else:
            self._buffered += len(data)
            self._others.setdefault(index, []).append(data)

    def finish(self) -> tuple[str | None, int]:
        """Return (hex or None, length in bytes of what is hashed, joiners included)."""
        last = max(self._others, default=0)
        if self._over:
            return None, self._length
        for index in range(1, last + 1):
            self._hash.update(b"\0" + b"".join(self._others.get(index, ())))
        self._others.clear()
        return self._hash.hexdigest(), self._length + last
