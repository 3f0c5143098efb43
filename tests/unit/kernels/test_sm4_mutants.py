"""Faults put into the C of SM4 on purpose: each must make a test fail. And a build without it.

Tests that exist run once more in a process of their own, with another extension in place of the
built one. They must pass with the true sources and with none at all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import sm4
from tests.fuzz import builds

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "kernels" / "sm4"
VECTORS, CALLS = "kernels/test_sm4_vectors.py", "kernels/test_sm4.py"
DIFFERENTIAL = "kernels/test_sm4_differential.py"
RFC, TAG = "test_sm4_gcm_of_rfc_8998", "test_every_byte_of_the_tag_matters_at_every_size"
TOP, TWO, AES = "gfni-avx512", "gfni-avx2", "aesni-avx2"


# name: the tier it is in ("": any), what is changed, what is compiled, replacements, the test.
MUTANTS = {
    "two matrices exchanged": (
        TOP, "sbox_constants.h", "tier_gfni_avx512.c",
        (("_FOLD_A 0", "_FOLD_X 0"), ("_FOLD_D 0", "_FOLD_A 0"), ("_FOLD_X 0", "_FOLD_D 0")),
        f"{VECTORS}::{RFC}",
    ),
    "two matrices exchanged, 256-bit": (
        TWO, "sbox_constants.h", "tier_gfni_avx2.c",
        (("_FOLD_R 0", "_FOLD_X 0"), ("_FOLD_D 0", "_FOLD_R 0"), ("_FOLD_X 0", "_FOLD_D 0"),
         ("AFFINE_OUT 0xf3", "AFFINE_OUT 0xf1")),
        f"{VECTORS}::{RFC}",
    ),
    "two tables of the AES route exchanged": (
        AES, "aes_constants.h", "tier_aesni_avx2.c",
        (("SM4_AES_A_", "SM4_AES_X_"), ("SM4_AES_D_", "SM4_AES_A_"), ("_X_", "_D_")),
        f"{VECTORS}::{RFC}",
    ),
    "a wrong plane leaves the circuit": (
        "portable", "sbox_constants.h", "tier_portable.c", (("y4 = ~(s4)", "y4 = s4"),),
        f"{VECTORS}::{RFC}",
    ),
    "a reduction left out, 512-bit": (
        TOP, "ghash512.h", "tier_gfni_avx512.c",
        (("return _mm_xor_si128(high, _mm_clmulepi64_si128(low, modulus, 0x00))", "return high"),),
        f"{VECTORS}::{RFC}",
    ),
    "a reduction left out, 256-bit": (
        TWO, "blocks_x86.h", "tier_gfni_avx2.c",
        (("return _mm_xor_si128(high, low)", "return high"),),
        f"{VECTORS}::{RFC}",
    ),
    "a reduction left out, portable": (
        "portable", "tier_portable.c", "tier_portable.c",
        (("p3 ^= p1 ^ p1 >> 1 ^ p1 >> 2 ^ p1 >> 7;", ""),),
        f"{VECTORS}::{RFC}",
    ),
    "a counter without its carry": (
        TOP, "byteslice.h", "tier_gfni_avx512.c",
        (("b2 = BS_OP(mask_add_epi8)(b2, carry, b2, one)", ""),),
        f"{DIFFERENTIAL}::test_powers_of_two_up_to_4_mib",
    ),
    "the tag's first byte skipped": (
        "", "schedule.c", "schedule.c", (("int i = 0; i < SM4_TAG", "int i = 1; i < SM4_TAG"),),
        f"{CALLS}::{TAG}",
    ),
    "the tag's last byte skipped": (
        "", "schedule.c", "schedule.c", (("i < SM4_TAG; i++", "i < SM4_TAG - 1; i++"),),
        f"{CALLS}::{TAG}",
    ),
    "a refused text not wiped": (
        "", "calls.c", "calls.c", (("sm4_wipe(out, length);", ""),),
        f"{CALLS}::test_a_refused_message_leaves_zeros_and_no_more",
    ),
    "an overlap not refused": (
        "", "calls.c", "calls.c", (("!apart(text.data", "0 && !apart(text.data"),),
        f"{CALLS}::test_overlap_other_than_in_place_is_refused_and_nothing_written",
    ),
}  # fmt: skip


def run(stand_in: Path | None, *tests: str) -> tuple[int, str]:
    """Run tests of tests/unit with this extension, or with none; pytest's exit code and words."""
    environment = os.environ | {"SM4_STAND_IN": str(stand_in or "")}
    plugin = ["-p", "tests.unit.kernels.sm4_stand_in", "-p", "no:cacheprovider", "-x", "-q"]
    at = [test if test.startswith("-") else f"tests/unit/{test}" for test in tests]
    words = [sys.executable, "-m", "pytest", *plugin, *at]
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("capability: gcc")
    folder = tmp_path_factory.mktemp("true")
    builds.objects(SOURCES, folder, "-O1")
    return folder


@pytest.mark.slow
def test_true_sources_pass_what_the_mutants_must_fail(objects: Path, tmp_path: Path) -> None:
    extension = builds.link(objects, tmp_path / "_sm4")
    code, words = run(extension, f"{VECTORS}::{RFC}", f"{CALLS}::{TAG}")
    assert code == 0, words


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_put_in_on_purpose_makes_a_test_fail(
    objects: Path, tmp_path: Path, name: str
) -> None:
    tier, file, compiled, replacements, test = MUTANTS[name]
    if tier and tier not in sm4.TIERS:
        pytest.skip(f"capability: tier {tier}")
    folder = tmp_path / "sources"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("*.py*", "*.so", "__pycache__"))
    text = (folder / file).read_text()
    for there, instead in replacements:
        assert there in text, there
        text = text.replace(there, instead)
    (folder / file).write_text(text)
    parts = tmp_path / "objects"
    shutil.copytree(objects, parts)
    builds.objects(folder, parts, "-O1", only=compiled)
    code, words = run(builds.link(parts, tmp_path / "_sm4"), test)
    assert code == 1, words
    assert not tier or f"[{tier}]" in words or "differential" in test, words


@pytest.mark.slow
def test_everything_passes_where_there_is_no_extension() -> None:
    """`cryptography` does SM4 then: the channel's own tests must not notice."""
    prefixes = ("test_envelope", "test_sm4", "test_client")
    files = sorted(path.name for path in (ROOT / "tests/unit/proxy").glob("test_*.py"))
    rest = [f"proxy/{name}" for name in files if name.startswith(prefixes)]
    but = f"--deselect=tests/unit/{CALLS}::test_extension_is_built_where_it_can_be"
    code, words = run(None, CALLS, VECTORS, *rest, but)
    assert code == 0, words
    assert "no extension built here" in words
