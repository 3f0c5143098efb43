"""Classification by rules, and rates, of the real process."""

import json

import pytest

from tests.blackbox.channel import ask
from tests.blackbox.harness import (
    post,
    until,
)
from tests.blackbox.queues import CHAT, GRANTED, P0, P1, P2

# --- rules


RULES = """
[[qos.rules]]
qos = "P2"
tenant = "nobody"
[[qos.rules]]
qos = "P2"
model = "batch-*"
[[qos.rules]]
qos = "P0"
sla = "gold"
model = "live"
[[qos.rules]]
qos = "P2"
prompt_tokens_min = 1000
"""


def asked(model, prompt="x", **more):
    return json.dumps({"model": model, "prompt": prompt, **more}).encode()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (asked("batch-7"), b"P2"),
        (asked("batch"), b"P1"),
        (asked("live"), b"P0"),
        (asked("m", "x" * 3996), b"P1"),  # 3 998 bytes with its quotes are 1 000 tokens
        (asked("m", "x" * 3994 + ""), b"P1"),
        (asked("m", "x" * 4000), b"P2"),
        (b"no json", b"P1"),
        (b"", b"P1"),
    ],
)
def test_rules_class_what_names_no_class(started, upstream, sent, expected):
    sidecar = started('[tenants.default]\nmax_class = "P0"\nsla = "gold"\n' + RULES)
    if sent.startswith(b'{"model": "m"'):
        size = len(json.dumps(json.loads(sent)["prompt"]))
        expected = b"P2" if -(-size // 4) >= 1000 else b"P1"
    answer = sidecar.ask(post(sent))
    assert answer.get("X-QoS-Class") == expected
    assert upstream.last().get("X-QoS-Class") == expected
    # What is named is not classed by rule.
    assert sidecar.ask(post(sent, P1)).get("X-QoS-Class") == b"P1"


def test_rules_are_counted_and_shown(started, upstream):
    del upstream
    sidecar = started(GRANTED + RULES)
    assert sidecar.ask(post(asked("batch-1"))).get("X-QoS-Class") == b"P2"
    assert sidecar.metric("tongguan_proxy_rule_matches_total", rule="2") == 1
    shown = json.loads(sidecar.admin_ask("GET", "/config").body)
    assert shown["qos"]["rules"][1]["model"] == "batch-*"
    assert shown["qos"]["p2"]["deadline_s"] == 30


def test_a_rule_sees_no_more_than_64_kib_of_the_body(started, upstream):
    sidecar = started(GRANTED + '[[qos.rules]]\nqos = "P2"\nmodel = "late"\n')
    early = b'{"model":"late","prompt":"%b"}' % (b"x" * 100_000)
    late = b'{"prompt":"%b","model":"late"}' % (b"x" * 100_000)
    assert sidecar.ask(post(early)).get("X-QoS-Class") == b"P2"
    assert sidecar.ask(post(late)).get("X-QoS-Class") == b"P1"
    with sidecar.client() as client:
        # The class is known with the first 64 KiB, though the body streams on.
        client.send(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(early))
        client.send(early[:70_000])
        until(
            lambda: sidecar.metric("tongguan_proxy_requests_started_total", qos="P2") == 2,
            "the class before the whole body",
        )
        client.send(early[70_000:])
        assert client.answer().get("X-QoS-Class") == b"P2"
    assert upstream.last().body() == early


def test_expect_is_answered_before_a_rule_that_needs_the_body(started, upstream):
    del upstream
    sidecar = started(GRANTED + '[[qos.rules]]\nqos = "P2"\nmodel = "m"\n')
    with sidecar.client() as client:
        client.send(
            b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
            % len(CHAT)
        )
        assert client.head().status == 100
        answer = client.send(CHAT).answer()
        assert (answer.status, answer.get("X-QoS-Class")) == (200, b"P2")


def test_a_rule_raises_nobody_above_the_tenants_cap(started, upstream, keys):
    del upstream
    toml = '[tenants.default]\nmax_class = "P2"\n[[qos.rules]]\nqos = "P0"\nmodel = "m"\n'
    sidecar = started(toml, keys=keys)
    answer = sidecar.ask(post(CHAT))
    assert answer.get("X-QoS-Class") == b"P2"
    assert sidecar.record(answer.trace_id)["qos_asked"] == "P0"


def test_rules_see_the_model_that_a_sealed_request_names_outside(started, upstream, keys, channel):
    del upstream
    sidecar = started(GRANTED + RULES, keys=keys)
    for model, qos in (("batch-7", b"P2"), ("other", b"P1")):
        sealed = channel.seal(asked(model))
        answer = ask(sidecar, sealed.request())
        assert sealed.open(answer)[0] == 200
        assert answer.get("X-QoS-Class") == qos


# --- rates


def test_a_class_has_a_rate_and_retry_after_is_true_to_its_bucket(started, upstream):
    del upstream
    sidecar = started(QOS_P1_RATE=0.5, QOS_P1_BURST=2)
    with sidecar.client() as client:
        answers = [client.send(post(CHAT, P1)).answer() for _ in range(3)]
        assert [a.status for a in answers] == [200, 200, 429]
        assert answers[2].error() == "rate_limited"
        assert answers[2].get("Retry-After") == b"2"
        assert client.send(post(CHAT, P0)).answer().status == 200  # P0 passes by
        assert client.send(post(CHAT, P2)).answer().status == 200
        assert sidecar.metric("tongguan_proxy_rate_limited_total", qos="P1", scope="class") == 1
        until(lambda: client.send(post(CHAT, P1)).answer().status == 200, "a token again")


def test_a_tenant_has_a_rate_over_its_classes(started, upstream, keys):
    del upstream
    toml = '[tenants.default]\nmax_class = "P0"\nrate = 0.01\nburst = 2\n'
    sidecar = started(toml, keys=keys)
    statuses = [sidecar.ask(post(CHAT, qos)).status for qos in (P1, P2, P1, P0)]
    assert statuses == [200, 200, 429, 200]
    answer = sidecar.ask(post(CHAT, P2))
    assert (answer.status, answer.error()) == (429, "rate_limited")
    assert 90 <= int(answer.get("Retry-After")) <= 100
    assert sidecar.record(answer.trace_id)["outcome"] == "shed"
    assert sidecar.metric("tongguan_proxy_rate_limited_total", scope="tenant") == 2
