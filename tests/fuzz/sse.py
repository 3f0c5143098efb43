"""Fuzz the reader of event streams beside one that goes byte by byte.

    .venv/bin/python -m tests.fuzz.sse                 60 s, a new seed
    .venv/bin/python -m tests.fuzz.sse --seconds 600 --seed 7

A damaged stream, cut anywhere, has to come apart into the events and data that WHATWG HTML section
9.2 says, whatever line ends are mixed; what is handed on has to be the stream, less whole members
and events that were asked for on audit's behalf; and no cut may change what was observed.
Exit codes: 0 nothing found, 1 a difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from proxy.http.body import IDS, OPTIONS
from proxy.http.sse import EventSplitter, StreamObserver, _payload

CR, LF = 13, 10
WHOLE = 1 << 20
BOUNDS = (8, 40, 200, WHOLE)
EVENTS = (
    b'data: {"choices":[{"index":0,"delta":{"content":"Pa"},"token_ids":[1,70000]}]}\n\n',
    b'data: {"choices":[{"index":1,"delta":{"content":"r\\u00eds"}}],"model":"m"}\r\n\r\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}\n\n',
    b'data:{"choices":[{"index":0,"text":"x","finish_reason":"stop","token_ids":null}]}\r\r',
    b'data: {"prompt_token_ids":[1, 2],"choices":[{"delta":{"content":"\xe5\xb7\xa7"}}]}\n\n',
    b'data: {"choices":\ndata: [{"index":0,"delta":{"content":"two lines"}}]}\n\n',
    b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"role":"a","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"b"},"finish_reason":null}],"usage":null}\n\n',
    b'data: {"model":"n", "choices":[{"delta":{"content":"a\\n\\u00e9 \\ud83d\\ude00"}}]}\n\n',
    b'data: {"choices":[{"text":"a text \xe5\xb7\xa7","index":0,"delta":null}],"x":[1.5e3,{}]}\n\n',
    b": ping\n\n",
    b"event: x\nid: 1\ndata\n\n",
    b"\xef\xbb\xbfdata: 1\n\n",
    b"data: [DONE]\n\n",
)
JUNK = (
    b"\n", b"\r", b"\r\n", b"\n\r", b"\n\n", b"\r\r", b"data", b"data:", b"data: ", b":", b" ",
    b"{", b'"', b"]", b",", b"\\u0074", b'"token_ids":[1],', b',"token_ids": null', b"\x00",
    b"\\ud800", b'"content":"z",', b'"usage":{},', b'"finish_reason":"stop",', b"null",
    b"\xff", b"\xef\xbb\xbf", b"[DONE]", b'"index":0,', b"9" * 30, b"[" * 40,
)  # fmt: skip


def reference_events(stream: bytes, event_bytes: int) -> tuple[list[bytes], bytes, bool]:
    """Return (events, rest, lost): an event ends with the second of two line ends in a row."""
    events, start, ends, at = [], 0, 0, 0
    while at < len(stream):
        byte = stream[at]
        at += 1
        if byte not in (CR, LF):
            ends = 0
            continue
        if byte == CR:
            if at == len(stream):
                break  # the next byte may be its LF
            at += stream[at] == LF
        ends += 1
        if ends == 2:
            if at - start > event_bytes:
                break
            events.append(stream[start:at])
            start, ends = at, 0
    rest = stream[start:]
    return events, rest, at - start > event_bytes


def reference_data(event: bytes) -> bytes | None:
    """Return an event's data lines, joined; None when it has none."""
    lines, line, at = [], b"", 0
    event = event.removeprefix(b"\xef\xbb\xbf")
    while at < len(event):
        byte = event[at]
        at += 1
        if byte in (CR, LF):
            at += byte == CR and event[at : at + 1] == b"\n"
            lines.append(line)
            line = b""
        else:
            line += bytes([byte])
    data = []
    for one in lines:
        name, colon, value = one.partition(b":")
        if name == b"data":
            data.append(value.removeprefix(b" ") if colon else b"")
    return b"\n".join(data) if data else None


def damaged(rng: random.Random) -> bytes:
    """Return a few events with some small things wrong."""
    stream = bytearray(b"".join(rng.choices(EVENTS, k=rng.randint(1, 6))))
    for _ in range(rng.choice((0, 1, 2, 5))):
        at = rng.randint(0, len(stream))
        match rng.randrange(5):
            case 0:
                stream[at:at] = rng.choice(JUNK)
            case 1:
                del stream[at : at + rng.randint(1, 9)]
            case 2:
                stream[at : at + 1] = bytes([rng.randrange(256)])
            case 3:
                stream[at : at + rng.randint(1, 4)] = rng.choice(JUNK)
            case _:
                stream[at:at] = stream[at : at + rng.randint(1, 60)]
    return bytes(stream)


def cut(rng: random.Random, stream: bytes) -> list[bytes]:
    """Return the stream in pieces, cut anywhere."""
    count = rng.choice((1, 2, 6, len(stream) + 1))
    cuts = sorted(rng.randint(0, len(stream)) for _ in range(count - 1))
    pairs = zip([0, *cuts], [*cuts, len(stream)], strict=True)
    return [stream[a:b] for a, b in pairs if a < b]


def observed(pieces: list[bytes], added: frozenset[str], event_bytes: int) -> tuple[object, ...]:
    """Return all that an observer tells of a stream, and what it hands on."""
    said: dict[int, str] = {}

    def on_content(index: int, text: str) -> None:
        said[index] = said.get(index, "") + text

    observer = StreamObserver(on_content, added, event_bytes)
    handed = b"".join([observer.feed(piece) for piece in pieces]) + observer.finish_feed()
    facts = (observer.usage, observer.finish, observer.model, observer.done, observer.lost)
    return handed, said, facts, observer.token_ids, observer.between_events


def is_rest(short: bytes, long: bytes) -> bool:
    """Say whether `short` is `long` less some of its bytes."""
    at = 0
    for byte in short:
        at = long.find(byte, at) + 1
        if not at:
            return False
    return True


def check(rng: random.Random) -> None:
    """Compare one stream. AssertionError when something differs."""
    stream, event_bytes = damaged(rng), rng.choice(BOUNDS)
    pieces = cut(rng, stream)
    splitter = EventSplitter(event_bytes)
    events = [event for piece in pieces for event in splitter.feed(piece)]
    expected, rest, lost = reference_events(stream, event_bytes)
    why = (stream, pieces, event_bytes)
    if not lost:
        assert (events, splitter.pending, splitter.lost) == (expected, rest, False), why
    else:
        assert splitter.lost, why
        assert events[: len(expected)] == expected, why
        assert b"".join(events) == stream, why
    for event in expected:
        assert _payload(event)[0] == reference_data(event), (event, *why)
    seen = observed([stream], frozenset(), event_bytes)
    for added in (frozenset[str](), frozenset([IDS]), frozenset([IDS, OPTIONS])):
        whole = observed([stream], added, event_bytes)
        # Where nothing may be cut, plain events are read many at a time, and by other code.
        assert whole[1:] == seen[1:], (added, *why)
        assert observed(pieces, added, event_bytes) == whole, (added, *why)
        handed = whole[0]
        assert isinstance(handed, bytes)
        assert is_rest(handed, stream) if added else handed == stream, (added, *why)


def main() -> int:
    """Compare damaged streams until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    chosen = parser.parse_args()
    print(f"seed {chosen.seed}", flush=True)
    rng = random.Random(chosen.seed)
    end, cases = time.monotonic() + chosen.seconds, 0
    while time.monotonic() < end:
        check(rng)
        cases += 1
    print(f"{cases} streams, all agree")
    return 0


if __name__ == "__main__":
    sys.exit(main())
