"""What lies between two sidecars: a relay that keeps every byte, and one that bends answers.

`Recorder` is plain TCP. `Bending` is an `Upstream` that hands each request on to the real next hop
and gives back what its script makes of the answer.
"""

import base64
import contextlib
import socket
import threading

from tests.blackbox.harness import Client, Upstream


class Recorder:
    """A TCP relay to a port; `bytes()` is all that passed, both ways."""

    def __init__(self, port):
        self.port = port
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.parts = []
        self.socks = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                return
            self.socks += [near, far]
            for one, other in ((near, far), (far, near)):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pump, args=(one, other, []), daemon=True).start()

    def _pump(self, one, other, kept):
        self.parts.append(kept)  # of one direction of one connection, so that cuts hide nothing
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                kept.append(data)
                other.sendall(data)
        for sock in (one, other):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def directions(self):
        return [b"".join(kept) for kept in self.parts]

    def bytes(self):
        return b"\n".join(self.directions())

    def close(self):
        self.listener.close()
        for sock in self.socks:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def disguises(secret):
    """Yield the forms in which bytes could lie in others: raw, hex, base64 at any offset."""
    yield secret
    yield secret.hex().encode()
    yield secret.hex().upper().encode()
    for offset in range(3):
        text = base64.b64encode(bytes(offset) + secret)
        # Without the characters that share bits with what stands before and behind.
        first = -(-offset * 8 // 6)
        last = (offset + len(secret)) * 8 // 6
        inner = text[first:last]
        yield inner
        yield inner.translate(bytes.maketrans(b"+/", b"-_"))


def found(secret, wire):
    """Say whether the bytes occur on the wire in any disguise."""
    assert len(secret) >= 8, "what is short occurs by chance"
    return any(form in wire for form in disguises(secret))


class Bending(Upstream):
    """The next hop, as somebody in between presents it: `bend(seen, answer)` gives the bytes."""

    def __init__(self, port):
        self.port = port
        self.bend = None
        super().__init__()

    def bending(self, bend):
        """Set what happens to answers; forget what was seen."""
        self.answering(self._hand_on)
        self.bend = bend
        return self

    def _hand_on(self, seen):
        answer = self.ask(seen)
        seen.wire.send(self.bend(seen, answer) if self.bend else unbent(answer))

    def ask(self, seen):
        """Return the real next hop's answer to a request."""
        seen.body()
        with Client(self.port) as client:
            return client.send(seen.raw, seen.raw_body).answer()


def unbent(answer, body=None):
    """Return an answer's bytes with this body (default: its own), framed by its length."""
    body = answer.body if body is None else body
    kept = [answer.line]
    for line in answer.lines:
        name = line.partition(b":")[0].lower()
        if name not in {b"content-length", b"transfer-encoding"}:
            kept.append(line)
    kept.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*kept, b"", b""]) + body
