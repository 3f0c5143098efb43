"""Which envelope keys there are.

The ring chooses by kid and never by trial: GCM does not commit to its key. What is derived from a
key is kept while there is room (`DERIVED_MAX`). A known kid with another R is refused. The ring
never reads a clock: `now_ms` is an argument.

A hundred thousand keys are no exception, so nothing that one request or one tick does goes over all
of them: other keys are compared and put in order by `plan`, on any thread, and the loop only takes
what is ready.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from proxy.discreet import Discreet
from proxy.sm4.key import (
    ENVELOPES_MAX,
    KID_BYTES,
    PAD_BYTES_DEFAULT,
    ROOT_BYTES,
    SEALED_BYTES_MAX,
    Derived,
    EnvelopeKey,
    KeyringError,
    Used,
    derivation_info,
    is_id,
    verifier_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = [
    "ENVELOPES_MAX",
    "KID_BYTES",
    "PAD_BYTES_DEFAULT",
    "ROOT_BYTES",
    "SEALED_BYTES_MAX",
    "Derived",
    "EnvelopeKey",
    "Keyring",
    "KeyringError",
    "check_signatures",
    "derivation_info",
    "is_id",
]

# What is derived from a key takes 3 KB and 0.2 ms: kept for so many, made ahead for so many.
DERIVED_MAX = 4096
DERIVED_AHEAD = 64
_COMPARED_AT_ONCE = 64
_BEGIN_MS = attrgetter("not_before_ms")
_END_MS = attrgetter("not_after_ms")


def _no_rest() -> None:
    """Rest for no time."""


def check_signatures(keys: Iterable[EnvelopeKey], rest: Callable[[], None] = _no_rest) -> None:
    """Raise `KeyringError` if signatures under one of these keys cannot be verified here."""
    for number, key in enumerate(keys):
        if key.scheme:
            verifier_of(key)
            rest()
        elif number % _COMPARED_AT_ONCE == 0:
            rest()


class Plan(Discreet, frozen=True):
    """What a ring is to know: made on any thread, taken on the ring's own."""

    keys: dict[bytes, EnvelopeKey]
    by_end: list[EnvelopeKey]
    begins: array[int]
    ends: array[int]
    derived: dict[bytes, Derived]


class Keyring:
    """The keys of one end. One loop owns it; only `plan` may be called from another thread."""

    __slots__ = ("_begins", "_by_end", "_derived", "_ends", "_keys", "_used", "_window_ms")

    def __init__(self, keys: Iterable[EnvelopeKey], *, window_ms: int = 60_000) -> None:
        self._window_ms = window_ms
        self._keys: dict[bytes, EnvelopeKey] = {}
        self._derived: dict[bytes, Derived] = {}
        self._used: dict[bytes, Used] = {}
        # In order of time, the first to end last: what has ended is popped.
        self._by_end: list[EnvelopeKey] = []
        self._begins = self._ends = array("q")
        self.take(self._ordered(keys, _no_rest))

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[EnvelopeKey]:
        """Yield the keys that are known, in order of their end, the last first."""
        return iter(tuple(self._by_end))

    def add(self, key: EnvelopeKey) -> None:
        """Take a key; raises `KeyringError` if its kid is known with anything else than this."""
        self.take(self._ordered([*self._keys.values(), key], _no_rest))

    def plan(
        self,
        keys: Iterable[EnvelopeKey],
        *,
        now_ms: int | None = None,
        rest: Callable[[], None] = _no_rest,
    ) -> Plan:
        """Return what makes this ring know these keys and no others; changes nothing.

        Of keys that are new, some that open at `now_ms` are derived ahead. `rest` is called after
        each little work. Raises `KeyringError` for a kid that is known, or there twice, with other
        contents, and for signatures that cannot be verified here.
        """
        plan = self._ordered(keys, rest)
        fresh = (key for kid, key in plan.keys.items() if kid not in self._keys)
        if now_ms is not None:
            soon = (key for key in fresh if now_ms <= key.not_after_ms)
            for key in islice(soon, DERIVED_AHEAD):
                plan.derived[key.kid] = Derived(key)
                rest()
        check_signatures(plan.keys.values(), rest)
        return plan

    def _ordered(self, keys: Iterable[EnvelopeKey], rest: Callable[[], None]) -> Plan:
        rows = list(keys)
        known: dict[bytes, EnvelopeKey] = {}
        if not self._keys:
            known = {key.kid: key for key in rows}
        # At the start nothing is known and no kid is there twice, so that nothing is compared.
        for number, key in enumerate(rows if len(known) != len(rows) else ()):
            if number % _COMPARED_AT_ONCE == 0:
                rest()
            # The object that is known already, where it is the same: one of each is kept.
            kept = self._keys.get(key.kid, key)
            same = known.setdefault(key.kid, kept)
            if (kept is not key and kept != key) or (same is not kept and same != kept):
                raise KeyringError(f"kid {key.kid.hex()} is known already, with other contents")
        by_end = sorted(known.values(), key=_END_MS, reverse=True)
        rest()
        begins = array("q", sorted(map(_BEGIN_MS, by_end)))
        rest()
        ends = array("q", map(_END_MS, reversed(by_end)))
        return Plan(known, by_end, begins, ends, {})

    def take(self, plan: Plan) -> None:
        """Know a plan's keys and no others; what a key that stays has sealed stays counted."""
        keys = plan.keys
        self._keys, self._by_end = keys, plan.by_end
        self._begins, self._ends = plan.begins, plan.ends
        self._derived = {kid: row for kid, row in self._derived.items() if kid in keys}
        self._used = {kid: used for kid, used in self._used.items() if kid in keys}
        for kid, derived in plan.derived.items():
            if kid not in self._derived:
                self._keep(kid, derived)

    def replace(self, keys: Iterable[EnvelopeKey]) -> None:
        """Know these keys and no others, at once. Raises as `plan`, and nothing has changed."""
        self.take(self.plan(keys))

    def prepare(self, now_ms: int) -> None:
        """Derive some of what opens now, so that the first request does not wait for it.

        Raises `KeyringError` where the signatures of any key cannot be verified here.
        """
        check_signatures(self._keys.values())
        opening = (key for key in self._by_end if self.accepts(key, now_ms))
        for key in islice(opening, DERIVED_AHEAD):
            self.get(key.kid)

    def get(self, kid: bytes) -> Derived | None:
        """Return the derived keys of `kid`, or None if it is not known."""
        derived = self._derived.get(kid)
        if derived is None:
            key = self._keys.get(kid)
            if key is None:
                return None
            derived = Derived(key, self._used.get(kid))
            self._keep(kid, derived)
        return derived

    def _keep(self, kid: bytes, derived: Derived) -> None:
        if len(self._derived) >= DERIVED_MAX:
            # The oldest goes, however often it was asked for: to keep an order of use would cost
            # every request, and to derive again costs few a little.
            del self._derived[next(iter(self._derived))]
        self._derived[kid] = derived
        self._used[kid] = derived.used

    def accepts(self, key: EnvelopeKey, time_ms: int) -> bool:
        """Say whether an envelope of that header time may be opened with `key`."""
        return (
            key.not_before_ms - self._window_ms <= time_ms <= key.not_after_ms + 2 * self._window_ms
        )

    def live(self, now_ms: int) -> int:
        """Return with how many kids an envelope made now would be opened."""
        begun = bisect_right(self._begins, now_ms + self._window_ms)
        return max(0, begun - bisect_left(self._ends, now_ms - 2 * self._window_ms))

    def live_keys(self, now_ms: int, most: int | None = None) -> list[EnvelopeKey]:
        """Return the keys with which an envelope made now would be opened, at most `most`."""
        # A copy: the loop may drop some while another thread asks.
        keys = tuple(self._by_end)
        return list(islice((k for k in keys if self.accepts(k, now_ms)), most))

    def live_kids(self, now_ms: int, most: int | None = None) -> list[bytes]:
        """Return their kids."""
        return [key.kid for key in self.live_keys(now_ms, most)]

    def sealing_key(self, now_ms: int) -> Derived | None:
        """Return the key to seal with now: valid, not spent, the one that began last."""
        valid = [k for k in self._keys.values() if k.not_before_ms <= now_ms <= k.not_after_ms]
        for key in sorted(valid, key=_BEGIN_MS, reverse=True):
            derived = self.get(key.kid)
            if derived is not None and not derived.spent():
                return derived
        return None

    def drop_expired(self, now_ms: int) -> list[bytes]:
        """Forget keys whose grace has ended, with all that was derived; return their kids.

        The last header time is not-after + 2 windows, and it may be a window old when it comes.
        """
        grace_ms = 3 * self._window_ms
        gone = []
        while self._by_end and now_ms > self._by_end[-1].not_after_ms + grace_ms:
            kid = self._by_end.pop().kid
            del self._keys[kid]
            self._derived.pop(kid, None)
            self._used.pop(kid, None)
            gone.append(kid)
        return gone
