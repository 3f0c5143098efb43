"""Keys of a running sidecar: revoked, from a mounted volume, from a key service that goes away.

The key service is a small stand-in (`tests/unit/proxy/key_sources.py`), not Vault itself.
"""

import contextlib
import json
import os
import time

import pytest

from proxy.keys.file import encode, read
from proxy.keys.issue import Order, issue
from tests.blackbox.channel import Channel
from tests.blackbox.harness import Sidecar, Upstream, new_keys, ok, tongguan, until
from tests.blackbox.test_sidecar_reload import sealed_ask
from tests.unit.proxy.key_sources import TOKEN, kv2, mount, sidecar

CHAT = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
AUDIENCE = "local/default/keys-test"


@pytest.fixture(scope="module")
def upstream():
    with Upstream() as backend:
        yield backend.answering(ok)


@pytest.fixture
def keys(tmp_path):
    return new_keys(tmp_path / "keys", "--audience", AUDIENCE)


def opened(live, channel):
    """Say whether a request sealed with this key is taken."""
    sealed = channel.seal(CHAT)
    answer = sealed_ask(live, sealed)
    with contextlib.suppress(AssertionError):
        return sealed.open(answer)[0] == 200
    return False


def readyz(live):
    answer = live.admin_ask("GET", "/readyz")
    return answer.status, json.loads(answer.body)


def test_a_revoked_key_is_refused_soon_and_another_serves_on(tmp_path, upstream, keys):
    with Sidecar(tmp_path / "s", upstream.url, keys=keys) as live:
        old = Channel(keys / "client.json")
        assert opened(live, old)
        status, report = readyz(live)
        assert (status, report["keys"]) == (200, {"live": 1, "kids": [old.key.kid.hex()]})
        assert tongguan("keys", "rotate", "--dir", keys, "--now").returncode == 0
        until(lambda: readyz(live)[1]["keys"]["live"] == 2, "the next key")
        fresh = Channel(keys / "client.json")
        fresh.key = read(keys / "client.json").envelope_keys[1]
        fresh.ring = type(fresh.ring)([fresh.key])
        assert opened(live, old)
        assert opened(live, fresh)
        assert tongguan("keys", "revoke", "--dir", keys, old.key.kid.hex()).returncode == 0
        until(lambda: not opened(live, old), "the revocation", wait_s=5)
        assert opened(live, fresh)
        assert live.metric("tongguan_proxy_keys_revoked") == 1
        name = "tongguan_proxy_keys_kid_live"
        assert live.metric(name, kid=fresh.key.kid.hex()) == 1
        assert tongguan("keys", "revoke", "--dir", keys, fresh.key.kid.hex()).returncode == 0
        until(lambda: "no_live_kid" in readyz(live)[1]["reasons"], "nothing live", wait_s=5)
        assert not opened(live, fresh)
        log = live.log
    assert old.key.root.hex() not in log
    assert fresh.key.root.hex() not in log


def ordered(count):
    """Return so many sets of keys for one audience: (receivers' files, clients' keys)."""
    now_ms = time.time_ns() // 1_000_000
    files, clients = {}, []
    for number in range(count):
        order = Order(audience=AUDIENCE, client=f"c{number}", tenants=("default",))
        made = issue(order, now_ms=now_ms, random=os.urandom)
        files[f"{number:04}.json"] = sidecar(*made["sidecar"].envelope_keys)
        clients.append(made["client"])
    return files, clients


def channel_of(client, folder):
    path = folder / f"{client.envelope_keys[0].client}.json"
    path.write_bytes(encode(client))
    path.chmod(0o600)
    return Channel(path)


def test_a_mounted_volume_is_swapped_while_requests_run(tmp_path, upstream):
    volume = tmp_path / "volume"
    files, clients = ordered(60)
    names = sorted(files)
    mount(volume, {name: files[name] for name in names[:40]})
    options = {
        "KEYS_PROVIDER": "directory", "KEYS_DIRECTORY": volume, "ENVELOPE_FENCE_S": 0,
    }  # fmt: skip
    first, last = channel_of(clients[0], tmp_path), channel_of(clients[59], tmp_path)
    stays = channel_of(clients[30], tmp_path)
    with Sidecar(tmp_path / "s", upstream.url, **options) as live:
        assert opened(live, first)
        assert not opened(live, last)
        mount(volume, {name: files[name] for name in names[20:]})
        until(lambda: (opened(live, last), opened(live, stays)) == (True, True), "the swap")
        assert not opened(live, first)
        assert readyz(live)[1]["keys"]["live"] == 40
        assert live.metric("tongguan_proxy_keys_known") == 40


def test_a_key_service_that_goes_away_costs_nothing_until_the_lease_is_over(tmp_path, upstream):
    files, clients = ordered(1)
    channel = channel_of(clients[0], tmp_path)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    with kv2() as server:
        server.put("tongguan", files["0000.json"])
        options = {
            "KEYS_PROVIDER": "http",
            "KEYS_HTTP_ADDRESS": server.address,
            "KEYS_HTTP_TOKEN_FILE": token,
            "KEYS_HTTP_LEASE_S": 6,
            "ENVELOPE_FENCE_S": 0,
        }
        with Sidecar(tmp_path / "s", upstream.url, **options) as live:
            assert opened(live, channel)
            server.away = True
            gone_s = time.monotonic()
            until(lambda: any("keys_degraded=" in n for n in readyz(live)[1]["notes"]), "a note")
            available = "tongguan_proxy_keys_provider_available"
            assert live.metric(available, provider="http") == 0
            assert live.metric("tongguan_proxy_keys_lease_seconds") > 0
            assert readyz(live)[0] == 200
            while time.monotonic() < gone_s + 3:
                assert opened(live, channel)
            until(lambda: "no_live_kid" in readyz(live)[1]["reasons"], "the lease's end")
            assert not opened(live, channel)
            server.away = False
            until(lambda: opened(live, channel), "the service's return")
            until(lambda: live.metric(available, provider="http") == 1, "its state")
            assert readyz(live)[0] == 200
            log = live.log
    assert "keys degraded: key service: no answer" in log
    assert TOKEN not in log
