"""The Merkle tree over a chain's lines: RFC 6962, section 2.1, always SHA-256.

Pure. A `Range` is what is kept of the leaves [begin, end): the roots of its largest aligned
subtrees, about 2 log2(n) hashes however many leaves there are. Two neighbours join into one, and
two that meet at the right place hold all that a proof needs:

    root          [0, n)
    inclusion     [0, i) and [i + 1, n)    the path of leaf i in the tree of size n
    consistency   [0, m) and [m, n)        from the tree of size m to that of size n

So writer, prover and verifier stream: none of them ever holds a level of the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels import wire
from proxy.audit.chain import sha256

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

HASH_BYTES = 32
EMPTY_ROOT = sha256()
# No proof of a tree below 2^64 leaves has more nodes; a longer one is refused unread.
PROOF_NODES_MAX = 128


class ProofError(ValueError):
    """A proof does not lead to the root, or is not of its form."""


def leaf_hash(line: bytes) -> bytes:
    """Return the hash of a stored line, its newline left out."""
    return sha256(b"\0", line)


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of an inner node."""
    return sha256(b"\1", left, right)


def _grow_pure(
    begin: int, end: int, sizes: list[int], hashes: list[bytes], data: bytes, lines: int
) -> int:
    made = Range(begin)
    made.end, made.sizes, made.hashes = end, sizes, hashes
    if lines:
        made.extend([leaf_hash(line) for line in data.removesuffix(b"\n").split(b"\n")])
    else:
        made.extend([data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES)])
    return made.end


_grow = wire.trees(_grow_pure)


class Range:
    """The leaves [begin, end), as the roots of aligned subtrees from left to right."""

    __slots__ = ("begin", "end", "hashes", "sizes")

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        self.end = begin
        self.sizes: list[int] = []
        self.hashes: list[bytes] = []

    def extend(self, leaves: Iterable[bytes]) -> None:
        """Append leaf hashes."""
        sizes, hashes, end, begin = self.sizes, self.hashes, self.end, self.begin
        for leaf in leaves:
            size, node = 1, leaf
            # The subtree on the left is whole and its sibling: together they are one.
            while end & size and end - size >= begin:
                sizes.pop()
                node = sha256(b"\1", hashes.pop(), node)
                end -= size
                size += size
            sizes.append(size)
            hashes.append(node)
            end += size
        self.end = end

    def extend_packed(self, leaves: bytes) -> None:
        """Append leaf hashes that stand one behind another."""
        self.end = _grow(self.begin, self.end, self.sizes, self.hashes, leaves, 0)

    def extend_lines(self, lines: bytes) -> None:
        """Append the leaves of whole stored lines, each with its newline; at least one."""
        self.end = _grow(self.begin, self.end, self.sizes, self.hashes, lines, 1)

    def _add(self, size: int, node: bytes) -> None:
        start = self.end
        self.end += size
        while start & size and start - size >= self.begin and self.sizes[-1] == size:
            self.sizes.pop()
            node = node_hash(self.hashes.pop(), node)
            start -= size
            size += size
        self.sizes.append(size)
        self.hashes.append(node)

    def join(self, after: Range) -> None:
        """Take over the leaves of the range that begins where this one ends."""
        assert after.begin == self.end
        for size, node in zip(after.sizes, after.hashes, strict=True):
            self._add(size, node)

    def copy(self) -> Range:
        """Return a range of its own."""
        other = Range(self.begin)
        other.end, other.sizes, other.hashes = self.end, self.sizes[:], self.hashes[:]
        return other

    def root(self) -> bytes:
        """Return the root of [0, end); the range must begin at 0."""
        assert self.begin == 0
        if not self.hashes:
            return EMPTY_ROOT
        node = self.hashes[-1]
        for left in reversed(self.hashes[:-1]):
            node = node_hash(left, node)
        return node

    def nodes(self) -> dict[tuple[int, int], bytes]:
        """Return subtree roots by (first leaf, size)."""
        start, found = self.begin, {}
        for size, node in zip(self.sizes, self.hashes, strict=True):
            found[start, size] = node
            start += size
        return found


def from_frontier(size: int, hashes: Sequence[bytes]) -> Range:
    """Return the range [0, size) of its subtree roots; raises `ProofError`."""
    if size < 0 or len(hashes) != size.bit_count() or any(len(h) != HASH_BYTES for h in hashes):
        raise ProofError("not the frontier of a tree of this size")
    made = Range()
    made.end, made.hashes = size, list(hashes)
    made.sizes = [1 << bit for bit in range(size.bit_length() - 1, -1, -1) if size >> bit & 1]
    return made


def _split(size: int) -> int:
    """Return the largest power of two below `size` (RFC 6962, 2.1: k)."""
    return 1 << (size - 1).bit_length() - 1


def _subroot(nodes: dict[tuple[int, int], bytes], first: int, size: int) -> bytes:
    found = nodes.get((first, size))
    if found is not None:
        return found
    assert size > 1
    left = _split(size)
    return node_hash(_subroot(nodes, first, left), _subroot(nodes, first + left, size - left))


def inclusion(before: Range, after: Range) -> list[bytes]:
    """Return the path of leaf i from [0, i) and [i + 1, n) (RFC 6962, 2.1.1)."""
    index, size = before.end, after.end
    assert before.begin == 0
    assert after.begin == index + 1
    nodes = before.nodes() | after.nodes()
    path, first = [], 0
    while size > 1:
        left = _split(size)
        if index - first < left:
            path.append(_subroot(nodes, first + left, size - left))
            size = left
        else:
            path.append(_subroot(nodes, first, left))
            first, size = first + left, size - left
    return path[::-1]


def consistency(before: Range, after: Range) -> list[bytes]:
    """Return the proof from size m to n of [0, m) and [m, n) (RFC 6962, 2.1.2); m = 0: empty."""
    old, size = before.end, after.end
    assert before.begin == 0
    assert after.begin == old
    if old in (0, size):
        return []
    nodes = before.nodes() | after.nodes()
    path, first, whole = [], 0, True
    while old - first != size:
        left = _split(size)
        if old - first <= left:
            path.append(_subroot(nodes, first + left, size - left))
            size = left
        else:
            path.append(_subroot(nodes, first, left))
            first, size, whole = first + left, size - left, False
    if not whole:
        path.append(_subroot(nodes, first, size))
    return path[::-1]


class WholeTree:
    """All subtree roots of a list of leaves: for many proofs; 64 bytes and more a leaf."""

    __slots__ = ("_levels",)

    def __init__(self, leaves: list[bytes]) -> None:
        self._levels = [leaves]
        while len(self._levels[-1]) > 1:
            row = self._levels[-1]
            pairs = zip(row[::2], row[1::2], strict=False)
            self._levels.append([node_hash(left, right) for left, right in pairs])

    def root(self, first: int, size: int) -> bytes:
        """Return the root of the leaves [first, first + size), where RFC 6962 has a node."""
        if size & (size - 1) == 0:
            level = size.bit_length() - 1
            return self._levels[level][first >> level]
        left = _split(size)
        return node_hash(self.root(first, left), self.root(first + left, size - left))

    def path(self, index: int, size: int) -> list[bytes]:
        """Return the inclusion path of a leaf in the tree of the first `size` leaves."""
        path, first = [], 0
        while size > 1:
            left = _split(size)
            if index - first < left:
                path.append(self.root(first + left, size - left))
                size = left
            else:
                path.append(self.root(first, left))
                first, size = first + left, size - left
        return path[::-1]


def root_from_inclusion(leaf: bytes, index: int, size: int, path: Sequence[bytes]) -> bytes:
    """Return the root that a path leads to; raises `ProofError` (RFC 9162, 2.1.3.2)."""
    if not 0 <= index < size:
        raise ProofError("the index is not inside the tree")
    position, last, node = index, size - 1, leaf
    for sibling in path:
        if last == 0:
            raise ProofError("the path is too long")
        if position & 1 or position == last:
            node = node_hash(sibling, node)
            while not position & 1 and position:
                position >>= 1
                last >>= 1
        else:
            node = node_hash(node, sibling)
        position >>= 1
        last >>= 1
    if last:
        raise ProofError("the path is too short")
    return node


def check_consistency(
    old_size: int, old_root: bytes, size: int, root: bytes, proof: Sequence[bytes]
) -> None:
    """Raise `ProofError` unless the new tree continues the old one (RFC 9162, 2.1.4.2)."""
    if not 0 <= old_size <= size:
        raise ProofError("the tree shrank")
    if old_size in (0, size):
        if proof or (old_size == size and old_root != root):
            raise ProofError("the roots differ, or the proof is not empty")
        if old_size == 0 and old_root != EMPTY_ROOT:
            raise ProofError("the root of no leaves is another one")
        return
    nodes = list(proof)
    if old_size & (old_size - 1) == 0:
        nodes.insert(0, old_root)
    position, last = old_size - 1, size - 1
    while position & 1:
        position >>= 1
        last >>= 1
    if not nodes:
        raise ProofError("the proof is empty")
    old = new = nodes[0]
    for node in nodes[1:]:
        if last == 0:
            raise ProofError("the proof is too long")
        if position & 1 or position == last:
            old, new = node_hash(node, old), node_hash(node, new)
            while not position & 1 and position:
                position >>= 1
                last >>= 1
        else:
            new = node_hash(new, node)
        position >>= 1
        last >>= 1
    if last or old != old_root or new != root:
        raise ProofError("the new tree does not continue the old one")
