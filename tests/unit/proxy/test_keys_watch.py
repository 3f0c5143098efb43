"""Alarms ahead of a key's end, states told once, and what readyz and metrics say of keys."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from proxy.keys.expiry import expiring
from proxy.keys.issue import DAY_MS
from proxy.keys.provider import Standing
from proxy.keys.watch import AGAIN_MS, EXPIRY_EVERY_MS, KeyWatch
from proxy.scrape_keys import KIDS_NAMED_MAX, key_families
from proxy.sm4.keyring import Keyring
from tests.unit.proxy.key_sources import NOW_MS, key

HOUR_MS = 3_600_000


class Provider:
    """A provider's state, set by hand."""

    kind = "file"

    def __init__(self):
        self.standing = Standing(lambda: NOW_MS)

    def state(self):
        return self.standing.state()


def rest():
    pass


def due(*keys, now_ms=NOW_MS, ahead_ms=DAY_MS):
    return [found.kid for found in expiring(Keyring(keys), now_ms, ahead_ms, rest)]


def lasting(number, hours, *, client="c", begins=-1000):
    return key(
        number,
        client=client,
        not_before_ms=NOW_MS + begins * HOUR_MS,
        not_after_ms=NOW_MS + hours * HOUR_MS,
    )


def test_an_alarm_is_due_a_day_ahead_and_no_earlier():
    ends = lasting(1, 30)
    assert due(ends) == []
    assert due(ends, now_ms=ends.not_after_ms - DAY_MS - 1) == []
    assert due(ends, now_ms=ends.not_after_ms - DAY_MS) == [ends.kid]
    assert due(ends, now_ms=ends.not_after_ms) == [ends.kid]
    assert due(ends, now_ms=ends.not_after_ms + 1) == []


def test_a_key_of_a_day_is_an_alarm_in_its_last_quarter():
    ends = lasting(1, 12, begins=-12)
    assert due(ends, now_ms=ends.not_after_ms - 6 * HOUR_MS - 1) == []
    assert due(ends, now_ms=ends.not_after_ms - 6 * HOUR_MS) == [ends.kid]


def test_a_key_that_is_followed_is_none():
    ends, follows = lasting(1, 2), lasting(2, 2000, begins=1)
    assert due(ends, follows) == []
    assert due(ends, lasting(2, 2000, client="another")) == [ends.kid]


def test_a_gap_before_the_next_key_is_an_alarm():
    ends, late = lasting(1, 2), lasting(2, 2000, begins=3)
    assert due(ends, late) == [ends.kid]


def test_alarms_are_in_order_of_the_end():
    keys = [lasting(number, number, client=str(number)) for number in (3, 1, 2)]
    assert due(*keys) == [keys[1].kid, keys[2].kid, keys[0].kid]


@pytest.fixture
def watch():
    made = KeyWatch(Provider(), DAY_MS)
    made.ring = Keyring([lasting(1, 2), lasting(2, 1000, client="other")])
    return made


def test_the_log_names_the_kid_once_an_hour_while_it_lasts(watch, caplog):
    for second in range(0, 2 * 3600, 10):
        watch.look(NOW_MS + second * 1000)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == watch.alarms == 2
    assert f"kid={key(1).kid.hex()} client=c in_s=7200" in said[0]
    assert watch.expiring == 1
    watch.look(NOW_MS + 2 * HOUR_MS + EXPIRY_EVERY_MS)
    assert watch.expiring == 0
    assert AGAIN_MS == HOUR_MS


def test_an_alarm_s_text_has_no_root(watch, caplog):
    watch.look(NOW_MS)
    assert not any(found.root.hex() in caplog.text for found in watch.ring)


def test_a_change_of_state_is_told_once(watch, caplog):
    caplog.set_level(logging.INFO)
    watch.ring = None
    watch.look(NOW_MS)
    watch.provider.standing.degraded("sealed", "key service: 503 (sealed) for tongguan")
    for _ in range(3):
        watch.look(NOW_MS)
    watch.provider.standing.good()
    watch.look(NOW_MS)
    assert [record.getMessage() for record in caplog.records] == [
        "keys degraded: key service: 503 (sealed) for tongguan",
        "keys: the provider is well again",
    ]


def test_notes_say_the_state_in_one_word_with_its_age(watch):
    assert watch.notes(NOW_MS) == []
    watch.provider.standing.degraded("timeout", "a line for people")
    watch.look(NOW_MS)
    notes = watch.notes(NOW_MS + 61_000)
    assert notes == ["keys_degraded=timeout since_s=61", "keys_expiring=1"]


def metrics(watch, now_ms=NOW_MS):
    registry = CollectorRegistry()

    class Families:
        def collect(self):
            return key_families(watch, now_ms)

    registry.register(Families())
    lines = generate_latest(registry).decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")


def test_metrics_tell_which_kids_are_live_and_how_the_provider_is(watch):
    watch.look(NOW_MS)
    watch.revoked = 3
    found = metrics(watch)
    prefix = "tongguan_proxy_keys_"
    assert found[f'{prefix}provider_available{{provider="file"}}'] == "1.0"
    assert found[f"{prefix}degraded_seconds"] == "0.0"
    assert found[f"{prefix}known"] == "2.0"
    assert found[f"{prefix}expiring"] == "1.0"
    assert found[f"{prefix}expiry_alarms_total"] == "1.0"
    assert found[f"{prefix}revoked"] == "3.0"
    for number in (1, 2):
        assert found[f'{prefix}kid_live{{kid="{key(number).kid.hex()}"}}'] == "1.0"
    assert f"{prefix}lease_seconds" not in found
    watch.provider.standing.good(lease_until_ms=NOW_MS + 90_000)
    watch.provider.standing.degraded("timeout")
    found = metrics(watch, NOW_MS + 30_000)
    assert found[f"{prefix}lease_seconds"] == "60.0"
    assert found[f"{prefix}degraded_seconds"] == "30.0"
    assert found[f'{prefix}provider_available{{provider="file"}}'] == "0.0"


def test_of_many_kids_some_are_named_and_all_are_counted(watch):
    watch.ring = Keyring([key(number) for number in range(KIDS_NAMED_MAX + 9)])
    found = metrics(watch)
    assert sum(name.startswith("tongguan_proxy_keys_kid_live") for name in found) == KIDS_NAMED_MAX
    assert found["tongguan_proxy_keys_known"] == f"{KIDS_NAMED_MAX + 9}.0"
