"""What rounds mean: the quiet half, ratios, gates, a table. Pure; the runner hands in numbers.

A round that was kept from its core says little. Of each peer's rounds the half with the least
waiting (`wait`: load generator and peer, shares of their time) counts, and of that the median. Load
and backend share a core, so the load's own waiting is never 0; `peer_wait` should be. Numbers of
different runs are never compared; ratios within one run are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Round = Mapping[str, float]
# Results by peer, then test, one entry a round.
Rounds = Mapping[str, Mapping[str, Sequence[Round]]]
DISTURBED = 0.10  # above this share of waiting a latency means nothing; CPU time still does


@dataclass(frozen=True, slots=True)
class Gate:
    """One promise: `value` is at most (`at_least`: at least) `limit`.

    An absent value fails: nothing was measured. `goal` is what is aimed at, where the limit leaves
    room for a disturbed machine.
    """

    name: str
    value: float | None
    limit: float
    unit: str
    at_least: bool = False
    goal: float | None = None

    @property
    def ok(self) -> bool:
        """Say whether the promise holds."""
        if self.value is None:
            return False
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def gate_lines(gates: Iterable[Gate]) -> list[str]:
    """Return one line of text a gate."""
    lines = []
    for gate in gates:
        word = "ok    " if gate.ok else "MISSED"
        value = "not measured" if gate.value is None else f"{gate.value:.3g} {gate.unit}"
        bound = "at least" if gate.at_least else "at most"
        aim = "" if gate.goal is None else f"goal {gate.goal:.3g}, "
        lines.append(f"{word} {gate.name}: {value} ({aim}{bound} {gate.limit:.3g} {gate.unit})")
    return lines


def gate_row(gate: Gate) -> dict[str, float | str | bool | None]:
    """Return a gate as plain data."""
    row: dict[str, float | str | bool | None] = {
        "name": gate.name,
        "value": gate.value,
        "limit": gate.limit,
        "unit": gate.unit,
        "at_least": gate.at_least,
        "ok": gate.ok,
    }
    if gate.goal is not None:
        row["goal"] = gate.goal
    return row


def quiet_half(rounds: Iterable[Round]) -> list[Round]:
    """Return the least disturbed half (rounded up) of the rounds that served anything."""
    served = sorted((r for r in rounds if r["total"] > 0), key=lambda r: r["wait"])
    return served[: (len(served) + 1) // 2]


def median(rounds: Iterable[Round], metric: str) -> float | None:
    """Return the median of a metric over the quiet half; None when there is none."""
    values = [r[metric] for r in quiet_half(rounds) if metric in r]
    return statistics.median(values) if values else None


def ratio(value: float | None, base: float | None) -> float | None:
    """Return value / base; None when either is missing or the base is 0."""
    return value / base if value is not None and base else None


def summary(rounds: Rounds) -> dict[str, dict[str, float | None]]:
    """Return each peer's figures, one flat row."""
    rows = {}
    for peer, tests in rounds.items():
        closed, paced, sse = (tests.get(name, []) for name in ("closed", "open", "sse10"))
        rows[peer] = {
            "cpu_us_per_request": median(closed, "cpu_us"),
            "requests_per_s": median(closed, "rps"),
            "cpu_us_at_500_rps": median(paced, "cpu_us"),
            "p50_us_at_500_rps": median(paced, "p50_us"),
            "p99_us_at_500_rps": median(paced, "p99_us"),
            "cpu_us_per_event": median(sse, "cpu_us_per_event"),
            "event_p50_us": median(sse, "event_p50_us"),
            "wait": median(closed, "peer_wait"),
            "failed": sum(r["errors"] + r["not_200"] for t in tests.values() for r in t),
        }
    for peer, row in rows.items():
        row["added_p50_us"] = _added(rows, peer) if "direct" in rows else None
    return rows


def ratios(rows: Mapping[str, Mapping[str, float | None]]) -> dict[str, dict[str, float | None]]:
    """Return each peer's CPU beside those of relay, Envoy and HAProxy, and its added p50."""
    result = {}
    for peer, row in rows.items():
        if peer == "direct":
            continue
        result[peer] = {
            f"{metric} / {base}": ratio(row.get(metric), rows.get(base, {}).get(metric))
            for metric in ("cpu_us_per_request", "cpu_us_at_500_rps", "cpu_us_per_event")
            for base in ("relay", "envoy", "haproxy")
            if base in rows and base != peer
        }
        if "envoy" in rows and "direct" in rows and peer != "envoy":
            result[peer]["added p50 at 500 rps / envoy"] = ratio(
                row.get("added_p50_us"), rows["envoy"].get("added_p50_us")
            )
    return result


def beside_envoy(
    rows: Mapping[str, Mapping[str, float | None]],
    apart: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float | None]]]],
    metric: str,
) -> dict[str, float]:
    """Return a figure as multiples of Envoy's, least first.

    A peer that was measured apart stands where the sidecar beside it puts it: apart, only ratios to
    that are known.
    """
    found = {}
    for name, row in rows.items():
        if value := ratio(row.get(metric), rows.get("envoy", {}).get(metric)):
            found[name] = value
    bridge = "tongguan-passthrough"
    for slow, run in apart.items():
        beside = run["peers"]
        times = ratio(beside.get(slow, {}).get(metric), beside.get(bridge, {}).get(metric))
        if times and bridge in found:
            found[slow] = times * found[bridge]
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _added(rows: Mapping[str, Mapping[str, float | None]], peer: str) -> float | None:
    own, floor = rows[peer]["p50_us_at_500_rps"], rows["direct"]["p50_us_at_500_rps"]
    return None if own is None or floor is None else own - floor


def table(head: Sequence[str], rows: Iterable[Sequence[float | str | None]]) -> str:
    """Return an aligned text table; None shows as `-`."""
    text = [list(head), *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(head))]
    lines = (
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in text
    )
    return "\n".join(lines)


def _cell(value: float | str | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
