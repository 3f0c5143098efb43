"""Server-sent events as bytes: split, observed, cut; never written anew.

`EventSplitter` cuts a stream after each blank line, for every mix of LF, CR LF and CR (WHATWG HTML
section 9.2.5). `StreamObserver` reads OpenAI-style events out of it (content, usage, finish reason,
token ids) and either hands the bytes on untouched and at once, or, when an engine was asked for
something on audit's behalf, hands on whole events with that cut out.

What is handed on untouched is looked at a few events later, some at once: an event that comes alone
finds the caches cold, and costs several times what it costs among others.

Invariants: the bytes handed on are the bytes that came, less whole cut ranges; what is held is at
most `event_bytes` and `BACKLOG_BYTES`, and beyond that everything passes as it comes (`lost`);
upstream bytes never raise.
"""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from kernels import wire
from proxy.http.body import CHOICES_MAX, IDS, OPTIONS, TEXT_MAX, cut_ids, u32_ids
from proxy.http.event import UNREADABLE, Event, decode

if TYPE_CHECKING:
    from collections.abc import Callable

TOKEN_IDS_MAX = 1 << 20
"""Token ids kept of one answer."""
BACKLOG_BYTES = 8 << 10
BACKLOG_FEEDS = 16
"""What may wait to be looked at: bytes, and how many times some came."""

# A lone CR is a line end, but never the CR of a CR LF.
_EOL = rb"(?:\r\n|\n|\r(?!\n))"
_BLANK = re.compile(_EOL + _EOL)
_BLANK_END = re.compile(_EOL + _EOL + rb"\Z")
_DATA = re.compile(rb"(?:(?<=[\r\n])|\A(?:\xef\xbb\xbf)?)data(?:: ?([^\r\n]*)|(?=[\r\n]))")
_CR = 13


def _no_events(data: bytes, event_bytes: int) -> tuple[int, bytes, str | None]:
    """Take none: `_take` reads every event."""
    del data, event_bytes
    return 0, b"", None


_plain_events = wire.events(_no_events)


class EventSplitter:
    """Splits a stream into events, each with its blank line.

    A CR at the end of a feed waits for the next byte, which may be its LF. An event of more than
    `event_bytes` is given up: `lost` is set, and from that event's first byte on `feed` returns
    what it is given, in one piece.
    """

    __slots__ = ("_event_bytes", "_pending", "_scanned", "_tail", "lost")

    def __init__(self, event_bytes: int) -> None:
        self.lost = False
        self._event_bytes = event_bytes
        self._pending = bytearray()
        self._scanned = 0
        self._tail = b""

    @property
    def plain_bytes(self) -> int:
        """How long an event may be that the next bytes begin with; 0: they do not begin one."""
        return 0 if self._pending or self.lost else self._event_bytes

    @property
    def pending(self) -> bytes:
        """The bytes after the last complete event."""
        return bytes(self._pending)

    @property
    def between_events(self) -> bool:
        """Nothing of a started event is there: an end of the stream here cuts no event."""
        if self.lost:
            return _BLANK_END.search(self._tail) is not None
        return not self._pending.strip(b"\r\n") or self.pending_is_event

    @property
    def pending_is_event(self) -> bool:
        """What is pending waits only to see whether its last CR has an LF."""
        pending = self._pending
        return pending[-1:] == b"\r" and _BLANK_END.search(pending[-4:]) is not None

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that are complete now; the last piece is no event once `lost`."""
        if self.lost:
            self._tail = (self._tail + data)[-4:]
            return [data]
        # The usual cases: whole events with LF, or with CR LF, nothing left of the feed before.
        if not self._pending and len(data) <= self._event_bytes:
            blank = b""
            if data[-2:] == b"\n\n":
                if b"\r" not in data:
                    blank = b"\n\n"
            elif data[-4:] == b"\r\n\r\n":
                ends = data.count(b"\r\n")
                if data.count(b"\r") == ends and data.count(b"\n") == ends:
                    blank = b"\r\n\r\n"
            if blank:
                if data.find(blank) + len(blank) == len(data):
                    return [data]
                events = data.split(blank)
                if not events.pop():
                    return [event + blank for event in events]
        return self._search(data)

    def _search(self, data: bytes) -> list[bytes]:
        pending = self._pending
        pending += data
        # A blank line has at most four bytes: three of them may have been there before.
        start, pos = 0, max(0, self._scanned - 3)
        size = len(pending)
        events: list[bytes] = []
        while (blank := _BLANK.search(pending, pos)) is not None:
            end = blank.end()
            if end - start > self._event_bytes or (end == size and pending[-1] == _CR):
                break
            events.append(bytes(pending[start:end]))
            start = pos = end
        # What is left begins with an event that is not complete, waits for an LF, or is too large.
        size = (blank.end() if blank is not None else size) - start
        del pending[:start]
        self._scanned = len(pending)
        self.lost = size > self._event_bytes
        if self.lost:
            events.append(bytes(pending))
            self._tail = bytes(pending[-4:])
            self._pending = bytearray()
        return events


# In valid JSON a quote right after a comma opens a name, so each match is a member; that it is one
# of the right objects is checked by counting.
_ID_MEMBER = re.compile(rb',"(?:prompt_)?token_ids": ?(?:null|\[[0-9, ]*\])(?=[,}])')


class StreamObserver:
    """Follows one answer stream.

    `on_content(choice index, text)` is called for each content delta; None: nobody wants to know
    what the events say, only where they end. `added` is what was asked for
    on audit's behalf; when it is empty, `feed` returns its argument, whatever event that splits.
    `finish` is choice 0's. `done`: `[DONE]` was seen. `lost`: what was observed is incomplete (an
    event beyond `event_bytes` or no JSON, more ids than `TOKEN_IDS_MAX`, a choice beyond
    `CHOICES_MAX`).
    """

    __slots__ = (
        "_added",
        "_backlog",
        "_backlog_bytes",
        "_finish",
        "_finished",
        "_ids",
        "_incomplete",
        "_model",
        "_on_content",
        "_splitter",
        "_told_done",
        "_usage",
    )

    def __init__(
        self,
        on_content: Callable[[int, str], None] | None,
        added: frozenset[str],
        event_bytes: int,
    ) -> None:
        self._usage: dict[str, Any] | None = None
        self._finish: str | None = None
        self._model = ""
        self._told_done = False
        self._backlog: list[bytes] = []
        self._backlog_bytes = 0
        self._on_content = on_content
        self._added = added
        self._splitter = EventSplitter(event_bytes)
        self._ids: array[int] | None = array("I")
        self._incomplete = False
        self._finished = False

    @property
    def usage(self) -> dict[str, Any] | None:
        """The last usage that was reported."""
        self._catch_up()
        return self._usage

    @property
    def finish(self) -> str | None:
        """The finish reason of choice 0."""
        self._catch_up()
        return self._finish

    @property
    def model(self) -> str:
        """The first model that was named."""
        self._catch_up()
        return self._model

    @property
    def done(self) -> bool:
        """`[DONE]` was seen."""
        self._catch_up()
        return self._told_done

    @property
    def token_ids(self) -> list[int]:
        """Token ids of choice 0, in order; empty when there were too many to keep."""
        self._catch_up()
        return self._ids.tolist() if self._ids is not None else []

    @property
    def lost(self) -> bool:
        """What was observed is incomplete."""
        self._catch_up()
        return self._incomplete or self._splitter.lost

    @property
    def too_long(self) -> bool:
        """A line was longer than `event_bytes`: nothing behind it was observed."""
        return self._splitter.lost

    @property
    def between_events(self) -> bool:
        """The upstream stands between two events."""
        self._catch_up()
        return self._splitter.between_events

    def feed(self, data: bytes) -> bytes:
        """Take the next bytes; return those to hand on now."""
        if not self._added:
            self._backlog.append(data)
            self._backlog_bytes += len(data)
            if self._backlog_bytes >= BACKLOG_BYTES or len(self._backlog) >= BACKLOG_FEEDS:
                self._catch_up()
            return data
        splitter = self._splitter
        events = splitter.feed(data)
        raw = events.pop() if splitter.lost else b""
        if len(events) == 1 and not raw:
            return self._cut(events[0])
        return b"".join([self._cut(event) for event in events]) + raw

    def _catch_up(self) -> None:
        """Look at what waits."""
        backlog = self._backlog
        if not backlog:
            return
        self._backlog, self._backlog_bytes = [], 0
        data = backlog[0] if len(backlog) == 1 else b"".join(backlog)
        plain_bytes = self._splitter.plain_bytes
        if self._on_content is not None and plain_bytes:
            end, text, model = _plain_events(data, plain_bytes)
            if text:
                self._on_content(0, text.decode())
            if model is not None and not self._model:
                self._model = model[:TEXT_MAX]
            if end == len(data):
                return
            data = data[end:]
        events = self._splitter.feed(data)
        if self._splitter.lost:
            events.pop()
        if self._on_content is None:
            return
        for event in events:
            self._take(_payload(event)[0])

    def finish_feed(self) -> bytes:
        """Return what is still held; for the end of the upstream."""
        self._catch_up()
        if self._finished:
            return b""
        self._finished = True
        held = self._splitter.pending
        if not self._splitter.pending_is_event:
            return held if self._added else b""
        if self._added:
            return self._cut(held)
        self._take(_payload(held)[0])
        return b""

    def _take(self, payload: bytes | None) -> Event | None:
        """Observe the data of one event."""
        if payload is None:
            return None
        try:
            event = decode(payload)
        except UNREADABLE:
            if payload == b"[DONE]":
                self._told_done = True
            elif payload[:1] == b"{":
                self._incomplete = True
            return None
        for choice in event.choices or ():
            index = choice.index
            if type(index) is not int or not 0 <= index < CHOICES_MAX:
                self._incomplete = True
                continue
            delta = choice.delta
            text = choice.text if delta is None else delta.content
            if text and isinstance(text, str) and self._on_content is not None:
                self._on_content(index, text)
            if index == 0:
                if isinstance(choice.finish_reason, str):
                    self._finish = choice.finish_reason[:TEXT_MAX]
                if choice.token_ids:
                    self._take_ids(choice.token_ids)
        if event.usage and isinstance(event.usage, dict):
            self._usage = event.usage
        if not self._model and isinstance(event.model, str):
            self._model = event.model[:TEXT_MAX]
        return event

    def _take_ids(self, value: object) -> None:
        # UNSET is true, and no list.
        ids = u32_ids(value)
        if ids is None or self._ids is None:
            return
        if len(self._ids) + len(ids) > TOKEN_IDS_MAX:
            self._ids = None
            self._incomplete = True
            return
        self._ids += ids

    def _cut(self, event: bytes) -> bytes:
        """Observe one event and return what the client gets of it."""
        payload, start = _payload(event)
        seen = self._take(payload)
        if seen is None or payload is None:
            return event
        if OPTIONS in self._added and seen.choices == [] and isinstance(seen.usage, dict):
            return b""
        if start < 0 or IDS not in self._added:
            return event
        shorter = _without_ids(payload, seen)
        if shorter is payload:
            return event
        return event[:start] + shorter + event[start + len(payload) :]


def _payload(event: bytes) -> tuple[bytes | None, int]:
    """Return an event's data and where it begins in the event (-1: on more than one line)."""
    if event[:6] == b"data: ":
        end = event.find(b"\n")
        if end == len(event) - 2 and b"\r" not in event:
            return event[6:end], 6
        end = event.find(b"\r")
        if end == len(event) - 4 and event[end:] == b"\r\n\r\n" and b"\n" not in event[6:end]:
            return event[6:end], 6
    lines = list(_DATA.finditer(event))
    if not lines:
        return None, -1
    if len(lines) == 1 and lines[0][1] is not None:
        return lines[0][1], lines[0].start(1)
    return b"\n".join([line[1] or b"" for line in lines]), -1


def _without_ids(payload: bytes, seen: Event) -> bytes:
    """Return the data without the id members of the event and of its choices."""
    unset = msgspec.UNSET
    known = (seen.token_ids is not unset) + (seen.prompt_token_ids is not unset)
    for choice in seen.choices or ():
        known += (choice.token_ids is not unset) + (choice.prompt_token_ids is not unset)
    if not known:
        return payload
    if b"\\u" not in payload and payload.count(b'token_ids"') == known:
        shorter, cut = _ID_MEMBER.subn(b"", payload)
        if cut == known:
            return shorter
    return cut_ids(payload)
