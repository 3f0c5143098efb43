"""Text to ids and back, and the chat template, all from the model's own file.

Two kinds of vocabulary are known: byte-level BPE (GPT-2, Llama 3, Qwen2, SmolLM) and
SentencePiece-like pieces with byte fallback (Llama 2, from a Hugging Face folder). Nothing is
fetched.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from agent.engine.template import ChatTemplate
from agent.engine.types import ChatTemplateError, ModelFileError, PromptTooLong

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from agent.engine.gguf_file import GgufFile

# Token types in GGUF (docs/gguf.md): control tokens give no text, user-defined ones do.
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
# Names under which models know the end of a turn or of a text; the file's ids come on top.
# Bounds what a damaged file makes of one number; far above real vocabularies.
TOKENS_MAX: Final = 1 << 24
_END_NAMES: Final = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>")
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2: Final = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_ALONE_CHARACTERS: Final = 8 << 10


def _byte_alphabet() -> dict[str, int]:
    """Return byte-level BPE's alphabet: printable bytes stand for themselves, others are moved."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    moved = (byte for byte in range(256) if byte not in plain)
    table.update({chr(0x100 + index): byte for index, byte in enumerate(moved)})
    return table


_ALPHABET: Final = _byte_alphabet()


def _splitter(name: str) -> pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer that GGUF's `tokenizer.ggml.pre` names."""
    if name in {"smollm", "starcoder", "refact", "command-r"}:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    pattern = {
        "llama-bpe": _LLAMA3,
        "llama3": _LLAMA3,
        "llama-v3": _LLAMA3,
        "qwen2": _QWEN2,
        "deepseek-r1-qwen": _QWEN2,
    }.get(name)
    if pattern is not None:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if name in {"gpt-2", "default"}:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    raise ModelFileError(f"pre-tokenizer {name!r} is not supported")


class TextTokenizer:
    """Implements `types.Tokenizer`; `ends` are the ids that end a generation.

    `token_bytes_max`: no token stands for more bytes of text; None where that cannot be known.
    `missing`: bytes of which a text may have any number without a token.
    Thread safe: nothing changes after construction.
    """

    def __init__(
        self,
        inner: Tokenizer,
        pieces: list[bytes],
        ends: frozenset[int],
        template: str | None,
        special: Mapping[str, str],
        token_bytes_max: int | None = None,
        missing: bytes = b"",
    ) -> None:
        self._inner = inner
        self._pieces = pieces
        self.ends = ends
        self._special = dict(special)
        self._token_bytes_max = token_bytes_max
        self._missing = missing
        self._template = None if template is None else ChatTemplate(template)

    @property
    def vocab_size(self) -> int:
        """Count of ids."""
        return len(self._pieces)

    def encode(self, text: str, *, tokens_max: int | None = None) -> list[int]:
        """Return ids of `text`, with a leading BOS where the model wants one.

        Raises `PromptTooLong` where the length alone says that `tokens_max` is passed.
        """
        return self._encode(text, tokens_max, special=True)

    def _encode(self, text: str, tokens_max: int | None, *, special: bool) -> list[int]:
        if tokens_max is not None and self._token_bytes_max is not None:
            raw = text.encode("utf-8", "replace")
            size = len(raw.translate(None, self._missing) if self._missing else raw)
            tokens_min = -(-size // self._token_bytes_max)
            if tokens_min > tokens_max:
                raise PromptTooLong(tokens_min)
        # Only the batch call lets other threads run meanwhile; it costs tens of microseconds.
        if len(text) > _ALONE_CHARACTERS:
            batch = self._inner.encode_batch_fast([text], add_special_tokens=special)
            ids: list[int] = batch[0].ids
        else:
            ids = self._inner.encode(text, add_special_tokens=special).ids
        return ids

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokens_max: int | None = None,
    ) -> list[int]:
        """Return ids of a conversation; raises `ChatTemplateError` and `PromptTooLong`."""
        if self._template is None:
            raise ChatTemplateError("the model has no chat template")
        text = self._template.render(
            messages, add_generation_prompt=add_generation_prompt, **self._special
        )
        return self._encode(text, tokens_max, special=False)

    def to_json(self) -> str:
        """Return the text of a `tokenizer.json`, from which `from_folder` makes the same again."""
        text: str = self._inner.to_str()
        return text

    def piece(self, token_id: int) -> bytes:
        """Return a token's bytes; special tokens and ids without a token have none."""
        return self._pieces[token_id] if token_id < len(self._pieces) else b""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return text of `token_ids`; special tokens give nothing, broken bytes U+FFFD."""
        return b"".join(map(self.piece, token_ids)).decode("utf-8", "replace")


def _byte_level(token: str) -> bytes:
    if all(char in _ALPHABET for char in token):
        return bytes(_ALPHABET[char] for char in token)
    return token.encode()


_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _sentence_piece(token: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(token)
    if match:
        return bytes.fromhex(match[1])
    return token.replace("\u2581", " ").encode()


def from_gguf(file: GgufFile) -> TextTokenizer:
    """Build the tokenizer a GGUF file describes; raises `ModelFileError`."""
    kind = file.get("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ModelFileError(
            f"tokenizer {kind!r} in GGUF is not supported (gpt2 is); "
            "use the model's Hugging Face folder"
        )
    tokens = _strings(file, "tokenizer.ggml.tokens")
    kinds = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(kinds) != len(tokens):
        raise ModelFileError("malformed GGUF: token_type and tokens differ in length")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelFileError("malformed GGUF: a token appears twice")
    merges = [_pair(merge) for merge in _strings(file, "tokenizer.ggml.merges")]
    try:
        inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as problem:  # noqa: BLE001 - the Rust library raises bare Exception
        raise ModelFileError(f"malformed GGUF: merges do not fit the tokens: {problem}") from None
    inner.pre_tokenizer = _splitter(file.get("tokenizer.ggml.pre", str, "default"))
    inner.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    inner.add_special_tokens([token for token in added if token.special])
    inner.add_tokens([token for token in added if not token.special])
    names = {
        name: tokens[index]
        for name in ("bos", "eos")
        if 0 <= (index := file.get(f"tokenizer.ggml.{name}_token_id", int, -1)) < len(tokens)
    }
    pre = file.get("tokenizer.ggml.pre", str, "default")
    wants_bos = pre in {"llama-bpe", "llama3", "llama-v3"}
    if file.get("tokenizer.ggml.add_bos_token", bool, wants_bos) and "bos" in names:
        _prepend(inner, names["bos"], vocabulary[names["bos"]])
    ends = {file.get(f"tokenizer.ggml.{name}_token_id", int, -1) for name in ("eos", "eot", "eom")}
    ends |= {
        vocabulary[name]
        for name in _END_NAMES
        if name in vocabulary and kinds[vocabulary[name]] == _CONTROL
    }
    pieces = [
        b"" if kind == _CONTROL else token.encode() if kind == _USER_DEFINED else _byte_level(token)
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return TextTokenizer(
        inner,
        pieces,
        frozenset(index for index in ends if 0 <= index < len(tokens)),
        file.get("tokenizer.chat_template", str, "") or None,
        {f"{name}_token": token for name, token in names.items()},
        _longest(pieces, (token.content for token in added)),
        _missing(vocabulary),
    )


def _prepend(inner: Tokenizer, token: str, index: int) -> None:
    from tokenizers.processors import TemplateProcessing  # noqa: PLC0415 - rare

    inner.post_processor = TemplateProcessing(single=f"{token} $A", special_tokens=[(token, index)])


def _strings(file: GgufFile, key: str) -> list[str]:
    values = file.get(key, list)
    if not all(isinstance(value, str) for value in values):
        raise ModelFileError(f"malformed GGUF: {key} is not a list of strings")
    return values


def _pair(merge: str) -> tuple[str, str]:
    left, gap, right = merge.partition(" ")
    if not (left and gap and right):
        raise ModelFileError("malformed GGUF: a merge is not two tokens")
    return left, right


def from_folder(folder: Path, end_ids: frozenset[int]) -> TextTokenizer:
    """Build the tokenizer of a Hugging Face folder; raises `ModelFileError`.

    `end_ids` are what the folder's configuration says ends a generation.
    """
    path = folder / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
        description = json.loads(text)
        inner = Tokenizer.from_str(text)
    except OSError as problem:
        raise ModelFileError(f"cannot read {path}: {problem.strerror}") from None
    except Exception as problem:  # noqa: BLE001 - the Rust library raises bare Exception
        raise ModelFileError(f"malformed {path.name}: {problem}") from None
    to_bytes = _sentence_piece if _is_sentence_piece(description) else _byte_level
    vocabulary: dict[str, int] = inner.get_vocab(with_added_tokens=True)
    last = max(vocabulary.values(), default=-1)
    if last >= TOKENS_MAX:
        raise ModelFileError(f"malformed {path.name}: a token has the number {last}")
    pieces = [b""] * (last + 1)
    for token, index in vocabulary.items():
        pieces[index] = to_bytes(token)
    for index, added in inner.get_added_tokens_decoder().items():
        pieces[index] = b"" if added.special else added.content.encode()
    config = _json_object(folder / "tokenizer_config.json")
    ends = set(end_ids) | {
        vocabulary[name] for name in _END_NAMES if vocabulary.get(name) is not None
    }
    found = {name: _content(config.get(name)) for name in ("bos_token", "eos_token")}
    special = {name: token for name, token in found.items() if token}
    if special.get("eos_token") in vocabulary:
        ends.add(vocabulary[special["eos_token"]])
    return TextTokenizer(
        inner,
        pieces,
        frozenset(ends),
        _template_of(folder, config),
        special,
        _token_bytes_max(description, pieces),
        _missing(vocabulary),
    )


def _token_bytes_max(description: Any, pieces: list[bytes]) -> int | None:
    """Return the most bytes of text a token stands for; None where text may vanish or shrink."""
    added = description.get("added_tokens") or []
    if (
        (description.get("normalizer") or {}).get("type") not in {None, "NFC"}
        or (description.get("model") or {}).get("type") != "BPE"
        or "ByteLevel" not in json.dumps(description.get("pre_tokenizer"))
        or any(token.get("lstrip") or token.get("rstrip") for token in added)
    ):
        return None
    longest = _longest(pieces, (token["content"] for token in added))
    # NFC makes at most four characters into one, and that is not shorter than any of them.
    return longest * (4 if description.get("normalizer") else 1)


def _longest(pieces: list[bytes], added: Iterable[str]) -> int:
    """Return the bytes of byte-level BPE's longest token."""
    return max([1, *map(len, pieces), *(len(content.encode()) for content in added)])


def _missing(vocabulary: Iterable[str]) -> bytes:
    """Return the bytes that have no token: byte-level BPE drops them."""
    known = set(vocabulary)
    return bytes(byte for char, byte in _ALPHABET.items() if char not in known)


def _is_sentence_piece(description: Any) -> bool:
    decoder = json.dumps(description.get("decoder") if isinstance(description, dict) else None)
    return "ByteLevel" not in decoder and ("ByteFallback" in decoder or "Metaspace" in decoder)


def _content(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_of(folder: Path, config: dict[str, Any]) -> str | None:
    separate = folder / "chat_template.jinja"
    if separate.is_file():
        return separate.read_text(encoding="utf-8", errors="replace")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {row.get("name"): row.get("template") for row in template if isinstance(row, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as problem:
        raise ModelFileError(f"malformed {path.name}: {problem}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"malformed {path.name}: not an object")
    return value
