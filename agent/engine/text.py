"""From token bytes to text that may be sent: whole characters, no stop string. Pure.

Held back are the bytes of an unfinished character and the longest tail that a stop string could
still start with, so at most one stop string's length is ever pending.
"""

from __future__ import annotations

import codecs


class TextStream:
    """The text of one generation. Feed it token bytes until `stopped`, then `finish`."""

    __slots__ = ("_decoder", "_pending", "_stops", "stopped")

    def __init__(self, stops: tuple[str, ...]) -> None:
        # Bytes that can never become UTF-8 turn into U+FFFD; an unfinished tail is dropped by
        # `finish`, since the model may have been cut off inside a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._stops = stops
        self.stopped = False

    def push(self, piece: bytes) -> str:
        """Return the text that is certain after `piece`; sets `stopped` at a stop string."""
        assert not self.stopped
        self._pending += self._decoder.decode(piece)
        found = [at for at in (self._pending.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            text, self._pending = self._pending[: min(found)], ""
            return text
        cut = len(self._pending) - self._held()
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def finish(self) -> str:
        """Return what was held back for a stop string that never came."""
        text, self._pending = self._pending, ""
        return text

    def _held(self) -> int:
        """Return the length of the longest tail that is the start of a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._pending)), longest, -1):
                if self._pending.endswith(stop[:length]):
                    longest = length
                    break
        return longest
