"""Keys from a key service (`proxy/keys/kv2.py`): asked often, needed seldom.

A thread of its own asks every `keys.poll_s`; what it found is held, so that `load` waits for no
network once there are keys. What the service said last is good for a *lease*: `http_lease_s`, or
less if it says so. While the service is silent or refuses, it is asked again at growing distances,
the state is degraded, and no request is lost; when the lease is over the envelope keys are
withdrawn, and come back when the service does. The audit log's keys stay: it has to go on.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from proxy.discreet import Discreet
from proxy.keys.file import KeyFile, KeyFileError, encode, parse
from proxy.keys.kv2 import Kv2, ServiceError
from proxy.keys.local import wall_ms, without
from proxy.keys.merge import first_end_ms, in_grace, merged
from proxy.keys.pace import breathe, uncollected
from proxy.keys.provider import KeySet, KeySourceError, Standing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from proxy.config_keys import Keys
    from proxy.keys.provider import State

SECRETS_MAX = 4096
BACKOFF_MAX_S = 10.0
CLOSE_S = 1.0


def boot_ms() -> int:
    """Return a time in ms that no step of the wall clock moves and that counts while asleep."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def backoff_s(poll_s: float, failures: int) -> float:
    """Return how long to wait after so many failures in a row; 0: none."""
    return max(poll_s, min(poll_s * 2.0 ** min(failures, 16), BACKOFF_MAX_S))


class _Held(Discreet, frozen=True):
    """What the service said last. `parts`: (digest, contents, version) by secret."""

    shown = ("lease_end_ms",)

    parts: Mapping[str, tuple[bytes, KeyFile, int]]
    contents: KeyFile
    lease_end_ms: int = 0


class HttpProvider:
    """See the module, and `KeyProvider`. `poll` is the thread's; tests call it with their clock."""

    kind = "http"

    def __init__(
        self,
        row: Keys,
        clock_ms: Callable[[], int] = wall_ms,
        boot_clock_ms: Callable[[], int] = boot_ms,
        *,
        thread: bool = True,
    ) -> None:
        self._row = row
        self._clock_ms = clock_ms
        self._boot_ms = boot_clock_ms
        self._standing = Standing(clock_ms)
        self._held: _Held | None = None
        self._generation = 0
        self._failures = 0
        self._client = self._made()
        # The thread's and a command's requests share the one connection.
        self._turn = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        if thread:
            self._thread = threading.Thread(target=self._run, name="keys", daemon=True)

    def _made(self) -> Kv2:
        row = self._row
        return Kv2(
            row.http_address,
            Path(row.http_token_file),
            mount=row.http_mount,
            namespace=row.http_namespace,
            ca_file=row.http_ca_file,
            timeout_s=row.http_timeout_s,
        )

    # -- what the reload's thread calls

    def load(self) -> KeySet:
        """Raise `ServiceError` or `KeyFileError` as long as the service never gave any keys."""
        held = self._held
        if held is None:
            self._fetch()
            held = self._held
            assert held is not None
            if self._thread is not None and not self._thread.is_alive():
                self._thread.start()
        audiences = frozenset(key.audience for key in held.contents.envelope_keys)
        contents = held.contents
        if self._lease_is_over(held):
            contents = replace(contents, envelope_keys=())
        versions = {
            f"prompt/{tenant}": str(version)
            for _, file, version in held.parts.values()
            for tenant in file.prompt_keys
        }
        return KeySet(contents, versions=versions, audiences=audiences)

    def mark(self) -> object:
        """Return which answer is held, and whether its lease is over."""
        held = self._held
        return self._generation, held is not None and self._lease_is_over(held)

    def _lease_is_over(self, held: _Held) -> bool:
        return self._boot_ms() > held.lease_end_ms

    def state(self) -> State:
        """Say whether the service answered last, and until when its keys are good without it."""
        return self._standing.state()

    def destroy(self, name: str) -> None:
        """Write the secret that holds it again without it, and destroy its earlier versions."""
        found = False
        with self._turn:
            for path in self._paths():
                secret = self._client.read(path)
                try:
                    data = encode(without(parse(Path(path), secret.data), name))
                except KeyFileError:
                    raise
                except KeySourceError:
                    continue
                self._client.write(path, data, version=secret.version)
                found = True
        if not found:
            raise KeySourceError(f"no secret of the name {name}")

    def close(self) -> None:
        """End the thread and the connection."""
        self._ending.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join(CLOSE_S)
        else:
            self._client.close()

    # -- the thread

    def _run(self) -> None:
        poll_s = self._row.poll_s
        while True:
            wait_s = backoff_s(poll_s, self._failures)
            if self._failures:  # many sidecars lost the service in one moment
                wait_s *= 0.5 + os.urandom(1)[0] / 510
            if self._ending.wait(wait_s):
                self._client.close()
                return
            self.poll()

    def poll(self) -> None:
        """Ask once; note how it went. Never raises for what the service did."""
        try:
            self._fetch()
        except KeySourceError:
            self._failures += 1

    def _fetch(self) -> None:
        try:
            with self._turn, uncollected():
                self._held = self._asked(self._held)
        except ServiceError as problem:
            self._standing.degraded(problem.reason, problem)
            raise
        except KeySourceError as problem:
            self._standing.degraded("refused", problem)
            raise
        self._failures = 0
        left_ms = self._held.lease_end_ms - self._boot_ms()
        self._standing.good(lease_until_ms=self._clock_ms() + left_ms)

    def _paths(self) -> list[str]:
        path = self._row.http_path.strip("/")
        if not self._row.http_path.endswith("/"):
            return [path]
        names = self._client.names(f"{path}/")
        if len(names) > SECRETS_MAX:
            raise ServiceError("bad_answer", f"key service: more than {SECRETS_MAX} secrets")
        return [f"{path}/{name}" for name in names]

    def _asked(self, before: _Held | None) -> _Held:
        """Return what the service holds now; what has not changed stays the same objects."""
        began_ms, lease_s = self._boot_ms(), self._row.http_lease_s
        known = before.parts if before is not None else {}
        parts: dict[str, tuple[bytes, KeyFile, int]] = {}
        for path in self._paths():
            breathe()
            secret = self._client.read(path)
            digest = hashlib.sha256(secret.data).digest()
            row = known.get(path)
            same = row is not None and row[0] == digest
            file = row[1] if row is not None and same else parse(Path(path), secret.data)
            parts[path] = digest, file, secret.version
            if secret.lease_s > 0:
                lease_s = min(lease_s, secret.lease_s)
        lease_end_ms = began_ms + int(lease_s * 1000)
        now_ms = self._clock_ms()
        unchanged = {path: row[0] for path, row in parts.items()} == {
            path: row[0] for path, row in known.items()
        }
        if before is not None and unchanged:
            end_ms = first_end_ms(before.contents.envelope_keys)
            if end_ms is None or now_ms <= end_ms:
                return replace(before, lease_end_ms=lease_end_ms)
            # Nothing is new, but the grace of some key is over: it is not held any longer.
            parts = {path: (d, in_grace(file, now_ms), v) for path, (d, file, v) in parts.items()}
        contents = merged({path: file for path, (_, file, _) in parts.items()})
        self._generation += not unchanged or before is None
        return _Held(parts, contents, lease_end_ms)
