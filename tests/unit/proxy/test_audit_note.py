"""Signed notes: another implementation's example, forms that are refused, keys as lines."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.audit.note import (
    COSIGNATURE,
    ED25519,
    Checkpoint,
    Keyset,
    NoteError,
    PublicKey,
    parse_checkpoint,
    parse_key,
    parse_keys,
    parse_note,
    write_note,
)
from proxy.audit.signing import Cosigner, NoteSigner

# The example of golang.org/x/mod/sumdb/note.
KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
NOTE = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
    "\n"
    "\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdn"
    "gotpRZb6KE6RyyBwJnAM=\n"
)
SIGNER = NoteSigner("log", ED25519, b"\1" * 32)
WITNESS = Cosigner("witness", b"\2" * 32)
ROOT = bytes(range(32))
TEXT = Checkpoint("a/b/c", 7, ROOT).text()


def signed(text=TEXT):
    return write_note(text, [SIGNER.sign(text), WITNESS.sign(text, 1_700_000_000)])


def test_a_note_of_another_implementation_holds():
    key = parse_key(KEY)
    assert Keyset([key]).signers(parse_note(NOTE)) == {key}
    assert key.line() == KEY
    changed = parse_note(NOTE.replace("problem is", "problem was"))
    assert Keyset([key]).signers(changed) == set()


def test_a_checkpoint_comes_back_with_its_signers():
    note = parse_note(signed())
    assert parse_checkpoint(note.text) == Checkpoint("a/b/c", 7, ROOT)
    assert write_note(note.text, note.signatures) == signed()
    assert Keyset([SIGNER.key, WITNESS.key]).signers(note) == {SIGNER.key, WITNESS.key}
    assert Keyset([SIGNER.key]).signers(note) == {SIGNER.key}
    assert Keyset().signers(note) == set()


def test_a_key_line_comes_back():
    for key in (SIGNER.key, WITNESS.key):
        assert parse_key(key.line()) == key
    text = f"# who signs\n\n{SIGNER.key.line()}\n{WITNESS.key.line()}\n"
    assert parse_keys(text) == [SIGNER.key, WITNESS.key]
    assert [key.kind for key in parse_keys(text)] == [ED25519, COSIGNATURE]


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_changed_bit_takes_a_signature_away(at, bit):
    data = bytearray(signed().encode())
    data[at % len(data)] ^= 1 << bit
    try:
        note = parse_note(data.decode())
    except (NoteError, UnicodeDecodeError):
        return
    assert Keyset([SIGNER.key, WITNESS.key]).signers(note) != {SIGNER.key, WITNESS.key}


def test_a_cosignature_is_of_its_time():
    line = WITNESS.sign(TEXT, 5)
    assert WITNESS.key.signs(TEXT, line)
    other = type(line)(line.name, line.key_id, (6).to_bytes(8, "big") + line.blob[8:])
    assert not WITNESS.key.signs(TEXT, other)
    # A log's signature is no cosignature by the same private key, nor the other way round.
    same = NoteSigner("witness", ED25519, b"\2" * 32)
    blob = (5).to_bytes(8, "big") + same.sign(TEXT).blob
    assert not WITNESS.key.signs(TEXT, type(line)(line.name, line.key_id, blob))


SIGNATURE = SIGNER.sign(TEXT).line()


@pytest.mark.parametrize(
    "note",
    [
        "",
        TEXT,
        TEXT + "\n",
        TEXT + SIGNATURE,
        TEXT + "\n" + SIGNATURE[:-1],
        TEXT + "\n" + SIGNATURE + "junk\n",
        TEXT + "\n" + SIGNATURE.replace("\u2014", "-"),
        TEXT + "\n" + SIGNATURE.replace(" log ", " l og "),
        TEXT + "\n" + SIGNATURE.replace(" log ", "  "),
        TEXT + "\n" + SIGNATURE.replace("\n", "\r\n"),
        TEXT.replace("a/b", "a\tb") + "\n" + SIGNATURE,
        TEXT + "\n\u2014 log AAAA\n",
        TEXT + "\n\u2014 log AAAAAB==\n",
        TEXT + "\n" + SIGNATURE * 17,
        "x" * 20_000 + "\n\n" + SIGNATURE,
    ],
)
def test_what_is_no_signed_note_is_refused(note):
    with pytest.raises(NoteError):
        parse_note(note)


@pytest.mark.parametrize(
    "text",
    [
        "a\n7\n",
        "a\n07\n" + base64.b64encode(ROOT).decode() + "\n",
        "a\n-1\n" + base64.b64encode(ROOT).decode() + "\n",
        "\n7\n" + base64.b64encode(ROOT).decode() + "\n",
        "a\n7\n" + base64.b64encode(ROOT[:31]).decode() + "\n",
        "a\n7\n" + base64.b64encode(ROOT).decode() + "\nextension\n",
        "a\n7\nnot base64\n",
        "a\n99999999999999999\n" + base64.b64encode(ROOT).decode() + "\n",
    ],
)
def test_what_is_no_checkpoint_is_refused(text):
    with pytest.raises(NoteError):
        parse_checkpoint(text)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "log",
        KEY[:-1],
        KEY.replace("c74f20a3", "c74f20a4"),
        KEY.replace("PeterNeumann", "Peter"),
        "log+00000000+" + base64.b64encode(b"\x09" + bytes(32)).decode(),
        "log+00000000+" + base64.b64encode(b"\x01" + bytes(31)).decode(),
    ],
)
def test_what_is_no_key_is_refused(line):
    with pytest.raises(NoteError):
        parse_key(line)


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a\nb", "x" * 129, "\u00e9"])
def test_what_is_no_key_name_is_refused(name):
    with pytest.raises(NoteError):
        PublicKey(name, ED25519, bytes(32))
