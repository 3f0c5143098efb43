"""The plain case of verification, many lines at a time: records of requests that go on rightly.

`take` eats lines as long as nothing is to be said of them, and stops before the first line that
might be a finding, or is of another kind; that one is `ChainCheck`'s. So it is quick and cannot
misjudge: it makes no finding. In C where there is a compiler (`kernels.wire`); the twin here is the
oracle and the fallback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kernels import wire
from proxy.audit.canonical import encode
from proxy.audit.chain import Hmac
from proxy.audit.ids import IDS_LIMIT, entry_bytes
from proxy.audit.reader import Line, parse_line
from proxy.audit.record import OUTCOMES, PHASES
from proxy.audit.tree import leaf_hash

if TYPE_CHECKING:
    from proxy.audit.chain import Mac

_OUTCOMES = tuple(sorted(word.encode() for word in OUTCOMES))
_PHASES = tuple(sorted(word.encode() for word in PHASES))
# What a time may be at most; larger ones are the slow way's.
_TIME_LIMIT = 1 << 63


class Before(NamedTuple):
    """What the next line has to continue; `origin` as in the chain, `prev` in hex.

    `quiet_ns` is the longest silence that is none to report; 0: any.
    """

    origin: str
    key_id: str
    prev: str
    seq: int
    wall_ns: int
    mono_ns: int
    quiet_ns: int


class Taken(NamedTuple):
    """How far it went: the byte behind the last line taken, and the state there.

    `ids_end` is the furthest end of an entry of token ids, by the record `ids_seq`; `leaves` are
    the lines' leaf hashes, one behind another.
    """

    end: int
    records: int
    prev: bytes
    wall_ns: int
    mono_ns: int
    first_mono_ns: int
    ids_end: int
    ids_seq: int
    leaves: bytes


def take_requests_pure(
    data: bytes,
    start: int,
    stop: int,
    mac: Mac | None,
    origin: bytes,
    key_id: bytes,
    prev: bytes,
    seq: int,
    wall_ns: int,
    mono_ns: int,
    quiet_ns: int,
    outcomes: tuple[bytes, ...],
    phases: tuple[bytes, ...],
) -> Taken:
    """See `take`; `origin` and `key_id` as they stand between their quotes."""
    at, first, first_mono_ns, ids_end, ids_seq = start, seq, 0, 0, 0
    leaves = []
    while (newline := data.find(b"\n", at, stop)) >= 0:
        line = parse_line(data[at : newline + 1])
        if not isinstance(line, Line):
            break
        record = line.record
        fixed = (record["v"], record.get("kind"), record["seq"], record["prev"].encode())
        if fixed != (1, "request", seq, prev) or record["outcome"].encode() not in outcomes:
            break
        names = _inside(record["origin"]), _inside(record["key_id"])
        if names != (origin, key_id) or record["phase"].encode() not in phases:
            break
        wall, mono = int(record["wall_ns"]), int(record["mono_ns"])
        quiet = quiet_ns and mono - mono_ns > quiet_ns
        if not (wall_ns <= wall < _TIME_LIMIT and mono_ns <= mono < _TIME_LIMIT) or quiet:
            break
        if mac is not None and mac.hex(bytes.fromhex(prev.decode()), line.data) != line.mac:
            break
        wall_ns, mono_ns = wall, mono
        end = _ids_end(record)
        if end > ids_end:
            ids_end, ids_seq = end, seq
        leaves.append(leaf_hash(data[at:newline]))
        first_mono_ns = first_mono_ns if seq > first else mono
        prev, seq, at = line.mac.encode(), seq + 1, newline + 1
    count = seq - first
    packed = b"".join(leaves)
    return Taken(at, count, prev, wall_ns, mono_ns, first_mono_ns, ids_end, ids_seq, packed)


def _inside(text: str) -> bytes:
    return encode({"": text})[5:-2]


def _ids_end(record: dict[str, Any]) -> int:
    at, count = record.get("ids_at"), record.get("ids_n")
    if type(at) is not int or type(count) is not int:
        return 0
    return at + entry_bytes(min(max(count, 0), IDS_LIMIT))


_take = wire.requests(take_requests_pure)


def take(data: bytes, start: int, stop: int, mac: Mac | None, before: Before) -> Taken:
    """Take lines of `data` from byte `start`, none that ends behind `stop`.

    `mac`: of `chain.mac`, the key of `before.key_id`; None: MACs are not checked.
    """
    if isinstance(mac, Hmac):  # of an algorithm that is not in C
        stop = _mac_holds_to(data, start, _taken(data, start, stop, None, before).end, mac, before)
        mac = None
    return _taken(data, start, stop, mac, before)


def _taken(data: bytes, start: int, stop: int, mac: Mac | None, before: Before) -> Taken:
    return Taken(
        *_take(
            data,
            start,
            stop,
            mac,
            _inside(before.origin),
            _inside(before.key_id),
            before.prev.encode(),
            before.seq,
            before.wall_ns,
            before.mono_ns,
            before.quiet_ns,
            _OUTCOMES,
            _PHASES,
        )
    )


def _mac_holds_to(data: bytes, at: int, stop: int, mac: Hmac, before: Before) -> int:
    prev = bytes.fromhex(before.prev)
    while at < stop:
        newline = data.index(b"\n", at)
        stated = data[newline - 64 : newline].decode()
        if mac.hex(prev, data[at : newline - 65]) != stated:
            break
        prev, at = bytes.fromhex(stated), newline + 1
    return at
