"""Cases for the tiers of SM4-GCM in a process of their own, and the driver that runs them.

The driver (sm4_driver.c) is compiled for a CPU that Python does not run on, or with sanitizers.
What is right comes from `cryptography`.
"""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.unit.kernels.sm4_oracle import oracle

if TYPE_CHECKING:
    import random

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "kernels" / "sm4"
TIERS = ("schedule.c", "tiers.c", "tier_*.c")  # what does not need Python.h

# RFC 8998, A.1: key, nonce, additional data, text, ciphertext, tag.
RFC_8998 = tuple(
    bytes.fromhex(field)
    for field in (
        "0123456789abcdeffedcba9876543210",
        "00001234567800000000abcd",
        "feedfacedeadbeeffeedfacedeadbeefabaddad2",
        "aa" * 8 + "bb" * 8 + "cc" * 8 + "dd" * 8 + "ee" * 8 + "ff" * 8 + "ee" * 8 + "aa" * 8,
        """17f399f08c67d5ee19d0dc9969c4bb7d5fd46fd3756489069157b282bb200735
        d82710ca5c22f0ccfa7cbf93d496ac15a56834cbcf98c397b4024a2691233b8d""",
        "83de3541e4c2b58177e065a9bf7b62ec",
    )
)


@dataclass(frozen=True, slots=True)
class Case:
    """One call of a tier. `powers_for`: bytes in whole blocks the key is made for, 0 for any."""

    key: bytes
    nonce: bytes
    aad: bytes
    given: bytes
    seal: bool
    expected: bytes
    powers_for: int = 0
    offsets: tuple[int, int] = (0, 0)
    in_place: bool = False

    def packed(self) -> bytes:
        """Return the case as the driver reads it."""
        sizes = (len(self.aad), len(self.given), self.powers_for)
        how = struct.pack("<IIIBBBB", *sizes, self.seal, *self.offsets, self.in_place)
        return how + self.key + self.nonce + self.aad + self.given

    def __str__(self) -> str:
        way = "seal" if self.seal else "open"
        place = "in place" if self.in_place else "apart"
        return (
            f"{way} {len(self.given)} bytes {place}, {len(self.aad)} of additional data, powers "
            f"for {self.powers_for}, offsets {self.offsets}"
        )


def both_ways(rng: random.Random, length: int, aad_length: int) -> list[Case]:
    """Make a random text of this length, to seal and to open."""
    key, nonce = rng.randbytes(16), rng.randbytes(12)
    aad, text = rng.randbytes(aad_length), rng.randbytes(length)
    sealed = oracle(key, nonce, text, aad)
    ciphertext, tag = sealed[:-16], sealed[-16:]
    cases = []
    enough = sum((part + 15) // 16 * 16 for part in (length, aad_length))
    for seal in (True, False):
        given, result = (text, ciphertext) if seal else (ciphertext, text)
        powers_for = rng.choice((0, enough, enough + rng.randrange(99)))
        offsets = (rng.randrange(64), rng.randrange(64))
        cases.append(
            Case(
                key, nonce, aad, given, seal, result + tag, powers_for, offsets, rng.random() < 0.5
            )
        )
    return cases


def many(rng: random.Random, lengths: list[int]) -> list[Case]:
    """Make cases of these lengths, with additional data of 0..128 bytes and sometimes much more."""
    cases = []
    for length in lengths:
        aad_length = rng.choice((0, 16, 17, rng.randrange(129), rng.randrange(129), 1100))
        cases += both_ways(rng, length, aad_length)
    return cases


def rfc_8998() -> list[Case]:
    """Return the published case, to seal and to open."""
    key, nonce, aad, text, ciphertext, tag = RFC_8998
    return [
        Case(key, nonce, aad, text, True, ciphertext + tag),
        Case(key, nonce, aad, ciphertext, False, text + tag),
    ]


def compiled(compiler: str, program: Path, sources: list[Path], *flags: str) -> Path:
    """Compile a program; AssertionError shows what the compiler says."""
    command = [compiler, "-std=gnu11", "-Wall", "-Wextra", "-Werror", *flags]
    command += ["-o", str(program), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return program


def build(compiler: str, into: Path, *flags: str) -> Path:
    """Compile the driver with all tiers; AssertionError shows what the compiler says."""
    sources = [path for pattern in TIERS for path in sorted(SOURCES.glob(pattern))]
    sources.append(Path(__file__).with_name("sm4_driver.c"))
    return compiled(compiler, into / "sm4_driver", sources, f"-I{SOURCES}", *flags)


def tiers(command: list[str]) -> dict[str, bool]:
    """Return the tiers in the driver, and whether each says that it is usable."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return {name: state == "usable" for name, state in map(str.split, done.stdout.splitlines())}


def answers(command: list[str], cases: list[Case]) -> list[bytes]:
    """Return what the driver gives for each case; AssertionError shows what it complains about."""
    given = b"".join(case.packed() for case in cases)
    done = subprocess.run(command, input=given, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    found, at = [], 0
    for case in cases:
        found.append(done.stdout[at : at + len(case.expected)])
        at += len(case.expected)
    assert at == len(done.stdout)
    return found


def wrong(command: list[str], cases: list[Case]) -> list[str]:
    """Return the cases whose answer is not the expected one, for a failure's text."""
    got = answers(command, cases)
    return [str(case) for case, answer in zip(cases, got, strict=True) if answer != case.expected]
