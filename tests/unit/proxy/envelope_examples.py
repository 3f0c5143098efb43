"""The worked examples of docs/envelope-examples.md.

.venv/bin/python -m tests.unit.proxy.envelope_examples > docs/envelope-examples.md
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from proxy.sm4.digest import hkdf_expand, hkdf_extract, new_digest
from proxy.sm4.envelope import (
    MAC,
    RESPONSE,
    SIGNATURE,
    STREAM,
    Header,
    RequestPrelude,
    ResponsePrelude,
    associated_data,
    pad,
)
from proxy.sm4.frames import StreamCipher, sse_event, stream_secrets
from proxy.sm4.keyring import Derived, EnvelopeKey, derivation_info
from proxy.sm4.sealer import RequestSealer, ResponseSealer
from proxy.sm4.signature import signed_message

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = EnvelopeKey(
    kid=bytes.fromhex("a1a2a3a4a5a6a7a8"),
    root=bytes(range(32)),
    client="client-a",
    audience="example.org/llm/pod-1",
    tenant="team-a",
    suite=1,
    digest="sha256",
    not_before_ms=1_767_182_400_000,
    not_after_ms=1_767_268_800_000,
    pad=64,
    scheme="ed25519",
    sign_public=bytes.fromhex("03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"),
    sign_private=bytes(range(32)),
)
TIME_MS = 1_767_225_600_000
MODEL = "tiny"
BODY = b'{"model":"tiny","prompt":"hi"}'
POST = RequestPrelude("POST", "/v1/completions", "application/json", "P1")
GET = RequestPrelude("GET", "/v1/models", "", "")
N = [bytes([index]) * 12 for index in range(1, 6)]


def keys() -> Iterator[tuple[str, bytes]]:
    prk = hkdf_extract(KEY.kid, KEY.root)
    yield "kid", KEY.kid
    yield "R", KEY.root
    yield "info(x) after the label", derivation_info(KEY)
    yield "PRK", prk
    for name, label, size in (
        ("K_req", b"smx1 req", 16),
        ("K_resp", b"smx1 resp", 16),
        ("K_reqs", b"smx1 req stream", 32),
        ("K_resps", b"smx1 resp stream", 32),
        ("K_mac", b"smx1 mac", 32),
    ):
        yield name, hkdf_expand(prk, label + derivation_info(KEY), size)


def single(
    prelude: RequestPrelude, body: bytes, model: str, nonce: bytes, flags: int
) -> Iterator[tuple[str, bytes]]:
    derived = Derived(KEY)
    sealer = RequestSealer(
        derived,
        model=model,
        mac=bool(flags & MAC),
        nonce=nonce,
        now_ms=TIME_MS,
        signer=derived.signer() if flags & SIGNATURE else None,
    )
    wire = sealer.single(prelude, body)
    aad = associated_data(wire[:40], model.encode(), derived.audience)
    inner = prelude.encode() + body
    digest = new_digest(KEY.digest)
    digest.update(inner)
    d = digest.digest()
    yield "header", wire[:40]
    yield "AAD", aad
    yield "u16 len || prelude || body", inner
    trailer = b""
    if flags:
        yield "D", d
    if flags & SIGNATURE:
        signer = derived.signer()
        assert signer is not None
        trailer = signer.sign(signed_message(aad, d))
        yield "signature", trailer
    if flags & MAC:
        mac = derived.mac.mac(aad + d)
        yield "MAC", mac
        trailer += mac
    yield "padded", pad(inner + trailer, KEY.pad)
    yield "envelope", wire


def stream() -> Iterator[tuple[str, bytes]]:
    derived = Derived(KEY)
    sealer = RequestSealer(derived, model=MODEL, mac=False, nonce=N[2], now_ms=TIME_MS)
    made = sealer.stream(POST)
    head, first, last = made.head(), made.data(BODY[:20]), made.last(BODY[20:])
    secret, mask = stream_secrets(derived.request_streams, KEY.suite, N[2])
    yield "header", head
    yield "AAD of frame 0", associated_data(head, MODEL.encode(), derived.audience)
    yield "K_s", secret
    yield "mask", mask
    yield "nonce of frame 0", bytes(a ^ b for a, b in zip(bytes(12), mask, strict=True))
    yield (
        "nonce of frame 1, the last",
        bytes(a ^ b for a, b in zip(bytes(10) + b"\x01\x01", mask, strict=True)),
    )
    yield "frame 0 padded", pad(POST.encode() + BODY[:20], KEY.pad)
    yield "frame 1 padded", pad(BODY[20:], KEY.pad)
    yield "frame 0", first
    yield "frame 1", last


def answer() -> Iterator[tuple[str, bytes]]:
    derived = Derived(KEY)
    sealer = ResponseSealer(derived, b"", N[0], mac=True)
    wire = sealer.single(200, "application/json", b'{"data":[]}', nonce=N[3], now_ms=TIME_MS + 250)
    inner = ResponsePrelude(200, "application/json").encode() + b'{"data":[]}'
    aad = associated_data(wire[:40], b"", derived.audience, N[0])
    digest = new_digest(KEY.digest)
    digest.update(inner)
    yield "AAD", aad
    yield "u16 len || prelude || body", inner
    yield "D", digest.digest()
    yield "MAC", derived.mac.mac(aad + digest.digest())
    yield "envelope", wire


def carrier() -> tuple[list[tuple[str, bytes]], str]:
    derived = Derived(KEY)
    head = Header(KEY.suite, RESPONSE | STREAM, KEY.kid, TIME_MS + 250, N[4], 0).encode()
    aad = associated_data(head, MODEL.encode(), derived.audience, N[1])
    inner = ResponsePrelude(200, "text/event-stream").encode() + b"data: [DONE]\n\n"
    cipher = StreamCipher(derived.response_streams, KEY.suite, aad, N[4], N[1])
    frame = cipher.seal(inner, 512, last=True)
    secret, mask = stream_secrets(derived.response_streams, KEY.suite, N[4], N[1])
    rows = [
        ("AAD of frame 0", aad),
        ("K_s", secret),
        ("mask", mask),
        ("u16 len || prelude || body", inner),
        ("frame 0, the last", frame),
    ]
    return rows, (sse_event(head) + sse_event(frame)).decode()


def block(rows: Iterator[tuple[str, bytes]] | list[tuple[str, bytes]]) -> str:
    lines = []
    for name, value in rows:
        lines += [f"{name} =", *(f"    {part}" for part in textwrap.wrap(value.hex(), 80))]
    return "```\n" + "\n".join(lines) + "\n```\n"


def document() -> str:
    """Return the page."""
    rows, events = carrier()
    wrapped = "\n".join(
        part
        for line in events.splitlines()
        for part in textwrap.wrap(line, 88, break_on_hyphens=False)
    )
    return f"""# The envelope, worked through

The values behind [envelope.md](envelope.md), each from those before it; all bytes in hexadecimal.
Written by `python -m tests.unit.proxy.envelope_examples`; a test computes them again with
`hashlib` and `cryptography` alone.

## Key

Client `client-a`, audience `example.org/llm/pod-1`, suite 1, digest SHA-256, pad size 64, Ed25519
with the private key 00, 01, … 1f.

{block(keys())}
## A request without body, with a MAC

`GET /v1/models`, no type, no class, no model; unix time {TIME_MS} ms, N = 01 twelve times, flags 2.

{block(single(GET, b"", "", N[0], MAC))}
## A signed request

`POST /v1/completions`, `application/json`, class P1, model `tiny`, body `{BODY.decode()}`, N = 02
twelve times, flags 8. The signature is over `SMX1 signature`, a zero byte, AAD and D.

{block(single(POST, BODY, MODEL, N[1], SIGNATURE))}
## The same request as a stream of two frames

Cut behind the body's first 20 bytes, without a signature; N = 03 twelve times, flags 1. `frame`
is u32 (bit 31: last, n) and n sealed bytes.

{block(stream())}
## The answer to the first request

Status 200, `application/json`, body `{{"data":[]}}`, a quarter of a second later, N = 04 twelve
times, flags 6 (answer, MAC). The AAD ends with the request's N.

{block(answer())}
## An event stream in the SSE carrier, to the signed request

Status 200, `text/event-stream`, one event `data: [DONE]` in the only frame, padded to 512; N = 05
twelve times, flags 5. First the events' content, then the HTTP body, its lines wrapped here.

{block(rows)}
```
{wrapped}
```
"""


if __name__ == "__main__":
    print(document(), end="")
