"""Which KV block belongs to whom: a pure allocator with a content-addressed prefix cache.

A block holds the keys and values of `block_size` tokens in every layer. Full blocks may be
*published* under a digest that chains over all tokens before them, so equal digests mean equal
content at equal positions. A block is in exactly one state:

    free      in no table, no digest         -> taken first
    cached    in no table, has a digest      -> taken when nothing is free, oldest use first
    held      in one or more tables (count)  -> never taken

Invariants: free + cached + held = total; a digest names at most one block; block contents are
never touched here.
"""

from __future__ import annotations

import hashlib
import heapq
import struct
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of a full block: SHA-256 over its parent's digest and its tokens."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


def tenant_root(root: bytes, tenant: str) -> bytes:
    """Return the parent digest of a tenant's first blocks; "" has the pool's own.

    Prefixes are shared within a tenant only: how soon a first token comes would tell one tenant
    what another has asked.
    """
    if not tenant:
        return root
    return hashlib.sha256(root + b"tenant\0" + tenant.encode()).digest()


class BlockPool:
    """`total` blocks of `block_size` tokens; `root` is the parent digest of every first block.

    `caching=False` keeps nothing after release.
    """

    def __init__(self, total: int, block_size: int, root: bytes, *, caching: bool = True) -> None:
        if total < 1 or block_size < 1:
            raise ValueError("a pool has at least one block of at least one token")
        self.total = total
        self.block_size = block_size
        self.root = root
        self._caching = caching
        # Lowest index first keeps the touched part of the pool, and so the resident memory, small.
        self._free = list(range(total))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._held: dict[int, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # Blocks below this were taken at some time; the pages of the others do not exist yet.
        self.touched = 0

    @property
    def available(self) -> int:
        """Blocks that `take` could give."""
        return len(self._free) + len(self._cached)

    @property
    def held(self) -> int:
        """Blocks in at least one table."""
        return len(self._held)

    @property
    def cached(self) -> int:
        """Blocks in no table that still hold a published prefix."""
        return len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def take(self, count: int) -> list[int] | None:
        """Return `count` blocks, held once, or None and change nothing if there are too few."""
        if count > self.available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = heapq.heappop(self._free)
                self.touched = max(self.touched, block + 1)
            else:
                block, _ = self._cached.popitem(last=False)
                del self._block_of[self._digest_of.pop(block)]
            self._held[block] = 1
            taken.append(block)
        return taken

    def match(self, token_ids: Sequence[int], root: bytes = b"") -> tuple[list[int], list[bytes]]:
        """Return the published blocks that hold the longest prefix of `token_ids`, with digests.

        `root`: parent digest of the first block where it is not the pool's.
        At most all but the last token are matched: the last one must be computed, since its logits
        are wanted. Nothing is held by this; call `hold` before anything else.
        """
        blocks: list[int] = []
        digests: list[bytes] = []
        parent = root or self.root
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            parent = chain_digest(parent, token_ids[start : start + self.block_size])
            block = self._block_of.get(parent)
            if block is None:
                break
            blocks.append(block)
            digests.append(parent)
        return blocks, digests

    def idle_among(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` count as available now and would not once held."""
        return sum(1 for block in blocks if block in self._cached)

    def freed_by(self, tables: Iterable[Sequence[int]], kept: Iterable[int]) -> int:
        """Return how many blocks would be available if `tables` were released but for `kept`."""
        holders = Counter(block for table in tables for block in table)
        for block in kept:
            holders.pop(block, None)
        return sum(1 for block, count in holders.items() if self._held[block] == count)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add one holder to each of `blocks`, which `match` has just returned."""
        for block in blocks:
            if block in self._cached:
                del self._cached[block]
                self._held[block] = 1
            else:
                self._held[block] += 1

    def publish(self, block: int, digest: bytes) -> None:
        """Name a full, computed, held block; a second block of the same digest stays unnamed."""
        assert block in self._held
        if self._caching and digest not in self._block_of and block not in self._digest_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one holder from each block of a table, in table order.

        The last blocks of a table go first when memory is short: a prefix is worth more than what
        follows it.
        """
        for block in reversed(blocks):
            count = self._held[block] - 1
            if count:
                self._held[block] = count
                continue
            del self._held[block]
            if block in self._digest_of:
                self._cached[block] = None
            else:
                heapq.heappush(self._free, block)
