"""The aarch64 tiers of SM4-GCM, in an emulator: they give the right bytes. Their speed is unknown.

Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross, qemu-user.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.kernels import sm4_cases

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
LIBRARIES = Path("/usr/aarch64-linux-gnu")
# The first has the SM4 instructions, the second AES and PMULL but not SM4.
ALL, NO_SM4 = "max", "cortex-a72"
ON = (("arm-sm4", ALL), ("arm-aese", ALL), ("arm-aese", NO_SM4), ("portable", NO_SM4))
BIG = [4095, 4096, 4097, 16383, 16385, 65536, 65537, 262145]

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
    reason=f"aarch64: needs {COMPILER} and {EMULATOR}",
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sm4_cases.build(COMPILER, tmp_path_factory.mktemp("arm"), "-O2", "-static")


def emulated(driver: Path, cpu: str, *arguments: str) -> list[str]:
    return [EMULATOR, "-L", str(LIBRARIES), "-cpu", cpu, str(driver), *arguments]


def test_each_cpu_gets_the_tiers_it_can_run(driver: Path) -> None:
    everything = sm4_cases.tiers(emulated(driver, ALL))
    assert everything == {"arm-sm4": True, "arm-aese": True, "portable": True}
    without = sm4_cases.tiers(emulated(driver, NO_SM4))
    assert without == {"arm-sm4": False, "arm-aese": True, "portable": True}


@pytest.mark.parametrize(("tier", "cpu"), ON)
def test_published_case(driver: Path, tier: str, cpu: str) -> None:
    assert sm4_cases.wrong(emulated(driver, cpu, tier), sm4_cases.rfc_8998()) == []


@pytest.mark.parametrize(("tier", "cpu"), ON)
def test_every_length_agrees_with_cryptography(driver: Path, tier: str, cpu: str) -> None:
    cases = sm4_cases.many(random.Random(f"{tier} {cpu}"), [*range(2049), *BIG])
    assert sm4_cases.wrong(emulated(driver, cpu, tier), cases) == []


@pytest.mark.parametrize(("tier", "cpu"), ON)
def test_every_flipped_bit_changes_the_tag(driver: Path, tier: str, cpu: str) -> None:
    case = sm4_cases.both_ways(random.Random(tier), 40, 5)[1]
    assert not case.seal
    changed = []
    for bit in range(8 * len(case.given)):
        given = bytearray(case.given)
        given[bit // 8] ^= 1 << bit % 8
        changed.append(replace(case, given=bytes(given)))
    for bit in range(8 * len(case.aad)):
        aad = bytearray(case.aad)
        aad[bit // 8] ^= 1 << bit % 8
        changed.append(replace(case, aad=bytes(aad)))
    tags = [answer[-16:] for answer in sm4_cases.answers(emulated(driver, cpu, tier), changed)]
    assert len({case.expected[-16:], *tags}) == len(changed) + 1


@pytest.mark.slow
@pytest.mark.parametrize(("tier", "cpu"), [("arm-sm4", ALL), ("arm-aese", ALL)])
def test_nothing_outside_the_buffers_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str, cpu: str
) -> None:
    sanitizers = "-fsanitize=address,undefined"
    driver = sm4_cases.build(COMPILER, tmp_path, "-O1", sanitizers, "-fno-sanitize-recover=all")
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")  # the emulator allows no ptrace
    lengths = [*range(300), *range(500, 540), *range(630, 660), *range(760, 790), 1025, 4097]
    cases = sm4_cases.many(random.Random(tier), lengths)
    assert sm4_cases.wrong(emulated(driver, cpu, tier), cases) == []
