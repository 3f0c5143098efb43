"""`tongguan seal` and `open` as processes: files, pipes, terminals, full disks, wrong keys."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.blackbox.harness import LIMITED, Sidecar, Upstream, new_keys, until
from tests.blackbox.node import environment

ROOT = Path(__file__).resolve().parents[2]
# The commands without the search for them, which is half of such a short process.
SHORT = """
import sys
from proxy.files import cli
{"seal": cli.seal, "open": cli.open_}[sys.argv.pop(1)](prog_name="tongguan")
"""
COMMAND = [sys.executable, "-c", SHORT]
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"a secret question"}]}'
SECRET = b"a secret line\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return new_keys(tmp_path_factory.mktemp("keys"), "--sign", "ed25519", "--require-mac")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return new_keys(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def small(keys):
    """SECRET as a single envelope."""
    return sealed(keys, SECRET)


@pytest.fixture(scope="module")
def large(keys):
    """Some data, and the stream that carries it in ten frames."""
    data = os.urandom(600_000)
    return data, sealed(keys, data, "--form", "stream")


def run(*arguments, feed=b"", command=COMMAND):
    done = subprocess.run(
        [*command, *map(str, arguments)],
        input=feed,
        env=environment(),
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr.decode()


def sealed(keys, feed, *options):
    code, wire, told = run("seal", "--keys", keys / "client.json", *options, feed=feed)
    assert (code, told) == (0, "")
    return wire


def opened(keys, feed, *options):
    return run("open", "--keys", keys / "sidecar.json", *options, feed=feed)


@pytest.mark.parametrize("size", [0, 1_048_000, 1_048_577])
def test_any_size_goes_through_a_pipe_and_back(keys, size):
    data = os.urandom(size)
    wire = sealed(keys, data)
    assert (wire[5] & 1) == (size > 1_048_000)  # a stream once a single would pass 1 MiB
    assert opened(keys, wire) == (0, data, "")


def test_form_says_single_or_stream(keys, small, large):
    assert (small[5] & 1, large[1][5] & 1) == (0, 1)
    code, out, told = run(
        "seal", "--keys", keys / "client.json", "--form", "single", feed=bytes(1 << 20)
    )
    assert (code, out) == (2, b"")
    assert "1 MiB" in told


def test_memory_does_not_grow_with_what_is_sealed_or_opened(keys, tmp_path):
    def peak(name, source, output, size):
        command = [*COMMAND, name, "--keys", keys / "client.json", "-f", "-o", output, source]
        process = subprocess.Popen(command, env=environment())
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return used.ru_maxrss

    peaks = {}
    for size in (4 << 20, 40 << 20):
        plain, wire, back = tmp_path / "plain", tmp_path / "wire", tmp_path / "back"
        with plain.open("wb") as file:
            file.truncate(size)
        peaks[size] = (peak("seal", plain, wire, size), peak("open", wire, back, size))
        assert back.stat().st_size == size
    for small, large in zip(*peaks.values(), strict=True):
        assert large < small + 6_000  # KiB


def test_a_file_appears_whole_or_not_at_all(keys, tmp_path, large):
    _, wire = large
    for bent, reason in (
        (wire[:-1], "truncated"),
        (wire[:-1] + bytes([wire[-1] ^ 1]), "bad_tag"),
        (wire + b"x", "trailing_data"),
        (b"", "truncated"),
    ):
        code, out, told = opened(keys, bent, "-o", tmp_path / "out")
        assert (code, out) == (1, b"")
        assert reason in told
        assert list(tmp_path.iterdir()) == []


def test_a_pipe_gets_each_frame_after_its_tag_and_the_code_tells_that_it_is_not_whole(keys, large):
    data, wire = large
    at = len(wire) // 2
    code, out, told = opened(keys, wire[:at] + bytes([wire[at] ^ 1]) + wire[at + 1 :])
    assert code == 1
    assert 0 < len(out) < len(data)
    assert data.startswith(out)
    assert "bad_tag" in told


def test_a_frame_goes_on_before_the_next_one_comes(keys, large):
    data, wire = large
    command = [*COMMAND, "open", "--keys", keys / "sidecar.json"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
    ) as process:
        process.stdin.write(wire[:100_000])
        process.stdin.flush()
        assert process.stdout.read(60_000) == data[:60_000]
        process.stdin.write(wire[100_000:150_000])
        process.stdin.close()
        rest = process.stdout.read()
        assert len(rest) > 60_000
        assert data[60_000:].startswith(rest)
    assert process.returncode == 1  # and that was not all


def test_the_wrong_key_and_the_wrong_receiver_are_named(keys, other, small):
    wire = small
    code, out, told = opened(other, wire)
    assert (code, out) == (1, b"")
    assert "unknown_kid" in told
    code, out, told = opened(keys, wire, "--audience", "local/default/nobody")
    assert (code, out) == (2, b"")
    kid = wire[8:16].hex()
    assert opened(keys, wire, "--kid", kid)[:2] == (0, SECRET)
    assert opened(keys, wire, "--kid", "00" * 8)[:2] == (2, b"")
    shown = json.loads((keys / "client.json").read_text())["envelope_keys"][0]
    assert sealed(keys, SECRET, "--audience", shown["audience"], "--kid", kid)[8:16].hex() == kid


def test_keys_that_others_can_read_or_that_have_none_are_refused(keys, tmp_path):
    loose = tmp_path / "client.json"
    loose.write_bytes((keys / "client.json").read_bytes())
    loose.chmod(0o644)
    for path in (loose, keys / "auditor.json", tmp_path / "none.json"):
        code, out, told = run("seal", "--keys", path, feed=SECRET)
        assert (code, out) == (3 if path.name == "none.json" else 2, b"")
        assert str(path) in told


def test_a_signature_is_made_and_checked_and_one_that_is_demanded_is_missed(keys, tmp_path, small):
    assert small[5] & 8
    strict = json.loads((keys / "sidecar.json").read_text())
    for row in strict["envelope_keys"]:
        row["require_signature"] = True
    path = tmp_path / "sidecar.json"
    path.write_text(json.dumps(strict))
    path.chmod(0o600)
    assert run("open", "--keys", path, feed=small)[:2] == (0, SECRET)
    unsigned = sealed(keys, SECRET, "--no-sign")
    assert not unsigned[5] & 8
    code, out, told = run("open", "--keys", path, feed=unsigned)
    assert (code, out) == (1, b"")
    assert "missing_signature" in told


def test_a_name_that_is_there_is_left_alone_without_force(keys, tmp_path, small):
    out = tmp_path / "out"
    out.write_bytes(b"mine")
    assert opened(keys, small, "-o", out)[0] == 2
    assert out.read_bytes() == b"mine"
    assert opened(keys, b"no envelope" * 9, "-f", "-o", out)[0] == 1
    assert out.read_bytes() == b"mine"
    assert opened(keys, small, "-f", "-o", out)[0] == 0
    assert out.read_bytes() == SECRET
    assert out.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_is_full_leaves_nothing(keys, tmp_path, large):
    _, wire = large
    limited = LIMITED.replace('"proxy"', '"proxy.cli"')
    command = [sys.executable, "-c", limited, "300000"]
    code, _, told = run(
        "open", "--keys", keys / "sidecar.json", "-o", tmp_path / "out", feed=wire, command=command
    )
    assert code == 3
    assert "File too large" in told
    assert list(tmp_path.iterdir()) == []
    assert opened(keys, wire, "-o", "/dev/full")[0] == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_leaves_nothing(keys, tmp_path, large, number):
    _, wire = large
    command = [*COMMAND, "open", "--keys", keys / "sidecar.json", "-o", tmp_path / "out"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()
    ) as process:
        process.stdin.write(wire[:300_000])
        process.stdin.flush()
        until(lambda: [p for p in tmp_path.iterdir() if p.stat().st_size > 100_000], "a part")
        assert not (tmp_path / "out").exists()
        process.send_signal(number)
        process.wait(20)
        process.stdin.close()
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_leaves_ends_the_run(keys, tmp_path, large):
    _, wire = large
    path = tmp_path / "wire"
    path.write_bytes(wire)
    command = [*COMMAND, "open", "--keys", keys / "sidecar.json", path]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        process.stdout.read(10)
        process.stdout.close()
        told = process.stderr.read().decode()
    assert process.returncode == 3
    assert told == "tongguan open: standard output: its reader is gone\n"


def on_terminal(arguments, feed=b"", slowly=False):
    """Run with standard output and error on a terminal; return (code, what it showed)."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=theirs,
        env=environment(),
    )
    os.close(theirs)
    shown = b""
    if slowly:
        process.stdin.write(feed[: len(feed) // 2])
        process.stdin.flush()
        time.sleep(1.8)
        feed = feed[len(feed) // 2 :]
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(feed)
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    with contextlib.suppress(OSError):
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    return process.wait(20), shown


def test_a_terminal_gets_text_and_nothing_else(keys):
    code, shown = on_terminal(["seal", "--keys", keys / "client.json"], SECRET)
    assert code == 2
    assert b"SMX1" not in shown
    opening = ["open", "--keys", keys / "sidecar.json"]
    text = "hello 潼关\n".encode()
    code, shown = on_terminal(opening, sealed(keys, text))
    assert (code, shown) == (0, text.replace(b"\n", b"\r\n"))
    for binary in (b"\x1b]0;owned\x07", b"\xff\xfe"):
        wire = sealed(keys, binary)
        code, shown = on_terminal(opening, wire)
        assert code == 2
        assert binary not in shown
    code, shown = on_terminal([*opening, "-o", "-"], wire)
    assert code == 0
    assert binary in shown


def test_progress_is_shown_on_a_terminal_and_taken_away(keys, tmp_path):
    data = os.urandom(3_000_000)
    arguments = ["seal", "--keys", keys / "client.json", "-f", "-o", tmp_path / "out"]
    code, shown = on_terminal(arguments, data, slowly=True)
    assert code == 0
    assert b"B/s" in shown
    assert shown.endswith(b"\r\x1b[K")
    code, shown = on_terminal([*arguments, "-q"], data, slowly=True)
    assert (code, shown) == (0, b"")


@pytest.mark.skipif(not shutil.which("curl"), reason="capability: curl")
def test_a_request_by_hand_is_served_as_it_is_written(keys, tmp_path):
    answer = b'{"choices":[{"message":{"content":"a secret answer"}}]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    body = BODY.replace(b"tiny", b"MODEL")
    (tmp_path / "body.json").write_bytes(body)
    (tmp_path / "client.json").symlink_to(keys / "client.json")
    script = tmp_path / "tongguan"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m proxy.cli "$@"\n')
    script.chmod(0o755)
    (text,) = re.findall(r"```sh\n(.*?)```", (ROOT / "docs/files.md").read_text(), re.DOTALL)
    with Upstream() as upstream, Sidecar(tmp_path / "s", upstream.url, keys=keys) as sidecar:
        upstream.answering(head % len(answer) + answer)
        done = subprocess.run(
            ["sh", "-e", "-c", text.replace("14081", str(sidecar.sealed))],
            cwd=tmp_path,
            env=environment(PATH=f"{tmp_path}:/usr/bin:/bin", PYTHONPATH=str(ROOT)),
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert upstream.last().body() == body
    assert done.stdout == answer
    assert b"X-Model-Id: MODEL" in done.stderr
    request, sealed_answer = tmp_path / "request.smx", (tmp_path / "answer.smx").read_bytes()
    opening = ("--request", request)
    code, out, told = opened(keys, sealed_answer, *opening, "--model", "MODEL", "-v")
    assert (code, out) == (0, answer)
    assert told == "answer: status 200, type application/json\n"
    assert opened(keys, sealed_answer, *opening)[:2] == (1, b"")  # bound to the model
    assert opened(keys, sealed_answer)[:2] == (1, b"")  # no request
    assert opened(keys, request.read_bytes(), *opening, "--model", "MODEL")[:2] == (1, b"")


def test_what_cannot_be_as_asked_is_said(keys, tmp_path, small):
    client = ["seal", "--keys", keys / "client.json"]
    for options, part in (
        (["--target", "nowhere"], "cannot stand"),
        (["--type", "application/json"], "model cannot be read"),
        (["-o", tmp_path], "is a directory"),
        ([tmp_path / "none"], "No such file"),
        ([tmp_path], "is a directory"),
    ):
        code, out, told = run(*client, *options, feed=b"no json")
        assert code in {2, 3}, told
        assert out == b""
        assert part in told
    assert run(*client, "--type", "application/json", "--model", "m", feed=BODY)[0] == 2
    assert opened(keys, small, "--max-age", "600")[:2] == (0, SECRET)
    code, _, told = opened(keys, small, "--max-age", "0")
    assert code == 1
    assert "--max-age" in told
