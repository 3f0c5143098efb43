"""The vectors of tests/vectors/envelope, made from their recipes: one file for each outcome class.

    .venv/bin/python -m tests.unit.proxy.envelope_cases        writes them anew

The form is that of tests/vectors/smx1_vectors.json. Nothing in here is drawn: times, keys and N are
fixed, Ed25519 is deterministic, and k of SM2 is given.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.sm4.digest import new_digest
from proxy.sm4.envelope import (
    MAC,
    MEDIA_TYPE,
    RESPONSE,
    SIGNATURE,
    STREAM,
    Header,
    associated_data,
    pad,
)
from proxy.sm4.frames import StreamCipher, sse_event
from proxy.sm4.keyring import Derived, EnvelopeKey
from proxy.sm4.signature import signed_message
from tests.unit.proxy.sm4_kit import GmsslSigner

if TYPE_CHECKING:
    from collections.abc import Callable

FOLDER = Path(__file__).parents[2] / "vectors" / "envelope"
NOW = 1_767_225_600_000
SENT = NOW - 1_000
AUDIENCE = "example.org/llm/0b6f6f0e-3f0a-4f3e-9a53-0d8f3c2b7a11"
MODEL = "qwen3-8b"
BODY = b'{"model":"qwen3-8b","messages":[{"role":"user","content":"hello"}]}'
PRELUDE = b"POST /v1/chat/completions\napplication/json\nP1\n"
ANSWER = b"200\napplication/json\n"
EVENTS = b"200\ntext/event-stream\n"
SSE = "text/event-stream"
K = "59276e27d506861a16680f3ad9c02dccef3cc1fa3cdbe4ce6d54b80deac1bc21"
SM2_PRIVATE = bytes.fromhex("3945208f7b2144b13f36e38ac6d39f95889393692860b51a42fb81ef4df7c5b8")
SM2_PUBLIC = bytes.fromhex(
    "09f9df311e5421a150dd7d161e4bc5c672179fad1833fc076bb08ff356f35020"
    "ccea490ce26775a52dc6ea718cc1aa600aed05fbf35e084a6632f6072da9ad13"
)
ED_PRIVATE = bytes(range(32))
ED_PUBLIC = bytes.fromhex("03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8")


def _key(number: int, **changes: Any) -> EnvelopeKey:
    key = EnvelopeKey(
        kid=bytes([0xA0 + number]) * 8,
        root=bytes(range(16 * number, 16 * number + 32)),
        client="client-a",
        audience=AUDIENCE,
        tenant="client-a",
        suite=1,
        digest="sha256",
        not_before_ms=NOW - 3_600_000,
        not_after_ms=NOW + 86_400_000,
    )
    return msgspec.structs.replace(key, **changes)


ED = {"scheme": "ed25519", "sign_public": ED_PUBLIC, "sign_private": ED_PRIVATE}
A = _key(1, **ED)
B = _key(2, scheme="sm2", sign_public=SM2_PUBLIC, sign_private=SM2_PRIVATE, digest="sm3")
AES = _key(3, suite=2)
STRICT = _key(4, require_mac=True, require_signature=True, **ED)
SHORT = _key(5, not_before_ms=NOW - 100_000, not_after_ms=NOW + 100_000, pad=1)
KEYS = (A, B, AES, STRICT, SHORT)

Wire = bytes


class _Count:
    """N of each envelope: its number, so that every run makes the same."""

    def __init__(self) -> None:
        self.value = 0

    def next(self) -> bytes:
        self.value += 1
        return self.value.to_bytes(12, "big")


class Case:
    """Collects vectors of one class."""

    def __init__(self, outcome: str, count: _Count) -> None:
        self.outcome = outcome
        self.vectors: list[dict[str, Any]] = []
        self._count = count

    def nonce(self) -> bytes:
        return self._count.next()

    def request(
        self,
        title: str,
        wire: Wire,
        *,
        headers: dict[str, Any] | None = None,
        now: int = NOW,
        inner: tuple[bytes, bytes] = (PRELUDE, BODY),
        also: tuple[str, ...] = (),
        **more: Any,
    ) -> None:
        outer: dict[str, Any] = {"Content-Type": MEDIA_TYPE, "X-Model-Id": MODEL}
        outer |= headers or {}
        self._add(
            title,
            "request",
            wire,
            inner,
            also,
            more
            | {
                "headers": {k: v for k, v in outer.items() if v is not None},
                "now_ms": now,
            },
        )

    def answer(
        self,
        title: str,
        wire: Wire,
        *,
        asked: bytes,
        headers: dict[str, Any] | None = None,
        key: EnvelopeKey = A,
        mac: bool = False,
        inner: tuple[bytes, bytes] = (ANSWER, BODY),
        also: tuple[str, ...] = (),
    ) -> None:
        request = {"kid": key.kid.hex(), "nonce": asked.hex(), "model": MODEL, "mac": mac}
        self._add(
            title,
            "response",
            wire,
            inner,
            also,
            {
                "headers": {"Content-Type": MEDIA_TYPE} | (headers or {}),
                "now_ms": NOW,
                "request": request,
            },
        )

    def _add(
        self,
        title: str,
        direction: str,
        wire: Wire,
        inner: tuple[bytes, bytes],
        also: tuple[str, ...],
        more: dict[str, Any],
    ) -> None:
        number = len(self.vectors) + 1
        sse = direction == "response" and more["headers"]["Content-Type"] == SSE
        vector = {
            "id": f"{self.outcome}-{number:02}",
            "title": title,
            "direction": direction,
            "carrier": "sse" if sse else "raw",
            **more,
            **({"wire_text": wire.decode()} if sse else {"wire_hex": wire.hex()}),
            "outcome": self.outcome,
        }
        if also:
            vector["also"] = list(also)
        if self.outcome == "ok":
            vector |= {"prelude_hex": inner[0].hex(), "body_hex": inner[1].hex()}
        self.vectors.append(vector)


def inner_of(prelude: bytes = PRELUDE, body: bytes = BODY) -> bytes:
    return len(prelude).to_bytes(2, "big") + prelude + body


def trailer_of(key: EnvelopeKey, flags: int, aad: bytes, inner: bytes) -> bytes:
    digest = new_digest(key.digest)
    digest.update(inner)
    trailer = b""
    if flags & SIGNATURE and key.scheme == "sm2":
        trailer = GmsslSigner(key, K).sign(signed_message(aad, digest.digest()))
    elif flags & SIGNATURE:
        made = Derived(key).signer()
        assert made is not None
        trailer = made.sign(signed_message(aad, digest.digest()))
    if flags & MAC:
        trailer += Derived(key).mac.mac(aad + digest.digest())
    return trailer


def single(
    nonce: bytes,
    *,
    key: EnvelopeKey = A,
    flags: int = 0,
    inner: bytes | None = None,
    trailer: bytes | None = None,
    padded: bytes | None = None,
    time: int = SENT,
    model: str = MODEL,
    asked: bytes = b"",
    audience: str = AUDIENCE,
    header: Callable[[bytes], bytes] = lambda raw: raw,
) -> Wire:
    """Seal a single; `header` bends its 40 bytes before they go into the AAD."""
    inner = inner_of() if inner is None else inner
    derived = Derived(key)
    size = len(trailer) if trailer is not None else 64 * bool(flags & 8) + 32 * bool(flags & 2)
    whole = len(pad(inner + bytes(size), key.pad)) if padded is None else len(padded)
    raw = header(Header(key.suite, flags, key.kid, time, nonce, whole + 16).encode())
    aad = associated_data(raw, model.encode(), audience.encode(), asked)
    if padded is None:
        if trailer is None:
            trailer = trailer_of(key, flags, aad, inner)
        padded = pad(inner + trailer, key.pad)
    cipher = derived.response if asked else derived.request
    return raw + cipher.seal(nonce, padded, aad)


def frames(
    nonce: bytes,
    parts: list[bytes],
    *,
    key: EnvelopeKey = A,
    flags: int = 0,
    time: int = SENT,
    model: str = MODEL,
    asked: bytes = b"",
    signed: bytes | None = None,
    unit: int | None = None,
) -> list[bytes]:
    """Seal a stream: [header, frame, ...]; the trailer goes behind the last part."""
    raw = Header(key.suite, flags | STREAM, key.kid, time, nonce, 0).encode()
    aad = associated_data(raw, model.encode(), AUDIENCE.encode(), asked)
    derived = Derived(key)
    base = derived.response_streams if asked else derived.request_streams
    cipher = StreamCipher(base, key.suite, aad, nonce, asked)
    whole = b"".join(parts) if signed is None else signed
    parts = [*parts[:-1], parts[-1] + trailer_of(key, flags, aad, whole)]
    sealed = [
        cipher.seal(part, unit or key.pad, last=index == len(parts) - 1)
        for index, part in enumerate(parts)
    ]
    return [raw, *sealed]


def stream(nonce: bytes, parts: list[bytes], **more: Any) -> Wire:
    return b"".join(frames(nonce, parts, **more))


def events(parts: list[bytes]) -> bytes:
    return b"".join(map(sse_event, parts))


def put(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:offset] + value + raw[offset + len(value) :]


def flip(wire: Wire, offset: int) -> Wire:
    at = offset % len(wire)
    return wire[:at] + bytes([wire[at] ^ 1]) + wire[at + 1 :]


HALVES = [inner_of()[:60], inner_of()[60:]]
"""Two parts, the prelude within the first."""
THREE = [inner_of()[:60], inner_of()[60:80], inner_of()[80:]]


def _ok(c: Case) -> None:
    n = c.nonce
    c.request("single", single(n()))
    c.request("single, AES-256", single(n(), key=AES))
    c.request("MAC over D by SM3", single(n(), key=B, flags=MAC))
    c.request("Ed25519", single(n(), flags=SIGNATURE))
    c.request("SM2", single(n(), key=B, flags=SIGNATURE))
    c.request("signature and MAC, both demanded", single(n(), key=STRICT, flags=SIGNATURE | MAC))
    c.request("60 s old", single(n(), time=NOW - 60_000))
    c.request("5 s ahead", single(n(), time=NOW + 5_000))
    c.request(
        "a window before not-before",
        single(n(), key=SHORT, time=SHORT.not_before_ms - 60_000),
        now=SHORT.not_before_ms - 30_000,
    )
    c.request(
        "not-after and two windows",
        single(n(), key=SHORT, time=SHORT.not_after_ms + 120_000),
        now=SHORT.not_after_ms + 120_000,
    )
    c.request("padded to no multiple", single(n(), padded=inner_of() + b"\x80" + bytes(5)))
    c.request("pad size 1", single(n(), key=SHORT))
    c.request(
        "media type in capitals, with a parameter",
        single(n()),
        headers={"Content-Type": "APPLICATION/X-SM4-Envelope; v=1"},
    )
    c.request("X-Tenant-Id of the kid", single(n()), headers={"X-Tenant-Id": "client-a"})
    c.request("one frame", stream(n(), [inner_of()]))
    c.request("frame 0 with the prelude alone", stream(n(), [inner_of(body=b""), BODY]))
    c.request("last frame without body", stream(n(), [*HALVES, b""]))
    c.request("frames without data between", stream(n(), [HALVES[0], b"", b"", HALVES[1]]))
    c.request(
        "stream, signature and MAC alone in the last frame",
        stream(n(), [*HALVES, b""], key=STRICT, flags=SIGNATURE | MAC),
    )
    c.request("stream, SM2", stream(n(), HALVES, key=B, flags=SIGNATURE))
    get = b"GET /v1/models?limit=2\n\n\n"
    c.request(
        "GET without body, type, class and model",
        single(n(), inner=inner_of(get, b""), model=""),
        headers={"X-Model-Id": None},
        inner=(get, b""),
    )
    delete = b"DELETE /v1/files/7\n\n\n"
    c.request(
        "DELETE",
        single(n(), inner=inner_of(delete, b""), model=""),
        headers={"X-Model-Id": None},
        inner=(delete, b""),
    )
    escaped = b'{"model":"qwen3\\u002d8b"}'
    c.request(
        "model escaped in JSON", single(n(), inner=inner_of(body=escaped)), inner=(PRELUDE, escaped)
    )
    vendor = b"POST /v1/x\napplication/vnd.example+json; charset=utf-8\n\n"
    c.request("a +json type", single(n(), inner=inner_of(vendor)), inner=(vendor, BODY))
    form = b"POST /v1/audio/transcriptions\nmultipart/form-data; boundary=b\n\n"
    part = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nqwen3-8b\r\n--b--\r\n'
    c.request("model in a form's part", single(n(), inner=inner_of(form, part)), inner=(form, part))
    text = b"POST /v1/x\ntext/plain\n\n"
    c.request(
        "a type that names no model",
        single(n(), inner=inner_of(text, b"{"), model=""),
        headers={"X-Model-Id": None},
        inner=(text, b"{"),
    )
    q = n()
    answer = {"asked": q, "flags": RESPONSE}
    c.answer("single answer", single(n(), inner=inner_of(ANSWER), **answer), asked=q)
    c.answer(
        "answer sealed long ago", single(n(), inner=inner_of(ANSWER), time=1, **answer), asked=q
    )
    c.answer(
        "answer without type and body",
        single(n(), inner=inner_of(b"204\n\n", b""), **answer),
        asked=q,
        inner=(b"204\n\n", b""),
    )
    parts = frames(n(), [inner_of(EVENTS)[:30], inner_of(EVENTS)[30:]], unit=512, **answer)
    c.answer("event stream in raw frames", b"".join(parts), asked=q, inner=(EVENTS, BODY))
    c.answer(
        "SSE carrier", events(parts), asked=q, headers={"Content-Type": SSE}, inner=(EVENTS, BODY)
    )
    bent = (
        b": hello\r\n\r\n"
        + events(parts).replace(b"\n", b"\r\n").replace(b"data: ", b"data:")
        + b":x"
    )
    c.answer(
        "SSE carrier with CRLF, comments and no blank",
        bent,
        asked=q,
        headers={"Content-Type": SSE},
        inner=(EVENTS, BODY),
    )


def _carrier(c: Case) -> None:
    n = c.nonce
    for kind in ("application/json", "text/event-stream", "application/x-sm4-envelopes", ""):
        c.request(f"type {kind or 'empty'}", single(n()), headers={"Content-Type": kind})
    c.request("no type", single(n()), headers={"Content-Type": None})
    for coding in ("gzip", "identity", ""):
        c.request(
            f"Content-Encoding {coding or 'empty'}",
            single(n()),
            headers={"Content-Encoding": coding},
        )
    q = n()
    parts = frames(n(), [inner_of(EVENTS)], flags=RESPONSE, asked=q, unit=512)
    head, frame = events(parts[:1]), events(parts[1:])
    sse = {"Content-Type": SSE}
    c.answer("unsealed answer", BODY, asked=q, headers={"Content-Type": "application/json"})
    c.answer(
        "Content-Encoding in an answer",
        b"".join(parts),
        asked=q,
        headers={"Content-Encoding": "gzip"},
    )
    for name in (b"event: x", b"id: 1", b"retry: 5", b"other: y", b"data"):
        c.answer(f"SSE line {name.decode()}", name + b"\n" + head + frame, asked=q, headers=sse)
    c.answer("two data lines", head[:-1] + b"data: AA\n\n" + frame, asked=q, headers=sse)
    c.answer("header event of 39 bytes", sse_event(parts[0][:39]) + frame, asked=q, headers=sse)
    c.answer("header event of 41 bytes", sse_event(parts[0] + b"x") + frame, asked=q, headers=sse)
    alone = single(n(), inner=inner_of(ANSWER), flags=RESPONSE, asked=q)[:40]
    c.answer("header event without the stream bit", sse_event(alone) + frame, asked=q, headers=sse)
    c.answer(
        "n one less than the event's",
        head + sse_event(put(2, b"\x02\x0f")(parts[1])),
        asked=q,
        headers=sse,
    )
    c.answer("frame event of 3 bytes", head + sse_event(b"abc"), asked=q, headers=sse)
    c.answer("base64 with =", head.replace(b"\n\n", b"==\n\n") + frame, asked=q, headers=sse)
    c.answer("base64 with +", head + b"data: ++++\n\n", asked=q, headers=sse)
    c.answer("loose bits in base64", head + b"data: AAAAAB\n\n", asked=q, headers=sse)


def _header(c: Case) -> None:
    """bad_magic, bad_suite, bad_flags, bad_reserved, bad_length: what is bent is sealed so."""
    n = c.nonce
    bends: dict[str, list[tuple[str, int, bytes]]] = {
        "bad_magic": [(v.hex(), 0, v) for v in (b"SMX2", b"smx1", bytes(4), b"\xffMX1", b"SMX\0")],
        "bad_suite": [(f"suite {v}", 4, bytes([v])) for v in (0, 2, 3, 128, 255)],
        "bad_flags": [(f"flags {v:#x}", 5, bytes([v])) for v in (4, 5, 12, 16, 32, 64, 128, 255)],
        "bad_reserved": [(v.hex(), 6, v) for v in (b"\0\1", b"\1\0", b"\xff\xff")],
        "bad_length": [
            (f"L = {v}", 36, v.to_bytes(4, "big"))
            for v in (0, 15, (1 << 20) - 39, 1 << 31, (1 << 32) - 1)
        ],
    }
    for title, offset, value in bends[c.outcome]:
        c.request(title, single(n(), header=put(offset, value)))
        q = n()
        if c.outcome == "bad_flags" and value[0] & 4:
            continue
        flags = bytes([value[0]]) if c.outcome == "bad_flags" else value
        c.answer(
            f"answer: {title}",
            single(n(), inner=inner_of(ANSWER), flags=RESPONSE, asked=q, header=put(offset, flags)),
            asked=q,
        )
    if c.outcome == "bad_suite":
        c.request("1, the kid's is 2", single(n(), key=AES, header=put(4, b"\x01")))
    if c.outcome == "bad_flags":
        q = n()
        inner = inner_of(ANSWER)
        c.answer(
            "answer with a signature",
            single(n(), inner=inner, flags=RESPONSE, asked=q, header=put(5, b"\x0c")),
            asked=q,
        )
        c.answer(
            "answer with a MAC not asked for",
            single(n(), inner=inner, flags=RESPONSE | MAC, asked=q),
            asked=q,
        )
    if c.outcome == "bad_length":
        parts = frames(n(), HALVES)
        c.request("stream with L = 1", put(36, b"\0\0\0\1")(b"".join(parts)))
        for size in (0, 1, 16):
            parts = frames(n(), HALVES)
            c.request(
                f"frame of n = {size}", b"".join(parts[:2]) + size.to_bytes(4, "big") + bytes(size)
            )


def _kid(c: Case) -> None:
    n = c.nonce
    for kid in (bytes(8), b"\xff" * 8, A.kid[:7] + b"\0"):
        c.request(kid.hex(), single(n(), header=put(8, kid)))
    q = n()
    c.answer(
        "answer under another kid",
        single(n(), key=_key(1, kid=STRICT.kid), inner=inner_of(ANSWER), flags=RESPONSE, asked=q),
        asked=q,
    )


def _expired(c: Case) -> None:
    n = c.nonce
    before, after = SHORT.not_before_ms - 60_001, SHORT.not_after_ms + 120_001
    c.request("a ms too early for the kid", single(n(), key=SHORT, time=before), now=before)
    c.request("a ms too late for the kid", single(n(), key=SHORT, time=after), now=after)
    c.request(
        "late for the kid, on its way for a window",
        single(n(), key=SHORT, time=after),
        now=after + 60_000,
    )
    c.request("a stream too late", stream(n(), HALVES, key=SHORT, time=after), now=after)


def _stale(c: Case) -> None:
    n = c.nonce
    for time in (NOW - 60_001, NOW - 3_600_000, 1, 0):
        c.request(f"time {time}", single(n(), time=time))
    c.request("a stream", stream(n(), HALVES, time=NOW - 60_001))
    c.request("at the start fence", single(n(), time=NOW), start_ms=NOW - 10_000)
    c.request("old when its tag was known", single(n(), time=NOW - 60_000), at_tag_ms=NOW + 1)


def _future(c: Case) -> None:
    n = c.nonce
    for time in (NOW + 5_001, NOW + 86_400_000, (1 << 63) - 1, (1 << 64) - 1):
        c.request(f"time {time}", single(n(), time=time))
    c.request("a stream", stream(n(), HALVES, time=NOW + 5_001))


def _replayed(c: Case) -> None:
    n = c.nonce
    made: list[tuple[str, Callable[[bytes], Wire]]] = [
        ("single", single),
        ("stream", lambda nonce: stream(nonce, HALVES)),
        ("signed", lambda nonce: single(nonce, flags=SIGNATURE)),
    ]
    for title, make in made:
        nonce = n()
        c.request(title, make(nonce), seen=[[A.kid.hex(), nonce.hex()]])


def _cache_full(c: Case) -> None:
    n = c.nonce
    seen = [[A.kid.hex(), "ff" * 12]]
    c.request("no room for this kid", single(n()), seen=seen, policy={"limit_kid": 1})
    c.request("no room at all", single(n(), key=AES), seen=seen, policy={"limit": 1})
    c.request("a stream", stream(n(), HALVES), seen=seen, policy={"limit": 1})


def _tag(c: Case) -> None:
    n = c.nonce
    c.request("first byte of the ciphertext", flip(single(n()), 40))
    c.request("last byte of the tag", flip(single(n()), -1))
    c.request("time in the header", flip(single(n()), 23))
    c.request("N in the header", flip(single(n()), 35))
    c.request("MAC flag taken away", put(5, b"\0")(single(n(), flags=MAC)))
    c.request("MAC flag added", put(5, b"\x02")(single(n())))
    c.request("another X-Model-Id", single(n()), headers={"X-Model-Id": "qwen3-8B"})
    c.request("no X-Model-Id", single(n()), headers={"X-Model-Id": None})
    c.request("another audience", single(n(), audience=AUDIENCE + "x"))
    c.request("sealed as an answer", single(n(), asked=bytes(12)))
    orders: dict[str, tuple[int, ...]] = {
        "frames swapped": (0, 1, 3, 2),
        "first frame missing": (0, 2, 3),
        "frame twice": (0, 1, 1, 2, 3),
        "frame missing": (0, 1, 3),
    }
    for title, order in orders.items():
        p = frames(n(), THREE)
        c.request(title, b"".join(p[i] for i in order))
    p = frames(n(), THREE)
    c.request("called last too early", b"".join([*p[:2], bytes([p[2][0] | 0x80]) + p[2][1:]]))
    p = frames(n(), THREE)
    c.request("not called last", b"".join([*p[:3], bytes([p[3][0] & 0x7F]) + p[3][1:]]))
    p = frames(n(), THREE)
    c.request("frame 1 of another stream", b"".join([*p[:2], frames(n(), THREE)[2], p[3]]))
    q = n()
    inner = inner_of(ANSWER)
    c.answer(
        "answer to another request", single(n(), inner=inner, flags=RESPONSE, asked=n()), asked=q
    )
    c.answer(
        "answer for another model",
        single(n(), inner=inner, flags=RESPONSE, asked=q, model="other"),
        asked=q,
    )
    parts = frames(n(), [inner[:30], inner[30:]], flags=RESPONSE, asked=q, unit=512)
    c.answer(
        "SSE, frames swapped",
        events([parts[0], parts[2], parts[1]]),
        asked=q,
        headers={"Content-Type": SSE},
    )


def _truncated(c: Case) -> None:
    n = c.nonce
    wire = single(n())
    for size in (0, 1, 39, 40, len(wire) - 1):
        c.request(f"{size} bytes of a single", wire[:size])
    for count in (1, 2, 3):
        p = frames(n(), THREE)
        c.request(f"{count - 1} of 3 frames", b"".join(p[:count]))
    c.request("last frame cut", stream(n(), THREE)[:-1])
    q = n()
    parts = frames(n(), [inner_of(EVENTS)[:30], b""], flags=RESPONSE, asked=q, unit=512)
    c.answer(
        "SSE without its last frame", events(parts[:2]), asked=q, headers={"Content-Type": SSE}
    )
    c.answer("raw answer without its last frame", b"".join(parts[:2]), asked=q)
    c.answer(
        "single answer cut",
        single(n(), inner=inner_of(ANSWER), flags=RESPONSE, asked=q)[:-1],
        asked=q,
    )


def _trailing(c: Case) -> None:
    n = c.nonce
    c.request("a byte behind a single", single(n()) + b"\0")
    c.request("a second envelope behind a single", single(n()) + single(n()))
    c.request("a byte behind the last frame", stream(n(), HALVES) + b"\0")
    p = frames(n(), HALVES)
    c.request("the last frame twice", b"".join([*p, p[-1]]))
    q = n()
    parts = frames(n(), [inner_of(EVENTS)], flags=RESPONSE, asked=q, unit=512)
    c.answer(
        "SSE, an event behind the last",
        events([*parts, parts[1]]),
        asked=q,
        headers={"Content-Type": SSE},
    )
    c.answer("raw, a byte behind the last", b"".join(parts) + b"\0", asked=q)


def _too_large(c: Case) -> None:
    n = c.nonce
    for size in (65_553, 0x7FFFFFFF, 0x80010011, 0xFFFFFFFF):
        p = frames(n(), HALVES)
        c.request(
            f"n = {size & 0x7FFFFFFF:#x}, last = {size >> 31}",
            b"".join(p[:2]) + size.to_bytes(4, "big") + bytes(64),
        )
    q = n()
    parts = frames(n(), [inner_of(EVENTS)], flags=RESPONSE, asked=q, unit=512)
    large = (32_769).to_bytes(4, "big") + bytes(32_769)
    c.answer("SSE, n = 32 769", events([*parts[:1], large]), asked=q, headers={"Content-Type": SSE})


def _padding(c: Case) -> None:
    n = c.nonce
    for title, padded in (
        ("zeros alone", bytes(128)),
        ("no 0x80", inner_of()),
        ("0x81", inner_of() + b"\x81\0\0"),
        ("0x80, then 1", inner_of() + b"\x80\0\1"),
        ("one zero", b"\0"),
        ("0x80 in front only", b"\x80" + b"x" * 127),
    ):
        c.request(title, single(n(), padded=padded))
    q = n()
    c.answer("answer", single(n(), padded=bytes(128), flags=RESPONSE, asked=q), asked=q)


def _signature(c: Case) -> None:
    n = c.nonce
    sm2n = 0xFFFFFFFEFFFFFFFFFFFFFFFFFFFFFFFF7203DF6B21C6052B53BBF40939D54123
    for title, value in (
        ("zeros", bytes(64)),
        ("ones", b"\xff" * 64),
        ("another's signature", bytes.fromhex("11" * 64)),
    ):
        c.request(f"Ed25519: {title}", single(n(), flags=SIGNATURE, trailer=value))
        c.request(f"SM2: {title}", single(n(), key=B, flags=SIGNATURE, trailer=value))
    for r, s in ((0, 1), (1, 0), (sm2n, 1), (1, sm2n), (1, sm2n - 1)):
        value = r.to_bytes(32, "big") + s.to_bytes(32, "big")
        c.request(
            f"SM2: r = {r:#x}, s = {s:#x}", single(n(), key=B, flags=SIGNATURE, trailer=value)
        )
    c.request(
        "a kid without a key for it", single(n(), key=AES, flags=SIGNATURE, trailer=bytes(64))
    )
    aad, inner = bytes(100), inner_of()
    other = trailer_of(A, SIGNATURE, aad, inner)
    c.request("signature over another AAD", single(n(), flags=SIGNATURE, trailer=other))
    c.request(
        "stream: signature over another body", stream(n(), HALVES, flags=SIGNATURE, signed=b"x")
    )
    both = bytes(64) + trailer_of(A, MAC, aad, inner)
    c.request("bad signature before a bad MAC", single(n(), flags=SIGNATURE | MAC, trailer=both))


def _no_signature(c: Case) -> None:
    n = c.nonce
    for size in (0, 1, 63):
        c.request(
            f"{size} bytes for it", single(n(), flags=SIGNATURE, inner=bytes(size), trailer=b"")
        )
    c.request("demanded", single(n(), key=STRICT, flags=MAC))
    c.request("demanded, neither there", single(n(), key=STRICT))
    c.request("stream, demanded", stream(n(), HALVES, key=STRICT, flags=MAC))


def _mac(c: Case) -> None:
    n = c.nonce
    good = trailer_of(A, MAC, bytes(100), inner_of())
    for title, value in (("zeros", bytes(32)), ("ones", b"\xff" * 32), ("over another AAD", good)):
        c.request(title, single(n(), flags=MAC, trailer=value))
    c.request("stream: over another body", stream(n(), HALVES, flags=MAC, signed=b"x"))
    c.request(
        "D by the wrong digest",
        single(n(), key=msgspec.structs.replace(B, digest="sha256"), flags=MAC),
    )
    q = n()
    c.answer(
        "answer: zeros",
        single(n(), inner=inner_of(ANSWER), flags=RESPONSE | MAC, asked=q, trailer=bytes(32)),
        asked=q,
        mac=True,
    )
    c.answer(
        "stream answer: over another body",
        stream(n(), [inner_of(ANSWER), b""], flags=RESPONSE | MAC, asked=q, signed=b"x"),
        asked=q,
        mac=True,
    )


def _no_mac(c: Case) -> None:
    n = c.nonce
    for size in (0, 1, 31):
        c.request(f"{size} bytes for it", single(n(), flags=MAC, inner=bytes(size), trailer=b""))
    c.request("demanded, signed", single(n(), key=STRICT, flags=SIGNATURE))
    q = n()
    c.answer(
        "answer without the MAC that was asked for",
        single(n(), inner=inner_of(ANSWER), flags=RESPONSE, asked=q),
        asked=q,
        mac=True,
    )


def _prelude(c: Case) -> None:
    n = c.nonce
    for title, prelude in (
        ("empty", b""),
        ("no class line", b"POST /x\napplication/json\n"),
        ("a line too many", PRELUDE + b"\n"),
        ("no LF at the end", PRELUDE[:-1]),
        ("lower case method", b"post /x\n\n\n"),
        ("no method", b" /x\n\n\n"),
        ("method with a digit", b"P0ST /x\n\n\n"),
        ("target without /", b"GET x\n\n\n"),
        ("absolute target", b"GET http://x/\n\n\n"),
        ("* as target", b"OPTIONS *\n\n\n"),
        ("space in the target", b"GET /a b\n\n\n"),
        ("two spaces", b"GET  /x\n\n\n"),
        ("target not ASCII", b"GET /\xc3\xa9\n\n\n"),
        ("tab in the type", b"GET /x\na\tb\n\n"),
        ("CR", b"GET /x\r\n\r\n\r\n"),
        ("NUL in the class", b"GET /x\n\nP\x001\n"),
        ("version in the line", b"GET /x HTTP/1.1\n\n\n"),
    ):
        c.request(
            title, single(n(), inner=inner_of(prelude, b""), model=""), headers={"X-Model-Id": None}
        )
    c.request("longer than the data", single(n(), inner=b"\xff\xff" + PRELUDE))
    c.request("one byte", single(n(), inner=b"\0"))
    c.request("nothing", single(n(), inner=b""))
    c.request("over two frames", stream(n(), [inner_of()[:20], inner_of()[20:]]))
    c.request("its length over two frames", stream(n(), [inner_of()[:1], inner_of()[1:]]))
    q = n()
    for title, prelude in (
        ("two digits", b"20\n\n"),
        ("no digits", b"abc\n\n"),
        ("a request's", PRELUDE),
        ("no type line", b"200\n"),
        ("sign", b"+20\n\n"),
    ):
        c.answer(
            f"answer: {title}",
            single(n(), inner=inner_of(prelude, b""), flags=RESPONSE, asked=q),
            asked=q,
        )


def _model(c: Case) -> None:
    n = c.nonce
    c.request("told twice", single(n()), headers={"X-Model-Id": [MODEL, MODEL]})
    c.request("told with a space", single(n()), headers={"X-Model-Id": "qwen3 8b"})
    c.request("256 bytes", single(n()), headers={"X-Model-Id": "m" * 256})
    for title, body in (
        ("another", b'{"model":"other"}'),
        ("another case", b'{"model":"Qwen3-8b"}'),
        ("none", b'{"x":1}'),
        ("no JSON", b"{"),
        ("nothing but a text", b'"qwen3-8b"'),
        ("twice", b'{"model":"qwen3-8b","model":"qwen3-8b"}'),
        ("a number", b'{"model":8}'),
        ("null", b'{"model":null}'),
        ("a list", b'{"model":["qwen3-8b"]}'),
        ("not UTF-8", b'{"model":"qwen3-8b","x":"\xff"}'),
        ("NaN", b'{"model":"qwen3-8b","x":NaN}'),
        ("junk behind", b'{"model":"qwen3-8b"}x'),
        ("a comma too many", b'{"model":"qwen3-8b",}'),
        ("inside", b'{"x":{"model":"qwen3-8b"}}'),
        ("byte order mark", b"\xef\xbb\xbf" + BODY),
        ("twice, once escaped", b'{"model":"qwen3-8b","mod\\u0065l":"qwen3-8b"}'),
    ):
        c.request(f"body: {title}", single(n(), inner=inner_of(body=body)))
    c.request("body names one, outside none", single(n(), model=""), headers={"X-Model-Id": None})
    c.request(
        "type without a model, outside one", single(n(), inner=inner_of(b"POST /x\ntext/plain\n\n"))
    )
    form = b"POST /x\nmultipart/form-data; boundary=b\n\n"
    part = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nqwen3-8b\r\n'
    c.request(
        "form: two parts of that name", single(n(), inner=inner_of(form, part * 2 + b"--b--\r\n"))
    )


def _tenant(c: Case) -> None:
    n = c.nonce
    for tenant in ("client-b", "Client-A", "client-a,client-a", ""):
        c.request(f"{tenant or 'empty'}", single(n()), headers={"X-Tenant-Id": tenant})
    c.request("a stream", stream(n(), HALVES), headers={"X-Tenant-Id": "client-b"})


RECIPES: dict[str, Callable[[Case], None]] = {
    "ok": _ok,
    "bad_carrier": _carrier,
    "bad_magic": _header,
    "bad_suite": _header,
    "bad_flags": _header,
    "bad_reserved": _header,
    "bad_length": _header,
    "unknown_kid": _kid,
    "kid_expired": _expired,
    "stale": _stale,
    "future": _future,
    "replayed": _replayed,
    "cache_full": _cache_full,
    "bad_tag": _tag,
    "truncated": _truncated,
    "trailing_data": _trailing,
    "frame_too_large": _too_large,
    "bad_padding": _padding,
    "bad_signature": _signature,
    "missing_signature": _no_signature,
    "bad_mac": _mac,
    "missing_mac": _no_mac,
    "bad_prelude": _prelude,
    "model_mismatch": _model,
    "tenant_mismatch": _tenant,
}


def key_rows() -> list[dict[str, Any]]:
    return [
        {
            name: value.hex() if isinstance(value, bytes) else value
            for name, value in msgspec.structs.asdict(key).items()
        }
        for key in KEYS
    ]


def files() -> dict[str, dict[str, Any]]:
    """Return each file's content by its name."""
    made: dict[str, dict[str, Any]] = {"keys": {"format": "smx1-vectors/2", "keys": key_rows()}}
    for index, (outcome, recipe) in enumerate(RECIPES.items()):
        count = _Count()
        count.value = index << 16
        case = Case(outcome, count)
        recipe(case)
        made[outcome] = {"format": "smx1-vectors/2", "vectors": case.vectors}
    return made


def text(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def stored() -> tuple[list[EnvelopeKey], list[dict[str, Any]]]:
    """Return keys and vectors as they are on disk."""
    rows = json.loads((FOLDER / "keys.json").read_text())["keys"]
    binary = {"kid", "root", "sign_public", "sign_private"}
    keys = [
        EnvelopeKey(**{k: bytes.fromhex(v) if k in binary else v for k, v in row.items()})
        for row in rows
    ]
    vectors = []
    for outcome in RECIPES:
        vectors += json.loads((FOLDER / f"{outcome}.json").read_text())["vectors"]
    return keys, vectors


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in files().items():
        (FOLDER / f"{name}.json").write_text(text(content))
