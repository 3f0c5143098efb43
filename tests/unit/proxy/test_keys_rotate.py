"""Rotation: the next key is in both files ten minutes ahead, and no moment is without one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner

from proxy.keys.cli import keys
from proxy.keys.file import KeyFile, KeyFileError, read
from proxy.keys.issue import DAY_MS, Order, issue
from proxy.keys.rotate import AHEAD_MS, GRACE_MS, rotate
from proxy.sm4.keyring import EnvelopeKey, Keyring
from tests.unit.proxy.sm4_kit import NOW_MS, make_receiver, open_answer, open_request, seal_request

if TYPE_CHECKING:
    from pathlib import Path

WINDOW_MS = 60_000


def issued(**changes: Any) -> tuple[KeyFile, KeyFile]:
    order = Order(audience="a/b/c", client="c", tenants=("t",), days=1, sign="ed25519", **changes)
    files = issue(order, now_ms=NOW_MS, random=os.urandom)
    return files["sidecar"], files["client"]


def rotated(
    sidecar: KeyFile, client: KeyFile, now_ms: int, days: int | None = None
) -> tuple[KeyFile, KeyFile, EnvelopeKey]:
    files, fresh = rotate(sidecar, client, now_ms=now_ms, random=os.urandom, days=days)
    return files["sidecar"], files["client"], fresh


def test_the_next_key_is_as_the_last_but_for_kid_root_and_times() -> None:
    sidecar, client = issued(require_mac=True, digest="sm3")
    (old,) = client.envelope_keys

    new_sidecar, new_client, fresh = rotated(sidecar, client, NOW_MS + 5)

    assert fresh.not_before_ms == NOW_MS + 5 + AHEAD_MS
    assert fresh.not_after_ms - fresh.not_before_ms == old.not_after_ms - old.not_before_ms
    times = {"not_before_ms": old.not_before_ms, "not_after_ms": old.not_after_ms}
    assert msgspec.structs.replace(fresh, kid=old.kid, root=old.root, **times) == old
    assert fresh.kid != old.kid
    assert fresh.root != old.root
    assert new_client.envelope_keys == (old, fresh)
    assert new_sidecar.envelope_keys == tuple(
        msgspec.structs.replace(key, sign_private=b"") for key in (old, fresh)
    )
    assert msgspec.structs.replace(new_sidecar, envelope_keys=()) == msgspec.structs.replace(
        sidecar, envelope_keys=()
    )


def test_days_say_how_long_it_lasts() -> None:
    _, _, fresh = rotated(*issued(), NOW_MS, days=3)

    assert fresh.not_after_ms - fresh.not_before_ms == 3 * DAY_MS


def test_at_every_moment_of_a_rotation_the_client_seals_what_the_receiver_opens() -> None:
    sidecar, client = issued()
    (old,) = client.envelope_keys
    at_ms = old.not_after_ms - AHEAD_MS - WINDOW_MS
    sidecar, client, fresh = rotated(sidecar, client, at_ms)
    ring = Keyring(client.envelope_keys)
    receiver = make_receiver(*sidecar.envelope_keys)
    used = []
    for now_ms in range(at_ms, fresh.not_before_ms + 10 * WINDOW_MS, 7_000):
        derived = ring.sealing_key(now_ms)
        assert derived is not None
        used.append(derived.key)
        for sent_ms in (now_ms, now_ms - WINDOW_MS):  # on its way for as long as may be
            _, wire = seal_request(derived.key, now_ms=sent_ms)
            assert open_request(receiver, wire, now_ms=now_ms).kid == derived.key.kid
    assert used == sorted(used, key=lambda key: key.not_before_ms)
    assert {key.kid for key in used} == {old.kid, fresh.kid}


def test_an_answer_uses_the_key_of_its_request_though_that_was_dropped_meanwhile() -> None:
    sidecar, client = issued()
    (old,) = client.envelope_keys
    sidecar, client, _ = rotated(sidecar, client, old.not_after_ms - AHEAD_MS)
    receiver = make_receiver(*sidecar.envelope_keys)
    sealer, wire = seal_request(old, now_ms=old.not_after_ms)
    opened = open_request(receiver, wire, now_ms=old.not_after_ms)

    assert receiver.keyring.drop_expired(old.not_after_ms + 3 * WINDOW_MS + 1) == [old.kid]

    answer = opened.sealer.single(200, "", b"x", nonce=bytes(12), now_ms=old.not_after_ms)
    assert answer[8:16] == old.kid
    assert open_answer(sealer, answer) == (200, "", b"x")


def test_a_key_whose_grace_is_over_leaves_both_files_and_no_sooner() -> None:
    sidecar, client = issued()
    (old,) = client.envelope_keys
    end_ms = old.not_after_ms + GRACE_MS

    for now_ms, count in ((end_ms, 2), (end_ms + 1, 1)):
        new_sidecar, new_client, _ = rotated(sidecar, client, now_ms)
        assert len(new_sidecar.envelope_keys) == len(new_client.envelope_keys) == count


def test_other_clients_keys_stay_in_the_sidecar_s_file() -> None:
    sidecar, client = issued()
    other = msgspec.structs.replace(sidecar.envelope_keys[0], kid=bytes(8), client="other")
    sidecar = msgspec.structs.replace(sidecar, envelope_keys=(other, *sidecar.envelope_keys))

    new_sidecar, new_client, _ = rotated(sidecar, client, NOW_MS)

    assert new_sidecar.envelope_keys[0] == other
    assert len(new_sidecar.envelope_keys) == 3
    assert len(new_client.envelope_keys) == 2


def test_a_rotation_in_a_rotation_and_files_of_two_sets_are_refused() -> None:
    sidecar, client = issued()
    stranger, _ = issued()
    with pytest.raises(KeyFileError, match="is not in the sidecar's"):
        rotated(stranger, client, NOW_MS)
    with pytest.raises(KeyFileError, match="no key to follow"):
        rotated(sidecar, msgspec.structs.replace(client, envelope_keys=()), NOW_MS)
    sidecar, client, fresh = rotated(sidecar, client, NOW_MS)
    with pytest.raises(KeyFileError, match="announced already"):
        rotated(sidecar, client, fresh.not_before_ms - 1)
    rotated(sidecar, client, fresh.not_before_ms)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(keys, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_the_command_writes_both_files_and_names_the_kid(tmp_path: Path) -> None:
    run("new", "--dir", str(tmp_path), "--days", "1")
    auditor = (tmp_path / "auditor.json").read_bytes()

    code, output = run("rotate", "--dir", str(tmp_path))

    fresh = read(tmp_path / "client.json").envelope_keys[1]
    assert (code, output.count("wrote ")) == (0, 2)
    assert output.index("sidecar.json") < output.index("client.json")
    assert fresh.kid.hex() in output
    assert fresh.root.hex() not in output
    assert read(tmp_path / "sidecar.json").envelope_keys[1] == fresh
    assert (tmp_path / "auditor.json").read_bytes() == auditor
    assert run("rotate", "--dir", str(tmp_path))[0] == 2
    assert run("rotate", "--dir", str(tmp_path / "none"))[0] == 3
