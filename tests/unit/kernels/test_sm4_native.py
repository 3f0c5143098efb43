"""SM4-GCM's tiers on this CPU without Python around them: under sanitizers, and their constants."""

from __future__ import annotations

import random
import shutil
import sysconfig
from typing import TYPE_CHECKING

import pytest

from kernels.sm4 import derive, derive_aes
from tests.unit.kernels import sm4_cases

if TYPE_CHECKING:
    from pathlib import Path

COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]
SANITIZED = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
# Around the widths at which passes and batches end, in bytes.
EDGES = [
    edge + by for edge in (*range(512, 3200, 128), 4096, 5120, 6144) for by in (-17, -16, -1, 0, 1)
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"needs a C compiler ({COMPILER})")
    folder = tmp_path_factory.mktemp("sm4")
    empty = folder / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    try:
        sm4_cases.compiled(COMPILER, folder / "empty", [empty], *SANITIZED)
    except AssertionError:
        pytest.skip(f"needs the address sanitizer's library for {COMPILER}")
    return sm4_cases.build(COMPILER, folder, *SANITIZED)


@pytest.mark.slow
def test_every_tier_stays_inside_its_buffers_and_is_right(driver: Path) -> None:
    usable = [name for name, state in sm4_cases.tiers([str(driver)]).items() if state]
    assert "portable" in usable
    for tier in usable:
        cases = sm4_cases.rfc_8998()
        cases += sm4_cases.many(random.Random(tier), [*range(300), *EDGES])
        assert sm4_cases.wrong([str(driver), tier], cases) == [], tier


def test_header_of_the_aes_route_is_what_the_script_derives() -> None:
    assert derive_aes.HEADER.read_text() == derive_aes.header()


@pytest.mark.parametrize("name", ["ENTER", "A", "D", "LEAVE"])
def test_proof_refuses_a_wrong_table(name: str) -> None:
    constant = derive.around(derive.aes_field)[1]
    found = derive_aes.tables()
    low, high = found[name]
    derive_aes.prove(found, constant)
    for byte in range(16):
        for half in range(2):
            wrong = [bytearray(low), bytearray(high)]
            wrong[half][byte] ^= 1 << byte % 8
            changed = found | {name: (bytes(wrong[0]), bytes(wrong[1]))}
            with pytest.raises(AssertionError, match="T is wrong"):
                derive_aes.prove(changed, constant)
