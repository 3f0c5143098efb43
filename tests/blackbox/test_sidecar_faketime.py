"""The wall clock steps under a running sidecar, by libfaketime: the clock rule of envelopes."""

import glob
import json

import pytest

from tests.blackbox.channel import Channel, now_ms
from tests.blackbox.harness import (
    Client,
    Sidecar,
    Upstream,
    new_keys,
    ok,
    post,
    tongguan,
    until,
)

LIBRARIES = sorted(glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1"))  # noqa: PTH207 - a pattern
CHAT = b'{"model":"tiny","messages":[{"role":"user","content":"a secret question"}]}'

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="capability: libfaketime")

# libfaketime shifts the deadline of clock_nanosleep on any clock, so that Python's sleep would fail
# with EINVAL or take hours after a step: select has no deadline to shift.
WITHOUT_SLEEP = """
import runpy, select, time
time.sleep = lambda seconds: select.select([], [], [], seconds)
runpy.run_module("proxy", run_name="__main__")
"""


class Shifted(Sidecar):
    """A sidecar whose wall clock a test sets, and whose other clocks go on."""

    def __init__(self, folder, *arguments, **options):
        super().__init__(folder, *arguments, **options)
        self.stamp = self.folder / "shift"
        self.step(0)
        self.command[1:3] = ["-c", WITHOUT_SLEEP]
        self.environ |= {
            "LD_PRELOAD": LIBRARIES[0],
            "FAKETIME_TIMESTAMP_FILE": str(self.stamp),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def step(self, seconds):
        """Let the wall clock say that many seconds more than it should."""
        fresh = self.stamp.with_suffix(".next")
        fresh.write_text(f"{seconds:+d}s\n")
        fresh.replace(self.stamp)

    def ready(self):
        return self.admin_ask("GET", "/readyz").status == 200

    def take(self, data):
        """Return the outcome of one sealed request."""
        with Client(self.sealed) as client:
            answer = client.send(data).answer()
        if answer.status == 200:
            return "ok"
        return json.loads(answer.body)["error"]["code"]


@pytest.fixture
def ends(tmp_path):
    keys = new_keys(tmp_path / "keys")
    with Upstream() as upstream:
        upstream.answering(ok)
        with Shifted(tmp_path / "s", upstream.url, keys=keys) as sidecar:
            until(sidecar.ready, "ready")
            yield sidecar, Channel(keys / "client.json")


def test_a_copy_is_refused_wherever_the_wall_clock_steps(ends):
    sidecar, channel = ends
    taken = channel.seal(CHAT).request()
    assert sidecar.take(taken) == "ok"
    assert sidecar.take(taken) == "envelope_rejected"
    for seconds in (-30, -3600, 30, 0, 120, 0):
        sidecar.step(seconds)
        # Late in the list its time has passed as well; it is never taken.
        assert sidecar.take(taken) in {"envelope_rejected", "envelope_stale"}


def test_steps_back_are_not_taken_and_steps_forward_are_kept(ends):
    sidecar, channel = ends
    sidecar.step(-20)
    until(lambda: b"clock_behind_ms" in sidecar.admin_ask("GET", "/readyz").body, "unready")
    until(lambda: "ms behind: not ready" in sidecar.log, "the alarm")
    assert sidecar.take(channel.seal(CHAT).request()) == "ok"
    assert sidecar.take(channel.seal(CHAT, time_ms=now_ms() - 70_000).request()) == "envelope_stale"
    sidecar.step(0)
    until(sidecar.ready, "ready again")
    sidecar.step(90)
    early = channel.seal(CHAT, time_ms=now_ms() + 90_000)
    assert sidecar.take(early.request()) == "ok"
    assert sidecar.take(channel.seal(CHAT).request()) == "envelope_stale"
    sidecar.step(0)  # it stays where it was
    assert sidecar.take(channel.seal(CHAT).request()) == "envelope_stale"
    assert sidecar.take(channel.seal(CHAT, time_ms=now_ms() + 91_000).request()) == "ok"
    until(lambda: not sidecar.ready(), "unready: it lies behind")


def test_the_log_of_a_clock_that_steps_is_in_order_and_verifies(ends):
    sidecar, _ = ends
    traces = []
    for seconds in (0, -30, -3600, 45, 0):
        sidecar.step(seconds)
        answer = sidecar.ask(post(CHAT))
        assert answer.status == 200
        traces.append(answer.trace_id)
        until(lambda: sum(r["kind"] == "request" for r in sidecar.records()) == len(traces))
    walls = [int(record["wall_ns"]) for record in sidecar.records()]
    assert walls == sorted(walls)
    # 45 s ahead is where the clock stays: what came later is later in the log.
    assert walls[-1] - walls[0] >= 45 * 10**9
    assert traces == sorted(traces)
    assert len(set(traces)) == len(traces)
    sidecar.step(0)
    keys = sidecar.folder.parent / "keys" / "auditor.json"
    done = tongguan("audit", "verify", sidecar.audit_dir, "--keys", keys, "--json")
    result = json.loads(done.stdout)
    assert (result["verdict"], result["findings"]) == ("ok", [])
