import random
import struct
import zlib
from xml.etree import ElementTree as ET

import pytest

from agent.memory.pressure import COLOURS, POOLS_MAX, HeatMap, level, png, runs, svg


def columns(heat, pool="kv"):
    return next(row["max"] for row in heat.table()["pools"] if row["pool"] == pool)


def test_a_column_keeps_the_highest_and_the_mean():
    heat = HeatMap(columns=3, bucket_s=10)
    for at, share in ((100, 0.2), (104, 0.8), (109, 0.5)):
        heat.observe(at, {"kv": share})
    (row,) = heat.table()["pools"]
    assert row["max"] == [None, None, 0.8]
    assert row["mean"] == [None, None, 0.5]


def test_time_moves_columns_and_gaps_stay_empty():
    heat = HeatMap(columns=4, bucket_s=10)
    heat.observe(100, {"kv": 0.1})
    heat.observe(110, {"kv": 0.2})
    heat.observe(130, {"kv": 0.4})
    assert columns(heat) == [0.1, 0.2, None, 0.4]
    heat.observe(145, {"kv": 0.5})
    assert columns(heat) == [0.2, None, 0.4, 0.5]


@pytest.mark.parametrize("later", [40, 1_000, 10_000_000])
def test_a_long_silence_leaves_nothing_old(later):
    heat = HeatMap(columns=4, bucket_s=10)
    heat.observe(0, {"kv": 0.1, "gone": 0.3})
    heat.observe(later, {"kv": 0.9})
    assert columns(heat) == [None, None, None, 0.9]
    assert [row["pool"] for row in heat.table()["pools"]] == ["kv"]


def test_a_clock_that_goes_back_changes_nothing():
    heat = HeatMap(columns=4, bucket_s=10)
    heat.observe(100, {"kv": 0.1})
    heat.observe(50, {"kv": 0.9})
    assert columns(heat) == [None, None, None, 0.1]


def test_pools_are_bounded_and_counted():
    heat = HeatMap(columns=2, bucket_s=1)
    heat.observe(0, {f"pool{i}": 0.5 for i in range(POOLS_MAX + 3)})
    assert len(heat.table()["pools"]) == POOLS_MAX
    assert heat.table()["left_out"] == 3


@pytest.mark.parametrize(("columns", "bucket_s"), [(0, 1), (1, 0), (-1, 1)])
def test_an_empty_map_is_refused(columns, bucket_s):
    with pytest.raises(ValueError, match="at least one column"):
        HeatMap(columns=columns, bucket_s=bucket_s)


@pytest.mark.parametrize("seed", range(4))
def test_any_history_equals_its_last_columns(seed):
    """The ring against a dictionary of all samples."""
    rng = random.Random(seed)
    heat, kept, now = HeatMap(columns=16, bucket_s=5), {}, 0.0
    for _ in range(400):
        now += rng.choice((0.5, 3, 9, 40))
        share = rng.random()
        heat.observe(now, {"kv": share})
        kept.setdefault(int(now // 5), []).append(share)
    newest = int(now // 5)
    expected = [kept.get(newest - 15 + step) for step in range(16)]
    assert columns(heat) == [round(max(shares), 4) if shares else None for shares in expected]


@pytest.mark.parametrize(
    ("share", "index"), [(None, -1), (0.0, 0), (0.124, 0), (0.126, 1), (1.0, 7)]
)
def test_levels(share, index):
    assert level(share) == index


def test_equal_neighbours_are_one_rectangle():
    assert runs([None, 0.0, 0.01, 0.9]) == [(0, 1, -1), (1, 2, 0), (3, 1, 7)]


def filled():
    heat = HeatMap(columns=240, bucket_s=15)
    for at in range(0, 3600, 15):
        heat.observe(at, {"kv <m&m>": at / 3600, "process": 0.5})
    return heat.table()


def test_the_picture_is_xml_that_says_what_it_shows():
    text = svg(filled())
    tree = ET.fromstring(text)
    assert tree.attrib["role"] == "img"
    assert "process: now 50%, at most 50%" in text
    assert "kv &lt;m&amp;m&gt;: now 100%" in text
    assert "script" not in text
    assert len(text) < 20_000
    assert {rect.get("fill") for rect in tree.iter("{http://www.w3.org/2000/svg}rect")} >= {
        *COLOURS
    }


def test_an_empty_picture_says_so():
    assert "no sample yet" in svg(HeatMap().table())


def test_the_png_has_the_same_cells():
    data = png(filled())
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    parts, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size]) == (
            zlib.crc32(kind + body),
        )
        parts[kind] = body
        at += 12 + size
    width, height = struct.unpack(">II", parts[b"IHDR"][:8])
    rows = zlib.decompress(parts[b"IDAT"])
    assert (width, height, len(rows)) == (720, 44, 44 * 721)
    first = rows[1:721]
    assert (first[0], first[719]) == (0, 7)
    assert set(rows[22 * 721 + 1 : 23 * 721]) == {4}
    assert len(png(HeatMap(columns=4).table())) > 60
