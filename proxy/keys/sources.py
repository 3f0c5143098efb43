"""Which provider the settings name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.config_keys import Keys
    from proxy.keys.provider import KeyProvider


def open_provider(row: Keys) -> KeyProvider | None:
    """Return the provider of `keys.*`, or None where no keys are named.

    Asks for nothing yet. Raises `KeySourceError` where the provider itself cannot be had.
    """
    if row.provider == "directory":
        from proxy.keys.directory import DirectoryProvider  # noqa: PLC0415 - only with keys

        return DirectoryProvider(Path(row.directory))
    if row.provider == "http":
        from proxy.keys.service import HttpProvider  # noqa: PLC0415 - only with keys

        return HttpProvider(row)
    if not row.file:
        return None
    if row.provider == "pkcs11":
        from proxy.keys.token import TokenProvider  # noqa: PLC0415 - an extra's package

        return TokenProvider(row)
    from proxy.keys.local import FileProvider  # noqa: PLC0415 - only with keys

    return FileProvider(Path(row.file))
