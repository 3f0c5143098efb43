"""The audit report in a real browser, in both languages: shown, and printed. `make page`.

REPORT_PNG names a file that keeps a picture of it.
"""

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.audit.cli import audit
from proxy.audit.views.meanings import MEANINGS
from tests.page.test_page import browse, pytestmark  # noqa: F401 - skipped without a browser
from tests.unit.proxy import test_audit_opens as opens
from tests.unit.proxy.audit_chains import START_MS, write_chain
from tests.unit.proxy.test_audit_tampering import key_files

POD = "cluster-1/production/llm-sidecar-7d9f8c6b5-x2x7k/3e1c3c9e-7c1b-4f0a-9a53-0c1f5f2b8e12"
HOUR_MS = 3_600_000


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """Three chains: one with requests that never ended, one silent for hours, one with a change."""
    directory = tmp_path_factory.mktemp("report") / "audit"
    opens.write(directory)
    for number in (2, 3):
        start_ms = START_MS + number * 5 * HOUR_MS
        slow = {"heartbeat_s": 900, "checkpoint_s": 40_000}
        origin = f"{POD}/{start_ms}000000"
        write_chain(directory, 40, origin=origin, start_ms=start_ms, step_ms=600_000, **slow)
    (path,) = max(directory.iterdir()).glob("*.log")
    data = bytearray(path.read_bytes())
    data[data.index(b'"tenant":"t-1"') + 12] = ord("2")
    path.write_bytes(data)
    return directory


@pytest.fixture(scope="module", params=["en", "zh"])
def page(log, request):
    keys = key_files() / "auditor.json"
    keys.chmod(0o600)
    path = log.parent / f"{request.param}.html"
    told = CliRunner().invoke(
        audit,
        ["report", str(log), "--keys", str(keys), "-o", str(path), "--lang", request.param],
    )
    assert told.exit_code == 13, told.output
    return request.param, path


def test_it_is_shown_as_it_was_written(page):
    lang, path = page
    done = browse(path.as_uri(), "--dump-dom")
    for sign in ("Refused to", "Failed to load", "Uncaught", "ERR_"):
        assert sign not in done.stderr, done.stderr
    assert f'<html lang="{lang}">' in done.stdout
    assert f"<p>{MEANINGS[lang]['content_mismatch']}</p>" in done.stdout
    assert done.stdout.count("<tbody>") == path.read_text().count("<table")  # each is one table
    notices = re.search(r'class="notices">(.*?)</table>', done.stdout, re.DOTALL)[1]
    assert notices.count("<tr>") == 1 + len(opens.LOST)
    # 6 to 9 o'clock: between the first chain and the second.
    assert done.stdout.count('class="none"') == 8


def test_it_prints_on_few_pages(page, tmp_path):
    _, path = page
    browse(path.as_uri(), "--no-pdf-header-footer", f"--print-to-pdf={tmp_path / 'out.pdf'}")
    data = (tmp_path / "out.pdf").read_bytes()
    assert data.startswith(b"%PDF-")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", data)) <= 4


def test_a_picture_of_it(page, tmp_path):
    lang, path = page
    where = Path((lang == "en" and os.environ.get("REPORT_PNG")) or tmp_path / "page.png").resolve()
    browse(path.as_uri(), f"--screenshot={where}", "--window-size=960,1000")
    assert where.read_bytes().startswith(b"\x89PNG")
    assert where.stat().st_size > 20_000
