"""Ask one sealed question: `python -m perf.sealed URL KEYS`. Exits 0 on a 200, else 1.

A process of its own, so that what the client imports is not counted as the sidecar's memory.
"""

from __future__ import annotations

import json
import sys

import httpx

from proxy.client import Sm4Transport


def main(url: str, keys: str) -> int:
    """Send the question, read the answer whole."""
    question = {"model": "m-json", "messages": [{"role": "user", "content": "hi"}]}
    with httpx.Client(base_url=url, transport=Sm4Transport(keys), timeout=10) as client:
        answer = client.post("/v1/chat/completions", content=json.dumps(question))
    if answer.status_code != 200:
        sys.stderr.write(f"status {answer.status_code}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
