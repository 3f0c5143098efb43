"""Header, prelude, padding and trailer: what is accepted is exactly what is written."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import ERRORS
from proxy.sm4.cipher import TagError, aead
from proxy.sm4.digest import HmacSm3, cryptography_sm3, hkdf_expand, sm3
from proxy.sm4.envelope import (
    MAC,
    REASONS,
    RESPONSE,
    SIGNATURE,
    STREAM,
    EnvelopeError,
    Header,
    RequestPrelude,
    ResponsePrelude,
    decode_header,
    decode_request_prelude,
    decode_response_prelude,
    media_type,
    pad,
    split_prelude,
    split_trailer,
    unpad,
)

HEADER = Header(1, 0, b"kidkidki", 1_767_225_600_000, bytes(range(12)), 144)


def refused_header(raw: bytes, *, response: bool = False) -> str:
    with pytest.raises(EnvelopeError) as refused:
        decode_header(raw, response=response)
    return refused.value.reason


def patched(offset: int, value: bytes) -> bytes:
    raw = HEADER.encode()
    return raw[:offset] + value + raw[offset + len(value) :]


@given(
    suite=st.sampled_from([1, 2]),
    flags=st.sampled_from([0, MAC, SIGNATURE, MAC | SIGNATURE]),
    kid=st.binary(min_size=8, max_size=8),
    time_ms=st.integers(0, (1 << 64) - 1),
    nonce=st.binary(min_size=12, max_size=12),
    length=st.integers(16, (1 << 20) - 40),
)
def test_a_header_decodes_to_what_was_encoded(
    suite: int, flags: int, kid: bytes, time_ms: int, nonce: bytes, length: int
) -> None:
    header = Header(suite, flags, kid, time_ms, nonce, length)

    assert decode_header(header.encode(), response=False) == header


@pytest.mark.parametrize("magic", [b"SMX0", b"SMX2", b"smx1", b"\0\0\0\0", b"GET "])
def test_another_magic_is_refused(magic: bytes) -> None:
    assert refused_header(patched(0, magic)) == "bad_magic"


@pytest.mark.parametrize("suite", [0, 3, 4, 128, 255])
def test_an_unknown_suite_is_refused(suite: int) -> None:
    assert refused_header(patched(4, bytes([suite]))) == "bad_suite"


@pytest.mark.parametrize("flags", [16, 32, 64, 128, 0x11, 0xFF])
def test_unknown_flag_bits_are_refused(flags: int) -> None:
    assert refused_header(patched(5, bytes([flags]))) == "bad_flags"


def test_an_answer_s_header_in_a_request_is_refused() -> None:
    assert refused_header(patched(5, bytes([RESPONSE]))) == "bad_flags"


def test_a_request_s_header_in_an_answer_is_refused() -> None:
    assert refused_header(HEADER.encode(), response=True) == "bad_flags"


def test_a_signature_flag_in_an_answer_is_refused() -> None:
    assert refused_header(patched(5, bytes([RESPONSE | SIGNATURE])), response=True) == "bad_flags"


@pytest.mark.parametrize("reserved", [b"\0\1", b"\1\0", b"\xff\xff"])
def test_a_reserved_field_other_than_zero_is_refused(reserved: bytes) -> None:
    assert refused_header(patched(6, reserved)) == "bad_reserved"


@pytest.mark.parametrize("length", [0, 1, 15, (1 << 20) - 39, 1 << 20, (1 << 32) - 1])
def test_a_single_s_length_out_of_bounds_is_refused(length: int) -> None:
    assert refused_header(patched(36, length.to_bytes(4, "big"))) == "bad_length"


@pytest.mark.parametrize("length", [1, 16, 1 << 31])
def test_a_stream_with_a_length_is_refused(length: int) -> None:
    raw = msgspec.structs.replace(HEADER, flags=STREAM, length=length).encode()

    assert refused_header(raw) == "bad_length"


def test_fields_are_judged_in_the_order_they_come() -> None:
    assert refused_header(b"XXXX\x09\xff\xff\xff" + bytes(32)) == "bad_magic"
    assert refused_header(b"SMX1\x09\xff\xff\xff" + bytes(32)) == "bad_suite"
    assert refused_header(b"SMX1\x01\xff\xff\xff" + bytes(32)) == "bad_flags"
    assert refused_header(b"SMX1\x01\x00\xff\xff" + bytes(32)) == "bad_reserved"


@given(st.binary(min_size=40, max_size=40), st.booleans())
def test_any_forty_bytes_are_a_header_or_refused(raw: bytes, response: bool) -> None:
    try:
        header = decode_header(raw, response=response)
    except EnvelopeError:
        return
    assert header.encode() == raw


@given(st.binary(max_size=300), st.sampled_from([1, 2, 64, 128, 512]))
def test_padding_comes_off_as_it_went_on(data: bytes, unit: int) -> None:
    padded = pad(data, unit)

    assert len(padded) % unit == 0
    assert len(data) < len(padded) <= len(data) + unit
    assert unpad(padded) == data


@pytest.mark.parametrize(
    "padded", [b"", b"\0", bytes(128), b"data", b"data\x81", b"data\x80\0\1", b"\x80data"]
)
def test_anything_but_0x80_and_zeros_is_no_padding(padded: bytes) -> None:
    with pytest.raises(EnvelopeError) as refused:
        unpad(padded)
    assert refused.value.reason == "bad_padding"


@pytest.mark.parametrize(
    ("flags", "size", "reason"),
    [
        (MAC, 31, "missing_mac"),
        (MAC, 0, "missing_mac"),
        (SIGNATURE, 63, "missing_signature"),
        (SIGNATURE | MAC, 95, "missing_signature"),
        (SIGNATURE | MAC, 64, "missing_signature"),
    ],
)
def test_data_too_short_for_its_trailer_is_refused(flags: int, size: int, reason: str) -> None:
    with pytest.raises(EnvelopeError) as refused:
        split_trailer(bytes(size), flags)
    assert refused.value.reason == reason


def test_a_trailer_is_cut_from_the_end() -> None:
    assert split_trailer(b"data" + bytes(32), MAC) == (b"data", bytes(32))
    assert split_trailer(b"data", 0) == (b"data", b"")


@pytest.mark.parametrize(
    "raw",
    [
        b"POST /v1 HTTP/1.1\n\n\n",
        b"POST /v1\napplication/json\n",
        b"POST /v1\napplication/json\nP1",
        b"POST /v1\napplication/json\nP1\n\n",
        b"POST /v1\napplication/json\nP1\nX",
        b"post /v1\n\n\n",
        b"P0ST /v1\n\n\n",
        b" /v1\n\n\n",
        b"POST\n\n\n",
        b"POST v1\n\n\n",
        b"POST \n\n\n",
        b"POST  /v1\n\n\n",
        b"POST /v 1\n\n\n",
        b"POST /v\xc3\xa9\n\n\n",
        b"POST /v\x7f\n\n\n",
        b"POST /v1\ntext/plain\r\n\n",
        b"POST /v1\ntext/\x00plain\n\n",
        b"POST /v1\n\nP\t1\n",
        b"POST /v1\n\nP\xff\n",
        b"",
        b"\n\n\n",
    ],
)
def test_a_malformed_request_prelude_is_refused(raw: bytes) -> None:
    with pytest.raises(EnvelopeError) as refused:
        decode_request_prelude(raw)
    assert refused.value.reason == "bad_prelude"


@pytest.mark.parametrize(
    "raw",
    [
        b"200\n",
        b"200\n\n\n",
        b"20\n\n",
        b"2000\n\n",
        b"2x0\n\n",
        b" 200\n\n",
        b"200 \n\n",
        b"\xb2\xb2\xb2\n\n",
        b"200\ntext\r\n",
        b"200\n\x80\n",
        b"",
        b"200\ntext/plain\nP1\n",
    ],
)
def test_a_malformed_answer_prelude_is_refused(raw: bytes) -> None:
    with pytest.raises(EnvelopeError) as refused:
        decode_response_prelude(raw)
    assert refused.value.reason == "bad_prelude"


@given(st.binary(max_size=60))
def test_any_bytes_are_a_prelude_that_encodes_back_or_refused(raw: bytes) -> None:
    for decode in (decode_request_prelude, decode_response_prelude):
        try:
            prelude = decode(raw)
        except EnvelopeError:
            continue
        assert prelude.encode() == len(raw).to_bytes(2, "big") + raw


@pytest.mark.parametrize(
    "prelude",
    [
        RequestPrelude("GET", "/a\nb", "", ""),
        RequestPrelude("GET", "no-slash", "", ""),
        RequestPrelude("GET", "/", "text/plain\nX: y", ""),
        RequestPrelude("GET", "/", "", "P1\n"),
        RequestPrelude("GÉT", "/", "", ""),
        RequestPrelude("GET", "/" + "a" * 65536, "", ""),
        ResponsePrelude(99_999, ""),
        ResponsePrelude(-1, ""),
        ResponsePrelude(200, "text/é"),
        ResponsePrelude(200, "a\nb"),
    ],
)
def test_a_prelude_that_could_not_be_read_is_not_written(
    prelude: RequestPrelude | ResponsePrelude,
) -> None:
    with pytest.raises(ValueError, match="cannot stand in an envelope"):
        prelude.encode()


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\5abcd", b"\xff\xff"])
def test_a_prelude_longer_than_its_data_is_refused(data: bytes) -> None:
    with pytest.raises(EnvelopeError) as refused:
        split_prelude(data)
    assert refused.value.reason == "bad_prelude"


@pytest.mark.parametrize("reason", REASONS)
def test_every_refusal_has_a_documented_code_and_tells_no_more(reason: str) -> None:
    problem = EnvelopeError(reason)

    assert problem.code in ERRORS
    assert str(problem) == problem.code
    assert problem.sealer is None
    expected = {
        "stale": "envelope_stale",
        "future": "envelope_stale",
        "cache_full": "envelope_cache_full",
        "busy": "envelope_busy",
        "store_lost": "envelope_cache_full",
    }
    assert problem.code == expected.get(reason, "envelope_rejected")


def test_a_media_type_is_compared_without_case_and_parameters() -> None:
    assert media_type(" Text/Event-Stream ; charset=utf-8") == "text/event-stream"
    assert media_type("") == ""


# RFC 8998, A.1
RFC_KEY = bytes.fromhex("0123456789abcdeffedcba9876543210")
RFC_NONCE = bytes.fromhex("00001234567800000000abcd")
RFC_AAD = bytes.fromhex("feedfacedeadbeeffeedfacedeadbeefabaddad2")
RFC_PLAIN = bytes.fromhex(
    "aaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbccccccccccccccccdddddddddddddddd"
    "eeeeeeeeeeeeeeeeffffffffffffffffeeeeeeeeeeeeeeeeaaaaaaaaaaaaaaaa"
)
RFC_SEALED = bytes.fromhex(
    "17f399f08c67d5ee19d0dc9969c4bb7d5fd46fd3756489069157b282bb200735"
    "d82710ca5c22f0ccfa7cbf93d496ac15a56834cbcf98c397b4024a2691233b8d"
    "83de3541e4c2b58177e065a9bf7b62ec"
)


def test_sm4_gcm_gives_the_bytes_of_rfc_8998() -> None:
    cipher = aead(1, RFC_KEY)

    assert cipher.seal(RFC_NONCE, RFC_PLAIN, RFC_AAD) == RFC_SEALED
    assert cipher.open(RFC_NONCE, RFC_SEALED, RFC_AAD) == RFC_PLAIN


@pytest.mark.parametrize("suite", [1, 2])
@pytest.mark.parametrize("size", [0, 1, 15, 16])
def test_a_wrong_or_short_tag_opens_nothing(suite: int, size: int) -> None:
    cipher = aead(suite, bytes(range(16 if suite == 1 else 32)))

    with pytest.raises(TagError):
        cipher.open(bytes(12), bytes(size), b"")


@pytest.mark.parametrize(("suite", "size"), [(0, 16), (1, 32), (2, 16), (3, 16), (1, 0)])
def test_a_key_of_another_length_is_refused(suite: int, size: int) -> None:
    with pytest.raises(ValueError, match="suite unknown"):
        aead(suite, bytes(size))


def test_sm3_gives_the_bytes_of_gb_t_32905_by_either_library() -> None:
    expected = "66c7f0f462eeedd9d1f2d46bdc10e4e24167c4875cf2f7a2297da02b8f4ba8e0"
    for fresh in (sm3, cryptography_sm3):
        digest = fresh()
        digest.update(b"a")
        branch = digest.copy()
        digest.update(b"bc")
        branch.update(b"bc")
        assert digest.digest().hex() == expected
        assert digest.digest().hex() == expected, "reading it does not end it"
        assert branch.digest().hex() == expected


@pytest.mark.parametrize("size", [0, 1, 32, 64, 65, 200])
def test_hmac_sm3_agrees_with_cryptography(size: int) -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.hmac import HMAC

    key = bytes(range(size % 251)) if size < 251 else b""
    reference = HMAC(key or b"\0", hashes.SM3())
    reference.update(b"message")

    assert HmacSm3(key or b"\0").mac(b"message") == reference.finalize()


def test_hkdf_sm3_agrees_with_cryptography() -> None:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

    for length in (1, 16, 32, 33, 80):
        reference = HKDFExpand(hashes.SM3(), length, b"info").derive(bytes(range(32)))
        assert hkdf_expand(bytes(range(32)), b"info", length) == reference
