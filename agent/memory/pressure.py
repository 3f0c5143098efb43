"""How full each pool was over time: a ring of columns, and its pictures.

A column holds the highest and the mean share (0 to 1) of each pool within `bucket_s` seconds. The
ring has `columns` columns and at most `POOLS_MAX` pools, so its size is fixed; what is older falls
out, a pool beyond the bound is counted and left out. Pure: `now_s` is given.
"""

from __future__ import annotations

import struct
import zlib
from array import array
from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Mapping

POOLS_MAX: Final = 64
NAME_MAX: Final = 40
# Dark blue to yellow by lightness too: readable without colour vision, and in print.
COLOURS: Final = (
    "#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725",
)  # fmt: skip
NOTHING: Final = "#f2f2f2"
_EMPTY: Final = -1.0


class HeatMap:
    """See the module. One writer; readers take `table()`, a copy."""

    def __init__(self, *, columns: int = 240, bucket_s: float = 15.0) -> None:
        if columns < 1 or bucket_s <= 0:
            raise ValueError("a heat map has at least one column of more than no time")
        self.columns = columns
        self.bucket_s = bucket_s
        self.left_out = 0
        self._rows: dict[str, tuple[array[float], array[float], array[int]]] = {}
        self._newest: int | None = None

    def observe(self, now_s: float, shares: Mapping[str, float]) -> None:
        """Take one sample; one from before the newest column is dropped (the clock went back)."""
        bucket = int(now_s // self.bucket_s)
        if self._newest is not None and bucket < self._newest:
            return
        self._advance(bucket)
        at = bucket % self.columns
        for name, share in shares.items():
            row = self._row(name[:NAME_MAX])
            if row is None:
                self.left_out += 1
                continue
            highest, total, count = row
            highest[at] = max(highest[at], share)
            total[at] += share
            count[at] += 1

    def _row(self, name: str) -> tuple[array[float], array[float], array[int]] | None:
        row = self._rows.get(name)
        if row is None and len(self._rows) < POOLS_MAX:
            size = self.columns
            row = array("d", [_EMPTY] * size), array("d", [0.0] * size), array("L", [0] * size)
            self._rows[name] = row
        return row

    def _advance(self, bucket: int) -> None:
        """Clear the columns up to `bucket`; forget pools that have left the ring."""
        if self._newest is None:
            self._newest = bucket
        for step in range(min(bucket - self._newest, self.columns)):
            at = (bucket - step) % self.columns
            for highest, total, count in self._rows.values():
                highest[at], total[at], count[at] = _EMPTY, 0.0, 0
        if bucket > self._newest:
            self._rows = {name: row for name, row in self._rows.items() if any(row[2])}
        self._newest = bucket

    def table(self) -> dict[str, Any]:
        """Return columns oldest first; None where there was no sample."""
        newest = self._newest if self._newest is not None else 0
        order = [(newest + 1 + step) % self.columns for step in range(self.columns)]
        pools = []
        for name, (highest, total, count) in list(self._rows.items()):
            pools.append(
                {
                    "pool": name,
                    "max": [round(highest[at], 4) if count[at] else None for at in order],
                    "mean": [
                        round(total[at] / count[at], 4) if count[at] else None for at in order
                    ],
                }
            )
        return {
            "bucket_s": self.bucket_s,
            "columns": self.columns,
            "end_unix_s": (newest + 1) * self.bucket_s,
            "left_out": self.left_out,
            "pools": pools,
        }


def level(share: float | None) -> int:
    """Return the colour's index of a share; -1 for none."""
    if share is None:
        return -1
    return min(len(COLOURS) - 1, int(share * len(COLOURS)))


def runs(shares: list[float | None]) -> list[tuple[int, int, int]]:
    """Return (first column, count, level) of equal neighbours: a quiet hour is one rectangle."""
    found: list[tuple[int, int, int]] = []
    for column, share in enumerate(shares):
        now = level(share)
        if found and found[-1][2] == now:
            first, count, _ = found[-1]
            found[-1] = (first, count + 1, now)
        else:
            found.append((column, 1, now))
    return found


_LABEL, _WIDTH, _CELL, _ROW, _TOP = 130, 720, 3, 22, 26


def svg(table: dict[str, Any]) -> str:
    """Return the heat map of the highest shares as a picture with text, and no script."""
    columns, pools = table["columns"], table["pools"]
    cell, right = _WIDTH / columns, _LABEL + _WIDTH
    width = right + 70
    height = _TOP + max(1, len(pools)) * _ROW + 44
    minutes = columns * table["bucket_s"] / 60
    parts = [
        (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="t d" font-family="sans-serif" '
        f'font-size="12"><title id="t">Memory pressure, the last {minutes:.0f} minutes</title>'
        f'<desc id="d">{escape(_in_words(pools))}</desc>'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        f'<text x="{_LABEL}" y="16">{minutes:.0f} min ago</text>'
        f'<text x="{right}" y="16" text-anchor="end">now</text>')
    ]  # fmt: skip
    for index, pool in enumerate(pools):
        y = _TOP + index * _ROW
        parts.append(f'<text x="{_LABEL - 8}" y="{y + 14}" text-anchor="end">'
                     f"{escape(pool['pool'])}</text>")  # fmt: skip
        for first, count, now in runs(pool["max"]):
            colour = NOTHING if now < 0 else COLOURS[now]
            parts.append(f'<rect x="{_LABEL + first * cell:g}" y="{y}" width="{count * cell:g}" '
                         f'height="{_ROW - 3}" fill="{colour}"/>')  # fmt: skip
        last = next((share for share in reversed(pool["max"]) if share is not None), None)
        if last is not None:
            parts.append(f'<text x="{right + 6}" y="{y + 14}">{last:.0%}</text>')
    y = height - 30
    for index, colour in enumerate(COLOURS):
        parts.append(f'<rect x="{_LABEL + index * 40}" y="{y}" width="40" height="10" '
                     f'fill="{colour}"/>')  # fmt: skip
    parts.append(f'<text x="{_LABEL}" y="{y + 24}">empty</text><text x="{_LABEL + 320}" '
                 f'y="{y + 24}" text-anchor="end">full</text></svg>')  # fmt: skip
    return "".join(parts)


def _in_words(pools: list[dict[str, Any]]) -> str:
    """Say what the picture shows, for who cannot see it."""
    words = []
    for pool in pools:
        known = [share for share in pool["max"] if share is not None]
        if known:
            words.append(f"{pool['pool']}: now {known[-1]:.0%}, at most {max(known):.0%}")
    return "; ".join(words) or "no sample yet"


def png(table: dict[str, Any]) -> bytes:
    """Return the same cells as a PNG without text: a column is 3 pixels, a pool 22."""
    palette = b"".join(bytes.fromhex(colour[1:]) for colour in (*COLOURS, NOTHING))
    rows = []
    for pool in table["pools"]:
        cells = bytes(len(COLOURS) if (now := level(share)) < 0 else now for share in pool["max"])
        line = b"".join(cells[at : at + 1] * _CELL for at in range(len(cells)))
        rows += [b"\0" + line] * _ROW
    rows = rows or [b"\0" + bytes([len(COLOURS)]) * (table["columns"] * _CELL)]
    header = struct.pack(">IIBBBBB", table["columns"] * _CELL, len(rows), 8, 3, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(b"".join(rows))),
            (b"IEND", b""),
        )
    )  # fmt: skip
