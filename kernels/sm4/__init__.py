"""SM4-128-GCM in C (GB/T 32907, SP 800-38D): 12-byte nonces, 16-byte tags, one call a message.

A tier is one way to run the same function on one class of CPU; the best this CPU has is used. All
give the same bytes and none looks anything up by a secret. A text leaves `open` only after its tag
was compared. Messages longer than 64 KiB run without the GIL.

Without a compiler at install there is no extension: then `AVAILABLE` is false, `TIERS` is empty and
making a key raises RuntimeError; whoever has another SM4 uses that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ("AVAILABLE", "TIER", "TIERS", "Frames", "InvalidTag", "Sm4Gcm")

try:
    from kernels.sm4._sm4 import Frames, InvalidTag, Sm4Gcm, tiers
except ImportError:
    if not TYPE_CHECKING:

        class InvalidTag(ValueError):  # noqa: N818 - as in the extension
            """What was opened is not what was sealed."""

        class Frames:
            """Stands for the stream type of the extension that was not built."""

            def __init__(self, *_args: object) -> None:
                raise RuntimeError("kernels.sm4 was installed without its extension")

        class Sm4Gcm:
            """Stands for the key type of the extension that was not built."""

            def __init__(self, *_args: object, **_keywords: object) -> None:
                raise RuntimeError("kernels.sm4 was installed without its extension")

        def tiers() -> tuple[str, ...]:
            """Return that there are none."""
            return ()


TIERS: tuple[str, ...] = tiers()
"""Names of the tiers this CPU can use, best first; empty without the extension."""

AVAILABLE: bool = bool(TIERS)
"""Whether the extension was built and is used."""

TIER: str = TIERS[0] if TIERS else "none"
"""The tier in use unless a key asks for another one."""
