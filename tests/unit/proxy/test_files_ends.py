"""The ends of `tongguan seal` and `open`: what a file, a terminal and a progress line get."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from proxy.files.ends import AtomicFile, EndError, Source, Straight, UsageError, sink_for
from proxy.files.progress import line, size_text

TEXT = "潼关 tab\t\r\n👩\u200d👧".encode()


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (5_000_000_000, "5.0 GB"), (9e15, "9000.0 TB")],
)
def test_sizes_are_told_in_powers_of_1000(count, text):
    assert size_text(count) == text


def test_the_line_says_how_far_it_is_and_how_long_it_takes():
    assert line(1_000_000, 4_000_000, 2.0) == " 25%  1.0 MB, 500.0 kB/s, 0:06 left"
    assert line(0, 4_000_000, 2.0) == "  0%  0 B, 0 B/s"
    assert line(1_000_000, None, 2.0) == "1.0 MB, 500.0 kB/s"
    assert line(5_000_000, 4_000_000, 2.0).startswith("100%")  # the file grew


def test_a_file_that_came_into_being_meanwhile_is_left_alone(tmp_path):
    sink = AtomicFile(tmp_path / "out", mode=0o600, force=False)
    sink.write(b"ours")
    (tmp_path / "out").write_bytes(b"theirs")
    with pytest.raises(EndError, match="meanwhile"):
        sink.commit()
    sink.close()
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"theirs"]


def test_without_hard_links_the_file_is_renamed(tmp_path, monkeypatch):
    def refused(self, target):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "hardlink_to", refused)
    sink = AtomicFile(tmp_path / "out", mode=0o600, force=False)
    sink.write(b"ours")
    sink.commit()
    sink.close()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"out": b"ours"}


def test_a_link_that_leads_nowhere_is_a_name_that_is_taken(tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "none")
    with pytest.raises(UsageError, match="--force"):
        AtomicFile(tmp_path / "out", mode=0o600, force=False)


def test_a_named_pipe_is_written_straight(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    sink = sink_for(str(tmp_path / "pipe"), force=False, private=True, binary=False)
    assert sink.straight
    sink.write(b"now")
    assert os.read(reader, 10) == b"now"
    os.close(reader)
    with pytest.raises(EndError, match="reader is gone"):
        sink.write(b"later")
    sink.close()


def test_text_may_be_cut_anywhere_and_controls_are_no_text():
    ours, theirs = os.pipe()
    sink = Straight(theirs, "the terminal", text_only=True)
    for byte in TEXT:
        sink.write(bytes([byte]))
    for bad in (b"\x1b[2J", b"\0", "\u202e".encode(), b"\x7f"):
        with pytest.raises(UsageError, match="no text"):
            Straight(theirs, "the terminal", text_only=True).write(bad)
    assert os.read(ours, 100) == TEXT
    os.close(ours)
    os.close(theirs)


def test_a_source_reads_in_full_and_knows_its_size(tmp_path):
    (tmp_path / "in").write_bytes(b"0123456789")
    source = Source(tmp_path / "in")
    assert source.size_bytes == 10
    assert [source.read(4), source.read(4), source.read(4), source.read(4)] == [
        b"0123", b"4567", b"89", b"",
    ]  # fmt: skip
    assert source.read_bytes == 10
    source.close()
