"""Every request among the vectors, byte for byte, to a real sidecar that lives at their time."""

import json

import msgspec
import pytest

from proxy.keys.file import encode, parse
from proxy.sm4 import sm2
from tests.blackbox.harness import Client, Sidecar, Upstream, new_keys, ok, until
from tests.unit.proxy import envelope_cases
from tests.unit.proxy.sm4_kit import vector_file, vector_keys
from tests.unit.proxy.test_envelope_outcomes import STEP_7, told_badly

# The wall clock stands at what a file says; deadlines have a clock of their own.
STOPPED = """
import runpy, sys, time
path = sys.argv.pop(1)
boot = time.clock_gettime_ns
def now():
    with open(path) as file:
        return int(file.read()) * 1_000_000
time.time_ns = now
time.clock_gettime_ns = lambda kind: 0 if kind == time.CLOCK_BOOTTIME else boot(kind)
runpy.run_module("proxy", run_name="__main__")
"""
FAILURES = "tongguan_proxy_envelope_failures_total"
CODES = {"stale": "envelope_stale", "future": "envelope_stale", "cache_full": "envelope_cache_full"}


def sets():
    """Return {(audience, policy): (keys, vectors)}."""
    published = list(vector_keys().values()), vector_file()["vectors"]
    found = {}
    for keys, vectors in (published, envelope_cases.stored()):
        for vector in vectors:
            if vector["direction"] != "request":
                continue
            policy = vector.get("policy", {})
            # Clocks do not go back: these have a process of their own.
            policy = policy | {n: vector[n] for n in ("start_ms", "at_tag_ms") if n in vector}
            kid = vector["wire_hex"][16:32]
            audience = next((k.audience for k in keys if k.kid.hex() == kid), keys[0].audience)
            audience = policy.get("receiver_audience", audience)
            name = (audience[-40:], keys[0].kid.hex(), json.dumps(policy))
            mine = [
                msgspec.structs.replace(key, audience=audience, sign_private=b"")
                for key in keys
                if "receiver_audience" in policy or key.audience == audience
            ]
            found.setdefault(name, (mine, policy, []))[2].append(vector)
    return found


SETS = sets()


@pytest.fixture(scope="module")
def upstream():
    with Upstream() as upstream:
        yield upstream.answering(ok)


def request_of(vector):
    wire = bytes.fromhex(vector["wire_hex"])
    lines = ["POST /sealed HTTP/1.1", "Host: sidecar.test", f"Content-Length: {len(wire)}"]
    for name, values in vector["headers"].items():
        lines += [f"{name}: {v}" for v in (values if isinstance(values, list) else [values])]
    return "\r\n".join([*lines, "", ""]).encode() + wire


class Stopped:
    """A sidecar with these keys whose clock a test moves on."""

    def __init__(self, folder, upstream, keys, policy):
        folder.mkdir()
        made = new_keys(folder / "keys")
        path = made / "sidecar.json"
        file = msgspec.structs.replace(parse(path, path.read_bytes()), envelope_keys=tuple(keys))
        path.write_bytes(encode(file))
        self.now = folder / "now"
        self.limits = {
            name: policy[short]
            for name, short in (
                ("ENVELOPE_REPLAY_ENTRIES_PER_KID", "limit_kid"),
                ("ENVELOPE_REPLAY_ENTRIES", "limit"),
            )
            if short in policy
        }
        if "start_ms" in policy:
            self.limits["ENVELOPE_FENCE_S"] = 10
        self.sidecar = Sidecar(folder / "sidecar", upstream.url, keys=made, **self.limits)
        self.sidecar.command[1:3] = ["-c", STOPPED, str(self.now)]

    def at(self, now_ms):
        fresh = self.now.with_suffix(".next")
        fresh.write_text(str(now_ms))
        fresh.replace(self.now)

    def ask(self, data):
        with Client(self.sidecar.sealed) as client:
            return client.send(data).answer()

    def ask_slowly(self, vector):
        """Move the clock on when all but the last byte has been taken in."""
        data = request_of(vector)
        held = len(vector["wire_hex"]) // 2 - 1
        with Client(self.sidecar.sealed) as client:
            client.send(data[:-1])
            until(lambda: self.sidecar.metric("tongguan_proxy_unverified_bytes") >= held - 40, "it")
            self.at(vector["at_tag_ms"])
            return client.send(data[-1:]).answer()

    def failures(self):
        text = self.sidecar.admin_ask("GET", "/metrics").body.decode()
        rows = [line for line in text.splitlines() if line.startswith(FAILURES + "{")]
        return {row.split('"')[1]: float(row.rsplit(" ", 1)[1]) for row in rows}


@pytest.mark.skipif(not sm2.available(), reason="capability: OpenSSL with SM2")
@pytest.mark.parametrize("name", SETS, ids=[f"set {i}" for i in range(len(SETS))])
def test_each_vector_has_its_outcome_in_a_real_process(tmp_path, upstream, name):
    keys, policy, vectors = SETS[name]
    vectors = sorted(vectors, key=lambda v: v["now_ms"])
    stopped = Stopped(tmp_path / "s", upstream, keys, policy)
    stopped.at(policy.get("start_ms", vectors[0]["now_ms"]))
    with stopped.sidecar:
        for vector in vectors:
            stopped.at(vector["now_ms"])
            if "limit" in policy or "limit_kid" in policy:  # room for one: somebody else has it
                filler = next(v for v in envelope_cases.stored()[1] if v["id"] == "ok-01")
                stopped.ask(request_of(filler))
            if vector["outcome"] == "replayed":
                stopped.ask(request_of(vector))
            upstream.answering(ok)
            wire = request_of(vector)
            before = stopped.failures()
            answer = stopped.ask_slowly(vector) if "at_tag_ms" in vector else stopped.ask(wire)
            check(vector, answer, upstream)
            after = stopped.failures()
            told = {reason for reason in after if after[reason] != before.get(reason, 0)}
            if vector["outcome"] == "ok":
                assert told == set(), vector["id"]
            else:
                allowed = {vector["outcome"], *vector.get("also", ())}
                assert told <= allowed, (vector["id"], told)
                assert len(told) == 1, vector["id"]


def check(vector, answer, upstream):
    outcome = vector["outcome"]
    if outcome == "ok":
        assert answer.status == 200, (vector["id"], answer.body)
        seen = upstream.last()
        line = bytes.fromhex(vector["prelude_hex"]).split(b"\n")[0]
        assert seen.line == line + b" HTTP/1.1", vector["id"]
        assert seen.payload == bytes.fromhex(vector["body_hex"]), vector["id"]
        return
    assert upstream.seen == [], vector["id"]
    if outcome in STEP_7 and not told_badly(vector):
        assert (answer.status, answer.get("Content-Type")) == (
            200,
            b"application/x-sm4-envelope",
        ), vector["id"]
        return
    code = CODES.get(outcome, "envelope_rejected")
    assert answer.error() == code, vector["id"]
    if outcome not in CODES:  # those three may be told; no other reason is
        assert outcome.encode() not in answer.body
    if code == "envelope_stale":
        assert answer.get("Date")
