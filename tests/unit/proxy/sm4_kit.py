"""What the SM4 tests share: the published vectors, keys, and both ends of the channel."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

from proxy.sm4.answer import AnswerOpener
from proxy.sm4.envelope import MEDIA_TYPE, RequestPrelude
from proxy.sm4.keyring import Derived, EnvelopeKey, Keyring
from proxy.sm4.receiver import OpenedRequest, Receiver, RequestOpener
from proxy.sm4.replay import ReplayCache
from proxy.sm4.sealer import RequestSealer

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
    return dataclasses.replace(key, **changes)


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
    now_ms: int = NOW_MS,
    cuts: list[int] | None = None,
    nonce: bytes | None = None,
) -> tuple[RequestSealer, bytes]:
    """Return (sealer, wire); `cuts` (body bytes of each frame) makes it a stream."""
    sealer = RequestSealer(
        derived_of(key), model=model, mac=mac, nonce=nonce or fresh_nonce(), now_ms=now_ms
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
    return opener.finish(now_ms if end_ms is None else end_ms)


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
