"""Which keys end soon with nothing to follow them. Pure.

A key is followed by one of the same client that ends later and begins before it ends. The alarm
comes `ahead_ms` before the end, or a quarter of the key's own validity where that is less: keys of
a day are no alarm all day long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from proxy.sm4.keyring import EnvelopeKey

_AT_ONCE = 256


def expiring(
    keys: Iterable[EnvelopeKey], now_ms: int, ahead_ms: int, rest: Callable[[], None]
) -> list[EnvelopeKey]:
    """Return the keys an alarm is due for, the first to end first.

    `keys` in order of their end, the last first. `rest` is called after each little work.
    """
    followed: dict[str, int] = {}
    found = []
    for number, key in enumerate(keys):
        if number % _AT_ONCE == 0:
            rest()
        # The later ones came before: the earliest begin among them is what may follow.
        begin_ms = followed.get(key.client)
        if begin_ms is None or begin_ms > key.not_after_ms:
            span_ms = (key.not_after_ms - key.not_before_ms) // 4
            if key.not_after_ms - min(ahead_ms, span_ms) <= now_ms <= key.not_after_ms:
                found.append(key)
            followed[key.client] = key.not_before_ms
        else:
            followed[key.client] = min(begin_ms, key.not_before_ms)
    return found[::-1]
