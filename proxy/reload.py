"""Live reload: settings, keys and credentials are read again and taken together, or not at all.

A thread of its own looks at the files every `keys.poll_s`, or at once when it is asked; it reads
and checks them, so that the data loop only swaps what is good. Which file a name means is asked
anew each time: a mounted directory changes by a swapped link. A file that is still being written is
left until it has been the same for `SETTLE_S`.

What a process cannot change while it runs is kept as it was at the start and named
(`keep_fixed`).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from proxy.config import Settings, read
from proxy.connector import trust
from proxy.discreet import Discreet
from proxy.sealing import read_keys, sealing_problems
from proxy.settings import FILE_NAME, SettingsError, file_mark, flat, one_line

if TYPE_CHECKING:
    import asyncio
    import ssl
    from collections.abc import Callable, Mapping

    from proxy.config import Pool
    from proxy.keys.provider import KeyProvider, KeySet
    from proxy.keys.watch import KeyWatch
    from proxy.qos.classes import PoolName
    from proxy.sealing import KeysByUrl
    from proxy.sm4.keyring import Plan
    from proxy.tls_context import Loaded as LoadedTls

SETTLE_S = 0.1
SETTLE_TIMES_MAX = 50
POOLS: tuple[PoolName, ...] = ("dedicated", "shared", "best_effort")

Print = dict[Path | None, object]
"""What tells each file from another one of its name, or from itself when it was written again; the
keys' mark under None."""

log = logging.getLogger(__name__)


class Loaded(Discreet, frozen=True):
    """What was read, all of it good. `kept`: names whose new values need a restart.

    `plan`: the keys as the ring is to take them.
    """

    shown = ("kept",)

    settings: Settings
    keys: KeySet | None
    authorization: Mapping[PoolName, bytes]
    trust: Mapping[PoolName, ssl.SSLContext] = msgspec.field(default_factory=dict)
    tls: LoadedTls | None = None
    sealing: Mapping[PoolName, KeysByUrl] = msgspec.field(default_factory=dict)
    kept: tuple[str, ...] = ()
    plan: Plan | None = None


class Source:
    """The files of one sidecar: read at the start, and again at each reload."""

    def __init__(self, path: str | None, environ: Mapping[str, str], settings: Settings) -> None:
        self._path = path
        self._environ = environ
        self._start = settings
        self._first: Loaded | None = None
        self._provider: KeyProvider | None = None
        self.watch: KeyWatch | None = None

    def credentials(self, settings: Settings) -> Loaded:
        """Read keys and credentials; raises SettingsError with every problem."""
        problems: list[str] = []
        authorization: dict[PoolName, bytes] = {}
        trusted: dict[PoolName, ssl.SSLContext] = {}
        sealing: dict[PoolName, KeysByUrl] = {}
        for name in POOLS:
            pool: Pool = getattr(settings.pools, name)
            try:
                if any(url.startswith("https:") for url in pool.endpoints):
                    trusted[name] = trust(pool.ca_file)
            except OSError as problem:  # ssl.SSLError is one
                problems.append(f"pools.{name}.ca_file: {problem}")
            try:
                if pool.seal.keys:
                    sealing[name] = read_keys(name, pool)
            except SettingsError as problem:
                problems += problem.problems
            file = pool.authorization_file
            try:
                secret = one_line(file, f"pools.{name}.authorization_file")
            except SettingsError as problem:
                problems += problem.problems
                continue
            authorization[name] = b"Authorization: " + secret + b"\r\n" if secret else b""
        problems += sealing_problems(sealing)
        keys: KeySet | None = None
        try:
            keys = self._keys()
        except SettingsError as problem:
            problems += problem.problems
        tls: LoadedTls | None = None
        try:
            tls = load_tls(settings)
        except SettingsError as problem:
            problems += problem.problems
        if problems:
            raise SettingsError(problems)
        loaded = Loaded(settings, keys, authorization, trusted, tls, sealing)
        if self._first is None:
            self._first = msgspec.structs.replace(loaded, sealing={})  # it keeps no root
        return loaded

    def again(self) -> Loaded:
        """Read all of it again; raises SettingsError with every problem."""
        problems: list[str] = []
        settings = self._start
        kept: list[str] = []
        try:
            settings, kept = keep_fixed(read(self._path, self._environ), self._start)
        except SettingsError as problem:
            problems += problem.problems
        try:
            loaded = self.credentials(settings)
        except SettingsError as problem:
            problems += problem.problems
        else:
            if self._first is not None:
                kept += kept_keys(loaded.keys, self._first.keys)
                problems += other_audience(loaded.keys, self._first.keys)
                loaded = self._planned(loaded, problems)
        if problems:
            raise SettingsError(problems)
        return msgspec.structs.replace(loaded, kept=tuple(kept))

    def _planned(self, loaded: Loaded, problems: list[str]) -> Loaded:
        """Put the keys in order for the ring, on the thread that reads.

        Libraries that new keys need are loaded by this.
        """
        watch = self.watch
        if loaded.keys is None or watch is None or watch.ring is None:
            return loaded
        from proxy.keys.pace import breathe  # noqa: PLC0415 - only with keys
        from proxy.sm4.keyring import KeyringError  # noqa: PLC0415

        now_ms = time.time_ns() // 1_000_000
        try:
            plan = watch.ring.plan(loaded.keys.envelope_keys(), now_ms=now_ms, rest=breathe)
        except KeyringError as problem:
            problems.append(f"keys.{watch.provider.kind}: {problem}")
            return loaded
        watch.revoked = len(loaded.keys.revoked())
        return msgspec.structs.replace(loaded, plan=plan)

    def provider(self) -> KeyProvider | None:
        """Return where keys come from, None where none are named; raises SettingsError."""
        row = self._start.keys  # cannot change while running
        if self._provider is None and (row.file or row.provider != "file"):
            from proxy.keys.provider import KeySourceError  # noqa: PLC0415 - only with keys
            from proxy.keys.sources import open_provider  # noqa: PLC0415

            try:
                self._provider = open_provider(row)
            except KeySourceError as problem:
                raise SettingsError([f"keys.provider: {problem}"]) from None
            if self._provider is not None:
                from proxy.keys.watch import KeyWatch  # noqa: PLC0415 - only with keys

                self.watch = KeyWatch(self._provider, int(row.expiry_alarm_s * 1000))
        return self._provider

    def _keys(self) -> KeySet | None:
        provider = self.provider()
        if provider is None:
            return None
        from proxy.keys.provider import KeySourceError  # noqa: PLC0415 - only with keys

        try:
            return provider.load()
        except KeySourceError as problem:
            raise SettingsError([f"keys.{provider.kind}: {problem}"]) from None

    def close(self) -> None:
        """End what the provider runs."""
        if self._provider is not None:
            self._provider.close()

    def mark(self) -> object:
        """Return what differs when the provider may give other keys."""
        try:
            provider = self.provider()
        except SettingsError:
            return None  # `credentials` tells it
        return None if provider is None else provider.mark()

    def files(self, settings: Settings) -> list[Path]:
        """Return the files to look at."""
        names = []
        for name in POOLS:
            pool: Pool = getattr(settings.pools, name)
            names += [pool.authorization_file, pool.ca_file, *pool.seal.keys]
        found = [Path(name) for name in names if name]
        row = self._start.tls
        found += [Path(name) for name in (row.certificate, row.key, row.client_ca) if name]
        if self._path is not None:
            file = Path(self._path)
            found.append(file / FILE_NAME if file.is_dir() else file)
        return found


def load_tls(settings: Settings) -> LoadedTls | None:
    """Read the sealed door's certificate, if it has one; raises SettingsError."""
    row = settings.tls
    if not (row.certificate or row.key or row.client_ca):
        return None
    if not (row.certificate and row.key):
        raise SettingsError(["tls: certificate and key go together, and client_ca needs both"])
    try:
        from proxy.tls_context import TlsError, load  # noqa: PLC0415 - only with TLS
    except ImportError:
        raise SettingsError(["tls: needs pyOpenSSL: pip install 'tongguan[tls]'"]) from None
    try:
        return load(row)
    except TlsError as problem:
        raise SettingsError([str(problem)]) from None


def keep_fixed(new: Settings, start: Settings) -> tuple[Settings, list[str]]:
    """Return `new` with what cannot change as it was at the start, and the names of that."""
    doors = msgspec.structs.replace(start.doors, connections=new.doors.connections)
    settings = msgspec.structs.replace(
        new,
        workers=start.workers,
        doors=doors,
        tls=start.tls,
        identity=start.identity,
        keys=start.keys,
        envelope=start.envelope,
        audit=start.audit,
    )
    return settings, changed(new, settings)


def newest(path: str | None, environ: Mapping[str, str], start: Settings) -> Settings:
    """Return the settings as they are now, for a process that takes the place of an earlier one.

    A mistake in them is logged, and `start` is used.
    """
    try:
        return keep_fixed(read(path, environ), start)[0]
    except SettingsError as problem:
        log.warning("settings as of the first start are used: %s", problem)
        return start


def changed(one: Settings, other: Settings) -> list[str]:
    """Return the names of the settings in which these differ."""
    left, right = flat(one), flat(other)
    return sorted(n for n in left.keys() | right.keys() if left.get(n) != right.get(n))


def kept_keys(new: KeySet | None, first: KeySet | None) -> list[str]:
    """Return what of a key file is used at the start only, and is another now."""
    if new is None or first is None:
        return []
    names = []
    seed, before = new.chain_seed(), first.chain_seed()
    if seed != before and (seed is None or before is None or seed[0] == before[0]):
        names.append("keys.file: chain seed")  # another one of the same name is no next one
    if new.auditor_public() != first.auditor_public():
        names.append("keys.file: auditor")
    return names


def other_audience(new: KeySet | None, first: KeySet | None) -> list[str]:
    """Return the problem of keys that are for somebody else: a receiver is one audience.

    That there are none is an accident, unless some were revoked.
    """
    if new is None or first is None:
        return []
    if new.audiences() == first.audiences() or (not new.audiences() and new.revoked()):
        return []
    return ["keys.file: its keys are not for the audience of those that were there at the start"]


class Watcher:
    """The thread that looks. It hands over what it read, or why it could not."""

    def __init__(
        self,
        source: Source,
        settings: Settings,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[Loaded | SettingsError], None],
    ) -> None:
        self._source = source
        self._settings = settings
        self._loop = loop
        self._take = take
        self._poll_s = settings.keys.poll_s
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ending = False
        self._seen = self._print()
        self._known = self._rows()
        self._thread = threading.Thread(target=self._run, name="reload", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def reload(self) -> None:
        """Read again now, whether anything changed or not."""
        self._wake.put(None)

    def stop(self) -> None:
        """End the thread."""
        self._ending = True
        self._wake.put(None)
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            asked = self._asked(self._poll_s)
            if self._ending:
                return
            if self._source.watch is not None:
                self._source.watch.look(time.time_ns() // 1_000_000)
            if asked or not self._same():
                self._settle()
                self._read()
                self._known = self._rows()

    def _asked(self, seconds: float) -> bool:
        """Wait for so long, or until somebody asks; whoever asks meanwhile is answered too."""
        try:
            self._wake.get(timeout=seconds)
        except queue.Empty:
            return False
        while not self._wake.empty():
            self._wake.get_nowait()
        return True

    def _same(self) -> bool:
        """Say whether all is as it was seen; four times a second, so no more is done than that."""
        for name, mark in self._known:
            if file_mark(name) != mark:
                return False
        return self._source.mark() == self._seen[None]

    def _rows(self) -> list[tuple[str, object]]:
        return [(str(file), mark) for file, mark in self._seen.items() if file is not None]

    def _settle(self) -> None:
        for _ in range(SETTLE_TIMES_MAX):
            before, self._seen = self._seen, self._print()
            if self._seen == before or self._asked(SETTLE_S):
                return

    def _read(self) -> None:
        result: Loaded | SettingsError
        try:
            result = self._source.again()
        except SettingsError as problem:
            result = problem
        else:
            self._settings = result.settings
            # What was seen before it was read counts; files that are new are seen from here on.
            self._seen = {file: self._seen.get(file, row) for file, row in self._print().items()}
        self._loop.call_soon_threadsafe(self._take, result)

    def _print(self) -> Print:
        rows: Print = {None: self._source.mark()}
        for file in self._source.files(self._settings):
            rows[file] = file_mark(file)
        return rows
