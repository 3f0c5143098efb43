"""Ed25519 signing (RFC 8032) by the OpenSSL that this Python runs on.

A sidecar signs its checkpoints and nothing else; `cryptography` would bring a second OpenSSL into
the process for that, 6 MB. So this calls the one that is there (`libcrypto`), and believes it only
after it has made a known signature. Keys and signatures are plain.
"""

from __future__ import annotations

import ctypes
from functools import cache

from proxy.sm4.libcrypto import Libcrypto, OwnedKey, find, linked

KEY_BYTES = 32
SIGNATURE_BYTES = 64
_NID = 1087  # EVP_PKEY_ED25519: part of OpenSSL's stable interface
_MESSAGE_BYTES_MAX = 1 << 20
# RFC 8032, section 7.1, test 2.
_TRIED_PRIVATE = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
_TRIED_PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
_TRIED_SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


class Ed25519UnavailableError(Exception):
    """No libcrypto that signs is within this process's reach."""


class _Library(Libcrypto):
    """What Ed25519 needs beside."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        text, length = ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)
        self.read = self.function(
            "EVP_PKEY_new_raw_private_key", pointer, number, pointer, text, size
        )
        self.public = self.function("EVP_PKEY_get_raw_public_key", number, pointer, text, length)


class Ed25519Signer:
    """Signs with one private key; may be used from several threads."""

    __slots__ = ("_key", "_library")

    def __init__(self, private: bytes, library: _Library | None = None) -> None:
        """Raise ValueError for what is no key, `Ed25519UnavailableError`."""
        if len(private) != KEY_BYTES:
            raise ValueError("an Ed25519 private key is 32 bytes")
        self._library = library or _library()
        self._key = OwnedKey(self._library, self._library.read(_NID, None, private, len(private)))
        if not self._key.handle:
            self._library.clear_errors()
            raise Ed25519UnavailableError

    def sign(self, message: bytes) -> bytes:
        """Return the signature, 64 bytes, of a message of at most 1 MiB."""
        assert len(message) <= _MESSAGE_BYTES_MAX
        library = self._library
        context = library.new_context()
        made = ctypes.create_string_buffer(SIGNATURE_BYTES)
        size = ctypes.c_size_t(SIGNATURE_BYTES)
        good = (
            library.begin_sign(context, None, None, None, self._key.handle) == 1
            and library.sign(context, made, ctypes.byref(size), message, len(message)) == 1
        )
        library.free_context(context)
        if not good or size.value != SIGNATURE_BYTES:
            library.clear_errors()
            raise Ed25519UnavailableError
        return made.raw

    def public(self) -> bytes:
        """Return the public key."""
        found = ctypes.create_string_buffer(KEY_BYTES)
        self._library.public(self._key.handle, found, ctypes.byref(ctypes.c_size_t(KEY_BYTES)))
        return found.raw


def _works(library: _Library) -> bool:
    try:
        tried = Ed25519Signer(_TRIED_PRIVATE, library)
        return tried.public() == _TRIED_PUBLIC and tried.sign(b"\x72") == _TRIED_SIGNATURE
    except Ed25519UnavailableError:
        return False


@cache
def _library() -> _Library:
    found = find((linked(),), _Library, _works)
    if found is None:
        raise Ed25519UnavailableError
    return found
