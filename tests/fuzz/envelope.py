"""Fuzz the readers of sealed envelopes: header, frames, both carriers of answers, prelude.

    .venv/bin/python -m tests.fuzz.envelope                 60 s, a new seed
    .venv/bin/python -m tests.fuzz.envelope --seconds 600 --seed 7

What was sealed, in any cuts and frames and with any pad size, comes out as it went in, however the
bytes arrive. What was damaged is refused or unchanged, for one reason however it arrives, and gives
out nothing that is not the body's. Authentic plaintext of any form is a request, or refused, as a
reader that goes byte by byte says. Exit codes: 0 nothing found, 1 a difference.
"""

from __future__ import annotations

import argparse
import base64
import random
import sys
import time
from typing import TYPE_CHECKING

from proxy.sm4.answer import AnswerOpener
from proxy.sm4.envelope import (
    HEADER_BYTES,
    MAC,
    MEDIA_TYPE,
    RESPONSE,
    SIGNATURE,
    EnvelopeError,
    Header,
    RequestPrelude,
    associated_data,
    pad,
)
from proxy.sm4.sealer import RequestSealer, ResponseSealer
from proxy.sm4.signature import draw
from tests.unit.proxy.sm4_kit import (
    NOW_MS,
    begin,
    derived_of,
    finished,
    hand_sealed,
    make_key,
    make_receiver,
)

if TYPE_CHECKING:
    from proxy.sm4.keyring import EnvelopeKey
    from proxy.sm4.sealer import Carrier

MODEL = "qwen3-8b"
SSE = "text/event-stream"
PADS = (1, 2, 128, 512, 4096)
TYPES = ("", "application/json", "text/plain", SSE, "application/vnd.x+json; a=b")
JUNK = (b"", b"\0", b"\n", b"\r\n", b"data: ", b":x\n", b"=", b"\x80", b"SMX1", b"\xff\xff\xff\xff")
INNER_JUNK = (b"\n", b" ", b"/", b"\r", b"\0", b"A", b"a", b"\xff", b"\x7f", b"GET /", b"\n\n\n")


def bytes_of(rng: random.Random, longest: int) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 7, 60, rng.randint(0, longest))))


def key_of(rng: random.Random) -> EnvelopeKey:
    private, public = draw("ed25519", rng.randbytes)
    signing = {"scheme": "ed25519", "sign_public": public, "sign_private": private}
    return make_key(
        rng.choice((1, 2)),
        pad=rng.choice(PADS),
        digest=rng.choice(("sha256", "sm3")),
        **(signing if rng.random() < 0.5 else {}),
    )


def segments(rng: random.Random, wire: bytes) -> list[bytes]:
    """Return the bytes as they might arrive."""
    count = rng.choice((1, 1, 2, 5, 40))
    cuts = sorted(rng.randint(0, len(wire)) for _ in range(count - 1))
    return [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]


def damaged(rng: random.Random, wire: bytes, borders: list[int]) -> bytes:
    """Return the wire with one or two things wrong; borders are where its parts begin."""
    made = bytearray(wire)
    for _ in range(rng.choice((1, 1, 2))):
        at = rng.randint(0, max(0, len(made) - 1))
        match rng.randrange(7):
            case 0 if made:
                made[at] ^= 1 << rng.randrange(8)
            case 1:
                del made[at : at + rng.randint(1, 40)]
            case 2:
                made[at:at] = rng.choice(JUNK) or rng.randbytes(3)
            case 3:
                del made[at:]
            case 4:
                made += rng.choice(JUNK)
            case 5 if made:  # within the header, or a frame's prefix
                made[rng.choice((rng.randrange(40), *borders)) % len(made)] = rng.randrange(256)
            case _:  # whole parts moved, doubled or left out
                pairs = zip(borders, [*borders[1:], len(wire)], strict=True)
                parts = [wire[a:b] for a, b in pairs]
                rng.shuffle(parts)
                made = bytearray(b"".join(parts[: rng.randint(0, len(parts))]))
    return bytes(made)


def damaged_event(rng: random.Random, wire: bytes) -> bytes:
    """Return the SSE carrier with what one event carries made longer, shorter or another."""
    events = wire.split(b"\n\n")[:-1]
    at = rng.randrange(len(events))
    text = events[at].removeprefix(b"data: ")
    payload = bytearray(base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4)))
    match rng.randrange(4):
        case 0:
            payload += rng.randbytes(rng.randint(1, 5))
        case 1:
            del payload[-rng.randint(1, 5) :]
        case 2:
            payload[rng.randrange(4)] = rng.randrange(256)
        case _:
            payload[rng.randrange(len(payload))] ^= 1 << rng.randrange(8)
    events[at] = b"data: " + base64.urlsafe_b64encode(payload).rstrip(b"=")
    return b"\n\n".join([*events, b""])


def opened_request(
    key: EnvelopeKey, model: str, pieces: list[bytes]
) -> tuple[str, RequestPrelude | None, bytes]:
    """Return (reason or "ok", prelude, body)."""
    opener = begin(make_receiver(key), model)
    try:
        for piece in pieces:
            opener.feed(piece, NOW_MS)
        opened = finished(opener, NOW_MS)
    except EnvelopeError as problem:
        assert opener.held_bytes == 0
        return problem.reason, None, b""
    prelude = RequestPrelude(opened.method, opened.target, opened.content_type, opened.qos)
    return "ok", prelude, opened.body


def check_request(rng: random.Random) -> None:
    """Seal, open, damage, open: one request."""
    key = key_of(rng)
    derived = derived_of(key)
    kind = rng.choice(TYPES)
    model = MODEL if "json" in kind else ""
    body = b'{"model":"qwen3-8b"}' + b" " * rng.randint(0, 3000) if model else bytes_of(rng, 3000)
    prelude = RequestPrelude(
        rng.choice(("GET", "POST", "DELETE")), "/" + "x" * rng.randint(0, 300), kind, "P1"
    )
    sealer = RequestSealer(
        derived,
        model=model,
        mac=rng.random() < 0.5,
        nonce=rng.randbytes(12),
        now_ms=NOW_MS,
        signer=derived.signer() if rng.random() < 0.5 else None,
    )
    parts = [sealer.single(prelude, body)]
    if rng.random() < 0.6:
        stream, left = sealer.stream(prelude), body
        parts = [stream.head()]
        for _ in range(rng.randint(0, 5)):
            size = rng.randint(0, len(left))
            parts.append(stream.data(left[:size]))
            left = left[size:]
        parts.append(stream.last(left))
    wire = b"".join(parts)
    why = (key, wire.hex(), model)
    assert opened_request(key, model, segments(rng, wire)) == ("ok", prelude, body), why
    bent = damaged(rng, wire, borders(parts))
    whole = opened_request(key, model, [bent])
    assert (whole[0] == "ok") is (bent == wire), (bent.hex(), *why)
    assert opened_request(key, model, segments(rng, bent)) == whole, (bent.hex(), *why)


def borders(parts: list[bytes]) -> list[int]:
    found, at = [], 0
    for part in parts:
        found.append(at)
        at += len(part)
    return found


def opened_answer(
    request: RequestSealer, kind: str, pieces: list[bytes]
) -> tuple[str, bytes, bytes]:
    """Return (reason or "ok", what was released, prelude)."""
    opener = AnswerOpener(request, kind, None)
    out = b""
    try:
        for piece in pieces:
            out += b"".join(opener.feed(piece))
        out += opener.finish()
    except EnvelopeError as problem:
        return problem.reason, out, b""
    assert opener.complete
    assert opener.prelude is not None
    return "ok", out, opener.prelude.encode()


def check_answer(rng: random.Random) -> None:
    """Seal, open, damage, open: one answer."""
    key = key_of(rng)
    derived = derived_of(key)
    mac = rng.random() < 0.5
    request = RequestSealer(derived, model=MODEL, mac=mac, nonce=rng.randbytes(12), now_ms=NOW_MS)
    answer = ResponseSealer(derived, MODEL.encode(), request.nonce, mac=mac)
    kind, body = rng.choice(TYPES), bytes_of(rng, 3000)
    carrier: Carrier = rng.choice(("raw", "sse"))
    nonce = rng.randbytes(12)
    parts = [answer.single(200, kind, body, nonce=nonce, now_ms=NOW_MS)]
    if carrier == "sse" or rng.random() < 0.5:
        stream = answer.stream(200, kind, nonce=nonce, now_ms=NOW_MS, carrier=carrier)
        parts, left = [stream.head()], body
        for _ in range(rng.randint(0, 5)):
            size = rng.randint(0, len(left))
            parts.append(stream.data(left[:size]))
            left = left[size:]
        parts.append(stream.last(left))
    wire = b"".join(parts)
    outer = SSE if carrier == "sse" else MEDIA_TYPE
    why = (key, request.nonce.hex(), wire.hex())
    whole = opened_answer(request, outer, [wire])
    assert whole[:2] == ("ok", body), why
    assert opened_answer(request, outer, segments(rng, wire)) == whole, why
    bent = damaged(rng, wire, borders(parts))
    inside = carrier == "sse" and rng.random() < 0.5
    if inside:
        bent = damaged_event(rng, wire)
    one = opened_answer(request, outer, [bent])
    other = opened_answer(request, outer, segments(rng, bent))
    assert one[0] == other[0], (bent.hex(), *why)
    # The carrier allows comments and line ends; what it carries it cannot change.
    assert one[0] != "ok" or one == whole, (bent.hex(), *why)
    assert not inside or (one[0] == "ok") is (bent == wire), (bent.hex(), *why)
    for said in (one, other):
        assert body.startswith(said[1]), (bent.hex(), *why)


def reference_prelude(raw: bytes) -> tuple[bytes, bytes, bytes, bytes] | None:
    """Return (method, target, type, class), going byte by byte."""
    fields, field = [], b""
    for byte in raw:
        if byte == 0x0A:
            fields.append(field)
            field = b""
        else:
            field += bytes([byte])
    if len(fields) != 3 or field:
        return None
    method, _, target = fields[0].partition(b" ")
    good = (
        bool(method)
        and all(0x41 <= b <= 0x5A for b in method)
        and target[:1] == b"/"
        and all(0x21 <= b <= 0x7E for b in target)
        and all(0x20 <= b <= 0x7E for b in fields[1] + fields[2])
    )
    return (method, target, fields[1], fields[2]) if good else None


def check_plaintext(rng: random.Random) -> None:
    """Seal plaintext of any form under the right key; compare with the reference."""
    key = make_key()
    inner = bytearray(b"GET /v1/x?y=1\ntext/plain\nP1\n")
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        at = rng.randint(0, len(inner))
        inner[at : at + rng.choice((0, 0, 1, 3))] = rng.choice(INNER_JUNK)
    prelude, body = bytes(inner), bytes_of(rng, 200)
    size = len(prelude) if rng.random() < 0.8 else rng.choice((0, 1, len(prelude) + 1, 0xFFFF))
    whole = size.to_bytes(2, "big") + prelude + body
    expected = reference_prelude((prelude + body)[:size])
    if len(prelude + body) < size:
        expected = None
    flags = rng.choice((0, 0, 0, MAC, SIGNATURE, MAC | SIGNATURE))
    got = opened_request(key, "", [hand_sealed_bare(whole, flags)])
    if flags:
        small = len(whole) < (64 if flags & SIGNATURE else 0) + (32 if flags & MAC else 0)
        first = ("missing_" if small else "bad_") + ("signature" if flags & SIGNATURE else "mac")
        assert got[0] == first, (flags, whole)
    elif expected is None:
        assert got[0] == "bad_prelude", whole
    elif got[0] == "model_mismatch":
        assert b"json" in expected[2] or b"multipart" in expected[2], whole
    else:
        prelude_got = got[1]
        assert prelude_got is not None, (whole, got)
        fields = (
            prelude_got.method,
            prelude_got.target,
            prelude_got.content_type,
            prelude_got.qos,
        )
        assert tuple(f.encode() for f in fields) == expected, whole
        assert got[2] == (prelude + body)[size:], whole


def hand_sealed_bare(inner: bytes, flags: int) -> bytes:
    return hand_sealed(inner, flags=flags, model="")


def check_answer_plaintext(rng: random.Random) -> None:
    """Seal an answer's plaintext of any form under the right key; compare with the reference."""
    derived = derived_of(make_key())
    inner = bytearray(b"200\ntext/plain\n")
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        at = rng.randint(0, len(inner))
        inner[at : at + rng.choice((0, 0, 1, 3))] = rng.choice((*INNER_JUNK, b"0", b"99"))
    prelude, body = bytes(inner), bytes_of(rng, 200)
    size = len(prelude) if rng.random() < 0.8 else rng.choice((0, 1, len(prelude) + 1, 0xFFFF))
    whole = size.to_bytes(2, "big") + prelude + body
    told = (prelude + body)[:size]
    lines = told.split(b"\n")
    good = (
        len(told) == size
        and len(lines) == 3
        and not lines[2]
        and len(lines[0]) == 3
        and all(0x30 <= b <= 0x39 for b in lines[0])
        and all(0x20 <= b <= 0x7E for b in lines[1])
    )
    mac = rng.random() < 0.2
    request = RequestSealer(derived, model=MODEL, mac=mac, nonce=rng.randbytes(12), now_ms=NOW_MS)
    padded = pad(whole, 128)
    flags = RESPONSE | (MAC if mac else 0)
    head = Header(1, flags, derived.key.kid, NOW_MS, rng.randbytes(12), len(padded) + 16)
    raw = head.encode()
    aad = associated_data(raw, MODEL.encode(), derived.audience, request.nonce)
    wire = raw + derived.response.seal(head.nonce, padded, aad)
    got = opened_answer(request, MEDIA_TYPE, segments(rng, wire))
    if mac:
        assert got[0] == ("missing_mac" if len(whole) < 32 else "bad_mac"), whole
    elif not good:
        assert got[:2] == ("bad_prelude", b""), whole
    else:
        assert got == ("ok", (prelude + body)[size:], size.to_bytes(2, "big") + told), whole


def check_bytes(rng: random.Random) -> None:
    """Any bytes at all are refused, and so is anything behind a good header."""
    key = make_key()
    data = rng.randbytes(rng.choice((0, 1, 39, 40, 41, 200)))
    if rng.random() < 0.7:
        good = hand_sealed(b"x")
        data = good[: rng.randint(0, HEADER_BYTES)] + data
    whole = opened_request(key, MODEL, [data])
    assert whole[0] != "ok"
    assert opened_request(key, MODEL, segments(rng, data)) == whole, data.hex()


CHECKS = (check_request, check_answer, check_plaintext, check_answer_plaintext, check_bytes)


def check(rng: random.Random) -> None:
    """Run one of the checks. AssertionError when something differs."""
    rng.choice(CHECKS)(rng)


def main() -> int:
    """Check until the time is over."""
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
    print(f"{cases} envelopes, none read wrongly")
    return 0


if __name__ == "__main__":
    sys.exit(main())
