"""Replicas that share one audience: one envelope is taken once among them, or not at all."""

import time

import pytest

from tests.blackbox.channel import ask, counted, now_ms, refused
from tests.blackbox.harness import Client, Sidecar, get, new_keys, until
from tests.blackbox.redis_server import RedisServer, needs_redis

pytestmark = needs_redis
pytest.importorskip("redis", reason="capability: the redis package")

CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"a secret question"}]}'
MANY = 64
PASSWORD = "a-store-password"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return new_keys(tmp_path_factory.mktemp("keys"), "--sign", "ed25519")


@pytest.fixture(scope="module")
def store():
    with RedisServer() as store:
        yield store


def replica(folder, backend, keys, store, **options):
    return Sidecar(
        folder,
        backend.url,
        keys=keys,
        ENVELOPE_REPLAY_STORE="redis",
        ENVELOPE_REPLAY_STORE_URL=store.url,
        **options,
    )


def ready(sidecar):
    return sidecar.admin_ask("GET", "/readyz").status == 200


def unready(sidecar):
    answer = sidecar.admin_ask("GET", "/readyz")
    return answer.body.decode() if answer.status == 503 else ""


@pytest.fixture(scope="module")
def replicas(tmp_path_factory, backend, keys, store):
    folder = tmp_path_factory.mktemp("replicas")
    with (
        replica(folder / "one", backend, keys, store) as one,
        replica(folder / "two", backend, keys, store) as two,
    ):
        for sidecar in (one, two):
            until(lambda s=sidecar: ready(s), "ready")
        yield one, two


def at_once(sealed, ports):
    """Send one envelope to each port, all but its last byte first; return the answers."""
    clients = [Client(port) for port in ports]
    try:
        for client in clients:
            client.send(sealed.request()[:-1])
        for client in clients:
            client.send(sealed.wire[-1:])
        return [client.answer() for client in clients]
    finally:
        for client in clients:
            client.close()


@pytest.mark.parametrize("sign", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_of_64_copies_over_two_replicas_exactly_one_is_taken(
    replicas, upstream, channel, stream, sign
):
    sealed = channel.seal(CHAT, stream=stream, sign=sign)
    answers = at_once(sealed, [replicas[i % 2].sealed for i in range(MANY)])
    assert sorted(a.status for a in answers) == [200] + [400] * (MANY - 1)
    taken = next(a for a in answers if a.status == 200)
    assert sealed.open(taken) == (200, "application/json", b"{}")
    assert len(upstream.seen) == 1
    assert all(s.idle() for s in replicas)


def test_what_one_replica_took_the_other_refuses(replicas, upstream, channel):
    one, two = replicas
    sealed = channel.seal(CHAT)
    before = counted(two, "replayed")
    assert sealed.open(ask(one, sealed.request()))[0] == 200
    assert refused(ask(two, sealed.request())) == (400, "envelope_rejected")
    assert counted(two, "replayed") == before + 1
    assert len(upstream.seen) == 1


def test_many_different_envelopes_are_all_taken(replicas, upstream, channel):
    clients = [Client(replicas[i % 2].sealed) for i in range(MANY)]
    sealed = [channel.seal(CHAT, stream=bool(i % 3)) for i in range(MANY)]
    for client, one in zip(clients, sealed, strict=True):
        client.send(one.request())
    for client, one in zip(clients, sealed, strict=True):
        assert one.open(client.answer())[0] == 200
        client.close()
    assert len(upstream.seen) == MANY


def test_an_entry_outlives_every_time_at_which_it_could_be_accepted(
    replicas, upstream, channel, store
):
    sealed = channel.seal(CHAT)
    before = set(store.keys())
    assert sealed.open(ask(replicas[0], sealed.request()))[0] == 200
    (entry,) = set(store.keys()) - before
    assert entry == f"smx1:{sealed.wire[8:16].hex()}:{sealed.wire[24:36].hex()}"
    life_ms = int(store.ask("PTTL", entry).strip(":\r\n"))
    assert 125_000 < life_ms <= 130_000


def test_a_forged_envelope_is_not_asked_for(replicas, upstream, channel, store):
    before = set(store.keys())
    sealed = channel.seal(CHAT)
    sealed.wire = sealed.wire[:-1] + bytes([sealed.wire[-1] ^ 1])
    assert refused(ask(replicas[0], sealed.request())) == (400, "envelope_rejected")
    assert set(store.keys()) == before
    assert upstream.seen == []


def test_a_caller_that_leaves_while_the_store_is_asked_leaves_nothing_behind(
    replicas, upstream, channel
):
    for stream in (False, True) * 8:
        client = Client(replicas[0].sealed)
        client.send(channel.seal(CHAT, stream=stream).request())
        client.reset()
    assert replicas[0].idle()
    sealed = channel.seal(CHAT)
    assert sealed.open(ask(replicas[0], sealed.request()))[0] == 200


def test_a_lost_store_refuses_and_one_that_forgot_is_fenced(
    tmp_path, backend, upstream, keys, channel
):
    with (
        RedisServer() as store,
        replica(
            tmp_path / "one", backend, keys, store, ENVELOPE_FENCE_S=1, ENVELOPE_AHEAD_S=1
        ) as sidecar,
    ):
        until(lambda: ready(sidecar), "ready")
        sealed = channel.seal(CHAT)
        assert sealed.open(ask(sidecar, sealed.request()))[0] == 200

        store.kill()
        until(lambda: "replay_store_lost" in unready(sidecar), "unready")
        answer = ask(sidecar, channel.seal(CHAT).request())
        assert refused(answer) == (503, "envelope_cache_full")
        assert answer.get("Retry-After")
        stream = channel.seal(CHAT, stream=True)
        assert refused(ask(sidecar, stream.request())) == (503, "envelope_cache_full")
        assert counted(sidecar, "store_lost") == 2
        assert sidecar.metric("tongguan_proxy_replay_store_losses_total") >= 1
        assert sidecar.ask(get()).status == 200  # the plain door serves on

        store.start()
        until(lambda: "start_fence_ms" in unready(sidecar), "fenced")
        # The store has forgotten it, its time is still good: only the fence refuses it.
        again = channel.seal(CHAT, time_ms=now_ms() - 100)
        assert refused(ask(sidecar, again.request())) == (400, "envelope_stale")
        until(lambda: ready(sidecar), "ready again")
        fresh = channel.seal(CHAT)
        assert fresh.open(ask(sidecar, fresh.request()))[0] == 200


def test_a_store_that_is_silent_is_lost_and_holds_nobody_else_up(
    tmp_path, backend, upstream, keys, channel
):
    with (
        RedisServer() as store,
        replica(
            tmp_path / "one", backend, keys, store, ENVELOPE_REPLAY_STORE_TIMEOUT_S=0.3
        ) as sidecar,
    ):
        until(lambda: ready(sidecar), "ready")
        store.stall()
        with Client(sidecar.sealed) as client:
            client.send(channel.seal(CHAT).request())
            begun = time.monotonic()
            assert sidecar.ask(get()).status == 200
            assert time.monotonic() - begun < 0.25
            assert refused(client.answer()) == (503, "envelope_cache_full")
        store.go_on()
        until(lambda: ready(sidecar), "ready again")
        sealed = channel.seal(CHAT)
        assert sealed.open(ask(sidecar, sealed.request()))[0] == 200


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"), "noeviction"),
        (("--maxmemory", "64mb", "--maxmemory-policy", "volatile-ttl"), "noeviction"),
        (("--requirepass", PASSWORD), "AUTH"),
        (("--replicaof", "127.0.0.1 1"), "replica"),
    ],
)
def test_a_store_that_cannot_be_relied_on_is_not_used(
    tmp_path, backend, upstream, keys, channel, options, word
):
    with (
        RedisServer(*options) as store,
        replica(tmp_path / "one", backend, keys, store) as sidecar,
    ):
        until(lambda: "replay store lost" in sidecar.log, "the log says so")
        assert word in sidecar.log
        assert "replay_store_lost" in unready(sidecar)
        sealed = channel.seal(CHAT)
        assert refused(ask(sidecar, sealed.request())) == (503, "envelope_cache_full")
        assert upstream.seen == []


def test_a_full_store_refuses_as_a_full_cache_does(tmp_path, backend, upstream, keys, channel):
    with (
        RedisServer() as store,
        replica(tmp_path / "one", backend, keys, store) as sidecar,
    ):
        until(lambda: ready(sidecar), "ready")
        store.ask("CONFIG", "SET", "maxmemory", "1")
        assert refused(ask(sidecar, channel.seal(CHAT).request())) == (503, "envelope_cache_full")
        assert (counted(sidecar, "cache_full"), counted(sidecar, "store_lost")) == (1, 0)
        assert ready(sidecar)
        assert upstream.seen == []


def test_the_password_comes_from_its_file_and_is_shown_nowhere(
    tmp_path, backend, upstream, keys, channel
):
    file = tmp_path / "password"
    file.write_text(PASSWORD + "\n")
    with (
        RedisServer("--requirepass", PASSWORD) as store,
        replica(
            tmp_path / "one",
            backend,
            keys,
            store,
            ENVELOPE_REPLAY_STORE_PASSWORD_FILE=file,
        ) as sidecar,
    ):
        until(lambda: ready(sidecar), "ready")
        sealed = channel.seal(CHAT)
        assert sealed.open(ask(sidecar, sealed.request()))[0] == 200
        shown = sidecar.log.encode() + b"".join(
            sidecar.admin_ask("GET", path).body for path in ("/config", "/metrics", "/readyz")
        )
        assert PASSWORD.encode() not in shown


def test_workers_share_the_sealed_door_and_take_an_envelope_once(
    tmp_path, backend, keys, store, channel, upstream
):
    with replica(tmp_path / "s", backend, keys, store, WORKERS=4) as sidecar:
        until(lambda: sidecar.log_since.count("serving:") == 4, "all workers")
        until(lambda: ready(sidecar), "ready")
        for _ in range(4):
            sealed = channel.seal(CHAT)
            answers = [ask(sidecar, sealed.request()) for _ in range(12)]
            taken = [answer for answer in answers if answer.status == 200]
            assert len(taken) == 1
            assert sealed.open(taken[0])[0] == 200
        assert sidecar.metric("tongguan_proxy_envelopes_opened_total") == 4
        assert counted(sidecar, "replayed") == 44
        for stream in (False, True):
            sealed = channel.seal(CHAT, stream=stream)
            answers = at_once(sealed, [sidecar.sealed] * MANY)
            assert sorted(a.status for a in answers) == [200] + [400] * (MANY - 1)
        assert counted(sidecar, "replayed") == 44 + 2 * (MANY - 1)
    assert len(upstream.seen) == 6
