"""The libcrypto that this Python runs on, by `ctypes`: what `ed25519` and `sm2` both call.

It is behind `hashlib`, so it is in the process anyway; another OpenSSL, as `cryptography` carries
one, would cost 6 MB. A call releases the interpreter, so a thread that verifies holds nobody up.
What was found is believed only after it did something whose answer is known: the caller's `works`.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Libcrypto:
    """Functions of EVP's interface with their types. AttributeError: no libcrypto of ours."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._loaded = library
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        text, length = ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)
        self.version = self.function("OpenSSL_version_num", ctypes.c_ulong)
        self.free_key = self.function("EVP_PKEY_free", None, pointer)
        self.new_context = self.function("EVP_MD_CTX_new", pointer)
        self.free_context = self.function("EVP_MD_CTX_free", None, pointer)
        five = (pointer,) * 5
        self.begin_sign = self.function("EVP_DigestSignInit", number, *five)
        self.begin_verify = self.function("EVP_DigestVerifyInit", number, *five)
        self.sign = self.function("EVP_DigestSign", number, pointer, pointer, length, text, size)
        self.verify = self.function("EVP_DigestVerify", number, pointer, text, size, text, size)
        self.clear_errors = self.function("ERR_clear_error", None)

    def function(self, name: str, result: object, *arguments: object) -> Callable[..., int]:
        """Return one function, typed for this binding alone."""
        # A name that is looked up by index is a fresh object: two bindings do not share its types.
        found = self._loaded[name]
        found.restype, found.argtypes = result, arguments  # type: ignore[assignment]
        return found


class OwnedKey:
    """An EVP_PKEY that is freed with its owner."""

    __slots__ = ("_library", "handle")

    def __init__(self, library: Libcrypto, handle: int) -> None:
        self._library = library
        self.handle = handle

    def __del__(self) -> None:
        if self.handle:
            self._library.free_key(self.handle)


Bound = TypeVar("Bound", bound=Libcrypto)


def linked() -> str | None:
    """Return what leads to the process's own libcrypto; None: it is part of Python itself."""
    import _hashlib  # noqa: PLC0415 - Python's own extension; what it is linked to is loaded

    # Symbols are looked up in what a library is linked to as well.
    return getattr(_hashlib, "__file__", None)


def find(
    names: Iterable[str | None],
    bind: Callable[[ctypes.CDLL], Bound],
    works: Callable[[Bound], bool],
) -> Bound | None:
    """Return the first of these libraries that can be bound and works."""
    for name in names:
        try:
            library = bind(ctypes.CDLL(name))
        except (OSError, AttributeError):
            continue
        if works(library):
            return library
    return None
