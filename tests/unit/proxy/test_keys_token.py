"""Keys wrapped by a PKCS#11 token, on SoftHSM: what leaves it, what is bound, what is gone."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest

from proxy.config_keys import Keys
from proxy.keys.file import KeyFileError, encode, parse
from proxy.keys.provider import KeySourceError
from proxy.keys.token import TokenError, TokenProvider, opened
from proxy.keys.wrapped import converted, join, split
from tests.unit.proxy.key_sources import key, put, sidecar
from tests.unit.proxy.softhsm import needs_softhsm, token  # noqa: F401 - a fixture

pytestmark = needs_softhsm
CONTENTS = sidecar(
    key(1),
    key(2),
    prompts={"one": b"\x01" * 32, "two": b"\x02" * 32},
    seeds=[("seed1", b"\x03" * 32)],
    auditor=b"\x04" * 32,
    signs=[("tongguan-1", "ed25519", b"\x05" * 32)],
)
SECRETS = [
    *(found.root.hex() for found in CONTENTS.envelope_keys),
    *("01" * 32, "02" * 32, "03" * 32, "05" * 32),
]


@pytest.fixture
def row(token, tmp_path):  # noqa: F811
    file = tmp_path / "sidecar.json"
    with opened(token.module, token.label, token.pin_file, write=True) as session:
        put(file, converted(file, encode(CONTENTS), session.wrap))
    return Keys(
        provider="pkcs11",
        file=str(file),
        pkcs11_module=token.module,
        pkcs11_token=token.label,
        pkcs11_pin_file=token.pin_file,
    )


def rewritten(row, change):
    file = Path(row.file)
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


def test_the_file_holds_no_secret_and_the_provider_gives_them_all(row):
    text = Path(row.file).read_text()
    assert not [secret for secret in SECRETS if secret in text]
    provider = TokenProvider(row)
    keys = provider.load()
    assert tuple(keys.envelope_keys()) == CONTENTS.envelope_keys
    assert [s.value for s in keys.secrets() if s.name != "auditor/public"] == [
        bytes.fromhex(secret) for secret in SECRETS
    ]
    assert keys.auditor_public() == b"\x04" * 32
    assert provider.state().ok


def test_without_the_token_the_file_opens_nothing_and_says_why(row, tmp_path):
    with pytest.raises(KeyFileError, match=r"wrapped by a PKCS#11 token: set keys\.provider"):
        parse(tmp_path / "x", (tmp_path / "sidecar.json").read_bytes())


def test_the_root_does_not_leave_the_token(row, token):  # noqa: F811
    import pkcs11

    with opened(token.module, token.label, token.pin_file) as session:
        root = session._key("tongguan")
        assert root[pkcs11.Attribute.EXTRACTABLE] is False
        assert root[pkcs11.Attribute.NEVER_EXTRACTABLE] is True
        with pytest.raises(pkcs11.AttributeSensitive):
            root[pkcs11.Attribute.VALUE]


def swap_roots(document):
    rows = document["envelope_keys"]
    rows[0]["root"], rows[1]["root"] = rows[1]["root"], rows[0]["root"]


def flip(document):
    text = document["chain_seeds"][0]["seed"]
    document["chain_seeds"][0]["seed"] = text[:-1] + ("0" if text[-1] != "0" else "1")


def other_key(document):
    row = document["chain_seeds"][0]
    row["seed"] = join("nobody", split(row["seed"])[1])


@pytest.mark.parametrize(
    ("change", "reason", "problem"),
    [
        (swap_roots, "token_error", "a wrapped secret was changed"),
        (flip, "token_error", "a wrapped secret was changed"),
        (other_key, "key_missing", "chain/seed1: the token has no key nobody"),
    ],
)
def test_what_was_moved_or_changed_is_refused(row, change, reason, problem):
    provider = TokenProvider(row)
    rewritten(row, change)
    with pytest.raises(KeySourceError, match=problem):
        provider.load()
    assert provider.state().reason == reason


@pytest.mark.parametrize(
    ("change", "reason", "problem"),
    [
        ({"pkcs11_token": "another"}, "token_missing", "token another of .*NoSuchToken"),
        ({"pkcs11_module": "/nowhere/lib.so"}, "module_missing", "/nowhere/lib.so"),
        ({"pkcs11_pin_file": "/nowhere/pin"}, "pin_file", "PIN file: .*No such file"),
    ],
)
def test_what_is_not_there_is_named(row, change, reason, problem):
    facts = {name: getattr(row, name) for name in row.__struct_fields__}
    provider = TokenProvider(Keys(**(facts | change)))
    with pytest.raises(TokenError, match=problem):
        provider.load()
    assert provider.state().reason == reason


def test_a_wrong_pin_is_refused_and_never_shown(row, tmp_path):
    pin = tmp_path / "wrong-pin"
    pin.write_text("987654")
    pin.chmod(0o600)
    facts = {name: getattr(row, name) for name in row.__struct_fields__}
    with pytest.raises(TokenError, match="PinIncorrect") as caught:
        TokenProvider(Keys(**(facts | {"pkcs11_pin_file": str(pin)}))).load()
    assert "987654" not in str(caught.value)
    pin.chmod(0o644)
    with pytest.raises(TokenError, match="lets others at the keys"):
        TokenProvider(Keys(**(facts | {"pkcs11_pin_file": str(pin)}))).load()


def test_a_file_that_is_not_wrapped_is_not_taken(row, tmp_path):
    put(tmp_path / "sidecar.json", CONTENTS)
    with pytest.raises(KeyFileError, match="run: tongguan keys wrap"):
        TokenProvider(row).load()


def test_a_destroyed_prompt_key_comes_back_from_no_copy_of_the_file(row, tmp_path):
    shutil.copy(row.file, tmp_path / "copy")
    provider = TokenProvider(row)
    provider.destroy("prompt/one")
    keys = provider.load()
    assert (keys.prompt_key("one"), keys.prompt_key("two")) == (None, b"\x02" * 32)
    shutil.copy(tmp_path / "copy", row.file)
    keys = provider.load()
    assert (keys.prompt_key("one"), keys.prompt_key("two")) == (None, b"\x02" * 32)
    assert len(keys.envelope_keys()) == 2


def test_a_destroyed_envelope_key_leaves_the_file(row):
    provider = TokenProvider(row)
    kid = key(1).kid.hex()
    provider.destroy(f"envelope/{kid}")
    assert [found.kid for found in provider.load().envelope_keys()] == [key(2).kid]
    with pytest.raises(KeySourceError, match="no secret of the name"):
        provider.destroy(f"envelope/{kid}")


def test_the_mark_is_the_files_own_and_asks_no_token(row):
    provider = TokenProvider(row)
    mark = provider.mark()
    assert provider.mark() == mark
    rewritten(row, lambda document: document.pop("checkpoint_keys"))
    assert provider.mark() != mark


def test_another_thread_may_load_as_the_reload_does(row):
    provider = TokenProvider(row)
    provider.load()
    found = []
    thread = threading.Thread(target=lambda: found.append(provider.load()))
    thread.start()
    thread.join(20)
    assert tuple(found[0].envelope_keys()) == CONTENTS.envelope_keys
