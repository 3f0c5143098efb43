"""The C SM4-GCM against what others have published, and the S-box against its table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import sm4
from kernels.sm4 import derive
from tests.unit.kernels.sm4_oracle import KEY, NONCE, built, each_tier

ROOT = Path(__file__).resolve().parents[3]
WYCHEPROOF = json.loads((ROOT / "tests/vectors/wycheproof/sm4_gcm_test.json").read_text())


# --- the cipher ----------------------------------------------------------------------------------


@built
@each_tier
def test_block_of_the_standard(tier):
    """GB/T 32907-2016, A.1."""
    assert sm4.Sm4Gcm(KEY, tier).encrypt_block(KEY).hex() == "681edf34d206965e86b3e94f536e4246"


@built
def test_a_million_rounds_of_the_standard():
    """GB/T 32907-2016, A.2: the output is the next input."""
    block, encrypt = KEY, sm4.Sm4Gcm(KEY).encrypt_block
    for _ in range(1_000_000):
        block = encrypt(block)
    assert block.hex() == "595298c7c6fd271f0402f804c33d3f66"


@built
@each_tier
def test_sm4_gcm_of_rfc_8998(tier):
    """RFC 8998, A.1."""
    text = b"".join(bytes([value]) * 8 for value in bytes.fromhex("aabbccddeeffeeaa"))
    aad = bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
    sealed = sm4.Sm4Gcm(KEY, tier).seal(NONCE, text, aad)
    assert sealed.hex() == (
        "17f399f08c67d5ee19d0dc9969c4bb7d5fd46fd3756489069157b282bb200735"
        "d82710ca5c22f0ccfa7cbf93d496ac15a56834cbcf98c397b4024a2691233b8d"
        "83de3541e4c2b58177e065a9bf7b62ec"
    )
    assert sm4.Sm4Gcm(KEY, tier).open(NONCE, sealed, aad) == text


def wycheproof(*, fits: bool) -> list[dict[str, str]]:
    return [
        case
        for group in WYCHEPROOF["testGroups"]
        for case in group["tests"]
        if (group["ivSize"] == 96 and group["tagSize"] == 128) is fits
    ]


@built
@each_tier
def test_wycheproof_cases(tier):
    cases = wycheproof(fits=True)
    assert len(cases) == 65
    results = {"valid": 0, "invalid": 0}
    for case in cases:
        key, nonce, aad, text, sealed = (
            bytes.fromhex(part)
            for part in (
                case["key"], case["iv"], case["aad"], case["msg"], case["ct"] + case["tag"],
            )
        )  # fmt: skip
        cipher = sm4.Sm4Gcm(key, tier)
        results[case["result"]] += 1
        if case["result"] == "valid":
            assert cipher.seal(nonce, text, aad) == sealed, case
            assert cipher.open(nonce, sealed, aad) == text, case
        else:
            with pytest.raises(sm4.InvalidTag):
                cipher.open(nonce, sealed, aad)
    assert min(results.values()) > 0


@built
def test_wycheproof_nonces_of_other_sizes_are_refused():
    cases = wycheproof(fits=False)
    assert len(cases) == 39
    for case in cases:
        with pytest.raises(ValueError, match="expected 12"):
            sm4.Sm4Gcm(bytes.fromhex(case["key"])).open(
                bytes.fromhex(case["iv"]), bytes.fromhex(case["ct"] + case["tag"])
            )


# --- the S-box -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def header():
    return derive.HEADER.read_text()


def number(header: str, name: str) -> int:
    found = re.search(rf"#define {name} (0x[0-9a-f]+)", header)
    assert found is not None
    return int(found[1], 16)


def rows(value: int) -> tuple[int, ...]:
    return tuple(value >> 8 * (7 - i) & 0xFF for i in range(8))


def circuit(header: str, name: str, planes: list[int]) -> list[int]:
    """Run a macro's statements on planes of 256 bits."""
    found = re.search(rf"#define {name}((?: \\\n[^\\\n]*[^\\\n ])+)", header)
    assert found is not None
    values = {f"x{i}": plane for i, plane in enumerate(planes)}
    body = found[1].replace("\\", " ").replace("plane ", "").replace(",", ";")
    for statement in filter(None, map(str.strip, body.split(";"))):
        target, expression = statement.split(" = ")
        values[target] = eval(expression, {}, values) & (1 << 256) - 1
    return [values[f"y{i}"] for i in range(8)]


def test_the_table_is_a_permutation_with_the_published_structure():
    assert sorted(derive.SBOX) == list(range(256))
    matrix, constant = derive.affine()
    assert constant == 0xD3
    assert matrix[0] == 0xA7


def test_constants_give_the_published_sbox_for_all_256_inputs(header):
    """GF2P8AFFINEQB, then GF2P8AFFINEINVQB, computed here from the header's numbers."""
    before, behind = rows(number(header, "SM4_AFFINE_IN")), rows(number(header, "SM4_AFFINE_OUT"))
    back = rows(number(header, "SM4_AFFINE_IN_INVERSE"))
    p, c = number(header, "SM4_CONSTANT_IN"), number(header, "SM4_CONSTANT_OUT")
    invert = derive.inversion(derive.aes_field)
    for x in range(256):
        inner = derive.apply(before, x)
        assert derive.apply(back, inner) == x
        assert derive.apply(behind, invert[inner ^ p]) ^ c == derive.SBOX[x]


@pytest.mark.parametrize("position", range(4))
def test_folded_matrices_give_the_round_for_all_256_inputs(header, position):
    """One byte runs over all values; L is linear in the bytes' S-boxes, so that is all there is."""
    a, r, d = (rows(number(header, f"SM4_FOLD_{name}")) for name in "ARD")
    back = rows(number(header, "SM4_AFFINE_IN_INVERSE"))
    fold = number(header, "SM4_CONSTANT_FOLD")
    before, p = rows(number(header, "SM4_AFFINE_IN")), number(header, "SM4_CONSTANT_IN")
    invert = derive.inversion(derive.aes_field)
    for x in range(256):
        bytes_in = [0x5A, 0xC3, 0x00, 0x81]
        bytes_in[position] = x
        b = int.from_bytes(bytes(derive.SBOX[value] for value in bytes_in), "big")
        expected = b
        for by in (2, 10, 18, 24):
            expected ^= (b << by | b >> (32 - by)) & 0xFFFFFFFF
        t = [invert[derive.apply(before, value) ^ p] for value in bytes_in]
        found = bytes(
            derive.apply(
                back,
                derive.apply(a, t[j])
                ^ derive.apply(r, t[(j + 1) % 4])
                ^ derive.apply(r, t[(j + 2) % 4])
                ^ derive.apply(d, t[(j + 3) % 4])
                ^ fold,
            )
            for j in range(4)
        )
        assert found == expected.to_bytes(4, "big")


def test_circuits_give_the_published_sbox_for_all_256_inputs(header):
    planes = [sum((x >> bit & 1) << x for x in range(256)) for bit in range(8)]
    inner = circuit(header, "SM4_TOWER_IN", planes)
    values = [sum((inner[bit] >> x & 1) << bit for bit in range(8)) for x in range(256)]
    invert = derive.inversion(derive.tower_field)
    values = [invert[value] for value in values]
    planes = [sum((values[x] >> bit & 1) << x for x in range(256)) for bit in range(8)]
    outer = circuit(header, "SM4_TOWER_OUT", planes)
    found = bytes(sum((outer[bit] >> x & 1) << bit for bit in range(8)) for x in range(256))
    assert found == derive.SBOX


def test_the_header_is_what_the_script_writes(header):
    assert derive.header() == header
    printed = subprocess.run(
        [sys.executable, "-m", "kernels.sm4.derive"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert printed.stdout == header


@pytest.mark.parametrize("wrong", [(0, 1), (100, 200), (254, 255)])
def test_a_table_with_two_entries_exchanged_is_noticed(monkeypatch, wrong):
    table = bytearray(derive.SBOX)
    table[wrong[0]], table[wrong[1]] = table[wrong[1]], table[wrong[0]]
    monkeypatch.setattr(derive, "SBOX", bytes(table))
    with pytest.raises(AssertionError):
        derive.affine()
