"""The order on receipt: early, at one place, and nothing released before the end."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.sm4.budget import Budget
from proxy.sm4.envelope import (
    MAC,
    MEDIA_TYPE,
    SIGNATURE,
    STREAM,
    EnvelopeError,
    Header,
    RequestPrelude,
)
from proxy.sm4.keyring import Keyring
from proxy.sm4.opener import OpenedRequest, RequestOpener
from proxy.sm4.receiver import Receiver
from proxy.sm4.replay import ReplayCache
from tests.unit.proxy.sm4_kit import (
    BODY,
    MODEL,
    NOW_MS,
    PRELUDE,
    begin,
    fresh_nonce,
    hand_sealed,
    hand_streamed,
    make_key,
    make_receiver,
    open_answer,
    open_request,
    seal_request,
)

KEY = make_key()
WINDOW_MS, AHEAD_MS = 60_000, 5_000


def refused(receiver: Receiver, wire: bytes, **arguments: Any) -> EnvelopeError:
    with pytest.raises(EnvelopeError) as caught:
        open_request(receiver, wire, **arguments)
    return caught.value


def reason(receiver: Receiver, wire: bytes, **arguments: Any) -> str:
    return refused(receiver, wire, **arguments).reason


# -- what a good request gives


@pytest.mark.parametrize("suite", [1, 2])
@pytest.mark.parametrize("mac", [False, True])
@pytest.mark.parametrize("cuts", [None, [], [0, 10, 0, 30]])
def test_a_request_comes_out_as_it_was_sealed(
    suite: int, mac: bool, cuts: list[int] | None
) -> None:
    key = make_key(suite, digest="sm3")
    _, wire = seal_request(key, mac=mac, cuts=cuts)

    opened = open_request(make_receiver(key), wire)

    assert (opened.method, opened.target) == ("POST", "/v1/chat/completions")
    assert (opened.content_type, opened.qos) == ("application/json", "P1")
    assert (opened.body, opened.model) == (BODY, MODEL)
    assert (opened.tenant, opened.client, opened.kid) == ("team-a", "client-a", key.kid)
    assert (opened.suite, opened.mac, opened.signature) == (suite, mac, False)


@given(
    body=st.binary(max_size=2000),
    cuts=st.none() | st.lists(st.integers(0, 700), max_size=5),
    pad_log=st.integers(0, 10),
    mac=st.booleans(),
    suite=st.sampled_from([1, 2]),
    feed=st.integers(0, 300),
)
@settings(deadline=None)
def test_cuts_padding_and_segments_change_nothing_of_what_comes_out(
    body: bytes, cuts: list[int] | None, pad_log: int, mac: bool, suite: int, feed: int
) -> None:
    key = make_key(suite, pad=1 << pad_log)
    prelude = RequestPrelude("PUT", "/files?a=1", "application/octet-stream", "")
    _, wire = seal_request(key, body, prelude=prelude, model="", mac=mac, cuts=cuts)

    opened = open_request(make_receiver(key), wire, model=None, cut=feed)

    assert (opened.body, opened.target, opened.model) == (body, "/files?a=1", "")


def test_a_body_of_many_full_frames_comes_out_whole() -> None:
    body = bytes(range(256)) * 1000
    prelude = RequestPrelude("PUT", "/f", "application/octet-stream", "")
    _, wire = seal_request(KEY, body, prelude=prelude, model="", mac=True, cuts=[150_000])

    assert open_request(make_receiver(), wire, model="", cut=4096).body == body


def test_a_get_is_sealed_as_a_post_without_body() -> None:
    _, wire = seal_request(KEY, b"", prelude=RequestPrelude("GET", "/v1/models", "", ""), model="")

    opened = open_request(make_receiver(), wire, model=None)

    assert (opened.method, opened.body, opened.content_type) == ("GET", b"", "")


def test_a_multipart_form_names_its_model_in_a_part() -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n...\r\n--x--\r\n'
    )
    prelude = RequestPrelude("POST", "/v1/audio", "multipart/form-data; boundary=x", "")
    _, wire = seal_request(KEY, body, prelude=prelude, model="whisper")

    assert open_request(make_receiver(), wire, model="whisper").model == "whisper"


def test_bodies_and_targets_show_in_no_repr() -> None:
    _, wire = seal_request(KEY)

    opened = open_request(make_receiver(), wire)

    assert "hello" not in repr(opened)
    assert "/v1/chat" not in repr(opened)


# -- step 0


@pytest.mark.parametrize(
    "content_type",
    [None, "", "application/json", "text/event-stream", MEDIA_TYPE + "2", "x, " + MEDIA_TYPE],
)
def test_another_content_type_is_refused(content_type: str | None) -> None:
    with pytest.raises(EnvelopeError) as caught:
        make_receiver().begin(content_type, None, MODEL, False, None)
    assert caught.value.reason == "bad_carrier"


@pytest.mark.parametrize("encoding", ["gzip", "identity", ""])
def test_a_content_encoding_is_refused(encoding: str) -> None:
    with pytest.raises(EnvelopeError) as caught:
        make_receiver().begin(MEDIA_TYPE, encoding, MODEL, False, None)
    assert caught.value.reason == "bad_carrier"


@pytest.mark.parametrize(
    ("model", "repeated"), [(MODEL, True), ("a b", False), ("é", False), ("x" * 256, False)]
)
def test_a_model_id_twice_or_not_printable_is_refused(model: str, repeated: bool) -> None:
    with pytest.raises(EnvelopeError) as caught:
        make_receiver().begin(MEDIA_TYPE, None, model, repeated, None)
    assert caught.value.reason == "model_mismatch"


# -- steps 1 to 3: known as soon as the header is there


def early(wire: bytes, receiver: Receiver, now_ms: int = NOW_MS) -> str:
    opener = begin(receiver)
    opener.feed(wire[:39], now_ms)
    with pytest.raises(EnvelopeError) as caught:
        opener.feed(wire[39:40], now_ms)
    assert opener.held_bytes == 0
    return caught.value.reason


def test_an_unknown_kid_is_refused_at_the_header() -> None:
    _, wire = seal_request(make_key(kid=b"unknown!"))

    assert early(wire, make_receiver()) == "unknown_kid"


def test_the_other_suite_than_the_kid_s_is_refused() -> None:
    _, wire = seal_request(KEY)

    assert early(wire[:4] + b"\2" + wire[5:], make_receiver()) == "bad_suite"


@pytest.mark.parametrize(
    ("offset_ms", "outcome"),
    [
        (-WINDOW_MS, None),
        (AHEAD_MS, None),
        (-WINDOW_MS - 1, "stale"),
        (AHEAD_MS + 1, "future"),
        (-3_000_000, "stale"),
        (3_000_000, "future"),
    ],
)
def test_the_time_window_includes_its_bounds(offset_ms: int, outcome: str | None) -> None:
    _, wire = seal_request(KEY, now_ms=NOW_MS + offset_ms)

    if outcome is None:
        assert open_request(make_receiver(), wire).body == BODY
    else:
        assert early(wire, make_receiver()) == outcome


@pytest.mark.parametrize(("time_ms", "outcome"), [(10_000, "stale"), (10_001, None)])
def test_nothing_sealed_before_the_start_fence_is_taken(time_ms: int, outcome: str | None) -> None:
    receiver = make_receiver(start_ms=NOW_MS, fence_ms=10_000)
    _, wire = seal_request(KEY, now_ms=NOW_MS + time_ms)
    now_ms = NOW_MS + 20_000

    if outcome is None:
        assert open_request(receiver, wire, now_ms=now_ms).body == BODY
    else:
        assert early(wire, receiver, now_ms) == outcome


def test_without_a_fence_an_envelope_from_before_the_start_is_taken() -> None:
    _, wire = seal_request(KEY, now_ms=NOW_MS - 1)

    assert open_request(make_receiver(start_ms=NOW_MS, fence_ms=0), wire).body == BODY


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"not_after_ms": NOW_MS - 2 * WINDOW_MS}, None),
        ({"not_after_ms": NOW_MS - 2 * WINDOW_MS - 1}, "kid_expired"),
        ({"not_before_ms": NOW_MS + WINDOW_MS}, None),
        ({"not_before_ms": NOW_MS + WINDOW_MS + 1}, "kid_expired"),
    ],
)
def test_a_kid_is_taken_within_its_own_times(change: dict[str, int], outcome: str | None) -> None:
    key = make_key(**change)
    _, wire = seal_request(key)

    if outcome is None:
        assert open_request(make_receiver(key), wire).body == BODY
    else:
        assert early(wire, make_receiver(key)) == outcome


def test_a_spent_kid_takes_no_more_requests() -> None:
    receiver = make_receiver()
    derived = receiver.keyring.get(KEY.kid)
    assert derived is not None
    derived.count(0, envelopes=1 << 28)
    _, wire = seal_request(KEY)

    assert early(wire, receiver) == "kid_expired"


# -- replay


def test_the_same_envelope_again_is_a_replay_at_its_header() -> None:
    receiver = make_receiver()
    _, wire = seal_request(KEY)
    open_request(receiver, wire)

    assert early(wire, receiver) == "replayed"


def test_of_two_copies_at_once_one_is_taken() -> None:
    receiver = make_receiver()
    _, wire = seal_request(KEY)
    first, second = begin(receiver), begin(receiver)
    first.feed(wire, NOW_MS)
    second.feed(wire, NOW_MS)

    assert second.finish(NOW_MS).body == BODY
    with pytest.raises(EnvelopeError) as caught:
        first.finish(NOW_MS)
    assert caught.value.reason == "replayed"


def test_of_two_copies_of_a_stream_the_second_s_first_frame_is_refused() -> None:
    receiver = make_receiver()
    _, wire = seal_request(KEY, cuts=[10])
    first, second = begin(receiver), begin(receiver)
    first.feed(wire[:-1], NOW_MS)

    with pytest.raises(EnvelopeError) as caught:
        second.feed(wire, NOW_MS)
    assert caught.value.reason == "replayed"
    first.feed(wire[-1:], NOW_MS)
    assert first.finish(NOW_MS).body == BODY


def test_a_forged_envelope_does_not_use_up_the_nonce() -> None:
    receiver = make_receiver()
    _, wire = seal_request(KEY)
    forged = wire[:-1] + bytes([wire[-1] ^ 1])

    assert reason(receiver, forged) == "bad_tag"
    assert open_request(receiver, wire).body == BODY


def drip(opener: RequestOpener, last: bytes, now_ms: int) -> OpenedRequest:
    opener.feed(last, now_ms)
    return opener.finish(now_ms)


@pytest.mark.parametrize("drip_ms", [60_001, 120_000, 130_000, 240_000, 250_000, 1_000_000])
@pytest.mark.parametrize("cuts", [None, []])
def test_last_bytes_dripped_past_the_window_are_stale(drip_ms: int, cuts: list[int] | None) -> None:
    """The copy begins before the original is in the cache and ends when the cache has turned."""
    receiver = make_receiver()
    _, wire = seal_request(KEY, cuts=cuts)
    copy = begin(receiver)
    copy.feed(wire[:-1], NOW_MS)
    open_request(receiver, wire)

    with pytest.raises(EnvelopeError) as caught:
        drip(copy, wire[-1:], NOW_MS + drip_ms)

    assert caught.value.reason == "stale"


def test_a_copy_begun_before_and_ended_after_the_first_is_a_replay() -> None:
    receiver = make_receiver()
    _, wire = seal_request(KEY)
    slow = begin(receiver)
    slow.feed(wire[:-1], NOW_MS)
    open_request(receiver, wire, now_ms=NOW_MS + 1)

    slow.feed(wire[-1:], NOW_MS + WINDOW_MS)
    with pytest.raises(EnvelopeError) as caught:
        slow.finish(NOW_MS + WINDOW_MS)
    assert caught.value.reason == "replayed"


def test_a_stream_admitted_in_time_may_end_later() -> None:
    _, wire = seal_request(KEY, cuts=[10])
    opener = begin(make_receiver())
    opener.feed(wire[:-1], NOW_MS)

    opener.feed(wire[-1:], NOW_MS + 10 * WINDOW_MS)

    assert opener.finish(NOW_MS + 10 * WINDOW_MS).body == BODY


def test_after_a_restart_the_fence_stands_for_the_lost_cache() -> None:
    _, wire = seal_request(KEY)
    open_request(make_receiver(), wire)

    restarted = make_receiver(start_ms=NOW_MS + 1, fence_ms=10_000)

    assert reason(restarted, wire, now_ms=NOW_MS + 2) == "stale"


def test_a_full_cache_refuses_with_its_own_code() -> None:
    receiver = make_receiver(replay=ReplayCache(limit=1))
    open_request(receiver, seal_request(KEY)[1])

    problem = refused(receiver, seal_request(KEY)[1])

    assert (problem.reason, problem.code) == ("cache_full", "envelope_cache_full")


# -- steps 4 to 6


@pytest.mark.parametrize("suite", [1, 2])
@pytest.mark.parametrize("cuts", [None, [40]])
def test_any_flipped_bit_is_refused(suite: int, cuts: list[int] | None) -> None:
    key = make_key(suite)
    body = b'{"model":"qwen3-8b"}'
    _, wire = seal_request(key, body, mac=True, cuts=cuts)
    receiver = make_receiver(key)
    for bit in range(8 * len(wire)):
        flipped = bytearray(wire)
        flipped[bit // 8] ^= 1 << bit % 8
        # A fresh cache each time: the first frame of a stream is admitted by itself.
        receiver.replay = ReplayCache()
        assert reason(receiver, bytes(flipped)) in {
            "bad_magic",
            "bad_suite",
            "bad_flags",
            "bad_reserved",
            "bad_length",
            "unknown_kid",
            "stale",
            "future",
            "bad_tag",
            "truncated",
            "trailing_data",
            "frame_too_large",
        }
    receiver.replay = ReplayCache()
    assert open_request(receiver, wire).body == body


@pytest.mark.parametrize("cuts", [None, [20, 20]])
def test_any_cut_off_end_is_truncated(cuts: list[int] | None) -> None:
    _, wire = seal_request(KEY, cuts=cuts)
    receiver = make_receiver()
    for end in range(len(wire)):
        receiver.replay = ReplayCache()
        assert reason(receiver, wire[:end]) == "truncated"


@pytest.mark.parametrize("cuts", [None, [20]])
def test_bytes_behind_the_end_are_refused(cuts: list[int] | None) -> None:
    _, wire = seal_request(KEY, cuts=cuts)

    assert reason(make_receiver(), wire + b"\0") == "trailing_data"
    assert reason(make_receiver(), wire + b"\0", cut=1) == "trailing_data"


def test_another_audience_is_a_bad_tag() -> None:
    _, wire = seal_request(KEY)
    elsewhere = make_key(audience="example.org/llm/pod-2")

    assert reason(make_receiver(elsewhere), wire) == "bad_tag"


@pytest.mark.parametrize("model", [None, "", "other", MODEL + "x"])
def test_another_outer_model_is_a_bad_tag(model: str | None) -> None:
    _, wire = seal_request(KEY)

    assert reason(make_receiver(), wire, model=model) == "bad_tag"


def split_frames(wire: bytes) -> list[bytes]:
    frames, rest = [], wire[40:]
    while rest:
        size = 4 + (int.from_bytes(rest[:4], "big") & 0x7FFF_FFFF)
        frames.append(rest[:size])
        rest = rest[size:]
    return frames


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 0, 1, 2], [0, 2], [1, 2], [2], [2, 0, 1]])
def test_frames_moved_dropped_or_doubled_are_refused(order: list[int]) -> None:
    _, wire = seal_request(KEY, cuts=[20, 20])
    frames = split_frames(wire)

    changed = wire[:40] + b"".join(frames[i] for i in order)

    assert reason(make_receiver(), changed) in {"bad_tag", "trailing_data"}


def test_a_frame_called_last_that_is_not_is_refused() -> None:
    _, wire = seal_request(KEY, cuts=[20, 20])
    first = split_frames(wire)[0]

    assert reason(make_receiver(), wire[:40] + bytes([first[0] | 0x80]) + first[1:]) == "bad_tag"


@pytest.mark.parametrize(
    ("prefix", "outcome"),
    [
        (65_553, "frame_too_large"),
        ((1 << 31) - 1, "frame_too_large"),
        ((1 << 31) | 65_553, "frame_too_large"),
        (16, "bad_length"),
        (0, "bad_length"),
        (1 << 31, "bad_length"),
    ],
)
def test_a_frame_s_size_out_of_bounds_is_refused_at_its_prefix(prefix: int, outcome: str) -> None:
    _, wire = seal_request(KEY, cuts=[])

    assert reason(make_receiver(), wire[:40] + prefix.to_bytes(4, "big")) == outcome


def test_what_is_held_grows_with_what_came_and_not_with_what_is_announced() -> None:
    opener = begin(make_receiver())
    header = Header(1, 0, KEY.kid, NOW_MS, fresh_nonce(), (1 << 20) - 40).encode()

    opener.feed(header, NOW_MS)
    assert opener.held_bytes == 0
    opener.feed(bytes(1000), NOW_MS)
    assert opener.held_bytes == 1000


def test_a_stream_s_plaintext_counts_as_held_until_its_end() -> None:
    _, wire = seal_request(KEY, cuts=[20])
    opener = begin(make_receiver())

    opener.feed(wire[:-1], NOW_MS)
    assert opener.held_bytes > 20
    opener.feed(wire[-1:], NOW_MS)
    opener.finish(NOW_MS)

    assert opener.held_bytes == 0


def test_a_body_above_the_limit_is_refused_while_it_comes() -> None:
    _, wire = seal_request(KEY, cuts=[20])

    assert reason(make_receiver(max_body_bytes=len(wire) - 1), wire) == "frame_too_large"
    assert open_request(make_receiver(max_body_bytes=len(wire)), wire).body == BODY


@pytest.mark.parametrize("padded", [b"", bytes(128), b"\x01" * 128, b"data\x80\0\1"])
def test_bad_padding_is_refused_though_the_tag_is_good(padded: bytes) -> None:
    assert reason(make_receiver(), hand_sealed(b"", padded=padded)) == "bad_padding"


@pytest.mark.parametrize("size", [0, 5, 31])
def test_an_envelope_too_short_for_its_mac_has_none(size: int) -> None:
    assert reason(make_receiver(), hand_sealed(bytes(size), flags=MAC)) == "missing_mac"
    frames = [PRELUDE.encode() + BODY + bytes(60), b"\1" * size]
    assert reason(make_receiver(), hand_streamed(frames, flags=MAC | STREAM)) == "missing_mac"


@pytest.mark.parametrize("flags", [SIGNATURE, SIGNATURE | MAC])
def test_an_envelope_too_short_for_its_signature_has_none(flags: int) -> None:
    assert reason(make_receiver(), hand_sealed(bytes(63), flags=flags)) == "missing_signature"


def test_a_signature_without_a_key_for_it_is_bad() -> None:
    inner = PRELUDE.encode() + BODY + bytes(64)

    assert reason(make_receiver(), hand_sealed(inner, flags=SIGNATURE)) == "bad_signature"


def test_a_wrong_mac_is_refused() -> None:
    inner = PRELUDE.encode() + BODY + bytes(32)

    problem = refused(make_receiver(), hand_sealed(inner, flags=MAC))

    assert (problem.reason, problem.sealer) == ("bad_mac", None)


def test_policy_may_demand_a_mac() -> None:
    needs_mac = make_key(require_mac=True)

    assert reason(make_receiver(needs_mac), hand_sealed(b"x", key=needs_mac)) == "missing_mac"
    _, wire = seal_request(needs_mac)
    assert open_request(make_receiver(needs_mac), wire).mac


def test_a_failure_of_step_6_has_used_up_its_nonce() -> None:
    receiver = make_receiver()
    wire = hand_sealed(b"", padded=bytes(128))

    assert reason(receiver, wire) == "bad_padding"
    assert reason(receiver, wire) == "replayed"


# -- step 7: from here on the answer is sealed


def step_7(receiver: Receiver, wire: bytes, **arguments: Any) -> str:
    problem = refused(receiver, wire, **arguments)
    assert problem.sealer is not None
    assert problem.code == "envelope_rejected"
    return problem.reason


@pytest.mark.parametrize(
    "inner",
    [
        b"",
        b"\0",
        b"\xff\xffshort",
        b"\0\0",
        b"\0\4GET\n" + BODY,
        len(PRELUDE.encode()).to_bytes(2, "big") + PRELUDE.encode()[2:] + BODY,
    ],
)
def test_a_bad_prelude_is_refused(inner: bytes) -> None:
    assert step_7(make_receiver(), hand_sealed(inner)) == "bad_prelude"


def test_a_prelude_over_two_frames_is_refused() -> None:
    prelude = PRELUDE.encode()

    wire = hand_streamed([prelude[:20], prelude[20:] + BODY])

    assert step_7(make_receiver(), wire) == "bad_prelude"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model":"other"}',
        b'{"model":"qwen3-8b","model":"qwen3-8b"}',
        b'{"model":"qwen3-8b","\\u006dodel":"x"}',
        b'{"model":1}',
        b'{"model":null}',
        b'{"Model":"qwen3-8b"}',
        b'{"a":{"model":"qwen3-8b"}}',
        b'["qwen3-8b"]',
        b'{"model":"qwen3-8b"}x',
        b'{"model":"qwen3-8b",}',
        b"{'model':'qwen3-8b'}",
        b'\xef\xbb\xbf{"model":"qwen3-8b"}',
        b'{"model":"qwen3-8b","x":"\xff"}',
        b'{"model":"qwen3-8b","x":NaN}',
    ],
)
def test_a_body_that_names_another_model_or_none_is_refused(body: bytes) -> None:
    _, wire = seal_request(KEY, body)

    assert step_7(make_receiver(), wire) == "model_mismatch"


def test_an_escaped_model_is_compared_as_decoded() -> None:
    _, wire = seal_request(KEY, b'{"model":"\\u0071wen3-8b"}')

    assert open_request(make_receiver(), wire).model == MODEL


def test_a_type_without_a_model_goes_with_no_model_id() -> None:
    prelude = RequestPrelude("POST", "/", "text/plain", "")
    _, wire = seal_request(KEY, b"x", prelude=prelude)

    assert step_7(make_receiver(), wire) == "model_mismatch"


@pytest.mark.parametrize("tenant", ["", "team-b", "TEAM-A", "team-a, team-b"])
def test_another_tenant_outside_is_refused(tenant: str) -> None:
    _, wire = seal_request(KEY)

    assert step_7(make_receiver(), wire, tenant=tenant) == "tenant_mismatch"


def test_the_kid_s_tenant_outside_is_accepted() -> None:
    _, wire = seal_request(KEY)

    assert open_request(make_receiver(), wire, tenant="team-a").tenant == "team-a"


@pytest.mark.parametrize("mac", [False, True])
def test_the_refusal_of_step_7_is_sealed_to_the_one_who_asked(mac: bool) -> None:
    sealer, wire = seal_request(KEY, b'{"model":"other"}', mac=mac)
    problem = refused(make_receiver(), wire)
    assert problem.sealer is not None

    answer = problem.sealer.single(
        400, "application/json", b"{}", nonce=fresh_nonce(), now_ms=NOW_MS
    )

    assert open_answer(sealer, answer) == (400, "application/json", b"{}")


# -- whatever comes


@given(st.binary(max_size=400), st.integers(0, 50))
@settings(deadline=None)
def test_any_bytes_are_refused(data: bytes, cut: int) -> None:
    assert reason(make_receiver(), data, cut=cut)


@given(st.binary(max_size=200), st.sampled_from([0, MAC, STREAM, STREAM | MAC]))
@settings(deadline=None)
def test_any_bytes_behind_a_good_header_are_refused(data: bytes, flags: int) -> None:
    length = 0 if flags & STREAM else max(16, len(data))
    header = Header(1, flags, KEY.kid, NOW_MS, fresh_nonce(), length).encode()

    assert reason(make_receiver(), header + data) in {
        "bad_tag",
        "truncated",
        "bad_length",
        "frame_too_large",
    }


@given(st.binary(max_size=300), st.sampled_from([0, MAC, SIGNATURE]))
@settings(deadline=None)
def test_any_authentic_plaintext_is_a_request_or_refused(inner: bytes, flags: int) -> None:
    receiver = make_receiver()
    for wire in (hand_sealed(inner, flags=flags), hand_streamed([inner], flags=STREAM | flags)):
        try:
            opened = open_request(receiver, wire)
        except EnvelopeError:
            continue
        assert isinstance(opened, OpenedRequest)


# -- the budget of unverified bytes


def test_the_budget_is_shared_and_one_peer_has_an_eighth() -> None:
    budget = Budget(80)

    assert budget.take("a", 10)
    assert not budget.take("a", 1)
    for peer in "bcdefgh":
        assert budget.take(peer, 10)
    assert not budget.take("i", 1)
    assert (budget.held_bytes, budget.refusals) == (80, 2)


def test_what_is_given_back_can_be_taken_again() -> None:
    budget = Budget(80)
    budget.take("a", 10)

    budget.give_back("a", 4)
    assert budget.take("a", 4)
    assert not budget.take("a", 1)
    budget.give_back("a", 10)

    assert budget.held_bytes == 0


def test_a_refused_share_takes_nothing() -> None:
    budget = Budget(80)

    assert not budget.take("a", 11)
    assert budget.held_bytes == 0


def test_keys_that_seal_alike_but_for_the_kid_are_told_apart() -> None:
    other = msgspec.structs.replace(KEY, kid=b"another!")
    receiver = Receiver(
        Keyring([KEY, other]), ReplayCache(), start_ms=0, fence_ms=0, max_body_bytes=1 << 20
    )
    _, wire = seal_request(KEY)

    assert reason(receiver, wire[:8] + other.kid + wire[16:]) == "bad_tag"
