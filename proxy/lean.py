"""Loads msgspec without typing_extensions, of which this Python's own typing has what it takes.

Imported first of all by who starts a sidecar; where either is loaded already, nothing is left to
save.
"""

from __future__ import annotations

import sys

_NAME = "typing_extensions"

if _NAME not in sys.modules:
    sys.modules[_NAME] = None  # type: ignore[assignment] # as if it were not installed
    try:
        import msgspec  # noqa: F401
    finally:
        del sys.modules[_NAME]
