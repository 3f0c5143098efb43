"""The tree against RFC 6962's published values and a recursive oracle."""

from __future__ import annotations

import contextlib
import hashlib
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.audit.tree import (
    EMPTY_ROOT,
    ProofError,
    Range,
    WholeTree,
    check_consistency,
    consistency,
    from_frontier,
    inclusion,
    leaf_hash,
    root_from_inclusion,
)

# The leaves, roots and proofs that Certificate Transparency implementations test with.
LEAVES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
INCLUSION_5_OF_8 = [
    "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
]
CONSISTENCY_6_TO_8 = [
    "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
    "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
]


def mth(data):
    """RFC 6962, 2.1, word by word."""
    if not data:
        return hashlib.sha256(b"").digest()
    if len(data) == 1:
        return hashlib.sha256(b"\0" + data[0]).digest()
    k = 1
    while k * 2 < len(data):
        k *= 2
    return hashlib.sha256(b"\1" + mth(data[:k]) + mth(data[k:])).digest()


def path(m, data):
    if len(data) == 1:
        return []
    k = 1
    while k * 2 < len(data):
        k *= 2
    if m < k:
        return [*path(m, data[:k]), mth(data[k:])]
    return [*path(m - k, data[k:]), mth(data[:k])]


def subproof(m, data, whole):
    if m == len(data):
        return [] if whole else [mth(data)]
    k = 1
    while k * 2 < len(data):
        k *= 2
    if m <= k:
        return [*subproof(m, data[:k], whole), mth(data[k:])]
    return [*subproof(m - k, data[k:], False), mth(data[:k])]


def span(data, begin, end):
    made = Range(begin)
    made.extend(map(leaf_hash, data[begin:end]))
    assert made.end == end
    return made


def test_the_published_roots():
    assert span(LEAVES, 0, 0).root() == EMPTY_ROOT == mth([])
    for size, root in enumerate(ROOTS, 1):
        assert span(LEAVES, 0, size).root().hex() == root == mth(LEAVES[:size]).hex()


def test_the_published_proofs():
    found = inclusion(span(LEAVES, 0, 5), span(LEAVES, 6, 8))
    assert [node.hex() for node in found] == INCLUSION_5_OF_8
    found = consistency(span(LEAVES, 0, 6), span(LEAVES, 6, 8))
    assert [node.hex() for node in found] == CONSISTENCY_6_TO_8


DATA = [bytes([n]) for n in range(80)]


def test_every_proof_of_small_trees_is_the_oracles_and_holds():
    for size in range(1, 34):
        data, root = DATA[:size], mth(DATA[:size])
        for index in range(size):
            found = inclusion(span(data, 0, index), span(data, index + 1, size))
            assert found == path(index, data)
            assert root_from_inclusion(leaf_hash(data[index]), index, size, found) == root
            assert WholeTree(list(map(leaf_hash, DATA))).path(index, size) == found
        for old in range(size + 1):
            proof = consistency(span(data, 0, old), span(data, old, size))
            assert proof == ([] if old == 0 else subproof(old, data, True))
            check_consistency(old, mth(data[:old]), size, root, proof)


@given(cuts=st.lists(st.integers(0, 80), max_size=6), size=st.integers(0, 80))
def test_ranges_join_to_the_same_root_however_they_were_cut(cuts, size):
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    whole = Range()
    for begin, end in itertools.pairwise(edges):
        whole.join(span(DATA, begin, end))
    assert (whole.root(), whole.end) == (mth(DATA[:size]), size)
    again = from_frontier(size, whole.hashes)
    assert (again.root(), again.sizes) == (whole.root(), whole.sizes)


@given(
    size=st.integers(2, 80),
    at=st.integers(0, 1000),
    kind=st.sampled_from(["flip", "drop", "add", "other index", "other size"]),
    bit=st.integers(0, 255),
)
def test_a_changed_inclusion_proof_leads_nowhere(size, at, kind, bit):
    index = at % size
    proof = path(index, DATA[:size])
    root, leaf = mth(DATA[:size]), leaf_hash(DATA[index])
    proof, index, size = _changed(proof, index, size, kind, bit)
    with contextlib.suppress(ProofError):
        assert root_from_inclusion(leaf, index, size, proof) != root


def _changed(proof, first, second, kind, bit):
    proof = list(proof)
    if kind == "flip":
        node = bytearray(proof[bit % len(proof)])
        node[bit // 8] ^= 1 << bit % 8
        proof[bit % len(proof)] = bytes(node)
    elif kind == "drop":
        del proof[bit % len(proof)]
    elif kind == "add":
        proof.insert(bit % (len(proof) + 1), bytes([bit]) * 32)
    elif kind == "other index":
        first = first - 1 if first else first + 1
    else:
        # A size whose path has another length; others may share the very same nodes.
        second = second * 2 + 1
    return proof, first, second


@given(
    size=st.integers(2, 80),
    at=st.integers(0, 1000),
    kind=st.sampled_from(["flip", "drop", "add"]),
    bit=st.integers(0, 255),
)
def test_a_changed_consistency_proof_is_refused(size, at, kind, bit):
    old = 1 + at % (size - 1)
    proof = subproof(old, DATA[:size], True)
    changed, _, _ = _changed(proof, old, size, kind, bit)
    with pytest.raises(ProofError):
        check_consistency(old, mth(DATA[:old]), size, mth(DATA[:size]), changed)


@pytest.mark.parametrize(("old", "size"), [(5, 4), (-1, 4), (4, 4), (0, 4)])
def test_shrinking_forks_and_proofs_of_nothing_are_refused(old, size):
    with pytest.raises(ProofError):
        check_consistency(old, b"x" * 32, size, mth(DATA[:size]), [])


def test_another_history_of_the_same_size_is_refused():
    forked = [*DATA[:3], b"other", *DATA[4:9]]
    for old in range(1, 9):
        proof = subproof(old, forked, True)
        if old > 3:
            with pytest.raises(ProofError):
                check_consistency(old, mth(DATA[:old]), 9, mth(forked), proof)


@pytest.mark.parametrize("index", [-1, 4, 9])
def test_an_index_outside_the_tree_has_no_path(index):
    with pytest.raises(ProofError):
        root_from_inclusion(b"x" * 32, index, 4, [b"x" * 32] * 2)


@pytest.mark.parametrize(("size", "hashes"), [(3, [b"x" * 32]), (1, [b"x"]), (-1, [])])
def test_what_is_no_frontier_is_refused(size, hashes):
    with pytest.raises(ProofError):
        from_frontier(size, hashes)
