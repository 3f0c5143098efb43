import pytest

from agent.config import Agent, TokenError, load, read, read_token
from proxy.settings import SettingsError


def problems(text="", **environ):
    with pytest.raises(SettingsError) as caught:
        load(text, environ)
    return caught.value.problems


def test_defaults_need_nothing():
    assert load("", {}) == Agent()
    assert Agent().listen == "127.0.0.1:14100"
    assert Agent().admin.endswith(":14190")


def test_the_section_is_read_and_variables_win():
    text = '[agent]\nlisten = "127.0.0.1:1"\nmodel_names = ["a", "b"]\nqueue = 7\n'
    agent = load(text, {"TONGGUAN_AGENT_LISTEN": "127.0.0.1:2", "TONGGUAN_AGENT_QUEUE": "9"})
    assert agent.listen == "127.0.0.1:2"
    assert agent.model_names == ("a", "b")
    assert agent.queue == 9


def test_the_sidecars_sections_and_variables_are_not_ours():
    text = "[doors]\nnonsense = 1\n[agent]\nqueue = 7\n"
    assert load(text, {"TONGGUAN_DOORS_NONSENSE": "1", "PATH": "/bin"}).queue == 7


def test_what_kubernetes_makes_for_a_service_is_ignored():
    environ = {
        "TONGGUAN_AGENT_SERVICE_HOST": "10.0.0.1",
        "TONGGUAN_AGENT_PORT": "tcp://10.0.0.1:14100",
        "TONGGUAN_AGENT_PORT_14100_TCP_ADDR": "10.0.0.1",
    }
    assert load("", environ) == Agent()


def test_all_problems_are_reported_at_once():
    found = problems(
        '[agent]\nlisten = "nowhere"\nqueue = 0\ndevice = "tpu"\n'
        'colour = "red"\ngrace_s = "long"\n',
        TONGGUAN_AGENT_THREADS="many",
        TONGGUAN_AGENT_SHAPE="round",
    )
    for name in ("agent.listen", "agent.queue", "agent.device", "agent.colour", "agent.grace_s",
                 "TONGGUAN_AGENT_THREADS", "TONGGUAN_AGENT_SHAPE"):  # fmt: skip
        assert sum(line.startswith(name) for line in found) == 1, name
    assert len(found) == 7


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[agent", "tongguan.toml"),
        ("agent = 1", "agent"),
        ('[agent]\nadmin = "127.0.0.1"', "agent.admin"),
        ('[agent]\nlisten = ""', "agent.listen"),
        ('[agent]\nsocket = "/' + "x" * 107 + '"', "agent.socket"),
        ('[agent]\ntrusted_uids = ["root"]', "agent.trusted_uids"),
        ('[agent]\nmodel_names = [""]', "agent.model_names"),
        ("[agent]\nqueue = true", "agent.queue"),
        ("[agent]\nmax_sequences = 1025", "agent.max_sequences"),
        ('[agent]\ndefault_class = "P3"', "agent.default_class"),
    ],
)
def test_a_bad_setting_is_named(text, name):
    (line,) = problems(text)
    assert line.startswith(name)


def test_a_socket_alone_is_enough():
    assert load('[agent]\nlisten = ""\nsocket = "/run/a.sock"', {}).listen == ""


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SettingsError, match=r"tongguan\.toml"):
        read(str(tmp_path), {})
    (tmp_path / "tongguan.toml").write_text("[agent]\nqueue = 5\n")
    assert read(str(tmp_path), {}).queue == 5
    assert read(None, {}) == Agent()


def token_file(tmp_path, data, mode=0o600):
    file = tmp_path / "token"
    file.write_bytes(data)
    file.chmod(mode)
    return str(file)


@pytest.mark.parametrize(
    "data", [b"0123456789abcdef", b"Bearer 0123456789abcdef\n", b"  0123456789abcdef\n"]
)
def test_a_token_is_read_with_or_without_bearer(tmp_path, data):
    assert read_token(token_file(tmp_path, data)) == b"0123456789abcdef"


@pytest.mark.parametrize(
    ("data", "mode"),
    [(b"", 0o600), (b"short", 0o600), (b"0123456789 abcdef", 0o600), (b"\xff" * 20, 0o600),
     (b"Bearer ", 0o600), (b"0123456789abcdef", 0o604)],
)  # fmt: skip
def test_a_token_file_that_will_not_do_is_named_and_not_shown(tmp_path, data, mode):
    path = token_file(tmp_path, data, mode)
    with pytest.raises(TokenError) as caught:
        read_token(path)
    assert path in str(caught.value)
    assert "0123456789" not in str(caught.value)


def test_a_token_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TokenError, match=r"agent\.token_file: .*/none: No such file"):
        read_token(str(tmp_path / "none"))
    assert read_token("") == b""
