"""The sidecar's hot readers in C: HTTP/1.1 heads, chunks, JSON as byte ranges, plain events.

Each C reader stands in front of a pure Python twin. What it takes it returns exactly as the twin
would; what it is not sure of (a refusal, an incomplete head, anything unusual) it hands to the
twin, whose word it is. So a machine without a compiler loses speed and nothing else: `heads`,
`chunks` and `bodies` then return the twins.

Beside them, on the libcrypto that hashlib loads: `macs`, HMAC-SHA256 and SHA-256 of short messages;
`lines` and `runs`, records as they lie in the file; `requests`, a verifier's plain case; `trees`,
many leaves of a Merkle tree at a time. On the CPU alone `checksums`, CRC-32; and `writes`, which
begins what a sync ends. And `pump`, the one thing here with a thread: the middle of event streams,
without Python.

The readers hold the GIL, keep no state between calls, and fill the twins' own records slot by
slot; a class whose slots are not the expected ones is refused when it is registered (TypeError).
"""

from __future__ import annotations

import hashlib  # noqa: F401 - whose libcrypto the extension finds when it is loaded
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

_wire: ModuleType | None
try:
    from kernels.wire import _wire
except ImportError:
    _wire = None

AVAILABLE = _wire is not None
"""Whether the extension was built and is used."""

_Request = TypeVar("_Request", bound="Callable[..., object]")
_Response = TypeVar("_Response", bound="Callable[..., object]")
_Chunks = TypeVar("_Chunks", bound="Callable[..., object]")
_Members = TypeVar("_Members", bound="Callable[..., object]")
_View = TypeVar("_View", bound="Callable[..., object]")
_Cut = TypeVar("_Cut", bound="Callable[..., object]")
_Mac = TypeVar("_Mac", bound="Callable[[bytes], object]")
_Hash = TypeVar("_Hash", bound="Callable[..., bytes]")
_Take = TypeVar("_Take", bound="Callable[..., object]")
_Begin = TypeVar("_Begin", bound="Callable[[int, int, int], int]")
_Crc = TypeVar("_Crc", bound="Callable[[bytes, int], int]")
_Grow = TypeVar("_Grow", bound="Callable[..., int]")
_Events = TypeVar("_Events", bound="Callable[..., object]")
_Valid = TypeVar("_Valid", bound="Callable[[bytes], bool]")
_Head = TypeVar("_Head", bound="Callable[..., bytes]")
_Line = TypeVar("_Line", bound="Callable[..., tuple[bytes, str]]")
_Run = TypeVar("_Run", bound="Callable[..., tuple[bytes, bytes]]")


class Grammar(NamedTuple):
    """What decides in a head; one table for both readers.

    `request` and `response`: (watched names, dropped names), lower case. `doubtful`: watched names
    whose presence alone makes it the twin's business. `token` and `host`: the bytes of a field name
    and of Host. `methods`: at most 16. `connection`: whole values and whether they keep it, at
    most 8.
    """

    request: tuple[tuple[bytes, ...], tuple[bytes, ...]]
    response: tuple[tuple[bytes, ...], tuple[bytes, ...]]
    doubtful: tuple[bytes, ...]
    token: bytes
    host: bytes
    methods: frozenset[bytes]
    connection: Mapping[bytes, bool]


def heads(
    classes: tuple[type, type, type], grammar: Grammar, request: _Request, response: _Response
) -> tuple[_Request, _Response]:
    """Return (parse_request, parse_response) before the given twins.

    `classes`: those of a request's head, a response's head and the limits. Raises TypeError or
    ValueError when the tables or classes are not what the readers know.
    """
    if _wire is None:
        return request, response
    reader = _wire.Heads(
        classes,
        (grammar.request, grammar.response),
        grammar.doubtful,
        grammar.token,
        grammar.host,
        grammar.methods,
        dict(grammar.connection),
        (request, response),
    )
    return reader.parse_request, reader.parse_response


def chunks(whole_chunks: _Chunks) -> _Chunks:
    """Return whole_chunks(data, pieces) in place of the given twin.

    It appends the payload of the chunks that `data` begins with and returns where they end: before
    the first one that has an extension, is the last, is not here as a whole or is malformed.
    """
    if _wire is None:
        return whole_chunks
    chosen: _Chunks = _wire.whole_chunks
    return chosen


def bodies(
    classes: tuple[type, type], ids: str, members: _Members, view: _View, cut_answer: _Cut
) -> tuple[_Members, _View, _Cut]:
    """Return (members, view, cut_answer) before the given twins.

    `classes`: those of a request's view and an answer's facts. `ids`: what has to be in
    `cut_answer`'s second argument for token ids to be cut. Raises TypeError on another class.
    """
    if _wire is None:
        return members, view, cut_answer
    reader = _wire.Bodies(classes, ids, (members, view, cut_answer))
    return reader.members, reader.view, reader.cut_answer


def events(plain: _Events) -> _Events:
    """Return plain_events(data, event_bytes) in place of the given twin.

    It takes the events that `data` begins with as long as each says a piece of choice 0's text and
    nothing else of note, and returns (where the first other one begins, the texts joined, the first
    model that was named or None). A longer event than `event_bytes` is another one.
    """
    if _wire is None:
        return plain
    chosen: _Events = _wire.plain_events
    return chosen


def traceparents(plain: _Valid) -> _Valid:
    """Return plain_traceparent(value) in place of the given twin.

    It says yes to a valid traceparent of version 00; no is not sure.
    """
    if _wire is None:
        return plain
    chosen: _Valid = _wire.plain_traceparent
    return chosen


def answer_heads(answer_head: _Head) -> _Head:
    """Return answer_head(status, reason, lines, ..., body) in place of the given twin.

    It raises OverflowError for a number that is negative or takes more than 64 bits.
    """
    if _wire is None:
        return answer_head
    chosen: _Head = _wire.answer_head
    return chosen


def pump(streams_max: int, wake_bytes: int, loop: int = -1) -> Any | None:
    """Return a `Pump` (pump.c), which passes event streams on without Python; None without C.

    `streams_max`: how many at once, at most 65,536; `wake_bytes`: passed bytes of one after which
    its descriptor becomes readable; `loop`: the epoll descriptor that the caller's loop waits on,
    -1: none, or unknown. Raises OSError when there are no descriptors.
    """
    return None if _wire is None else _wire.Pump(streams_max, wake_bytes, loop)


def macs(mac: _Mac, sha256: _Hash) -> tuple[_Mac, _Hash]:
    """Return (HMAC-SHA256 with an absorbed key, SHA-256 of parts) in place of the given twins.

    The twins also where the process has no libcrypto of its own that the extension can use.
    """
    if not hasattr(_wire, "Mac"):
        return mac, sha256
    assert _wire is not None
    quick: tuple[_Mac, _Hash] = _wire.Mac, _wire.sha256
    return quick


def lines(line: _Line) -> _Line:
    """Return request_line(mac, prev, kind, origin, ...) in place of the given twin.

    It returns (line with its newline, MAC in hex); `mac` is of `macs`. Raises OverflowError for a
    number that is negative or takes more than 64 bits.
    """
    if not hasattr(_wire, "Mac"):
        return line
    assert _wire is not None
    quick: _Line = _wire.request_line
    return quick


def runs(run: _Run) -> _Run:
    """Return request_run(mac, prev, kind, origin, seq, walls, monos, rows, most) for the twin.

    As `lines`, for records that follow one another, at most 65,536: each has its times and a row, a
    tuple (head, model, middle, prompt, tail). It returns the lines, joined, and their leaf hashes,
    joined; ValueError when a line would have more than `most` bytes. It lets go of the GIL.
    """
    if not hasattr(_wire, "Mac"):
        return run
    assert _wire is not None
    quick: _Run = _wire.request_run
    return quick


def requests(take: _Take) -> _Take:
    """Return take_requests(data, start, stop, mac, origin, ...) in place of the given twin.

    It takes stored lines as long as each is a record of a request that continues the one before it
    in every respect, and says where the first other one begins. What it is not sure of it leaves;
    it makes no finding. Its MACs are `macs`' or None, not checked. It lets go of the GIL.
    """
    if not hasattr(_wire, "Mac"):
        return take
    assert _wire is not None
    quick: _Take = _wire.take_requests
    return quick


def checksums(crc32: _Crc) -> _Crc:
    """Return crc32(data, value) of bytes in place of zlib's, where the CPU multiplies for it."""
    if _wire is None or not _wire.CRC32:
        return crc32
    quick: _Crc = _wire.crc32
    return quick


def writes(begin: _Begin) -> _Begin:
    """Return begin_write(fd, offset, size) in place of the given twin.

    The disk begins on bytes that a file was given, and nobody waits. Returns 0, or the errno of
    what went wrong, ENOSYS where there is no such call; what goes wrong later comes out at the next
    sync.
    """
    if _wire is None:
        return begin
    quick: _Begin = _wire.begin_write
    return quick


def trees(grow: _Grow) -> _Grow:
    """Return grow(begin, end, sizes, hashes, data, lines) in place of the given twin.

    It appends to the nodes of the leaves [begin, end), and returns the new end: `data` is leaf
    hashes, 32 bytes each, or with `lines` stored lines to be hashed. It lets go of the GIL.
    """
    if not hasattr(_wire, "Mac"):
        return grow
    assert _wire is not None
    quick: _Grow = _wire.grow
    return quick
