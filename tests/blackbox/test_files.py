"""`tongguan seal` and `open` as processes: files, pipes, terminals, full disks, wrong keys."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from tests.blackbox.harness import LIMITED, Client, Sidecar, Upstream, new_keys, until
from tests.blackbox.node import environment

COMMAND = [sys.executable, "-m", "proxy.cli"]
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"a secret question"}]}'
SECRET = b"a secret line\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return new_keys(tmp_path_factory.mktemp("keys"), "--sign", "ed25519", "--require-mac")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return new_keys(tmp_path_factory.mktemp("other"))


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


@pytest.mark.parametrize("size", [0, 1_048_000, 1_048_577, 3_000_001])
def test_any_size_goes_through_a_pipe_and_back(keys, size):
    data = os.urandom(size)
    wire = sealed(keys, data)
    assert (wire[5] & 1) == (size > 1_048_000)  # a stream once a single would pass 1 MiB
    assert opened(keys, wire) == (0, data, "")


def test_form_says_single_or_stream(keys):
    assert sealed(keys, SECRET, "--form", "stream")[5] & 1
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
    for size in (4 << 20, 96 << 20):
        plain, wire, back = tmp_path / "plain", tmp_path / "wire", tmp_path / "back"
        with plain.open("wb") as file:
            file.truncate(size)
        peaks[size] = (peak("seal", plain, wire, size), peak("open", wire, back, size))
        assert back.stat().st_size == size
    for small, large in zip(*peaks.values(), strict=True):
        assert large < small + 6_000  # KiB


def test_a_file_appears_whole_or_not_at_all(keys, tmp_path):
    wire = sealed(keys, os.urandom(2_000_000))
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


def test_a_pipe_gets_each_frame_after_its_tag_and_the_code_tells_that_it_is_not_whole(keys):
    data = os.urandom(2_000_000)
    wire = sealed(keys, data)
    at = len(wire) // 2
    code, out, told = opened(keys, wire[:at] + bytes([wire[at] ^ 1]) + wire[at + 1 :])
    assert code == 1
    assert 0 < len(out) < len(data)
    assert data.startswith(out)
    assert "bad_tag" in told


def test_a_frame_goes_on_before_the_next_one_comes(keys):
    data = os.urandom(600_000)
    wire = sealed(keys, data, "--form", "stream")
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


def test_the_wrong_key_and_the_wrong_receiver_are_named(keys, other):
    wire = sealed(keys, SECRET)
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


def test_a_signature_is_made_and_checked_and_one_that_is_demanded_is_missed(keys, tmp_path):
    wire = sealed(keys, SECRET)
    assert wire[5] & 8
    assert not sealed(keys, SECRET, "--no-sign")[5] & 8
    strict = json.loads((keys / "sidecar.json").read_text())
    for row in strict["envelope_keys"]:
        row["require_signature"] = True
    path = tmp_path / "sidecar.json"
    path.write_text(json.dumps(strict))
    path.chmod(0o600)
    assert run("open", "--keys", path, feed=wire)[:2] == (0, SECRET)
    unsigned = sealed(keys, SECRET, "--no-sign")
    code, out, told = run("open", "--keys", path, feed=unsigned)
    assert (code, out) == (1, b"")
    assert "missing_signature" in told


def test_a_name_that_is_there_is_left_alone_without_force(keys, tmp_path):
    out = tmp_path / "out"
    out.write_bytes(b"mine")
    assert opened(keys, sealed(keys, SECRET), "-o", out)[0] == 2
    assert out.read_bytes() == b"mine"
    assert opened(keys, b"no envelope" * 9, "-f", "-o", out)[0] == 1
    assert out.read_bytes() == b"mine"
    assert opened(keys, sealed(keys, SECRET), "-f", "-o", out)[0] == 0
    assert out.read_bytes() == SECRET
    assert out.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_is_full_leaves_nothing(keys, tmp_path):
    wire = sealed(keys, os.urandom(2_000_000))
    limited = LIMITED.replace('"proxy"', '"proxy.cli"')
    command = [sys.executable, "-c", limited, "300000"]
    code, _, told = run(
        "open", "--keys", keys / "sidecar.json", "-o", tmp_path / "out", feed=wire, command=command
    )
    assert code == 3
    assert "File too large" in told
    assert list(tmp_path.iterdir()) == []
    assert opened(keys, wire, "-o", "/dev/full")[0] == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_run_that_is_ended_leaves_nothing(keys, tmp_path, number):
    wire = sealed(keys, os.urandom(600_000), "--form", "stream")
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


def test_a_reader_that_leaves_ends_the_run(keys, tmp_path):
    wire = sealed(keys, os.urandom(2_000_000))
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
        code, shown = on_terminal(opening, sealed(keys, binary))
        assert code == 2
        assert binary not in shown
        code, shown = on_terminal([*opening, "-o", "-"], sealed(keys, binary))
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


def test_a_sealed_file_is_served_when_posted_and_its_answer_opened(keys, tmp_path):
    answer = b'{"choices":[{"message":{"content":"a secret answer"}}]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    request = tmp_path / "request.smx"
    with Upstream() as upstream, Sidecar(tmp_path / "s", upstream.url, keys=keys) as sidecar:
        upstream.answering(head % len(answer) + answer)
        code, _, told = run(
            *("seal", "-v", "--keys", keys / "client.json", "-o", request),
            *("--type", "application/json", "--target", "/v1/chat/completions"),
            feed=BODY,
        )
        assert code == 0
        assert "X-Model-Id: tiny" in told
        wire = request.read_bytes()
        with Client(sidecar.sealed) as client:
            client.send(
                b"POST / HTTP/1.1\r\nHost: s\r\nContent-Type: application/x-sm4-envelope\r\n"
                b"X-Model-Id: tiny\r\nContent-Length: %d\r\n\r\n" % len(wire) + wire
            )
            got = client.answer()
        assert got.status == 200
        assert upstream.last().body() == BODY
    opening = ("--request", request)
    code, out, told = opened(keys, got.body, *opening, "--model", "tiny", "-v")
    assert (code, out) == (0, answer)
    assert told == "answer: status 200, type application/json\n"
    assert opened(keys, got.body, *opening)[:2] == (1, b"")  # bound to the model
    assert opened(keys, got.body)[:2] == (1, b"")  # no request
    assert opened(keys, wire, *opening, "--model", "tiny")[:2] == (1, b"")  # no answer


def test_what_cannot_be_as_asked_is_said(keys, tmp_path):
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
    old = sealed(keys, SECRET)
    assert opened(keys, old, "--max-age", "60")[:2] == (0, SECRET)
    time.sleep(0.01)
    code, _, told = opened(keys, old, "--max-age", "0")
    assert code == 1
    assert "--max-age" in told
