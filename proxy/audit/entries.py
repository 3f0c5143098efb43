"""Token ids of a chain's records: what a record says of them, and what lies in the side file.

No disk; randomness for a fresh segment key is the operating system's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from proxy.audit import ids as token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.audit.ids import TokenIds
    from proxy.audit.items import Segment
    from proxy.audit.request import RequestText


class Entries:
    """How one chain keeps them."""

    __slots__ = ("_auditor_public", "_mode", "_origin")

    def __init__(self, origin: str, mode: TokenIds, auditor_public: bytes | None) -> None:
        self._origin = origin
        self._mode = mode
        self._auditor_public = auditor_public

    def with_ids(
        self, text: RequestText, ids: Sequence[int], segment: Segment, seq: int, root: bytes
    ) -> tuple[RequestText, bytes]:
        """Return a record's text with what it says of its ids, and what the side file is to hold.

        `root` is the chain's (`chain.ids_root`), for ids that are not sealed.
        """
        mode, count = self._mode, len(ids)
        if mode == "off":
            return text, b""
        try:
            packed = token_ids.pack(ids[: token_ids.IDS_LIMIT])
        except ValueError:
            return text.with_ids(count), b""
        root = b"" if mode == "sealed" else root  # its keys are drawn at random
        if segment.ids is None or segment.ids_root != root:
            self._open(segment, root)
        assert segment.ids is not None
        if mode == "sealed":
            commit, entry = segment.ids.seal(seq, packed)
            at = segment.ids_size or len(segment.ids_head)
            return text.with_ids(count, commit, at), (
                entry if segment.ids_size else segment.ids_head + entry
            )
        commit = token_ids.commitment(segment.ids.data_key(seq), packed)
        plain = ids[: token_ids.PLAIN_LIMIT] if mode == "plain" else None
        return text.with_ids(count, commit, ids=plain), b""

    def _open(self, segment: Segment, root: bytes) -> None:
        first = segment.file.first_seq
        if self._mode == "sealed":
            assert self._auditor_public is not None
            key = os.urandom(token_ids.KEY_BYTES)
            segment.ids_head = token_ids.make_head(
                self._auditor_public, self._origin, first, key, os.urandom(32)
            )
        else:
            key = token_ids.commit_key(root, first)
        segment.ids_root = root
        segment.ids = token_ids.SegmentIds(key)
