"""Ed25519 signing by the loaded libcrypto says what `cryptography` says."""

from __future__ import annotations

import threading

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from proxy.sm4 import ed25519, signature
from proxy.sm4.ed25519 import Ed25519Signer, Ed25519UnavailableError

KEYS = st.binary(min_size=32, max_size=32)


@pytest.fixture(scope="module", autouse=True)
def _there():
    try:
        ed25519._library()
    except Ed25519UnavailableError:
        pytest.skip("no libcrypto of the process's own that signs with Ed25519")


@given(KEYS, st.binary(max_size=2000))
def test_signatures_and_public_keys_are_those_of_cryptography(private, message):
    oracle = Ed25519PrivateKey.from_private_bytes(private)
    made = Ed25519Signer(private)
    assert made.public() == oracle.public_key().public_bytes_raw()
    assert made.sign(message) == oracle.sign(message)


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_what_is_no_key_is_refused(size):
    with pytest.raises(ValueError, match="32 bytes"):
        Ed25519Signer(bytes(size))


def test_signing_goes_through_it():
    assert type(signature.signer("ed25519", bytes(32))) is Ed25519Signer


def test_where_there_is_none_cryptography_signs(monkeypatch):
    def none(private):
        raise Ed25519UnavailableError

    monkeypatch.setattr(ed25519, "Ed25519Signer", none)
    made = signature.signer("ed25519", bytes(32))
    assert made.sign(b"x") == Ed25519PrivateKey.from_private_bytes(bytes(32)).sign(b"x")
    assert made.public() == Ed25519Signer(bytes(32)).public()


def test_a_library_that_signs_wrongly_is_not_believed(monkeypatch):
    monkeypatch.setattr(ed25519, "_TRIED_SIGNATURE", bytes(64))
    assert not ed25519._works(ed25519._library())


def test_threads_may_share_a_signer():
    made, found = Ed25519Signer(b"k" * 32), []
    expected = made.sign(b"m" * 1000)

    def work():
        found.extend(made.sign(b"m" * 1000) == expected for _ in range(200))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 800
