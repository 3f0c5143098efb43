"""Live reload: what changes while requests run, what does not, and that it is all or nothing."""

import json
import signal
import threading

import pytest

from tests.blackbox.channel import Channel
from tests.blackbox.harness import (
    LAST_CHUNK,
    SSE_HEAD,
    Client,
    Sidecar,
    Upstream,
    chunk,
    get,
    new_keys,
    ok,
    post,
    tongguan,
    until,
)

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
POOLS = ("dedicated", "shared", "best_effort")
AUDIENCE = "local/default/reload-test"


@pytest.fixture(scope="module")
def first():
    with Upstream() as backend:
        yield backend


@pytest.fixture(scope="module")
def second():
    with Upstream() as backend:
        yield backend


@pytest.fixture
def upstreams(first, second):
    yield first.answering(ok), second.answering(ok)
    assert first.problems == second.problems == []


def toml(backend, text=""):
    rows = "".join(f'[pools.{pool}]\nendpoints = ["{backend.url}"]\n' for pool in POOLS)
    return f"{text}\n{rows}"


def swap(path, content, mode=None):
    """Replace a file in one step, as `kubectl` and careful people do."""
    made = path.with_name(f".{path.name}.new")
    made.write_text(content)
    if mode is not None:
        made.chmod(mode)
    made.rename(path)


class Live(Sidecar):
    """A sidecar whose endpoints stand in its settings file."""

    def __init__(self, folder, backend, *, text="", poll_s=60, **options):
        """`poll_s`: long, so that each reload is one that was asked for."""
        super().__init__(folder, backend.url, toml=toml(backend, text), **options)
        self.environ["TONGGUAN_KEYS_POLL_S"] = str(poll_s)
        for pool in POOLS:
            del self.environ[f"TONGGUAN_POOLS_{pool.upper()}_ENDPOINTS"]

    def reloads(self, result="ok"):
        return self.metric("tongguan_proxy_reload_total", result=result)

    def change(self, backend, text="", *, result="ok"):
        """Write settings, ask for them, wait until they are taken or refused."""
        before = self.reloads(result)
        swap(self.config, toml(backend, text))
        return self.again(before, result)

    def again(self, before, result="ok"):
        """Ask for a reload and wait for it; return the log since then."""
        mark = len(self.log)
        self.signal(signal.SIGHUP)
        until(lambda: self.reloads(result) > before, f"a reload: {result}")
        return self.log[mark:]

    def settings(self):
        return json.loads(self.admin_ask("GET", "/config").body)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return new_keys(tmp_path_factory.mktemp("keys"), "--audience", AUDIENCE)


@pytest.fixture
def own_keys(tmp_path, keys):
    """Yield a folder of keys that a test may change."""
    folder = tmp_path / "keys"
    folder.mkdir(0o700)
    for name in ("sidecar.json", "client.json", "auditor.json"):
        swap(folder / name, (keys / name).read_text(), 0o600)
    return folder


@pytest.fixture
def live(tmp_path, upstreams, own_keys):
    with Live(tmp_path / "s", upstreams[0], keys=own_keys) as sidecar:
        yield sidecar


class Standing:
    """A stream that stands after its first event until `go` is set."""

    def __init__(self):
        self.go = threading.Event()

    def __call__(self, seen):
        if b"stream" not in seen.body():
            seen.reply(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nfirst")
            return
        seen.reply(SSE_HEAD + chunk(b"data: 1\n\n"))
        self.go.wait(30)
        seen.wire.send(chunk(b"data: [DONE]\n\n") + LAST_CHUNK)


def test_reload_under_load_fails_no_request_and_drops_no_stream(live, upstreams):
    first, second = upstreams
    standing = Standing()
    first.answering(standing)
    second.answering(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nsecond")
    bodies, problems, stop = set(), [], threading.Event()

    def load():
        with live.client() as client:
            while not stop.is_set():
                answer = client.send(post(CHAT)).answer()
                bodies.add(answer.body)
                if answer.status != 200:
                    problems.append(answer.raw)

    loaders = [threading.Thread(target=load) for _ in range(4)]
    streams = [live.client() for _ in range(8)]
    for stream in streams:
        stream.send(post(b'{"stream":true}'))
        assert stream.head().status == 200
    for loader in loaders:
        loader.start()
    until(lambda: b"first" in bodies, "load")
    for _ in range(3):
        live.change(second)
        until(lambda: b"second" in bodies, "the second upstream")
        bodies.clear()
        live.change(first)
        until(lambda: b"first" in bodies, "the first upstream")
        bodies.clear()
    live.change(second)
    bodies.clear()
    until(lambda: bodies, "load")
    stop.set()
    for loader in loaders:
        loader.join()
    assert problems == []
    assert bodies == {b"second"}
    standing.go.set()
    for stream in streams:
        payload, _ = stream.chunked()
        assert payload == b"data: 1\n\ndata: [DONE]\n\n"
        # The same connection, and now the new settings.
        assert stream.send(post(CHAT)).answer().body == b"second"
        stream.close()
    assert live.idle()


def test_file_is_watched_and_a_swapped_directory_is_seen(tmp_path, upstreams):
    first, second = upstreams
    with Live(tmp_path / "s", first, poll_s=0.5) as plain:
        command, environ = plain.command, plain.environ
    mount = tmp_path / "mount"
    for name, backend in (("..1", first), ("..2", second)):
        (mount / name).mkdir(parents=True)
        (mount / name / "tongguan.toml").write_text(toml(backend))
    (mount / "..data").symlink_to("..1")
    (mount / "tongguan.toml").symlink_to("..data/tongguan.toml")
    with Live(tmp_path / "s2", first) as sidecar:
        sidecar.kill()
        sidecar.command, sidecar.environ = [*command[:-1], str(mount)], environ
        sidecar.app, sidecar.sealed, sidecar.admin = plain.app, plain.sealed, plain.admin
        sidecar.start()
        loaded = sidecar.metric("tongguan_proxy_reload_last_success_timestamp_seconds")
        assert loaded > 1e9
        sidecar.ask(get())
        assert (len(first.seen), len(second.seen)) == (1, 0)
        (mount / "..tmp").symlink_to("..2")
        (mount / "..tmp").rename(mount / "..data")
        until(sidecar.reloads, "a reload that nobody asked for")
        sidecar.ask(get())
        assert (len(first.seen), len(second.seen)) == (1, 1)
        stamp = sidecar.metric("tongguan_proxy_reload_last_success_timestamp_seconds")
        assert stamp > loaded


def test_bad_file_changes_nothing_and_names_all_mistakes_in_one_line(live, upstreams):
    before = live.settings()
    text = 'nonsense = 1\n[limits]\nbody_bytes = "x"\n[qos]\ndefault_class = "P7"'
    log = live.change(upstreams[1], text, result="failed")
    lines = [line for line in log.splitlines() if "not reloaded" in line]
    assert len(lines) == 1
    for name in ("nonsense", "limits.body_bytes", "qos.default_class"):
        assert name in lines[0]
    assert live.settings() == before
    live.ask(post(CHAT))
    assert len(upstreams[0].seen) == 1
    live.change(upstreams[1])
    live.ask(post(CHAT))
    assert len(upstreams[1].seen) == 1


def test_good_settings_with_a_bad_key_file_change_nothing(live, upstreams, own_keys):
    key_file = own_keys / "sidecar.json"
    good = key_file.read_text()
    swap(key_file, good[:-40], 0o600)
    before = live.reloads("failed")
    log = live.change(upstreams[1], "log_level = 'debug'", result="failed")
    assert live.reloads("failed") > before
    assert "keys.file" in log
    assert live.settings()["log_level"] == "info"
    live.ask(post(CHAT))
    assert len(upstreams[0].seen) == 1
    swap(key_file, good, 0o600)
    live.change(upstreams[1])


def test_variables_still_win_over_the_file(tmp_path, upstreams):
    with Live(tmp_path / "s", upstreams[0], LIMITS_BODY_BYTES=2048) as sidecar:
        sidecar.change(upstreams[0], "[limits]\nbody_bytes = 4096\nfields = 9")
        settings = sidecar.settings()["limits"]
        assert (settings["body_bytes"], settings["fields"]) == (2048, 9)


def test_what_needs_a_restart_is_named_and_kept(live, upstreams):
    text = '[identity]\nnode = "other"\n[doors]\nbacklog = 7\nconnections = 99\n'
    text += "[envelope]\nwindow_s = 10\n[audit]\nheartbeat_s = 9"
    log = live.change(upstreams[0], text)
    line = next(row for row in log.splitlines() if "before a restart" in row)
    names = line.rpartition(": ")[2].split(", ")
    assert names == ["audit.heartbeat_s", "doors.backlog", "envelope.window_s", "identity.node"]
    settings = live.settings()
    assert settings["doors"]["connections"] == 99
    assert (settings["doors"]["backlog"], settings["envelope"]["window_s"]) == (1024, 60)


def test_new_limits_are_for_new_requests(live, upstreams):
    with live.client() as client:
        head, body = post(b"x" * 5000, b"Expect: 100-continue").split(b"\r\n\r\n")
        client.send(head + b"\r\n\r\n")
        assert client.head().status == 100
        live.change(upstreams[0], "[limits]\nbody_bytes = 1024\n[tenants.default]\nmax_class='P0'")
        answer = client.send(body).answer()
        assert (answer.status, answer.get("X-QoS-Class")) == (200, b"P1")
        client.send(post(b"x" * 5000))
        assert client.answer().error() == "payload_too_large"
    assert live.ask(post(CHAT, b"X-QoS-Class: P0")).get("X-QoS-Class") == b"P0"


def test_places_taken_before_a_reload_count_after_it(live, upstreams):
    standing = Standing()
    upstreams[0].answering(standing)
    text = "[qos.p0]\ninflight = 1\n[tenants.default]\nmax_class = 'P0'"
    live.change(upstreams[0], text)
    with live.client() as client:
        client.send(post(b'{"stream":true}', b"X-QoS-Class: P0"))
        assert client.head().status == 200
        live.change(upstreams[1], text)
        assert live.metric("tongguan_proxy_pool_inflight", pool="dedicated") == 1
        assert live.ask(post(CHAT, b"X-QoS-Class: P0")).error() == "queue_full"
        standing.go.set()
        client.chunked()
    assert live.ask(post(CHAT, b"X-QoS-Class: P0")).status == 200
    assert live.idle()


def test_new_credential_goes_upstream_and_not_into_the_log(tmp_path, upstreams):
    secret = tmp_path / "secret"
    secret.write_text("Bearer old-credential")
    with Live(tmp_path / "s", upstreams[0], POOLS_SHARED_AUTHORIZATION_FILE=secret) as sidecar:
        sidecar.ask(post(CHAT))
        assert upstreams[0].last().get("Authorization") == b"Bearer old-credential"
        before = sidecar.reloads()
        swap(secret, "Bearer new-credential\n")
        sidecar.again(before)
        sidecar.ask(post(CHAT))
        assert upstreams[0].last().get("Authorization") == b"Bearer new-credential"
        before = sidecar.reloads("failed")
        secret.unlink()
        assert "authorization_file" in sidecar.again(before, "failed")
        sidecar.ask(post(CHAT))
        assert upstreams[0].last().get("Authorization") == b"Bearer new-credential"
        assert "-credential" not in sidecar.log


# --- keys


def sealed_ask(sidecar, sealed):
    with Client(sidecar.sealed) as client:
        return client.send(sealed.request()).answer()


def rows(folder):
    return json.loads((folder / "sidecar.json").read_text())


def rewrite(folder, document):
    swap(folder / "sidecar.json", json.dumps(document), 0o600)


def test_keys_come_and_go_and_the_replay_cache_stays(live, own_keys, tmp_path):
    more = new_keys(tmp_path / "more", "--audience", AUDIENCE)
    old, new = Channel(own_keys / "client.json"), Channel(more / "client.json")
    used = old.seal(CHAT)
    assert used.open(sealed_ask(live, used))[0] == 200
    assert sealed_ask(live, new.seal(CHAT)).error() == "envelope_rejected"

    document = rows(own_keys)
    both = document["envelope_keys"] + rows(more)["envelope_keys"]
    rewrite(own_keys, document | {"envelope_keys": both})
    live.again(live.reloads())
    fresh = new.seal(CHAT)
    assert fresh.open(sealed_ask(live, fresh))[0] == 200
    failures = live.metric("tongguan_proxy_envelope_failures_total", reason="replayed")
    assert sealed_ask(live, used).status == 400
    again = live.metric("tongguan_proxy_envelope_failures_total", reason="replayed")
    assert again == failures + 1

    rewrite(own_keys, document | {"envelope_keys": rows(more)["envelope_keys"]})
    live.again(live.reloads())
    assert sealed_ask(live, old.seal(CHAT)).error() == "envelope_rejected"
    fresh = new.seal(CHAT)
    assert fresh.open(sealed_ask(live, fresh))[0] == 200


def test_sealed_request_under_way_is_answered_though_its_key_goes(
    live, upstreams, own_keys, tmp_path
):
    standing = Standing()
    upstreams[0].answering(standing)
    more = new_keys(tmp_path / "more", "--audience", AUDIENCE)
    sealed = Channel(own_keys / "client.json").seal(b'{"stream":true}')
    with Client(live.sealed) as client:
        client.send(sealed.request(accept="text/event-stream"))
        head = client.head()
        document = rows(own_keys)
        rewrite(own_keys, document | {"envelope_keys": rows(more)["envelope_keys"]})
        live.again(live.reloads())
        standing.go.set()
        payload, _ = client.chunked()
    opener = sealed.opener(head)
    body = b"".join(opener.feed(payload)) + opener.finish()
    assert opener.complete
    assert body == b"data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("how", ["other contents", "other audience", "no keys", "readable", "gone"])
def test_key_file_that_cannot_be_taken_leaves_the_keys_as_they_are(
    live, upstreams, own_keys, tmp_path, how
):
    document = rows(own_keys)
    if how == "other contents":
        document["envelope_keys"][0]["root"] = "ab" * 32
    elif how == "other audience":
        document = rows(new_keys(tmp_path / "others"))
    elif how == "no keys":
        document["envelope_keys"] = []
    if how == "gone":
        (own_keys / "sidecar.json").unlink()
    else:
        rewrite(own_keys, document)
    if how == "readable":
        (own_keys / "sidecar.json").chmod(0o644)
    log = live.change(upstreams[1], result="failed")
    assert "not reloaded" in log
    assert document["envelope_keys"] == [] or document["envelope_keys"][0]["root"] not in log
    sealed = Channel(own_keys / "client.json").seal(CHAT)
    assert sealed.open(sealed_ask(live, sealed))[0] == 200
    assert (len(upstreams[0].seen), len(upstreams[1].seen)) == (1, 0)


def test_new_chain_seed_waits_for_a_restart_and_the_chain_names_the_reload(
    live, own_keys, tmp_path
):
    document = rows(own_keys)
    document["chain_seeds"][0]["seed"] = "cd" * 32
    rewrite(own_keys, document)
    assert "before a restart: keys.file: chain seed" in live.again(live.reloads())
    live.ask(post(CHAT))
    live.signal(signal.SIGTERM)
    assert live.ended() == 0
    decisions = [r for r in live.records() if r["kind"] == "decision"]
    assert [r["what"] for r in decisions] == ["reload"]
    genesis = next(r for r in live.records() if r["kind"] == "genesis")
    assert decisions[0]["config_sha256"] == genesis["config_sha256"]
    done = tongguan("audit", "verify", live.audit_dir, "--keys", own_keys / "auditor.json")
    assert done.returncode == 0, done.stdout
