"""Each setting of the sidecar, from the file and from its variable."""

from __future__ import annotations

import typing

import pytest

from proxy.config import (
    Settings,
    load,
)
from tests.unit.proxy.settings_kit import (
    LEAVES,
    NAMES,
    good_value,
    lookup,
    problems,
    toml,
    variable,
)

# --- each setting, from both sources


# Each but two: a provider, or an agent's seeds, need settings beside them (below).
NOT_ALONE = {"keys.provider", "audit.seeds", "audit.sync.p0", "audit.sync.p1", "audit.sync.p2"}
ALONE = [row for row in LEAVES if row[0] not in NOT_ALONE]


def test_seeds_of_an_agent_need_its_address():
    text = '[audit]\nseeds = "agent"\n'
    assert problems(text) == ["audit.seeds: agent needs audit.agent, its address"]
    assert load(f'{text}agent = "unix:/run/agent.sock"\n', {}).audit.seeds == "agent"
    assert load(text, {"TONGGUAN_AUDIT_AGENT": "http://127.0.0.1:14100"}).audit.seeds == "agent"
    (problem,) = problems('[audit]\nagent = "https://h:1"\n')
    assert problem.startswith("audit.agent: expected http:// or unix:/path")


WITNESS = "[audit]\nwitness = "


def test_witnesses_are_one_address_or_a_list():
    assert load("", {}).audit.witness == ()
    assert load(f'{WITNESS}""\n', {}).audit.witness == ()
    assert load(f'{WITNESS}"unix:/a"\n', {}).audit.witness == ("unix:/a",)
    both = ("unix:/a", "http://192.0.2.1:14100")
    assert load(f"{WITNESS}{list(both)}\n", {}).audit.witness == both
    assert load("", {"TONGGUAN_AUDIT_WITNESS": ", ".join(both)}).audit.witness == both


@pytest.mark.parametrize(
    ("rest", "problem"),
    [
        ('["unix:/a", "https://h:1"]', "audit.witness: expected http:// or unix:/path"),
        ('["unix:/a", "unix:/a"]', "audit.witness: an address stands there twice"),
        (str([f"unix:/{n}" for n in range(5)]), "audit.witness: expected at most 4 addresses"),
        ("7", "audit.witness: expected a list of strings, got 7"),
        (
            '"unix:/a"\nwitness_authorization_file = ["-", "f"]',
            "audit.witness_authorization_file: more files than witnesses",
        ),
    ],
)
def test_witnesses_that_cannot_be(rest, problem):
    (told,) = problems(f"{WITNESS}{rest}\n")
    assert told.startswith(problem)


def test_a_class_that_is_to_wait_for_the_disk_needs_a_chain():
    (problem,) = problems('[audit.sync]\np1 = "request"\n')
    assert problem.startswith("audit.sync.p1: request needs a chain: set audit.dir")
    more = {"TONGGUAN_AUDIT_DIR": "/a", "TONGGUAN_AUDIT_SYNC_P0": "request"}
    assert load('[audit.sync]\np2 = "request"\n', more).audit.sync.opens == ("P0", "P2")


def test_a_key_goes_on_after_a_thousand_records_at_the_earliest():
    (problem,) = problems("[audit]\nrotate_records = 999\n")
    assert problem == "audit.rotate_records: expected 0 or at least 1000"


@pytest.mark.parametrize(("name", "hint", "declared"), ALONE, ids=[name for name, *_ in ALONE])
def test_a_setting_is_read_from_the_file_and_from_its_variable(name, hint, declared):
    value = good_value(name, hint, declared, lookup(Settings(), name))
    expected = tuple(value) if isinstance(value, list) else value
    assert lookup(load(toml(name, value), {}), name) == expected
    text = ",".join(value) if isinstance(value, list) else str(value)
    from_env = load("", {variable(name): text})
    assert lookup(from_env, name) == expected
    assert type(lookup(from_env, name)) is type(lookup(Settings(), name))


@pytest.mark.parametrize(("name", "hint", "declared"), LEAVES, ids=NAMES)
def test_a_value_of_another_type_is_refused_by_name(name, hint, declared):
    del declared
    found = problems(toml(name, 1 if hint in (str, bool, tuple[str, ...]) else "no such value"))
    assert len(found) == 1
    assert found[0].startswith(f"{name}: expected ")
    if hint is str:
        return  # every text is a text
    if typing.get_origin(hint) is not tuple:
        found = problems("", {variable(name): "no such value"})
        assert len(found) == 1
        assert found[0].startswith(f"{variable(name)}: expected ")


BOUNDED = [(n, h, m) for n, h, m in LEAVES if m.ge is not None or m.le is not None]


@pytest.mark.parametrize(("name", "hint", "declared"), BOUNDED, ids=[n for n, _, _ in BOUNDED])
def test_bounds_are_inclusive_and_beyond_them_is_refused(name, hint, declared):
    for bound, step, word in ((declared.ge, -1, "at least"), (declared.le, 1, "at most")):
        if bound is None:
            continue
        assert lookup(load(toml(name, bound), {}), name) == bound
        beyond = bound + step * (0.001 if hint is float else 1)
        assert problems(toml(name, beyond)) == [f"{name}: must be {word} {bound}, got {beyond}"]
        assert problems("", {variable(name): str(beyond)})[0].startswith(f"{variable(name)}: must")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e300", "1e10"])
def test_a_time_that_no_clock_can_hold_is_refused(text):
    assert problems(f"[timeouts]\nconnect_s = {text}\n")
    assert problems("", {"TONGGUAN_TIMEOUTS_CONNECT_S": text})


@pytest.mark.parametrize("digits", [400, 5000])
def test_a_number_of_very_many_digits_is_refused_not_a_crash(digits):
    assert problems(f"[timeouts]\nconnect_s = {'9' * digits}\n")
    assert problems("", {"TONGGUAN_DOORS_BACKLOG": "9" * digits})


def test_a_whole_number_is_a_number_but_not_the_other_way_round():
    assert load("[timeouts]\nconnect_s = 3\n", {}).timeouts.connect_s == 3.0
    assert problems("[doors]\nbacklog = 3.0\n")
    assert problems("", {"TONGGUAN_DOORS_BACKLOG": "3.0"})


@pytest.mark.parametrize("value", ["true", "false"])
def test_truth_is_no_number(value):
    assert problems(f"[doors]\nbacklog = {value}\n")
    assert problems(f"[timeouts]\nconnect_s = {value}\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [("true", True), ("TRUE", True), ("1", True), ("false", False), ("False", False), ("0", False)],
)
def test_truth_from_a_variable(text, value):
    name = "pools.shared.repeatable"
    assert lookup(load("", {variable(name): text}), name) is value


@pytest.mark.parametrize("text", ["", "yes", "on", "2", "t"])
def test_what_is_no_truth_value_is_refused(text):
    assert problems("", {"TONGGUAN_POOLS_SHARED_REPEATABLE": text})


def test_a_list_from_a_variable_is_parted_by_commas_and_trimmed():
    environ = {"TONGGUAN_POOLS_SHARED_ENDPOINTS": " http://a:1 ,, unix:/run/b.sock,"}
    assert load("", environ).pools.shared.endpoints == ("http://a:1", "unix:/run/b.sock")


@pytest.mark.parametrize("value", ['"http://a:1"', "[1]", '["http://a:1", 2]', "{a = 1}"])
def test_a_list_in_the_file_holds_strings_only(value):
    assert problems(f"[pools.shared]\nendpoints = {value}\n")


@pytest.mark.parametrize("value", ['"p0"', '"P3"', '""', "0", "[]"])
def test_a_class_is_one_of_three(value):
    found = problems(f"[qos]\ndefault_class = {value}\n")
    assert "one of 'P0', 'P1', 'P2'" in found[0]
