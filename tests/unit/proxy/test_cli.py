"""The `tongguan` command: finds its rooms, checks settings, ends with the promised codes."""

from __future__ import annotations

import json
import os
import re
from importlib import metadata

import pytest
from click.testing import CliRunner

from proxy.ask import AskError
from proxy.cli import GROUP, PLAIN_URL, SEALED_URL, SETTINGS_GROUP, main

COMMANDS = ["up", "ask", "sidecar", "agent", "keys", "seal", "open", "audit"]
COMMANDS += ["model", "memory", "upstream", "config", "version"]


@pytest.fixture
def tongguan(monkeypatch):
    for name in [n for n in os.environ if n.startswith("TONGGUAN_")]:
        monkeypatch.delenv(name)

    def call(*arguments, **environ):
        return CliRunner().invoke(main, list(arguments), env=environ)

    return call


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a distribution with commands of ours."""

    def made(*lines):
        info = tmp_path / "extra_rooms-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra-rooms\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines]) + "\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    return made


def listed(help_text):
    return re.findall(r"^  ([a-z]\S*)", help_text.split("Commands:")[1], re.MULTILINE)


def test_every_command_is_installed():
    names = {point.name for point in metadata.entry_points(group=GROUP)}
    assert set(COMMANDS) <= names


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_commands_in_the_order_people_need_them(tongguan, flag):
    result = tongguan(flag)
    assert result.exit_code == 0
    assert listed(result.output) == COMMANDS
    assert "tongguan up" in result.output


def test_without_a_command_the_help_is_shown_and_the_usage_is_wrong(tongguan):
    result = tongguan()
    assert result.exit_code == 2
    assert listed(result.output) == COMMANDS


def test_a_command_that_does_not_exist_is_wrong_usage(tongguan):
    result = tongguan("frobnicate")
    assert result.exit_code == 2
    assert "frobnicate" in result.stderr


@pytest.mark.parametrize("command", ["sidecar", "ask", "keys", "audit", "config"])
def test_each_command_of_the_sidecar_has_help(tongguan, command):
    result = tongguan(command, "--help")
    assert result.exit_code == 0
    assert result.output.startswith("Usage:")


def test_version_is_that_of_the_distribution(tongguan):
    result = tongguan("version")
    assert (result.exit_code, result.output) == (0, f"tongguan {metadata.version('tongguan')}\n")


def test_version_is_an_option_too(tongguan):
    result = tongguan("--version")
    assert (result.exit_code, result.output) == (0, f"tongguan {metadata.version('tongguan')}\n")


def test_no_summary_of_a_command_is_cut(tongguan):
    assert "..." not in tongguan("--help").output.split("Commands:")[1]


@pytest.mark.parametrize("command", [("sidecar",), ("ask",), ("config", "check"), ("keys",)])
def test_help_names_the_exit_codes(tongguan, command):
    assert "Exit codes: 0" in tongguan(*command, "--help").output


# --- ask


@pytest.mark.parametrize(("options", "url"), [((), PLAIN_URL), (("--keys", "F"), SEALED_URL)])
def test_ask_goes_to_the_door_that_fits(tongguan, monkeypatch, options, url):
    seen = []

    def record(question, *, base_url, **others):
        seen.append((question, base_url))
        raise AskError("enough")

    monkeypatch.setattr("proxy.ask.ask", record)
    assert tongguan("ask", "Who?", *options).exit_code == 3
    assert tongguan("ask", "Who?", "--url", "http://127.0.0.1:1", *options).exit_code == 3
    assert seen == [("Who?", url), ("Who?", "http://127.0.0.1:1")]


# --- config check


def test_good_settings_are_said_to_be_ok(tongguan, tmp_path):
    (tmp_path / "tongguan.toml").write_text("[doors]\napp = '127.0.0.1:1'\n")
    for path in (tmp_path, tmp_path / "tongguan.toml"):
        result = tongguan("config", "check", "--config", str(path))
        file = tmp_path / "tongguan.toml"
        assert (result.exit_code, result.output) == (0, f"settings ok: {file}\n")


def test_without_a_file_the_check_says_what_it_looked_at(tongguan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = tongguan("config", "check")
    said = "settings ok: no file, defaults and variables\n"
    assert (result.exit_code, result.stdout, result.stderr) == (0, said, "")


def test_a_settings_file_that_lies_here_unread_is_a_warning(tongguan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tongguan.toml").write_text("colour = 1\n")
    result = tongguan("config", "check")
    assert result.exit_code == 0
    assert "./tongguan.toml was not read; to read it: --config ." in result.stderr
    assert tongguan("config", "check", "--config", ".").exit_code == 2


def test_the_agent_s_settings_are_checked_and_shown_too(tongguan, tmp_path):
    (tmp_path / "tongguan.toml").write_text("[agent]\nqueue = 7\n")
    where = ("config", "check", "--config", str(tmp_path))
    shown = json.loads(tongguan(*where, "--show", TONGGUAN_AGENT_THREADS="2").stdout)
    assert (shown["agent"]["queue"], shown["agent"]["threads"]) == (7, 2)
    (tmp_path / "tongguan.toml").write_text("colour = 1\n[agent]\nqueue = 0\ncolour = 1\n")
    result = tongguan(*where, TONGGUAN_AGENT_COLOUR="red")
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "tongguan config: colour: unknown setting",
        "tongguan config: agent.colour: unknown setting",
        "tongguan config: agent.queue: must be at least 1, got 0",
        "tongguan config: TONGGUAN_AGENT_COLOUR: unknown variable",
    ]


def test_a_file_that_is_no_toml_is_said_once(tongguan, tmp_path):
    (tmp_path / "tongguan.toml").write_text("=\n")
    result = tongguan("config", "check", "--config", str(tmp_path))
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_a_room_with_settings_that_is_not_installed_is_passed_over(tongguan, install):
    install(f"[{SETTINGS_GROUP}]", "dance = missing_room_of_ours.config:load")
    assert tongguan("config", "check").exit_code == 0


def test_show_prints_every_setting_from_all_its_sources(tongguan, tmp_path):
    (tmp_path / "tongguan.toml").write_text("[doors]\nbacklog = 7\n[tenants.acme]\n")
    result = tongguan(
        "config", "check", "--show", "--config", str(tmp_path), TONGGUAN_LOG_LEVEL="debug"
    )
    assert result.exit_code == 0
    shown = json.loads(result.stdout)
    assert "settings ok: " in result.stderr
    assert shown["doors"]["backlog"] == 7
    assert shown["log_level"] == "debug"
    assert shown["tenants"]["acme"]["max_class"] == "P1"


def test_every_mistake_is_listed_and_the_code_is_2(tongguan, tmp_path):
    (tmp_path / "tongguan.toml").write_text("colour = 1\n[doors]\nbacklog = 0\n")
    result = tongguan("config", "check", "--config", str(tmp_path), TONGGUAN_COLOUR="red")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.splitlines() == [
        "tongguan config: colour: unknown setting",
        "tongguan config: doors.backlog: must be at least 1, got 0",
        "tongguan config: TONGGUAN_COLOUR: unknown variable",
    ]


def test_a_missing_file_is_a_mistake(tongguan, tmp_path):
    result = tongguan("config", "check", "--config", str(tmp_path / "none.toml"))
    assert result.exit_code == 2
    file = tmp_path / "none.toml"
    assert result.stderr == f"tongguan config: {file}: No such file or directory\n"


def test_the_sidecar_does_not_start_with_bad_settings(tongguan, tmp_path, capfd):
    result = tongguan("sidecar", "--config", str(tmp_path / "none.toml"))
    assert result.exit_code == 2
    assert "none.toml" in result.stderr + capfd.readouterr().err


# --- rooms that are not there


def test_a_room_that_is_missing_is_listed_and_says_so_with_code_4(tongguan, install):
    install("dance = missing_room_of_ours.cli:dance")
    result = tongguan("--help")
    assert result.exit_code == 0
    assert listed(result.output) == [*COMMANDS, "dance"]
    assert "not in this image" in result.output
    result = tongguan("dance", "--with", "options", "-x", "3")
    assert result.exit_code == 4
    assert result.stderr == ("tongguan: not in this image: dance needs missing_room_of_ours\n")


def test_a_library_that_is_missing_when_the_command_runs_is_one_line_with_code_4(tongguan, install):
    directory = install("waltz = waltz_room:waltz")
    (directory / "waltz_room.py").write_text(
        "import click\n\n@click.command()\ndef waltz():\n    import missing_library_of_ours\n"
    )
    result = tongguan("waltz")
    assert result.exit_code == 4
    assert result.stderr == ("tongguan: not in this image: waltz needs missing_library_of_ours\n")


def test_a_missing_room_does_not_disturb_the_others(tongguan, install):
    install("dance = missing_room_of_ours.cli:dance")
    assert tongguan("version").exit_code == 0
    assert tongguan("config", "check").exit_code == 0
