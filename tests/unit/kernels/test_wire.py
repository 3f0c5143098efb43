"""The C readers: what they take is exactly what their twins say, and all usual traffic is taken."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import hmac
import os
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import wire
from proxy.audit import chain
from proxy.http import body, chunked, http1
from tests.unit.kernels.wire_cases import (
    ALL_LIMITS,
    ANSWERS,
    BODIES,
    CLIENTS,
    IDS,
    LIMITS,
    NONE,
    SEEDS,
    SERVERS,
    DeferredError,
    agrees,
    arguments,
    damaged,
    defer,
    readers,
)

ROOT = Path(__file__).resolve().parents[3]
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
built = pytest.mark.skipif(not wire.AVAILABLE, reason="kernels.wire: no extension built here")
PAIRS = readers()


def test_extension_is_built_where_it_can_be():
    compiler = sysconfig.get_config_var("CC") or "cc"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which(compiler.split()[0]) is None or not header.exists():
        pytest.skip("no C compiler or no Python.h: the pure twins are used")
    assert wire.AVAILABLE


def test_the_sidecar_works_without_the_extension():
    code = (
        "import sys\nsys.modules['kernels.wire._wire'] = None\n"
        "from kernels import wire\nfrom proxy.http import body, http1\n"
        "assert not wire.AVAILABLE\n"
        "assert http1.parse_request is http1.parse_request_pure\n"
        "assert body.view is body.view_pure\n"
        "import proxy.server\nprint(body.members(b'{\"a\":1}'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=False, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("{'a': (5, 6)}\n", "")


@built
def test_importing_proxy_uses_the_extension():
    for used, pure in (
        (http1.parse_request, http1.parse_request_pure),
        (http1.parse_response, http1.parse_response_pure),
        (body.members, body.members_pure),
        (body.view, body.view_pure),
        (body.cut_answer, body.cut_answer_pure),
    ):
        assert used is not pure
        assert used.__name__ == pure.__name__.removesuffix("_pure")


USUAL = [
    *[pytest.param("parse_request", (v, LIMITS), id=f"request {k}") for k, v in CLIENTS.items()],
    *[
        pytest.param("parse_response", (v, LIMITS, m), id=f"response {k} {m.decode()}")
        for k, v in SERVERS.items()
        for m in (b"POST", b"HEAD")
    ],
    *[pytest.param("view", (v,), id=f"view {k}") for k, v in BODIES.items()],
    *[pytest.param("members", (v,), id=f"members {k}") for k, v in BODIES.items()],
    *[
        pytest.param("cut_answer", (v, added), id=f"answer {k} {len(added)}")
        for k, v in ANSWERS.items()
        for added in (IDS, NONE)
    ],
]


@built
@pytest.mark.parametrize(("name", "given_"), USUAL)
def test_usual_traffic_is_read_in_c_alone(name, given_):
    assert agrees(PAIRS[name], *given_)


@built
@pytest.mark.parametrize("name", PAIRS)
def test_every_prefix_and_every_wrong_byte_agrees(name):
    rng = random.Random(1)
    compared = 0
    for seed in SEEDS[name]:
        for at in range(len(seed)):
            agrees(PAIRS[name], *arguments(rng, name, seed[:at]))
            wrong = seed[:at] + bytes([rng.randrange(256)]) + seed[at + 1 :]
            compared += agrees(PAIRS[name], *arguments(rng, name, wrong))
    assert compared > 20  # else nothing was compared


@built
@pytest.mark.parametrize("name", PAIRS)
def test_damaged_traffic_agrees(name):
    rng = random.Random(20)
    taken = sum(agrees(PAIRS[name], *arguments(rng, name, damaged(rng, name))) for _ in range(4000))
    assert taken > 200  # else nothing was compared


TCHARS = [*"!#$%&'*+-.^_`|~09AZaz"]
NAMES = st.one_of(
    st.sampled_from([n.decode() for table in http1._GRAMMAR.request for n in table]),
    st.sampled_from([n.decode() for table in http1._GRAMMAR.response for n in table]),
    st.text(TCHARS, min_size=1, max_size=12),
)
SPELLED = st.builds(
    lambda n, how: how(n), NAMES, st.sampled_from([str.lower, str.upper, str.title])
)
VALUES = st.one_of(
    st.sampled_from(
        ["", "x", "5", "0", "007", "chunked", "Chunked", "close", "Keep-Alive", "100-continue",
         "a:80", "a, b", "\t x \t", "\xe9", "123456789012345678", "1234567890123456789"]
    ),
    st.text(st.characters(codec="latin-1", exclude_characters="\r\n"), max_size=20),
)  # fmt: skip
STARTS = st.sampled_from(
    ["GET / HTTP/1.1", "POST /v1/x?y HTTP/1.0", "\r\nHEAD /%41 HTTP/1.1", "QUERY /a HTTP/1.1",
     "GET http://a/ HTTP/1.1", "OPTIONS * HTTP/1.1", "PUT /\xe9 HTTP/1.1", "HTTP/1.1 200 OK",
     "HTTP/1.0 204", "HTTP/1.1 304 ", "HTTP/1.1 099 no", "HTTP/1.1 200 a  b", "HTTP/1.1 100 \t"]
)  # fmt: skip


@built
@settings(UNHURRIED, max_examples=400)
@given(
    STARTS,
    st.lists(st.tuples(SPELLED, st.sampled_from([":", ": ", ":\t "]), VALUES), max_size=8),
    st.sampled_from(ALL_LIMITS),
    st.sampled_from([b"", b"body", b"\r\n"]),
)
def test_heads_agree(start, fields, limits, behind):
    lines = [start, *(name + colon + value for name, colon, value in fields)]
    data = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + behind
    agrees(PAIRS["parse_request"], data, limits)
    agrees(PAIRS["parse_response"], data, limits, b"GET")


BLANKS = st.sampled_from(["", "", " ", "\n", "\t\r\n "])
KEYS = st.sampled_from(
    ['"model"', '"messages"', '"prompt"', '"temperature"', '"stream"', '"max_tokens"', '"choices"',
     '"max_completion_tokens"', '"usage"', '"token_ids"', '"prompt_token_ids"', '"index"', '""',
     '"message"', '"text"', '"finish_reason"', '"content"', '"mod\\u0065l"', '"\u540d"', '"a"']
)  # fmt: skip
TEXTS = st.lists(
    st.sampled_from(
        ["a", "\u4f60", "\U0001f600", "\\n", '\\"', "\\\\", "\\/", "\\u0000", "\\u00e9", "\\u4F60",
         "\\ud83d\\ude00", "\\ud83d", "\\ude00", "\x7f", "x" * 30, "\u00e9" * 9]
    ),
    max_size=6,
).map(lambda parts: '"' + "".join(parts) + '"')  # fmt: skip
SCALARS = st.one_of(
    TEXTS,
    st.sampled_from(
        ["null", "true", "false", "0", "-0", "1", "127", "128", "-1", "1.5", "1e2", "1E999",
         "4294967295", "4294967296", "9007199254740991", "9007199254740992", "123456789012345678",
         "1234567890123456789", "12345678901234567890", "[1,2]", "[]", "{}"]
    ),
)  # fmt: skip


@st.composite
def objects(draw, values):
    parts = []
    for key in draw(st.lists(KEYS, max_size=5, unique=draw(st.booleans()))):
        w = [draw(BLANKS) for _ in range(4)]
        parts.append(f"{w[0]}{key}{w[1]}:{w[2]}{draw(values)}{w[3]}")
    return "{" + (",".join(parts) or draw(BLANKS)) + "}"


@st.composite
def arrays(draw, values):
    parts = [draw(BLANKS) + v + draw(BLANKS) for v in draw(st.lists(values, max_size=3))]
    return "[" + (",".join(parts) or draw(BLANKS)) + "]"


TREES = st.recursive(SCALARS, lambda v: st.one_of(objects(v), arrays(v)), max_leaves=8)


@st.composite
def answers(draw):
    """Answers with the shape of a completion, so that the inner readers are reached."""
    choice = st.builds(
        lambda first, message, rest: "{" + first + f'"message":{message}' + rest + "}",
        st.sampled_from(["", '"token_ids":[1],', '"index":0,', '"index":2 , "text":"t",']),
        st.one_of(objects(SCALARS), st.just("null")),
        st.sampled_from(["", ',"finish_reason":"stop"', ',"token_ids":[2, 3]', ' , "index":1']),
    )
    choices = draw(arrays(choice))
    usage = draw(st.one_of(objects(SCALARS), SCALARS))
    before = draw(st.sampled_from(["", '"model":"m",', '"token_ids":[0] , ']))
    return f'{{{before}"choices":{choices},"usage":{usage}}}'


@built
@settings(UNHURRIED, max_examples=400)
@given(st.builds(lambda a, t, b: a + t + b, BLANKS, st.one_of(objects(TREES), answers()), BLANKS))
def test_bodies_agree(text):
    data = text.encode()
    agrees(PAIRS["members"], data)
    agrees(PAIRS["view"], data)
    agrees(PAIRS["cut_answer"], data, IDS)
    agrees(PAIRS["cut_answer"], data, NONE)


@built
@pytest.mark.parametrize("depth", [63, 64, 65, 66, 500, 2000])
def test_depth_is_bounded(depth):
    for left, right in ((b"[", b"]"), (b'{"a":', b"}")):
        data = b'{"model":' + left * depth + b"1" + right * depth + b"}"
        assert agrees(PAIRS["view"], data) is (depth <= 64)
        assert agrees(PAIRS["cut_answer"], data, NONE) is False


@built
@pytest.mark.parametrize("count", [1, 64, 65, 300])
def test_members_are_bounded(count):
    data = b'{"model":"m"' + b"".join(b',"a%d":1' % i for i in range(1, count)) + b"}"
    assert agrees(PAIRS["view"], data) is (count <= 64)


@built
@pytest.mark.parametrize(
    ("end", "good"),
    [(b"", True), (b"\\n", True), (b"\xc3\xa9", True), (b"\x1f", False), (b"\xff", False),
     (b"\\", False), (b'"', False), (b"\x7f", True), (b"\xf0\x9f\x98\x80", True)],
)  # fmt: skip
def test_values_at_every_offset_of_a_block_agree(end, good):
    for size in range(70):
        data = b'{"model":"' + b"x" * size + end + b'"}'
        seen = {agrees(PAIRS["view"], data), agrees(PAIRS["cut_answer"], data, NONE)}
        assert seen == {good}
        head = b"GET / HTTP/1.1\r\nHost: x\r\nA:" + b"x" * size + end + b"\r\n\r\n"
        assert agrees(PAIRS["parse_request"], head, LIMITS) is (end not in {b"\x1f", b"\x7f"})


@built
def test_whole_chunks_are_read_in_c_alone():
    pieces: list[bytes] = []
    data = b"5\r\nhello\r\n00a\r\n0123456789\r\n"
    for behind in (b"", b"0\r\n\r\n", b"5\r\nhell", b"5;a\r\nhello\r\n", b"x", b"5\r\nhello!\n"):
        pieces.clear()
        assert chunked.whole_chunks(data + behind, pieces) == len(data)
        assert pieces == [b"hello", b"0123456789"]
    assert chunked.whole_chunks(bytearray(data), pieces) == 0
    with pytest.raises(TypeError):
        chunked.whole_chunks(data, ())


@built
def test_odd_calls_are_the_twins():
    request = CLIENTS["curl"]
    whole = http1.parse_request_pure(request, LIMITS)
    assert http1.parse_request(request, limits=LIMITS, start=0) == whole
    assert http1.parse_request(b"xy" + request, LIMITS, start=2) == whole
    assert body.cut_answer(body=b"{}", added=NONE) == (b"{}", body.AnswerFacts())
    for call in (
        lambda: http1.parse_request(request),
        lambda: http1.parse_request(request, None),
        lambda: http1.parse_response(request, LIMITS),
        lambda: http1.parse_request("text", LIMITS),
    ):
        with pytest.raises((TypeError, AttributeError)):
            call()
    assert http1.parse_request(request, LIMITS, len(request) + 9) is None
    with pytest.raises(TypeError):
        body.view()


@built
def test_a_bytearray_can_be_resized_after_a_call():
    buffer = bytearray(CLIENTS["curl"])
    assert http1.parse_request(buffer, LIMITS) == http1.parse_request_pure(buffer, LIMITS)
    del buffer[:]
    assert http1.parse_request(buffer, LIMITS) is None


@built
def test_an_answer_without_cuts_is_the_very_object():
    data = ANSWERS["tool"]
    assert body.cut_answer(data, IDS)[0] is data
    assert body.cut_answer(data, NONE)[0] is data


@built
def test_a_class_with_other_slots_is_refused():
    @dataclass(slots=True)
    class Other:
        status: int
        model: str

    class Plain:
        pass

    for wrong in (Other, Plain, int, http1.RequestHead):
        with pytest.raises((TypeError, AttributeError)):
            wire.bodies((wrong, body.AnswerFacts), body.IDS, defer, defer, defer)
        with pytest.raises((TypeError, AttributeError)):
            wire.heads((wrong, wrong, wrong), http1._GRAMMAR, defer, defer)


@built
def test_tables_that_lack_a_name_are_refused():
    classes = (http1.RequestHead, http1.ResponseHead, http1.HeadLimits)
    watched, dropped = http1._GRAMMAR.request
    for missing in (b"host", b"content-length", b"transfer-encoding", b"connection", b"expect"):
        fewer = tuple(name for name in watched if name != missing)
        grammar = http1._GRAMMAR._replace(request=(fewer, dropped))
        with pytest.raises(ValueError, match="has to be watched"):
            wire.heads(classes, grammar, defer, defer)
    many = tuple(b"n%d" % i for i in range(200))
    with pytest.raises(ValueError, match="too many"):
        wire.heads(classes, http1._GRAMMAR._replace(doubtful=many), defer, defer)
    with pytest.raises(TypeError):
        wire.heads(classes, http1._GRAMMAR._replace(methods=frozenset(many)), defer, defer)


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def taken(fast, *given_) -> bool:
    try:
        fast(*given_)
    except DeferredError:
        return False
    return True


def _steady(grown: tuple[int, int, int]) -> bool:
    blocks, counts, bytes_ = grown
    return blocks < 200 and counts < 200 and bytes_ < 1 << 20


@built
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc: RSS is not shown")
def test_nothing_is_leaked():
    rng = random.Random(3)
    calls = []
    for name, (fast, _) in PAIRS.items():
        rest = {
            "parse_request": (LIMITS,),
            "parse_response": (LIMITS, b"GET"),
            "cut_answer": (IDS,),
            "feed": (9,),
        }.get(name, ())
        calls += [(fast, seed, *rest) for seed in SEEDS[name][:3]]
        # Those that break off, each somewhere else.
        broken = ((fast, damaged(rng, name), *rest) for _ in range(10_000))
        calls += list(islice((call for call in broken if not taken(*call)), 12))
    fast = PAIRS["cut_answer"][0]
    # It makes objects as it reads: broken off at every byte, none of them may stay.
    calls += [(fast, ANSWERS["chat"][:at], IDS) for at in range(len(ANSWERS["chat"]))]
    watched = (None, True, LIMITS, http1.RequestHead, body.AnswerFacts, b"", "", IDS, NONE)

    def some(times: int) -> tuple[int, int, list[int]]:
        for _ in range(times):
            for call in calls:
                taken(*call)
        gc.collect()
        return sys.getallocatedblocks(), resident(), [sys.getrefcount(thing) for thing in watched]

    some(100)
    assert len(calls) > 500

    def grown() -> tuple[int, int, int]:
        blocks, bytes_, counts = some(100)
        blocks_after, bytes_after, counts_after = some(500)
        moved = max(abs(a - b) for a, b in zip(counts, counts_after, strict=True))
        return blocks_after - blocks, moved, bytes_after - bytes_

    # One thing lost by one of the calls would show 500 times, each time; what other tests left
    # behind and a collection frees here shows once.
    seen = [grown()]
    while len(seen) < 3 and not _steady(seen[-1]):
        seen.append(grown())
    assert _steady(seen[-1]), seen


@built
def test_readers_can_be_thrown_away():
    def twin(*_args: object) -> None:
        raise AssertionError

    classes = (http1.RequestHead, http1.ResponseHead, http1.HeadLimits)
    things = (twin, *classes, *(type(PAIRS[n][0].__self__) for n in ("view", "parse_request")))
    gc.collect()
    before = [sys.getrefcount(thing) for thing in things]
    for _ in range(50):
        wire.heads(classes, http1._GRAMMAR, twin, twin)
        wire.bodies((body.RequestView, body.AnswerFacts), body.IDS, twin, twin, twin)
    gc.collect()
    assert [sys.getrefcount(thing) for thing in things] == before


# --- MACs: HMAC-SHA256 and SHA-256 of parts

PARTS = st.lists(st.binary(max_size=200), max_size=5)
no_mac = pytest.mark.skipif(
    not hasattr(wire._wire, "Mac"), reason="kernels.wire: no libcrypto of the process's own"
)


@no_mac
@UNHURRIED
@given(st.binary(max_size=64), PARTS)
def test_macs_are_those_of_the_standard_library(key, parts):
    made = wire._wire.Mac(key)
    framed = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    for _ in range(2):  # a MAC leaves the key as it was
        assert made.hex(*parts) == hmac.digest(key, b"".join(parts), "sha256").hex()
        assert made.framed(*parts) == hmac.digest(key, framed, "sha256").hex()
    assert wire._wire.sha256(*parts) == hashlib.sha256(b"".join(parts)).digest()


@no_mac
def test_macs_and_their_twins_agree_across_block_ends():
    twin = chain.Hmac("s256", b"k" * 32)
    quick = wire._wire.Mac(b"k" * 32)
    for size in (*range(130), 4095, 4096, 4097, 1 << 20):
        parts = (b"a" * (size // 3), b"b" * (size - size // 3))
        assert quick.hex(*parts) == twin.hex(*parts)
        assert quick.framed(*parts) == twin.framed(*parts)


@no_mac
@pytest.mark.parametrize("part", [bytearray(b"x"), "x", None, 3, memoryview(b"x")])
def test_a_part_that_is_not_bytes_is_refused(part):
    with pytest.raises(TypeError):
        wire._wire.Mac(b"k").hex(b"before", part)
    with pytest.raises(TypeError):
        wire._wire.Mac(b"k").framed(part)
    with pytest.raises(TypeError):
        wire._wire.sha256(part)


@no_mac
@pytest.mark.parametrize("key", [bytes(65), "text", None])
def test_a_key_that_is_none_is_refused(key):
    with pytest.raises((TypeError, ValueError)):
        wire._wire.Mac(key)


ROW = ("", "", "", "", "")


@no_mac
@pytest.mark.parametrize(
    ("prev", "seq", "walls", "rows"),
    [
        ("0" * 64, 0, [1], (ROW,)),
        ("0" * 64, 0, (1,), [ROW]),
        ("0" * 64, 0, [1], [ROW[:-1]]),
        ("0" * 64, 0, [1], [list(ROW)]),
        ("0" * 64, 0, [1], [(*ROW[:-1], b"")]),
        ("0" * 64, 0, [1], [(*ROW[:-1], "\ud800")]),
        ("0" * 64, 0, [1], [(*ROW[:-1], "x" * 1000)]),
        ("0" * 64, 0, [1], [ROW] * 2),
        ("0" * 64, 0, [1], []),
        ("0" * 64, 0, [1, -1], [ROW] * 2),
        ("0" * 64, 0, [1, 1 << 64], [ROW] * 2),
        ("0" * 64, 0, [1, 1.0], [ROW] * 2),
        ("0" * 64, -1, [1], [ROW]),
        ("0" * 63, 0, [1], [ROW]),
        ("g" * 64, 0, [1], [ROW]),
        ("0" * 64, 0, [1] * 65_537, [ROW] * 65_537),
    ],
)
def test_rows_that_are_none_are_refused(prev, seq, walls, rows):
    mac = wire._wire.Mac(b"k")
    call = wire._wire.request_run
    lines, leaves = call(mac, "0" * 64, "", "", 0, [1, 1], [2, 2], [ROW] * 2, 1000)
    assert (lines.count(b"\n"), len(leaves)) == (2, 64)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        call(mac, prev, "", "", seq, walls, [2] * len(walls), rows, 1000)
    with pytest.raises(ValueError, match="a line holds 10 bytes"):
        call(mac, "0" * 64, "", "", 0, [1], [2], [ROW], 10)
    with pytest.raises((TypeError, ValueError, OverflowError)):
        call(mac, "0" * 64, "", "", 0, [1], [2.0], [ROW], 1000)
    with pytest.raises(TypeError):
        call(object(), "0" * 64, "", "", 0, [1], [2], [ROW], 1000)


@no_mac
def test_a_run_leaves_nothing_behind_whether_it_is_made_or_refused():
    mac, run = wire._wire.Mac(b"k"), wire._wire.request_run
    walls, monos, rows = [10**18] * 40, [10**9] * 40, [("a" * 700, *ROW[1:])] * 40
    good = mac, "0" * 64, "kind", "origin", 5, walls, monos, rows, 1000
    bad = [
        (*good[:-1], 99),
        (*good[:-2], [*rows[:-1], ROW[:-1]], 1000),
        (*good[:6], [1], *good[7:]),
    ]

    def some(times: int) -> tuple[int, int, list[int]]:
        for _ in range(times):
            run(*good)
            wire._wire.crc32(b"x" * 5000, 7)
            for refused in bad:
                with contextlib.suppress(TypeError, ValueError):
                    run(*refused)
        gc.collect()
        counts = [sys.getrefcount(thing) for thing in (mac, walls, monos, rows, rows[0], ROW)]
        return sys.getallocatedblocks(), resident(), counts

    some(50)
    blocks, resident_bytes, counts = some(50)
    blocks_after, resident_after, counts_after = some(1000)
    assert counts == counts_after
    assert blocks_after - blocks < 500
    assert resident_after - resident_bytes < 8 << 20  # a lost run would be 28 MB


@pytest.mark.skipif(not wire.AVAILABLE, reason="kernels.wire: no extension built here")
def test_writing_begins_on_a_file_and_on_nothing_else(tmp_path):
    def twin(fd, offset, size):
        raise AssertionError

    begin = wire.writes(twin)
    with (tmp_path / "file").open("wb") as file:
        file.write(b"x" * 10_000)
        file.flush()
        assert begin(file.fileno(), 0, 10_000) == 0
        assert begin(file.fileno(), -1, 10_000) == errno.EINVAL
    reading, writing = os.pipe()
    assert begin(writing, 0, 1) == errno.ESPIPE
    os.close(reading)
    os.close(writing)
    assert begin(-1, 0, 1) == errno.EBADF
    with pytest.raises((TypeError, OverflowError)):
        begin(writing, 0, 1 << 64)
    with pytest.raises(TypeError):
        begin(writing, 0)


def test_without_the_extension_the_twins_are_given_back(monkeypatch):
    monkeypatch.setattr(wire, "_wire", None)
    assert wire.macs(min, max) == (min, max)
    assert (wire.lines(min), wire.runs(max)) == (min, max)
    assert (wire.writes(min), wire.checksums(max)) == (min, max)
