"""What the sidecar promises of a run of `perf.proxy`, as gates. Pure: rows and figures in.

Two lists. The short one goes with the four peers of `make bench`; the whole one with a run in which
`tongguan-passthrough` takes part (`make bench-proxy`). A gate whose peer was not there is left out,
and `absent` says so; a peer that was there and gave no figure misses its gate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perf.report import Gate, ratio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Row = Mapping[str, float | None]
    Rows = Mapping[str, Row]

OWN, PLAIN = "tongguan", "tongguan-passthrough"
CPU, EVENT = "cpu_us_per_request", "cpu_us_per_event"
# A peer of other make does not do our work: beside it stands the sidecar without audit.
TIMES_LESS = {"aiohttp": 4, "mitmdump": 40, "litellm": 500}


def short(rows: Rows, feet: Mapping[str, Mapping[str, float]]) -> list[Gate]:
    """Return the gates of the four peers; none when the sidecar did not take part."""
    if OWN not in rows:
        return []
    own, small = rows[OWN], feet.get(OWN, {})
    found = [
        Gate("RSS, one request a door, one scrape", small.get("rss_mb"), 44.0, "MB"),
        Gate("app door and /livez answer", small.get("cold_start_s"), 0.3, "s"),
        Gate("failed requests", own["failed"], 0, ""),
    ]
    if "envoy" in rows:
        cost = ratio(own[CPU], rows["envoy"][CPU])
        found.insert(0, Gate("CPU/request beside Envoy", cost, 1.2, "x"))
    return found


def whole(
    rows: Rows, feet: Mapping[str, Mapping[str, float]], apart: Mapping[str, Rows]
) -> list[Gate]:
    """Return all gates. `apart`: rows of the runs of slow peers, each with ours beside."""
    return list(_whole(rows, feet, apart))


def _whole(
    rows: Rows, feet: Mapping[str, Mapping[str, float]], apart: Mapping[str, Rows]
) -> Iterator[Gate]:
    def times(
        name: str, limit: float, goal: float, metric: str, own: str, base: str
    ) -> Gate | None:
        if own not in rows or base not in rows:
            return None
        value = ratio(rows[own].get(metric), rows[base].get(metric))
        return Gate(f"{name} beside {base}", value, limit, "x", goal=goal)

    def small(name: str, limit: float, metric: str) -> Gate | None:
        if OWN not in feet or "envoy" not in feet:
            return None
        value = ratio(feet[OWN].get(metric), feet["envoy"].get(metric))
        return Gate(f"{name} beside envoy", value, limit, "x", goal=limit)

    found = [
        times("CPU/request, pass-through,", 2.3, 2.0, CPU, PLAIN, "relay"),
        times("CPU/request, pass-through,", 0.75, 0.65, CPU, PLAIN, "envoy"),
        times("CPU/request, pass-through,", 1.8, 1.5, CPU, PLAIN, "haproxy"),
        times("CPU/request, audit on,", 0.95, 0.85, CPU, OWN, "envoy"),
        times("added p50 at 500/s, audit on,", 1.0, 0.85, "added_p50_us", OWN, "envoy"),
        times("CPU/event, 10 ms apart, audit on,", 0.75, 0.75, EVENT, OWN, "envoy"),
        times("CPU/event, 10 ms apart, audit on,", 1.35, 1.35, EVENT, OWN, "relay"),
        small("RSS started", 0.50, "rss_mb_started"),
        small("RSS after each door, a checkpoint and a scrape", 0.65, "rss_mb"),
        small("cold start", 1.5, "cold_start_s"),
    ]
    yield from (gate for gate in found if gate is not None)
    for base, limit in TIMES_LESS.items():
        there = apart.get(base, rows)
        if base in there and PLAIN in there:
            less = ratio(there[base].get(CPU), there[PLAIN].get(CPU))
            name = f"times less CPU/request, pass-through, than {base}"
            yield Gate(name, less, limit, "x", at_least=True, goal=limit)
    if OWN in feet:
        for name, metric, limit, unit in (
            ("RSS growth with 64 connections", "rss_growth_64_mb", 1.0, "MB"),
            ("RSS growth with a stalled reader of 200 MB", "rss_growth_stalled_mb", 0.5, "MB"),
            ("client gone, upstream sees it", "gone_ms", 50, "ms"),
            ("client gone, upstream silent, upstream sees it", "gone_silent_ms", 50, "ms"),
        ):
            yield Gate(name, feet[OWN].get(metric), limit, unit, goal=limit)
    failed = [rows[name]["failed"] for name in (OWN, PLAIN) if name in rows]
    yield Gate("failed requests", sum(count or 0 for count in failed), 0, "", goal=0)
