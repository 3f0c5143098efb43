"""How the CPU's worker threads wait for each other.

A step that goes layer by layer is some 300 short parallel regions. GNU OpenMP lets a waiting thread
spin for milliseconds, which is right on an idle machine. With another busy process on two cores the
spinning thread keeps its own peer from running: a step of 25 ms was measured at 300 to 1,300 ms.
This spin is as long as the gaps between the regions, some 90 us: an idle machine loses nothing, a
busy one little (docs/engine.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import MutableMapping

# Turns of GNU OpenMP's waiting loop before a thread sleeps; its own default is 300,000.
SPIN_COUNT: Final = 6_000


def shorten_spin(environ: MutableMapping[str, str]) -> None:
    """Set GOMP_SPINCOUNT unless the operator has chosen; call before torch is first imported."""
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
