"""Clients that leave, stall or fall behind; real sockets on loopback."""

import threading
import time

import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
WAIT_S = 10


def wait_for(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def read_out(sock):
    data = b""
    try:
        while piece := sock.recv(1 << 20):
            data += piece
    except ConnectionResetError:
        return data
    return data


def abandoned(served, why):
    return served.metric("tongguan_agent_abandoned_total", why=why)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_before_the_first_token_cancels_at_once(start, engine, stream):
    engine.script = lambda _g: None
    served = start()
    sock = served.raw_post(CHAT, {"messages": HI, "stream": stream})
    generation = engine.generations.get(timeout=WAIT_S)
    assert not generation.cancelled.is_set()
    sock.close()
    assert generation.cancelled.wait(WAIT_S)
    wait_for(lambda: abandoned(served, "gone") == 1)
    wait_for(lambda: served.api.running == 0)


def test_a_client_that_leaves_in_a_stream_cancels_at_once(start, engine):
    engine.script = lambda g: g.give("Hel", [1])
    served = start()
    sock = served.raw_post(CHAT, {"messages": HI, "stream": True})
    data = b""
    while b'"Hel"' not in data:
        data += sock.recv(65536)
    generation = engine.generations.get(timeout=WAIT_S)
    sock.close()
    assert generation.cancelled.wait(WAIT_S)
    generation.give("lo", [2], "cancelled")
    wait_for(lambda: abandoned(served, "gone") == 1)


def test_a_client_that_half_closes_is_gone(start, engine):
    import socket

    engine.script = lambda _g: None
    served = start()
    sock = served.raw_post(CHAT, {"messages": HI})
    generation = engine.generations.get(timeout=WAIT_S)
    sock.shutdown(socket.SHUT_WR)
    assert generation.cancelled.wait(WAIT_S)


def test_a_client_that_leaves_in_its_body_starts_nothing(start, engine):
    served = start()
    sock = served.connect()
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    sock.close()
    wait_for(lambda: abandoned(served, "gone") == 1)
    assert engine.generations.empty()


def test_one_client_leaving_disturbs_no_other(start, engine, events):
    go = threading.Event()

    def script(generation):
        assert go.wait(WAIT_S)
        generation.give("Hello", [1, 2], "stop")

    engine.script = script
    served = start()
    leaver = served.raw_post(TEXT, {"prompt": "a"})
    stayer = served.raw_post(TEXT, {"prompt": "b", "stream": True})
    first, second = (engine.generations.get(timeout=WAIT_S) for _ in range(2))
    by_prompt = {g.prompt_ids: g for g in (first, second)}
    leaver.close()
    assert by_prompt[(ord("a"),)].cancelled.wait(WAIT_S)
    go.set()
    data = b""
    while b"[DONE]" not in data:
        data += stayer.recv(65536)
    assert b"Hello" in data


def endless(generation):
    """Give text as fast as it goes until cancelled; 1 KiB a token."""
    while not generation.cancelled.is_set():
        generation.give("x" * 1024, [1])
        generation.engine.given += 1
    generation.give("", [], "cancelled")


def test_a_reader_that_falls_behind_is_dropped_and_nothing_piles_up(start, engine):
    engine.script, engine.given = endless, 0
    served = start(pending_tokens=2000)
    sock = served.raw_post(CHAT, {"messages": HI, "stream": True}, served.connect(rcvbuf=4096))
    generation = engine.generations.get(timeout=WAIT_S)
    assert generation.cancelled.wait(30)
    wait_for(lambda: abandoned(served, "behind") == 1)
    assert served.metric("tongguan_agent_limit_hits_total", setting="pending_tokens") == 1
    wait_for(lambda: served.api.running == 0)
    # Kernel buffers, the transport's and what may be pending: some MiB, no more.
    assert engine.given < 2000 + 16 * 1024
    assert b"[DONE]" not in read_out(sock)


def paced(generation):
    """As `endless`, but with room for the reader: stays below the pending bound."""
    while not generation.cancelled.wait(0.0005):
        generation.give("x" * 65536, [1])
    generation.give("", [], "cancelled")


def test_a_reader_that_stalls_is_dropped_after_its_time(start, engine):
    engine.script = paced
    served = start(client_stall_s=0.2)
    served.raw_post(CHAT, {"messages": HI, "stream": True}, served.connect(rcvbuf=4096))
    generation = engine.generations.get(timeout=WAIT_S)
    assert generation.cancelled.wait(30)
    wait_for(lambda: abandoned(served, "stalled") == 1)
    assert served.metric("tongguan_agent_limit_hits_total", setting="client_stall_s") == 1


def test_a_slow_reader_that_reads_gets_everything(start, engine):
    total = 400

    def script(generation):
        for _ in range(total):
            generation.give("x" * 1024, [1])
        generation.give("", [0], "stop")

    engine.script = script
    served = start()
    sock = served.raw_post(TEXT, {"prompt": "a", "stream": True}, served.connect(rcvbuf=4096))
    data = b""
    while b"[DONE]" not in data:
        data += sock.recv(8192)
    assert data.count(b"x" * 1024) <= total
    assert sum(data.count(c) for c in (b"x",)) >= total * 1024


def test_at_the_end_of_grace_a_stream_gets_an_error_ending(start, engine, events):
    engine.script = lambda g: g.give("Hel", [1])
    served = start()
    with served.client.stream("POST", CHAT, json={"messages": HI, "stream": True}) as answer:
        chunks = answer.iter_bytes()
        body = next(chunks)
        served.loop.call_soon_threadsafe(served.api.abandon_all)
        body += b"".join(chunks)
    *_, last = events(body)
    assert last["error"]["code"] == "draining"
    assert b"[DONE]" not in body
    assert engine.generations.get(timeout=WAIT_S).cancelled.is_set()


def test_at_the_end_of_grace_a_waiting_request_gets_503(start, engine):
    engine.script = lambda g: g.engine.loop_call()
    served = start()
    engine.loop_call = lambda: served.loop.call_soon_threadsafe(served.api.abandon_all)
    answer = served.client.post(CHAT, json={"messages": HI})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "draining"
    assert abandoned(served, "draining") == 1
