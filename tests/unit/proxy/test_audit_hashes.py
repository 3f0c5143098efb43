"""Hashes, trace ids, records' builder."""

from __future__ import annotations

import hashlib
import hmac
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.audit import hashes
from proxy.audit.hashes import OutputHasher, params_hash, prompt_hash, whole_hash
from proxy.audit.record import KINDS, problem_with, usage_members
from proxy.audit.trace_id import TraceIds, machine_from_node

KEY = b"k" * 32


def _framed(*parts):
    return b"".join(struct.pack(">I", len(part)) + part for part in parts)


def test_prompt_hash_is_hmac_over_framed_parts():
    message = _framed(b'[{"a":1}]', b"m", b"0.5")
    want = hmac.new(KEY, message, "sha256").hexdigest()
    assert prompt_hash(KEY, b'[{"a":1}]', b"m", b"0.5") == want


def test_plain_mode_is_bare_sha256_over_the_same_bytes():
    assert (
        prompt_hash(None, b"p", b"m", b"") == hashlib.sha256(_framed(b"p", b"m", b"")).hexdigest()
    )


def test_moving_a_byte_between_parts_changes_the_hash():
    assert prompt_hash(KEY, b"ab", b"c", b"") != prompt_hash(KEY, b"a", b"bc", b"")
    assert params_hash(KEY, b"ab") != whole_hash(KEY, b"ab")


@given(st.lists(st.text(max_size=5), max_size=8))
def test_output_hash_does_not_depend_on_how_deltas_are_cut(deltas):
    hasher = OutputHasher(KEY)
    for delta in deltas:
        hasher.feed(0, delta)
    data = "".join(deltas).encode()
    assert hasher.finish() == (hmac.new(KEY, data, "sha256").hexdigest(), len(data))


def test_choices_are_joined_in_index_order_whatever_their_order_of_arrival():
    hasher = OutputHasher(KEY)
    for index, text in ((2, "c"), (0, "a"), (1, "b"), (0, "A"), (2, "C")):
        hasher.feed(index, text)
    data = b"aA\0b\0cC"
    assert hasher.finish() == (hmac.new(KEY, data, "sha256").hexdigest(), len(data))


def test_a_choice_without_text_still_has_its_place():
    hasher = OutputHasher(None)
    hasher.feed(2, "c")
    assert hasher.finish() == (hashlib.sha256(b"\0\0c").hexdigest(), 3)


def test_no_output_is_the_hash_of_nothing():
    assert OutputHasher(None).finish() == (hashlib.sha256(b"").hexdigest(), 0)


def test_lone_surrogates_hash_as_the_replacement_character():
    hasher = OutputHasher(None)
    hasher.feed(0, "a\ud800")
    assert hasher.finish()[0] == hashlib.sha256("a\ufffd".encode()).hexdigest()


@pytest.mark.parametrize("index", [-1, hashes.CHOICES, 10**9])
def test_an_impossible_choice_leaves_a_length_and_no_hash(index):
    hasher = OutputHasher(KEY)
    hasher.feed(index, "x")
    assert hasher.finish() == (None, 1)


def test_buffered_choices_are_bounded():
    hasher = OutputHasher(KEY)
    hasher.feed(1, "x" * hashes.BUFFER_BYTES)
    hasher.feed(2, "x")
    assert hasher.finish() == (None, hashes.BUFFER_BYTES + 1)


def test_trace_ids_have_their_form():
    assert TraceIds(42, start=7).next(1_767_225_600_123) == "1767225600123-00042-0007"


def test_trace_ids_are_unique_and_ordered_across_wraps_and_backward_steps():
    ids = TraceIds(1, start=9_990)
    times = [5_000_000_000_000] * 25_000 + [4_999_999_999_000] * 10 + [5_000_000_000_500]
    made = [ids.next(now) for now in times]
    assert made == sorted(made)
    assert len(set(made)) == len(made)


def test_a_wrap_within_a_millisecond_moves_the_millisecond_on():
    ids = TraceIds(1, start=9_999)
    assert ids.next(5) == "5-00001-9999"
    assert ids.next(5) == "6-00001-0000"
    assert ids.next(5) == "6-00001-0001"


@pytest.mark.parametrize(("machine", "start"), [(-1, 0), (100_000, 0), (0, -1), (0, 10_000)])
def test_trace_id_parts_out_of_range_are_refused(machine, start):
    with pytest.raises(ValueError, match="out of range"):
        TraceIds(machine, start)


def test_the_machine_of_a_node_is_stable_and_in_range():
    assert machine_from_node("node-a") == machine_from_node("node-a")
    assert machine_from_node("node-a") != machine_from_node("node-b")
    assert 0 <= machine_from_node("") < 100_000


def test_usage_keeps_zero_and_drops_what_is_no_count():
    usage = usage_members(prompt=3, completion=0, total="3", cached=None, reasoning=True)
    assert usage == {"prompt": 3, "completion": 0}
    assert usage_members(-1, 2**53, 1.0) == {}


def _record(kind):
    common = {
        "v": 1,
        "kind": kind,
        "seq": 0,
        "origin": "o",
        "wall_ns": "1",
        "mono_ns": "0",
        "prev": "0" * 64,
        "key_id": "s.s256.0",
    }
    examples = {
        "_is_int": 1,
        "_is_text": "x",
        "_is_map": {},
        "_is_list": [],
        "_is_hash": "a" * 64,
        "_is_decimal": "12",
    }
    own = {name: examples[check.__name__] for name, check in KINDS[kind].items()}
    if kind == "request":
        own |= {"outcome": "ok", "phase": "done"}
    return {**common, **own}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_demands_each_of_its_members_and_their_types(kind):
    whole = _record(kind)
    assert problem_with(whole) is None
    for name in whole:
        assert problem_with({k: v for k, v in whole.items() if k != name}) is not None
        assert problem_with({**whole, name: None}) is not None
    assert problem_with({**whole, "a_later_member": 1}) is None


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "unheard"},
        {"seq": -1},
        {"seq": True},
        {"wall_ns": "01"},
        {"wall_ns": "-1"},
        {"wall_ns": "1" * 21},
        {"mono_ns": ""},
        {"mono_ns": "\u0661"},
        {"prev": "A" * 64},
        {"prev": "0" * 63},
        {"outcome": "fine"},
        {"phase": "later"},
    ],
)
def test_members_with_bad_values_are_named(change):
    assert problem_with({**_record("request"), **change}) is not None
