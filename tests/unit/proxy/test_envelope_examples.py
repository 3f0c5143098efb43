"""The worked examples: what our code makes, and what other libraries make of the text."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hmac import HMAC

from tests.unit.proxy import envelope_examples

PAGE = Path(__file__).parents[3] / "docs" / "envelope-examples.md"
TEXT = PAGE.read_text()
AUDIENCE = b"example.org/llm/pod-1"
N = [bytes([index]) * 12 for index in range(1, 6)]


def sections() -> list[dict[str, bytes]]:
    """Return the named values of each section of the page."""
    found = []
    for section in TEXT.split("\n## ")[1:]:
        values: dict[str, bytes] = {}
        name = ""
        for line in re.findall(r"```\n(.*?)```", section, re.DOTALL)[0].splitlines():
            if line.endswith(" ="):
                name = line.removesuffix(" =")
                values[name] = b""
            else:
                values[name] += bytes.fromhex(line.strip())
        found.append(values)
    return found


KEY, REQUEST, SIGNED, STREAM, ANSWER, SSE = sections()


def mac_of(key: bytes, message: bytes) -> bytes:
    made = HMAC(key, hashes.SM3())
    made.update(message)
    return made.finalize()


def unsealed(key: bytes, nonce: bytes, sealed: bytes, aad: bytes) -> bytes:
    cipher = Cipher(algorithms.SM4(key), modes.GCM(nonce, sealed[-16:])).decryptor()
    cipher.authenticate_additional_data(aad)
    return cipher.update(sealed[:-16]) + cipher.finalize()


def with_length(data: bytes) -> bytes:
    return len(data).to_bytes(2, "big") + data


def test_the_page_is_what_the_code_makes() -> None:
    assert envelope_examples.document() == TEXT, (
        "run: python -m tests.unit.proxy.envelope_examples > docs/envelope-examples.md"
    )


def test_the_keys_are_those_of_the_text() -> None:
    info = b"\0\1" + with_length(b"client-a") + with_length(AUDIENCE)
    assert KEY["info(x) after the label"] == info
    assert KEY["PRK"] == mac_of(KEY["kid"], KEY["R"])
    for name, label, size in (
        ("K_req", b"smx1 req", 16),
        ("K_resp", b"smx1 resp", 16),
        ("K_reqs", b"smx1 req stream", 32),
        ("K_resps", b"smx1 resp stream", 32),
        ("K_mac", b"smx1 mac", 32),
    ):
        assert KEY[name] == mac_of(KEY["PRK"], label + info + b"\1")[:size], name


def header(flags: int, time_ms: int, nonce: bytes, length: int) -> bytes:
    return b"".join((
        b"SMX1", bytes([1, flags]), bytes(2), KEY["kid"], time_ms.to_bytes(8, "big"), nonce,
        length.to_bytes(4, "big"),
    ))  # fmt: skip


def padded(data: bytes) -> bytes:
    return data + b"\x80" + bytes(-(len(data) + 1) % 64)


@pytest.mark.parametrize(
    ("example", "flags", "nonce", "model", "inner"),
    [
        (REQUEST, 2, N[0], b"", with_length(b"GET /v1/models\n\n\n")),
        (
            SIGNED,
            8,
            N[1],
            b"tiny",
            with_length(b"POST /v1/completions\napplication/json\nP1\n")
            + b'{"model":"tiny","prompt":"hi"}',
        ),
    ],
)
def test_the_singles_are_those_of_the_text(
    example: dict[str, bytes], flags: int, nonce: bytes, model: bytes, inner: bytes
) -> None:
    envelope = example["envelope"]
    assert example["header"] == header(flags, 1_767_225_600_000, nonce, len(envelope) - 40)
    assert example["AAD"] == example["header"] + with_length(model) + with_length(AUDIENCE)
    assert example["u16 len || prelude || body"] == inner
    assert example["D"] == hashlib.sha256(inner).digest()
    if flags == 2:
        trailer = mac_of(KEY["K_mac"], example["AAD"] + example["D"])
        assert hmac.compare_digest(example["MAC"], trailer)
    else:
        message = b"SMX1 signature\0" + example["AAD"] + example["D"]
        trailer = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).sign(message)
        assert example["signature"] == trailer
    assert example["padded"] == padded(inner + trailer)
    assert envelope[:40] == example["header"]
    opened = unsealed(KEY["K_req"], nonce, envelope[40:], example["AAD"])
    assert opened == example["padded"]


def stream_key(base: bytes, tail: bytes) -> tuple[bytes, bytes]:
    blocks = b"".join(mac_of(base, b"smx1 stream" + bytes([i]) + tail) for i in (1, 2))
    return blocks[:16], blocks[16:28]


def frame_of(frame: bytes, *, last: bool) -> bytes:
    """Return what a frame holds sealed."""
    word = int.from_bytes(frame[:4], "big")
    assert bool(word >> 31) is last
    assert len(frame) - 4 == word & 0x7FFFFFFF
    return frame[4:]


def test_the_stream_is_that_of_the_text() -> None:
    secret, mask = stream_key(KEY["K_reqs"], N[2])
    assert (STREAM["K_s"], STREAM["mask"]) == (secret, mask)
    assert STREAM["header"] == header(1, 1_767_225_600_000, N[2], 0)
    aad = STREAM["header"] + with_length(b"tiny") + with_length(AUDIENCE)
    assert STREAM["AAD of frame 0"] == aad
    for index, name in enumerate(("nonce of frame 0", "nonce of frame 1, the last")):
        plain = bytes(7) + index.to_bytes(4, "big") + bytes([index])
        nonce = bytes(a ^ b for a, b in zip(plain, mask, strict=True))
        assert STREAM[name] == nonce
        sealed = frame_of(STREAM[f"frame {index}"], last=bool(index))
        opened = unsealed(secret, nonce, sealed, b"" if index else aad)
        assert opened == STREAM[f"frame {index} padded"]
    inner = SIGNED["u16 len || prelude || body"]
    cut = len(inner) - 30 + 20
    assert STREAM["frame 0 padded"] == padded(inner[:cut])
    assert STREAM["frame 1 padded"] == padded(inner[cut:])


def test_the_answer_is_that_of_the_text() -> None:
    envelope = ANSWER["envelope"]
    head = header(6, 1_767_225_600_250, N[3], len(envelope) - 40)
    aad = head + with_length(b"") + with_length(AUDIENCE) + N[0]
    inner = with_length(b"200\napplication/json\n") + b'{"data":[]}'
    assert ANSWER["AAD"] == aad
    assert ANSWER["u16 len || prelude || body"] == inner
    assert ANSWER["D"] == hashlib.sha256(inner).digest()
    assert ANSWER["MAC"] == mac_of(KEY["K_mac"], aad + ANSWER["D"])
    assert unsealed(KEY["K_resp"], N[3], envelope[40:], aad) == padded(inner + ANSWER["MAC"])


def test_the_sse_carrier_is_that_of_the_text() -> None:
    secret, mask = stream_key(KEY["K_resps"], N[4] + N[1])
    assert (SSE["K_s"], SSE["mask"]) == (secret, mask)
    head = header(5, 1_767_225_600_250, N[4], 0)
    aad = head + with_length(b"tiny") + with_length(AUDIENCE) + N[1]
    assert SSE["AAD of frame 0"] == aad
    frame = SSE["frame 0, the last"]
    nonce = bytes(a ^ b for a, b in zip(bytes(11) + b"\1", mask, strict=True))
    opened = unsealed(secret, nonce, frame_of(frame, last=True), aad)
    inner = with_length(b"200\ntext/event-stream\n") + b"data: [DONE]\n\n"
    assert SSE["u16 len || prelude || body"] == inner
    assert opened == inner + b"\x80" + bytes(512 - len(inner) - 1)
    shown = re.findall(r"```\n(.*?)```", TEXT.split("\n## ")[-1], re.DOTALL)[1]
    sent = "".join(shown.split()).split("data:")[1:]
    decoded = [base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)) for text in sent]
    assert decoded == [head, frame]
