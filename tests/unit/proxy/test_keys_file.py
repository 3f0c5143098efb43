"""Key files: made whole, read strictly, refused when others can read them, silent about secrets."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from proxy.keys.cli import keys
from proxy.keys.file import (
    KeyFile,
    KeyFileError,
    check_access,
    encode,
    parse,
    read,
)
from proxy.keys.issue import DAY_MS, NOT_BEFORE_SLACK_MS, Order, issue, write
from proxy.keys.local import FileProvider
from proxy.sm4 import sm2
from proxy.sm4.keyring import KeyringError
from proxy.sm4.signature import SM2, draw, signer
from tests.unit.proxy.sm4_kit import NOW_MS

ORDER = Order(audience="local/default/pod", client="client-a", tenants=("team-a", "team-b"))
NAME = Path("keys.json")


def counted_random() -> Any:
    count = iter(range(1, 255))
    return lambda size: bytes([next(count)]) * size


def issued(order: Order = ORDER) -> dict[str, KeyFile]:
    return issue(order, now_ms=NOW_MS, random=counted_random())


def document(**changes: Any) -> dict[str, Any]:
    return json.loads(encode(issued()["sidecar"])) | changes


def refused(data: bytes | dict[str, Any]) -> str:
    raw = data if isinstance(data, bytes) else json.dumps(data).encode()
    with pytest.raises(KeyFileError) as caught:
        parse(NAME, raw)
    return str(caught.value)


# -- what is made


def test_each_role_holds_what_it_needs_and_no_more() -> None:
    files = issued()
    sidecar, client, auditor = files["sidecar"], files["client"], files["auditor"]

    assert sidecar.envelope_keys == client.envelope_keys
    assert len(sidecar.envelope_keys) == 1
    assert sidecar.prompt_keys.keys() == {"team-a", "team-b"}
    assert sidecar.auditor_public == auditor.auditor_public
    assert sidecar.auditor_private is None
    assert (client.prompt_keys, client.chain_seeds, client.auditor_public) == ({}, (), None)
    assert auditor.envelope_keys == ()
    assert auditor.prompt_keys == sidecar.prompt_keys
    assert auditor.chain_seeds == sidecar.chain_seeds
    assert auditor.auditor_private is not None


def test_the_auditor_s_pair_is_one_pair() -> None:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    auditor = issued()["auditor"]
    assert auditor.auditor_private is not None

    private = X25519PrivateKey.from_private_bytes(auditor.auditor_private)

    assert private.public_key().public_bytes_raw() == auditor.auditor_public


def test_a_key_is_valid_from_a_moment_before_its_issue_for_its_days() -> None:
    key = issued(Order(audience="a", client="c", tenants=("t",), suite=2, days=3))[
        "client"
    ].envelope_keys[0]

    assert (key.not_before_ms, key.not_after_ms) == (
        NOW_MS - NOT_BEFORE_SLACK_MS,
        NOW_MS + 3 * DAY_MS,
    )
    assert (key.suite, key.tenant, key.audience, key.client) == (2, "t", "a", "c")


def test_every_secret_is_drawn_for_itself() -> None:
    files = issue(ORDER, now_ms=NOW_MS, random=os.urandom)
    sidecar, auditor = files["sidecar"], files["auditor"]
    secrets = [
        sidecar.envelope_keys[0].root,
        sidecar.chain_seeds[0][1],
        *sidecar.prompt_keys.values(),
        auditor.auditor_private,
    ]

    assert len(set(secrets)) == 5
    assert all(secret is not None and len(secret) == 32 for secret in secrets)


@pytest.mark.parametrize(
    "order",
    [
        Order(audience="", client="c", tenants=("t",)),
        Order(audience="a b", client="c", tenants=("t",)),
        Order(audience="a", client="ç", tenants=("t",)),
        Order(audience="a", client="c", tenants=("",)),
        Order(audience="a", client="c", tenants=("t",), suite=3),
        Order(audience="a", client="c", tenants=("t",), days=-1),
    ],
)
def test_a_malformed_order_is_refused(order: Order) -> None:
    with pytest.raises(KeyringError):
        issue(order, now_ms=NOW_MS, random=os.urandom)


@pytest.mark.parametrize("role", ["sidecar", "client", "auditor"])
def test_a_file_reads_back_as_it_was_written(role: str) -> None:
    file = issued()[role]

    back = parse(NAME, encode(file))

    for name in KeyFile.__slots__:
        assert getattr(back, name) == getattr(file, name), name


def test_files_are_written_for_their_owner_alone(tmp_path: Path) -> None:
    old_umask = os.umask(0)
    try:
        paths = write(tmp_path / "new", issued(), force=False, suffix="1")
    finally:
        os.umask(old_umask)

    assert {path.name for path in paths} == {"sidecar.json", "client.json", "auditor.json"}
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(
        path.name for path in paths
    )
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_nothing_is_replaced_without_force(tmp_path: Path) -> None:
    (tmp_path / "client.json").write_text("mine")

    with pytest.raises(KeyFileError, match=r"client\.json is there already"):
        write(tmp_path, issued(), force=False, suffix="1")

    assert [path.name for path in tmp_path.iterdir()] == ["client.json"]
    assert (tmp_path / "client.json").read_text() == "mine"


def test_force_replaces_all(tmp_path: Path) -> None:
    write(tmp_path, issued(), force=False, suffix="1")
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    write(tmp_path, issue(ORDER, now_ms=NOW_MS, random=os.urandom), force=True, suffix="2")

    new = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert new.keys() == old.keys()
    assert all(new[name] != old[name] for name in old)


def test_a_failure_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / ".auditor.json.1").write_text("in the way")

    with pytest.raises(FileExistsError):
        write(tmp_path, issued(), force=False, suffix="1")

    assert [path.name for path in tmp_path.iterdir()] == [".auditor.json.1"]


# -- what is read


def test_the_provider_gives_what_the_file_holds(tmp_path: Path) -> None:
    files = issued()
    write(tmp_path, files, force=False, suffix="1")

    provider = FileProvider(tmp_path / "sidecar.json").load()

    assert tuple(provider.envelope_keys()) == files["sidecar"].envelope_keys
    assert provider.prompt_key("team-a") == files["sidecar"].prompt_keys["team-a"]
    assert provider.prompt_key("nobody") is None
    assert provider.chain_seed() == files["sidecar"].chain_seeds[-1]
    assert provider.auditor_public() == files["auditor"].auditor_public


def test_the_last_chain_seed_is_the_one_in_use(tmp_path: Path) -> None:
    rows = [{"id": "old", "seed": "00" * 32}, {"id": "new", "seed": "11" * 32}]
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(document(chain_seeds=rows)))
    path.chmod(0o600)

    assert FileProvider(path).load().chain_seed() == ("new", b"\x11" * 32)


def test_a_file_with_little_in_it_gives_none(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"format": "tongguan-keys/1", "role": "sidecar"}')
    path.chmod(0o600)

    provider = FileProvider(path).load()

    assert provider.envelope_keys() == []
    assert provider.chain_seed() is None
    assert provider.auditor_public() is None


@pytest.mark.parametrize("role", ["client", "auditor"])
def test_a_sidecar_takes_no_file_of_another_role(tmp_path: Path, role: str) -> None:
    write(tmp_path, issued(), force=False, suffix="1")

    with pytest.raises(KeyFileError, match=f"made for the {role}"):
        FileProvider(tmp_path / f"{role}.json").load()


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o644, 0o660, 0o666, 0o601, 0o777])
def test_a_file_that_others_can_use_is_refused_with_the_command_to_mend_it(
    tmp_path: Path, mode: int
) -> None:
    write(tmp_path, issued(), force=False, suffix="1")
    path = tmp_path / "sidecar.json"
    path.chmod(mode)

    with pytest.raises(KeyFileError) as caught:
        read(path)

    assert f"mode {mode:04o}" in str(caught.value)
    assert f"chmod 600 {path}" in str(caught.value)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_its_owner_alone_is_read(tmp_path: Path, mode: int) -> None:
    write(tmp_path, issued(), force=False, suffix="1")
    (tmp_path / "sidecar.json").chmod(mode)

    assert read(tmp_path / "sidecar.json").role == "sidecar"


def status(uid: int, mode: int) -> Any:
    return SimpleNamespace(st_mode=mode, st_uid=uid)


def test_a_file_of_somebody_else_is_refused() -> None:
    plain = stat.S_IFREG | 0o600

    check_access(NAME, status(1000, plain), 1000)
    check_access(NAME, status(0, plain), 1000)
    with pytest.raises(KeyFileError, match="owned by uid 1001"):
        check_access(NAME, status(1001, plain), 1000)


@pytest.mark.parametrize("kind", [stat.S_IFDIR, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFSOCK])
def test_what_is_no_file_is_refused(kind: int) -> None:
    with pytest.raises(KeyFileError, match="not a regular file"):
        check_access(NAME, status(0, kind | 0o600), 0)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match="not a regular file"):
        read(tmp_path)


def test_a_link_is_judged_by_what_it_leads_to(tmp_path: Path) -> None:
    write(tmp_path, issued(), force=False, suffix="1")
    (tmp_path / "link").symlink_to("sidecar.json")
    assert read(tmp_path / "link").role == "sidecar"

    (tmp_path / "sidecar.json").chmod(0o644)
    with pytest.raises(KeyFileError, match="0644"):
        read(tmp_path / "link")


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    with path.open("wb") as file:
        file.truncate(5 << 20)
    path.chmod(0o600)

    with pytest.raises(KeyFileError, match="larger than"):
        read(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"-----BEGIN PRIVATE KEY-----", b"{}{}", b'{"a":1}'],
)
def test_what_is_no_key_file_is_refused(data: bytes) -> None:
    assert refused(data).startswith("keys.json: ")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"format": "tongguan-keys/2"}, "format: expected tongguan-keys/1"),
        ({"format": 1}, "format: expected text"),
        ({"role": "admin"}, "role: expected sidecar, client or auditor"),
        ({"extra": 1}, "keys.json: extra: no such member"),
        ({"envelope_keys": {}}, "envelope_keys: expected a list"),
        ({"envelope_keys": [{}]}, "envelope_keys[0].kid: missing"),
        ({"prompt_keys": {"t": 1}}, "prompt_keys[...]: expected text"),
        ({"prompt_keys": {"t": "00"}}, "prompt_keys[0]: expected 64 hexadecimal digits"),
        ({"chain_seeds": [{"id": "a.b", "seed": "00" * 32}]}, "chain_seeds[0].id"),
        ({"chain_seeds": [{"id": "", "seed": "00" * 32}]}, "chain_seeds[0].id"),
        ({"chain_seeds": [{"id": "a", "seed": "zz" * 32}]}, "chain_seeds[0].seed"),
        ({"auditor_public": "00"}, "auditor_public: expected 64"),
        ({"auditor_private": "00" * 33}, "auditor_private: expected 64"),
    ],
)
def test_a_malformed_member_is_named(changes: dict[str, Any], text: str) -> None:
    assert text in refused(document(**changes))


SECRET = "5ec2e7" * 10 + "5ec2"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kid": "00" * 7}, "envelope_keys[0].kid: expected 16 hexadecimal digits"),
        ({"root": SECRET[:-1]}, "envelope_keys[0].root: expected 64 hexadecimal digits"),
        ({"root": SECRET[:-1] + "g"}, "envelope_keys[0].root: expected 64 hexadecimal digits"),
        ({"root": SECRET[:-1] + " "}, "envelope_keys[0].root: expected 64 hexadecimal digits"),
        ({"root": SECRET[:-2] + "  "}, "envelope_keys[0].root: expected 64 hexadecimal digits"),
        ({"root": None}, "envelope_keys[0].root: expected text"),
        ({"suite": 3}, "envelope_keys[0].suite"),
        ({"suite": "1"}, "envelope_keys[0].suite: expected a whole number"),
        ({"digest": "md5"}, "envelope_keys[0].digest"),
        ({"pad": 100}, "envelope_keys[0].pad"),
        ({"not_after_ms": 0}, "envelope_keys[0].validity"),
        ({"not_after_ms": 1.5}, "envelope_keys[0].not_after_ms: expected a whole number"),
        ({"audience": "a b"}, "envelope_keys[0].audience"),
        ({"typo": 1}, "envelope_keys[0].typo: no such member"),
    ],
)
def test_a_malformed_key_is_named_and_not_shown(changes: dict[str, Any], text: str) -> None:
    row = document()["envelope_keys"][0] | {"root": SECRET}
    text_of_error = refused(document(envelope_keys=[row | changes]))

    assert text in text_of_error
    assert SECRET[:12] not in text_of_error


def test_a_kid_twice_with_different_roots_is_refused() -> None:
    row = document()["envelope_keys"][0]

    assert "known already" in refused(document(envelope_keys=[row, row | {"root": "00" * 32}]))
    assert len(parse(NAME, json.dumps(document(envelope_keys=[row, row])).encode()).envelope_keys)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_key_file_or_refused(data: bytes) -> None:
    with pytest.raises(KeyFileError):
        parse(NAME, data)


def test_a_key_file_s_repr_shows_nothing() -> None:
    file = issued()["auditor"]
    assert file.auditor_private is not None

    assert file.auditor_private.hex() not in repr(file)
    assert str(file.auditor_private) not in repr(file)


# -- the command


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(keys, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.output


def test_new_writes_three_files_and_show_tells_what_is_in_them(tmp_path: Path) -> None:
    code, output = run("new", "--dir", str(tmp_path), "--tenant", "a", "--tenant", "b")
    assert (code, output.count("wrote ")) == (0, 3)

    code, output = run("show", str(tmp_path / "sidecar.json"))

    file = read(tmp_path / "sidecar.json")
    assert code == 0
    assert file.envelope_keys[0].kid.hex() in output
    assert file.envelope_keys[0].audience in output
    assert "live" in output
    assert "SM4-128-GCM" in output
    assert "a, b" in output


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize("role", ["sidecar", "client", "auditor"])
def test_show_never_shows_a_secret(tmp_path: Path, role: str, options: tuple[str, ...]) -> None:
    run("new", "--dir", str(tmp_path))
    path = tmp_path / f"{role}.json"
    file = read(path)
    secrets = [key.root for key in file.envelope_keys]
    secrets += [*file.prompt_keys.values(), *(seed for _, seed in file.chain_seeds)]
    secrets += [file.auditor_private] if file.auditor_private else []

    code, output = run("show", str(path), *options)

    assert code == 0
    assert secrets
    for secret in secrets:
        assert secret.hex() not in output.lower()
    if options:
        assert json.loads(output)["role"] == role


@pytest.mark.parametrize("scheme", ["ed25519", "sm2"])
def test_a_signature_pair_has_its_private_half_in_the_client_s_file_alone(
    tmp_path: Path, scheme: str
) -> None:
    if scheme == SM2 and not sm2.available():
        pytest.skip("capability: OpenSSL with SM2")
    code, _ = run(
        *("new", "--dir", str(tmp_path), "--sign", scheme, "--require-signature"),
        *("--require-mac", "--digest", "sm3"),
    )
    assert code == 0

    sidecar = read(tmp_path / "sidecar.json").envelope_keys[0]
    client = read(tmp_path / "client.json").envelope_keys[0]

    assert (sidecar.scheme, sidecar.digest) == (scheme, "sm3")
    assert (sidecar.require_signature, sidecar.require_mac) == (True, True)
    assert sidecar.sign_private == b""
    assert msgspec.structs.replace(client, sign_private=b"") == sidecar
    assert signer(scheme, client.sign_private).public() == sidecar.sign_public
    for path in tmp_path.iterdir():
        assert (client.sign_private.hex() in path.read_text()) is (path.name == "client.json")
        for options in ((), ("--json",)):
            code, output = run("show", str(path), *options)
            assert client.sign_private.hex() not in output
            if path.name != "auditor.json":
                assert f"required, {scheme} {sidecar.sign_public.hex()}" in output


def test_a_signature_can_only_be_demanded_with_a_pair_for_it(tmp_path: Path) -> None:
    code, output = run("new", "--dir", str(tmp_path), "--require-signature")

    assert code == 2
    assert "--sign" in output
    assert not list(tmp_path.iterdir())


def test_a_file_without_signatures_has_no_members_for_them(tmp_path: Path) -> None:
    run("new", "--dir", str(tmp_path))

    assert "sign" not in (tmp_path / "client.json").read_text().replace("require_signature", "")


def test_a_sidecar_s_file_with_the_client_s_private_key_is_refused() -> None:
    private, public = draw("ed25519", os.urandom)
    row = document()["envelope_keys"][0]
    row |= {"scheme": "ed25519", "sign_public": public.hex(), "sign_private": private.hex()}

    message = refused(document(envelope_keys=[row]))

    assert "sign_private is the client's alone" in message
    assert private.hex() not in message
    assert parse(NAME, json.dumps(document(role="client", envelope_keys=[row])).encode())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scheme": "rsa", "sign_public": "00" * 32}, "envelope_keys[0].scheme: expected"),
        ({"sign_public": "00" * 32}, "envelope_keys[0].scheme: missing"),
        ({"scheme": "ed25519"}, "envelope_keys[0].sign_public: expected 64"),
        ({"scheme": "ed25519", "sign_public": "00" * 64}, "sign_public: expected 64"),
        ({"scheme": "sm2", "sign_public": "00" * 32}, "sign_public: expected 128"),
        ({"scheme": "sm2", "sign_public": "00" * 64}, "not a public key of sm2"),
        ({"require_signature": True}, "envelope_keys[0].require_signature: needs scheme"),
        ({"scheme": 1}, "envelope_keys[0].scheme: expected"),
        ({"scheme": None}, "envelope_keys[0].scheme: expected"),
    ],
)
def test_malformed_members_for_signatures_are_named(change: dict[str, Any], problem: str) -> None:
    row = document()["envelope_keys"][0] | change

    assert problem in refused(document(envelope_keys=[row]))


def test_a_provider_keeps_no_root_once_it_has_handed_them_over(tmp_path: Path) -> None:
    run("new", "--dir", str(tmp_path), "--audience", "a/b/c")
    provider = FileProvider(tmp_path / "sidecar.json").load()
    (key,) = provider.envelope_keys()

    provider.forget_envelope_keys()

    assert provider.envelope_keys() == []
    assert provider.audiences() == {"a/b/c"}
    assert provider.chain_seed() is not None
    assert key.root


def test_each_audience_is_new_unless_named(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run("new", "--dir", str(tmp_path / name))
    run("new", "--dir", str(tmp_path / "three"), "--audience", "my/own/pod", "--suite", "2")

    one, two, three = (
        read(tmp_path / name / "client.json").envelope_keys[0] for name in ("one", "two", "three")
    )

    assert one.audience != two.audience
    assert (three.audience, three.suite) == ("my/own/pod", 2)


def test_new_does_not_replace_without_force(tmp_path: Path) -> None:
    run("new", "--dir", str(tmp_path))
    before = (tmp_path / "sidecar.json").read_bytes()

    code, output = run("new", "--dir", str(tmp_path))

    assert code == 2
    assert "--force" in output
    assert (tmp_path / "sidecar.json").read_bytes() == before
    assert run("new", "--dir", str(tmp_path), "--force")[0] == 0
    assert (tmp_path / "sidecar.json").read_bytes() != before


@pytest.mark.parametrize(
    "arguments",
    [
        ("new",),
        ("new", "--dir", "x", "--suite", "3"),
        ("new", "--dir", "x", "--days", "0"),
        ("new", "--dir", "x", "--client", "a b"),
        ("new", "--dir", "x", "--audience", "é"),
        ("show",),
    ],
)
def test_bad_usage_exits_2(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    arguments = tuple(str(tmp_path / "x") if a == "x" else a for a in arguments)

    assert run(*arguments)[0] == 2
    assert not (tmp_path / "x").exists()


def test_a_refused_file_exits_2_and_a_missing_one_3(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("{}")
    path.chmod(0o600)

    assert run("show", str(path))[0] == 2
    assert run("show", str(tmp_path / "nothing"))[0] == 3
    assert run("new", "--dir", str(path / "below"))[0] == 3


@pytest.mark.parametrize(
    ("not_before", "not_after", "expected"),
    [(5, 9, "not yet"), (4, 9, "live"), (0, 4, "live"), (0, 3, "expired")],
)
def test_the_state_of_a_key(not_before: int, not_after: int, expected: str) -> None:
    from proxy.keys.check import state

    assert state(not_before, not_after, 4) == expected


@pytest.mark.parametrize(("option", "kinds"), [("ed25519", 1), ("sm2", 1), ("both", 2)])
def test_the_keys_of_checkpoints_are_told_by_either_file(tmp_path, option, kinds):
    from proxy.audit.note import parse_keys
    from proxy.sm4.sm2 import available

    if option != "ed25519" and not available():
        pytest.skip("capability: OpenSSL with SM2")
    directory = str(tmp_path / "keys")
    assert run("new", "--dir", directory, "--checkpoints", option)[0] == 0
    lines = [run("public", f"{directory}/{name}.json")[1] for name in ("auditor", "sidecar")]
    assert lines[0] == lines[1]
    assert len(parse_keys(lines[0])) == kinds
    assert run("public", f"{directory}/client.json")[0] == 2
    # Another set of the same directory: the earlier public keys stay with the auditor.
    assert run("new", "--dir", directory, "--force")[0] == 0
    after = parse_keys(run("public", f"{directory}/auditor.json")[1])
    assert after[:kinds] == parse_keys(lines[0])
    assert len(after) == kinds + 1
