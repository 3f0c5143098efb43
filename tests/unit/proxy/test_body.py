"""JSON bodies: ranges are exact, what is added can be taken out, nothing else changes."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.http import body as bodies
from proxy.http.body import (
    IDS,
    OPTIONS,
    BodyError,
    ask_token_ids,
    cut_answer,
    members,
    model_of,
    view,
)
from tests.unit.kernels.wire_cases import as_one

# Two shared cores: slow is no finding.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", params=["pure", "both"], autouse=True)
def implementation(request):
    """Run all that is here with the pure functions, then with C, each answer compared with pure."""
    for name in ("cut_answer", "members", "view"):
        pure = getattr(bodies, name + "_pure")
        both = as_one(getattr(bodies, name), pure)
        globals()[name] = both if request.param == "both" else pure


class Oracle:
    """RFC 8259 by the letter, one character at a time: slow, and written for its readability."""

    def __init__(self, body: bytes):
        self.text = body.decode("utf-8")
        self.pos = 0

    def top(self):
        self.blank()
        if self.peek() != "{":
            raise ValueError
        found = self.object(top=True)
        self.blank()
        if self.pos != len(self.text):
            raise ValueError
        return found

    def peek(self):
        return self.text[self.pos] if self.pos < len(self.text) else ""

    def take(self, want):
        if not self.text.startswith(want, self.pos):
            raise ValueError
        self.pos += len(want)

    def blank(self):
        while self.peek() and self.peek() in " \t\r\n":
            self.pos += 1

    def value(self):
        match self.peek():
            case "{":
                self.object()
            case "[":
                self.array()
            case '"':
                self.string()
            case "t":
                self.take("true")
            case "f":
                self.take("false")
            case "n":
                self.take("null")
            case _:
                self.number()

    def number(self):
        if self.peek() == "-":
            self.pos += 1
        if self.peek() == "0":
            self.pos += 1
        else:
            self.digits()
        if self.peek() == ".":
            self.pos += 1
            self.digits()
        if self.peek() and self.peek() in "eE":
            self.pos += 1
            if self.peek() and self.peek() in "+-":
                self.pos += 1
            self.digits()

    def digits(self):
        begin = self.pos
        while self.peek() and self.peek() in "0123456789":
            self.pos += 1
        if self.pos == begin:
            raise ValueError

    def string(self):
        begin = self.pos
        self.take('"')
        while (char := self.peek()) != '"':
            if not char or char < " ":
                raise ValueError
            self.pos += 1
            if char == "\\":
                escape = self.peek()
                if not escape or escape not in '"\\/bfnrtu':
                    raise ValueError
                self.pos += 1
                if escape == "u":
                    digits = self.text[self.pos : self.pos + 4]
                    if len(digits) != 4 or set(digits) - set("0123456789abcdefABCDEF"):
                        raise ValueError
                    self.pos += 4
        self.pos += 1
        return json.loads(self.text[begin : self.pos])

    def array(self):
        self.take("[")
        self.blank()
        if self.peek() == "]":
            self.pos += 1
            return
        while True:
            self.blank()
            self.value()
            self.blank()
            if self.peek() == "]":
                self.pos += 1
                return
            self.take(",")

    def object(self, *, top=False):
        found = {}
        self.take("{")
        self.blank()
        if self.peek() == "}":
            self.pos += 1
            return found
        while True:
            self.blank()
            name = self.string()
            if top and name in found:
                raise ValueError
            self.blank()
            self.take(":")
            self.blank()
            begin = self.pos
            self.value()
            found[name] = (self.offset(begin), self.offset(self.pos))
            self.blank()
            if self.peek() == "}":
                self.pos += 1
                return found
            self.take(",")

    def offset(self, chars):
        return len(self.text[:chars].encode())


def oracle(body: bytes):
    try:
        return list(Oracle(body).top().items())
    except ValueError:
        return "refused"


def ours(body: bytes):
    try:
        return list(members(body).items())
    except BodyError:
        return "refused"


BLANKS = st.sampled_from(["", "", "", " ", "\n", "\t\r\n "])
TEXTS = st.text(st.sampled_from(list('ab\\"{}[],:\n/é\u4f60\U0001f600\x7f')), max_size=8)
NAMES = st.sampled_from(
    ['"a"', '"b"', '"\\u0061"', '""', '"model"', '"mod\\u0065l"', '"}"', '"\\""', '"é"', '",\\\\"']
)
SCALARS = st.one_of(
    st.sampled_from(["null", "true", "false", "0", "-0", "1", "12", "123", "1.5e-3", "1E999"]),
    TEXTS.map(json.dumps),
    TEXTS.map(lambda t: json.dumps(t, ensure_ascii=False)),
)


REQUEST_NAMES = st.sampled_from(
    ['"model"', '"prompt"', '"messages"', '"temperature"', '"stream"', '"mod\\u0065l"', '"é"']
)


@st.composite
def objects(draw, values, names=NAMES, **limits):
    parts = []
    for name in draw(st.lists(names, **{"max_size": 5} | limits)):
        w = [draw(BLANKS) for _ in range(4)]
        parts.append(f"{w[0]}{name}{w[1]}:{w[2]}{draw(values)}{w[3]}")
    return "{" + (",".join(parts) or draw(BLANKS)) + "}"


@st.composite
def arrays(draw, values):
    parts = [draw(BLANKS) + v + draw(BLANKS) for v in draw(st.lists(values, max_size=3))]
    return "[" + (",".join(parts) or draw(BLANKS)) + "]"


VALUES = st.recursive(SCALARS, lambda v: st.one_of(objects(v), arrays(v)), max_leaves=8)
BODIES = st.builds(
    lambda before, text, after: (before + text + after).encode(), BLANKS, objects(VALUES), BLANKS
)


@settings(UNHURRIED, max_examples=200)
@given(BODIES)
def test_members_equal_the_oracle(body):
    assert ours(body) == oracle(body)


@settings(UNHURRIED, max_examples=200)
@given(BODIES, st.data())
def test_members_equal_the_oracle_on_damaged_bodies(body, data):
    at = data.draw(st.integers(0, len(body)))
    cut = data.draw(st.integers(0, 3))
    junk = data.draw(
        st.sampled_from(
            [b"", b",", b"}", b'"', b"\\", b"\\u", b"0", b"\xff", b"\xc3", b"\x00", b"]"]
        )
    )
    damaged = body[:at] + junk + body[at + cut :]
    try:
        expected = oracle(damaged)
    except UnicodeDecodeError:
        expected = "refused"
    assert ours(damaged) == expected


@settings(UNHURRIED, max_examples=200)
@given(st.binary(max_size=60))
def test_any_bytes_are_members_or_a_refusal(data):
    ours(data)
    ours(b'{"a":' + data + b"}")
    view(data)
    assert cut_answer(data, frozenset([IDS])) is not None


BAD = {
    "empty": b"",
    "array": b"[]",
    "string": b'"a"',
    "number": b"1",
    "cut": b'{"a":1',
    "trailing comma": b'{"a":1,}',
    "two objects": b'{"a":1}{"b":2}',
    "junk behind": b'{"a":1}x',
    "NUL behind": b'{"a":1}\x00',
    "form feed": b'{"a":\x0c1}',
    "BOM": b'\xef\xbb\xbf{"a":1}',
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "single quotes": b"{'a':1}",
    "comment": b'{"a":1/**/}',
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":-Infinity}',
    "leading zero": b'{"a":01}',
    "plus": b'{"a":+1}',
    "dot": b'{"a":1.}',
    "hex": b'{"a":0x1}',
    "control in string": b'{"a":"\n"}',
    "bad escape": b'{"a":"\\x41"}',
    "short escape": b'{"a":"\\u12"}',
    "bad UTF-8 in value": b'{"a":"\xff"}',
    "bad UTF-8 in name": b'{"\xff":1}',
    "bad UTF-8 deep": b'{"a":[{"b":"\xc3"}]}',
    "encoded surrogate": b'{"a":"\xed\xa0\x80"}',
    "overlong": b'{"a":"\xc0\xaf"}',
    "twice": b'{"a":1,"a":1}',
    "twice, another value": b'{"a":1,"b":2,"a":3}',
    "twice, escaped": b'{"a":1,"\\u0061":1}',
    "model twice": b'{"model":"a","messages":[],"model":"b"}',
    # A value that holds what a walk with wrong lengths would land on.
    "twice, with a decoy": b'{"a":1,"b":{"x":00,"b":1},"a":22}',
    "deep": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("body", BAD.values(), ids=BAD.keys())
def test_bad_bodies_are_refused(body):
    with pytest.raises(BodyError) as refused:
        members(body)
    assert "a" * 3 not in str(refused.value)
    assert view(body) is None


def test_decoy_lengths_do_not_hide_a_repeated_name():
    # The last value of "a" is as long as the way from its first one to the inner "b", and so on:
    # a walk by lengths alone ends on the closing brace.
    for blanks in range(12):
        for length in range(1, 24):
            body = b'{"a":1,"b":{"x":0,"b":%b2},"a":%b}' % (b" " * blanks, b"3" * length)
            assert ours(body) == "refused"


def test_unpaired_surrogates_in_values_are_well_formed():
    body = b'{"a":"\\ud83d","b":["\\uDE00\\ud83d"],"c":"\\\\ud83d"}'
    assert ours(body) == oracle(body) != "refused"


CHAT = b'{"model": "m", "messages": [{"role":"user"}], "temperature": 0.70, "stream": true}'


def test_view_shows_ranges_and_the_rest_is_everything_else():
    seen = view(CHAT)
    assert seen is not None
    assert (seen.model, seen.stream, seen.max_tokens) == ("m", True, None)
    assert CHAT[slice(*seen.prompt)] == b'[{"role":"user"}]'
    assert CHAT[slice(*seen.temperature)] == b"0.70"
    assert CHAT[slice(*seen.model_span)] == b'"m"'
    assert seen.end == len(CHAT) - 1
    rest = b"".join(CHAT[a:b] for a, b in seen.rest)
    assert rest == b'{"model": , "messages": , "temperature": , "stream": true}'


# Requests as clients may write them: each member once, a prompt always.
REQUESTS = objects(VALUES, REQUEST_NAMES, min_size=1, max_size=6, unique_by=json.loads).map(
    lambda text: text.replace('"prompt"', '"user"', 1)[:-1].encode() + b', "prompt":[]}'
)


@settings(UNHURRIED, max_examples=150)
@given(REQUESTS)
def test_rest_and_cut_values_make_the_body(body):
    seen = view(body)
    assert seen is not None
    spans = [s for s in (seen.model_span, seen.prompt, seen.temperature) if s]
    assert b"".join(body[a:b] for a, b in sorted([*spans, *seen.rest])) == body


@pytest.mark.parametrize(
    ("body", "model", "stream", "limit"),
    [
        (b'{"model":"m","max_tokens":5}', "m", False, 5),
        (b'{"model":"m","max_tokens":5,"max_completion_tokens":6}', "m", False, 6),
        (b'{"model":"m","max_tokens":-5}', "m", False, None),
        (b'{"model":"m","max_tokens":5.0}', "m", False, None),
        (b'{"model":"m","max_tokens":true}', "m", False, None),
        (b'{"model":"m","max_tokens":"5"}', "m", False, None),
        (b'{"model":"m","max_tokens":99999999999999999999}', "m", False, None),
        (b'{"model":"m","stream":1}', "m", False, None),
        (b'{"model":"m","stream":"true"}', "m", False, None),
        (b'{"model":5,"prompt":""}', "", False, None),
        (b'{"model":"\\ud800","prompt":""}', "", False, None),
        (b'{"mod\\u0065l":"\\u006d","prompt":"x","stream":true}', "m", True, None),
    ],
)
def test_view_of_odd_members(body, model, stream, limit):
    seen = view(body)
    assert seen is not None
    assert (seen.model, seen.stream, seen.max_tokens) == (model, stream, limit)


def test_messages_come_before_prompt():
    body = b'{"prompt":"a","messages":[]}'
    assert body[slice(*view(body).prompt)] == b"[]"


@pytest.mark.parametrize("body", [b"{}", b'{"input":"x"}', b"[]", b""])
def test_nothing_of_use_is_no_view(body):
    assert view(body) is None


JSON_MODELS = [
    (b'{"model":"m"}', "application/json", "m"),
    (b'{"model":"m"}', "Application/JSON; charset=utf-8", "m"),
    (b'{"model":"m"}', "application/vnd.x+json", "m"),
    (b'{"model":"\\u006d"}', "application/json", "m"),
    (b'{"a":{"model":"x"}}', "application/json", ""),
    (b"{}", "application/json", ""),
    (b"", "application/json", ""),
    (b'{"model":"m"}', "text/plain", ""),
    (b"\xff", "application/octet-stream", ""),
    (b"", "", ""),
]


@pytest.mark.parametrize(("body", "kind", "model"), JSON_MODELS)
def test_model_of_json(body, kind, model):
    assert model_of(body, kind) == model


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":1}',
        b'{"model":null}',
        b'{"model":["m"]}',
        b'{"model":"m","model":"m"}',
        b'{"model":"m","b":1,"b":2}',
        b'{"model":"m"',
        b'{"model":"\xff"}',
        b'{"model":"\\ud800"}',
        b"[]",
        b"x",
        b" ",
    ],
)
def test_model_of_bad_json_is_a_mismatch(body):
    with pytest.raises(BodyError):
        model_of(body, "application/json")


def form(*parts: bytes, end: bytes = b"--B--\r\n") -> bytes:
    return b"".join(b"--B\r\n" + part + b"\r\n" for part in parts) + end


def part(name: bytes, value: bytes, more: bytes = b"") -> bytes:
    return b'Content-Disposition: form-data; name="' + name + b'"' + more + b"\r\n\r\n" + value


FILE = part(b"file", b"\x00--B\r\nx", b'; filename="name=\\"model\\".wav"\r\nContent-Type: a/b')
TYPE = "multipart/form-data; boundary=B"


@pytest.mark.parametrize(
    ("body", "kind", "model"),
    [
        (form(part(b"model", b"m")), TYPE, "m"),
        (form(FILE, part(b"model", b"whisper-1"), FILE), TYPE, "whisper-1"),
        (form(FILE), TYPE, ""),
        (form(part(b"model", b"")), TYPE, ""),
        (form(part(b"model", "模".encode())), 'Multipart/Form-Data; charset=x; Boundary="B"', "模"),
        (b"preamble\r\n" + form(part(b"model", b"m")) + b"epilogue --B", TYPE, "m"),
        (form(b"content-disposition:form-data;name=model\r\n\r\nm"), TYPE, "m"),
        (form(part(b"Model", b"m")), TYPE, ""),
        (form(end=b"--B--"), TYPE, ""),
    ],
)
def test_model_of_a_form(body, kind, model):
    assert model_of(body, kind) == model


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (form(part(b"model", b"m"), part(b"model", b"m")), TYPE),
        (form(part(b"model", b"m"), end=b""), TYPE),
        (form(part(b"model", b"\xff")), TYPE),
        (form(part(b"model", b"m", b'; name="b"')), TYPE),
        (form(b"\r\nm"), TYPE),
        (form(b"Content-Type: a\r\n\r\nm"), TYPE),
        (form(b"Content-Disposition: form-data\r\n\r\nm"), TYPE),
        (form(b"Content-Disposition: form-data; name=a\r\n" + part(b"model", b"m")), TYPE),
        (form(b'Content-Disposition: file; name="model"\r\n\r\nm'), TYPE),
        (form(b'Content-Disposition: form-data; name="model\r\n\r\nm'), TYPE),
        (form(part(b"a", b"m").replace(b"\r\n", b"\n")), TYPE),
        (form(b'A: b\r\n c\r\nContent-Disposition: form-data; name="model"\r\n\r\nm'), TYPE),
        (form(part(b"model", b"m")).replace(b"--B\r\n", b"--Bx\r\n"), TYPE),
        (form(part(b"model", b"m")), "multipart/form-data"),
        (form(part(b"model", b"m")), "multipart/form-data; boundary=B; boundary=C"),
        (form(part(b"model", b"m")), "multipart/form-data; boundary="),
        (form(part(b"model", b"m")), 'multipart/form-data; boundary="' + "B" * 71 + '"'),
        (b"", TYPE),
        (form(*[part(b"a", b"")] * 1025), TYPE),
    ],
)
def test_model_of_a_bad_form_is_a_mismatch(body, kind):
    with pytest.raises(BodyError):
        model_of(body, kind)


@settings(UNHURRIED, max_examples=150)
@given(st.binary(max_size=60), st.text(max_size=20))
def test_any_form_is_a_model_or_a_refusal(data, kind):
    for content_type in (TYPE, "multipart/form-data; " + kind, kind):
        for body in (data, form(data), form(part(b"model", data))):
            try:
                model_of(body, content_type)
            except BodyError:
                continue


def ask(body: bytes, *, stream: bool = False):
    seen = view(body)
    assert seen is not None
    return ask_token_ids(body, seen, stream=stream)


def test_ids_are_asked_for_at_the_end_of_the_top_object():
    assert ask(b'{"prompt":"x" }') == (b'{"prompt":"x" ,"return_token_ids":true}', {IDS})
    assert ask(b'{"prompt":"x"}', stream=True) == (
        b'{"prompt":"x","return_token_ids":true,"stream_options":{"include_usage":true}}',
        {IDS, OPTIONS},
    )


@pytest.mark.parametrize(
    ("body", "stream", "added"),
    [
        (b'{"prompt":"x","return_token_ids":false}', False, set()),
        (b'{"prompt":"x","return\\u005ftoken_ids":true}', False, set()),
        (b'{"prompt":"x","stream_options":null}', True, {IDS}),
        (b'{"prompt":"x","return_token_ids":true}', True, {OPTIONS}),
        (b'{"prompt":"x","stream_options":{}}', False, {IDS}),
    ],
)
def test_what_the_client_asked_for_stays_its_own(body, stream, added):
    new, names = ask(body, stream=stream)
    assert names == added
    assert new.startswith(body[:-1])
    if not added:
        assert new is body


@pytest.mark.parametrize("body", [b'{"prompt":"x"}\n', b'{"prompt":"x"} ', b'{"model":"x"}'])
def test_nothing_is_asked_where_the_end_or_the_prompt_is_unclear(body):
    assert ask(body) is None


@settings(UNHURRIED, max_examples=150)
@given(REQUESTS, st.booleans())
def test_what_is_added_leaves_the_other_members_equal(body, stream):
    asked = ask(body, stream=stream)
    assert asked is not None
    new, added = asked
    after = members(new)
    assert {n: s for n, s in after.items() if n not in added} == members(body)
    assert set(after) - set(members(body)) == added


ALL = frozenset([IDS, OPTIONS])
ANSWER = (
    b'{"id":"x", "choices":[{"index":0,"message":{"role":"assistant","content":"Paris."},'
    b'"finish_reason":"stop" , "token_ids" : [1, 2],"x":1}],"usage":{"total_tokens":3},'
    b'"model":"s","prompt_token_ids":[7]}'
)


def test_answer_is_cut_to_the_byte_and_read():
    body, facts = cut_answer(ANSWER, ALL)
    assert body == ANSWER.replace(b' , "token_ids" : [1, 2]', b"").replace(
        b',"prompt_token_ids":[7]', b""
    )
    assert facts.texts == {0: "Paris."}
    assert facts.finish == {0: "stop"}
    assert facts.usage == {"total_tokens": 3}
    assert facts.token_ids == [1, 2]
    assert facts.model == "s"


def test_answer_stays_when_the_client_asked_for_ids_itself():
    body, facts = cut_answer(ANSWER, frozenset([OPTIONS]))
    assert body is ANSWER
    assert facts.token_ids == [1, 2]


def test_texts_of_completions_and_of_several_choices():
    body = b'{"choices":[{"index":1,"text":"b"},{"index":0,"text":"a","token_ids":[3]}]}'
    _, facts = cut_answer(body, frozenset())
    assert facts.texts == {1: "b", 0: "a"}
    assert facts.token_ids == [3]


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"text":"\\"token_ids\\":[1]"}]}',
        b'{"other":{"token_ids":[1]},"choices":[{"message":{"content":"","token_ids":[1]}}]}',
        b'{"choices":[[{"token_ids":[1]}]]}',
        b'{"choices":{"token_ids":[1]}}',
        b'{"choices":"token_ids"}',
        b'{"choices":[{"token_ids":[1],"token_ids":[2]}]}',
        b'{"token_ids":[1],"token_ids":[2]}',
        b'{"token_ids":[1]',
        b'["token_ids"]',
        b"token_ids",
        b'{"token_ids":"\xff"}',
    ],
)
def test_answer_is_left_alone_where_a_cut_is_not_exact(body):
    assert cut_answer(body, ALL)[0] == body


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'{"token_ids":[1]}', b"{}"),
        (b'{ "token_ids":[1] }', b"{  }"),
        (b'{"token_ids":[1],"a":1}', b'{"a":1}'),
        (b'{"token_ids":null,"prompt_token_ids":[[1]],"a":1}', b'{"a":1}'),
        (b'{"a":1,"token_ids":[],"prompt_token_ids":{}}', b'{"a":1}'),
        (b'{"token_ids":[],"a":1,"prompt_token_ids":[]}', b'{"a":1}'),
        (b'{"a":1,"token\\u005fids":[],"b_token_ids":2}', b'{"a":1,"b_token_ids":2}'),
        (b'{"choices":[{"token_ids":[1]},{"token_ids":[2],"a":1}]}', b'{"choices":[{},{"a":1}]}'),
    ],
)
def test_cuts_take_one_comma_each(before, after):
    assert cut_answer(before, ALL)[0] == after


def strip(value):
    top = {k: v for k, v in value.items() if k not in {"token_ids", "prompt_token_ids"}}
    if isinstance(top.get("choices"), list):
        top["choices"] = [
            {k: v for k, v in c.items() if k not in {"token_ids", "prompt_token_ids"}}
            if isinstance(c, dict)
            else c
            for c in top["choices"]
        ]
    return top


def plain(pairs):
    names = [name for name, _ in pairs]
    if len(names) != len(set(names)):
        raise ValueError("twice")
    return dict(pairs)


ID_NAMES = st.sampled_from(['"token_ids"', '"prompt_token_ids"', '"choices"', '"index"', '"text"'])


@st.composite
def answers(draw, depth=0):
    parts = []
    for name in draw(st.lists(ID_NAMES, max_size=4, unique=True)):
        if name == '"choices"' and depth == 0:
            value = "[" + ",".join(draw(st.lists(answers(depth=1), max_size=3))) + "]"
        else:
            value = draw(st.sampled_from(["[1,2]", "null", "0", '"x"', '{"token_ids":[1]}']))
        parts.append(draw(BLANKS) + name + ":" + draw(BLANKS) + value + draw(BLANKS))
    return "{" + ",".join(parts) + "}"


@settings(UNHURRIED, max_examples=200)
@given(answers())
def test_cut_answers_equal_the_answer_without_the_members(text):
    cut, _ = cut_answer(text.encode(), ALL)
    assert json.loads(cut) == strip(json.loads(text, object_pairs_hook=plain))


HOSTILE = [
    b'{"choices":[{"index":-1,"text":"a"},{"index":1e3,"text":"a"},{"index":"0","text":"a"}]}',
    b'{"choices":[{"index":128,"text":"a"}]}',
    b'{"choices":[{"index":0,"text":["a"],"message":null,"finish_reason":5,"token_ids":"x"}]}',
    b'{"choices":[{"token_ids":[-1]}],"usage":[],"model":{}}',
    b'{"choices":[{"token_ids":[4294967296]}]}',
    b'{"choices":[{"token_ids":[1.5]}]}',
    b'{"choices":[{"token_ids":[[]]}]}',
    b'{"choices":5}',
    b'{"choices":[5]}',
    b'{"choices":[{"message":5}]}',
]


@pytest.mark.parametrize("body", HOSTILE)
def test_hostile_answers_show_nothing(body):
    cut, facts = cut_answer(body, frozenset())
    assert cut is body
    assert facts.texts == {}
    assert facts.token_ids is None
    assert facts.usage is None
    assert facts.model == ""
