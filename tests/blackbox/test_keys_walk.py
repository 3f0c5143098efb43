"""The walks of docs/keys.md, as they are typed: rotate and revoke a key; the root in a token."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.blackbox.harness import LAST_CHUNK, SSE_HEAD, Upstream, chunk
from tests.blackbox.node import environment, free_base
from tests.unit.proxy.softhsm import MODULE, needs_softhsm

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="capability: curl")


def commands(section):
    text = (ROOT / "docs/keys.md").read_text(encoding="utf-8")
    within = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", within, re.DOTALL)
    return block


def engine(seen):
    """Answer as an engine does, streamed or whole."""
    if b'"stream":true' in seen.body().replace(b" ", b""):
        delta = {"choices": [{"index": 0, "delta": {"content": "I am small."}}]}
        seen.reply(SSE_HEAD)
        seen.wire.send(chunk(b"data: %b\n\n" % json.dumps(delta).encode()))
        seen.wire.send(chunk(b"data: [DONE]\n\n"), LAST_CHUNK)
        return
    message = {"role": "assistant", "content": "I am small."}
    body = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    seen.reply(head % len(body) + body)


def walk(folder, section):
    """Run a section's commands on ports of our own; return (what was said, requests that came)."""
    tools = folder / "bin"
    tools.mkdir()
    for name, module in (("tongguan", "-m proxy.cli"), ("python", "")):
        script = tools / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        script.chmod(0o755)
    base = free_base()
    text = commands(section)
    with Upstream() as upstream:
        upstream.answering(engine)
        ports = {"14081": base + 81, "14090": base + 90, "8000": upstream.url.rsplit(":", 1)[1]}
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
            ["bash", "-e", "-c", f"trap 'kill $SIDECAR 2>&- || :' EXIT; {text}"],
            cwd=folder,
            env=environment(**mine),
            capture_output=True,
            text=True,
            check=False,
            timeout=110,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        return said, len(upstream.seen)


def test_a_key_is_rotated_and_revoked_as_it_is_written(tmp_path):
    said, requests = walk(tmp_path, "Rotate and revoke a key")
    assert said.count("I am small.") == requests == 3
    assert "is revoked" in said
    assert "1 live, 0 not yet, 0 expired, 1 revoked" in said


@needs_softhsm
def test_the_root_is_kept_in_a_token_as_it_is_written(tmp_path, monkeypatch):
    text = commands("Keep the root in a PKCS#11 token")
    assert "/usr/lib/softhsm/libsofthsm2.so" in text
    monkeypatch.setattr(
        f"{__name__}.commands",
        lambda _: text.replace("/usr/lib/softhsm/libsofthsm2.so", MODULE),
    )
    said, requests = walk(tmp_path, "Keep the root in a PKCS#11 token")
    assert said.count("I am small.") == requests == 1
    assert "provider        pkcs11" in said
    assert "1 live, 1 not yet" in said
    assert (tmp_path / "keys" / "sidecar.json").read_text().count("pkcs11:tongguan") == 5
