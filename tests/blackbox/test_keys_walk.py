"""The walks of docs/keys.md, as they are typed: rotate and revoke a key; the root in a token."""

import json
import shutil

import pytest

from tests.blackbox.harness import LAST_CHUNK, SSE_HEAD, chunk
from tests.blackbox.walks import commands, walk
from tests.unit.proxy.softhsm import MODULE, needs_softhsm

pytestmark = pytest.mark.skipif(not shutil.which("curl"), reason="capability: curl")


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


def test_a_key_is_rotated_and_revoked_as_it_is_written(tmp_path):
    said, requests = walk(tmp_path, commands("keys.md", "Rotate and revoke a key"), engine)
    assert said.count("I am small.") == len(requests) == 3
    assert "is revoked" in said
    assert "1 live, 0 not yet, 0 expired, 1 revoked" in said


@needs_softhsm
def test_the_root_is_kept_in_a_token_as_it_is_written(tmp_path):
    text = commands("keys.md", "Keep the root in a PKCS#11 token")
    assert "/usr/lib/softhsm/libsofthsm2.so" in text
    text = text.replace("/usr/lib/softhsm/libsofthsm2.so", MODULE)
    said, requests = walk(tmp_path, text, engine)
    assert said.count("I am small.") == len(requests) == 1
    assert "provider        pkcs11" in said
    assert "1 live, 1 not yet" in said
    assert (tmp_path / "keys" / "sidecar.json").read_text().count("pkcs11:tongguan") == 5
