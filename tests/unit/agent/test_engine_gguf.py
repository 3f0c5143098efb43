import struct

import pytest

from agent.engine.gguf_file import GgufFile
from agent.engine.load import load_engine
from agent.engine.types import ModelFileError
from tests.unit.agent.engine_kit import CONTROL, TOKENS, write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf").read_bytes()


@pytest.fixture
def opened(tmp_path):
    def open_bytes(data):
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return GgufFile(path)

    return open_bytes


def header(tensors=0, keys=0, body=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body


def key(name, kind, value):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def tensor(name=b"t", shape=(32,), kind=0, offset=0):
    return (
        struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
        + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)
    )  # fmt: skip


def test_metadata_and_tensors_are_found(opened, whole):
    with opened(whole) as file:
        assert file.get("general.architecture", str) == "llama"
        assert file.get("tokenizer.ggml.tokens", list) == TOKENS
        assert file.tensors["token_embd.weight"].shape == (len(TOKENS), 32)
        assert len(file.tensors) == 2 + 2 * 9


def test_every_cut_is_named_a_truncation(opened, whole):
    # Each byte of the first parts, then strides that hit strings, arrays, heads and tensor data.
    cuts = [*range(400), *range(400, len(whole), 331), len(whole) - 1]
    for cut in cuts:
        with pytest.raises(ModelFileError, match="truncated GGUF"):
            opened(whole[:cut])


def test_a_cut_in_the_data_names_the_tensor_and_both_sizes(opened, whole):
    with pytest.raises(
        ModelFileError, match=rf"tensor \S+ needs \d+ bytes at byte \d+, file has {len(whole) - 1}"
    ):
        opened(whole[:-1])


def test_a_truncated_file_is_refused_by_the_loader_too(tmp_path, whole):
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match="truncated GGUF"):
        load_engine(str(path))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GGML" + bytes(20), "the magic is wrong"),
        (header(version=1), "version 1 is not supported"),
        (header(version=4), "version 4 is not supported"),
        (header(tensors=1 << 62), "tensors and 0 keys are claimed"),
        (header(keys=1 << 40), "keys are claimed"),
        (header(keys=1, body=struct.pack("<Q", 1 << 60)), "at most 4096"),
        (header(keys=1, body=key(b"\xff\xfe", 4, bytes(4))), "is not UTF-8"),
        (header(keys=1, body=key(b"a", 13, bytes(8))), "a has unknown type 13"),
        (header(keys=1, body=key(b"a", 8, struct.pack("<Q", 1 << 50))), "truncated GGUF: a needs"),
        (header(keys=1, body=key(b"a", 9, struct.pack("<IQ", 8, 1 << 50))), "truncated GGUF: a"),
        (header(keys=1, body=key(b"a", 9, struct.pack("<IQ", 4, 1 << 62))), "truncated GGUF: a"),
        (header(keys=1, body=key(b"a", 9, struct.pack("<IQ", 9, 1) + bytes(64))), "array of type"),
        (header(keys=2, body=key(b"a", 0, b"x") * 2), "'a' appears twice"),
        (header(keys=1, body=key(b"general.alignment", 4, struct.pack("<I", 24))), "power of two"),
        (header(keys=1, body=key(b"general.alignment", 4, bytes(4))), "power of two"),
        (header(keys=1, body=key(b"general.alignment", 8, bytes(8))), "power of two"),
        (header(1, body=tensor(shape=())), "has 0 dimensions"),
        (header(1, body=tensor(shape=(1,) * 5)), "has 5 dimensions"),
        (header(1, body=tensor(shape=(0,))), "has shape"),
        (header(1, body=tensor(kind=9999)), "unknown quantisation 9999"),
        (header(1, body=tensor(shape=(33,), kind=3)), "blocks hold 32"),
        (header(1, body=tensor(shape=(1 << 40, 1 << 40))), "truncated GGUF: tensor t"),
        (header(1, body=tensor(offset=1 << 63)), "truncated GGUF: tensor t"),
        (header(2, body=tensor() * 2 + bytes(256)), "tensor t appears twice"),
    ],
)
def test_a_hostile_file_is_a_clear_error(opened, data, message):
    with pytest.raises(ModelFileError, match=message):
        opened(data)


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(ModelFileError, match=r"cannot read .*absent\.gguf: No such file"):
        GgufFile(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="cannot read"):
        GgufFile(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("absent", int, "GGUF has no absent"),
        ("general.architecture", int, "is not of type int"),
        ("llama.block_count", str, "is not of type str"),
        ("tokenizer.ggml.tokens", str, "is not of type str"),
    ],
)
def test_a_value_of_another_type_is_refused(opened, whole, name, kind, message):
    with opened(whole) as file, pytest.raises(ModelFileError, match=message):
        file.get(name, kind)


def test_control_tokens_come_first_in_the_test_model(opened, whole):
    with opened(whole) as file:
        kinds = file.get("tokenizer.ggml.token_type", list)
    assert [kind == 3 for kind in kinds[: len(CONTROL) + 1]] == [True, True, True, False]
