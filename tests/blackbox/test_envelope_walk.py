"""The first sealed call of docs/envelope.md, as a newcomer types it."""

import json
import shutil

import pytest

from tests.blackbox.harness import LAST_CHUNK, SSE_HEAD, chunk
from tests.blackbox.walks import commands, walk

pytest.importorskip("openai", reason="capability: the openai package")


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
    said, requests = walk(tmp_path, commands("envelope.md", "A first sealed call"), engine)
    assert "I am small." in said
    assert "tongguan_proxy_envelopes_opened_total 1.0" in said
    seen = requests[-1]
    assert json.loads(seen.body())["messages"][0]["content"] == "Who are you?"
    assert seen.all("Authorization") == []
