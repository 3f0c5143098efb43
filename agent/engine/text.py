"""From token bytes to text that may be sent: whole characters, no stop string. Pure.

Held back are the bytes of an unfinished character and the longest tail that a stop string could
still start with, so at most one stop string's length is ever pending. Each character is looked at
once for each stop string (Knuth, Morris and Pratt), whatever the strings are.
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
        self._stops = [_Matcher(stop) for stop in stops]
        self.stopped = False

    def push(self, piece: bytes) -> str:
        """Return the text that is certain after `piece`; sets `stopped` at a stop string."""
        assert not self.stopped
        text = self._decoder.decode(piece)
        if not self._stops:
            return text
        before = len(self._pending)
        self._pending += text
        starts = [before + at for stop in self._stops if (at := stop.feed(text)) is not None]
        if starts:
            self.stopped = True
            text, self._pending = self._pending[: min(starts)], ""
            return text
        cut = len(self._pending) - max(stop.matched for stop in self._stops)
        text, self._pending = self._pending[:cut], self._pending[cut:]
        return text

    def finish(self) -> str:
        """Return what was held back for a stop string that never came."""
        text, self._pending = self._pending, ""
        return text


class _Matcher:
    """Finds one string in a text that comes in pieces; `matched`: how much of it is at the end."""

    __slots__ = ("_borders", "_string", "matched")

    def __init__(self, string: str) -> None:
        self._string = string
        self.matched = 0
        # borders[n]: the longest proper prefix of string[:n] that is its suffix too.
        borders = [0, 0]
        length = 0
        for char in string[1:]:
            while length and char != string[length]:
                length = borders[length]
            length += char == string[length]
            borders.append(length)
        self._borders = borders

    def feed(self, text: str) -> int | None:
        """Return where in `text` the first match starts (negative: before it); None: no match."""
        string, borders, matched = self._string, self._borders, self.matched
        for at, char in enumerate(text, 1):
            while matched and char != string[matched]:
                matched = borders[matched]
            matched += char == string[matched]
            if matched == len(string):
                return at - matched
        self.matched = matched
        return None
