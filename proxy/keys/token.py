"""Keys whose root never leaves a PKCS#11 token (an HSM, a smart card, SoftHSM).

The token holds AES-256 keys that it drew itself and does not give out; the key file holds envelope
roots, prompt keys, chain seeds and checkpoint keys wrapped by them, by AES-GCM inside the token
(CKM_AES_GCM; RFC 5116) and bound to their names (`proxy/keys/wrapped.py`). R is drawn fresh for
each kid as ever, not derived. What was unwrapped lies in this process' memory while it is used, as
with any provider: SM4 is done here. A copy of the file opens nothing without the token.

Each tenant's prompt key is wrapped by a token key of its own, `<root label>/prompt/<tenant>`: when
that is destroyed, no copy of the file, however old, brings the prompt key back.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.keys.file import KeyFile, KeyFileError, encode, parse, read_bytes
from proxy.keys.issue import replace_file
from proxy.keys.local import wall_ms, without
from proxy.keys.pace import breathe
from proxy.keys.provider import CannotDestroyError, KeySet, KeySourceError, Standing
from proxy.keys.wrapped import IV_BYTES, TAG_BYTES, bound_to, converted, is_wrapped, join, split
from proxy.settings import file_mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from proxy.config_keys import Keys
    from proxy.keys.provider import State

ROOT_LABEL = "tongguan"
KEY_BITS = 256


class TokenError(KeySourceError):
    """The token cannot be used; says what it said, never a PIN. `reason`: a word."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class Token:
    """A session with a token, logged in. Of one thread; use `opened`."""

    def __init__(self, session: Any, pkcs11: Any) -> None:
        self._session = session
        self._pkcs11 = pkcs11
        self._keys: dict[str, Any] = {}

    def unwrap(self, name: str, text: str) -> str | None:
        """Return a wrapped secret of that name as hexadecimal digits; others as they are.

        None: a prompt key whose wrapping key was destroyed, so it is no more.
        """
        breathe()
        found = split(text)
        if found is None:
            return text
        label, blob = found
        key = self._key(label)
        if key is None and name.startswith("prompt/"):
            return None
        if key is None:
            raise TokenError("key_missing", f"{name}: the token has no key {label}")
        secret: bytes = key.decrypt(blob[IV_BYTES:], **self._gcm(blob[:IV_BYTES], name))
        return secret.hex()

    def wrap(self, name: str, text: str) -> str:
        """Return a secret's hexadecimal digits wrapped; makes the wrapping key if there is none."""
        if split(text) is not None:
            return text
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            raise KeyFileError(f"{name}: expected hexadecimal digits") from None
        label = f"{ROOT_LABEL}/{name}" if name.startswith("prompt/") else ROOT_LABEL
        iv = os.urandom(IV_BYTES)
        sealed: bytes = (self._key(label) or self._made(label)).encrypt(
            secret, **self._gcm(iv, name)
        )
        return join(label, iv + sealed)

    def destroy(self, label: str) -> bool:
        """Destroy a wrapping key; False: there was none."""
        key = self._key(label)
        if key is None:
            return False
        self._keys.pop(label)
        key.destroy()
        return True

    def _gcm(self, iv: bytes, name: str) -> dict[str, Any]:
        pkcs11 = self._pkcs11
        parameters = pkcs11.GCMParams(iv, bound_to(name), TAG_BYTES * 8)
        return {"mechanism": pkcs11.Mechanism.AES_GCM, "mechanism_param": parameters}

    def _key(self, label: str) -> Any:
        if label not in self._keys:
            try:
                self._keys[label] = self._session.get_key(
                    object_class=self._pkcs11.ObjectClass.SECRET_KEY, label=label
                )
            except self._pkcs11.NoSuchKey:
                return None
        return self._keys[label]

    def _made(self, label: str) -> Any:
        attribute = self._pkcs11.Attribute
        self._keys[label] = self._session.generate_key(
            self._pkcs11.KeyType.AES,
            KEY_BITS,
            label=label,
            store=True,
            # For nothing else: not to wrap other keys, and never to be read.
            template={
                attribute.SENSITIVE: True,
                attribute.EXTRACTABLE: False,
                attribute.ENCRYPT: True,
                attribute.DECRYPT: True,
                attribute.WRAP: False,
                attribute.UNWRAP: False,
                attribute.DERIVE: False,
            },
        )
        return self._keys[label]


@contextmanager
def opened(module: str, label: str, pin_file: str, *, write: bool = False) -> Iterator[Token]:
    """Open a session and log in; raises `TokenError`, also for what the token says in between."""
    try:
        import pkcs11  # noqa: PLC0415 - an extra's package
    except ImportError:
        raise TokenError(
            "package_missing", "PKCS#11 needs a package: pip install 'tongguan[pkcs11]'"
        ) from None
    try:
        pin = read_bytes(Path(pin_file), mounted=True).strip().decode()
    except (OSError, UnicodeDecodeError, KeyFileError) as problem:
        raise TokenError("pin_file", f"PIN file: {problem}") from None
    where = f"token {label} of {module}"
    try:
        library = pkcs11.lib(module)
        # A token that was initialised since the library was loaded is seen then too.
        library.reinitialize()
        token = library.get_token(token_label=label)
        if pkcs11.Mechanism.AES_GCM not in token.slot.get_mechanisms():
            raise TokenError("mechanism_missing", f"{where}: has no CKM_AES_GCM")
        with token.open(user_pin=pin, rw=write) as session:
            yield Token(session, pkcs11)
    except pkcs11.PKCS11Error as problem:
        said = type(problem).__name__
        if type(problem) is pkcs11.PKCS11Error:  # of the package itself: no such library
            raise TokenError("module_missing", f"{module}: {problem}") from None
        reason = {"PinIncorrect": "pin_refused", "NoSuchToken": "token_missing"}
        text = f"{where}: {said}"
        if said == "GeneralError":  # what a failed tag is to SoftHSM
            text += "; a wrapped secret was changed, or is not of this token"
        raise TokenError(reason.get(said, "token_error"), text) from None


class TokenProvider:
    """`keys.file`, wrapped by the token that `keys.pkcs11_*` names. See `KeyProvider`.

    The token is asked when the file changes, and only then: a wrong PIN is not tried until the
    token locks itself.
    """

    kind = "pkcs11"

    def __init__(self, row: Keys, clock_ms: Callable[[], int] = wall_ms) -> None:
        self._row = row
        self._path = Path(row.file)
        self._standing = Standing(clock_ms)

    def _opened(self, *, write: bool = False) -> Any:
        row = self._row
        return opened(row.pkcs11_module, row.pkcs11_token, row.pkcs11_pin_file, write=write)

    def load(self) -> KeySet:
        """Raise `TokenError` or `KeyFileError`."""
        try:
            contents = self._read()
        except TokenError as problem:
            self._standing.degraded(problem.reason, problem)
            raise
        except KeySourceError as problem:
            self._standing.degraded("file_refused", problem)
            raise
        self._standing.good()
        return KeySet(contents)

    def _read(self) -> KeyFile:
        try:
            data = read_bytes(self._path, mounted=True)
        except OSError as problem:
            raise KeyFileError(str(problem)) from None
        if not is_wrapped(data):
            raise KeyFileError(f"{self._path}: nothing in it is wrapped; run: tongguan keys wrap")
        with self._opened() as token:
            contents = parse(self._path, converted(self._path, data, token.unwrap))
        if contents.role != "sidecar":
            raise KeyFileError(f"{self._path}: made for the {contents.role}, not for a sidecar")
        return contents

    def mark(self) -> object:
        """Return what the status of the key file and of the PIN's says of them."""
        return file_mark(self._path), file_mark(Path(self._row.pkcs11_pin_file))

    def destroy(self, name: str) -> None:
        """Write the file without the secret; a prompt key's wrapping key is destroyed too."""
        contents = without(self._read(), name)
        with self._opened(write=True) as token:
            data = converted(self._path, encode(contents), token.wrap)
            try:
                replace_file(self._path, data, suffix=f"{wall_ms()}.{os.getpid()}")
            except OSError as problem:
                raise CannotDestroyError(f"{self._path}: {problem.strerror}") from None
            if name.startswith("prompt/"):
                token.destroy(f"{ROOT_LABEL}/{name}")

    def state(self) -> State:
        """Say whether the token unwrapped the file when that was last read."""
        return self._standing.state()

    def close(self) -> None:
        """Nothing runs."""
