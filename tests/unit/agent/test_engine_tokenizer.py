import json

import pytest

from agent.engine import template, tokenizer
from agent.engine.gguf_file import GgufFile
from agent.engine.types import ChatTemplateError, ModelFileError, PromptTooLong
from tests.unit.agent.engine_kit import (
    CONTROL,
    TEMPLATE,
    TOKENS,
    VOCAB,
    tokenizer_json,
    write_folder,
    write_gguf,
)

TEXT = "Cats abate 42 times; naïve 好 👩‍🚀\n\tend"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with GgufFile(write_gguf(tmp_path_factory.mktemp("t") / "m.gguf")) as file:
        return tokenizer.from_gguf(file)


@pytest.fixture
def from_gguf(tmp_path):
    def build(**kwargs):
        with GgufFile(write_gguf(tmp_path / "m.gguf", **kwargs)) as file:
            return tokenizer.from_gguf(file)

    return build


@pytest.mark.parametrize("text", [TEXT, "", " ", "ab tab", "\x00\x7f", "😀" * 50])
def test_any_text_comes_back(tiny, text):
    assert tiny.decode(tiny.encode(text)) == text


def test_merges_are_used(tiny):
    assert tiny.encode("ab") == [TOKENS.index("ab")]


def test_digits_are_single(tiny):
    assert len(tiny.encode("2026")) == 4


def test_a_byte_of_a_character_is_its_own_piece(tiny):
    ids = tiny.encode("👍")
    assert [tiny.piece(token) for token in ids] == [bytes([b]) for b in "👍".encode()]


def test_special_tokens_are_found_in_text_and_give_none(tiny):
    ids = tiny.encode("a<|im_end|>b")
    assert 2 in ids
    assert tiny.decode(ids) == "ab"


def test_a_chat_follows_the_template(tiny):
    ids = tiny.apply_chat([{"role": "user", "content": "hi"}])
    assert ids == tiny.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    closed = tiny.apply_chat([{"role": "user", "content": "hi"}], add_generation_prompt=False)
    assert closed == ids[: len(closed)]
    assert len(closed) < len(ids)


def test_the_template_s_own_refusal_is_passed_on(tiny):
    with pytest.raises(ChatTemplateError, match="no tools"):
        tiny.apply_chat([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("messages", [[{}], [{"role": "user"}], [None], [{"content": 3}]])
def test_odd_messages_never_break_out(tiny, messages):
    try:
        ids = tiny.apply_chat(messages)
    except ChatTemplateError as problem:
        assert "refused" in str(problem)  # noqa: PT017 - either way is right
    else:
        assert all(0 <= token < VOCAB for token in ids)


def test_a_refusal_never_shows_the_messages(from_gguf):
    bad = from_gguf(metadata=[])
    bad._template = template.ChatTemplate("{{ messages[0]['content'] + 1 }}")
    with pytest.raises(ChatTemplateError) as caught:
        bad.apply_chat([{"role": "user", "content": "hunter2"}])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(tiny, source):
    hostile = tokenizer.TextTokenizer(tiny._inner, tiny._pieces, tiny.ends, None, {})
    hostile._template = template.ChatTemplate(source)
    with pytest.raises(ChatTemplateError):
        hostile.apply_chat([{"role": "user", "content": "x"}])


def test_a_template_that_is_no_template_is_a_model_file_error():
    with pytest.raises(ModelFileError, match="malformed chat template"):
        template.ChatTemplate("{% for %}")
    with pytest.raises(ModelFileError, match="has more than"):
        template.ChatTemplate("x" * ((1 << 18) + 1))


def test_no_template_is_said(tiny):
    bare = tokenizer.TextTokenizer(tiny._inner, tiny._pieces, tiny.ends, None, {})
    with pytest.raises(ChatTemplateError, match="no chat template"):
        bare.apply_chat([])


def test_ends_are_the_file_s_and_the_known_names(tiny):
    assert {TOKENS[token] for token in tiny.ends} == {"<|im_end|>", "<|endoftext|>"}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.pre", "surprise", "pre-tokenizer 'surprise' is not supported"),
        ("tokenizer.ggml.model", "llama", "tokenizer 'llama' in GGUF is not supported"),
        ("tokenizer.ggml.tokens", ["a", "a"], "token_type and tokens differ"),
        ("tokenizer.ggml.token_type", [1], "token_type and tokens differ"),
        ("tokenizer.ggml.merges", ["nogap"], "a merge is not two tokens"),
        ("tokenizer.ggml.merges", ["a zzz"], "merges do not fit the tokens"),
        ("tokenizer.ggml.merges", [3], "not a list of strings"),
        ("tokenizer.ggml.merges", None, "GGUF has no tokenizer.ggml.merges"),
    ],
)
def test_a_broken_vocabulary_is_a_clear_error(tmp_path, key, value, message):
    with GgufFile(write_gguf(tmp_path / "m.gguf")) as file:
        file.metadata[key] = value
        with pytest.raises(ModelFileError, match=message):
            tokenizer.from_gguf(file)


def test_a_bos_is_put_first_where_the_file_asks(from_gguf):
    with_bos = from_gguf(metadata=[("add_bool", "tokenizer.ggml.add_bos_token", True)])
    assert with_bos.encode("ab")[0] == 1
    assert with_bos.apply_chat([{"role": "user", "content": "x"}]).count(1) == 2


def test_a_folder_gives_the_same_ids(tmp_path, tiny):
    folder = tokenizer.from_folder(write_folder(tmp_path / "hf"), frozenset({2}))
    assert folder.encode("abate the cat") == tiny.encode("abate the cat")
    assert folder.decode(folder.encode(TEXT)) == TEXT
    assert folder.ends == tiny.ends
    messages = [{"role": "user", "content": "hi"}]
    assert folder.apply_chat(messages) == tiny.apply_chat(messages)


def test_a_folder_s_template_file_wins_and_named_templates_work(tmp_path):
    path = write_folder(tmp_path / "hf")
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert tokenizer.from_folder(path, frozenset()).apply_chat([]) != []
    (path / "chat_template.jinja").write_text("ab")
    assert tokenizer.from_folder(path, frozenset()).apply_chat([]) == [TOKENS.index("ab")]


def test_sentence_pieces_are_spaces_and_bytes(tmp_path):
    path = write_folder(tmp_path / "hf")
    description = tokenizer_json()
    vocab = {"<unk>": 0, "▁a": 1, "b": 2, "<0xC3>": 3, "<0xA9>": 4}
    description |= {
        "added_tokens": [],
        "pre_tokenizer": {
            "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True
        },
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
    }  # fmt: skip
    description["model"] = {
        "type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": True
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(description))
    pieces = tokenizer.from_folder(path, frozenset())
    assert pieces.decode([2, 1, 3, 4]) == "b aé"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 3}', "\x00"])
def test_a_broken_tokenizer_json_is_a_clear_error(tmp_path, text):
    path = write_folder(tmp_path / "hf")
    (path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelFileError, match=r"malformed tokenizer\.json"):
        tokenizer.from_folder(path, frozenset())
    (path / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match="cannot read"):
        tokenizer.from_folder(path, frozenset())


def test_control_tokens_lead_the_vocabulary(tiny):
    assert tiny.vocab_size == VOCAB
    assert all(tiny.piece(index) == b"" for index in range(len(CONTROL)))
    assert tiny.piece(VOCAB + 5) == b""


@pytest.mark.parametrize("text", [TEXT * 1000, "<|im_start|>" * 5000, "ab" * 9000, "好" * 9000])
def test_a_long_text_gives_the_ids_a_short_one_would(tiny, text):
    assert tiny.encode(text) == tiny._inner.encode(text).ids


def test_a_long_text_gets_its_bos_too(from_gguf):
    wants = from_gguf(metadata=[("add_bool", "tokenizer.ggml.add_bos_token", True)])
    for count in (1, 20_000):
        assert wants.encode("z" * count) == [1, *[TOKENS.index("z")] * count]


@pytest.mark.parametrize("text", ["<|im_start|>", "<|endoftext|>", "ab", " t", "é", "x"])
@pytest.mark.parametrize("make", ["gguf", "folder"])
def test_no_text_that_fits_is_called_too_long(tiny, tmp_path, make, text):
    if make == "folder":
        tiny = tokenizer.from_folder(write_folder(tmp_path / "f"), frozenset())
    long = text * 3000
    ids = tiny.encode(long)
    assert tiny.encode(long, tokens_max=len(ids)) == ids
    bound = len(long.encode()) // len("<|endoftext|>")
    with pytest.raises(PromptTooLong) as caught:
        tiny.encode(long, tokens_max=bound - 1)
    assert bound <= caught.value.tokens_min <= len(ids)


def test_a_chat_is_measured_as_its_template_wrote_it(tiny):
    with pytest.raises(PromptTooLong, match="at least"):
        tiny.apply_chat([{"role": "user", "content": "x" * 1000}], tokens_max=50)
    # White space that the template drops costs no token.
    trims = tokenizer.TextTokenizer(
        tiny._inner, tiny._pieces, tiny.ends, "{{ messages[0].content|trim }}", {}, 12
    )
    assert len(trims.apply_chat([{"content": " " * 10_000 + "x"}], tokens_max=5)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"added_tokens": [{"content": "<x>", "rstrip": True}]},
        {"model": {"type": "WordLevel"}},
    ],
)
def test_where_text_may_vanish_no_length_is_too_long(change):
    description = tokenizer_json()
    assert tokenizer._token_bytes_max(description, [b"a" * 30]) == 30
    assert tokenizer._token_bytes_max(description | change, [b"a" * 30]) is None


def test_bytes_without_a_token_do_not_count(tiny):
    lacks = tokenizer.TextTokenizer(tiny._inner, tiny._pieces, tiny.ends, None, {}, 12, b"\x04\xf1")
    text = "\x04" * 1000 + "x" * 24
    assert lacks.encode(text, tokens_max=2) == tiny.encode(text)
    with pytest.raises(PromptTooLong):
        lacks.encode(text + "x", tokens_max=2)
    assert tokenizer._missing(TOKENS) == b""
    assert tokenizer._missing(set(TOKENS) - {"a", "Ġ"}) == b"a "
