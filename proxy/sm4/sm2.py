"""SM2 signatures (GB/T 32918.2 with SM3) by the OpenSSL that this Python runs on.

`cryptography` has no SM2 keys, and the pure-Python packages take k from no system generator and
check neither ranges nor points, so this calls OpenSSL 3's (`libcrypto`): the one behind `hashlib`,
which is loaded anyway, else the system's. What was found is believed only after it has told a known
good signature from a bad one.

Keys and signatures are plain: d is 32 bytes, P is x || y, a signature is r || s. Here r and s are
checked for their range and P for lying on the curve, before OpenSSL checks both again.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

from proxy.sm4.libcrypto import Libcrypto, OwnedKey, find, linked

if TYPE_CHECKING:
    from collections.abc import Callable

PRIVATE_BYTES = 32
PUBLIC_BYTES = 64
SIGNATURE_BYTES = 64
# GB/T 32918.5: the curve y^2 = x^3 + ax + b over F_p, of the prime order n.
_P = 0xFFFFFFFEFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF00000000FFFFFFFFFFFFFFFF
_B = 0x28E9FA9E9D9F5E344D5A9E4BCF6509A7F39789F515AB8F92DDBCBD414D940E93
_N = 0xFFFFFFFEFFFFFFFFFFFFFFFFFFFFFFFF7203DF6B21C6052B53BBF40939D54123
# GB/T 35276: the id of a signer who has none of their own.
ID = b"1234567812345678"
# id-ecPublicKey with the curve's name, in the two DER forms that hold a key (RFC 5480, RFC 5958).
_ALGORITHM = bytes.fromhex("301306072a8648ce3d020106082a811ccf5501822d")
PUBLIC_HEAD = b"\x30\x59" + _ALGORITHM + b"\x03\x42\x00\x04"
PRIVATE_HEAD = b"\x30\x41\x02\x01\x00" + _ALGORITHM + b"\x04\x27\x30\x25\x02\x01\x01\x04\x20"
_OPENSSL_MIN = 0x30000000
_DER_BYTES_MAX = 80
# GB/T 32918.2's curve with a key and a signature of its form, to try a library with.
_TRIED_PUBLIC = bytes.fromhex(
    "09f9df311e5421a150dd7d161e4bc5c672179fad1833fc076bb08ff356f35020"
    "ccea490ce26775a52dc6ea718cc1aa600aed05fbf35e084a6632f6072da9ad13"
)
_TRIED_SIGNATURE = bytes.fromhex(
    "f5a03b0648d2c4630eeac513e1bb81a15944da3827d5b74143ac7eaceee720b3"
    "b1b6aa29df212fd8763182bc0d421ca1bb9038fd1f7f42d4840b69c485bbc1aa"
)
_TRIED_MESSAGE = b"message digest"


class Sm2UnavailableError(ValueError):
    """No OpenSSL 3 with SM2 is within this process's reach."""

    def __init__(self) -> None:
        super().__init__("SM2 needs OpenSSL 3 with SM2 and SM3 (libcrypto.so.3); none was found")


def is_point(public: bytes) -> bool:
    """Say whether x || y are coordinates of a point on the curve."""
    x, y = int.from_bytes(public[:32], "big"), int.from_bytes(public[32:], "big")
    # a is p - 3. The cofactor is 1: every point but infinity, which has no x, has the order n.
    on_curve = (y * y - (x * x * x - 3 * x + _B)) % _P == 0
    return len(public) == PUBLIC_BYTES and x < _P and y < _P and on_curve


def is_private(private: bytes) -> bool:
    """Say whether these bytes are a d: 1 to n - 2."""
    return len(private) == PRIVATE_BYTES and 1 <= int.from_bytes(private, "big") <= _N - 2


class Library(Libcrypto):
    """What SM2 needs beside."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        pointer, number, long = ctypes.c_void_p, ctypes.c_int, ctypes.c_long
        self.sm3 = self.function("EVP_sm3", pointer)
        self.read_public = self.function("d2i_PUBKEY", pointer, pointer, pointer, long)
        self.read_private = self.function("d2i_AutoPrivateKey", pointer, pointer, pointer, long)
        self.write_public = self.function("i2d_PUBKEY", number, pointer, pointer)
        self.set_id = self.function(
            "EVP_PKEY_CTX_set1_id", number, pointer, ctypes.c_char_p, number
        )

    def read(self, der: bytes, *, private: bool) -> int:
        """Return the key of DER bytes; raises ValueError."""
        buffer = ctypes.create_string_buffer(der, len(der))
        place = ctypes.c_void_p(ctypes.addressof(buffer))
        reader = self.read_private if private else self.read_public
        key = reader(None, ctypes.byref(place), len(der))
        if private:
            ctypes.memset(buffer, 0, len(der))
        if not key:
            self.clear_errors()
            raise ValueError("no SM2 key")
        return key

    def begin(self, key: int, begin: Callable[..., int]) -> int:
        """Return a context that signs or verifies under the id; to be freed."""
        context = self.new_context()
        inner = ctypes.c_void_p()
        good = begin(context, ctypes.byref(inner), self.sm3(), None, key) == 1
        if not good or self.set_id(inner, ID, len(ID)) != 1:
            self.free_context(context)
            self.clear_errors()
            raise Sm2UnavailableError
        return context


class Key(OwnedKey):
    """A key of DER bytes; raises ValueError."""

    __slots__ = ()

    def __init__(self, library: Library, der: bytes, *, private: bool) -> None:
        super().__init__(library, library.read(der, private=private))


class Sm2Verifier:
    """Verifies under one public key; may be used from several threads."""

    __slots__ = ("_key", "_library")

    def __init__(self, public: bytes, library: Library | None = None) -> None:
        if not is_point(public):
            raise ValueError("not a point of the SM2 curve")
        self._library = library or openssl()
        self._key = Key(self._library, PUBLIC_HEAD + public, private=False)

    def verify(self, signature: bytes, message: bytes) -> bool:
        """Say whether r || s is this key's signature over `message`."""
        r, s = signature[:32], signature[32:]
        if len(signature) != SIGNATURE_BYTES or not (_in_range(r) and _in_range(s)):
            return False
        body = der_integer(r) + der_integer(s)
        der = b"\x30" + bytes([len(body)]) + body
        library = self._library
        context = library.begin(self._key.handle, library.begin_verify)
        verdict = library.verify(context, der, len(der), message, len(message))
        library.free_context(context)
        if verdict != 1:
            library.clear_errors()
        return verdict == 1


class Sm2Signer:
    """Signs with one private key; k comes from OpenSSL's generator, seeded by the system's."""

    __slots__ = ("_key", "_library")

    def __init__(self, private: bytes) -> None:
        if not is_private(private):
            raise ValueError("not a private key of the SM2 curve")
        self._library = openssl()
        self._key = Key(self._library, PRIVATE_HEAD + private, private=True)

    def sign(self, message: bytes) -> bytes:
        """Return r || s over `message`."""
        library = self._library
        context = library.begin(self._key.handle, library.begin_sign)
        size = ctypes.c_size_t(_DER_BYTES_MAX)
        buffer = ctypes.create_string_buffer(_DER_BYTES_MAX)
        good = library.sign(context, buffer, ctypes.byref(size), message, len(message))
        library.free_context(context)
        if good != 1:
            library.clear_errors()
            raise Sm2UnavailableError
        return _plain_signature(buffer.raw[: size.value])

    def public(self) -> bytes:
        """Return the public key, x || y."""
        library, handle = self._library, self._key.handle
        size = library.write_public(handle, None)
        buffer = ctypes.create_string_buffer(size)
        library.write_public(handle, ctypes.byref(ctypes.c_void_p(ctypes.addressof(buffer))))
        return buffer.raw[-PUBLIC_BYTES:]


def _in_range(number: bytes) -> bool:
    return 1 <= int.from_bytes(number, "big") < _N


def der_integer(number: bytes) -> bytes:
    """Return a number of up to 32 bytes as a DER INTEGER; 0 is not asked for."""
    digits = number.lstrip(b"\0")
    if digits[0] & 0x80:
        digits = b"\0" + digits
    return b"\x02" + bytes([len(digits)]) + digits


def _plain_signature(der: bytes) -> bytes:
    """Return r || s of OpenSSL's own SEQUENCE of two INTEGERs."""
    assert der[0] == 0x30
    assert der[2] == 2
    r_end = 4 + der[3]
    assert der[r_end] == 2
    numbers = (der[4:r_end], der[r_end + 2 :])
    return b"".join(int.from_bytes(n, "big").to_bytes(32, "big") for n in numbers)


def _candidates() -> list[str | None]:
    """Return what may lead to a libcrypto, best first."""
    return [linked(), "libcrypto.so.3"]


def _works(library: Library) -> bool:
    if library.version() < _OPENSSL_MIN:
        return False
    try:
        verifier = Sm2Verifier(_TRIED_PUBLIC, library)
        return verifier.verify(_TRIED_SIGNATURE, _TRIED_MESSAGE) and not verifier.verify(
            _TRIED_SIGNATURE, _TRIED_MESSAGE + b"."
        )
    except ValueError:
        return False


@cache
def openssl() -> Library:
    """Return the first libcrypto that works; raises `Sm2UnavailableError`."""
    found = find(_candidates(), Library, _works)
    if found is None:
        raise Sm2UnavailableError
    return found


def available() -> bool:
    """Say whether SM2 signatures can be made and verified here."""
    try:
        openssl()
    except Sm2UnavailableError:
        return False
    return True
