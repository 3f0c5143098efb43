"""Bodies made to cost much, or to be read in two ways."""

import json
import socket

import pytest

from agent.api import HUGE_BYTES, HUGE_WAITING
from agent.errors import ApiError
from agent.openai import MEMBERS_MAX, MESSAGES_MAX, STOP_CHARACTERS, parse_chat, parse_completion
from tests.unit.agent.conftest import CONTEXT

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}


def refusal(parse, body, context_length=4096):
    with pytest.raises(ApiError) as caught:
        parse(body, context_length)
    assert caught.value.kind.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt":"a","prompt":"b"}', "prompt"),
        (b'{"prompt":"a","prompt":"a"}', "prompt"),
        (b'{"prompt":"a", "max_tokens": 12, "max_tokens": 1}', "max_tokens"),
        (b'{"prompt":"a", "max_tokens": 1, "max_tokens": 12}', "max_tokens"),
        (b'{"max_tokens":1,"prompt":"a","max_tokens":1}', "max_tokens"),
        (b'{"prompt":"a","pr\\u006fmpt":"a"}', "prompt"),
        (b' { "stop" : null , "stop" : null , "prompt" : "a" } ', "stop"),
        (b'{"prompt":"a","odd":[1],"odd":[1,2]}', None),
        (b'{"odd":"\\"","prompt":"a","odd":"\\"}"}', None),
        (b'{"":1,"prompt":"a","":1}', None),
    ],
)
def test_a_member_given_twice_is_refused(body, param):
    error = refusal(parse_completion, body)
    assert (error.param, "given twice" in error.message) == (param, True)
    assert "odd" not in error.message


def test_messages_given_twice_are_refused():
    one = b'"messages":[{"role":"user","content":"a"}]'
    assert refusal(parse_chat, b"{" + one + b"," + one + b"}").param == "messages"


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","x":{"y":1,"z":[1]},"w":"}\\\\\\"," }',
        b' \n{\t"prompt" :\r"a" , "x\\"" : { } }\n',
        '{"prompt":"é","😀":"{"}'.encode(),
        b'{"x":"a","y":"a","prompt":"a","z":"aa"}',
        json.dumps({"prompt": "a"} | {f"x{n}": n for n in range(MEMBERS_MAX - 1)}).encode(),
    ],
)
def test_members_that_only_look_alike_are_taken(body):
    assert parse_completion(body, 4096).text == json.loads(body)["prompt"]


def test_members_without_end_are_refused():
    body = json.dumps({"prompt": "a"} | {f"x{n}": n for n in range(MEMBERS_MAX)}).encode()
    assert str(MEMBERS_MAX) in refusal(parse_completion, body).message


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"a","x":"\xff"}',
        b'{"prompt":"a","x":{"y":"\xc3"}}',
        b'{"prompt":"a","\xed\xa0\x80":1}',
        b'{"prompt":"\xc0\x80"}',
    ],
)
def test_bytes_that_are_not_utf8_are_refused_wherever_they_are(body):
    assert "UTF-8" in refusal(parse_completion, body).message


def test_too_many_messages_are_refused():
    def body(count):
        return json.dumps({"messages": [{"role": "user", "content": ""}] * count}).encode()

    assert refusal(parse_chat, body(9), 8).message == "messages: at most 8 messages"
    assert len(parse_chat(body(8), 8).messages) == 8
    assert str(MESSAGES_MAX) in refusal(parse_chat, body(MESSAGES_MAX + 1), 1 << 20).message


def test_too_many_content_parts_are_refused_over_all_messages():
    parts = [{"type": "text", "text": ""}] * 5
    body = json.dumps({"messages": [{"role": "user", "content": parts}] * 2}).encode()
    assert refusal(parse_chat, body, 9).message == "messages: at most 9 content parts"
    assert len(parse_chat(body, 10).messages) == 2


@pytest.mark.parametrize("form", [b'{"prompt":[%s]}', b'{"prompt":[[%s]]}'])
def test_too_many_ids_are_refused_by_their_number(form):
    error = refusal(parse_completion, form % b",".join([b"1"] * 9), 8)
    assert (error.kind.code, error.param) == ("context_length_exceeded", "prompt")
    assert "8 tokens" in error.message
    assert "9 tokens" in error.message
    assert len(parse_completion(form % b",".join([b"1"] * 8), 8).ids) == 8


def test_a_stop_string_has_a_bound():
    body = json.dumps({"prompt": "a", "stop": ["b", "x" * (STOP_CHARACTERS + 1)]}).encode()
    error = refusal(parse_completion, body)
    assert (error.param, str(STOP_CHARACTERS) in error.message) == ("stop", True)
    fits = json.dumps({"prompt": "a", "stop": "é" * STOP_CHARACTERS}).encode()
    assert parse_completion(fits, 4096).stop == ("é" * STOP_CHARACTERS,)


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_a_text_that_cannot_fit_names_both_numbers(served, path):
    text = "a" * (200 * CONTEXT)
    field, value = (
        ("prompt", text) if path == TEXT else ("messages", [{"role": "user", "content": text}])
    )
    answer = served.client.post(path, json={field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == field
    assert f"{CONTEXT} tokens" in error["message"]
    assert "at least 128 tokens" in error["message"]
    assert served.engine.generations.empty()


@pytest.mark.parametrize(
    "kind",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonx",
        "text/plain, application/json",
        "application/json, text/plain",
    ],
)
def test_another_content_type_is_refused_by_name(served, kind):
    answer = served.client.post(TEXT, content=b'{"prompt":"a"}', headers={"content-type": kind})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("Content-Type")
    assert served.engine.generations.empty()


@pytest.mark.parametrize(
    "kind", [None, "application/json", "Application/JSON; charset=utf-8", "application/x.y+json"]
)
def test_json_and_no_content_type_are_taken(served, kind):
    headers = {} if kind is None else {"content-type": kind}
    answer = served.client.post(TEXT, content=b'{"prompt":"a"}', headers=headers)
    assert answer.status_code == 200


def test_one_of_two_content_types_is_enough_to_refuse(served):
    headers = [("content-type", "text/plain"), ("content-type", "application/json")]
    answer = served.client.post(TEXT, content=b'{"prompt":"a"}', headers=headers)
    assert answer.status_code == 400


def read_all(sock):
    out = b""
    while piece := sock.recv(65536):
        out += piece
    return out


def test_both_framings_are_refused_and_the_connection_ends(served):
    sock = served.connect()
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer.lower()
    assert b"Transfer-Encoding" in answer


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_too_large_gets_its_answer_also_where_the_connection_closes(start, chunked):
    served = start(body_bytes=2048)
    sock = served.connect()
    body = b"x" * (4 << 20)
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + framing)
    sock.sendall(b"\r\n\r\n" + (b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if chunked else body))
    assert read_all(sock).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_awaits_a_go_ahead_gets_413_without_one(start):
    served = start(body_bytes=2048)
    sock = served.connect()
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"expect: 100-continue\r\ncontent-length: 4096\r\n\r\n"
    )
    assert read_all(sock).startswith(b"HTTP/1.1 413 ")


def test_an_endless_body_too_large_is_answered_in_the_end(start):
    served = start(body_bytes=2048, body_idle_s=0.05)
    sock = served.connect()
    sock.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        b"content-length: 4096\r\n\r\nx"
    )
    assert read_all(sock).startswith(b"HTTP/1.1 413 ")


def test_a_body_in_tiny_chunks_is_read_as_it_is(served):
    body = b'{"prompt":"a","x":"' + b"y" * 20_000 + b'"}'
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    sock = served.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    sock.sendall(head + chunks)
    assert sock.recv(65536).startswith(b"HTTP/1.1 200 ")
    # The connection goes on, and what waits behind is read.
    sock.sendall(head + chunks + b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert read_all(sock).count(b"HTTP/1.1 200 ") == 2


def test_a_client_that_leaves_amid_tiny_chunks_harms_nobody(served):
    sock = served.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    sock.sendall(head + b"1\r\nx\r\n" * 40_000)
    sock.shutdown(socket.SHUT_WR)
    assert b" 200 " not in read_all(sock)
    assert served.client.post(TEXT, json={"prompt": "a"}).status_code == 200


def test_huge_bodies_have_a_lane_and_the_lane_a_bound(served):
    body = b'{"prompt":"a","x":"' + b"y" * HUGE_BYTES + b'"}'
    assert served.client.post(TEXT, content=body).status_code == 200
    served.api._huge = HUGE_WAITING
    try:
        answer = served.client.post(TEXT, content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
        assert served.client.post(TEXT, json={"prompt": "a"}).status_code == 200
    finally:
        served.api._huge = 0
    assert served.client.post(TEXT, content=body).status_code == 200
    assert served.api._huge == 0
