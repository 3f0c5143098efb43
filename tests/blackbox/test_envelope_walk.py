"""The first sealed call of docs/envelope.md, as a newcomer types it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.blackbox.harness import LAST_CHUNK, SSE_HEAD, Upstream, chunk
from tests.blackbox.node import environment, free_base

pytest.importorskip("openai", reason="capability: the openai package")
ROOT = Path(__file__).resolve().parents[2]


def commands(section):
    text = (ROOT / "docs/envelope.md").read_text(encoding="utf-8")
    (block,) = re.findall(
        r"```sh\n(.*?)```", text.partition(f"## {section}\n")[2].partition("\n## ")[0], re.DOTALL
    )
    return block


def engine(seen):
    """Answer as an engine that streams two tokens."""
    seen.reply(SSE_HEAD)
    for word in ("I am ", "small."):
        choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        event = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "MODEL"}
        line = json.dumps(event | {"choices": [choice]})
        seen.wire.send(chunk(f"data: {line}\n\n".encode()))
    seen.wire.send(chunk(b"data: [DONE]\n\n"), LAST_CHUNK)


@pytest.mark.skipif(not shutil.which("curl"), reason="capability: curl")
def test_the_first_sealed_call_runs_as_it_is_written(tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, module in (("tongguan", "-m proxy.cli"), ("python", "")):
        script = tools / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        script.chmod(0o755)
    base = free_base()
    ports = {"14080": base + 80, "14081": base + 81, "14090": base + 90}
    with Upstream() as upstream:
        upstream.answering(engine)
        text = commands("A first sealed call")
        ports["8000"] = upstream.url.rsplit(":", 1)[1]
        for port, other in ports.items():
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{other}")
        mine = {
            "TONGGUAN_DOORS_APP": f"127.0.0.1:{base + 80}",
            "TONGGUAN_DOORS_SEALED": f"127.0.0.1:{base + 81}",
            "TONGGUAN_DOORS_ADMIN": f"127.0.0.1:{base + 90}",
            "TONGGUAN_ENVELOPE_FENCE_S": "0",  # not to wait ten seconds
            "PYTHONPATH": str(ROOT),
            "PATH": f"{tools}:/usr/bin:/bin",
        }
        done = subprocess.run(
            ["bash", "-e", "-c", text],
            cwd=tmp_path,
            env=environment(**mine),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        seen = upstream.last()
    assert done.returncode == 0, done.stderr + done.stdout
    assert "I am small." in done.stdout
    assert "tongguan_proxy_envelopes_opened_total 1.0" in done.stdout
    assert json.loads(seen.body())["messages"][0]["content"] == "Who are you?"
    assert seen.all("Authorization") == []
