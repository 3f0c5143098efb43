"""What the SM4 tests share: the tiers of this CPU and a second implementation to compare with."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from kernels import sm4

KEY = bytes.fromhex("0123456789abcdeffedcba9876543210")
NONCE = bytes.fromhex("00001234567800000000abcd")
TEXT = bytes(range(40))
AAD = b"additional data, 32 bytes of it."

built = pytest.mark.skipif(not sm4.AVAILABLE, reason="kernels.sm4: no extension built here")
each_tier = pytest.mark.parametrize("tier", sm4.TIERS)


def oracle(key: bytes, nonce: bytes, text: bytes, aad: bytes) -> bytes:
    """Seal with `cryptography`'s SM4-GCM."""
    encryptor = Cipher(algorithms.SM4(key), modes.GCM(nonce)).encryptor()
    encryptor.authenticate_additional_data(aad)
    return encryptor.update(text) + encryptor.finalize() + encryptor.tag
