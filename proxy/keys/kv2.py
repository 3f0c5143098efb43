"""The wire form of a key service: HashiCorp Vault's KV engine, version 2 (also OpenBao's).

One blocking connection that is kept open, for one thread. Only what a sidecar needs: read a secret,
list a folder; and to destroy: write by compare-and-set, destroy versions. Errors say which path and
what the service answered by its number: never the token, never what a secret holds.
"""

from __future__ import annotations

import http.client
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from proxy.keys.file import KeyFileError, read_bytes
from proxy.keys.provider import KeySourceError
from proxy.settings import file_mark

if TYPE_CHECKING:
    from pathlib import Path

ANSWER_BYTES_MAX = 32 << 20
TOKEN_BYTES_MAX = 4096
REASONS = {400: "bad_request", 403: "forbidden", 404: "not_found", 429: "busy", 503: "sealed"}


class ServiceError(KeySourceError):
    """The service gave no answer, or not this one. `reason`: a word for metrics and readyz."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Secret:
    """One secret as read. `data` is its JSON object, `lease_s` 0 where the service names none."""

    data: bytes = field(repr=False)
    version: int
    lease_s: int


class _Metadata(msgspec.Struct):
    version: int


class _Data(msgspec.Struct):
    data: msgspec.Raw
    metadata: _Metadata


class _Read(msgspec.Struct):
    data: _Data
    lease_duration: int = 0


class _Names(msgspec.Struct):
    keys: list[str]


class _Listed(msgspec.Struct):
    data: _Names


class Kv2:
    """A client of one mount. Not thread-safe."""

    def __init__(
        self,
        address: str,
        token_file: Path,
        *,
        mount: str,
        namespace: str = "",
        ca_file: str = "",
        timeout_s: float = 5.0,
    ) -> None:
        """Raise `ServiceError` for certificates that cannot be read. Connects to nothing yet."""
        url = urlsplit(address)
        self._host, self._port = url.hostname or "", url.port
        self._mount = mount.strip("/")
        self._timeout_s = timeout_s
        self._token_file = token_file
        self._token: tuple[object, str] = (None, "")
        self._headers = {"X-Vault-Request": "true", "Accept": "application/json"}
        if namespace:
            self._headers["X-Vault-Namespace"] = namespace
        self._tls: ssl.SSLContext | None = None
        if url.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=ca_file or None)
            except OSError as problem:  # ssl.SSLError is one
                raise ServiceError("ca_file", f"keys.http_ca_file: {problem}") from None
        self._connection: http.client.HTTPConnection | None = None

    def read(self, path: str) -> Secret:
        """Return the newest version of a secret."""
        answer = self._ask("GET", f"data/{path}")
        try:
            found = msgspec.json.decode(answer, type=_Read)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _bad_answer(path) from None
        return Secret(bytes(found.data.data), found.data.metadata.version, found.lease_duration)

    def names(self, folder: str) -> list[str]:
        """Return the names of the secrets right in a folder, in order."""
        answer = self._ask("LIST", f"metadata/{folder}")
        try:
            found = msgspec.json.decode(answer, type=_Listed)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise _bad_answer(folder) from None
        return sorted(name for name in found.data.keys if not name.endswith("/"))

    def write(self, path: str, data: bytes, *, version: int) -> None:
        """Write a JSON object as the version after `version`, and none if that is not the newest.

        The versions before it are destroyed then: the service cannot bring them back.
        """
        body = msgspec.json.encode({"options": {"cas": version}, "data": msgspec.Raw(data)})
        self._ask("POST", f"data/{path}", body)
        versions = list(range(1, version + 1))
        self._ask("PUT", f"destroy/{path}", msgspec.json.encode({"versions": versions}))

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _bearer(self) -> str:
        mark = file_mark(self._token_file)
        if mark is None or mark != self._token[0]:
            try:
                text = read_bytes(self._token_file, mounted=True).strip()
                token = text.decode("ascii")
            except (OSError, KeyFileError) as problem:
                raise ServiceError("token_file", f"keys.http_token_file: {problem}") from None
            except UnicodeDecodeError:
                token = ""
            if not token.isprintable() or not 0 < len(token) <= TOKEN_BYTES_MAX or " " in token:
                raise ServiceError("token_file", "keys.http_token_file: expected one line, a token")
            self._token = mark, token
        return self._token[1]

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        headers = self._headers | {"X-Vault-Token": self._bearer()}
        if body is not None:
            headers["Content-Type"] = "application/json"
        # One that was kept open may have been closed by the service in between.
        again = self._connection is not None
        try:
            status, answer = self._exchange(method, path, body, headers)
        except (OSError, http.client.HTTPException) as problem:
            self.close()
            if not again or isinstance(problem, TimeoutError) or method in {"POST", "PUT"}:
                raise _unreachable(path, problem) from None
            try:
                status, answer = self._exchange(method, path, body, headers)
            except (OSError, http.client.HTTPException) as second:
                self.close()
                raise _unreachable(path, second) from None
        if status not in {200, 204}:
            reason = REASONS.get(status, "bad_answer" if status < 500 else "service_error")
            raise ServiceError(reason, f"key service: {status} ({reason}) for {path}")
        if len(answer) > ANSWER_BYTES_MAX:
            raise ServiceError("bad_answer", f"key service: more than {ANSWER_BYTES_MAX} bytes")
        return answer

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> tuple[int, bytes]:
        if self._connection is None:
            kind = http.client.HTTPConnection
            if self._tls is None:
                self._connection = kind(self._host, self._port, timeout=self._timeout_s)
            else:
                self._connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_s, context=self._tls
                )
        self._connection.request(method, f"/v1/{self._mount}/{path}", body, headers)
        with self._connection.getresponse() as response:
            answer = response.read(ANSWER_BYTES_MAX + 1)
            if len(answer) > ANSWER_BYTES_MAX or response.will_close:
                self.close()
            return response.status, answer


def _unreachable(path: str, problem: Exception) -> ServiceError:
    reason = "timeout" if isinstance(problem, TimeoutError) else "unreachable"
    said = str(problem) if isinstance(problem, OSError) else type(problem).__name__
    return ServiceError(reason, f"key service: no answer for {path}: {said or reason}")


def _bad_answer(path: str) -> ServiceError:
    return ServiceError("bad_answer", f"key service: not the answer of a KV engine 2 for {path}")
