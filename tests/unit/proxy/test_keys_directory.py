"""A directory of mounted secrets: what is read, when it is read anew, what is refused."""

from __future__ import annotations

import os
import stat
import types

import pytest

from proxy.keys.directory import FILES_MAX, DirectoryProvider
from proxy.keys.file import KeyFileError, check_access
from proxy.keys.provider import CannotDestroyError, KeySourceError
from proxy.keys.rotate import GRACE_MS
from tests.unit.proxy.key_sources import NOW_MS, key, mount, put, sidecar

SEED = ("seed1", bytes(32))


def kids(provider):
    return [found.kid for found in provider.load().envelope_keys()]


def test_all_files_together_are_the_keys_in_order_of_their_names(tmp_path):
    signs = ("tongguan-1", "ed25519", b"\x05" * 32)
    put(tmp_path / "b.json", sidecar(key(2), prompts={"two": b"\x02" * 32}, seeds=[SEED]))
    put(tmp_path / "a.json", sidecar(key(1), prompts={"one": b"\x01" * 32}, auditor=b"\x03" * 32))
    put(tmp_path / "c.json", sidecar(seeds=[("seed2", b"\x04" * 32)], signs=[signs]))
    (tmp_path / "README").write_text("not looked at")
    (tmp_path / ".hidden.json").write_text("not looked at")
    keys = DirectoryProvider(tmp_path).load()
    assert [found.kid for found in keys.envelope_keys()] == [key(1).kid, key(2).kid]
    assert (keys.prompt_key("one"), keys.prompt_key("two")) == (b"\x01" * 32, b"\x02" * 32)
    assert keys.chain_seed() == ("seed2", b"\x04" * 32)
    assert keys.auditor_public() == b"\x03" * 32
    assert keys.checkpoint_keys() == (signs,)
    assert keys.audiences() == {"local/default/pod"}


def test_a_swapped_volume_is_seen_and_read_whole(tmp_path):
    one, two, three = key(1), key(2), key(3)
    mount(tmp_path, {"a.json": sidecar(one), "b.json": sidecar(two)})
    provider = DirectoryProvider(tmp_path)
    assert kids(provider) == [one.kid, two.kid]
    mark = provider.mark()
    assert provider.mark() == mark
    mount(tmp_path, {"b.json": sidecar(two), "c.json": sidecar(three)})
    assert provider.mark() != mark
    assert kids(provider) == [two.kid, three.kid]


def test_contents_that_did_not_change_stay_the_same_objects(tmp_path):
    files = {f"{number}.json": sidecar(key(number)) for number in range(5)}
    mount(tmp_path, files)
    provider = DirectoryProvider(tmp_path)
    before = provider.load().envelope_keys()
    mount(tmp_path, files | {"3.json": sidecar(key(9))})
    after = provider.load().envelope_keys()
    assert [a is b for a, b in zip(before, after, strict=True)] == [True, True, True, False, True]


def test_a_file_that_changes_in_a_plain_directory_is_seen(tmp_path):
    put(tmp_path / "a.json", sidecar(key(1)))
    provider = DirectoryProvider(tmp_path)
    assert kids(provider) == [key(1).kid]
    for change in (
        lambda: put(tmp_path / "a.json", sidecar(key(1), key(2))),
        lambda: put(tmp_path / "b.json", sidecar(key(3))),
        (tmp_path / "a.json").unlink,
    ):
        mark = provider.mark()
        change()
        assert provider.mark() != mark
    assert kids(provider) == [key(3).kid]


def test_a_directory_that_changes_while_it_is_read_is_read_again(tmp_path, monkeypatch):
    put(tmp_path / "a.json", sidecar(key(1)))
    provider = DirectoryProvider(tmp_path)
    files, times = provider._files, iter(range(9))

    def changing():
        found = files()
        if next(times) < 2:
            put(tmp_path / "b.json", sidecar(key(2)))
        return found

    monkeypatch.setattr(provider, "_files", changing)
    assert kids(provider) == [key(1).kid, key(2).kid]
    assert next(times) == 3
    times = iter([0] * 9)
    with pytest.raises(KeySourceError, match="changed 5 times while it was read"):
        provider.load()


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (sidecar(key(1), prompts={"one": b"\x09" * 32}), "b.json: a prompt key of an earlier"),
        (sidecar(seeds=[("seed1", b"\x09" * 32)]), "b.json: a chain seed of an earlier file"),
        (sidecar(auditor=b"\x09" * 32), "b.json: auditor_public is another one"),
        (b'{"format": "tongguan-keys/1", "role": "client"}', "b.json: made for the client"),
        (b"{", "b.json: not a JSON key file"),
        (b'{"format": "tongguan-keys/1", "role": "sidecar", "envelope_keys": [{}]}',
         r"b.json: envelope_keys\[0\].kid: missing"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_whole_and_names_the_file(tmp_path, second, problem):
    first = sidecar(prompts={"one": b"\x01" * 32}, seeds=[SEED], auditor=b"\x03" * 32)
    put(tmp_path / "a.json", first)
    provider = DirectoryProvider(tmp_path, clock_ms=lambda: NOW_MS)
    provider.load()
    put(tmp_path / "b.json", second)
    with pytest.raises(KeySourceError, match=problem) as caught:
        provider.load()
    assert "09" * 16 not in str(caught.value)
    state = provider.state()
    assert (state.ok, state.reason, state.since_ms) == (False, "directory_refused", NOW_MS)
    assert state.problem == str(caught.value)
    (tmp_path / "b.json").unlink()
    provider.load()
    assert provider.state().ok


def test_a_directory_that_is_gone_is_said_to_be(tmp_path):
    provider = DirectoryProvider(tmp_path / "no")
    with pytest.raises(KeySourceError, match="No such file or directory"):
        provider.load()
    assert provider.state().reason == "directory_unreadable"


def test_too_many_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("proxy.keys.directory.FILES_MAX", 2)
    for number in range(3):
        put(tmp_path / f"{number}.json", sidecar(key(number)))
    with pytest.raises(KeyFileError, match="more than 2 key files"):
        DirectoryProvider(tmp_path).load()
    assert FILES_MAX == 4096


def test_too_many_bytes_in_all_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("proxy.keys.directory.TOTAL_BYTES_MAX", 1000)
    for number in range(3):
        put(tmp_path / f"{number}.json", sidecar(key(number)))
    with pytest.raises(KeyFileError, match="more than 1000 bytes in all"):
        DirectoryProvider(tmp_path).load()


def test_revoked_kids_are_out_wherever_they_stand(tmp_path):
    put(tmp_path / "a.json", sidecar(key(1), key(2)))
    put(tmp_path / "z-revoked.json", sidecar(revoked=[key(1).kid]))
    keys = DirectoryProvider(tmp_path).load()
    assert [found.kid for found in keys.envelope_keys()] == [key(2).kid]
    assert keys.revoked() == {key(1).kid}


def test_keys_whose_grace_is_over_are_not_held_any_longer(tmp_path):
    now = [NOW_MS]
    ends = key(1, not_after_ms=NOW_MS + 1000)
    put(tmp_path / "a.json", sidecar(ends, key(2)))
    provider = DirectoryProvider(tmp_path, clock_ms=lambda: now[0])
    provider.load()

    def held():
        return [k.kid for _, file in provider._known.values() for k in file.envelope_keys]

    now[0] = ends.not_after_ms + GRACE_MS
    provider.mark()
    assert held() == [ends.kid, key(2).kid]
    now[0] += 1
    provider.mark()
    assert held() == [key(2).kid]


def status(mode, uid=0, gid=7):
    return types.SimpleNamespace(st_mode=stat.S_IFREG | mode, st_uid=uid, st_gid=gid)


def test_what_root_owns_may_be_read_by_a_group_of_this_process(tmp_path):
    check_access(tmp_path, status(0o440), 1000, frozenset({7}))
    for wrong in (status(0o440, gid=8), status(0o440, uid=1000), status(0o444), status(0o460)):
        with pytest.raises(KeyFileError, match="lets others at the keys"):
            check_access(tmp_path, wrong, 1000, frozenset({7}))
    with pytest.raises(KeyFileError, match="lets others at the keys"):
        check_access(tmp_path, status(0o440), 1000)


def test_a_file_that_others_can_read_is_refused(tmp_path):
    put(tmp_path / "a.json", sidecar(key(1)), mode=0o644)
    with pytest.raises(KeyFileError, match="run: chmod 600"):
        DirectoryProvider(tmp_path).load()


def test_a_destroyed_secret_leaves_every_file_it_stood_in(tmp_path):
    prompts = {"one": b"\x01" * 32}
    put(tmp_path / "a.json", sidecar(key(1), prompts=prompts))
    put(tmp_path / "b.json", sidecar(key(2), prompts=prompts | {"two": b"\x02" * 32}))
    provider = DirectoryProvider(tmp_path)
    provider.load()
    provider.destroy("prompt/one")
    keys = provider.load()
    assert (keys.prompt_key("one"), keys.prompt_key("two")) == (None, b"\x02" * 32)
    assert len(keys.envelope_keys()) == 2
    assert not any("01" * 32 in file.read_text() for file in tmp_path.iterdir())
    with pytest.raises(KeySourceError, match="no secret of the name prompt/one"):
        provider.destroy("prompt/one")


def test_a_mounted_volume_is_not_written(tmp_path):
    mount(tmp_path, {"a.json": sidecar(key(1), prompts={"one": b"\x01" * 32})})
    with pytest.raises(CannotDestroyError, match="mounted from a Secret; take prompt/one out"):
        DirectoryProvider(tmp_path).destroy("prompt/one")
    assert DirectoryProvider(tmp_path).load().prompt_key("one") is not None


def test_a_mark_costs_one_look_where_the_volume_is_swapped_whole(tmp_path, monkeypatch):
    mount(tmp_path, {f"{number}.json": sidecar(key(number)) for number in range(20)})
    provider = DirectoryProvider(tmp_path)
    provider.load()
    monkeypatch.setattr(os, "scandir", lambda _: pytest.fail("looked at every file"))
    assert provider.mark() == provider.mark()
