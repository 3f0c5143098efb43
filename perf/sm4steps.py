"""Whole steps of the envelope in both suites, and timing tests of what must not show secrets.

The steps run the sidecar's own code on real envelopes: header, clock, replay cache, open, unpad,
prelude and the strict check of `model` for a request; padding, sealing, frame and event for a chunk
of an answer.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kernels import sm4
from perf import rounds
from proxy.clock import SystemClock
from proxy.sm4.envelope import MEDIA_TYPE, RequestPrelude
from proxy.sm4.keyring import EnvelopeKey, Keyring
from proxy.sm4.receiver import Receiver
from proxy.sm4.replay import ReplayCache
from proxy.sm4.sealer import RequestSealer

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.sm4.sealer import Carrier

MODEL = "bench-model"
PRELUDE = RequestPrelude("POST", "/v1/chat/completions", "application/json", "P1")
SIZES = (1024, 4096, 65536)
WINDOW_MS = 3_600_000  # the envelopes of one run stay in time
CHUNK = b"x" * 200
T_SUSPECT = 4.5  # the usual threshold of such tests
TIMINGS, BATCHES = 10_000, 7


def _key(suite: int) -> EnvelopeKey:
    now_ms = time.time_ns() // 1_000_000
    return EnvelopeKey(
        kid=os.urandom(8),
        root=os.urandom(32),
        client="client",
        audience="local/default/bench",
        tenant="default",
        suite=suite,
        digest="sha256",
        not_before_ms=now_ms - WINDOW_MS,
        not_after_ms=now_ms + WINDOW_MS,
    )


class Requests:
    """Envelopes of one size in one suite, opened again and again by fresh receivers."""

    def __init__(self, suite: int, size: int, *, mac: bool, count: int = 64) -> None:
        key = _key(suite)
        ring = Keyring([key], window_ms=WINDOW_MS)
        derived = ring.get(key.kid)
        assert derived is not None
        self._clock = SystemClock()
        self._ring = ring
        frame = b'{"model":"%b","messages":[{"role":"user","content":"%b"}]}'
        text = b"a" * (size - len(frame) - len(MODEL) + 4)
        body = frame % (MODEL.encode(), text)
        self._wires = [
            RequestSealer(
                derived, model=MODEL, mac=mac, nonce=os.urandom(12), now_ms=self._clock.wall_ms()
            ).single(PRELUDE, body)
            for _ in range(count)
        ]
        self.count = count

    def open_all(self) -> None:
        """Open every envelope once."""
        wall_ms = self._clock.wall_ms
        receiver = Receiver(
            self._ring,
            ReplayCache(window_ms=WINDOW_MS),
            window_ms=WINDOW_MS,
            start_ms=0,
            fence_ms=0,
            max_body_bytes=1 << 20,
        )
        for wire in self._wires:
            opener = receiver.begin(MEDIA_TYPE, None, MODEL, False, None)
            opener.feed(wire, wall_ms())
            opener.finish(wall_ms())


def _chunk_call(suite: int, carrier: Carrier) -> Callable[[], object]:
    """Return the sealing of one more 200 B chunk of an answer."""
    key = _key(suite)
    ring = Keyring([key], window_ms=WINDOW_MS)
    derived = ring.get(key.kid)
    assert derived is not None
    now_ms = time.time_ns() // 1_000_000
    wire = RequestSealer(
        derived, model=MODEL, mac=False, nonce=os.urandom(12), now_ms=now_ms
    ).single(PRELUDE, b'{"model":"%b"}' % MODEL.encode())
    receiver = Receiver(
        ring, ReplayCache(), window_ms=WINDOW_MS, start_ms=0, fence_ms=0, max_body_bytes=1 << 20
    )
    opener = receiver.begin(MEDIA_TYPE, None, MODEL, False, None)
    opener.feed(wire, now_ms)
    stream = opener.finish(now_ms).sealer.stream(
        200, "text/event-stream", nonce=os.urandom(12), now_ms=now_ms, carrier=carrier
    )
    stream.data(CHUNK)
    return partial(stream.data, CHUNK)


def measure(number: int) -> dict[str, dict[str, rounds.Row]]:
    """Return rows `suite 1` and `suite 2` of every step; the base is suite 2."""
    found: dict[str, dict[str, rounds.Row]] = {}
    for size in SIZES:
        for mac in (False, True):
            pair = {f"suite {n}": Requests(n, size, mac=mac) for n in (1, 2)}
            rows = rounds.interleaved({n: r.open_all for n, r in pair.items()}, "suite 2", number)
            found[f"request {size}" + (" mac" if mac else "")] = {
                name: rounds.Row(row.us / pair[name].count, row.ratio) for name, row in rows.items()
            }
    carriers: dict[str, Carrier] = {"event 200": "sse", "raw frame 200": "raw"}
    for step, carrier in carriers.items():
        calls = {f"suite {n}": _chunk_call(n, carrier) for n in (1, 2)}
        found[step] = rounds.interleaved(calls, "suite 2", number)
    return found


def timing(tier: str) -> dict[str, float]:
    """Return Welch's t of two classes each: tags wrong early or late, blocks fixed or random.

    The median of several batches: a fault shows in all of them, a neighbour on the core in one.
    Python's own noise is in the figures, so this finds gross faults only; it decides nothing.
    """
    aead = sm4.Sm4Gcm(os.urandom(16), tier)
    nonce = os.urandom(12)
    sealed = aead.seal(nonce, os.urandom(64), b"")
    early, late = bytearray(sealed), bytearray(sealed)
    early[-16] ^= 1
    late[-1] ^= 1

    def refused(wire: bytes) -> None:
        with suppress(sm4.InvalidTag):
            aead.open(nonce, wire, b"")

    # A new object each time, in both classes: memory that is warm for one only would show.
    fixed, other = bytearray(os.urandom(16)), bytearray(os.urandom(12))
    return {
        "tag wrong in its first or last byte": _t(
            refused, lambda: bytes(early), lambda: bytes(late)
        ),
        "block function, fixed or random": _t(
            aead.encrypt_block, lambda: bytes(fixed), lambda: os.urandom(16)
        ),
        "the tier's blocks, nonce fixed or random": _t(
            lambda some: aead.seal(some, b"", b""), lambda: bytes(other), lambda: os.urandom(12)
        ),
    }


def _t(
    call: Callable[[bytes], object], first: Callable[[], bytes], second: Callable[[], bytes]
) -> float:
    return statistics.median(_one_t(call, first, second) for _ in range(BATCHES))


def _one_t(
    call: Callable[[bytes], object], first: Callable[[], bytes], second: Callable[[], bytes]
) -> float:
    classes = [random.getrandbits(1) for _ in range(TIMINGS)]
    inputs = [second() if which else first() for which in classes]
    times: tuple[list[float], list[float]] = ([], [])
    clock = time.perf_counter_ns
    for which, data in zip(classes, inputs, strict=True):
        start = clock()
        call(data)
        times[which].append(clock() - start)
    return rounds.welch_t(*times)
