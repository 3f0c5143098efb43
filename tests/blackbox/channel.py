"""The caller's side of the SM4 channel as raw HTTP bytes, so that a test can bend any of them."""

import os
import time

from proxy.http.body import model_of
from proxy.keys.file import read
from proxy.sm4.answer import AnswerOpener
from proxy.sm4.envelope import MEDIA_TYPE, RequestPrelude
from proxy.sm4.keyring import Keyring
from proxy.sm4.sealer import RequestSealer
from tests.blackbox.harness import Client

BOTH = f"{MEDIA_TYPE}, text/event-stream"


def now_ms():
    return time.time_ns() // 1_000_000


class Sealed:
    """One sealed request: its `wire` bytes, and what its answer is opened with."""

    def __init__(self, wire, sealer, model):
        self.wire, self.sealer, self.model = wire, sealer, model

    def head(self, *fields, path="/sealed", length=None, accept=MEDIA_TYPE, version="1.1"):
        lines = [
            f"POST {path} HTTP/{version}",
            "Host: sidecar.test",
            f"Content-Type: {MEDIA_TYPE}",
            f"Content-Length: {len(self.wire) if length is None else length}",
            f"Accept: {accept}",
        ]
        if self.model:
            lines.append(f"X-Model-Id: {self.model}")
        return "\r\n".join([*lines, *fields, "", ""]).encode()

    def request(self, *fields, **options):
        return self.head(*fields, **options) + self.wire

    def open(self, answer):
        """Return (status, content type, body) of a sealed answer; raises EnvelopeError."""
        assert answer.status == 200, answer.body
        opener = AnswerOpener(self.sealer, answer.get("Content-Type").decode(), None)
        body = b"".join(opener.feed(answer.body)) + opener.finish()
        assert opener.complete
        return opener.prelude.status, opener.prelude.content_type, body

    def opener(self, head):
        return AnswerOpener(self.sealer, head.get("Content-Type").decode(), None)


class Channel:
    """Seals with the key of a client's key file."""

    def __init__(self, key_file):
        self.key = read(key_file).envelope_keys[0]
        self.ring = Keyring([self.key])

    def seal(
        self,
        body=b"",
        *,
        method="POST",
        target="/v1/chat/completions",
        kind="application/json",
        qos="",
        model=None,
        mac=False,
        stream=False,
        time_ms=None,
        sign=True,
    ):
        derived = self.ring.sealing_key(now_ms())
        model = model_of(body, kind) if model is None else model
        sealer = RequestSealer(
            derived,
            model=model,
            mac=mac,
            nonce=os.urandom(12),
            now_ms=now_ms() if time_ms is None else time_ms,
            signer=derived.signer() if sign else None,
        )
        prelude = RequestPrelude(method, target, kind if body else "", qos)
        if not stream:
            return Sealed(sealer.single(prelude, body), sealer, model)
        frames = sealer.stream(prelude)
        step = 40_000
        pieces = [frames.data(body[i : i + step]) for i in range(0, len(body), step)]
        return Sealed(b"".join([frames.head(), *pieces, frames.last()]), sealer, model)


def ask(sidecar, data):
    """Send bytes on a fresh connection to the sealed door; return the answer."""
    with Client(sidecar.sealed) as client:
        return client.send(data).answer()


def counted(sidecar, reason):
    """Return how many envelopes were refused for a reason."""
    return sidecar.metric("tongguan_proxy_envelope_failures_total", reason=reason)


def refused(answer):
    """Return the status and the code of a refusal in clear, after a look at its form."""
    code = answer.error()
    if code == "envelope_stale":
        assert answer.get("Date") is not None
    return answer.status, code
