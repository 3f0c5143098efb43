"""Derive `sbox_constants.h` from the published SM4 S-box, and prove each step over all 256 inputs.

GB/T 32907 prints the S-box as a table. It is also S(x) = A(inv(A(x) + c)) + c with a circulant
bit matrix A and inversion in GF(2)[X] / 0x1f5. A CPU inverts in the AES field (0x11b) and our
portable code in a tower of GF(16); fields of one size are isomorphic, so a bit matrix before and
one behind turn their inversion into this S-box. Nothing here runs when the sidecar does.

Bits of a byte count from the lowest. A matrix is eight rows, row i the mask of the input bits whose
parity is output bit i; `m(x)` below is `apply(m, x)`.

    python -m kernels.sm4.derive            print the header
    python -m kernels.sm4.derive --write    write it beside this file
"""

from __future__ import annotations

import sys
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Matrix = tuple[int, ...]

SBOX = bytes.fromhex(
    "d690e9fecce13db716b614c228fb2c05 2b679a762abe04c3aa44132649860699"
    "9c4250f491ef987a33540b43edcfac62 e4b31ca9c908e89580df94fa758f3fa6"
    "4707a7fcf37317ba83593c19e6854fa8 686b81b27164da8bf8eb0f4b70569d35"
    "1e240e5e6358d1a225227c3b01217887 d40046579fd327524c3602e7a0c4c89e"
    "eabf8ad240c738b5a3f7f2cef96115a1 e0ae5da49b341a55ad933230f58cb1e3"
    "1df6e22e8266ca60c02923ab0d534e6f d5db3745defd8e2f03ff6a726d6c5b51"
    "8d1baf92bbddbc7f11d95c411f105ad8 0ac13188a5cd7bbd2d74d012b8e5b4b0"
    "8969974a0c96777e65b9f109c56ec684 18f07dec3adc4d2079ee5f3ed7cb3948"
)
SM4_POLYNOMIAL = 0x1F5
AES_POLYNOMIAL = 0x11B
HEADER = Path(__file__).with_name("sbox_constants.h")


def multiply(a: int, b: int, polynomial: int, degree: int = 8) -> int:
    """Return a * b in GF(2)[X] / polynomial."""
    result = 0
    for bit in range(degree):
        if b >> bit & 1:
            result ^= a << bit
    for bit in range(2 * degree - 2, degree - 1, -1):
        if result >> bit & 1:
            result ^= polynomial << (bit - degree)
    return result


def apply(matrix: Matrix, x: int) -> int:
    """Return the matrix times the byte."""
    return sum(((row & x).bit_count() & 1) << i for i, row in enumerate(matrix))


def matrix_of(function: Callable[[int], int]) -> Matrix:
    """Return the matrix of a linear function of a byte; AssertionError if it is not linear."""
    columns = [function(1 << bit) for bit in range(8)]
    matrix = tuple(sum((columns[j] >> i & 1) << j for j in range(8)) for i in range(8))
    assert all(apply(matrix, x) == function(x) for x in range(256)), "not linear"
    return matrix


def times(left: Matrix, right: Matrix) -> Matrix:
    """Return the matrix that applies `right`, then `left`."""
    return matrix_of(lambda x: apply(left, apply(right, x)))


def plus(left: Matrix, right: Matrix) -> Matrix:
    """Return the sum of two matrices."""
    return tuple(a ^ b for a, b in zip(left, right, strict=True))


def inverse(matrix: Matrix) -> Matrix:
    """Return the inverse matrix; KeyError if there is none."""
    table = {apply(matrix, x): x for x in range(256)}
    return matrix_of(lambda x: table[x])


def inversion(field: Callable[[int, int], int]) -> list[int]:
    """Return the table of x -> 1 / x (0 -> 0): x^254 in a field of 256 elements."""

    def invert(x: int) -> int:
        result = 1
        for _ in range(254):
            result = field(result, x)
        return result

    return [invert(x) for x in range(256)]


def sm4_field(a: int, b: int) -> int:
    """Multiply in the field GB/T 32907's S-box inverts in."""
    return multiply(a, b, SM4_POLYNOMIAL)


def aes_field(a: int, b: int) -> int:
    """Multiply in the field the CPU inverts in."""
    return multiply(a, b, AES_POLYNOMIAL)


TOWER_NU = 8  # Y^2 + Y + 8 has no root in GF(16), so it makes a field; around() proves it


def tower_field(a: int, b: int) -> int:
    """Multiply (h Y + l) in GF(16)[Y] / (Y^2 + Y + nu), GF(16) = GF(2)[X] / (X^4 + X + 1)."""
    ah, al, bh, bl = a >> 4, a & 15, b >> 4, b & 15
    high = multiply(ah, bh, 0x13, 4)
    low = multiply(al, bl, 0x13, 4)
    cross = multiply(ah ^ al, bh ^ bl, 0x13, 4) ^ low  # ah*bh + ah*bl + al*bh
    return cross << 4 | (low ^ multiply(high, TOWER_NU, 0x13, 4))


def affine() -> tuple[Matrix, int]:
    """Find (A, c), A circulant, with S(x) = A(inv(A(x) + c)) + c for all x."""
    invert = inversion(sm4_field)
    for first, c in product(range(256), range(256)):
        rows = tuple((first << i | first >> (8 - i)) & 0xFF for i in range(8))
        if all(apply(rows, invert[apply(rows, x) ^ c]) ^ c == SBOX[x] for x in range(256)):
            return rows, c
    raise AssertionError("the table is not the published one")


def isomorphism(field: Callable[[int, int], int]) -> Matrix:
    """Return a bit matrix that turns SM4's field into `field`: a root of 0x1f5 gives it."""
    for root in range(2, 256):
        powers = [1]
        for _ in range(8):
            powers.append(field(powers[-1], root))
        value = 0
        for degree in range(9):
            value ^= powers[degree] if SM4_POLYNOMIAL >> degree & 1 else 0
        if value == 0:
            columns = powers[:8]
            matrix = tuple(sum((columns[j] >> i & 1) << j for j in range(8)) for i in range(8))
            assert all(
                apply(matrix, sm4_field(x, y)) == field(apply(matrix, x), apply(matrix, y))
                for x in range(256)
                for y in (2, 3, 0x53, 0xFF)
            )
            return matrix
    raise AssertionError("no root: this is not a field of 256 elements")


def around(field: Callable[[int, int], int]) -> tuple[Matrix, int, Matrix, int]:
    """Return (P, p, Q, q) with S(x) = Q(inv(P(x) + p)) + q, inv in `field`; proved for all x."""
    a, c = affine()
    phi = isomorphism(field)
    before, before_constant = times(phi, a), apply(phi, c)
    behind = times(a, inverse(phi))
    invert = inversion(field)
    for x in range(256):
        assert apply(behind, invert[apply(before, x) ^ before_constant]) ^ c == SBOX[x]
    return before, before_constant, behind, c


def gfni(matrix: Matrix) -> int:
    """Return the matrix as GF2P8AFFINEQB wants it: row i in byte 7 - i."""
    return sum(row << 8 * (7 - i) for i, row in enumerate(matrix))


def circuit(matrix: Matrix, constant: int) -> list[str]:
    """Return C statements on planes x0..x7 -> y0..y7, shared sums first (Paar's greedy order)."""
    rows = [{f"x{j}" for j in range(8) if row >> j & 1} for row in matrix]
    lines: list[str] = []
    while True:
        pairs = [pair for row in rows for pair in combinations(sorted(row), 2)]
        best = max(sorted(set(pairs)), key=pairs.count, default=None)
        if best is None or pairs.count(best) < 2:
            break
        name = f"s{len(lines)}"
        lines.append(f"{name} = {best[0]} ^ {best[1]}")
        for row in rows:
            if row >= set(best):
                row.difference_update(best)
                row.add(name)
    declared = "plane " + ", ".join(lines) if lines else ""
    sums = [
        f"y{i} = {'~(' if constant >> i & 1 else ''}{' ^ '.join(sorted(row))}"
        f"{')' if constant >> i & 1 else ''}"
        for i, row in enumerate(rows)
    ]
    return [declared, *sums] if declared else sums


def define(name: str, statements: Sequence[str]) -> str:
    """Return a C macro of these statements, a few to a line."""
    lines: list[str] = []
    line = "   "
    for statement in ", ".join(statements[:1]).split(", ") if statements[0][:5] == "plane" else ():
        line = _put(lines, line, f" {statement},")
    if lines or line.strip():
        line = line.removesuffix(",") + ";"
        lines.append(line)
        statements = statements[1:]
    line = "   "
    for statement in statements:
        line = _put(lines, line, f" {statement};")
    lines.append(line)
    return " \\\n".join([f"#define {name}", *lines]) + "\n"


def _put(lines: list[str], line: str, more: str) -> str:
    if len(line) + len(more) > 96:
        lines.append(line)
        return "    " + more.lstrip()
    return line + more


def shifted(by: int) -> Matrix:
    """Return the matrix of a shift left (negative: right) within a byte."""
    return matrix_of(lambda x: (x << by if by >= 0 else x >> -by) & 0xFF)


def header() -> str:
    """Return the text of sbox_constants.h."""
    p, p_constant, q, c = around(aes_field)
    tower_in, tower_in_constant, tower_out, tower_out_constant = around(tower_field)
    one = shifted(0)
    # L(B) = B ^ B<<<2 ^ B<<<10 ^ B<<<18 ^ B<<<24 (GB/T 32907, 6.2), byte by byte: output byte j is
    # a(b[j]) + r(b[j+1]) + r(b[j+2]) + d(b[j+3]), with a + d = r. So it is also
    # d(b[j]) + a(b[j+3]) + the sum over all j of r(b[j]).
    a, d = plus(one, shifted(2)), plus(one, shifted(-6))
    r = plus(shifted(2), shifted(-6))
    assert plus(a, d) == r
    numbers: list[tuple[str, str, int]] = [
        ("SM4_AFFINE_IN", "P", gfni(p)),
        ("SM4_AFFINE_OUT", "Q", gfni(q)),
        ("SM4_AFFINE_IN_INVERSE", "P^-1", gfni(inverse(p))),
        ("SM4_FOLD_A", "P a Q", gfni(times(p, times(a, q)))),
        ("SM4_FOLD_R", "P r Q", gfni(times(p, times(r, q)))),
        ("SM4_FOLD_D", "P d Q", gfni(times(p, times(d, q)))),
    ]
    constants = [
        ("SM4_CONSTANT_IN", "p", p_constant),
        ("SM4_CONSTANT_OUT", "c", c),
        ("SM4_CONSTANT_FOLD", "P(r(c)): what the four terms' constants add up to",
         apply(p, apply(r, c))),
    ]  # fmt: skip
    text = [
        "/* Written by kernels/sm4/derive.py from the published S-box; do not edit.",
        " *",
        " * S(x) = Q(inv(P(x) + p)) + c with inv in the AES field (0x11b). Matrices are in the",
        " * form of GF2P8AFFINEQB. FOLD: the state is kept as P(x), round keys as P(k) + p; output",
        " * byte j gains A(t[j]) + R(t[j+1]) + R(t[j+2]) + D(t[j+3]), A + D = R, each one",
        " * GF2P8AFFINEINVQB, t[0] the most significant byte; the constants together are FOLD.",
        " * TOWER: the same S-box around inversion in GF(16)[Y] / (Y^2 + Y + 8), on bit planes.",
        " */",
        "#ifndef TONGGUAN_SM4_SBOX_CONSTANTS_H",
        "#define TONGGUAN_SM4_SBOX_CONSTANTS_H",
        "",
    ]
    text += [f"#define {name} 0x{value:016x}LL /* {what} */" for name, what, value in numbers]
    text += [f"#define {name} 0x{value:02x} /* {what} */" for name, what, value in constants]
    text += [
        "",
        define("SM4_TOWER_IN", circuit(tower_in, tower_in_constant)),
        define("SM4_TOWER_OUT", circuit(tower_out, tower_out_constant)),
        "#endif",
        "",
    ]
    return "\n".join(text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        HEADER.write_text(header())
    else:
        sys.stdout.write(header())
