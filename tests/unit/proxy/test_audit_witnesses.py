"""Several witnesses of one chain: each goes its own way, and one record carries what they said."""

from __future__ import annotations

import random

import pytest

from proxy.audit.checkpoint import Answer, Carried, Checkpointer, cosigned_note
from proxy.audit.disk import Part
from proxy.audit.note import (
    ED25519,
    Checkpoint,
    Keyset,
    NoteError,
    parse_checkpoint,
    parse_note,
    write_note,
)
from proxy.audit.signed import Expected
from proxy.audit.signing import Cosigner, NoteSigner
from proxy.audit.tree import EMPTY_ROOT, check_consistency
from tests.unit.proxy.audit_chains import KEYS, run, verify
from tests.unit.proxy.test_audit_checkpoints import Obliging, checkpoints, many, start

SIGNER = NoteSigner("log", ED25519, b"\1" * 32)
NEAR, PEER = Cosigner("near", b"\5" * 32), Cosigner("peer", b"\6" * 32)


class Cosigning:
    """A witness in this process that checks each proof; it answers when the test lets it."""

    closing, trouble, name = False, "", "w"
    cosigned = failures = 0

    def __init__(self, key):
        self.key, self.size, self.root = key, 0, EMPTY_ROOT
        self.asked, self.answer, self.stopped, self.waited_s = None, None, False, []

    def submit(self, submission):
        assert self.asked is None, "one submission at a time"
        self.asked = submission

    def decide(self):
        if self.asked is None:
            return
        asked, self.asked = self.asked, None
        note = parse_note(asked.note)
        stated = parse_checkpoint(note.text)
        assert asked.old_size == self.size
        check_consistency(self.size, self.root, stated.size, stated.root, asked.proof)
        self.size, self.root = stated.size, stated.root
        line = self.key.sign(note.text, 1)
        cosigned = write_note(note.text, (*note.signatures, line))
        self.answer = Answer(stated.size, stated.size, cosigned)

    def forget(self):
        self.size, self.root = 0, EMPTY_ROOT
        if self.asked is not None:
            self.answer, self.asked = Answer(self.asked.size, 0, ""), None

    def poll(self):
        answer, self.answer = self.answer, None
        return answer

    def wait(self, seconds):
        self.waited_s.append(seconds)
        return self.poll()

    def alarm(self):
        return ""

    def stop(self):
        self.stopped = True


def grow(tree, records=1):
    for _ in range(records):
        line = b"x%d\n" % tree.size
        tree.add([Part(None, line, b"", 1, [(False, line)])], 1)


def names(note):
    return [line.name for line in parse_note(note).signatures] if note else []


def size(note):
    return parse_checkpoint(parse_note(note).text).size


def pair(*keys):
    witnesses = [Cosigning(key) for key in keys or (NEAR, PEER)]
    return Checkpointer("o", [SIGNER], witnesses), *witnesses


def test_lines_of_all_who_answered_stand_on_one_note():
    tree, near, peer = pair()
    grow(tree, 5)
    first = tree.sign()
    near.decide()
    peer.decide()
    grow(tree, 3)
    second = tree.sign()
    assert names(second.cosigned) == ["log", "near", "peer"]
    assert second.cosigned.startswith(first.note)


def test_one_that_is_silent_keeps_the_other_from_nothing():
    tree, near, peer = pair()
    for _ in range(20):
        grow(tree, 7)
        signed = tree.sign()
        near.decide()
    assert names(signed.cosigned) == ["log", "near"]
    assert (near.size, peer.size) == (tree.size, 0)
    assert len(tree._ranges) <= 4
    # It comes back, first to what it was asked long ago; the next proof leads from there.
    peer.decide()
    grow(tree, 2)
    back = tree.sign()
    assert (size(back.cosigned), names(back.cosigned)) == (7, ["log", "peer"])
    near.decide()
    peer.decide()
    grow(tree)
    assert names(tree.sign().cosigned) == ["log", "near", "peer"]


@pytest.mark.parametrize("seed", range(12))
def test_whatever_each_does_every_proof_holds(seed):
    """The witnesses check each proof themselves; what is kept of the tree stays small."""
    rng = random.Random(seed)
    tree, *witnesses = pair(NEAR, PEER, Cosigner("third", b"\7" * 32))
    carried = dict.fromkeys(("near", "peer", "third"), 0)
    for _ in range(120):
        grow(tree, rng.randrange(1, 9))
        cosigned = tree.sign().cosigned
        for name in names(cosigned)[1:]:
            carried[name] += 1
        for witness in witnesses:
            if rng.random() < 0.1:
                witness.forget()
            elif rng.random() < 0.5:
                witness.decide()
        assert len(tree._ranges) <= 2 * len(witnesses) + 2
        assert len(tree._carried._notes) <= len(witnesses)
    assert min(carried.values()) >= 10


def test_the_end_is_shown_to_all_and_waited_for_together(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    tree, down, peer = pair()
    down.wait = lambda seconds: now.__setitem__(0, now[0] + seconds)
    real = peer.submit

    def at_once(submission):
        real(submission)
        peer.decide()

    peer.submit = at_once
    grow(tree, 3)
    tree.sign()
    grow(tree, 4)
    tree.farewell(2.0)
    assert now[0] == 1.0
    assert (peer.size, peer.closing, peer.stopped) == (7, True, True)
    assert (down.closing, down.stopped) == (False, True)


def note_of(number, *cosigners):
    text = Checkpoint("o", number, b"r" * 32).text()
    return write_note(text, [SIGNER.sign(text), *(c.sign(text, 1) for c in cosigners)])


def test_what_waits_for_a_record_is_the_newest_of_each():
    carried = Carried()
    for number in range(1, 6):
        carried.put(0, note_of(number, NEAR))
    carried.put(1, note_of(2, PEER))
    assert carried.take() == note_of(2, PEER)
    assert carried.take() == note_of(5, NEAR)
    assert carried.take() == ""


def test_only_lines_of_trusted_keys_that_hold_are_taken():
    note, text = note_of(3), Checkpoint("o", 3, b"r" * 32).text()
    good, other = NEAR.sign(text, 1).line(), PEER.sign(text, 1).line()
    forged = NEAR.sign(Checkpoint("o", 4, b"r" * 32).text(), 1).line()
    trusted = Keyset([NEAR.key])
    assert names(cosigned_note(note, other + good + forged, trusted)) == ["log", "near"]
    assert cosigned_note(note, other + forged, trusted) == ""
    assert names(cosigned_note(note, other)) == ["log", "peer"]
    for many_lines in (good * 4, "x" * 3000):
        with pytest.raises(NoteError):
            cosigned_note(note, many_lines, trusted)


def test_any_trusted_witness_counts_and_the_list_of_either(tmp_path):
    """A whole chain: what the auditor sees with both keys, with one, with none."""
    near, peer = Obliging(), Cosigning(PEER)
    peer.submit = lambda submission: (Cosigning.submit(peer, submission), peer.decide())

    async def scene():
        writer = start(tmp_path, witnesses=(near, peer))
        await many(writer, 100)
        await writer.close()
        return writer.dir

    chain = run(scene)
    carried = [r["cosigned"] for r in checkpoints(chain) if "cosigned" in r]
    assert {tuple(names(note)) for note in carried} == {("log", "witness", "peer")}
    log = NoteSigner("log", ED25519, b"\1" * 32).key
    from tests.unit.proxy.test_audit_checkpoints import WITNESS

    for keys in ([WITNESS.key], [PEER.key], [WITNESS.key, PEER.key]):
        result = verify(tmp_path, KEYS, pinned=Keyset([log, *keys]))
        assert (result.verdict, result.public()["witnessed_to"]) == ("ok", size(carried[-1]) - 1)
    assert verify(tmp_path, KEYS, pinned=Keyset([log])).public()["witnessed_to"] is None
    origin = parse_checkpoint(parse_note(carried[-1]).text).origin
    head = [Expected(origin, peer.size, peer.root, "the witness's list peer")]
    assert verify(tmp_path, KEYS, pinned=Keyset([log, PEER.key]), expected=head).verdict == "ok"
