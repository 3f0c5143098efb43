"""Which class a request has, and which pool serves it.

The app asks with `X-QoS-Class`; the tenant's `max_class` caps it, so nobody raises himself. Pure:
header values in, a verdict out (docs/sidecar.md, "Classes").
"""

from __future__ import annotations

from typing import Final, Literal

QosClass = Literal["P0", "P1", "P2"]
PoolName = Literal["dedicated", "shared", "best_effort"]

CLASSES: tuple[QosClass, ...] = ("P0", "P1", "P2")
POOL_OF: dict[QosClass, PoolName] = {"P0": "dedicated", "P1": "shared", "P2": "best_effort"}

_NAMED: dict[bytes, QosClass] = {
    b"P0": "P0",
    b"P1": "P1",
    b"P2": "P2",
    b"p0": "P0",
    b"p1": "P1",
    b"p2": "P2",
}


class UnknownClassError(ValueError):
    """The request names a class that is none, and policy says to refuse it."""


class Verdict:
    """The effective class; `capped` when the tenant's cap lowered it."""

    __slots__ = ("capped", "pool", "qos")

    def __init__(self, qos: QosClass, *, capped: bool) -> None:
        self.qos: Final = qos
        self.pool: Final = POOL_OF[qos]
        self.capped: Final = capped


_VERDICTS = {
    (qos, capped): Verdict(qos, capped=capped) for qos in CLASSES for capped in (False, True)
}


def classify(
    value: bytes | None,
    *,
    repeated: bool,
    default: QosClass,
    reject_unknown: bool,
    max_class: QosClass,
) -> Verdict:
    """Return the effective class of a request.

    `value` is the trimmed header value, None when absent. Two values, or a list, are unknown.
    Raises `UnknownClassError` under `qos.on_unknown = "reject"`.
    """
    asked = default
    if value:
        named = None if repeated else _NAMED.get(value)
        if named is None:
            if reject_unknown:
                raise UnknownClassError("X-QoS-Class must be P0, P1 or P2")
        else:
            asked = named
    # "P0" < "P1" < "P2": the text order is the order of importance.
    if asked < max_class:
        return _VERDICTS[max_class, True]
    return _VERDICTS[asked, False]
