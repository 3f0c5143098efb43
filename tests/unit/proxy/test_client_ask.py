"""`ask`: one question, sealed or plain, and errors a person can act on."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from proxy.ask import AskError, ask
from proxy.cli import main
from proxy.keys.file import KeyFile, encode
from tests.unit.proxy.sm4_loopback import (
    ANSWER,
    MODEL,
    PIECES,
    Loopback,
    live_key,
    serving,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = live_key()


@pytest.fixture
def plain() -> Iterator[Loopback]:
    with serving(None) as loopback:
        yield loopback


@pytest.fixture
def sealed() -> Iterator[Loopback]:
    with serving(KEY) as loopback:
        yield loopback


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "client.json"
    path.write_bytes(encode(KeyFile("client", (KEY,), {}, (), None, None)))
    path.chmod(0o600)
    return path


def failing(url: str, keys: Path | str | None = None, model: str | None = MODEL) -> str:
    with pytest.raises(AskError) as caught:
        ask("?", base_url=url, keys_file=keys, model=model, on_text=lambda _: None)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_plain_question_is_answered_piece_by_piece(plain: Loopback) -> None:
    seen: list[str] = []

    result = ask("?", base_url=plain.url, keys_file=None, on_text=seen.append)

    assert seen == PIECES
    assert result.text == ANSWER
    assert (result.model, result.finish_reason, result.sealed) == (MODEL, "stop", False)
    assert (result.tokens, result.prompt_tokens) == (len(PIECES), 7)
    assert (result.trace_id, result.qos_class, result.pool) == ("trace-1", "P1", "shared")
    assert 0 < result.ttft_ms <= result.total_ms
    assert ANSWER not in repr(result)


def test_a_sealed_question_crosses_sealed(sealed: Loopback, keys_file: Path) -> None:
    seen: list[str] = []

    result = ask(
        "What?", base_url=sealed.url + "/v1/", keys_file=keys_file, qos="P2", on_text=seen.append
    )

    assert ("".join(seen), result.text, result.sealed) == (ANSWER, ANSWER, True)
    assert [opened.target for opened in sealed.opened] == ["/v1/models", "/v1/chat/completions"]
    assert {opened.qos for opened in sealed.opened} == {"P2"}
    assert result.trace_id == "trace-1"


def test_a_named_model_is_asked_without_a_look_at_the_list(plain: Loopback) -> None:
    ask("?", base_url=plain.url, keys_file=None, model=MODEL, on_text=lambda _: None)

    assert [path for _, path, _ in plain.outer] == ["/v1/chat/completions"]


def test_nobody_listening_names_the_address_and_what_to_start() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]

        text = failing(f"http://127.0.0.1:{port}/v1")

    assert f"127.0.0.1:{port}" in text
    assert "is the sidecar running?" in text


def test_an_error_of_the_server_is_told_with_its_code(plain: Loopback) -> None:
    text = failing(plain.url, model="unknown")

    assert "HTTP 404, invalid_request: unknown model" in text


def test_an_error_that_is_no_json_is_told_without_its_body(plain: Loopback) -> None:
    plain.fault = "not json"

    text = failing(plain.url, model=None)

    assert "HTTP 502, no reason given" in text
    assert "<h1>" not in text


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("truncate", "the answer broke off"),
        ("error event", "upstream_reset: gone"),
        ("junk event", "not JSON"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(plain: Loopback, fault: str, text: str) -> None:
    plain.fault = fault

    assert text in failing(plain.url)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("clear:draining", "HTTP 503 draining"),
        ("clear:envelope_rejected", "HTTP 400 envelope_rejected"),
        ("unsealed", "unsealed answer: HTTP 200"),
        ("truncate", "truncated"),
    ],
)
def test_a_sealed_call_takes_nothing_but_an_envelope(
    sealed: Loopback, keys_file: Path, fault: str, text: str
) -> None:
    sealed.fault = fault

    assert text in failing(sealed.url, keys_file)


def test_keys_that_cannot_be_used_are_told_in_one_line(tmp_path: Path, keys_file: Path) -> None:
    assert "nothing.json: No such file" in failing("http://127.0.0.1:1", tmp_path / "nothing.json")
    keys_file.chmod(0o644)
    assert "chmod 600" in failing("http://127.0.0.1:1", keys_file)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "ftp://127.0.0.1", "nonsense", ""])
def test_a_url_that_is_none_is_told_so(url: str) -> None:
    assert failing(url)


# --- hints: what a person got wrong, said from this end


@pytest.mark.parametrize("model", [None, MODEL])
def test_sealed_at_a_clear_door_is_told_so(
    plain: Loopback, keys_file: Path, model: str | None
) -> None:
    assert "that door takes clear requests; --url of the sealed one" in failing(
        plain.url, keys_file, model
    )


@pytest.mark.parametrize(
    ("fault", "hint"),
    [
        ("clear:method_not_allowed", "takes clear requests"),
        ("clear:invalid_request", "takes clear requests"),
        ("unsealed", "takes clear requests"),
        ("clear:envelope_rejected", "compare the kid with `tongguan keys show`"),
        ("clear:envelope_stale", "start fence: try again"),
    ],
)
def test_a_refusal_in_clear_comes_with_what_to_look_at(
    sealed: Loopback, keys_file: Path, fault: str, hint: str
) -> None:
    sealed.fault = fault

    assert hint in failing(sealed.url, keys_file)


def test_keys_of_another_sidecar_are_told_so(sealed: Loopback, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(encode(KeyFile("client", (live_key(),), {}, (), None, None)))
    path.chmod(0o600)

    assert "keys not of this sidecar?" in failing(sealed.url, path)


@pytest.mark.parametrize("model", [None, MODEL])
def test_plain_at_a_sealed_door_is_told_so(sealed: Loopback, model: str | None) -> None:
    assert "that door takes sealed requests; give --keys" in failing(sealed.url, None, model)


@pytest.mark.parametrize("fault", ["clear:draining", "clear:unauthorized", "clear:internal_error"])
def test_a_refusal_that_says_it_all_gets_no_hint(
    sealed: Loopback, keys_file: Path, fault: str
) -> None:
    sealed.fault = fault

    assert failing(sealed.url, keys_file).endswith(fault.removeprefix("clear:"))


@pytest.mark.parametrize(("fault", "shown"), [("finish length", True), ("", False)])
def test_an_answer_cut_by_its_limit_says_so(plain: Loopback, fault: str, shown: bool) -> None:
    plain.fault = fault

    result = CliRunner().invoke(main, ["ask", "?", "--url", plain.url])

    assert result.exit_code == 0
    assert (f"finish length ({len(PIECES)} tokens)" in result.stderr) is shown
