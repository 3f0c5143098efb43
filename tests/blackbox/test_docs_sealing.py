"""docs/envelope.md, "Two sidecars around a plain app", as a newcomer types it."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.blackbox.node import environment, free_base

ROOT = Path(__file__).resolve().parents[2]
CURL = shutil.which("curl")


def commands():
    text = (ROOT / "docs" / "envelope.md").read_text(encoding="utf-8")
    section = text.partition("### Two sidecars around a plain app\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return block


@pytest.mark.skipif(not CURL, reason="capability: curl")
def test_two_sidecars_around_a_plain_app(tmp_path):
    script = commands()
    ports = sorted(set(re.findall(r"\b14[45]\d\d\b", script)))
    bases = [free_base(), free_base()]
    assert len(ports) == 6
    offsets = {"14481": 81, "14482": 100, "14490": 90, "14500": 190, "14580": 80, "14590": 90}
    for port in ports:  # of this test's own
        base = bases[port in {"14580", "14590", "14500"}]
        script = script.replace(port, str(base + offsets[port]))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["sh", "-e", "-c", script],
        cwd=tmp_path,
        env=environment(PATH=path, TONGGUAN_ENVELOPE_FENCE_S="1", PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        shown, problems = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    logs = "".join(file.read_text() for file in tmp_path.glob("*.log") if file.name != "wire.log")
    assert process.returncode == 0, shown + problems + logs
    lines = shown.splitlines()
    assert '{"MODEL": "TINY", "PROMPT": "A SECRET QUESTION"}' in lines
    count, nothing, sealed = lines[-3:]
    assert int(count) >= 2  # the request and its answer
    assert nothing == "and nothing of what they hold"
    assert sealed == 'tongguan_proxy_sealed_requests_total{pool="shared"} 1.0'
    wire = (tmp_path / "wire.log").read_bytes().lower()
    assert b"secret" not in wire
