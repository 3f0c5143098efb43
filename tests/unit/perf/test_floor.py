"""The floor of start and memory: a peer that answers, and is put under no load."""

from __future__ import annotations

import socket

import pytest

from perf import footprint, peers, process


@pytest.fixture
def ports(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "WORK", tmp_path)
    with socket.socket() as sock:
        for base in range(23000, 32000, 50):
            try:
                sock.bind(("127.0.0.1", peers.Ports(base).of("uvloop")))
            except OSError:
                continue
            return peers.Ports(base)
    raise AssertionError("no free port")


def test_the_floor_answers_every_request_as_long_as_the_engine_does(ports):
    peer = peers.make("uvloop", ports)
    child = footprint.start(peer, ports)
    try:
        with socket.create_connection(("127.0.0.1", peer.port), 5) as sock:
            one = b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"
            sock.sendall(one + one[:-1])
            first = sock.recv(1 << 16)
            sock.sendall(one[-1:])
            second = sock.recv(1 << 16)
        head, _, body = first.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert f"Content-Length: {len(body)}".encode() in head
        assert 1000 <= len(body) <= 1100
        assert second == first
    finally:
        process.stop(child)


def test_the_floor_has_start_and_memory_and_nothing_that_needs_an_engine(ports):
    peer = peers.make("uvloop", ports)
    found = footprint.of(peer, ports, whole=True)
    assert found.keys() == {
        "cold_start_s", "cold_start_cpu_s", "cold_start_waited_s", "rss_mb_started", "rss_mb",
    }  # fmt: skip
    assert min(found["cold_start_s"], found["cold_start_cpu_s"], found["rss_mb"]) > 0
    assert peer.alone
