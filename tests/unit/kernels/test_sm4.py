"""The C SM4-GCM as its callers meet it: tags, buffers, refusals, threads, processes."""

from __future__ import annotations

import copy
import pickle
import shutil
import subprocess
import sys
import sysconfig
import tracemalloc
from mmap import ACCESS_READ, mmap
from pathlib import Path

import pytest

from kernels import sm4
from tests.unit.kernels.sm4_oracle import AAD, KEY, NONCE, TEXT, built, each_tier, oracle

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cipher():
    if not sm4.AVAILABLE:
        pytest.skip("kernels.sm4: no extension built here")
    return sm4.Sm4Gcm(KEY)


# --- what is there -------------------------------------------------------------------------------


def test_extension_is_built_where_it_can_be():
    compiler = sysconfig.get_config_var("CC") or "cc"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which(compiler.split()[0]) is None or not header.exists():
        pytest.skip("no C compiler or no Python.h: `cryptography` does SM4")
    assert sm4.AVAILABLE


def test_without_the_extension_the_room_says_so_and_makes_no_key():
    code = (
        "import sys\nsys.modules['kernels.sm4._sm4'] = None\n"
        "from kernels import sm4\n"
        "assert not sm4.AVAILABLE and sm4.TIERS == () and sm4.TIER == 'none'\n"
        "assert issubclass(sm4.InvalidTag, ValueError)\n"
        "try:\n    sm4.Sm4Gcm(bytes(16))\n"
        "except RuntimeError as error:\n    print('refused:', error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("refused: ")


@built
def test_the_default_tier_is_the_first_and_the_portable_one_is_always_there():
    assert sm4.TIERS[0] == sm4.TIER == sm4.Sm4Gcm(KEY).tier
    assert sm4.TIERS[-1] == "portable"
    assert [sm4.Sm4Gcm(KEY, tier).tier for tier in sm4.TIERS] == list(sm4.TIERS)


# --- tags ----------------------------------------------------------------------------------------


@built
@each_tier
@pytest.mark.parametrize("length", [0, 1, 40, 255, 513, 1024, 2100])
def test_what_was_sealed_opens_and_is_what_others_seal(tier, length):
    text = bytes(index & 0xFF for index in range(length))
    cipher = sm4.Sm4Gcm(KEY, tier)
    sealed = cipher.seal(NONCE, text, AAD)
    assert sealed == oracle(KEY, NONCE, text, AAD)
    assert cipher.open(NONCE, sealed, AAD) == text
    assert cipher.seal(NONCE, text) == oracle(KEY, NONCE, text, b"")


@built
@each_tier
def test_every_bit_of_a_small_message_matters(tier):
    cipher = sm4.Sm4Gcm(KEY, tier)
    parts = [NONCE, cipher.seal(NONCE, TEXT, AAD), AAD]
    for part, original in enumerate(parts):
        for bit in range(8 * len(original)):
            bent = bytearray(original)
            bent[bit // 8] ^= 1 << bit % 8
            with pytest.raises(sm4.InvalidTag):
                cipher.open(*parts[:part], bytes(bent), *parts[part + 1 :])


@built
@each_tier
@pytest.mark.parametrize("length", [0, 5, 240, 1024, 5000])
def test_every_byte_of_the_tag_matters_at_every_size(tier, length):
    cipher = sm4.Sm4Gcm(KEY, tier)
    sealed = cipher.seal(NONCE, bytes(length), AAD)
    for index in range(length, length + 16):
        bent = bytearray(sealed)
        bent[index] ^= 0x80
        with pytest.raises(sm4.InvalidTag):
            cipher.open(NONCE, bent, AAD)


@built
@each_tier
def test_a_cut_or_longer_message_does_not_open(tier):
    cipher = sm4.Sm4Gcm(KEY, tier)
    sealed = cipher.seal(NONCE, TEXT, AAD)
    for wrong in (*(sealed[:end] for end in range(len(sealed))), sealed + b"\0", b"\0" + sealed):
        with pytest.raises(sm4.InvalidTag):
            cipher.open(NONCE, wrong, AAD)
    for aad in (AAD[:-1], AAD + b"\0", b""):
        with pytest.raises(sm4.InvalidTag):
            cipher.open(NONCE, sealed, aad)


def test_a_refusal_tells_neither_key_nor_text(cipher):
    with pytest.raises(sm4.InvalidTag) as caught:
        cipher.open(NONCE, TEXT)
    assert str(caught.value) == "the tag does not match"
    assert isinstance(caught.value, ValueError)


@built
@each_tier
@pytest.mark.parametrize("length", [1, 16, 200, 500, 1023, 1024, 3000, 70_000])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_refused_message_leaves_zeros_and_no_more(tier, length, in_place):
    cipher = sm4.Sm4Gcm(KEY, tier)
    source = bytearray(cipher.seal(NONCE, b"\x55" * length, AAD)) + b"behind"
    source[length // 2] ^= 1
    bent = bytes(source)
    target = source if in_place else bytearray(b"\xaa" * len(source))
    rest = bytes(target[length:])
    sealed = memoryview(source)[: length + 16]
    with pytest.raises(sm4.InvalidTag):
        cipher.open_into(NONCE, sealed, target, AAD)
    assert target[:length] == bytes(length)
    assert target[length:] == rest
    assert in_place or source == bent


# --- buffers -------------------------------------------------------------------------------------


def test_any_contiguous_buffer_is_read(cipher):
    sealed = cipher.seal(NONCE, TEXT, AAD)
    for kind in (bytes, bytearray, memoryview, lambda part: memoryview(bytearray(part))):
        assert cipher.seal(kind(NONCE), kind(TEXT), kind(AAD)) == sealed
        assert cipher.open(kind(NONCE), kind(sealed), kind(AAD)) == TEXT
    assert cipher.seal(nonce=NONCE, plaintext=TEXT, aad=AAD) == sealed
    assert cipher.open(NONCE, aad=AAD, sealed=sealed) == TEXT


def test_out_may_be_longer_and_keeps_what_is_behind(cipher):
    out = bytearray(b"\xee" * 100)
    assert cipher.seal_into(NONCE, TEXT, out, AAD) == 56
    assert out == cipher.seal(NONCE, TEXT, AAD) + b"\xee" * 44
    assert cipher.open_into(NONCE, bytes(out[:56]), out, aad=AAD) == 40
    assert out[:40] == TEXT


@built
@each_tier
@pytest.mark.parametrize("shift", [-47, -17, -16, -1, 1, 15, 39])
def test_overlap_other_than_in_place_is_refused_and_nothing_written(tier, shift):
    cipher = sm4.Sm4Gcm(KEY, tier)
    room = bytearray(range(200))
    before = bytes(room)
    text, out = memoryview(room)[64:104], memoryview(room)[64 + shift : 120 + shift]
    sealed, opened = memoryview(room)[64:120], memoryview(room)[64 + shift : 104 + shift]
    with pytest.raises(ValueError, match="overlaps"):
        cipher.seal_into(NONCE, text, out)
    with pytest.raises(ValueError, match="overlaps"):
        cipher.open_into(NONCE, sealed, opened if shift > -40 else memoryview(room)[30:70])
    with pytest.raises(ValueError, match="overlaps"):
        cipher.seal_into(NONCE, TEXT, out, text)
    assert room == before


def test_neighbouring_buffers_are_no_overlap(cipher):
    room = bytearray(200)
    room[:40] = TEXT
    cipher.seal_into(NONCE, memoryview(room)[:40], memoryview(room)[40:96])
    assert room[40:96] == cipher.seal(NONCE, TEXT)
    cipher.open_into(NONCE, memoryview(room)[40:96], memoryview(room)[0:40])
    assert room[:40] == TEXT


REFUSED = [
    ("seal", (), TypeError),
    ("seal", (NONCE,), TypeError),
    ("seal", (NONCE, TEXT, AAD, b""), TypeError),
    ("seal", (NONCE, "text"), TypeError),
    ("seal", ("nonce", TEXT), TypeError),
    ("seal", (NONCE, TEXT, None), TypeError),
    ("seal", (NONCE, TEXT, 7), TypeError),
    ("seal", (NONCE[:11], TEXT), ValueError),
    ("seal", (NONCE + b"\0", TEXT), ValueError),
    ("seal", (b"", TEXT), ValueError),
    ("seal", (NONCE, memoryview(bytes(80))[::2]), BufferError),
    ("open", (NONCE,), TypeError),
    ("open", (NONCE, None), TypeError),
    ("open", (NONCE[1:], bytes(56)), ValueError),
    ("open", (NONCE, bytes(15)), sm4.InvalidTag),
    ("open", (NONCE, b""), sm4.InvalidTag),
    ("seal_into", (NONCE, TEXT), TypeError),
    ("seal_into", (NONCE, TEXT, bytes(56)), BufferError),
    ("seal_into", (NONCE, TEXT, bytearray(55)), ValueError),
    ("seal_into", (NONCE, TEXT, memoryview(bytearray(112))[::2]), BufferError),
    ("open_into", (NONCE, bytes(56), bytes(40)), BufferError),
    ("open_into", (NONCE, bytes(56), bytearray(39)), ValueError),
    ("open_into", (NONCE, bytes(15), bytearray(39)), sm4.InvalidTag),
    ("seal_many", ([NONCE],), TypeError),
    ("seal_many", ([NONCE], [TEXT, TEXT]), ValueError),
    ("seal_many", ([NONCE], [TEXT], []), ValueError),
    ("seal_many", ([NONCE, NONCE[:3]], [TEXT, TEXT]), ValueError),
    ("seal_many", ([NONCE], 7), TypeError),
    ("seal_many", ([NONCE], [None]), TypeError),
    ("encrypt_block", (bytes(15),), ValueError),
    ("encrypt_block", (bytes(17),), ValueError),
    ("encrypt_block", ("block",), TypeError),
]


@pytest.mark.parametrize(("name", "arguments", "error"), REFUSED)
def test_wrong_arguments_are_refused(cipher, name, arguments, error):
    with pytest.raises(error):
        getattr(cipher, name)(*arguments)


@pytest.mark.parametrize("keywords", [{"ad": AAD}, {"nonce": NONCE}, {"aad": AAD, "out": b""}])
def test_wrong_keywords_are_refused(cipher, keywords):
    with pytest.raises(TypeError, match="unknown or given twice"):
        cipher.seal(NONCE, TEXT, **keywords)


@built
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), TypeError),
        ((b"",), ValueError),
        ((bytes(15),), ValueError),
        ((bytes(32),), ValueError),
        (("key",), TypeError),
        ((KEY, "aesni"), ValueError),
        ((KEY, ""), ValueError),
        ((KEY, 3), TypeError),
        ((KEY, None, False, 1), TypeError),
    ],
)
def test_wrong_keys_and_tiers_are_refused(arguments, error):
    with pytest.raises(error):
        sm4.Sm4Gcm(*arguments)


def test_a_key_is_neither_copied_nor_subclassed_nor_made_empty(cipher):
    for action in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            action(cipher)
    with pytest.raises(TypeError):
        type("Mine", (sm4.Sm4Gcm,), {})
    with pytest.raises(TypeError):
        object.__new__(sm4.Sm4Gcm)
    with pytest.raises(AttributeError):
        cipher.tier = "portable"
    assert KEY.hex() not in repr(cipher)


def test_no_call_keeps_a_buffer(cipher):
    buffers = [bytearray(NONCE), bytearray(cipher.seal(NONCE, TEXT, AAD)), bytearray(AAD)]
    small = bytearray(3)
    nonce, sealed, aad = buffers
    cipher.open(nonce, sealed, aad)
    cipher.seal_many([nonce], [sealed], [aad])
    for arguments in [(nonce, sealed, aad), (sealed, sealed, aad), (nonce, sealed, None)]:
        with pytest.raises((ValueError, TypeError)):
            cipher.open(*arguments[:2], *(arguments[2:] if arguments[2] is None else ()))
    for arguments in [(nonce, sealed, small, aad), (nonce, sealed, bytes(99), aad)]:
        for call in (cipher.seal_into, cipher.open_into):
            with pytest.raises((ValueError, BufferError)):
                call(*arguments)
    for buffer in (*buffers, small):
        buffer.append(0)  # BufferError, were it still exported


def test_calls_that_end_well_or_badly_keep_no_memory(cipher):
    sealed = bytearray(cipher.seal(NONCE, TEXT, AAD))

    def use() -> None:
        for _ in range(200):
            sm4.Sm4Gcm(KEY, None, True).seal(NONCE, bytes(3000))
            cipher.open(NONCE, sealed, AAD)
            cipher.seal_many([NONCE] * 3, [TEXT] * 3)
            for name, arguments, error in REFUSED:
                with pytest.raises(error):
                    getattr(cipher, name)(*arguments)

    use()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        use()
        assert tracemalloc.get_traced_memory()[0] - before < 20_000
    finally:
        tracemalloc.stop()


def test_a_message_past_the_bound_is_refused_before_any_work(cipher, tmp_path):
    """SP 800-38D, 5.2.1.1. The file is a hole; mapping it takes no memory."""
    with (tmp_path / "hole").open("wb+") as file:
        try:
            file.truncate((1 << 36) - 15)
            big = mmap(file.fileno(), 0, access=ACCESS_READ)
        except (OSError, OverflowError) as error:
            pytest.skip(f"no room for a file of 64 GiB that is all hole: {error}")
    with big:
        for action in (cipher.seal, cipher.open):
            with pytest.raises(OverflowError, match="at most"):
                action(NONCE, big)


# --- many, and one message -----------------------------------------------------------------------


@built
@each_tier
def test_many_are_sealed_as_one_by_one(tier):
    cipher = sm4.Sm4Gcm(KEY, tier)
    nonces = [index.to_bytes(12, "big") for index in range(64)]
    messages = [bytes([index]) * (3 * index) for index in range(64)]
    aads = [AAD[: index % 33] for index in range(64)]
    expected = [cipher.seal(*three) for three in zip(nonces, messages, aads, strict=True)]
    assert cipher.seal_many(nonces, messages, aads) == expected
    assert cipher.seal_many(tuple(nonces), iter(messages), aads=tuple(aads)) == expected
    assert cipher.seal_many(nonces, messages) == cipher.seal_many(nonces, messages, None)
    assert cipher.seal_many(nonces, messages)[5] == cipher.seal(nonces[5], messages[5])
    assert cipher.seal_many([], []) == []


@built
@each_tier
def test_a_one_message_key_is_right_for_more_and_longer_ones_too(tier):
    lengths = [0, 16, 200, 1007, 1008, 1024, 100, 70_000, 40]
    for first in lengths:
        cipher = sm4.Sm4Gcm(KEY, tier, one_message=True)
        for length in (first, *lengths):
            text = bytes(length)
            sealed = sm4.Sm4Gcm(KEY, "portable").seal(NONCE, text, AAD)
            assert cipher.seal(NONCE, text, AAD) == sealed
            assert cipher.open(NONCE, sealed, AAD) == text
