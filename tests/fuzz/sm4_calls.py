"""The calls of `Sm4Gcm`, drawn at random: what each must answer, write, leave alone and refuse.

A property takes a `Bench` (a tier, its keys and its memory) and a random generator that belongs to
the case. `cryptography` says what is right.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from kernels import sm4
from tests.fuzz import fences
from tests.unit.kernels.sm4_oracle import oracle

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

LONG = 70_000  # beyond 64 KiB calls let go of the GIL
KEYS = 4
NONCE, TAG = 12, 16
GROUP = 1024  # what the widest tier works on at once


def opened(key: bytes, nonce: bytes, sealed: bytes, aad: bytes) -> bytes | None:
    """Open with `cryptography`; None where the tag does not match."""
    if len(sealed) < TAG:
        return None
    worker = Cipher(algorithms.SM4(key), modes.GCM(nonce, sealed[-TAG:])).decryptor()
    worker.authenticate_additional_data(aad)
    text = worker.update(sealed[:-TAG])
    try:
        return text + worker.finalize()
    except InvalidTag:
        return None


def length(rng: random.Random) -> int:
    """Draw a text's length: mostly short, often at an edge, seldom long."""
    which = rng.randrange(100)
    if which < 35:
        return rng.randrange(80)
    if which < 60:
        return rng.randrange(600)
    if which < 80:
        return rng.randrange(2200)
    edge = rng.choice((16, 128, 256, 512, GROUP)) * rng.randrange(1, 12)
    if which < 97:
        return max(0, edge + rng.randrange(-18, 19))
    return rng.choice((rng.randrange(LONG), 65536 + rng.randrange(-18, 19)))


def aad_length(rng: random.Random) -> int:
    """Draw the additional data's length."""
    which = rng.randrange(20)
    if which < 17:
        return rng.choice((0, 16, 32, rng.randrange(130)))
    return rng.randrange(5000) if which < 19 else rng.randrange(LONG)


class Bench:
    """One tier with the keys in use; new ones come now and then."""

    def __init__(self, tier: str) -> None:
        self.tier = tier
        self.input = fences.Arena(LONG + 300)
        self.output = fences.Arena(LONG + 300)
        self.extra = fences.Arena(LONG + 300)
        self.no_buffers = fences.no_buffers()
        self._keys: list[tuple[bytes, sm4.Sm4Gcm]] = []

    def key(self, rng: random.Random) -> tuple[bytes, sm4.Sm4Gcm]:
        """Return a key's bytes and its object, which many cases share, or a fresh one."""
        if not self._keys or rng.randrange(20) == 0:
            raw = rng.randbytes(16)
            made = raw, sm4.Sm4Gcm(kind(rng, raw), self.tier, rng.random() < 0.5)
            self._keys = [made, *self._keys][:KEYS]
        return rng.choice(self._keys)


def kind(rng: random.Random, data: bytes) -> Any:
    """Return these bytes as some kind of buffer."""
    return rng.choice(fences.KINDS)(data)


def call(
    rng: random.Random, function: Callable[..., Any], names: tuple[str, ...], *values: object
) -> Any:
    """Call with some of the arguments by name, and see that no reference is kept or lost."""
    by_name = rng.randrange(len(values) + 1) if names and rng.random() < 0.3 else len(values)
    named = dict(zip(names[by_name:], values[by_name:], strict=False))
    before = references(values)
    failure: Exception | None = None
    result: Any = None
    try:
        result = function(*values[:by_name], **named)
    except Exception as error:  # noqa: BLE001 - raised below
        failure = error.with_traceback(None)
    assert references(values) == before, (function.__name__, values)
    try:
        if failure is not None:
            raise failure
    finally:
        del failure, values  # the traceback would keep them
    return result


def references(values: Iterable[object]) -> list[int]:
    """Return reference counts, of objects that nobody else has."""
    shared = (int, float, type, str, type(None))
    own = (value for value in values if not isinstance(value, shared))
    return [sys.getrefcount(value) for value in own if type(value) is not bytes or len(value) > 1]


SEAL = ("nonce", "plaintext", "aad")
OPEN = ("nonce", "sealed", "aad")
INTO = {True: ("nonce", "plaintext", "out", "aad"), False: ("nonce", "sealed", "out", "aad")}


def whole_messages(bench: Bench, rng: random.Random) -> None:
    """Seal and open as `cryptography` does, from any kind of buffer."""
    raw, cipher = bench.key(rng)
    nonce, text, aad = rng.randbytes(NONCE), rng.randbytes(length(rng)), rng.randbytes(
        aad_length(rng)
    )  # fmt: skip
    sealed = oracle(raw, nonce, text, aad)
    given = kind(rng, nonce), kind(rng, text), kind(rng, aad)
    assert call(rng, cipher.seal, SEAL, *given) == sealed
    assert call(rng, cipher.open, OPEN, given[0], kind(rng, sealed), given[2]) == text
    if not aad:
        assert cipher.seal(nonce, text) == sealed


def into_fenced_memory(bench: Bench, rng: random.Random) -> None:
    """Write in place or apart, at any alignment, up to the byte before memory ends."""
    raw, cipher = bench.key(rng)
    size, extra, nonce = length(rng), aad_length(rng), rng.randbytes(NONCE)
    seal, in_place = rng.random() < 0.5, rng.random() < 0.4
    first = bench.extra.place(rng, extra)
    aad = bench.extra.room[first : first + extra]
    text = rng.randbytes(size)
    sealed = oracle(raw, nonce, text, bytes(aad))
    given, result = (text, sealed) if seal else (sealed, text)
    bad = not seal and rng.random() < 0.3
    if bad:
        given = flipped(rng, given)
        result = bytes(size)
    source = bench.input
    longest = size + TAG if in_place else len(given)
    at = source.place(rng, longest)
    source.room[at : at + len(given)] = given
    target = source if in_place else bench.output
    to = at if in_place else target.place(rng, len(result))
    out = target.room[to : to + (longest if in_place else len(result))]
    around = target.around(to, len(result))
    function = cipher.seal_into if seal else cipher.open_into
    values = (nonce, source.room[at : at + len(given)], out, aad)
    before = bytes(aad)
    try:
        assert call(rng, function, INTO[seal], *values) == len(result)
        assert not bad
    except sm4.InvalidTag:
        assert bad
    assert target.room[to : to + len(result)] == result
    assert target.around(to, len(result)) == around
    assert in_place or source.room[at : at + len(given)] == given
    assert aad == before


def flipped(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with one bit changed."""
    bent = bytearray(data)
    bent[rng.randrange(len(bent))] ^= 1 << rng.randrange(8)
    return bytes(bent)


def damaged_messages(bench: Bench, rng: random.Random) -> None:
    """Open nothing of which one bit, one byte or the length was changed; release nothing."""
    raw, cipher = bench.key(rng)
    nonce, text, aad = rng.randbytes(NONCE), rng.randbytes(length(rng)), rng.randbytes(
        aad_length(rng)
    )  # fmt: skip
    sealed = oracle(raw, nonce, text, aad)
    which = rng.randrange(6)
    if which == 0:
        nonce = flipped(rng, nonce)
    elif which == 1 and aad:
        aad = flipped(rng, aad)
    elif which == 2:
        sealed = sealed[: rng.randrange(len(sealed))]
    elif which == 3:
        sealed += rng.randbytes(rng.randrange(1, 40))
    elif which == 4:
        sealed = sealed[:-TAG] + flipped(rng, sealed[-TAG:])
    else:
        sealed = flipped(rng, sealed)
    try:
        call(rng, cipher.open, OPEN, kind(rng, nonce), kind(rng, sealed), kind(rng, aad))
    except sm4.InvalidTag as refusal:
        assert refusal.args in {("the tag does not match",), ("shorter than a tag",)}
    else:
        raise AssertionError("opened what was not sealed")


def overlapping_memory(bench: Bench, rng: random.Random) -> None:
    """Refuse an output that overlaps an input, unless both begin together; write nothing then."""
    raw, cipher = bench.key(rng)
    seal, nonce = rng.random() < 0.5, rng.randbytes(NONCE)
    size, extra = min(length(rng), 1500), rng.randrange(200)
    given = size + (0 if seal else TAG)
    written = size + (TAG if seal else 0)
    room = bench.output.room[:8000]
    room[:] = rng.randbytes(8000)
    at = rng.randrange(200, 8000 - 3400)
    to = at + rng.choice((0, 0, rng.randrange(-150, 151), rng.randrange(-written - 1, given + 2)))
    first = rng.choice((at, to, rng.randrange(7800)))
    to, first = max(0, to), max(0, min(first, 8000 - extra))
    long = written + rng.randrange(20)
    aad = bytes(room[first : first + extra])
    if not seal:
        room[at : at + given] = oracle(raw, nonce, bytes(room[at : at + size]), aad)
        aad = bytes(room[first : first + extra])
    text = bytes(room[at : at + given])
    before = bytes(room)

    def meet(a: int, a_size: int, b: int, b_size: int) -> bool:
        return a_size > 0 and b_size > 0 and a < b + b_size and b < a + a_size

    refused = (at != to and meet(at, given, to, written)) or meet(first, extra, to, written)
    result = oracle(raw, nonce, text, aad) if seal else opened(raw, nonce, text, aad)
    function = cipher.seal_into if seal else cipher.open_into
    views = room[at : at + given], room[to : to + long], room[first : first + extra]
    try:
        call(rng, function, INTO[seal], nonce, *views)
    except sm4.InvalidTag:
        assert not refused
        assert result is None
        result = bytes(size)
    except ValueError as refusal:
        assert refused
        assert "overlaps" in str(refusal)
        assert room == before
        return
    assert not refused
    assert result is not None
    expected = bytearray(before)
    expected[to : to + written] = result
    assert room == expected


def wrong_arguments(bench: Bench, rng: random.Random) -> None:
    """Refuse each wrong argument by its own error, and write nothing."""
    _, cipher = bench.key(rng)
    into, seal = rng.random() < 0.5, rng.random() < 0.5
    allowed: set[type[Exception]] = set()

    def maybe(good: object, *bad: tuple[object, type[Exception]]) -> object:
        if rng.random() < 0.6:
            return good
        value, error = rng.choice((*bad, *bench.no_buffers))
        allowed.add(error)
        return value

    size = rng.randrange(200)
    short = rng.choice((0, 1, 11, 13, 16, 300))
    values = [
        maybe(bytes(NONCE), (kind(rng, bytes(short)), ValueError)),
        maybe(bytes(size)) if seal else maybe(bytes(size + TAG), (bytes(15), sm4.InvalidTag)),
    ]
    out = bytearray(b"\xaa" * (size + TAG))
    if into:
        small = bytearray(rng.randrange(size) if size else 0)
        values.append(
            maybe(out, (bytes(out), BufferError), (memoryview(out).toreadonly(), BufferError),
                  *([(small, ValueError)] if len(small) < size else []))
        )  # fmt: skip
    if rng.random() < 0.7:
        values.append(maybe(bytes(rng.randrange(40))))
    named: dict[str, object] = {}
    if rng.random() < 0.2:
        named = {rng.choice(("nonce", "tag", "plaintex", "aad\0")): b""}
        allowed.add(TypeError)
    if rng.random() < 0.1:
        del values[rng.randrange(2) :]
        allowed.add(TypeError)
    elif rng.random() < 0.1:
        values += [b""] * 4
        allowed.add(TypeError)
    function = getattr(cipher, ("seal" if seal else "open") + ("_into" if into else ""))
    before = references(values)
    try:
        function(*values, **named)
    except (sm4.InvalidTag, ValueError, TypeError, BufferError) as refusal:
        if not seal:
            allowed.add(sm4.InvalidTag)  # zeros are no message
        assert type(refusal) in allowed, (values, refusal)
        clean = out == b"\xaa" * len(out)
        assert clean or (type(refusal) is sm4.InvalidTag and not any(out[:size]))
        assert out[size:] == b"\xaa" * TAG
    else:
        assert not allowed, values
    assert references(values) == before
    values.clear()  # one may be a view of it
    out.append(0)  # BufferError, were it still exported


class Broken:
    """A sequence that does not keep its word."""

    def __init__(self, rng: random.Random, items: list[object]) -> None:
        self._way, self._items = rng.randrange(4), items

    def __len__(self) -> int:
        return len(self._items) + (-1, 5, 1 << 60, 0)[self._way]

    def __getitem__(self, index: int) -> object:
        if self._way == 3 and index:
            raise KeyError(index)
        return self._items[index]


def many_messages(bench: Bench, rng: random.Random) -> None:
    """Seal a list as one by one, and refuse a list with anything wrong in it as a whole."""
    raw, cipher = bench.key(rng)
    count = rng.randrange(9)
    nonces = [rng.randbytes(NONCE) for _ in range(count)]
    texts = [rng.randbytes(rng.randrange(400)) for _ in range(count)]
    aads = [rng.randbytes(rng.randrange(40)) for _ in range(count)]
    columns: list[Any] = [[kind(rng, item) for item in column] for column in (nonces, texts, aads)]
    if rng.random() < 0.3:
        del columns[2]
        aads = [b""] * count
    allowed: set[type[Exception]] = set()
    if count and rng.random() < 0.4:
        column = rng.choice(columns)
        wrong, error = rng.choice((*bench.no_buffers, (b"short", None)))
        if error is None and column is columns[0]:
            error = ValueError
        if error is not None:
            column[rng.randrange(count)] = wrong
            allowed.add(error)
    if count and rng.random() < 0.2:
        del rng.choice(columns)[-1:]
        allowed.add(ValueError)
    which = rng.randrange(len(columns))
    shape = rng.randrange(8)
    if shape == 0:
        columns[which] = iter(columns[which])
    elif shape == 1:
        columns[which] = tuple(columns[which])
    elif shape == 2:
        columns[which] = rng.choice((7, object(), 1.5))
        allowed.add(TypeError)
    elif shape == 3:
        columns[which] = Broken(rng, columns[which])
        allowed |= {KeyError, MemoryError, ValueError, OverflowError, TypeError, BufferError}
    try:
        result = call(rng, cipher.seal_many, ("nonces", "messages", "aads"), *columns)
    except Exception as refusal:  # noqa: BLE001 - any at all is looked at
        assert type(refusal) in allowed, (columns, refusal)
        return
    if shape == 3:
        assert all(type(one) is bytes for one in result)
        return
    assert not allowed, columns
    for nonce, text, aad, sealed in zip(nonces, texts, aads, result, strict=True):
        assert sealed == oracle(raw, nonce, text, aad)


def keys(bench: Bench, rng: random.Random) -> None:
    """Make keys of right and wrong arguments; a block is what `cryptography` makes of it."""
    raw = rng.randbytes(16)
    wrong = rng.choice((
        ((kind(rng, rng.randbytes(rng.choice((0, 1, 15, 17, 32)))), bench.tier), ValueError),
        ((rng.choice(bench.no_buffers)[0], bench.tier), (TypeError, BufferError, ValueError)),
        ((raw, "none"), ValueError), ((raw, 1), TypeError), ((raw, b"portable"), TypeError),
        ((), TypeError), ((raw, None, False, 1), TypeError), ((raw, "\udc80\0"), ValueError),
    ))  # fmt: skip
    try:
        sm4.Sm4Gcm(*wrong[0])
    except (TypeError, ValueError, BufferError) as refusal:
        assert isinstance(refusal, wrong[1])
    else:
        raise AssertionError(f"made a key of {wrong[0]!r}")
    cipher = sm4.Sm4Gcm(kind(rng, raw), tier=bench.tier, one_message=rng.random() < 0.5)
    assert cipher.tier == bench.tier
    block = rng.randbytes(16)
    worker = Cipher(algorithms.SM4(raw), modes.ECB()).encryptor()
    assert cipher.encrypt_block(kind(rng, block)) == worker.update(block)
    nonce, text = rng.randbytes(NONCE), rng.randbytes(length(rng))
    assert cipher.seal(nonce, text) == oracle(raw, nonce, text, b"")


PROPERTIES = (
    whole_messages, whole_messages, into_fenced_memory, into_fenced_memory, into_fenced_memory,
    damaged_messages, overlapping_memory, wrong_arguments, many_messages, keys,
)  # fmt: skip
