"""Whole files and chains tampered with, at random too: two verifiers, one verdict."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest

from proxy.audit.layout import segments
from tests.unit.proxy import test_audit_tampering as tampering
from tests.unit.proxy.test_audit_tampering import Log, assert_both, ours, reserialised, theirs


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pristine-files")
    for number, records in ((1, 90), (2, 30), (3, 10)):
        asyncio.run(tampering._write(directory, number, records))
    return directory


@pytest.fixture
def log(pristine, tmp_path):
    # `Log` speaks of two chains; the third follows them.
    copy = Path(shutil.copytree(pristine, tmp_path / "audit"))
    return _log(copy)


def _log(directory):
    third = max(directory.iterdir())
    aside = directory.parent / "third"
    third.rename(aside)
    made = Log(directory)
    aside.rename(third)
    return made


def _whole(change):
    def operate(path):
        path.write_bytes(change(path.read_bytes()))

    return operate


def _lines(change):
    return _whole(lambda data: b"".join(change(row) for row in data.splitlines(keepends=True)))


FILES = {
    "CRLF": _whole(lambda data: data.replace(b"\n", b"\r\n")),
    "BOM": _whole(lambda data: b"\xef\xbb\xbf" + data),
    "UTF-16": _whole(lambda data: data.decode().encode("utf-16")),
    "spaces": _lines(lambda row: row[:-1] + b"  \n"),
    "tabs": _lines(lambda row: row[:-1] + b"\t\n"),
    "reserialised": _lines(reserialised),
    "an empty line at the end": _whole(lambda data: data + b"\n"),
    "no newline at all": _whole(lambda data: data.replace(b"\n", b"")),
    "NUL for its end": _whole(lambda data: data[:-700] + bytes(700)),
    "NUL whole": _whole(lambda data: bytes(len(data))),
    "empty": _whole(lambda _data: b""),
    "upside down": _whole(lambda data: b"".join(data.splitlines(keepends=True)[::-1])),
    "twice": _whole(lambda data: data + data),
    "removed": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("number", [0, 2])
def test_a_file_that_an_editor_or_a_copy_has_changed(log, name, number):
    FILES[name](log.files[number])
    found = ours(log.dir)
    assert found == theirs(log.dir)
    expected = {
        "CRLF": "malformed",
        "BOM": "malformed",
        "spaces": "malformed",
        "tabs": "malformed",
        "reserialised": "malformed",
        "an empty line at the end": "malformed",
        "removed": "gap",
        "empty": "gap",
    }
    assert found[0] == expected.get(name, found[0])
    assert found[0] not in ("ok", "ok_public")


def _operate(directory, rng):
    """Do something to a file or a chain; returns what."""
    chains = sorted(path for path in directory.iterdir() if path.is_dir())
    chain = rng.choice(chains)
    files = [path for _, path in segments(chain)]
    if not files:
        return "nothing"
    path, kind = rng.choice(files), rng.randrange(8)
    if kind == 0:
        name = rng.choice(sorted(FILES))
        FILES[name](path)
        return name
    if kind == 1:
        shutil.rmtree(chain)
    elif kind == 2:  # an old segment in the place of another, of this chain or another one
        others = [other for _, other in segments(rng.choice(chains)) if other != path]
        if not others:
            return "nothing"
        shutil.copyfile(rng.choice(others), path)
    elif kind == 3:
        path.rename(path.with_name(f"{int(path.stem) + 1:020d}.log"))
    elif kind == 4:  # rolled back: all that came later is gone
        for _, later in segments(chain)[files.index(path) + 1 :]:
            later.unlink()
        rows = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(rows[: rng.randrange(len(rows))]))
    elif kind == 5:
        shutil.copytree(chain, directory / f"{rng.randrange(1, 9)}-00000000")
    elif kind == 6:  # the end of one file behind the beginning of another
        data, other = path.read_bytes(), rng.choice(files).read_bytes()
        path.write_bytes(data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :])
    else:
        data = bytearray(path.read_bytes())
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
    return kind


def _content(directory):
    return {
        path.relative_to(directory): path.read_bytes() for path in sorted(directory.rglob("*.log"))
    }


@pytest.mark.parametrize("seed", range(16))
def test_random_operations_on_files_are_seen_by_both(pristine, tmp_path, seed):
    rng = random.Random(seed)
    directory = Path(shutil.copytree(pristine, tmp_path / "audit"))
    before = _content(directory)
    done = [_operate(directory, rng) for _ in range(rng.choice((1, 1, 2)))]
    after = _content(directory)
    # What vanishes with all that names it leaves no trace (the newest chain, alone), and a
    # directory's name is no part of the log.
    rows = {(name.name, data) for name, data in before.items()}
    kept = {name.parts[0] for name in after}
    gone = {name.parts[0] for name in before.keys() - after.keys()}
    silent = {(name.name, data) for name, data in after.items()} <= rows and not gone & kept
    mine, other = ours(directory), theirs(directory)
    assert mine[0] == other[0], done
    assert mine[0] not in ("ok", "ok_public") or silent, done


def test_an_untouched_log_of_three_chains_is_ok(log):
    assert_both(log, ("ok", None))
