"""Ed25519 signing (RFC 8032) by the OpenSSL that this Python runs on.

A sidecar signs its checkpoints and nothing else; `cryptography` would bring a second OpenSSL into
the process for that, 6 MB. Like `sm2`, this calls the libcrypto behind `hashlib` by `ctypes`, and
believes what it found only after it has made a known signature. Keys and signatures are plain.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

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


class _Library:
    """The functions of one libcrypto, with their types."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        text, length = ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)

        def function(name: str, result: object, *arguments: object) -> Callable[..., int]:
            found = getattr(library, name)  # AttributeError: no libcrypto of ours
            found.restype, found.argtypes = result, arguments
            return found  # type: ignore[no-any-return]

        self.read = function("EVP_PKEY_new_raw_private_key", pointer, number, pointer, text, size)
        self.public = function("EVP_PKEY_get_raw_public_key", number, pointer, text, length)
        self.free_key = function("EVP_PKEY_free", None, pointer)
        self.new_context = function("EVP_MD_CTX_new", pointer)
        self.free_context = function("EVP_MD_CTX_free", None, pointer)
        self.begin = function("EVP_DigestSignInit", number, *(pointer,) * 5)
        self.sign = function("EVP_DigestSign", number, pointer, text, length, text, size)
        self.clear_errors = function("ERR_clear_error", None)


class Ed25519Signer:
    """Signs with one private key; may be used from several threads."""

    __slots__ = ("_key", "_library")

    def __init__(self, private: bytes, library: _Library | None = None) -> None:
        """Raise ValueError for what is no key, `Ed25519UnavailableError`."""
        self._key = 0
        if len(private) != KEY_BYTES:
            raise ValueError("an Ed25519 private key is 32 bytes")
        self._library = library or _library()
        self._key = self._library.read(_NID, None, private, len(private))
        if not self._key:
            self._library.clear_errors()
            raise Ed25519UnavailableError

    def __del__(self) -> None:
        if self._key:
            self._library.free_key(self._key)

    def sign(self, message: bytes) -> bytes:
        """Return the signature, 64 bytes, of a message of at most 1 MiB."""
        assert len(message) <= _MESSAGE_BYTES_MAX
        library = self._library
        context = library.new_context()
        made = ctypes.create_string_buffer(SIGNATURE_BYTES)
        size = ctypes.c_size_t(SIGNATURE_BYTES)
        good = (
            library.begin(context, None, None, None, self._key) == 1
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
        self._library.public(self._key, found, ctypes.byref(ctypes.c_size_t(KEY_BYTES)))
        return found.raw


def _works(library: _Library) -> bool:
    try:
        tried = Ed25519Signer(_TRIED_PRIVATE, library)
        return tried.public() == _TRIED_PUBLIC and tried.sign(b"\x72") == _TRIED_SIGNATURE
    except Ed25519UnavailableError:
        return False


@cache
def _library() -> _Library:
    import _hashlib  # noqa: PLC0415 - Python's own extension; what it is linked to is loaded

    # Its symbols and those of what it is linked to. None: OpenSSL is part of Python itself.
    try:
        library = _Library(ctypes.CDLL(getattr(_hashlib, "__file__", None)))
    except (OSError, AttributeError):
        raise Ed25519UnavailableError from None
    if not _works(library):
        raise Ed25519UnavailableError
    return library
