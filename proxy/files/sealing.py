"""Sealing what comes from a source into an envelope, and opening it again, in constant memory.

Connects ends (`ends`) with the decisions (`proxy.sm4`); chooses between a single envelope and a
stream by what fits. It prints nothing.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from proxy.files.ends import UsageError
from proxy.http.body import BodyError, model_of
from proxy.sm4.answer import AnswerOpener
from proxy.sm4.cipher import NONCE_BYTES
from proxy.sm4.envelope import (
    HEADER_BYTES,
    MAC,
    MAGIC,
    MEDIA_TYPE,
    SIGNATURE,
    SINGLE_BYTES_MAX,
    STREAM,
    EnvelopeError,
    RequestPrelude,
    decode_header,
    media_type,
)
from proxy.sm4.sealer import EVENT_STREAM, RequestSealer, SingleTooLargeError
from proxy.sm4.stored import StoredOpener

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from proxy.files.ends import Sink, Source
    from proxy.sm4.keyring import Derived, Keyring

Form = Literal["auto", "single", "stream"]
# Whole frames of the largest size (with the usual pad size), so that none is cut small.
_STEP_BYTES = 4 * 65535


@dataclass(frozen=True, slots=True)
class Order:
    """How to seal. `model` None: what the body names, where its type has one."""

    prelude: RequestPrelude
    form: Form
    model: str | None
    mac: bool
    sign: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What an envelope says of itself; nothing of it is secret but `line`, the prelude's."""

    kid: str
    client: str
    audience: str
    time_ms: int
    stream: bool
    mac: bool
    signature: str
    model: str
    line: str


def seal(
    source: Source,
    sink: Sink,
    derived: Derived,
    order: Order,
    progress: Callable[[int], None],
) -> Facts:
    """Seal all of `source`; the sink is not committed here. Raises `UsageError`, `EndError`."""
    # What is known whole can be a single; one byte more tells a file of just that size from more.
    head = b"" if order.form == "stream" else source.read(SINGLE_BYTES_MAX + 1)
    whole = len(head) <= SINGLE_BYTES_MAX and order.form != "stream"
    model = _model(order, head if whole else None)
    now_ms = time.time_ns() // 1_000_000
    sealer = _sealer(derived, order, model, now_ms)
    stream = True
    if whole:
        try:
            sink.write(sealer.single(order.prelude, head))
            stream = False
        except SingleTooLargeError:
            pass
        except ValueError as problem:
            raise UsageError(str(problem)) from None
    if stream and order.form == "single":
        raise UsageError("does not fit in a single envelope of 1 MiB; leave out --form")
    if stream:
        _stream(source, sink, sealer, order, head, progress)
    key = derived.key
    return Facts(
        key.kid.hex(),
        key.client,
        key.audience,
        now_ms,
        stream,
        sealer.mac,
        key.scheme if order.sign and key.sign_private else "",
        model,
        f"{order.prelude.method} {order.prelude.target}",
    )


def _sealer(derived: Derived, order: Order, model: str, now_ms: int) -> RequestSealer:
    try:
        return RequestSealer(
            derived,
            model=model,
            mac=order.mac,
            nonce=os.urandom(NONCE_BYTES),
            now_ms=now_ms,
            signer=derived.signer() if order.sign else None,
        )
    except ValueError as problem:
        raise UsageError(str(problem)) from None


def _model(order: Order, body: bytes | None) -> str:
    """Return the model id; `body` None: too large to be looked at."""
    kind = media_type(order.prelude.content_type)
    has_model = kind == "application/json" or kind.endswith("+json") or kind.startswith("multipart")
    if not has_model:
        if order.model:
            raise UsageError(f"a body of type {kind or '(none)'} has no model: leave --model out")
        return ""
    if body is None:
        if order.model is None:
            raise UsageError("say which model the body names (--model): it is too large to look")
        return order.model
    try:
        found = model_of(body, order.prelude.content_type)
    except BodyError as problem:
        raise UsageError(f"the body's model cannot be read: {problem}") from None
    if order.model is not None and found != order.model:
        raise UsageError(f"--model {order.model}, but the body names {found or 'none'}")
    return found


def _stream(
    source: Source,
    sink: Sink,
    sealer: RequestSealer,
    order: Order,
    head: bytes,
    progress: Callable[[int], None],
) -> None:
    try:
        stream = sealer.stream(order.prelude)
    except ValueError as problem:
        raise UsageError(str(problem)) from None
    sink.write(stream.head())
    # One piece is kept back: only the end of the source tells which is the last.
    held = head
    while data := source.read(_STEP_BYTES):
        if held:
            sink.write(stream.data(held))
        held = data
        progress(source.read_bytes)
        if sealer.derived.spent():
            raise UsageError("this key has sealed 64 GiB, all it may: rotate it (docs/keys.md)")
    sink.write(stream.last(held))


def open_request(
    source: Source,
    sink: Sink,
    keys: Keyring,
    *,
    model: str,
    times_ms: tuple[int, int] | None,
    progress: Callable[[int], None],
) -> Facts:
    """Open a request's envelope into `sink`; `times_ms`: see `StoredOpener`.

    Raises `EnvelopeError`, `EndError`, `UsageError`.
    """
    opener = StoredOpener(keys, model=model, times_ms=times_ms)
    for data in source.pieces():
        for body in opener.feed(data):
            sink.write(body)
        progress(source.read_bytes)
    sink.write(opener.finish())
    header, key, prelude = opener.header, opener.key, opener.prelude
    assert header is not None
    assert prelude is not None
    return Facts(
        key.kid.hex(),
        key.client,
        key.audience,
        header.time_ms,
        bool(header.flags & STREAM),
        bool(header.flags & MAC),
        key.scheme if header.flags & SIGNATURE else "",
        model,
        f"{prelude.method} {prelude.target} {prelude.content_type}".rstrip(),
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """The request whose answer is opened, as far as its answer depends on it."""

    derived: Derived
    model: bytes
    mac: bool
    nonce: bytes


def asked(path: Path, keys: Keyring, *, model: str) -> Asked:
    """Read what an answer is bound to from its request's envelope. Raises `EnvelopeError`."""
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES:
        raise EnvelopeError("truncated")
    header = decode_header(raw, response=False)
    derived = keys.get(header.kid)
    if derived is None:
        raise EnvelopeError("unknown_kid")
    return Asked(derived, model.encode(), bool(header.flags & MAC), header.nonce)


def open_answer(
    source: Source,
    sink: Sink,
    request: Asked,
    progress: Callable[[int], None],
) -> tuple[int, str]:
    """Open the answer to `request`; return its inner status and type. Errors as `open_request`.

    Both carriers are read: raw bytes begin with the magic, anything else has to be events.
    """
    opener: AnswerOpener | None = None
    begun = b""
    for data in source.pieces():
        piece = data
        if opener is None:
            begun += data
            if len(begun) < len(MAGIC):
                continue
            kind = MEDIA_TYPE if begun.startswith(MAGIC) else EVENT_STREAM
            opener, piece = AnswerOpener(request, kind, None), begun
        for body in opener.feed(piece):
            sink.write(body)
        progress(source.read_bytes)
    if opener is None:
        raise EnvelopeError("truncated")
    sink.write(opener.finish())
    assert opener.prelude is not None
    return opener.prelude.status, opener.prelude.content_type
