"""Answers: sealed by the receiver, opened by the one who asked, and by nobody else."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.sm4.answer import AnswerOpener
from proxy.sm4.envelope import HEADER_BYTES, MEDIA_TYPE, EnvelopeError
from proxy.sm4.frames import RawFrames, SseFrames, frame_data_max, sse_event
from proxy.sm4.sealer import Carrier, RequestSealer, ResponseSealer, SingleTooLargeError
from tests.unit.proxy.sm4_kit import (
    MODEL,
    NOW_MS,
    PRELUDE,
    derived_of,
    fresh_nonce,
    make_key,
    open_answer,
    pieces,
    seal_request,
)

KEY = make_key()
SSE = "text/event-stream"
TOKENS = [b'data: {"t":"%d"}\n\n' % i for i in range(5)]


def ends(key: Any = KEY, *, mac: bool = False) -> tuple[RequestSealer, ResponseSealer]:
    """Return what the client keeps of its request, and the receiver's sealer for its answer."""
    sealer, _ = seal_request(key, mac=mac)
    answer = ResponseSealer(derived_of(key), MODEL.encode(), sealer.nonce, mac=sealer.mac)
    return sealer, answer


def single(answer: ResponseSealer, body: bytes = b"{}", status: int = 200) -> bytes:
    return answer.single(status, "application/json", body, nonce=fresh_nonce(), now_ms=NOW_MS)


def streamed(
    answer: ResponseSealer,
    parts: list[bytes],
    *,
    carrier: Carrier = "sse",
    content_type: str = SSE,
    end: bool = True,
) -> bytes:
    stream = answer.stream(200, content_type, nonce=fresh_nonce(), now_ms=NOW_MS, carrier=carrier)
    wire = stream.head() + b"".join(stream.data(part) for part in parts)
    return wire + stream.last() if end else wire


def reason(sealer: RequestSealer, wire: bytes, content_type: str = MEDIA_TYPE) -> str:
    with pytest.raises(EnvelopeError) as caught:
        open_answer(sealer, wire, content_type=content_type)
    return caught.value.reason


def outer_type(carrier: Carrier) -> str:
    return SSE if carrier == "sse" else MEDIA_TYPE


# -- what a good answer gives


@given(
    parts=st.lists(st.binary(max_size=900), max_size=6),
    pad_log=st.integers(0, 16),
    mac=st.booleans(),
    suite=st.sampled_from([1, 2]),
    carrier=st.sampled_from(["raw", "sse"]),
    cut=st.integers(0, 700),
)
@settings(deadline=None)
def test_cuts_padding_and_segments_change_nothing_of_what_comes_out(
    parts: list[bytes], pad_log: int, mac: bool, suite: int, carrier: Carrier, cut: int
) -> None:
    sealer, answer = ends(make_key(suite, pad=1 << pad_log), mac=mac)

    wire = streamed(answer, parts, carrier=carrier)

    opened = open_answer(sealer, wire, content_type=outer_type(carrier), cut=cut)
    assert opened == (200, SSE, b"".join(parts))


@pytest.mark.parametrize("suite", [1, 2])
@pytest.mark.parametrize("mac", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 50])
def test_a_single_answer_comes_out_as_it_was_sealed(suite: int, mac: bool, cut: int) -> None:
    sealer, answer = ends(make_key(suite), mac=mac)

    opened = open_answer(sealer, single(answer, b'{"a":1}', 404), cut=cut)

    assert opened == (404, "application/json", b'{"a":1}')


def test_each_frame_is_released_when_it_is_there() -> None:
    sealer, answer = ends(mac=True)
    stream = answer.stream(200, SSE, nonce=fresh_nonce(), now_ms=NOW_MS, carrier="sse")
    opener = AnswerOpener(sealer, SSE, None)

    assert opener.feed(stream.head()) == []
    assert opener.prelude is None
    assert opener.feed(stream.data(b"")) == []
    assert opener.prelude is not None
    assert opener.prelude.status == 200
    for token in TOKENS:
        event = stream.data(token)
        assert opener.feed(event[:-1]) == []
        assert opener.feed(event[-1:]) == [token]
    assert not opener.complete
    assert opener.feed(stream.last()) == []
    assert opener.complete
    assert opener.finish() == b""


def test_a_stream_without_any_body_still_says_its_status() -> None:
    sealer, answer = ends()
    stream = answer.stream(204, "", nonce=fresh_nonce(), now_ms=NOW_MS, carrier="raw")

    assert open_answer(sealer, stream.head() + stream.last()) == (204, "", b"")


def test_a_large_body_is_cut_to_the_carrier_s_frames() -> None:
    sealer, answer = ends(mac=True)
    body = bytes(range(256)) * 1000
    for carrier in ("raw", "sse"):
        stream = answer.stream(
            200, "application/json", nonce=fresh_nonce(), now_ms=NOW_MS, carrier=carrier
        )
        wire = stream.head() + stream.data(body[:100_000]) + stream.last(body[100_000:])
        opened = open_answer(sealer, wire, content_type=outer_type(carrier), cut=8192)
        assert opened == (200, "application/json", body)


@pytest.mark.parametrize("room", [0, 1, 31, 32, 33])
@pytest.mark.parametrize("carrier", ["raw", "sse"])
def test_the_trailer_is_never_cut(room: int, carrier: Carrier) -> None:
    sealer, answer = ends(mac=True)
    body = bytes(2 * frame_data_max(512, 32768 if carrier == "sse" else 65552) - room)
    stream = answer.stream(200, SSE, nonce=fresh_nonce(), now_ms=NOW_MS, carrier=carrier)

    wire = stream.head() + stream.data(b"") + stream.last(body)

    assert open_answer(sealer, wire, content_type=outer_type(carrier))[2] == body


def test_a_body_above_1_mib_is_no_single() -> None:
    sealer, answer = ends()
    largest = (1 << 20) - 40 - 16 - 128 - len(b"..200\napplication/json\n")

    assert open_answer(sealer, single(answer, bytes(largest)))[2] == bytes(largest)
    with pytest.raises(SingleTooLargeError):
        single(answer, bytes(largest + 128))
    with pytest.raises(SingleTooLargeError):
        sealer.single(PRELUDE, bytes(1 << 20))


@pytest.mark.parametrize("pad", [1, 128, 1024, 65536])
def test_event_streams_are_padded_to_512_at_least_and_16384_at_most_in_sse(pad: int) -> None:
    _, answer = ends(make_key(pad=pad))
    event = streamed(answer, [b"x"], end=False).split(b"\n\n")[1].removeprefix(b"data: ")
    frame = base64.urlsafe_b64decode(event + b"=" * (-len(event) % 4))

    assert len(frame) == 4 + 16 + min(max(512, pad), 16384)


def test_tokens_of_other_lengths_make_events_of_one_length() -> None:
    _, answer = ends()
    stream = answer.stream(200, SSE, nonce=fresh_nonce(), now_ms=NOW_MS, carrier="sse")
    stream.data(b"")

    assert len({len(stream.data(b"x" * size)) for size in (1, 17, 200, 511)}) == 1


@pytest.mark.parametrize("content_type", ["text/é", "a\nb", "x" * 2000, "a\x00"])
def test_an_upstream_s_bad_content_type_does_not_end_the_answer(content_type: str) -> None:
    sealer, answer = ends()

    wire = answer.single(200, content_type, b"x", nonce=fresh_nonce(), now_ms=NOW_MS)

    assert open_answer(sealer, wire) == (200, "application/octet-stream", b"x")


def test_two_answers_to_one_request_share_no_key_stream() -> None:
    _, answer = ends()

    assert single(answer)[40:] != single(answer)[40:]


# -- what is refused


@pytest.mark.parametrize("content_type", [None, "", "application/json", "text/plain"])
def test_an_unsealed_answer_is_refused(content_type: str | None) -> None:
    sealer, _ = ends()
    with pytest.raises(EnvelopeError) as caught:
        AnswerOpener(sealer, content_type, None)
    assert caught.value.reason == "bad_carrier"


@pytest.mark.parametrize("content_type", [MEDIA_TYPE, SSE])
def test_an_encoded_answer_is_refused(content_type: str) -> None:
    sealer, _ = ends()
    with pytest.raises(EnvelopeError) as caught:
        AnswerOpener(sealer, content_type, "gzip")
    assert caught.value.reason == "bad_carrier"


def test_an_answer_to_another_request_is_refused() -> None:
    sealer, _ = ends()
    _, other = ends()

    assert reason(sealer, single(other)) == "bad_tag"
    assert reason(sealer, streamed(other, TOKENS), SSE) == "bad_tag"


def test_a_request_played_back_as_the_answer_is_refused() -> None:
    sealer, wire = seal_request(KEY)

    assert reason(sealer, wire) == "bad_flags"
    assert reason(sealer, wire[:5] + b"\4" + wire[6:]) == "bad_tag"


@pytest.mark.parametrize(
    ("asked", "given_", "outcome"), [(True, False, "missing_mac"), (False, True, "bad_flags")]
)
def test_an_answer_has_a_mac_iff_its_request_had_one(
    asked: bool, given_: bool, outcome: str
) -> None:
    sealer, _ = ends(mac=asked)
    answer = ResponseSealer(derived_of(KEY), MODEL.encode(), sealer.nonce, mac=given_)

    assert reason(sealer, single(answer)) == outcome


def test_a_signature_flag_in_an_answer_is_refused() -> None:
    sealer, answer = ends()
    wire = single(answer)

    assert reason(sealer, wire[:5] + b"\x0c" + wire[6:]) == "bad_flags"


def test_another_kid_or_suite_is_refused() -> None:
    sealer, answer = ends()
    wire = single(answer)

    assert reason(sealer, wire[:8] + b"another!" + wire[16:]) == "unknown_kid"
    assert reason(sealer, wire[:4] + b"\2" + wire[5:]) == "bad_suite"


def test_another_model_or_audience_is_a_bad_tag() -> None:
    sealer, _ = ends()
    elsewhere = derived_of(msgspec.structs.replace(KEY, audience="other"))

    other_model = ResponseSealer(derived_of(KEY), b"other", sealer.nonce, mac=False)
    other_audience = ResponseSealer(elsewhere, MODEL.encode(), sealer.nonce, mac=False)

    assert reason(sealer, single(other_model)) == "bad_tag"
    assert reason(sealer, single(other_audience)) == "bad_tag"


@pytest.mark.parametrize("carrier", ["raw", "sse"])
def test_an_answer_without_its_last_frame_is_truncated(carrier: Carrier) -> None:
    sealer, answer = ends(mac=True)
    wire = streamed(answer, TOKENS, carrier=carrier, end=False)

    assert reason(sealer, wire, outer_type(carrier)) == "truncated"


@pytest.mark.parametrize("carrier", ["raw", "sse"])
def test_any_cut_off_end_is_truncated(carrier: Carrier) -> None:
    sealer, answer = ends()
    wire = streamed(answer, TOKENS[:1], carrier=carrier)
    for end in range(0, len(wire), 7):
        assert reason(sealer, wire[:end], outer_type(carrier)) == "truncated"
    assert reason(sealer, wire[:-1], outer_type(carrier)) == "truncated"
    sealed = single(answer)
    for end in range(len(sealed)):
        assert reason(sealer, sealed[:end]) == "truncated"


def test_bytes_behind_the_end_are_refused() -> None:
    sealer, answer = ends()

    assert reason(sealer, single(answer) + b"\0") == "trailing_data"
    assert reason(sealer, streamed(answer, TOKENS, carrier="raw") + b"\0") == "trailing_data"
    assert reason(sealer, streamed(answer, TOKENS) + b"data: QQ\n\n", SSE) == "trailing_data"
    assert reason(sealer, streamed(answer, TOKENS) + b"x", SSE) == "trailing_data"


def test_a_comment_behind_the_end_is_allowed() -> None:
    sealer, answer = ends()
    for tail in (b"\n", b"\r", b": bye", b": bye\n\n"):
        wire = streamed(answer, TOKENS) + tail
        assert open_answer(sealer, wire, content_type=SSE)[2] == b"".join(TOKENS)


@pytest.mark.parametrize("suite", [1, 2])
@pytest.mark.parametrize("carrier", ["raw", "sse", "single"])
def test_any_flipped_bit_is_refused_and_releases_only_true_bytes(suite: int, carrier: str) -> None:
    sealer, answer = ends(make_key(suite), mac=True)
    body = b'{"x":1}'
    if carrier == "single":
        wire, kind = single(answer, body), MEDIA_TYPE
    else:
        form: Carrier = "sse" if carrier == "sse" else "raw"
        wire, kind = streamed(answer, [body], carrier=form), outer_type(form)
    for bit in range(0, 8 * len(wire), 1 if carrier == "single" else 5):
        flipped = bytearray(wire)
        flipped[bit // 8] ^= 1 << bit % 8
        released: list[bytes] = []
        with pytest.raises(EnvelopeError):
            collect(AnswerOpener(sealer, kind, None), bytes(flipped), released)
        assert body.startswith(b"".join(released))


def collect(opener: AnswerOpener, wire: bytes, released: list[bytes]) -> None:
    for piece in pieces(wire, 64):
        released += opener.feed(piece)
    released.append(opener.finish())


def test_a_wrong_mac_holds_the_last_frame_s_body_back() -> None:
    """The frame is authentic, its MAC is another key's: an answer of one who lacks K_mac."""
    sealer, answer = ends(mac=True)
    stream = answer.stream(200, SSE, nonce=fresh_nonce(), now_ms=NOW_MS, carrier="raw")
    stream._derived = derived_of(msgspec.structs.replace(KEY, client="somebody-else"))
    wire = stream.head() + stream.data(b"first")
    opener = AnswerOpener(sealer, MEDIA_TYPE, None)

    assert opener.feed(wire) == [b"first"]
    with pytest.raises(EnvelopeError) as caught:
        opener.feed(stream.last(b"last"))

    assert caught.value.reason == "bad_mac"
    assert not opener.complete


def test_after_a_refusal_nothing_more_is_released() -> None:
    sealer, answer = ends()
    wire = streamed(answer, TOKENS, carrier="raw")
    opener = AnswerOpener(sealer, MEDIA_TYPE, None)
    with pytest.raises(EnvelopeError):
        opener.feed(wire[:60] + bytes([wire[60] ^ 1]) + wire[61:])

    with pytest.raises(EnvelopeError):
        opener.feed(wire)
    with pytest.raises(EnvelopeError):
        opener.finish()


# -- the SSE carrier


def sse_events(answer: ResponseSealer) -> list[bytes]:
    return [event + b"\n\n" for event in streamed(answer, TOKENS[:2]).split(b"\n\n")[:-1]]


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.replace(b"data: ", b"data:"),
        lambda e: e.replace(b"\n", b"\r\n"),
        lambda e: b": comment\n" + e,
        lambda e: b": comment\n\n" + e,
        lambda e: b"\n\n" + e,
        lambda e: e.replace(b"\n\n", b"\n: ping\n\n"),
        lambda e: e.replace(b"\n\n", b"\r\n\n"),
    ],
)
def test_readers_take_what_the_text_allows(change: Any) -> None:
    sealer, answer = ends()
    wire = b"".join(change(event) for event in sse_events(answer))

    assert open_answer(sealer, wire, content_type=SSE)[2] == b"".join(TOKENS[:2])


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(
    "change",
    [
        lambda e: b"event: message\n" + e,
        lambda e: b"id: 1\n" + e,
        lambda e: b"retry: 1\n" + e,
        lambda e: b"\xef\xbb\xbf" + e,
        lambda e: e.replace(b"\n\n", b"\ndata: QUJD\n\n"),
        lambda e: e.replace(b"data: ", b"data:  "),
        lambda e: e.replace(b"data: ", b"Data: "),
        lambda e: e.replace(b"data: ", b"data "),
        lambda e: e.replace(b"data: ", b" data: "),
        lambda e: e.replace(b"\n\n", b" \n\n"),
        lambda e: e.replace(b"\n\n", b"=\n\n"),
        lambda e: e.replace(b"\n\n", b"==\n\n"),
        lambda e: e.replace(b"\n\n", b"\r\r"),
        lambda e: e.replace(b"\n\n", b"\n") + b"data: QUJD\n\n",
        lambda e: b"data: \n\n" + e,
        lambda e: b"data\n\n" + e,
        lambda e: b"data: QUJD\n\n" + e,
        lambda e: b"data: [DONE]\n\n" + e,
        lambda e: e[:12] + b"+" + e[13:],
        lambda e: e[:12] + b"/" + e[13:],
        lambda e: e[:12] + b"\xff" + e[13:],
        lambda e: e[:12] + b"\0" + e[13:],
        lambda e: e[:-3] + b"\n\n",
    ],
)
def test_anything_else_is_a_bad_carrier(change: Any, index: int) -> None:
    sealer, answer = ends()
    events = sse_events(answer)
    events[index] = change(events[index])

    outcome = reason(sealer, b"".join(events), SSE)

    # Cut or changed base64 may also be a header, a frame or a tag that is none.
    assert outcome in {"bad_carrier", "bad_tag", "truncated", "bad_magic", "bad_length"} | {
        "frame_too_large"
    }


def test_loose_bits_at_the_end_of_the_base64_are_refused() -> None:
    sealer, answer = ends()
    events = sse_events(answer)
    # 40 bytes leave four loose bits in the last character.
    last = events[0][-3:-2]
    assert last in b"AQgw"
    events[0] = events[0][:-3] + bytes([last[0] + 1]) + b"\n\n"

    assert reason(sealer, b"".join(events), SSE) == "bad_carrier"


@pytest.mark.parametrize("size", [0, 1, 39, 41, 80])
def test_a_header_event_of_another_size_is_refused(size: int) -> None:
    sealer, _ = ends()

    assert reason(sealer, sse_event(bytes(size)), SSE) == "bad_carrier"


def test_a_single_s_header_in_an_event_is_refused() -> None:
    sealer, answer = ends()

    assert reason(sealer, sse_event(single(answer)[:HEADER_BYTES]), SSE) == "bad_carrier"


@pytest.mark.parametrize(
    ("payload", "outcome"),
    [
        (b"abc", "bad_carrier"),
        ((32_769).to_bytes(4, "big") + bytes(32_769), "frame_too_large"),
        ((65_553).to_bytes(4, "big") + bytes(100), "frame_too_large"),
        ((100).to_bytes(4, "big") + bytes(99), "bad_carrier"),
        ((100).to_bytes(4, "big") + bytes(101), "bad_carrier"),
        ((16).to_bytes(4, "big") + bytes(16), "bad_length"),
    ],
)
def test_a_frame_event_of_another_size_is_refused(payload: bytes, outcome: str) -> None:
    sealer, answer = ends()
    header = sse_events(answer)[0]

    assert reason(sealer, header + sse_event(payload), SSE) == outcome


@pytest.mark.parametrize("junk", [b"data: ", b": ", b""])
def test_a_line_without_end_is_refused_and_not_collected(junk: bytes) -> None:
    sealer, _ = ends()
    opener = AnswerOpener(sealer, SSE, None)
    opener.feed(junk + b"A" * 87_000)

    with pytest.raises(EnvelopeError) as caught:
        opener.feed(b"A" * 1000)
    assert caught.value.reason == "bad_carrier"


@given(st.binary(max_size=300), st.integers(0, 40))
@settings(deadline=None)
def test_any_bytes_are_refused_by_every_reader(data: bytes, cut: int) -> None:
    sealer, _ = ends()
    for kind in (MEDIA_TYPE, SSE):
        with pytest.raises(EnvelopeError):
            collect(AnswerOpener(sealer, kind, None), data, [])
    for reader in (RawFrames(), SseFrames()):
        try:
            for piece in pieces(data, cut):
                list(reader.feed(piece))
        except EnvelopeError:
            continue


@given(st.text(alphabet="data: \r\n:=-_AQgw", max_size=120))
@settings(deadline=None)
def test_any_text_like_the_carrier_s_is_refused(text: str) -> None:
    sealer, answer = ends()
    header = sse_events(answer)[0]

    with pytest.raises(EnvelopeError):
        collect(AnswerOpener(sealer, SSE, None), header + text.encode(), [])


# -- the request's side


@pytest.mark.parametrize("model", ["a b", "é", "x" * 256, "a\n"])
def test_a_model_that_cannot_stand_in_an_envelope_is_not_sealed(model: str) -> None:
    with pytest.raises(ValueError, match="model"):
        RequestSealer(derived_of(KEY), model=model, mac=False, nonce=fresh_nonce(), now_ms=0)


def test_a_kid_that_demands_a_mac_gets_one() -> None:
    sealer, wire = seal_request(make_key(require_mac=True))

    assert sealer.mac
    assert wire[5] == 2


def test_what_is_sealed_is_counted_against_the_kid() -> None:
    derived = derived_of(KEY)
    sealer = RequestSealer(derived, model="", mac=False, nonce=fresh_nonce(), now_ms=NOW_MS)
    wire = sealer.single(PRELUDE, b"x")
    answer = ResponseSealer(derived, b"", sealer.nonce, mac=False)
    stream = answer.stream(200, "", nonce=fresh_nonce(), now_ms=NOW_MS, carrier="raw")
    frames = stream.data(b"x") + stream.last()

    assert derived.sealed_envelopes == 2
    assert derived.sealed_bytes == len(wire) - 40 + len(frames)
