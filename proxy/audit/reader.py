"""Lines of a segment as they are stored, and what one line is.

Pure but for the file object. A line is judged by its bytes alone; keys and neighbours are `check`'s
affair. Memory is bounded by `READ_LINE_BYTES`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import msgspec

from proxy.audit import canonical
from proxy.audit.record import problem_with

if TYPE_CHECKING:
    from collections.abc import Iterator

READ_LINE_BYTES = 1 << 20
BLOCK_BYTES = 1 << 18

_MAC = re.compile(rb"[0-9a-f]{64}")
_JOINED = re.compile(rb"\t[0-9a-f]{64}(?=\{)")
_HEX = b"0123456789abcdef"


class Line(NamedTuple):
    """A well-formed line: the record, its exact JSON bytes, its MAC in hex."""

    record: dict[str, Any]
    data: bytes
    mac: str


class Fault(msgspec.Struct, frozen=True):
    """A line that is none: its class, why, how many records it took the place of.

    `mac` is the MAC at the line's end, if there is one: the next record should point at it.
    """

    cls: str
    note: str
    records: int = 1
    mac: str | None = None


def stored_lines(file: BinaryIO, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, raw line with its newline) up to byte `end`, from where the file stands.

    Of a line longer than `READ_LINE_BYTES` only that much, and its newline, is given.
    """
    offset = file.tell()
    while end is None or offset < end:
        raw = file.readline(READ_LINE_BYTES + 2)
        if not raw:
            return
        size = len(raw)
        if size > READ_LINE_BYTES + 1 and not raw.endswith(b"\n"):
            while more := file.readline(READ_LINE_BYTES):
                size += len(more)
                if more.endswith(b"\n"):
                    raw += b"\n"
                    break
        yield offset, raw if end is None or offset + size <= end else raw[: end - offset]
        offset += size


def parse_line(raw: bytes) -> Line | Fault:
    """Return what a stored line is (docs/audit.md, "What a line can be")."""
    if len(raw) > READ_LINE_BYTES + 1:
        return Fault("malformed", f"a line of more than {READ_LINE_BYTES} bytes")
    if not raw.endswith(b"\n"):
        return Fault("half_line", "no newline at the end")
    body = raw[:-1]
    data, tab, mac = body.partition(b"\t")
    whole = _MAC.fullmatch(mac)
    end = mac.decode() if whole else _mac_at_end(body)
    joined = 0 if whole else len(_JOINED.findall(body))
    if joined:
        return Fault("two_records_one_line", f"{joined + 1} records", joined + 1, end)
    if not tab:
        if data.startswith(b"{") and not data.endswith(b"\r"):
            return Fault("half_line", "the line ends before its MAC")
        return Fault("malformed", "neither a record nor a MAC" if data else "an empty line")
    if not whole:
        if len(mac) < 64 and not mac.strip(_HEX):
            return Fault("half_line", "the MAC is cut")
        return Fault("malformed", "what follows the record is no MAC", mac=end)
    try:
        record = canonical.decode(data)
    except canonical.NotCanonical as problem:
        if data.startswith(b"{") and not data.rstrip(b" \r\0").endswith(b"}"):
            return Fault("half_line", "the record is cut", mac=end)
        return Fault("malformed", str(problem), mac=end)
    version = record.get("v")
    if type(version) is not int:
        return Fault("malformed", "no version", mac=end)
    # Of another version nothing is known but that it has a place in the chain.
    problem_text = problem_with(record) if version == 1 else _problem_of_other(record)
    if problem_text:
        return Fault("malformed", problem_text, mac=end)
    return Line(record, data, mac.decode())


def _mac_at_end(body: bytes) -> str | None:
    return body[-64:].decode() if _MAC.fullmatch(body[-64:]) else None


def _problem_of_other(record: dict[str, Any]) -> str | None:
    for name, kind in (("seq", int), ("origin", str), ("prev", str), ("key_id", str)):
        if type(record.get(name)) is not kind:
            return f"member {name} is missing, or not of its type"
    prev = record["prev"].encode()
    return None if _MAC.fullmatch(prev) else "member prev is no MAC"


class Lines:
    """The stored lines of a file up to byte `end`: plain ones by the block, others one by one.

    `block` gives whole lines that are in memory, `took` says how many bytes of them were used;
    `line` gives the next one as `stored_lines` does.
    """

    __slots__ = ("_at", "_base", "_data", "_end", "_file")

    def __init__(self, file: BinaryIO, end: int | None = None) -> None:
        self._file = file
        self._end = end
        self._base = file.tell()  # where `_data` begins in the file; it ends where the file stands
        self._data = b""
        self._at = 0

    @property
    def offset(self) -> int:
        """Where the next line begins in the file."""
        return self._base + self._at

    def block(self) -> tuple[bytes, int, int]:
        """Return (data, start, stop) of the whole lines that are here; none at the end."""
        stop = self._data.rfind(b"\n", self._at) + 1
        if not stop:
            self._read()
            stop = self._data.rfind(b"\n", self._at) + 1
        return self._data, self._at, max(stop, self._at)

    def took(self, to: int) -> None:
        """Go on at this place of the block."""
        self._at = to

    def holds(self, offset: int) -> bool:
        """Say whether lines up to this place of the file are asked for."""
        return self._end is None or offset <= self._end

    def go_to(self, offset: int) -> None:
        """Go on at this place of the file, which lies ahead."""
        self._at = offset - self._base
        if self._at > len(self._data):
            self._file.seek(offset)
            self._base, self._data, self._at = offset, b"", 0

    def line(self) -> tuple[int, bytes] | None:
        """Return (offset, raw line), or None at the end."""
        offset = self.offset
        newline = self._data.find(b"\n", self._at)
        if newline >= 0 and newline - self._at <= READ_LINE_BYTES:
            raw = self._data[self._at : newline + 1]
            self._at = newline + 1
            return offset, raw
        self._file.seek(offset)
        found = next(stored_lines(self._file, self._end), None)
        behind = self._file.tell()
        self._base = behind if self._end is None else min(behind, self._end)
        self._data, self._at = b"", 0
        return found

    def _read(self) -> None:
        rest = self._data[self._at :]
        self._base, self._at = self.offset, 0
        room = BLOCK_BYTES
        if self._end is not None:
            room = min(room, max(0, self._end - self._base - len(rest)))
        self._data = rest + self._file.read(room) if len(rest) <= READ_LINE_BYTES else rest
