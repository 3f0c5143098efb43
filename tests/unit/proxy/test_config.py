"""Settings: sources, types, bounds, and that every mistake is named at once."""

from __future__ import annotations

import json

import pytest

from proxy.config import (
    Settings,
    describe,
    load,
    read,
    split_address,
    split_url,
)
from proxy.settings import SettingsError, is_service_variable, own_variables, service_variables
from tests.unit.proxy.settings_kit import LEAVES, NAMES, lookup, problems, toml, variable

# --- defaults


def test_defaults_are_valid_and_are_those_of_an_empty_file():
    assert load("", {}) == Settings()


def test_defaults_that_are_promised():
    settings = Settings()
    assert settings.doors.app == "127.0.0.1:14080"
    assert settings.doors.sealed == "0.0.0.0:14081"
    assert settings.doors.admin == "0.0.0.0:14090"
    assert settings.qos.default_class == "P1"
    assert settings.keys.file == ""
    assert settings.audit.dir == ""
    assert settings.envelope.fence_s == 10
    assert settings.pools.shared.token_ids is False
    assert settings.tenants == {}


def test_each_setting_has_an_explanation_and_a_default_within_its_bounds():
    settings = Settings()
    for name, _, declared in LEAVES:
        default = lookup(settings, name)
        assert declared.doc, name
        assert declared.ge is None or default >= declared.ge, name
        assert declared.le is None or default <= declared.le, name


def test_no_two_settings_share_a_variable():
    variables = list(map(variable, NAMES))
    assert len(set(variables)) == len(variables)
    assert not [v for v in variables if is_service_variable(v)]


SEALED = "[pools.shared]\nseal.keys = ['a.json']\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (
            "[pools.shared]\nseal.keys = ['a.json', 'b.json']",
            "seal.keys: expected one file, or one",
        ),
        (SEALED + "authorization_file = 'x'", "authorization_file: beside an envelope"),
        (SEALED + "overflow = true", "overflow: best_effort does not seal"),
        (
            "[pools.dedicated]\nseal.keys = ['a.json']\noverflow = true",
            "overflow: shared does not seal",
        ),
    ],
)
def test_what_would_leave_in_clear_is_a_mistake(text, what):
    (found,) = problems(text)
    assert what in found


@pytest.mark.parametrize(
    "text",
    [
        SEALED + "endpoints = ['http://192.0.2.1:1', 'http://192.0.2.1:2']",
        SEALED + "overflow = true\n[pools.best_effort]\nseal.keys = ['a.json']",
        "[pools.shared]\noverflow = true\n[pools.best_effort]\nseal.keys = ['a.json']",
        "[pools.best_effort]\nseal.keys = ['a.json']",
    ],
)
def test_pools_that_seal_where_they_have_to_are_good(text):
    assert load(text, {})


def test_settings_are_frozen():
    with pytest.raises(AttributeError, match="immutable"):
        Settings().doors.app = "x"


# --- who wins, and what is reported


def test_a_variable_wins_over_the_file_and_leaves_its_neighbours():
    text = "[doors]\nbacklog = 10\nconnections = 20\n"
    doors = load(text, {"TONGGUAN_DOORS_BACKLOG": "30"}).doors
    assert (doors.backlog, doors.connections) == (30, 20)


def test_a_bad_value_in_the_file_is_reported_though_a_variable_wins():
    found = problems("[doors]\nbacklog = 0\n", {"TONGGUAN_DOORS_BACKLOG": "30"})
    assert found == ["doors.backlog: must be at least 1, got 0"]


def test_every_problem_is_reported_at_once_and_named():
    text = """
    log_level = "loud"
    colour = "red"
    [doors]
    backlog = 0
    app = "nowhere"
    [pools.shared]
    endpoints = []
    [qos.p0]
    inflight = "many"
    [tenants.acme]
    max_class = "P9"
    """
    environ = {"TONGGUAN_AUDIT_FLUSH_MS": "soon", "TONGGUAN_AUDIT_COLOUR": "red"}
    found = problems(text, environ)
    for name in (
        "colour: unknown setting",
        "log_level: expected one of",
        "doors.backlog: must be at least 1",
        "doors.app: expected host:port",
        "pools.shared.endpoints: at least one",
        "qos.p0.inflight: expected a whole number",
        "tenants.acme.max_class: expected one of",
        "TONGGUAN_AUDIT_FLUSH_MS: expected a whole number",
        "TONGGUAN_AUDIT_COLOUR: unknown variable",
    ):
        assert len([p for p in found if p.startswith(name)]) == 1, name
    assert len(found) == 9


def test_the_error_says_all_problems_in_its_text():
    with pytest.raises(SettingsError, match=r"a: unknown setting; b: unknown setting"):
        load("a = 1\nb = 2\n", {})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("[doors]\nApp = 'x'\n", "doors.App"),
        ("[qos.p1]\ninflight = 1\n", "qos.p1.inflight"),
        ("[[qos.rules]]\nclass = 'P1'\nqos = 'P1'\n", "qos.rules[1].class"),
        ("[qos.p3]\nqueue = 1\n", "qos.p3"),
        ("[tenants.acme]\nclass = 'P0'\n", "tenants.acme.class"),
    ],
)
def test_an_unknown_key_is_refused_at_any_depth(text, name):
    assert problems(text) == [f"{name}: unknown setting"]


# --- lists of tables


def test_rows_of_a_list_keep_their_order_and_have_defaults():
    rules = load(
        "[[qos.rules]]\nqos = 'P2'\n[[qos.rules]]\nqos = 'P0'\nmodel = 'm'\n", {}
    ).qos.rules
    assert [(r.qos, r.model, r.prompt_bytes_min) for r in rules] == [("P2", "", 0), ("P0", "m", 0)]
    shown = describe(load("[[qos.rules]]\nqos = 'P2'\n", {}))
    assert json.loads(json.dumps(shown))["qos"]["rules"][0]["qos"] == "P2"


def test_every_mistake_in_a_list_is_named_with_its_row():
    text = """
    [[qos.rules]]
    model = "m"
    [[qos.rules]]
    qos = "P9"
    prompt_bytes_min = -1
    [[qos.rules]]
    qos = "P1"
    colour = "red"
    prompt_tokens_min = 9
    prompt_tokens_max = 8
    """
    assert problems(text) == [
        "qos.rules[2].prompt_bytes_min: must be at least 0, got -1",
        "qos.rules[3].colour: unknown setting",
        "qos.rules[1].qos: expected one of 'P0', 'P1', 'P2', got ''",
        "qos.rules[2].qos: expected one of 'P0', 'P1', 'P2', got 'P9'",
        "qos.rules[3].prompt_tokens_max: less than prompt_tokens_min",
    ]


@pytest.mark.parametrize("value", ["1", "'x'", "{}", "[1]", "[{qos = 'P1'}, 2]", "{a = {}}"])
def test_what_is_no_list_of_tables_is_refused(value):
    found = problems(f"[qos]\nrules = {value}\n")
    assert found == ["qos.rules: expected a list of tables, [[qos.rules]]"]


def test_a_list_of_tables_has_no_variable():
    name = "TONGGUAN_QOS_RULES"
    assert problems("", {name: "x"}) == [f"{name}: unknown variable"]


@pytest.mark.parametrize(
    "url", ["https://a:1/x", "a:1/x", "http://", "http://a:0x/", "http://a:99999/", "http://a/b c"]
)
def test_a_url_that_is_none_is_refused(url):
    (found,) = problems(toml("qos.limits_url", url))
    assert found.startswith("qos.limits_url: expected ")


def test_a_url_is_parted():
    assert split_url("http://a:1/v1/limits") == (("a", 1), "/v1/limits")
    assert split_url("http://a") == (("a", 80), "/")


@pytest.mark.parametrize("name", ["doors", "pools.shared", "qos.p0"])
def test_a_section_that_is_no_table_is_refused(name):
    assert problems(toml(name, 3)) == [f"{name}: expected a table"]


@pytest.mark.parametrize(
    "name", ["TONGGUAN_", "TONGGUAN_DOORS", "TONGGUAN_TENANTS_ACME_MAX_CLASS", "TONGGUAN_AGENTS"]
)
def test_an_unknown_variable_is_refused(name):
    assert problems("", {name: "1"}) == [f"{name}: unknown variable"]


def test_variables_without_our_prefix_are_not_looked_at():
    assert load("", {"HTTP_PROXY": "x", "tonggun_doors_app": "x", "XTONGGUAN_A": "1"}) == Settings()


@pytest.mark.parametrize("text", ["[doors", "a = ", "[doors]\n[doors]\n", "a = 1\na = 2\n"])
def test_a_file_that_is_no_toml_is_one_problem(text):
    found = problems(text)
    assert len(found) == 1
    assert found[0].startswith("tongguan.toml: ")


# --- other rooms and Kubernetes


@pytest.mark.parametrize(
    "name", ["TONGGUAN_AGENT_MODEL", "TONGGUAN_UP_TORCH", "TONGGUAN_CLIENT_KEYS"]
)
def test_variables_of_other_rooms_are_skipped(name):
    assert load("", {name: "anything"}) == Settings()


def test_the_agents_table_is_not_ours_to_check():
    assert load("[agent]\nno_such_setting = 1\n", {}) == Settings()
    assert load("agent = 3\n", {}) == Settings()


SERVICE = {
    "TONGGUAN_SERVICE_HOST": "10.0.0.1",
    "TONGGUAN_SERVICE_PORT": "14081",
    "TONGGUAN_SERVICE_PORT_SEALED": "14081",
    "TONGGUAN_PORT": "tcp://10.0.0.1:14081",
    "TONGGUAN_PORT_14081_TCP": "tcp://10.0.0.1:14081",
    "TONGGUAN_PORT_14081_TCP_ADDR": "10.0.0.1",
    "TONGGUAN_PORT_14081_TCP_PORT": "14081",
    "TONGGUAN_PORT_14081_TCP_PROTO": "tcp",
    "TONGGUAN_SEALED_PORT_14081_TCP": "tcp://10.0.0.1:14081",
}


def test_variables_that_kubernetes_makes_are_ignored_and_can_be_named():
    assert load("", SERVICE) == Settings()
    assert service_variables(SERVICE | {"TONGGUAN_DOORS_APP": "x", "A_PORT": "1"}) == sorted(
        SERVICE
    )


@pytest.mark.parametrize("name", ["TONGGUAN_PORT_SEALED", "TONGGUAN_PORTS", "TONGGUAN_SERVICE"])
def test_what_only_looks_like_a_service_is_unknown(name):
    assert problems("", {name: "1"}) == [f"{name}: unknown variable"]


def test_own_variables_keeps_only_those_of_the_asking_room():
    environ = {"TONGGUAN_DOORS_APP": "a", "TONGGUAN_AGENT_X": "b", "PATH": "c", **SERVICE}
    assert own_variables(environ, ("AGENT_",)) == {"TONGGUAN_DOORS_APP": "a"}


# --- tenants


def test_tenants_are_a_table_of_tables():
    settings = load('[tenants.acme]\nmax_class = "P0"\n[tenants."team b"]\n', {})
    assert {name: row.max_class for name, row in settings.tenants.items()} == {
        "acme": "P0",
        "team b": "P1",
    }


@pytest.mark.parametrize("text", ["tenants = 1\n", "[tenants]\nacme = 'P0'\n", "[[tenants]]\n"])
def test_tenants_of_another_shape_are_refused(text):
    assert problems(text) == ["tenants: expected a table of tables"]


@pytest.mark.parametrize("tenant", ["a b", "a\r\nX-QoS-Class: P0", "caf\u00e9", "a" * 256, "\x7f"])
def test_a_tenant_that_cannot_stand_in_a_header_is_refused(tenant):
    assert problems("", {"TONGGUAN_IDENTITY_TENANT": tenant})[0].startswith("identity.tenant: ")


@pytest.mark.parametrize(
    "gateway",
    [
        "",
        "localhost",
        "10.0.0",
        "010.0.0.1",
        "10.0.0.1/8",
        "10.0.0.0/33",
        "10.0.0.1:80",
        "[::1]",
        "::1/129",
        "fe80::1%eth0",
        "10.0.0.1 ",
        "unix",
        "\u0661.0.0.1",
    ],
)
def test_a_gateway_that_is_no_address_or_network_is_a_mistake_named_at_start(gateway):
    found = problems(f"[identity]\ngateways = ['10.0.0.1', '{gateway}', 'b']")
    assert len(found) == 2
    assert all(problem.startswith("identity.gateways: ") for problem in found)
    assert repr(gateway) in found[0] or gateway in found[0]
    assert "'b'" in found[1]


def test_gateways_are_a_list_and_none_by_default():
    assert load("", {}).identity.gateways == ()
    given = load("", {"TONGGUAN_IDENTITY_GATEWAYS": "10.0.0.0/8, ::1"})
    assert given.identity.gateways == ("10.0.0.0/8", "::1")
    assert problems("[identity]\ngateways = '::1'")[0].startswith("identity.gateways: expected a")


@pytest.mark.parametrize("host", ["a b", "a\r\nX-Tenant-Id: b", "\u4e2d"])
def test_a_host_that_cannot_stand_in_a_header_is_refused(host):
    found = problems("", {"TONGGUAN_POOLS_SHARED_HOST": host})
    assert found[0].startswith("pools.shared.host: ")


# --- from the disk


def test_without_a_path_only_the_environment_counts():
    assert read(None, {"TONGGUAN_LOG_LEVEL": "debug"}).log_level == "debug"


def test_a_path_is_a_file_or_the_directory_of_one(tmp_path):
    file = tmp_path / "tongguan.toml"
    file.write_text('log_level = "debug"\n', encoding="utf-8")
    assert read(str(file), {}).log_level == "debug"
    assert read(str(tmp_path), {}).log_level == "debug"
    assert read(str(tmp_path), {"TONGGUAN_LOG_LEVEL": "error"}).log_level == "error"


def test_a_missing_file_is_a_problem_that_names_it(tmp_path):
    for path in (tmp_path, tmp_path / "other.toml"):
        with pytest.raises(SettingsError) as caught:
            read(str(path), {})
        assert len(caught.value.problems) == 1
        assert caught.value.problems[0].startswith(str(path))


def test_a_file_that_is_not_utf8_is_a_problem(tmp_path):
    file = tmp_path / "tongguan.toml"
    file.write_bytes(b'log_level = "\xff"\n')
    with pytest.raises(SettingsError, match=r"tongguan\.toml: not UTF-8"):
        read(str(tmp_path), {})


# --- shown


def test_settings_are_shown_as_plain_data_with_every_name():
    plain = describe(load("[tenants.acme]\n", {}))
    acme = {"max_class": "P1", "sla": "", "rate": 0.0, "burst": 0}
    assert json.loads(json.dumps(plain))["tenants"] == {"acme": acme}
    for name in NAMES:
        table = plain
        for part in name.split("."):
            table = table[part]


@pytest.mark.parametrize("address", ["host:65536", "host:99999", "[::1]:70000", "host:http"])
def test_a_port_that_is_none_names_the_range(address):
    with pytest.raises(ValueError, match="port 1-65535"):
        split_address(address)


def test_an_unknown_pool_is_told_which_there_are():
    assert problems("[pools.fast]\n") == [
        "pools.fast: unknown setting; there are dedicated, shared and best_effort"
    ]


def test_a_file_that_is_not_there_is_named_once(tmp_path):
    file = tmp_path / "none.toml"
    with pytest.raises(SettingsError) as caught:
        read(str(file), {})
    assert caught.value.problems == [f"{file}: No such file or directory"]


# --- keys

KEY_SOURCES = {
    "file": {},
    "directory": {"directory": "d"},
    "http": {"http_address": "https://h:8200", "http_token_file": "t"},
    "pkcs11": {
        "file": "f", "pkcs11_module": "m", "pkcs11_token": "t", "pkcs11_pin_file": "p",
    },
}  # fmt: skip


@pytest.mark.parametrize("provider", KEY_SOURCES)
def test_a_key_provider_names_each_setting_that_it_lacks(provider):
    rows = KEY_SOURCES[provider]
    text = toml("keys.provider", provider)
    settings = load(text, {variable(f"keys.{name}"): value for name, value in rows.items()})
    assert settings.keys.provider == provider
    if rows:
        needed = [f"keys.{name}: needed by keys.provider = {provider!r}" for name in rows]
        assert problems(text) == needed


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("h:8200", "expected https://"),
        ("https://", "expected https://"),
        ("ftp://h", "expected https://"),
        ("https://h/v1", "without a path"),
        ("http://192.0.2.1:8200", "keys do not go unencrypted"),
        ("http://127.0.0.1.example:8200", "keys do not go unencrypted"),
        ("https://user:secret@h", "no credentials in here"),
        ("https://h?token=secret", "no credentials in here"),
    ],
)
def test_a_key_service_s_address_that_cannot_be_used_is_refused(address, problem):
    (found,) = problems(toml("keys.http_address", address))
    assert problem in found
    assert "secret@" not in found
    assert "token=" not in found


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:8200", "http://localhost", "https://[::1]:1"]
)
def test_a_key_service_on_loopback_needs_no_tls(address):
    assert load(toml("keys.http_address", address), {}).keys.http_address == address


@pytest.mark.parametrize(
    "path", ["../other", "a/../b", "a b", "a?b", "a%2fb", "a#b", "ä", "a" * 256]
)
@pytest.mark.parametrize("name", ["http_path", "http_mount", "http_namespace"])
def test_a_path_at_the_key_service_leads_nowhere_else(name, path):
    (found,) = problems(toml(f"keys.{name}", path))
    assert found == f"keys.{name}: expected letters, digits, and any of -_./"
