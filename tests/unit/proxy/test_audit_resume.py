"""A verification that goes on where one before it was says what a whole one says."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from proxy.audit import resume as module
from proxy.audit import verify as verify_module
from proxy.audit.cli import audit
from proxy.audit.layout import segments
from proxy.audit.note import ED25519, Keyset
from proxy.audit.resume import ResumeError, Saved
from proxy.audit.signed import Expected
from proxy.audit.signing import NoteSigner
from proxy.audit.writer import AuditWriter
from proxy.clock import ManualClock
from tests.unit.proxy.audit_chains import KEYS, START_MS, config, crash, request, run, verify

SIGNER = NoteSigner("log", ED25519, b"\1" * 32)
PINNED = Keyset([SIGNER.key])


async def _chain(directory, number, records, *, close):
    clock = ManualClock(START_MS + number * 3_600_000)
    values = config(
        directory,
        origin=f"pod/{number}",
        signers=(SIGNER,),
        checkpoint_records=10,
        segment_bytes=8192,
        token_ids="commit",
    )
    writer = AuditWriter.start(values, clock, asyncio.get_running_loop())
    for record in range(records):
        clock.advance_ms(100)
        await writer.durable(writer.append_request(request(record), [1]))
    await (writer.close() if close else crash(writer))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("resume")
    run(lambda: _chain(directory, 1, 40, close=True))
    run(lambda: _chain(directory, 2, 60, close=False))
    return directory


@pytest.fixture
def log(pristine, tmp_path):
    return Path(shutil.copytree(pristine, tmp_path / "audit"))


@pytest.fixture
def state(tmp_path):
    return tmp_path / "verified.json"


def resumed(log, state, **options):
    saved = Saved(state, "keys")
    return verify(log, pinned=PINNED, saved=saved, **options).public()


def whole(log):
    return verify(log, pinned=PINNED).public()


@pytest.fixture
def read(monkeypatch):
    """The segments that are read."""
    names = []
    check_segment = verify_module.check_segment

    def counted(reading, check, number):
        names.append(reading.files[number][1].name)
        return check_segment(reading, check, number)

    monkeypatch.setattr(verify_module, "check_segment", counted)
    return names


def test_the_second_time_only_what_may_have_grown_is_read(log, state, read):
    first = resumed(log, state)
    many = len(read)
    assert many == sum(len(segments(chain)) for chain in log.iterdir()) > 8
    del read[:]
    assert resumed(log, state) == first == whole(log) | {}
    del read[-many:]
    assert read == [segments(max(log.iterdir()))[-1][1].name]


def test_a_log_that_grew_and_was_declared_goes_on(log, state):
    assert resumed(log, state)["verdict"] == "truncated"
    run(lambda: _chain(log, 3, 20, close=True))
    found = resumed(log, state)
    assert found == whole(log)
    assert found["verdict"] == "ok"
    assert [chain["end"] for chain in found["chains"]] == ["closed", "sealed", "closed"]


@pytest.mark.parametrize("stop", range(1, 9, 2))
def test_stopped_anywhere_it_goes_on(log, state, stop, monkeypatch):
    check_segment, count = verify_module.check_segment, []

    def interrupted(reading, check, number):
        count.append(1)
        if len(count) == stop:
            raise KeyboardInterrupt
        return check_segment(reading, check, number)

    monkeypatch.setattr(verify_module, "check_segment", interrupted)
    with pytest.raises(KeyboardInterrupt):
        resumed(log, state)
    monkeypatch.setattr(verify_module, "check_segment", check_segment)
    assert resumed(log, state) == whole(log)


def test_findings_come_again_and_consequences_do_too(log, state):
    path = segments(min(log.iterdir()))[1][1]
    path.write_bytes(path.read_bytes().replace(b'"status":200', b'"status":500', 1))
    first = resumed(log, state)
    assert first["verdict"] == "content_mismatch"
    assert resumed(log, state) == first == whole(log)


def test_what_changed_its_size_is_verified_from_the_start(log, state):
    resumed(log, state)
    path = segments(min(log.iterdir()))[1][1]
    path.write_bytes(path.read_bytes().replace(b'"status":200', b'"status":2000', 1))
    assert resumed(log, state) == whole(log)
    path.unlink()
    assert resumed(log, state)["verdict"] == whole(log)["verdict"] == "gap"


def test_several_processes_resume_too(log, state, monkeypatch):
    monkeypatch.setattr("proxy.audit.ahead._WORTH_BYTES", 1)
    first = resumed(log, state, jobs=2)
    assert resumed(log, state, jobs=2) == first == whole(log)


def test_a_checkpoint_of_what_is_behind_is_still_held_against_the_log(log, state):
    resumed(log, state)
    other = [Expected("pod/1", 10, bytes(32), "a checkpoint")]
    found = resumed(log, state, expected=other)
    assert found["verdict"] == "fork"
    assert found["seq"] == 9


def test_without_a_record_read_again_macs_are_still_said_to_be_checked(log, state):
    shutil.rmtree(max(log.iterdir()))
    assert resumed(log, state)["mac_checked"]
    found = resumed(log, state)
    assert (found["verdict"], found["mac_checked"]) == ("ok", True)


@pytest.mark.parametrize(
    ("member", "value"),
    [("check", "x"), ("check", {}), ("signed", []), ("findings", 1), ("files", [[0, 0]])],
)
def test_a_state_that_was_damaged_is_refused(log, state, member, value):
    resumed(log, state)
    found = json.loads(state.read_text())
    next(iter(found["chains"].values()))[member] = value
    state.write_text(json.dumps(found))
    done = CliRunner().invoke(audit, ["verify", str(log), "--resume", str(state)])
    assert (done.exit_code, "damaged" in done.output) == (2, True), done.output


def test_a_state_of_other_keys_or_of_nothing_is_refused(log, state):
    resumed(log, state)
    with pytest.raises(ResumeError, match="other keys"):
        Saved(state, "others")
    state.write_text("{}")
    with pytest.raises(ResumeError, match="no state"):
        Saved(state, "keys")
    assert module.fingerprint({"a": b"1"}, PINNED) != module.fingerprint({"a": b"2"}, PINNED)
    assert module.fingerprint({}, PINNED) != module.fingerprint({}, Keyset())


def test_the_command_keeps_and_uses_the_file(log, state):
    arguments = ["verify", str(log), "--resume", str(state), "--json"]
    first = CliRunner().invoke(audit, arguments)
    assert set(json.loads(state.read_text())["chains"]) == {path.name for path in log.iterdir()}
    again = CliRunner().invoke(audit, arguments)
    assert first.output == again.output
    assert KEYS.seed("seed1").hex() not in state.read_text()
    wrong = CliRunner().invoke(audit, [*arguments, "--since", "2026-01-01T00:00:00Z"])
    assert wrong.exit_code == 2
    lost = CliRunner().invoke(audit, ["verify", str(log), "--resume", "/nowhere/x"])
    assert lost.exit_code == 3
