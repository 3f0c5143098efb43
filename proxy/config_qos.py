"""Settings of the classes: who waits how, rules, and what a tenant may ask for."""

import typing
from typing import Literal

from proxy.config_address import split_url
from proxy.settings import Section, setting

QosName = Literal["P0", "P1", "P2"]


class P0(Section):
    """Settings of class P0 alone."""

    inflight: int = setting(128, "P0 requests in flight; beyond it 503 queue_full", ge=1)
    preopen: int = setting(
        2, "idle connections kept to each dedicated endpoint, if P0 is granted", ge=0, le=64
    )


class P1(Section):
    """Settings of class P1."""

    queue: int = setting(256, "requests that wait; beyond it 503 queue_full", ge=0, le=65536)
    deadline_s: float = setting(2.0, "from the head to a leased connection", ge=0.01, le=3600)
    weight: int = setting(16, "share of cost among those that wait", ge=1, le=1000)
    early_shed: float = setting(0.003, "share that may be refused early, over 60 s", ge=0, le=1)
    rate: float = setting(0.0, "requests a second; beyond it 429; 0: any", ge=0)
    burst: int = setting(0, "requests at once under rate; 0: a second's worth", ge=0)


class P2(Section):
    """Settings of class P2."""

    queue: int = setting(256, "requests that wait; beyond it 503 queue_full", ge=0, le=65536)
    deadline_s: float = setting(30.0, "from the head to a leased connection", ge=0.01, le=3600)
    weight: int = setting(1, "share of cost among those that wait", ge=1, le=1000)
    early_shed: float = setting(0.05, "share that may be refused early, over 60 s", ge=0, le=1)
    rate: float = setting(0.0, "requests a second; beyond it 429; 0: any", ge=0)
    burst: int = setting(0, "requests at once under rate; 0: a second's worth", ge=0)


class Adaptive(Section):
    """The limit on requests in flight that follows the upstreams' answers."""

    enabled: bool = setting(True, "follow times to first byte; false: pools.*.inflight alone")
    initial: int = setting(32, "requests in flight at first", ge=1)
    least: int = setting(4, "it never falls below", ge=1)
    tolerance: float = setting(1.2, "times the time at rest: from there they wait", ge=1, le=10)
    headroom: float = setting(0.1, "share of the found limit that is left free", ge=0, le=0.9)


class Rule(Section):
    """One classification rule; conditions that are empty or 0 hold always."""

    qos: str = setting("", "the class it gives: P0, P1 or P2; required")
    model: str = setting("", "model, or a pattern with * ? [...]")
    tenant: str = setting("", "tenant")
    sla: str = setting("", "the tenant's sla")
    prompt_bytes_min: int = setting(0, "prompt's length, at least", ge=0)
    prompt_bytes_max: int = setting(0, "prompt's length, at most; 0: any", ge=0)
    prompt_tokens_min: int = setting(0, "the same, estimated: 4 bytes each", ge=0)
    prompt_tokens_max: int = setting(0, "the same, at most; 0: any", ge=0)


class Qos(Section):
    """Classes, and who waits how."""

    default_class: QosName = setting("P1", "class of a request that names none")
    on_unknown: Literal["default", "reject"] = setting(
        "default", "what an unknown X-QoS-Class does"
    )
    default_max_tokens: int = setting(512, "cost of an answer that names no max_tokens", ge=0)
    limits_url: str = setting(
        "http://127.0.0.1:14190/v1/limits", "where the agent says its limits; empty: not asked"
    )
    p0: P0 = P0()
    p1: P1 = P1()
    p2: P2 = P2()
    adaptive: Adaptive = Adaptive()
    rules: tuple[Rule, ...] = ()


class Tenant(Section):
    """What one tenant may ask for."""

    max_class: QosName = setting("P1", "highest class; P0 is granted by name")
    sla: str = setting("", "a name that qos.rules may ask for")
    rate: float = setting(0.0, "P1 and P2 requests a second; beyond it 429; 0: any", ge=0)
    burst: int = setting(0, "requests at once under rate; 0: a second's worth", ge=0)


def qos_problems(qos: Qos) -> list[str]:
    """Return what is wrong between settings of the classes."""
    problems = []
    for number, rule in enumerate(qos.rules, 1):
        where = f"qos.rules[{number}]"
        if rule.qos not in typing.get_args(QosName):
            problems.append(f"{where}.qos: expected one of 'P0', 'P1', 'P2', got {rule.qos!r}")
        for unit in ("bytes", "tokens"):
            least, most = getattr(rule, f"prompt_{unit}_min"), getattr(rule, f"prompt_{unit}_max")
            if 0 < most < least:
                problems.append(f"{where}.prompt_{unit}_max: less than prompt_{unit}_min")
    if qos.limits_url:
        try:
            split_url(qos.limits_url)
        except ValueError as problem:
            problems.append(f"qos.limits_url: {problem}")
    return problems
