"""What the SM4 tests share: the published vectors, keys, and both ends of the channel."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.sm4.answer import AnswerOpener
from proxy.sm4.envelope import (
    MEDIA_TYPE,
    STREAM,
    Header,
    RequestPrelude,
    associated_data,
    pad,
)
from proxy.sm4.frames import StreamCipher
from proxy.sm4.keyring import Derived, EnvelopeKey, Keyring
from proxy.sm4.receiver import Receiver
from proxy.sm4.replay import ReplayCache
from proxy.sm4.sealer import RequestSealer

if TYPE_CHECKING:
    from proxy.sm4.opener import OpenedRequest, RequestOpener

NOW_MS = 1_767_225_600_000
BODY = b'{"model":"qwen3-8b","messages":[{"role":"user","content":"hello"}]}'
MODEL = "qwen3-8b"
PRELUDE = RequestPrelude("POST", "/v1/chat/completions", "application/json", "P1")


@cache
def vector_file() -> dict[str, Any]:
    path = Path(__file__).parents[2] / "vectors" / "smx1_vectors.json"
    return dict(json.loads(path.read_bytes()))


def vector_keys() -> dict[bytes, EnvelopeKey]:
    keys = [
        EnvelopeKey(
            kid=bytes.fromhex(row["kid"]),
            root=bytes.fromhex(row["root"]),
            client=row["client"],
            audience=row["audience"],
            tenant=row["client"],
            suite=row["suite"],
            digest=row["digest"],
            not_before_ms=row["not_before_ms"],
            not_after_ms=row["not_after_ms"],
            pad=row["pad"],
            require_mac=row["require_mac"],
            require_signature=row["require_signature"],
            scheme=row["scheme"] or "",
            sign_public=bytes.fromhex(row["sign_public"] or ""),
            sign_private=bytes.fromhex(row["sign_private"] or ""),
        )
        for row in vector_file()["keys"]
    ]
    return {key.kid: key for key in keys}


def make_key(suite: int = 1, **changes: Any) -> EnvelopeKey:
    key = EnvelopeKey(
        kid=bytes([suite]) * 8,
        root=bytes(range(suite, 32 + suite)),
        client="client-a",
        audience="example.org/llm/pod-1",
        tenant="team-a",
        suite=suite,
        digest="sha256",
        not_before_ms=NOW_MS - 3_600_000,
        not_after_ms=NOW_MS + 3_600_000,
    )
    return msgspec.structs.replace(key, **changes)


def make_receiver(*keys: EnvelopeKey, **changes: Any) -> Receiver:
    arguments: dict[str, Any] = {
        "start_ms": NOW_MS - 600_000,
        "fence_ms": 10_000,
        "max_body_bytes": 32 << 20,
    }
    replay = changes.pop("replay", None) or ReplayCache()
    return Receiver(Keyring(keys or (make_key(),)), replay, **(arguments | changes))


def derived_of(key: EnvelopeKey) -> Derived:
    derived = Keyring([key]).get(key.kid)
    assert derived is not None
    return derived


_COUNT = iter(range(1, 1 << 40))


def fresh_nonce() -> bytes:
    """Return a nonce unique within the test run, the same from run to run."""
    return next(_COUNT).to_bytes(12, "big")


def seal_request(
    key: EnvelopeKey,
    body: bytes = BODY,
    *,
    prelude: RequestPrelude = PRELUDE,
    model: str = MODEL,
    mac: bool = False,
    sign: bool = False,
    now_ms: int = NOW_MS,
    cuts: list[int] | None = None,
    nonce: bytes | None = None,
) -> tuple[RequestSealer, bytes]:
    """Return (sealer, wire); `cuts` (body bytes of each frame) makes it a stream."""
    derived = derived_of(key)
    sealer = RequestSealer(
        derived,
        model=model,
        mac=mac,
        nonce=nonce or fresh_nonce(),
        now_ms=now_ms,
        signer=derived.signer() if sign else None,
    )
    if cuts is None:
        return sealer, sealer.single(prelude, body)
    stream = sealer.stream(prelude)
    wire = stream.head()
    for size in cuts:
        wire += stream.data(body[:size])
        body = body[size:]
    return sealer, wire + stream.last(body)


def begin(
    receiver: Receiver, model: str | None = MODEL, tenant: str | None = None
) -> RequestOpener:
    return receiver.begin(MEDIA_TYPE, None, model, False, tenant)


def open_request(
    receiver: Receiver,
    wire: bytes,
    *,
    model: str | None = MODEL,
    tenant: str | None = None,
    now_ms: int = NOW_MS,
    end_ms: int | None = None,
    cut: int = 0,
) -> OpenedRequest:
    """Open a whole HTTP body, fed in pieces of `cut` bytes (0: at once)."""
    opener = begin(receiver, model, tenant)
    for piece in pieces(wire, cut):
        opener.feed(piece, now_ms)
    return finished(opener, now_ms if end_ms is None else end_ms)


def finished(opener: RequestOpener, now_ms: int) -> OpenedRequest:
    """Finish and answer what is asked at once, the shared store's question with yes."""
    opened = opener.finish(now_ms)
    if opened is None and opener.to_insert is not None:
        opened = opener.inserted("ok", now_ms)
    if opened is None:
        assert opener.check is not None
        opened = opener.checked(valid=opener.check.run())
    return opened


def pieces(data: bytes, cut: int) -> list[bytes]:
    if cut <= 0:
        return [data]
    return [data[i : i + cut] for i in range(0, len(data), cut)]


def open_answer(
    sealer: RequestSealer, wire: bytes, *, content_type: str = MEDIA_TYPE, cut: int = 0
) -> tuple[int, str, bytes]:
    """Return (status, content type, body) of an answer fed in pieces."""
    opener = AnswerOpener(sealer, content_type, None)
    body = b""
    for piece in pieces(wire, cut):
        body += b"".join(opener.feed(piece))
    body += opener.finish()
    assert opener.prelude is not None
    return opener.prelude.status, opener.prelude.content_type, body


def hand_sealed(
    inner: bytes,
    *,
    flags: int = 0,
    key: EnvelopeKey | None = None,
    padded: bytes | None = None,
    model: str = MODEL,
) -> bytes:
    """Seal any plaintext at all, as a client that does not keep to the format might."""
    key = key or make_key()
    padded = pad(inner, key.pad) if padded is None else padded
    head = Header(key.suite, flags, key.kid, NOW_MS, fresh_nonce(), len(padded) + 16).encode()
    derived = derived_of(key)
    aad = associated_data(head, model.encode(), derived.audience)
    return head + derived.request.seal(head[24:36], padded, aad)


def hand_streamed(
    frames: list[bytes], *, flags: int = STREAM, key: EnvelopeKey | None = None
) -> bytes:
    """Seal frames of any data, the last of them as last."""
    key = key or make_key()
    head = Header(key.suite, flags, key.kid, NOW_MS, fresh_nonce(), 0).encode()
    derived = derived_of(key)
    aad = associated_data(head, MODEL.encode(), derived.audience)
    cipher = StreamCipher(derived.request_streams, key.suite, aad, head[24:36])
    return head + b"".join(
        cipher.seal(data, key.pad, last=i == len(frames) - 1) for i, data in enumerate(frames)
    )


class GmsslSigner:
    """SM2 by the `gmssl` package with a k of the caller's: for known answers only."""

    def __init__(self, key: EnvelopeKey, k: str) -> None:
        from gmssl.sm2 import CryptSM2

        self._sm2 = CryptSM2(key.sign_private.hex(), "04" + key.sign_public.hex())
        # Its constructor strips every 0 and 4 in front, not the one mark.
        self._sm2.public_key = key.sign_public.hex()
        self._public = key.sign_public
        self._k = k

    def sign(self, message: bytes) -> bytes:
        digest = self._sm2._sm3_z(message)
        return bytes.fromhex(self._sm2.sign(bytes.fromhex(digest), self._k))

    def verify(self, signature: bytes, message: bytes) -> bool:
        digest = self._sm2._sm3_z(message)
        return bool(self._sm2.verify(signature.hex(), bytes.fromhex(digest)))

    def public(self) -> bytes:
        return self._public


def sm2_with_k(key: EnvelopeKey, k: str) -> GmsslSigner:
    return GmsslSigner(key, k)
