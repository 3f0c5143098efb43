"""The MAC chain: keys, MACs, and the line of one record.

Pure. A line is `JSON TAB hex(mac) LF`; `mac(n) = HMAC(k, raw prev || JSON)`, where prev is the MAC
of the record before (32 zero bytes in genesis). `Chain` is the writer's head: it moves by one
record at a time and can be set back to a durable one (`Head` is a value).

Keys only move on: behind a `rotate` the next one counts, and what came before it is erased once
that record is durable (until then the chain may be set back). Erasing is best effort in Python
(docs/audit.md, "MAC and keys").
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from kernels import wire
from proxy.audit import canonical
from proxy.keys.memory import Secret
from proxy.sm4.digest import Digest, new_digest

if TYPE_CHECKING:
    from proxy.audit.request import Pieces, RequestText

Alg = Literal["s256", "sm3"]
ALGS: tuple[Alg, ...] = ("s256", "sm3")
MAC_BYTES = 32
ZERO_MAC = "0" * 64
LINE_BYTES = 64 << 10
EPOCH_LIMIT = 999_999

# Names and punctuation, three numbers, two MACs; the longest line has 251.
_AROUND_BYTES = 256
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


def follows(new_key_id: str, old_key_id: str) -> bool:
    """Say whether a `rotate` may lead there: the next epoch, or the first of another seed."""
    new, old = parse_key_id(new_key_id), parse_key_id(old_key_id)
    if new is None or old is None or new[1] != old[1]:
        return False
    return new[2] == (old[2] + 1 if new[0] == old[0] else 0)


def ids_root(seed: bytes, origin: str) -> bytes:
    """Return what the segment keys of token ids come from where these are not sealed."""
    return hkdf(seed, b"tongguan audit ids\0" + origin.encode(), 32)


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


def _request_run_pure(
    mac: Mac,
    prev: str,
    kind: str,
    origin: str,
    seq: int,
    walls: list[int],
    monos: list[int],
    rows: list[Pieces],
    most: int,
) -> tuple[bytes, bytes]:
    lines, leaves = [], []
    for number, (wall_ns, mono_ns, row) in enumerate(zip(walls, monos, rows, strict=True)):
        head, model, middle, prompt, tail = row
        line, prev = _request_line_pure(
            mac, prev, kind, origin, seq + number, wall_ns, mono_ns,
            head, model, middle, prompt, tail,
        )  # fmt: skip
        if len(line) > most:
            raise ValueError(f"a line holds {most} bytes")
        lines.append(line)
        leaves.append(sha256(b"\0", line[:-1]))
    return b"".join(lines), b"".join(leaves)


_request_run = wire.runs(_request_run_pure)


class Head:
    """Where a chain stands: the next seq, the MAC of the record before it, which of its keys."""

    __slots__ = ("prev", "seq", "turn")

    def __init__(self, seq: int = 0, prev: str = ZERO_MAC, turn: int = 0) -> None:
        self.seq: Final = seq
        self.prev: Final = prev
        self.turn: Final = turn  # rotations so far


class Turn:
    """One key of a chain, from one `rotate` to the next."""

    __slots__ = ("alg", "epoch", "ids_root", "key", "key_id", "mac", "seed_id")

    def __init__(self, seed_id: str, alg: str, epoch: int, key: bytes, ids_root: bytes) -> None:
        self.seed_id = seed_id
        self.alg = alg
        self.epoch = epoch
        self.key_id = key_id(seed_id, alg, epoch)
        self.key = Secret(key)
        self.ids_root = ids_root
        self.mac = mac(alg, key)

    def next(self) -> Turn:
        """Return the next epoch of the same seed."""
        key = next_key(self.key.value())
        return Turn(self.seed_id, self.alg, self.epoch + 1, key, self.ids_root)


class Chain:
    """The writer's end of a chain."""

    __slots__ = (
        "_fixed",
        "_forgotten",
        "_kind",
        "_mac",
        "_origin",
        "_quoted_origin",
        "_turn",
        "_turns",
        "around_bytes",
        "prev",
        "seq",
    )

    def __init__(self, origin: str, seed_id: str, alg: Alg, seed: bytes) -> None:
        self._origin = origin
        self._quoted_origin = f'","origin":{_quoted(origin)},'
        self._turns = [self._first_turn(seed_id, alg, seed)]
        self._forgotten = 0  # turns before the first that is kept
        self._turn = 0
        self._fixed: dict[str, Any] = {}
        self._kind = ""
        self._mac = self._turns[0].mac
        self.around_bytes = 0  # a request's line has no more of them around its text
        self.seq = 0  # of the next record
        self.prev = ZERO_MAC  # MAC of the record before it, hex
        self._go_on(0)

    def _first_turn(self, seed_id: str, alg: str, seed: bytes) -> Turn:
        origin = self._origin
        return Turn(seed_id, alg, 0, chain_key(seed, alg, origin), ids_root(seed, origin))

    def _go_on(self, turn: int) -> None:
        """Write under the key of a turn from here on."""
        self._turn = turn
        current = self._turns[turn - self._forgotten]
        self._mac = current.mac
        self._fixed = {"v": 1, "origin": self._origin, "key_id": current.key_id}
        # The chain's own members of a request record, as they stand around the others.
        self._kind = f'"key_id":{_quoted(current.key_id)},"kind":"request",'
        self.around_bytes = _AROUND_BYTES + len((self._kind + self._quoted_origin).encode())

    @property
    def key_id(self) -> str:
        """The key that the next record is written under."""
        return self._turns[self._turn - self._forgotten].key_id

    @property
    def ids_root(self) -> bytes:
        """See `ids_root`; of the seed in use."""
        return self._turns[self._turn - self._forgotten].ids_root

    @property
    def head(self) -> Head:
        """Where the chain stands."""
        return Head(self.seq, self.prev, self._turn)

    def back_to(self, head: Head) -> None:
        """Forget what was chained after `head`, but for the keys it was to go on to."""
        self.seq, self.prev = head.seq, head.prev
        if head.turn != self._turn:
            self._go_on(head.turn)

    def prepare(self, seed: tuple[str, bytes] | None = None) -> bool:
        """Make the key that the next `rotate` behind all others leads to.

        It is the next epoch's, or the first of another seed (id, 32 bytes). False: the epochs are
        used up, and there is none.
        """
        last = self._turns[-1]
        if seed is not None and seed[0] != last.seed_id:
            self._turns.append(self._first_turn(seed[0], last.alg, seed[1]))
        elif last.epoch >= EPOCH_LIMIT:
            return False
        else:
            self._turns.append(last.next())
        return True

    def rotate_line(self, wall_ns: int, mono_ns: int) -> bytes:
        """Chain a `rotate` under the key in use, and go on to the one that was prepared."""
        new = self._turns[self._turn + 1 - self._forgotten]
        record = self._record("rotate", {"new_key_id": new.key_id}, wall_ns, mono_ns)
        record["new_key_mac"] = new.mac.hex(bytes.fromhex(self.prev), canonical.encode(record))
        line = self._linked(canonical.encode(record))
        self._go_on(self._turn + 1)
        return line

    def forget_before(self, turn: int) -> None:
        """Erase the keys before those of a turn: records of theirs are durable."""
        while self._forgotten < turn:
            self._turns.pop(0).key.erase()
            self._forgotten += 1

    def erase(self) -> None:
        """Erase every key: the chain has ended."""
        for turn in self._turns:
            turn.key.erase()

    def _record(
        self, kind: str, members: dict[str, Any], wall_ns: int, mono_ns: int
    ) -> dict[str, Any]:
        record = members | self._fixed
        record["kind"] = kind
        record["seq"] = self.seq
        record["wall_ns"] = str(wall_ns)
        record["mono_ns"] = str(mono_ns)
        record["prev"] = self.prev
        return record

    def line(self, kind: str, members: dict[str, Any], wall_ns: int, mono_ns: int) -> bytes:
        """Chain one record and return its line; `members` fit (canonical.fit).

        Raises ValueError, with the chain where it was, when the line would exceed `LINE_BYTES`.
        """
        return self._linked(canonical.encode(self._record(kind, members, wall_ns, mono_ns)))

    def request_line(self, text: RequestText, wall_ns: int, mono_ns: int) -> bytes:
        """As `line`, for a request."""
        # Of the two MACs only one is known in C.
        make = _request_line_pure if isinstance(self._mac, Hmac) else _request_line
        head, model, middle, prompt, tail = text.pieces
        line, made = make(
            self._mac,
            self.prev,
            self._kind,
            self._quoted_origin,
            self.seq,
            wall_ns,
            mono_ns,
            head,
            model,
            middle,
            prompt,
            tail,
        )
        if len(line) > LINE_BYTES:
            raise ValueError(f"a record of {len(line) - 66} bytes; a line holds {LINE_BYTES}")
        self.seq += 1
        self.prev = made
        return line

    def request_run(
        self, walls: list[int], monos: list[int], rows: list[Pieces]
    ) -> tuple[bytes, bytes]:
        """As `request_line` for each row and its times, at least one; all of them or none.

        Returns the lines, joined, and their leaf hashes (`tree.leaf_hash`), joined.
        """
        make = _request_run_pure if isinstance(self._mac, Hmac) else _request_run
        lines, leaves = make(
            self._mac,
            self.prev,
            self._kind,
            self._quoted_origin,
            self.seq,
            walls,
            monos,
            rows,
            LINE_BYTES,
        )
        self.seq += len(rows)
        self.prev = lines[-65:-1].decode()
        return lines, leaves

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
