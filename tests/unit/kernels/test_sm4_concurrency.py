"""The C SM4-GCM beside other threads, in other processes and in other interpreters."""

from __future__ import annotations

import importlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kernels import sm4
from tests.unit.kernels.sm4_oracle import AAD, KEY, NONCE, TEXT, built, oracle

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def cipher():
    if not sm4.AVAILABLE:
        pytest.skip("kernels.sm4: no extension built here")
    return sm4.Sm4Gcm(KEY)


@built
@pytest.mark.parametrize("one_message", [False, True])
def test_threads_share_a_key(one_message):
    lengths = [10, 300, 1500, 70_000, 200_000]
    expected = {n: oracle(KEY, NONCE, bytes(n), AAD) for n in lengths}
    for tier in sm4.TIERS:
        cipher = sm4.Sm4Gcm(KEY, tier, one_message)
        wrong: list[int] = []
        together = threading.Barrier(4)

        def work(shift, cipher=cipher, wrong=wrong, together=together):
            together.wait()
            for n in (lengths[shift:] + lengths[:shift]) * 5:
                sealed = cipher.seal(NONCE, bytes(n), AAD)
                if sealed != expected[n] or cipher.open(NONCE, sealed, AAD) != bytes(n):
                    wrong.append(n)

        threads = [threading.Thread(target=work, args=(shift,)) for shift in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


@pytest.fixture
def turns(cipher):
    """Counts the turns another thread gets during a call; it gets none unless the call lets it."""
    count, stop, interval = [0], threading.Event(), sys.getswitchinterval()

    def other() -> None:
        while not stop.is_set():
            count[0] += 1
            time.sleep(0)  # gives the GIL back

    sys.setswitchinterval(100)
    thread = threading.Thread(target=other)
    thread.start()

    def during(call, *arguments):
        before = count[0]
        call(*arguments)
        return count[0] - before

    yield during
    stop.set()
    sys.setswitchinterval(interval)
    thread.join()


def test_long_calls_let_other_threads_run(turns):
    slow, text, out = sm4.Sm4Gcm(KEY, "portable"), bytes(24 << 20), bytearray((24 << 20) + 16)
    assert turns(slow.seal_into, NONCE, text, out) > 0
    assert turns(slow.open_into, NONCE, bytes(out), out) > 0
    assert turns(slow.seal, NONCE, b"", text) > 0


def test_short_calls_keep_the_gil(turns):
    slow, text = sm4.Sm4Gcm(KEY, "portable"), bytes(64 << 10)
    assert [turns(slow.seal, NONCE, text) for _ in range(20)] == [0] * 20


def test_buffers_stay_exported_while_a_long_call_runs(cipher):
    slow, out = sm4.Sm4Gcm(KEY, "portable"), bytearray((24 << 20) + 16)
    text, refused = bytes(24 << 20), []
    thread = threading.Thread(target=slow.seal_into, args=(NONCE, text, out))
    thread.start()
    while thread.is_alive():
        try:
            out.append(0)
            out.pop()
        except BufferError:
            refused.append(True)
        time.sleep(0.001)
    thread.join()
    assert refused
    assert out == cipher.seal(NONCE, text)


@built
def test_a_key_works_on_in_a_forked_process():
    code = (
        "import os, sys\nfrom kernels import sm4\n"
        "keys = [sm4.Sm4Gcm(bytes(16), tier, once) for tier in sm4.TIERS for once in (0, 1)]\n"
        "def use():\n"
        "    return [key.seal(bytes(12), bytes(n)) for key in keys for n in (9, 999, 99999)]\n"
        "before = use()\nchild = os.fork()\n"
        "if child == 0:\n    os._exit(0 if use() == before else 1)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "sys.exit(status or use() != before)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@built
def test_another_interpreter_has_a_module_of_its_own():
    """3.11 shares one GIL among interpreters, 3.12 and later may not: both are allowed."""
    code = (
        "import importlib, sys\nfrom kernels import sm4\n"
        "def interpreters():\n"
        "    for name in ('_interpreters', '_xxsubinterpreters'):\n"
        "        try:\n            return importlib.import_module(name)\n"
        "        except ImportError:\n            pass\n"
        "    sys.exit(77)\n"
        "inner = '''\n"
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from kernels import sm4\n"
        "key = sm4.Sm4Gcm(bytes(16))\n"
        "sealed = key.seal(bytes(12), bytes(99))\n"
        "assert key.open(bytes(12), sealed) == bytes(99)\n"
        "try:\n    key.open(bytes(12), bytes(99))\n    raise SystemExit('opened')\n"
        "except sm4.InvalidTag:\n    print(sealed.hex(), flush=True)\n"
        "'''\n"
        "i = interpreters()\n"
        "for _ in range(3):\n"
        "    one = i.create()\n    failed = i.run_string(one, inner)\n    i.destroy(one)\n"
        "    assert not failed, failed\n"
        "print(sm4.Sm4Gcm(bytes(16)).seal(bytes(12), bytes(99)).hex())\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 77:
        pytest.skip("this Python has no interpreters module")
    assert done.returncode == 0, done.stderr
    assert len(set(done.stdout.split())) == 1
    assert len(done.stdout.split()) == 4


@built
def test_the_module_can_be_made_twice_in_one_interpreter(monkeypatch):
    monkeypatch.delitem(sys.modules, "kernels.sm4._sm4")
    again = importlib.import_module("kernels.sm4._sm4")
    assert again.Sm4Gcm is not sm4.Sm4Gcm
    assert again.Sm4Gcm(KEY).seal(NONCE, TEXT) == sm4.Sm4Gcm(KEY).seal(NONCE, TEXT)
    with pytest.raises(again.InvalidTag):
        again.Sm4Gcm(KEY).open(NONCE, TEXT)
