"""W3C trace context: keep what came, else make one (https://www.w3.org/TR/trace-context/).

Pure: random bits are an argument.
"""

from __future__ import annotations

import re

from kernels import wire

# Version 00 has exactly four parts; higher versions may carry more, which is kept.
_TRACEPARENT = re.compile(
    rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-[!-~]{1,200})?"
)


def _unsure(value: bytes) -> bool:
    """Leave it to the expression above."""
    del value
    return False


_plain = wire.traceparents(_unsure)


def valid(value: bytes | None) -> bool:
    """Say whether a traceparent may be passed on as it is."""
    if value is None:
        return False
    if _plain(value):
        return True
    if _TRACEPARENT.fullmatch(value) is None:
        return False
    return not value.startswith(b"00") or len(value) == 55


def make(bits: int, below: int) -> bytes:
    """Return a traceparent from 192 random bits (a zero id would be invalid).

    It is sampled if the low 64 bits of its trace id are below `below`.
    """
    trace = (bits & ((1 << 128) - 1)) or 1
    span = (bits >> 128) or 1
    sampled = trace & ((1 << 64) - 1) < below
    return b"00-%032x-%016x-%02x" % (trace, span & ((1 << 64) - 1), sampled)
