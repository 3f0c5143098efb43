"""The interface for key material: names, versions, what a file's provider destroys and says."""

from __future__ import annotations

import os

import pytest

from proxy.keys.file import read
from proxy.keys.issue import Order, issue, write
from proxy.keys.local import FileProvider, without
from proxy.keys.provider import NEVER_MS, KeySet, KeySourceError, Secret, Standing, State

NOW_MS = 1_800_000_000_000


@pytest.fixture
def files(tmp_path):
    order = Order(audience="a/b/c", client="client", tenants=("one", "two"), sign="ed25519")
    made = issue(order, now_ms=NOW_MS, random=os.urandom)
    write(tmp_path, made, force=False, suffix="1")
    return made


def test_every_secret_has_a_name_a_version_and_its_validity(files):
    contents = files["sidecar"]
    found = {secret.name: secret for secret in KeySet(contents).secrets()}
    (key,) = contents.envelope_keys
    (seed_id, seed) = contents.chain_seeds[0]
    (name, scheme, private) = contents.checkpoint_keys[0]
    kid = key.kid.hex()
    assert found == {
        f"envelope/{kid}": Secret(
            f"envelope/{kid}", kid, key.root, key.not_before_ms, key.not_after_ms, "ed25519"
        ),
        "prompt/one": Secret("prompt/one", "1", contents.prompt_keys["one"]),
        "prompt/two": Secret("prompt/two", "1", contents.prompt_keys["two"]),
        f"chain/{seed_id}": Secret(f"chain/{seed_id}", seed_id, seed),
        f"checkpoint/{name}/{scheme}": Secret(
            f"checkpoint/{name}/{scheme}", name, private, scheme=scheme
        ),
        "auditor/public": Secret("auditor/public", "1", contents.auditor_public),
    }
    assert found["prompt/one"].not_after_ms == NEVER_MS


def test_a_secret_shows_no_value(files):
    for secret in KeySet(files["sidecar"]).secrets():
        text = repr(secret)
        assert secret.value.hex() not in text
        assert repr(secret.value) not in text


def test_versions_are_the_provider_s_where_it_counts_them(files):
    keys = KeySet(files["sidecar"], versions={"prompt/one": "7"})
    assert keys.get("prompt/one").version == "7"
    assert keys.get("prompt/two").version == "1"
    assert keys.get("prompt/three") is None


@pytest.mark.parametrize("kind", ["envelope", "prompt", "chain", "checkpoint"])
def test_a_destroyed_secret_is_gone_from_the_file_and_the_rest_stays(files, tmp_path, kind):
    path = tmp_path / "sidecar.json"
    provider = FileProvider(path)
    before = {secret.name: secret for secret in provider.load().secrets()}
    name = next(name for name in before if name.startswith(kind))
    mark = provider.mark()
    provider.destroy(name)
    assert provider.mark() != mark
    after = {secret.name: secret for secret in provider.load().secrets()}
    assert after == {n: s for n, s in before.items() if n != name}
    assert before[name].value.hex() not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "auditor.json", "client.json", "sidecar.json",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["prompt/nobody", "envelope/00", "auditor/public", "", "prompt"])
def test_what_is_not_there_is_not_destroyed(files, tmp_path, name):
    path = tmp_path / "sidecar.json"
    before = path.read_bytes()
    with pytest.raises(KeySourceError, match="no secret of the name"):
        FileProvider(path).destroy(name)
    assert path.read_bytes() == before
    with pytest.raises(KeySourceError):
        without(read(path), name)


def test_a_file_that_is_refused_degrades_its_provider_until_it_is_good(files, tmp_path):
    path, times = tmp_path / "sidecar.json", iter([10, 20, 30, 40, 50])
    provider = FileProvider(path, clock_ms=lambda: next(times))
    assert provider.state() == State(ok=True, since_ms=10)
    path.chmod(0o644)
    for _ in range(2):
        with pytest.raises(KeySourceError, match="chmod 600"):
            provider.load()
    state = provider.state()
    assert (state.ok, state.since_ms, state.reason) == (False, 20, "file_refused")
    assert "run: chmod 600" in state.problem
    path.chmod(0o600)
    provider.load()
    assert provider.state() == State(ok=True, since_ms=30)
    path.unlink()
    with pytest.raises(KeySourceError, match="No such file"):
        provider.load()
    assert provider.state().since_ms == 40


def test_the_lease_that_was_given_stays_while_a_source_is_degraded():
    standing = Standing(lambda: 5)
    standing.good(lease_until_ms=99)
    standing.degraded("unreachable")
    assert standing.state() == State(ok=False, since_ms=5, reason="unreachable", lease_until_ms=99)
