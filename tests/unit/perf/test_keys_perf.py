"""perf.keys: a quick run finds every number, and a gate that is missed is named."""

from __future__ import annotations

import json

import pytest

from perf import keys, rotation_soak


def test_a_quick_run_measures_everything_that_is_gated(tmp_path, monkeypatch):
    monkeypatch.setattr(keys, "LOOKUPS", 4096)
    found = keys.measure(keys=2000, shards=4, secrets=40, rounds=1)
    assert found.keys() >= keys.GATES.keys()
    assert 0 < found["load_s"] < 1
    assert 0 < found["load_mb"] < 16
    assert 0 < found["lookup_us"] < 20
    assert found["reload_took_ms"] > 0


def test_a_missed_gate_is_named_with_its_bound():
    good = dict.fromkeys(keys.GATES, 0.5)
    assert keys.missed(good) == []
    assert keys.missed(good | {"load_mb": 65.0}) == ["load_mb: 65, at most 64"]
    assert keys.missed(good | {"lookup_us": float("nan")}) != []


def test_the_soak_fails_for_one_lost_request(monkeypatch, capsys):
    found = {"lost": 1, "problems": ["x"], "revoked_s": 0.5, "exit_code": 0}
    monkeypatch.setattr(rotation_soak, "soak", lambda *_: found)
    assert rotation_soak.main(["--minutes", "1", "--json"]) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["missed"] == ["lost: 1, at most 0"]
    monkeypatch.setattr(rotation_soak, "soak", lambda *_: found | {"lost": 0})
    assert rotation_soak.main(["--minutes", "1"]) == 0


@pytest.mark.parametrize("change", [{"revoked_s": 1.1}, {"exit_code": 1}])
def test_the_soak_fails_for_a_late_revocation_or_a_bad_end(monkeypatch, change):
    found = {"lost": 0, "problems": [], "revoked_s": 0.5, "exit_code": 0} | change
    monkeypatch.setattr(rotation_soak, "soak", lambda *_: found)
    assert rotation_soak.main(["--minutes", "1"]) == 1
