"""Counts, the page, and what is being written."""

from __future__ import annotations

import itertools
import json

import pytest
from click.testing import CliRunner

from proxy.audit.cli import audit
from proxy.audit.layout import segments
from proxy.audit.views.follow import follow
from tests.unit.proxy.audit_chains import SEED, START_MS, write_chain

HOUR_MS = 3_600_000


def run(*arguments):
    return CliRunner().invoke(audit, list(map(str, arguments)))


@pytest.fixture
def directory(tmp_path):
    write_chain(tmp_path / "audit", 5)
    later = START_MS + 3 * HOUR_MS
    write_chain(tmp_path / "audit", 4, origin="local/default/pod/uid/2", start_ms=later)
    return tmp_path / "audit"


def test_stats_count_by_class_and_outcome(directory):
    found = json.loads(run("stats", directory, "--json").stdout)
    assert found["records"] == 13
    assert found["kinds"] == {"request": 9, "genesis": 2, "closed": 2}
    assert found["classes"] == {"P1": 9}
    assert found["outcomes"] == {"ok": 9}
    assert found["tokens"] == {"prompt": 108, "total": 108, "completion": 0}
    assert (found["hours_with_records"], found["hours_without"]) == (2, 2)
    assert "P1 9" in run("stats", directory).stdout


def test_stats_pass_over_what_is_no_record(directory):
    _, path = segments(max(directory.iterdir()))[0]
    with path.open("ab") as file:
        file.write(b'junk\n[1]\n{"kind":7,"wall_ns":"x","usage":3}\n')
    found = json.loads(run("stats", directory, "--json").stdout)
    assert found["records"] == 14
    assert run("stats", directory / "none").exit_code == 3


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "auditor.json"
    rows = [{"id": "seed1", "seed": SEED.hex()}]
    document = {"format": "tongguan-keys/1", "role": "auditor", "chain_seeds": rows}
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(("lang", "title"), [("en", "Audit report"), ("zh", "审计报告")])
def test_the_page_says_what_verify_says(directory, keys, tmp_path, lang, title):
    out = tmp_path / "page.html"
    result = run("report", directory, "--keys", keys, "-o", out, "--lang", lang)
    assert result.exit_code == 0, result.output
    text = out.read_text(encoding="utf-8")
    assert f"<title>{title}</title>" in text
    assert '<span class="ok">ok</span>' in text
    assert text.count("class=none") == 2
    for printed in ("@media print{", ".none::after{", "print-color-adjust:exact"):
        assert printed in text  # a gap is to be seen on paper
    for outside in ("http:", "https:", "<script", "@import", "url("):
        assert outside not in text
    _, path = segments(min(directory.iterdir()))[0]
    path.write_bytes(path.read_bytes().replace(b'"status":200', b'"status":500', 1))
    assert run("report", directory, "--keys", keys, "-o", out, "--lang", lang).exit_code == 13
    assert "content_mismatch" in out.read_text(encoding="utf-8")


def test_what_the_log_says_cannot_leave_its_cell(tmp_path):
    evil = "<script>alert(1)</script>"
    directory = tmp_path / "audit"
    write_chain(directory, 1, origin=evil)
    _, path = segments(next(directory.iterdir()))[0]
    path.write_bytes(path.read_bytes().replace(b'"outcome":"ok"', f'"outcome":"{evil}"'.encode()))
    out = tmp_path / "page.html"
    assert run("report", directory, "-o", out).exit_code == 17
    assert evil not in out.read_text(encoding="utf-8")
    assert "&lt;script&gt;" in out.read_text(encoding="utf-8")


def test_follow_gives_whole_lines_that_are_written_from_then_on(directory):
    _, path = segments(max(directory.iterdir()))[-1]
    halves = itertools.cycle([b'{"half":', b'"line"}\tmac\n'])

    def pause(_seconds):
        with path.open("ab") as file:
            file.write(next(halves))

    stream = follow(directory, from_start=False, pause=pause)
    assert list(itertools.islice(stream, 3)) == [b'{"half":"line"}\tmac\n'] * 3


def test_follow_moves_on_to_the_next_chain(directory):
    made = []

    def pause(_seconds):
        assert not made, "the new chain's lines were not seen"
        later = START_MS + 9 * HOUR_MS
        made.append(write_chain(directory, 2, origin="local/default/pod/uid/3", start_ms=later))

    lines = list(itertools.islice(follow(directory, from_start=False, pause=pause), 4))
    kinds = [json.loads(line.partition(b"\t")[0])["kind"] for line in lines]
    assert kinds == ["genesis", "request", "request", "closed"]


def test_follow_can_begin_with_what_is_there(directory):
    assert len(list(itertools.islice(follow(directory, from_start=True), 13))) == 13
