"""TLS around a door (`tls_context`: RFC 8998), over memory BIOs.

A shell between a connection and the protocol that serves it, which sees an ordinary transport. It
is no TLCP (GB/T 38636) and no certified module.

A handshake takes milliseconds of SM2, so one thread of its own does them and the loop never waits.
Bounds: handshakes at once, an eighth of them for one peer; seconds and bytes of each. There are no
tickets and no early data: neither would be fresh.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, cast

from OpenSSL import SSL

from proxy.sm4.budget import Budget
from proxy.tls_context import READ_BYTES, outgoing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from proxy.config import Tls
    from proxy.metrics import Counters
    from proxy.tls_context import Loaded

_HANDSHAKE_BYTES_MAX = 64 << 10


class TlsDoor:
    """What all connections of one door share. `loaded` may be replaced at any time."""

    def __init__(
        self, settings: Tls, loaded: Loaded, loop: asyncio.AbstractEventLoop, counters: Counters
    ) -> None:
        self.loaded = loaded
        self.loop = loop
        self.counters = counters
        self.handshake_s = settings.handshake_s
        self.places = Budget(settings.handshakes)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="tls")
        counters.tls_certificate_ends_s = loaded.expires_s

    def renew(self, loaded: Loaded) -> None:
        """Use another certificate for the connections that come from now on."""
        self.loaded = loaded
        self.counters.tls_certificate_ends_s = loaded.expires_s

    def wrap(self, inner: Callable[[], asyncio.Protocol]) -> asyncio.Protocol:
        """Return the protocol of one connection; `inner` is made when its handshake is over."""
        return _Shell(self, inner)

    def count(self, outcome: str) -> None:
        """Count the end of one handshake."""
        rows = self.counters.tls_handshakes
        rows[outcome] = rows.get(outcome, 0) + 1
        self.counters.tls_pending = self.places.held_bytes

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown(wait=False, cancel_futures=True)


class _Shell(asyncio.Protocol):
    """One connection: ciphertext outside, what the inner protocol reads and writes inside."""

    def __init__(self, door: TlsDoor, make: Callable[[], asyncio.Protocol]) -> None:
        self._door = door
        self._make = make
        self._tls = SSL.Connection(door.loaded.context, None)
        self._tls.set_accept_state()
        self._raw: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._peer: str | None = None  # while it holds a place
        self._busy = False  # the thread has the connection
        self._early: list[bytes] = []
        self._early_bytes = 0
        self._taken = 0
        self.inner: asyncio.Protocol | None = None
        self.paused = False
        self.closing = False

    # -- the connection outside

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        raw = self._raw = cast("asyncio.Transport", transport)
        door, address = self._door, raw.get_extra_info("peername")
        peer = address[0] if isinstance(address, tuple) else "unix"
        if not door.places.take(peer, 1):
            door.count("refused")
            door.counters.limit_hits["tls.handshakes"] += 1
            raw.abort()
            return
        self._peer = peer
        door.counters.tls_pending = door.places.held_bytes
        self._timer = door.loop.call_later(door.handshake_s, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._raw = None
        self._settle("left")
        inner, self.inner = self.inner, None
        if inner is not None:
            inner.connection_lost(exc)

    def eof_received(self) -> bool:
        """See asyncio: FIN without close_notify ends what was begun, as for any peer that left."""
        if self.inner is not None:
            self.inner.eof_received()
        return False

    def pause_writing(self) -> None:
        """See asyncio."""
        if self.inner is not None:
            self.inner.pause_writing()

    def resume_writing(self) -> None:
        """See asyncio."""
        if self.inner is not None:
            self.inner.resume_writing()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self.inner is not None:
            self._tls.bio_write(data)
            self.decrypt()
            return
        if self._peer is None:
            return
        self._early.append(data)
        self._early_bytes += len(data)
        if not self._busy:
            self._step()
        elif self._early_bytes > _HANDSHAKE_BYTES_MAX and self._raw is not None:
            # A client that is done sends its request while the thread is not.
            self._raw.pause_reading()

    # -- the handshake

    def _step(self) -> None:
        for data in self._early:
            self._tls.bio_write(data)
        self._taken += self._early_bytes
        self._early.clear()
        self._early_bytes = 0
        self._busy = True
        door = self._door
        work = door.loop.run_in_executor(door.thread, _handshake, self._tls)
        work.add_done_callback(self._stepped)

    def _stepped(self, work: asyncio.Future[bool | None]) -> None:
        self._busy = False
        if work.cancelled() or self._raw is None or self._peer is None:
            return  # it left, or was too late
        done = work.result()
        self.flush()
        if done is None or (not done and self._taken > _HANDSHAKE_BYTES_MAX):
            self._fail("failed")
            return
        self._raw.resume_reading()
        if not done:
            if self._early:
                self._step()
        else:
            self._settle("ok")
            inner = self.inner = self._make()
            inner.connection_made(_TlsTransport(self, self._raw))
            for data in self._early:
                self._tls.bio_write(data)
            self._early.clear()
            self.decrypt()

    def _settle(self, outcome: str) -> None:
        """Give the place back, once."""
        peer, self._peer = self._peer, None
        if peer is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._door.places.give_back(peer, 1)
        self._door.count(outcome)

    def _fail(self, outcome: str) -> None:
        """End a handshake; what it has to say, an alert, was written before."""
        self._settle(outcome)
        if self._raw is not None:
            self._raw.close()

    def _late(self) -> None:
        self._door.counters.limit_hits["tls.handshake_s"] += 1
        self._settle("late")
        if self._raw is not None:
            self._raw.abort()

    # -- bytes inside

    def decrypt(self) -> None:
        """Give the inner protocol what is whole, unless it has paused."""
        tls, raw = self._tls, self._raw
        while self.inner is not None and raw is not None and not self.paused:
            if raw.is_closing() or self.closing:
                return
            try:
                data = tls.recv(READ_BYTES)
            except SSL.WantReadError:
                break
            except SSL.ZeroReturnError:  # close_notify
                self.inner.eof_received()
                self.close()
                return
            except SSL.Error:
                self.flush()  # the alert
                raw.close()
                return
            self.inner.data_received(data)
        self.flush()  # a key update is answered

    def encrypt(self, data: bytes) -> None:
        """Write what the inner protocol wrote."""
        if self._raw is None or self._raw.is_closing() or self.closing:
            return
        view = memoryview(data)
        while view:
            view = view[self._tls.send(view[:READ_BYTES]) :]
            self.flush()

    def flush(self) -> None:
        """Hand over what TLS has to send."""
        if self._raw is not None and not self._raw.is_closing():
            for data in outgoing(self._tls):
                self._raw.write(data)

    def close(self) -> None:
        """Say close_notify and close when all is written."""
        if self.closing or self._raw is None:
            return
        self.closing = True
        with contextlib.suppress(SSL.Error):  # it is over already
            self._tls.shutdown()
        self.flush()
        self._raw.close()

    def go_on(self) -> None:
        """Read on after a pause: first what is here."""
        self.decrypt()
        if not self.paused and self._raw is not None and not self._raw.is_closing():
            self._raw.resume_reading()

    def later(self, work: Callable[[], None]) -> None:
        """Call this from the loop, not from within the inner protocol."""
        self._door.loop.call_soon(work)


def _handshake(tls: SSL.Connection) -> bool | None:
    """Go on with a handshake: True when it is over, None when it failed. Runs on the thread."""
    try:
        tls.do_handshake()
    except SSL.WantReadError:
        return False
    except SSL.Error:
        return None
    return True


class _TlsTransport(asyncio.Transport):
    """What the inner protocol takes for its connection."""

    def __init__(self, shell: _Shell, raw: asyncio.Transport) -> None:
        super().__init__()
        self._shell = shell
        self._raw = raw

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See asyncio."""
        return self._raw.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """See asyncio."""
        return self._shell.closing or self._raw.is_closing()

    def close(self) -> None:
        """See asyncio."""
        self._shell.close()

    def abort(self) -> None:
        """See asyncio."""
        self._raw.abort()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """See asyncio."""
        self._shell.inner = cast("asyncio.Protocol", protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        """See asyncio."""
        assert self._shell.inner is not None
        return self._shell.inner

    def is_reading(self) -> bool:
        """See asyncio."""
        return not self._shell.paused and not self.is_closing()

    def pause_reading(self) -> None:
        """See asyncio."""
        self._shell.paused = True
        if not self._raw.is_closing():
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        """See asyncio."""
        if self._shell.paused:
            self._shell.paused = False
            self._shell.later(self._shell.go_on)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """See asyncio."""
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """See asyncio."""
        return self._raw.get_write_buffer_size()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See asyncio."""
        self._shell.encrypt(bytes(data))

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        """See asyncio."""
        self._shell.encrypt(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        """See asyncio. Half closed is not offered: the answer says that the connection ends."""
        return False
