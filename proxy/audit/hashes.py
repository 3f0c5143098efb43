"""Keyed hashes of prompts, parameters and outputs (docs/audit.md, "Hashes").

`key` is the tenant's prompt key; None is the plain mode: bare SHA-256 over the same bytes, which a
dictionary can open. Pure; nothing is kept but hash states, and the text of choices behind the
first, up to a bound.
"""

from __future__ import annotations

import hashlib
import re
import struct
from functools import lru_cache
from typing import TYPE_CHECKING

from proxy.audit.chain import Hmac, mac

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.audit.chain import Mac
    from proxy.sm4.digest import Digest

BUFFER_BYTES = 4 << 20
CHOICES = 128

_U32 = struct.Struct(">I").pack
_SURROGATES = re.compile(r"[\ud800-\udfff]")


@lru_cache(maxsize=1024)
def _absorbed(key: bytes) -> Hmac:
    """Return the HMAC of a tenant's key, for what comes in pieces."""
    return Hmac("s256", key)


@lru_cache(maxsize=1024)
def _mac(key: bytes) -> Mac:
    """Return the MAC of a tenant's key: absorbing it costs more than hashing most prompts."""
    return mac("s256", key)


def forget_keys() -> None:
    """Let go of every key that was absorbed: one of them was destroyed."""
    _absorbed.cache_clear()
    _mac.cache_clear()


def _whole(key: bytes | None, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if key is None else _mac(key).hex(data)


def _framed(key: bytes | None, *parts: bytes) -> str:
    if key is not None:
        return _mac(key).framed(*parts)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(_U32(len(part)))
        digest.update(part)
    return digest.hexdigest()


def whole_hash(key: bytes | None, body: bytes) -> str:
    """Return the hash of a body as it came, hex; no framing, so it can be taken in passing."""
    return _whole(key, body)


def params_hash(key: bytes | None, rest: bytes) -> str:
    """Return the hash of u32 big-endian length || bytes, hex."""
    return _framed(key, rest)


def prompt_hash(key: bytes | None, prompt: bytes, model: bytes, temperature: bytes) -> str:
    """Return the prompt's hash, hex: the exact bytes received, nothing re-encoded."""
    return _framed(key, prompt, model, temperature)


def output_hash(key: bytes | None, texts: Mapping[int, str]) -> tuple[str | None, int]:
    """Return (hash, length) of an answer that is there as a whole, by choice index."""
    if len(texts) == 1 and (text := texts.get(0)) is not None and text.isascii():
        return _whole(key, text.encode()), len(text)
    hasher = OutputHasher(key)
    for index, text in sorted(texts.items()):
        hasher.feed(index, text)
    return hasher.finish()


class OutputHasher:
    """The hash of what the client was handed: choices in index order, joined by 0x00.

    Choice 0 goes straight into the hash; text of others waits, at most `BUFFER_BYTES` together and
    `CHOICES` choices: beyond that the output has a length but no hash.
    """

    __slots__ = ("_buffered", "_first", "_hash", "_key", "_length", "_others", "_over")

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._first = b""  # an answer that came in one piece needs no hash object
        self._hash: Digest | None = None
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
            self._first_choice(data)
        elif not 0 < index < CHOICES or self._buffered + len(data) > BUFFER_BYTES:
            self._over = True
        else:
            self._buffered += len(data)
            self._others.setdefault(index, []).append(data)

    def feed_bytes(self, data: bytes) -> None:
        """Take bytes as they are, as of choice 0."""
        self._length += len(data)
        self._first_choice(data)

    def _first_choice(self, data: bytes) -> None:
        if self._hash is not None:
            self._hash.update(data)
        elif not self._first:
            self._first = data
        else:
            key = self._key
            self._hash = hashlib.sha256() if key is None else _absorbed(key).begin()
            self._hash.update(self._first)
            self._hash.update(data)

    def finish(self) -> tuple[str | None, int]:
        """Return (hex or None, length in bytes of what is hashed, joiners included)."""
        last = max(self._others, default=0)
        if self._over:
            return None, self._length
        rest = b"".join(
            [b"\0" + b"".join(self._others.get(index, ())) for index in range(1, last + 1)]
        )
        self._others.clear()
        if self._hash is None:
            return _whole(self._key, self._first + rest), self._length + last
        self._hash.update(rest)
        key, state = self._key, self._hash
        digest = state.digest().hex() if key is None else _absorbed(key).end(state)
        return digest, self._length + last
