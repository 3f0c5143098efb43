"""The MAC chain: keys, MACs, and the line of one record.

Pure. A line is `JSON TAB hex(mac) LF`; `mac(n) = HMAC(k, raw prev || JSON)`, where prev is the MAC
of the record before (32 zero bytes in genesis). `Chain` is the writer's head: it moves by one
record at a time and can be set back to a durable one (`Head` is a value).

Erasing keys is best effort in Python: bytes objects stay until collected (docs/audit.md, "Keys").
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kernels import wire
from proxy.audit import canonical
from proxy.sm4.digest import Digest, new_digest

if TYPE_CHECKING:
    from proxy.audit.request import RequestText

Alg = Literal["s256", "sm3"]
ALGS: tuple[Alg, ...] = ("s256", "sm3")
MAC_BYTES = 32
ZERO_MAC = "0" * 64
LINE_BYTES = 64 << 10
EPOCH_LIMIT = 1 << 20

_BLOCK_BYTES = 64
_U32 = struct.Struct(">I").pack
_DIGESTS = {"s256": "sha256", "sm3": "sm3"}


def _quoted(text: Any) -> str:
    return canonical.encode({"": text})[4:-1].decode()


def hkdf(ikm: bytes, info: bytes, length: int, salt: bytes = b"") -> bytes:
    """Return HKDF-SHA256 (RFC 5869), at most 255 blocks of 32 bytes."""
    prk = hmac.digest(salt or bytes(32), ikm, "sha256")
    return hkdf_expand(prk, info, length)


def hkdf_expand(prk: bytes, info: bytes, length: int) -> bytes:
    """Return HKDF-Expand-SHA256 (RFC 5869, 2.3)."""
    assert 0 < length <= 255 * 32
    out = block = b""
    for counter in range(1, -(-length // 32) + 1):
        block = hmac.digest(prk, block + info + bytes([counter]), "sha256")
        out += block
    return out[:length]


def chain_key(seed: bytes, alg: str, origin: str) -> bytes:
    """Return k(0) of a chain: 32 bytes."""
    info = b"\0".join((b"tongguan audit v1", alg.encode(), origin.encode()))
    return hkdf(seed, info, 32)


def next_key(key: bytes) -> bytes:
    """Return k(e + 1) of k(e)."""
    return hkdf(key, b"audit epoch", 32)


def key_id(seed_id: str, alg: str, epoch: int) -> str:
    """Return the `key_id` member."""
    return f"{seed_id}.{alg}.{epoch}"


def parse_key_id(text: str) -> tuple[str, str, int] | None:
    """Return (seed id, alg, epoch), or None if it is none of ours."""
    seed_id, _, rest = text.rpartition(".")
    seed_id, _, alg = seed_id.rpartition(".")
    plain = rest.isascii() and rest.isdigit() and str(int(rest[:10])) == rest
    if not seed_id or alg not in ALGS or not plain or int(rest) > EPOCH_LIMIT:
        return None
    return seed_id, alg, int(rest)


class Hmac:
    """HMAC (RFC 2104) with the key absorbed once: a MAC is then two hashes and no set-up."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, alg: str, key: bytes) -> None:
        assert len(key) <= _BLOCK_BYTES
        block = key.ljust(_BLOCK_BYTES, b"\0")
        name = _DIGESTS[alg]
        self._inner, self._outer = new_digest(name), new_digest(name)
        self._inner.update(bytes(b ^ 0x36 for b in block))
        self._outer.update(bytes(b ^ 0x5C for b in block))

    def begin(self) -> Digest:
        """Return the inner hash, to be fed with the message and given to `end`."""
        return self._inner.copy()

    def end(self, inner: Digest) -> str:
        """Return the MAC of what `inner` was fed with, as 64 lower-case hex characters."""
        outer = self._outer.copy()
        outer.update(inner.digest())
        return outer.digest().hex()

    def hex(self, *parts: bytes) -> str:
        """Return the MAC of the parts, joined, as 64 lower-case hex characters."""
        inner = self._inner.copy()
        for part in parts:
            inner.update(part)
        return self.end(inner)

    def framed(self, *parts: bytes) -> str:
        """Return the MAC of u32 big-endian length || part for each part, hex."""
        return self.hex(*(item for part in parts for item in (_U32(len(part)), part)))


class Mac(Protocol):
    """A MAC with its key absorbed: `Hmac`, or its like in C."""

    def hex(self, *parts: bytes) -> str:
        """See `Hmac`."""
        ...

    def framed(self, *parts: bytes) -> str:
        """See `Hmac`."""
        ...


def _sha256_pure(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def _mac_pure(key: bytes) -> Mac:
    return Hmac("s256", key)


_mac_s256, sha256 = wire.macs(_mac_pure, _sha256_pure)


def mac(alg: str, key: bytes) -> Mac:
    """Return the MAC of a key of at most 64 bytes."""
    return _mac_s256(key) if alg == "s256" else Hmac(alg, key)


def _request_line_pure(
    mac: Mac,
    prev: str,
    kind: str,
    origin: str,
    seq: int,
    wall_ns: int,
    mono_ns: int,
    head: str,
    model: str,
    middle: str,
    prompt: str,
    tail: str,
) -> tuple[bytes, str]:
    data = (
        f'{{{head}{kind}{model}"mono_ns":"{mono_ns}{origin}{middle}"prev":"{prev}",{prompt}'
        f'"seq":{seq},{tail}"v":1,"wall_ns":"{wall_ns}"}}'
    ).encode()
    made = mac.hex(bytes.fromhex(prev), data)
    return b"%b\t%b\n" % (data, made.encode()), made


_request_line = wire.lines(_request_line_pure)


@dataclass(frozen=True, slots=True)
class Head:
    """Where a chain stands: the next seq, and the MAC of the record before it."""

    seq: int = 0
    prev: str = ZERO_MAC


class Chain:
    """The writer's end of a chain."""

    __slots__ = ("_fixed", "_kind", "_mac", "_origin", "prev", "seq")

    def __init__(self, origin: str, seed_id: str, alg: Alg, seed: bytes) -> None:
        self._fixed = {"v": 1, "origin": origin, "key_id": key_id(seed_id, alg, 0)}
        self._mac = mac(alg, chain_key(seed, alg, origin))
        # The chain's own members of a request record, as they stand around the others.
        self._kind = f'"key_id":{_quoted(self._fixed["key_id"])},"kind":"request",'
        self._origin = f'","origin":{_quoted(origin)},'
        self.seq = 0  # of the next record
        self.prev = ZERO_MAC  # MAC of the record before it, hex

    def back_to(self, head: Head) -> None:
        """Forget what was chained after `head`."""
        self.seq, self.prev = head.seq, head.prev

    def line(self, kind: str, members: dict[str, Any], wall_ns: int, mono_ns: int) -> bytes:
        """Chain one record and return its line; `members` fit (canonical.fit).

        Raises ValueError, with the chain where it was, when the line would exceed `LINE_BYTES`.
        """
        record = members | self._fixed
        record["kind"] = kind
        record["seq"] = self.seq
        record["wall_ns"] = str(wall_ns)
        record["mono_ns"] = str(mono_ns)
        record["prev"] = self.prev
        return self._linked(canonical.encode(record))

    def request_line(self, text: RequestText, wall_ns: int, mono_ns: int) -> bytes:
        """As `line`, for a request."""
        # Of the two MACs only one is known in C.
        make = _request_line_pure if isinstance(self._mac, Hmac) else _request_line
        line, made = make(
            self._mac,
            self.prev,
            self._kind,
            self._origin,
            self.seq,
            wall_ns,
            mono_ns,
            text.head,
            text.model,
            text.middle,
            text.prompt,
            text.tail,
        )
        if len(line) > LINE_BYTES:
            raise ValueError(f"a record of {len(line) - 66} bytes; a line holds {LINE_BYTES}")
        self.seq += 1
        self.prev = made
        return line

    def _linked(self, data: bytes) -> bytes:
        if len(data) > LINE_BYTES - 66:
            raise ValueError(f"a record of {len(data)} bytes; a line holds {LINE_BYTES}")
        made = self._mac.hex(bytes.fromhex(self.prev), data)
        self.seq += 1
        self.prev = made
        return b"%b\t%b\n" % (data, made.encode())


def mac_of(alg: str, key: bytes, prev: str, data: bytes) -> str:
    """Return the MAC of one record, hex."""
    return Hmac(alg, key).hex(bytes.fromhex(prev), data)


def sha256_hex(data: bytes) -> str:
    """Return SHA-256 as hex."""
    return hashlib.sha256(data).hexdigest()
