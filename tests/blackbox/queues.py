"""Requests that wait: an engine that answers when it is told to, clients that are open together."""

import json
import threading

from tests.blackbox.harness import OK, Client, until

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":10}'
P0, P1, P2 = (b"X-QoS-Class: " + name for name in (b"P0", b"P1", b"P2"))
GRANTED = '[tenants.default]\nmax_class = "P0"\n'
OFF = {"QOS_LIMITS_URL": ""}


class Held:
    """A script that answers each request when it is told to, and remembers the order."""

    def __init__(self):
        self.order = []
        self._free = threading.Semaphore(0)

    def __call__(self, seen):
        body = seen.body()
        self.order.append((seen.get("X-QoS-Class"), body))
        self._free.acquire()
        seen.wire.send(OK)

    def let(self, count=1):
        self._free.release(count)

    def count(self, number):
        """Wait until so many requests have come upstream."""
        return until(lambda: len(self.order) >= number, f"{number} requests upstream")


class Clients:
    """Connections that are open together."""

    def __init__(self, sidecar):
        self.sidecar = sidecar
        self.all = []

    def send(self, *parts):
        client = Client(self.sidecar.app)
        self.all.append(client)
        client.send(*parts)
        return client

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for client in self.all:
            client.close()


def queued(sidecar, qos, number):
    until(
        lambda: sidecar.metric("tongguan_proxy_queue_depth", qos=qos) == number,
        f"{number} {qos} in the queue",
    )


def body(number, tokens=10):
    return json.dumps({"model": "m", "prompt": f"{number}", "max_tokens": tokens}).encode()
