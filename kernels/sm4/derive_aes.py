"""Derive `aes_constants.h`: how the AES S-box instructions compute a round of SM4, proved.

AESENCLAST and AESE apply the S-box of AES, which is the inversion that SM4 needs (see derive.py)
with another affine map behind it. As in the GFNI tiers the state is kept as P(x), so nothing has to
be done before the instruction; behind it one map per term of the linear layer is left, and an
affine map of a byte is two look-ups by nibble, which PSHUFB and TBL do inside registers.

With t the word of bytes behind the instruction and rho the rotation by one byte, the round's gain
is F + rho(F) + rho^2(F) with F = A(t) + rho(D(t)), since the middle terms' map is A + D.

    python -m kernels.sm4.derive_aes            print the header
    python -m kernels.sm4.derive_aes --write    write it beside this file
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.sm4 import derive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

HEADER = Path(__file__).with_name("aes_constants.h")


@cache
def aes_sbox() -> tuple[int, ...]:
    """Return the S-box of AES from its definition (FIPS 197, 5.1.1)."""

    def mixed(y: int) -> int:
        turned = (((y << turn | y >> (8 - turn)) & 0xFF) for turn in range(5))
        total = 0x63
        for term in turned:
            total ^= term
        return total

    return tuple(mixed(y) for y in derive.inversion(derive.aes_field))


def nibbles(function: Callable[[int], int]) -> tuple[bytes, bytes]:
    """Return 16-byte tables with low[x & 15] ^ high[x >> 4] = function(x); it must be affine."""
    low = bytes(function(x) for x in range(16))
    high = bytes(function(x << 4) ^ function(0) for x in range(16))
    assert all(low[x & 15] ^ high[x >> 4] == function(x) for x in range(256)), "not affine"
    return low, high


def by_table(tables: tuple[bytes, bytes], x: int) -> int:
    """Do as the tiers do."""
    return tables[0][x & 15] ^ tables[1][x >> 4]


def tables() -> dict[str, tuple[bytes, bytes]]:
    """Return the maps by name, as nibble tables, proved for all 256 inputs."""
    p, constant, _, _ = derive.around(derive.aes_field)
    left = derive.inverse(p)
    one, up, down = derive.shifted(0), derive.shifted(2), derive.shifted(-6)
    a, d = derive.plus(one, up), derive.plus(one, down)
    sbox = aes_sbox()
    # What the instruction gives -> what SM4's S-box gives, for the same x.
    gives = {sbox[derive.apply(p, x) ^ constant]: derive.SBOX[x] for x in range(256)}
    found = {
        "ENTER": nibbles(lambda x: derive.apply(p, x)),
        "LEAVE": nibbles(lambda x: derive.apply(left, x)),
        "SBOX": nibbles(lambda y: gives[y]),
        "A": nibbles(lambda y: derive.apply(p, derive.apply(a, gives[y]))),
        "D": nibbles(lambda y: derive.apply(p, derive.apply(d, gives[y]))),
    }
    prove(found, constant)
    return found


def prove(found: dict[str, tuple[bytes, bytes]], constant: int) -> None:
    """Put each byte value at each place of a word through a round's T; compare with GB/T 32907."""
    sbox = aes_sbox()
    for place in range(4):
        for x in range(256):
            word = [0x00, 0x5A, 0xC3, 0xFF]  # least significant byte first
            word[place] = x
            t = [sbox[by_table(found["ENTER"], byte) ^ constant] for byte in word]
            f = [by_table(found["A"], t[i]) ^ by_table(found["D"], t[i - 1]) for i in range(4)]
            gain = [f[i] ^ f[i - 1] ^ f[i - 2] for i in range(4)]
            got = bytes(by_table(found["LEAVE"], byte) for byte in gain)
            assert int.from_bytes(got, "little") == transform(word), "T is wrong"


def transform(word: Iterable[int]) -> int:
    """Return T = L(S(word)) (GB/T 32907, 6.2), the bytes given least significant first."""
    b = int.from_bytes(bytes(derive.SBOX[byte] for byte in word), "little")
    total = b
    for turn in (2, 10, 18, 24):
        total ^= (b << turn | b >> (32 - turn)) & 0xFFFFFFFF
    return total


def header() -> str:
    """Return the text of aes_constants.h."""
    lines = [
        "/* Written by kernels/sm4/derive_aes.py from the published S-box; do not edit.",
        " *",
        " * Maps of a byte as LOW[x & 15] ^ HIGH[x >> 4]. The state is kept as ENTER(x), round",
        " * keys as ENTER(key) ^ SM4_CONSTANT_IN (sbox_constants.h). With t behind the AES S-box",
        " * and rho the rotation by one byte to the left, F = A(t) ^ rho(D(t)), a word gains",
        " * F ^ rho(F) ^ rho^2(F). LEAVE undoes ENTER; SBOX(t) is SM4's S-box itself. */",
        "#ifndef TONGGUAN_SM4_AES_CONSTANTS_H",
        "#define TONGGUAN_SM4_AES_CONSTANTS_H",
        "",
    ]
    for name, pair in tables().items():
        for half, table in zip(("LOW", "HIGH"), pair, strict=True):
            lines.append(f"#define SM4_AES_{name}_{half} \\")
            lines.append("    " + ", ".join(f"0x{byte:02x}" for byte in table[:8]) + ", \\")
            lines.append("    " + ", ".join(f"0x{byte:02x}" for byte in table[8:]))
    return "\n".join([*lines, "", "#endif", ""])


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        HEADER.write_text(header())
    else:
        sys.stdout.write(header())
