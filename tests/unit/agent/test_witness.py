"""What a witness cosigns and what it refuses; what of that a crash or a damaged disk leaves."""

from __future__ import annotations

import base64
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.witness import RefusedError, judge, parse_offered, parse_submission
from agent.witness_store import CLOSED_KEPT_S, WitnessError, WitnessStore
from proxy.audit.note import ED25519, Checkpoint, Keyset, parse_key, parse_note, write_note
from proxy.audit.signing import NoteSigner
from proxy.audit.tree import Range, consistency, leaf_hash

LOG = NoteSigner("log", ED25519, b"\1" * 32)
SECOND = NoteSigner("second", ED25519, b"\2" * 32)
STRANGER = NoteSigner("stranger", ED25519, b"\3" * 32)
KEYS = (LOG.key,)


def leaves(count, fork_at=None):
    data = [b"record %d" % n for n in range(count)]
    if fork_at is not None:
        data[fork_at:] = [b"other %d" % n for n in range(fork_at, count)]
    return [leaf_hash(line) for line in data]


def submission(old, size, *, fork_at=None, signers=(LOG,), origin="o", proof=None):
    """The body a log sends to move the witness from `old` to `size`."""
    all_leaves = leaves(max(old, size), fork_at)
    before, after = Range(), Range(old)
    before.extend(all_leaves[:old])
    after.extend(all_leaves[old:size])
    if proof is None:
        proof = consistency(before, after) if size >= old else []
    whole = Range()
    whole.extend(all_leaves[:size])
    text = Checkpoint(origin, size, whole.root()).text()
    note = write_note(text, [signer.sign(text) for signer in signers])
    rows = "".join(f"{base64.b64encode(node).decode()}\n" for node in proof)
    return f"old {old}\n{rows}\n{note}"


def take(head, body, offered=(), **changes):
    values = {"closed": False, "now_s": 7, **changes}
    return judge(head, parse_submission(body), offered, **values)


def refused(head, body, offered=(), **changes):
    with pytest.raises(RefusedError) as caught:
        take(head, body, offered, **changes)
    return caught.value


@pytest.fixture
def head():
    return take(None, submission(0, 5), KEYS)


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=8).map(sorted))
def test_a_log_that_only_grows_is_cosigned_at_every_step(sizes):
    head, old = None, 0
    for size in sizes:
        head = take(head, submission(old, size), KEYS if head is None else ())
        assert (head.size, head.seen_s) == (size, 7)
        old = size


def test_the_same_head_again_is_cosigned_again(head):
    assert take(head, submission(5, 5)) == head


@given(fork=st.integers(0, 29), old=st.integers(1, 30), more=st.integers(1, 20))
def test_a_fork_before_the_head_is_never_cosigned(fork, old, more):
    head = take(None, submission(0, old), KEYS)
    if fork >= old:
        fork = old - 1
    found = refused(head, submission(old, old + more, fork_at=fork))
    assert (found.status, found.fork) == (422, True)


def test_two_heads_of_one_size_are_a_fork(head):
    found = refused(head, submission(5, 5, fork_at=2))
    assert (found.status, found.size, found.fork) == (409, 5, True)


@pytest.mark.parametrize("old", [0, 3, 6])
def test_another_old_size_is_answered_with_the_one_that_is_known(head, old):
    found = refused(head, submission(old, 9))
    assert (found.status, found.size, found.fork) == (409, 5, False)


def test_shrinking_is_refused(head):
    assert refused(head, submission(5, 4)).status == 400
    assert refused(head, submission(4, 4)).status == 409


@pytest.mark.parametrize("proof", [[], [b"x" * 32], [b"x" * 32] * 9])
def test_no_proof_no_signature(head, proof):
    assert refused(head, submission(5, 9, proof=proof)).status == 422


def test_every_key_of_the_first_submission_must_sign():
    both = (LOG.key, SECOND.key)
    head = take(None, submission(0, 5, signers=(LOG, SECOND)), both)
    assert refused(head, submission(5, 6)).status == 403
    assert refused(head, submission(5, 6, signers=(SECOND,)), KEYS).status == 403
    assert take(head, submission(5, 6, signers=(LOG, SECOND, STRANGER))).size == 6


def test_a_stranger_cannot_take_over_an_origin(head):
    body = submission(5, 6, signers=(STRANGER,))
    assert refused(head, body, (STRANGER.key,)).status == 403
    assert refused(None, submission(0, 5), (STRANGER.key,)).status == 403
    assert refused(None, submission(0, 5)).status == 404
    assert refused(None, submission(0, 5), KEYS, room=False).status == 507


def test_a_new_origin_begins_at_nothing():
    assert refused(None, submission(3, 5), KEYS).status == 409


def test_a_closed_log_does_not_grow(head):
    closed = take(head, submission(5, 6), closed=True)
    assert "closed" in closed.line()
    found = refused(closed, submission(6, 7))
    assert (found.status, found.fork) == (422, True)
    assert take(closed, submission(6, 6), closed=True).closed


@pytest.mark.parametrize(
    "body",
    [
        "",
        "old 0",
        "old 0\n",
        submission(0, 5).replace("old 0", "old -1"),
        submission(0, 5).replace("old 0", "old 00"),
        submission(0, 5).replace("old 0", "0"),
        submission(0, 5).replace("old 0\n", "old 0\nnot base64\n"),
        submission(0, 5).replace("old 0\n", "old 0\nAAAA\n"),
        submission(0, 5, proof=[b"x" * 32] * 200),
        submission(0, 5).replace("\u2014", "-"),
        submission(0, 5).replace("\n5\n", "\nfive\n"),
        submission(0, 5, origin="x" * 2000),
    ],
)
def test_what_is_no_submission_is_refused(body):
    assert refused(None, body, KEYS).status == 400


@pytest.mark.parametrize("text", ["nonsense", ", ".join([LOG.key.line()] * 5)])
def test_what_are_no_keys_of_a_log_is_refused(text):
    with pytest.raises(RefusedError):
        parse_offered(text)
    assert parse_offered(LOG.key.line()) == KEYS
    assert parse_offered("") == ()


# The store.


def test_a_head_is_there_after_a_restart(tmp_path, head):
    store = WitnessStore(tmp_path)
    store.keep(head)
    again = WitnessStore(tmp_path)
    assert again.heads == {"o": head}
    assert again.cosigner.key == store.cosigner.key
    cosigned = store.cosigner.sign("a\n", 5)
    assert again.cosigner.key.signs("a\n", cosigned)
    assert (tmp_path / "witness.key").stat().st_mode & 0o777 == 0o600


def test_a_head_that_could_not_be_kept_is_not_known(tmp_path, head, monkeypatch):
    store = WitnessStore(tmp_path)
    store.keep(head)
    grown = take(head, submission(5, 9))

    def failing(_fd):
        raise OSError(5, "I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="I/O"):
            store.keep(grown)
    assert store.heads["o"] == head
    assert WitnessStore(tmp_path).heads["o"] == head


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"origin":"o"', b"\xff\xfe"])
def test_a_damaged_head_stops_the_start(tmp_path, head, damage):
    WitnessStore(tmp_path).keep(head)
    (path,) = tmp_path.glob("*.head")
    path.write_bytes(damage)
    with pytest.raises(WitnessError, match="damaged"):
        WitnessStore(tmp_path)


@pytest.mark.parametrize("text", ["", "name", "name 00", "na me " + "00" * 32, "n " + "zz" * 32])
def test_a_damaged_key_stops_the_start(tmp_path, text):
    WitnessStore(tmp_path)
    (tmp_path / "witness.key").write_text(text)
    with pytest.raises(WitnessError, match="no key"):
        WitnessStore(tmp_path)


def test_a_key_that_others_can_read_is_refused(tmp_path):
    WitnessStore(tmp_path)
    (tmp_path / "witness.key").chmod(0o644)
    with pytest.raises(WitnessError, match="chmod 600"):
        WitnessStore(tmp_path)


def test_only_logs_that_closed_long_ago_are_forgotten(tmp_path, head):
    store = WitnessStore(tmp_path)
    store.keep(take(head, submission(5, 5), closed=True))
    store.keep(take(None, submission(0, 5, origin="open"), KEYS))
    assert store.forget(7 + CLOSED_KEPT_S) == 0
    assert store.forget(8 + CLOSED_KEPT_S) == 1
    assert set(WitnessStore(tmp_path).heads) == {"open"}


def test_the_list_is_a_note_of_the_witness(tmp_path, head):
    store = WitnessStore(tmp_path)
    text = head.line()
    note = parse_note(write_note(text, [store.list_signer.sign(text)]))
    assert Keyset([store.list_signer.key]).signers(note)
    assert parse_key(store.cosigner.key.line()).public == store.list_signer.key.public
