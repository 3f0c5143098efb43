"""Records as they are written: the newest chain's, and the next one's when it starts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from proxy.audit.layout import chain_dirs, open_regular, segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

POLL_S = 0.2


def follow(
    directory: Path, *, from_start: bool, pause: Callable[[float], None] = time.sleep
) -> Iterator[bytes]:
    """Yield stored lines as they come, for ever; raises OSError.

    `from_start`: the newest chain's earlier lines first.
    """
    places: dict[Path, int] = {}
    first_look = True
    while True:
        quiet = True
        chains = [directory] if segments(directory) else chain_dirs(directory)[-2:]
        for chain in chains:
            for _, path in segments(chain)[-2:]:
                if first_look and not from_start:
                    places[path] = path.stat().st_size
                for line in _new_lines(path, places):
                    quiet = False
                    yield line
        first_look = False
        if quiet:
            pause(POLL_S)


def _new_lines(path: Path, places: dict[Path, int]) -> Iterator[bytes]:
    with open_regular(path) as file:
        file.seek(places.get(path, 0))
        while (line := file.readline()).endswith(b"\n"):
            places[path] = file.tell()
            yield line
