"""SM2 public key encryption (GB/T 32918.4, SM3) by the OpenSSL that signs and verifies too.

A ciphertext is C1 || C3 || C2 as GM/T 0009 orders it: the point x || y (64 bytes), the SM3 hash
(32), and as many bytes as the plaintext. OpenSSL's own form is DER (GM/T 0009, 7.2).
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from proxy.sm4 import sm2

if TYPE_CHECKING:
    from collections.abc import Callable

C1_BYTES, C3_BYTES = 64, 32
OVERHEAD_BYTES = C1_BYTES + C3_BYTES
_PLAIN_BYTES_MAX = 64
_DER_BYTES_MAX = 512


def encrypt(public: bytes, plain: bytes) -> bytes:
    """Return C1 || C3 || C2 of at most 64 bytes; raises ValueError for what is no public key.

    Raises `Sm2UnavailableError`.
    """
    assert 0 < len(plain) <= _PLAIN_BYTES_MAX
    if not sm2.is_point(public):
        raise ValueError("not a point of the SM2 curve")
    return _plain_form(_crypt(sm2.PUBLIC_HEAD + public, plain, private=False), len(plain))


def decrypt(private: bytes, sealed: bytes) -> bytes:
    """Return the plaintext; raises ValueError for what does not open, `Sm2UnavailableError`."""
    if not OVERHEAD_BYTES < len(sealed) <= OVERHEAD_BYTES + _PLAIN_BYTES_MAX:
        raise ValueError("no SM2 ciphertext of this length")
    if not sm2.is_private(private) or not sm2.is_point(sealed[:C1_BYTES]):
        raise ValueError("no SM2 ciphertext, or no private key")
    return _crypt(sm2.PRIVATE_HEAD + private, _der_form(sealed), private=True)


def _crypt(key_der: bytes, data: bytes, *, private: bool) -> bytes:
    library = sm2.openssl()
    key = sm2.Key(library, key_der, private=private)
    begin, work = _functions(library, private=private)
    new_context, free_context = _contexts(library)
    context = new_context(key.handle, None)
    try:
        size = ctypes.c_size_t(_DER_BYTES_MAX)
        buffer = ctypes.create_string_buffer(_DER_BYTES_MAX)
        if not context or begin(context) != 1:
            raise sm2.Sm2UnavailableError
        if work(context, buffer, ctypes.byref(size), data, len(data)) != 1:
            raise ValueError("the SM2 ciphertext does not open")
        return buffer.raw[: size.value]
    finally:
        if context:
            free_context(context)
        library.clear_errors()


def _functions(
    library: sm2.Library, *, private: bool
) -> tuple[Callable[..., int], Callable[..., int]]:
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    name = "EVP_PKEY_decrypt" if private else "EVP_PKEY_encrypt"
    length = ctypes.POINTER(ctypes.c_size_t)
    return (
        library.function(f"{name}_init", number, pointer),
        library.function(name, number, pointer, pointer, length, ctypes.c_char_p, size),
    )


def _contexts(library: sm2.Library) -> tuple[Callable[..., int], Callable[..., int]]:
    pointer = ctypes.c_void_p
    return (
        library.function("EVP_PKEY_CTX_new", pointer, pointer, pointer),
        library.function("EVP_PKEY_CTX_free", None, pointer),
    )


def _der_form(sealed: bytes) -> bytes:
    x, y = sealed[:32], sealed[32:C1_BYTES]
    rest = sealed[OVERHEAD_BYTES:]
    body = (
        sm2.der_integer(x) + sm2.der_integer(y)
        + bytes([4, C3_BYTES]) + sealed[C1_BYTES:OVERHEAD_BYTES]
        + bytes([4, len(rest)]) + rest
    )  # fmt: skip
    head = bytes([0x30, len(body)]) if len(body) < 0x80 else bytes([0x30, 0x81, len(body)])
    return head + body


def _plain_form(der: bytes, size: int) -> bytes:
    """Return C1 || C3 || C2 of OpenSSL's own SEQUENCE of two INTEGERs and two OCTET STRINGs."""
    at = 3 if der[1] == 0x81 else 2
    parts = []
    for _ in range(4):
        length = der[at + 1]
        parts.append(der[at + 2 : at + 2 + length])
        at += 2 + length
    x, y, c3, c2 = parts
    assert (len(c3), len(c2), at) == (C3_BYTES, size, len(der))
    numbers = [int.from_bytes(number, "big").to_bytes(32, "big") for number in (x, y)]
    return b"".join([*numbers, c3, c2])
