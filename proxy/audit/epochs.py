"""MAC keys for who verifies: from chain seeds to the key of any epoch of any chain.

Keys go one way, so an epoch is reached from one before it. A chain is read forwards and each step
costs one derivation; to go back, every `_KEPT_EVERY`th key is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.audit.chain import chain_key, mac, next_key, parse_key_id

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.audit.chain import Mac

_HMACS_KEPT = 16
_CHAINS_KEPT = 16
_KEPT_EVERY = 4096


class _Epochs:
    """The keys of one chain under one seed."""

    __slots__ = ("_epoch", "_kept", "_key")

    def __init__(self, first: bytes) -> None:
        self._kept = [first]
        self._epoch, self._key = 0, first

    def key(self, epoch: int) -> bytes:
        """Return k(epoch)."""
        if epoch < self._epoch:
            at = min(epoch // _KEPT_EVERY, len(self._kept) - 1)
            self._epoch, self._key = at * _KEPT_EVERY, self._kept[at]
        while self._epoch < epoch:
            self._key = next_key(self._key)
            self._epoch += 1
            if self._epoch == len(self._kept) * _KEPT_EVERY:
                self._kept.append(self._key)
        return self._key


class MacKeys:
    """Chain seeds by id; MAC states are derived as they are asked for."""

    def __init__(self, seeds: Mapping[str, bytes]) -> None:
        self._seeds = dict(seeds)
        self._hmacs: dict[tuple[str, str], Mac] = {}
        self._epochs: dict[tuple[str, str, str], _Epochs] = {}

    def hmac(self, key_id: str, origin: str) -> Mac | None:
        """Return the MAC under a record's key id, or None where no seed of ours is meant."""
        found = self._hmacs.get((key_id, origin))
        if found is not None:
            return found
        parsed = parse_key_id(key_id)
        if parsed is None or parsed[0] not in self._seeds:
            return None
        seed_id, alg, epoch = parsed
        epochs = self._epochs.get((seed_id, alg, origin))
        if epochs is None:
            if len(self._epochs) >= _CHAINS_KEPT:
                self._epochs.clear()
            epochs = _Epochs(chain_key(self._seeds[seed_id], alg, origin))
            self._epochs[seed_id, alg, origin] = epochs
        if len(self._hmacs) >= _HMACS_KEPT:
            self._hmacs.clear()
        self._hmacs[key_id, origin] = made = mac(alg, epochs.key(epoch))
        return made

    @property
    def used(self) -> bool:
        """Whether any record so far named one of these seeds."""
        return bool(self._hmacs)

    def seed(self, seed_id: str) -> bytes | None:
        """Return a seed."""
        return self._seeds.get(seed_id)
