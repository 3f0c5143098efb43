"""Draw a kept run of `perf.proxy`: `perf/work/venv-plot/bin/python -m perf.plot RESULT PNG`.

CPU time per request and per SSE event of every peer, as multiples of Envoy's. Needs matplotlib, so
`--setup --peers all` makes an environment for it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter

from perf import report

OWN, OTHERS = "#1f6f50", "#9aa5b1"
BARS = (
    ("cpu_us_per_request", "one request, 64 connections, closed loop"),
    ("cpu_us_per_event", "one SSE event, 10 ms apart"),
)


def draw(outcome: dict[str, Any], target: Path) -> None:
    """Write the picture."""
    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for panel, (metric, title) in zip(panels, BARS, strict=True):
        found = report.beside_envoy(outcome["peers"], outcome["apart"], metric)
        colours = [OWN if name.startswith("tongguan") else OTHERS for name in found]
        bars = panel.barh(list(found), list(found.values()), color=colours)
        panel.bar_label(bars, labels=[f"{value:.2f}" for value in found.values()], padding=3)
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.set_xlim(min(found.values()) / 1.6, max(found.values()) * 4)
        panel.axvline(1, color="#444", linewidth=0.8, linestyle=":")
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("CPU time beside Envoy's (log scale)")
        panel.spines[["top", "right"]].set_visible(False)
    facts = outcome["machine"]
    figure.suptitle(
        f"CPU time of a hop, less is better; {facts['cpu']}, Python {facts['python']}, "
        f"commit {facts['commit']}",
        fontsize=10,
    )
    figure.savefig(target, dpi=110, metadata={"Software": None})


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
