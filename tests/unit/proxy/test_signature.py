"""Signatures: what the schemes' texts give, what another library gives, every way to fail."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.sm4 import sm2
from proxy.sm4.envelope import MAC, SIGNATURE, STREAM, EnvelopeError
from proxy.sm4.keyring import EnvelopeKey, Keyring, KeyringError
from proxy.sm4.signature import ED25519, SM2, draw, is_public, signed_message, signer, verifier
from tests.unit.proxy.sm4_kit import (
    BODY,
    NOW_MS,
    PRELUDE,
    GmsslSigner,
    begin,
    derived_of,
    hand_sealed,
    hand_streamed,
    make_key,
    make_receiver,
    open_answer,
    open_request,
    seal_request,
)

if TYPE_CHECKING:
    from proxy.sm4.receiver import Receiver

needs_sm2 = pytest.mark.skipif(not sm2.available(), reason="capability: OpenSSL with SM2")
SCHEMES = [ED25519, pytest.param(SM2, marks=needs_sm2)]
N = 0xFFFFFFFEFFFFFFFFFFFFFFFFFFFFFFFF7203DF6B21C6052B53BBF40939D54123
P = 0xFFFFFFFEFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF00000000FFFFFFFFFFFFFFFF
PRIVATE = bytes.fromhex("3945208f7b2144b13f36e38ac6d39f95889393692860b51a42fb81ef4df7c5b8")
PUBLIC = bytes.fromhex(
    "09f9df311e5421a150dd7d161e4bc5c672179fad1833fc076bb08ff356f35020"
    "ccea490ce26775a52dc6ea718cc1aa600aed05fbf35e084a6632f6072da9ad13"
)
# GB/T 32918.5, appendix A: the signature over "message digest" with k = 59276E27...
K = "59276e27d506861a16680f3ad9c02dccef3cc1fa3cdbe4ce6d54b80deac1bc21"
KNOWN = bytes.fromhex(
    "f5a03b0648d2c4630eeac513e1bb81a15944da3827d5b74143ac7eaceee720b3"
    "b1b6aa29df212fd8763182bc0d421ca1bb9038fd1f7f42d4840b69c485bbc1aa"
)


def signing_key(scheme: str, **changes: Any) -> EnvelopeKey:
    private, public = draw(scheme, os.urandom)
    return make_key(scheme=scheme, sign_public=public, sign_private=private, **changes)


def reason(receiver: Receiver, wire: bytes, **arguments: Any) -> str:
    with pytest.raises(EnvelopeError) as caught:
        open_request(receiver, wire, **arguments)
    assert caught.value.sealer is None
    return caught.value.reason


# -- the schemes


def test_ed25519_gives_the_signature_of_rfc_8032() -> None:
    private = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    public = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
    signature = bytes.fromhex(
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )
    made = signer(ED25519, private)

    assert made.public() == public
    assert made.sign(b"\x72") == signature
    assert verifier(ED25519, public).verify(signature, b"\x72")
    assert not verifier(ED25519, public).verify(signature, b"\x73")


@needs_sm2
def test_sm2_takes_the_signature_of_gb_t_32918() -> None:
    made = verifier(SM2, PUBLIC)

    assert signer(SM2, PRIVATE).public() == PUBLIC
    assert made.verify(KNOWN, b"message digest")
    assert not made.verify(KNOWN, b"message digest.")
    assert not made.verify(KNOWN[32:] + KNOWN[:32], b"message digest")


@needs_sm2
@settings(max_examples=8, deadline=None)
@given(st.binary(max_size=300))
def test_sm2_and_gmssl_take_each_other_s_signatures(message: bytes) -> None:
    key = signing_key(SM2)
    theirs = GmsslSigner(key, f"{1 + int.from_bytes(os.urandom(31), 'big'):064x}")
    ours = signer(SM2, key.sign_private)

    assert verifier(SM2, key.sign_public).verify(theirs.sign(message), message)
    assert theirs.verify(ours.sign(message), message)


@needs_sm2
def test_sm2_keys_that_begin_with_4_or_0_are_whole_keys() -> None:
    # A library that strips the point's mark 04 as if it were digits loses these.
    found: dict[int, bytes] = {}
    for number in range(1, 6000):
        private = number.to_bytes(32, "big")
        public = signer(SM2, private).public()
        if public[0] in {0x04, 0x40, 0x00} and public[0] not in found:
            found[public[0]] = public
            signature = signer(SM2, private).sign(b"x")
            assert verifier(SM2, public).verify(signature, b"x")
        if len(found) == 3:
            return
    pytest.fail("no such keys were found")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_signature_is_of_one_key_one_message_and_every_bit_counts(scheme: str) -> None:
    key, other = signing_key(scheme), signing_key(scheme)
    signature = signer(scheme, key.sign_private).sign(b"message")
    made = verifier(scheme, key.sign_public)

    assert made.verify(signature, b"message")
    assert not made.verify(signature, b"messagf")
    assert not verifier(scheme, other.sign_public).verify(signature, b"message")
    for bit in range(0, 512, 7):
        flipped = bytearray(signature)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not made.verify(bytes(flipped), b"message"), bit
    for size in (0, 63, 65):
        assert not made.verify((signature + b"\0")[:size], b"message")


@needs_sm2
def test_sm2_never_uses_a_k_twice() -> None:
    made = signer(SM2, PRIVATE)

    assert len({made.sign(b"x")[:32] for _ in range(20)}) == 20


def numbers(r: int, s: int) -> bytes:
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


R, S = int.from_bytes(KNOWN[:32], "big"), int.from_bytes(KNOWN[32:], "big")


@needs_sm2
@pytest.mark.parametrize(
    ("r", "s"),
    [
        (0, 0),
        (0, S),
        (R, 0),
        (N, S),
        (R, N),
        (1, N - 1),  # r + s = 0 mod n
        (N - 1, 1),
        (R, N - R),
        (R, N - S),
        ((1 << 256) - 1, (1 << 256) - 1),
        (N + 1, S),
    ],
)
def test_sm2_numbers_out_of_their_range_verify_nothing(r: int, s: int) -> None:
    assert not verifier(SM2, PUBLIC).verify(numbers(r, s), b"message digest")


@pytest.mark.parametrize(
    "public",
    [
        PUBLIC[:-1] + b"\x12",
        bytes(64),
        PUBLIC[32:] + PUBLIC[:32],
        b"\xff" * 64,
        # The same point, x once more than p: another spelling of it.
        (int.from_bytes(PUBLIC[:32], "big") + P).to_bytes(33, "big")[-32:] + PUBLIC[32:],
        b"\x04" + PUBLIC,
        PUBLIC[:63],
        b"",
    ],
)
def test_what_is_no_point_of_the_curve_is_no_sm2_key(public: bytes) -> None:
    assert not is_public(SM2, public)
    with pytest.raises(ValueError, match="not a point"):
        verifier(SM2, public)
    with pytest.raises(KeyringError, match="sign_public: not a public key of sm2"):
        make_key(scheme=SM2, sign_public=public)


def test_coordinates_from_p_on_are_refused_though_they_solve_the_equation() -> None:
    small = next(x for x in range(2, 1000) if _root(x) is not None)
    root = _root(small)
    assert root is not None
    assert sm2.is_point(small.to_bytes(32, "big") + root.to_bytes(32, "big"))

    assert not sm2.is_point((small + P).to_bytes(32, "big") + root.to_bytes(32, "big"))


def _root(x: int) -> int | None:
    """Return y of a point with this x."""
    square = (x * x * x - 3 * x + sm2._B) % P
    y = pow(square, (P + 1) // 4, P)
    return y if y * y % P == square else None


@needs_sm2
@pytest.mark.parametrize("private", [0, N - 1, N, (1 << 256) - 1])
def test_private_keys_out_of_range_sign_nothing(private: int) -> None:
    with pytest.raises(ValueError, match="not a private key"):
        signer(SM2, private.to_bytes(32, "big"))


@needs_sm2
def test_a_draw_out_of_range_is_drawn_again() -> None:
    draws = iter([b"\xff" * 32, bytes(32), PRIVATE])

    assert draw(SM2, lambda _: next(draws)) == (PRIVATE, PUBLIC)


@pytest.mark.parametrize("change", ["version", "symbol", "verdict"])
def test_a_library_that_cannot_do_it_is_not_used(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change == "version":
        monkeypatch.setattr(sm2, "_OPENSSL_MIN", 0xF0000000)
    elif change == "symbol":
        monkeypatch.setattr(sm2, "_candidates", lambda: ["libc.so.6", "no-such-library.so"])
    else:
        monkeypatch.setattr(sm2, "_TRIED_MESSAGE", b"another message")
    sm2.openssl.cache_clear()
    try:
        assert not sm2.available()
        with pytest.raises(KeyringError, match="SM2 needs OpenSSL 3"):
            Keyring([make_key(scheme=SM2, sign_public=PUBLIC)]).prepare(NOW_MS)
    finally:
        sm2.openssl.cache_clear()


@needs_sm2
def test_what_openssl_cannot_read_is_no_key() -> None:
    library = sm2.openssl()

    with pytest.raises(ValueError, match="no SM2 key"):
        library.read(sm2.PUBLIC_HEAD + bytes(64), private=False)


# -- in an envelope


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("mac", [False, True])
@pytest.mark.parametrize("digest", ["sha256", "sm3"])
@pytest.mark.parametrize("cuts", [None, [], [0], [10, 3]])
def test_a_signed_request_comes_out_as_it_was_sealed(
    scheme: str, mac: bool, digest: str, cuts: list[int] | None
) -> None:
    key = signing_key(scheme, digest=digest)
    sealer, wire = seal_request(key, mac=mac, sign=True, cuts=cuts)

    opened = open_request(make_receiver(key), wire, cut=50)

    assert (opened.body, opened.signature, opened.mac) == (BODY, True, mac)
    answer = opened.sealer.single(200, "", b"x", nonce=bytes(12), now_ms=NOW_MS)
    assert not answer[5] & SIGNATURE
    assert open_answer(sealer, answer) == (200, "", b"x")


def test_nothing_is_given_out_before_the_signature_was_verified() -> None:
    key = signing_key(ED25519)
    opener = begin(make_receiver(key))
    opener.feed(seal_request(key, sign=True)[1], NOW_MS)

    assert opener.finish(NOW_MS) is None
    check = opener.check
    assert check is not None
    assert BODY not in check.message
    assert check.run()
    assert opener.checked(valid=True).body == BODY
    assert opener.held_bytes == 0


def test_a_bad_answer_to_the_check_is_a_bad_signature_and_frees_the_body() -> None:
    key = signing_key(ED25519)
    opener = begin(make_receiver(key))
    opener.feed(seal_request(key, sign=True)[1], NOW_MS)
    assert opener.finish(NOW_MS) is None

    with pytest.raises(EnvelopeError) as caught:
        opener.checked(valid=False)

    assert (caught.value.reason, caught.value.sealer) == ("bad_signature", None)
    assert opener.held_bytes == 0


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_signature_by_another_is_bad(scheme: str, stream: bool) -> None:
    key, other = signing_key(scheme), signing_key(scheme)
    forged = msgspec.structs.replace(
        key, sign_private=other.sign_private, sign_public=other.sign_public
    )

    _, wire = seal_request(forged, sign=True, cuts=[5] if stream else None)

    assert reason(make_receiver(key), wire) == "bad_signature"


def test_a_signature_of_another_envelope_does_not_fit_this_one() -> None:
    key = signing_key(ED25519)
    derived = derived_of(key)
    made = derived.signer()
    assert made is not None
    # Right key, right D, another AAD: what was signed for one envelope, put into another.
    elsewhere = made.sign(signed_message(bytes(40), bytes(32)))

    wire = hand_sealed(PRELUDE.encode() + BODY + elsewhere, flags=SIGNATURE, key=key)

    assert reason(make_receiver(key), wire) == "bad_signature"


@pytest.mark.parametrize("signature", [bytes(64), b"\xff" * 64])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_constant_is_a_signature(scheme: str, signature: bytes) -> None:
    key = signing_key(scheme)
    inner = PRELUDE.encode() + BODY + signature

    assert reason(make_receiver(key), hand_sealed(inner, flags=SIGNATURE, key=key)) == (
        "bad_signature"
    )


def test_the_signature_is_judged_before_the_mac_and_then_the_mac() -> None:
    key = signing_key(ED25519)
    inner = PRELUDE.encode() + BODY + bytes(96)
    assert reason(make_receiver(key), hand_sealed(inner, flags=SIGNATURE | MAC, key=key)) == (
        "bad_signature"
    )
    wire = hand_sealed(inner, flags=SIGNATURE | MAC, key=key)
    opener = begin(make_receiver(key))
    opener.feed(wire, NOW_MS)
    assert opener.finish(NOW_MS) is None

    with pytest.raises(EnvelopeError) as caught:
        opener.checked(valid=True)

    assert caught.value.reason == "bad_mac"


@pytest.mark.parametrize("flags", [SIGNATURE, SIGNATURE | MAC])
@pytest.mark.parametrize("size", [0, 63])
def test_an_envelope_too_short_for_its_signature_has_none(flags: int, size: int) -> None:
    key = signing_key(ED25519)
    frames = [PRELUDE.encode() + BODY + bytes(100), bytes(size)]

    assert reason(make_receiver(key), hand_sealed(bytes(size), flags=flags, key=key)) == (
        "missing_signature"
    )
    assert reason(make_receiver(key), hand_streamed(frames, flags=flags | STREAM, key=key)) == (
        "missing_signature"
    )


def test_policy_per_kid_refuses_allows_or_demands_a_signature() -> None:
    signed = signing_key(ED25519)
    refusing = msgspec.structs.replace(signed, scheme="", sign_public=b"", sign_private=b"")
    demanding = msgspec.structs.replace(signed, require_signature=True)

    assert open_request(make_receiver(refusing), seal_request(refusing)[1]).signature is False
    assert reason(make_receiver(refusing), seal_request(signed, sign=True)[1]) == "bad_signature"
    for sign in (False, True):
        opened = open_request(make_receiver(signed), seal_request(signed, sign=sign)[1])
        assert opened.signature is sign
    assert open_request(make_receiver(demanding), seal_request(signed, sign=True)[1]).signature
    assert reason(make_receiver(demanding), seal_request(signed)[1]) == "missing_signature"
    assert reason(make_receiver(demanding), seal_request(signed, mac=True)[1]) == (
        "missing_signature"
    )


def test_a_signature_does_not_stand_for_a_mac_that_is_demanded() -> None:
    key = signing_key(ED25519)
    demanding = msgspec.structs.replace(key, require_mac=True)

    assert reason(make_receiver(demanding), seal_request(key, sign=True)[1]) == "missing_mac"


def test_a_kid_that_demands_a_signature_seals_none_without_a_key() -> None:
    key = signing_key(ED25519, require_signature=True)

    with pytest.raises(ValueError, match="demands a signature"):
        seal_request(key)


@pytest.mark.parametrize(
    "change",
    [
        {"scheme": "rsa"},
        {"scheme": "", "sign_public": PUBLIC},
        {"scheme": "", "sign_private": PRIVATE},
        {"scheme": "", "require_signature": True},
        {"scheme": "ed25519", "sign_public": b""},
        {"scheme": "ed25519", "sign_public": bytes(31)},
        {"scheme": "ed25519", "sign_public": PUBLIC},
        {"scheme": "sm2", "sign_public": bytes(32)},
        {"scheme": "sm2", "sign_public": PUBLIC, "sign_private": bytes(31)},
    ],
)
def test_a_malformed_signature_key_is_refused_without_showing_it(change: dict[str, Any]) -> None:
    with pytest.raises(KeyringError) as caught:
        make_key(**change)
    assert PRIVATE.hex() not in str(caught.value)
    assert PUBLIC.hex() not in str(caught.value)


def test_a_private_key_that_is_not_the_public_one_s_signs_nothing() -> None:
    key, other = signing_key(ED25519), signing_key(ED25519)

    with pytest.raises(KeyringError, match="sign_private is not that of sign_public"):
        derived_of(msgspec.structs.replace(key, sign_private=other.sign_private)).signer()


def test_a_private_key_shows_in_no_repr() -> None:
    key = signing_key(ED25519)

    assert repr(key.sign_private) not in repr(key)


def small_order_points() -> set[tuple[int, int]]:
    """Return the eight points of Ed25519's curve whose order divides 8, by its own group law."""
    p = 2**255 - 19
    d = -121665 * pow(121666, -1, p) % p

    def add(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
        (x1, y1), (x2, y2) = a, b
        k = d * x1 * x2 * y1 * y2 % p
        x = (x1 * y2 + x2 * y1) * pow(1 + k, -1, p) % p
        return x, (y1 * y2 + x1 * x2) * pow(1 - k, -1, p) % p

    order = 2**252 + 27742317777372353535851937790883648493
    y = 2
    while True:  # a point of the whole group, times the large prime, has an order that divides 8
        y += 1
        square = (y * y - 1) * pow(d * y * y + 1, -1, p) % p
        x = pow(square, (p + 3) // 8, p)
        if x * x % p != square:
            x = x * pow(2, (p - 1) // 4, p) % p
        if x * x % p != square:
            continue
        found, base, count = (0, 1), (x, y), order
        while count:
            if count & 1:
                found = add(found, base)
            base, count = add(base, base), count >> 1
        points = [(0, 1)]
        for _ in range(7):
            points.append(add(points[-1], found))
        if len(set(points)) == 8:
            return set(points)


def test_points_of_small_order_are_no_ed25519_key() -> None:
    p = 2**255 - 19
    points = small_order_points()
    assert len({y for _, y in points}) == 5
    for x, y in points:
        for told in (y, y + p):
            if told < 2**255:
                for sign in (x & 1, 1 - (x & 1)):
                    public = (told | sign << 255).to_bytes(32, "little")
                    assert not is_public("ed25519", public)
                    with pytest.raises(KeyringError, match="sign_public"):
                        make_key(scheme="ed25519", sign_public=public)
    for seed in range(50):
        assert is_public("ed25519", signer("ed25519", bytes([seed]) * 32).public())
