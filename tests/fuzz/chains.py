"""What kernels.wire makes of an audit chain, beside its pure twins: lines, leaves, sums.

Lengths are drawn around the edges of a hash's blocks, and of what the C holds at a time.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from kernels import wire
from proxy.audit import chain, tree

if TYPE_CHECKING:
    import random

LETTERS = 'abc"\\é巧\U0001f600'
_crc32 = wire.checksums(zlib.crc32)


def _size(rng: random.Random) -> int:
    edge = rng.choice((0, 0, 55, 64, 119, 128, 900, 900, 900, 4096, 9000))
    return max(0, edge + rng.randrange(-70, 70))


def _number(rng: random.Random) -> int:
    return rng.choice((0, 9, 10, (1 << 64) - 1, rng.randrange(1 << rng.randrange(1, 64))))


def _text(rng: random.Random, size: int) -> str:
    letters = LETTERS if rng.random() < 0.2 else "abc"
    return "".join(rng.choices(letters, k=size))


def _row(rng: random.Random) -> tuple[str, ...]:
    size = _size(rng)
    cuts = sorted(rng.randrange(size + 1) for _ in range(4))
    return tuple(
        _text(rng, end - begin) for begin, end in zip((0, *cuts), (*cuts, size), strict=True)
    )


def check_run(rng: random.Random) -> None:
    """Make the lines of a few records both ways."""
    count = rng.choice((1, 1, 2, 3, 8))
    key, prev = rng.randbytes(rng.randrange(65)), rng.randbytes(32).hex()
    walls, monos = [_number(rng)] * count, [_number(rng)] * count
    for at in range(count):
        if rng.random() < 0.3:
            walls[at], monos[at] = _number(rng), _number(rng)
    rows = [_row(rng) for _ in range(count)]
    seq = rng.randrange(1 << rng.randrange(1, 53))
    names = prev, _text(rng, rng.randrange(90)), _text(rng, rng.randrange(90))
    more = seq, walls, monos, rows, chain.LINE_BYTES
    made = chain._request_run(chain._mac_s256(key), *names, *more)
    assert made == chain._request_run_pure(chain._mac_pure(key), *names, *more)


def _lines(rng: random.Random, count: int) -> bytes:
    lines = [rng.randbytes(_size(rng)).replace(b"\n", b"") for _ in range(count)]
    return b"".join(line + b"\n" for line in lines)


def check_tree(rng: random.Random) -> None:
    """Grow a tree both ways, by lines and by leaves."""
    begin = rng.choice((0, 0, rng.randrange(1, 5000)))
    one, other = [begin, [], []], [begin, [], []]
    for _ in range(rng.randrange(1, 5)):
        count = rng.choice((1, 2, rng.randrange(1, 40), rng.randrange(200, 600)))
        by_line = rng.random() < 0.5
        data = _lines(rng, min(count, 60)) if by_line else rng.randbytes(32 * count)
        one[0] = tree._grow(begin, *one, data, by_line)
        other[0] = tree._grow_pure(begin, *other, data, by_line)
        assert one == other


def check_sum(rng: random.Random) -> None:
    """Sum a few bytes both ways."""
    data, value = rng.randbytes(_size(rng)), rng.getrandbits(32)
    assert _crc32(data, value) == zlib.crc32(data, value)


CHECKS = (check_run, check_tree, check_sum)
