"""Keys from a key service: the wire, leases with an injected clock, back-off, what is not said.

The service is a small stand-in (`key_sources.Kv2Server`), not Vault itself.
"""

from __future__ import annotations

import json
import threading

import pytest

from proxy.config_keys import Keys
from proxy.keys import service
from proxy.keys.provider import KeySourceError
from proxy.keys.service import HttpProvider, backoff_s
from tests.unit.proxy.key_sources import NOW_MS, TOKEN, key, kv2, sidecar

PROMPTS = {"one": b"\x01" * 32}
MINUTE_MS = 60_000


class Clock:
    """Wall and boot time, moved by hand."""

    def __init__(self):
        self.now_ms = NOW_MS

    def wall(self):
        return self.now_ms

    def boot(self):
        return self.now_ms - NOW_MS + 5_000


@pytest.fixture
def server():
    with kv2() as server:
        yield server


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def make(server, clock, tmp_path):
    made = []
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    token.chmod(0o600)

    def provider(**changes):
        row = {"http_address": server.address, "http_token_file": str(token), "http_timeout_s": 5.0}
        thread = changes.pop("thread", False)
        settings = Keys(provider="http", **(row | changes))
        made.append(HttpProvider(settings, clock.wall, clock.boot, thread=thread))
        return made[-1]

    yield provider
    for one in made:
        one.close()
        one._client.close()


def kids(provider):
    return [found.kid for found in provider.load().envelope_keys()]


# --- the wire


def test_a_secret_is_a_key_file_s_object_and_its_version_is_the_prompt_keys(server, make):
    server.put("tongguan", sidecar(key(1)))
    server.put("tongguan", sidecar(key(1), key(2), prompts=PROMPTS, seeds=[("s1", bytes(32))]))
    keys = make().load()
    assert [found.kid for found in keys.envelope_keys()] == [key(1).kid, key(2).kid]
    assert keys.get("prompt/one").version == "2"
    assert keys.chain_seed() == ("s1", bytes(32))
    ((method, path, headers),) = server.seen
    assert (method, path) == ("GET", "/v1/secret/data/tongguan")
    assert headers["X-Vault-Token"] == TOKEN
    assert headers["X-Vault-Request"] == "true"
    assert "X-Vault-Namespace" not in headers


def test_a_folder_s_secrets_are_the_keys_together(server, make):
    server.put("pods/a/one", sidecar(key(1)))
    server.put("pods/a/two", sidecar(key(2)))
    server.put("pods/a/deeper/three", sidecar(key(3)))
    server.put("pods/b", sidecar(key(4)))
    assert kids(make(http_path="pods/a/")) == [key(1).kid, key(2).kid]
    assert [row[:2] for row in server.seen] == [
        ("LIST", "/v1/secret/metadata/pods/a/"),
        ("GET", "/v1/secret/data/pods/a/one"),
        ("GET", "/v1/secret/data/pods/a/two"),
    ]


def test_namespace_and_mount_are_asked_for_as_they_are_set(make, server):
    server.namespace, server.mount_at = "team/a", "kv/prod"
    server.put("x", sidecar(key(1)))
    assert kids(make(http_namespace="team/a", http_mount="kv/prod", http_path="x")) == [key(1).kid]
    assert server.seen[0][2]["X-Vault-Namespace"] == "team/a"


def test_the_connection_is_kept_and_one_that_the_service_closed_is_made_again(server, make):
    server.put("tongguan", sidecar(key(1)))
    provider = make()
    provider.load()
    before = provider._client._connection
    provider.poll()
    assert provider._client._connection is before
    before.sock.shutdown(2)
    provider.poll()
    assert provider.state().ok
    assert provider._client._connection is not None


def test_a_token_that_is_renewed_is_read_again(server, make, tmp_path):
    server.put("tongguan", sidecar(key(1)))
    provider = make()
    provider.load()
    server.token = "s.another-and-longer-one"
    provider.poll()
    assert (provider.state().ok, provider.state().reason) == (False, "forbidden")
    (tmp_path / "token").write_text(server.token)
    provider.poll()
    assert provider.state().ok


# --- what goes wrong


def away(server):
    server.away = True


def slow(server):
    server.delay_s = 0.4


def status(number):
    return lambda server: setattr(server, "status", number)


def answer(data):
    return lambda server: setattr(server, "answer", data)


FAULTS = {
    "unreachable": away,
    "timeout": slow,
    "forbidden": status(403),
    "not_found": status(404),
    "busy": status(429),
    "sealed": status(503),
    "service_error": status(500),
    "bad_answer": answer(b"<html>"),
    "refused": lambda server: server.put("tongguan", {"format": "tongguan-keys/1"}),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_each_fault_has_its_word_and_shows_no_secret(server, make, clock, reason):
    held = sidecar(key(1), prompts=PROMPTS)
    server.put("tongguan", held)
    provider = make(http_timeout_s=0.2)
    provider.load()
    clock.now_ms += 7
    FAULTS[reason](server)
    provider.poll()
    state = provider.state()
    assert (state.ok, state.reason, state.since_ms) == (False, reason, NOW_MS + 7)
    assert "tongguan" in state.problem
    for secret in (TOKEN, held.envelope_keys[0].root.hex(), PROMPTS["one"].hex()):
        assert secret not in state.problem
    assert kids(provider) == [key(1).kid]


@pytest.mark.parametrize("reason", FAULTS)
def test_a_first_load_that_fails_says_why(server, make, reason):
    if reason != "refused":
        server.put("tongguan", sidecar(key(1)))
    FAULTS[reason](server)
    with pytest.raises(KeySourceError, match="tongguan"):
        make(http_timeout_s=0.2).load()


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (TOKEN, 0o644, "lets others at the keys"),
        ("two\nlines", 0o600, "expected one line, a token"),
        ("", 0o600, "expected one line, a token"),
        ("a b", 0o600, "expected one line, a token"),
        (None, 0, "No such file"),
    ],
)
def test_a_token_file_that_is_refused(make, tmp_path, content, mode, problem):
    file = tmp_path / "other"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    with pytest.raises(KeySourceError, match=problem) as caught:
        make(http_token_file=str(file)).load()
    assert "keys.http_token_file" in str(caught.value)
    assert not content or content not in str(caught.value)


def test_a_certificate_file_that_cannot_be_read_is_named(make, tmp_path):
    with pytest.raises(KeySourceError, match=r"keys.http_ca_file"):
        make(http_address="https://localhost:1", http_ca_file=str(tmp_path / "no"))


def test_a_folder_of_too_many_secrets_is_refused(server, make, monkeypatch):
    monkeypatch.setattr(service, "SECRETS_MAX", 1)
    server.put("f/a", sidecar(key(1)))
    server.put("f/b", sidecar(key(2)))
    with pytest.raises(KeySourceError, match="more than 1 secrets"):
        make(http_path="f/").load()


# --- leases


def test_an_outage_of_ten_minutes_costs_no_key_while_leases_live(server, make, clock):
    server.put("tongguan", sidecar(key(1), prompts=PROMPTS))
    provider = make(http_lease_s=3600.0)
    provider.load()
    mark = provider.mark()
    server.away = True
    for _ in range(600):
        clock.now_ms += 1000
        if clock.now_ms % 60_000 == 0:
            provider.poll()
        assert provider.mark() == mark
    state = provider.state()
    assert (state.ok, state.reason) == (False, "unreachable")
    assert state.since_ms == NOW_MS + MINUTE_MS
    assert state.lease_until_ms == NOW_MS + 3_600_000
    assert kids(provider) == [key(1).kid]
    server.away = False
    provider.poll()
    assert provider.state().ok
    assert provider.mark() == mark
    assert provider.state().lease_until_ms == NOW_MS + 600_000 + 3_600_000


def test_a_lease_that_is_over_withdraws_the_envelope_keys_and_leaves_the_log_its_own(
    server, make, clock
):
    server.put("tongguan", sidecar(key(1), prompts=PROMPTS, seeds=[("s1", bytes(32))]))
    provider = make(http_lease_s=60.0)
    provider.load()
    mark = provider.mark()
    server.away = True
    clock.now_ms += MINUTE_MS
    assert provider.mark() == mark
    clock.now_ms += 1
    assert provider.mark() != mark
    keys = provider.load()
    assert keys.envelope_keys() == []
    assert keys.audiences() == {"local/default/pod"}
    assert keys.prompt_key("one") == PROMPTS["one"]
    assert keys.chain_seed() == ("s1", bytes(32))
    server.away = False
    provider.poll()
    assert provider.mark() == mark
    assert kids(provider) == [key(1).kid]


def test_a_lease_that_the_service_names_is_kept_if_it_is_shorter(server, make):
    server.put("tongguan", sidecar(key(1)))
    server.lease_s = 30
    provider = make(http_lease_s=60.0)
    provider.load()
    assert provider.state().lease_until_ms == NOW_MS + 30_000
    server.lease_s = 90
    provider.poll()
    assert provider.state().lease_until_ms == NOW_MS + 60_000


def test_a_step_of_the_wall_clock_moves_no_lease(server, make, clock):
    server.put("tongguan", sidecar(key(1)))
    provider = make(http_lease_s=60.0)
    provider._clock_ms = lambda: clock.now_ms + 10**9
    provider.load()
    clock.now_ms += MINUTE_MS
    assert kids(provider) == [key(1).kid]


def test_waits_grow_with_failures_and_have_a_bound():
    assert [backoff_s(0.5, failures) for failures in range(7)] == [0.5, 1, 2, 4, 8, 10, 10]
    assert backoff_s(0.5, 10**6) == 10
    assert backoff_s(60.0, 0) == backoff_s(60.0, 9) == 60


# --- changes


def test_a_change_is_a_new_mark_and_what_stayed_are_the_same_objects(server, make):
    server.put("f/a", sidecar(key(1)))
    server.put("f/b", sidecar(key(2)))
    provider = make(http_path="f/")
    before = provider.load().envelope_keys()
    mark = provider.mark()
    server.put("f/b", sidecar(key(2), key(3)))
    provider.poll()
    assert provider.mark() != mark
    after = provider.load().envelope_keys()
    assert after[0] is before[0]
    assert [found.kid for found in after] == [key(1).kid, key(2).kid, key(3).kid]
    del server.secrets["f/a"]
    provider.poll()
    assert kids(provider) == [key(2).kid, key(3).kid]


def test_keys_whose_grace_is_over_are_not_held(server, make, clock):
    server.put("tongguan", sidecar(key(1, not_after_ms=NOW_MS + 1000), key(2)))
    provider = make(http_lease_s=1e6)
    provider.load()
    clock.now_ms += 1000 + 3 * 600_000 + 1
    provider.poll()
    held = provider._held
    assert [found.kid for found in held.contents.envelope_keys] == [key(2).kid]
    assert [k.kid for _, file, _ in held.parts.values() for k in file.envelope_keys] == [key(2).kid]


def test_the_thread_asks_by_itself_and_ends(server, make):
    server.put("tongguan", sidecar(key(1)))
    provider = make(thread=True, poll_s=0.1)
    provider.load()
    mark, changed = provider.mark(), threading.Event()
    server.put("tongguan", sidecar(key(2)))
    for _ in range(200):
        if provider.mark() != mark or changed.wait(0.02):
            break
    assert kids(provider) == [key(2).kid]
    provider.close()
    assert not provider._thread.is_alive()


# --- destruction


def test_a_destroyed_secret_is_gone_in_every_version(server, make):
    first = sidecar(key(1), prompts=PROMPTS)
    server.put("f/a", first)
    server.put("f/a", first)
    server.put("f/b", sidecar(key(2)))
    provider = make(http_path="f/")
    provider.load()
    provider.destroy("prompt/one")
    assert [version is None for version in server.secrets["f/a"]] == [True, True, False]
    assert PROMPTS["one"].hex() not in json.dumps(server.secrets)
    assert len(server.secrets["f/b"]) == 1
    provider.poll()
    assert provider.load().prompt_key("one") is None
    assert kids(provider) == [key(1).kid, key(2).kid]
    with pytest.raises(KeySourceError, match="no secret of the name prompt/one"):
        provider.destroy("prompt/one")


def test_a_secret_that_changed_in_between_is_not_overwritten(server, make, monkeypatch):
    server.put("tongguan", sidecar(key(1), prompts=PROMPTS))
    provider = make()
    provider.load()
    read = provider._client.read

    def overtaken(path):
        found = read(path)
        server.put("tongguan", sidecar(key(2), prompts=PROMPTS))
        return found

    monkeypatch.setattr(provider._client, "read", overtaken)
    with pytest.raises(KeySourceError, match="400"):
        provider.destroy("prompt/one")
    assert len(server.secrets["tongguan"]) == 2
