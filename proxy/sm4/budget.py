"""How much may be held of what nobody has verified yet, and of what waits to be sealed."""

from __future__ import annotations

PEER_SHARE = 8


class Budget:
    """Unverified bytes over all peers, at most an eighth of them for one peer's address."""

    __slots__ = ("_held", "_limit", "_peers", "refusals")

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._held = 0
        self._peers: dict[str, int] = {}
        self.refusals = 0

    @property
    def held_bytes(self) -> int:
        """Bytes taken and not given back."""
        return self._held

    @property
    def share_bytes(self) -> int:
        """The most that one peer may hold."""
        return self._limit // PEER_SHARE

    def take(self, peer: str, size: int) -> bool:
        """Take `size` bytes for `peer`; False (nothing taken) when a limit would be passed."""
        held = self._peers.get(peer, 0)
        if self._held + size > self._limit or held + size > self._limit // PEER_SHARE:
            self.refusals += 1
            return False
        self._held += size
        self._peers[peer] = held + size
        return True

    def give_back(self, peer: str, size: int) -> None:
        """Give back bytes that were taken."""
        held = self._peers.get(peer, 0) - size
        assert held >= 0
        self._held -= size
        if held:
            self._peers[peer] = held
        else:
            self._peers.pop(peer, None)


class Held:
    """Bytes that all requests together hold, up to a limit."""

    __slots__ = ("held_bytes", "limit_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, size: int) -> bool:
        """Take `size` bytes; False (nothing taken) when the limit would be passed."""
        if self.held_bytes + size > self.limit_bytes:
            return False
        self.held_bytes += size
        return True

    def give_back(self, size: int) -> None:
        """Give back bytes that were taken."""
        self.held_bytes -= size
        assert self.held_bytes >= 0
