"""What a running sidecar carries: its modules, asked in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kernels import sm4

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "numpy", "httpx", "starlette", "uvicorn", "mitmproxy", "agent", "click")


def printed(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


def loaded_after(statement: str) -> set[str]:
    names = printed(f"{statement}\nimport sys\nprint(*sys.modules)")
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize(
    "module", ["proxy.server", "proxy.upstream", "proxy.admin", "proxy.lifecycle", "proxy.run"]
)
def test_sidecar_module_loads_nothing_heavy(module: str) -> None:
    assert loaded_after(f"import {module}") & set(HEAVY) == set()


# Each is more of a start than it is worth: what is needed of one is loaded when it is.
UNWANTED = {"typing_extensions", "getopt", "argparse", "email", "http", "tempfile", "proxy.sm4.sm2"}


START = """
import sys
import proxy.lean, proxy.run, uvloop, proxy.lifecycle
import proxy.keys.local, proxy.audit.writer, proxy.audit.retention, proxy.channel
"""


def test_a_start_loads_nothing_it_can_do_without() -> None:
    loaded = printed(START + "print(*sys.modules)")
    assert loaded & UNWANTED == set()
    assert {"msgspec", "proxy.settings", "proxy.channel"} <= loaded


def test_a_start_makes_no_dataclass() -> None:
    # Each would write and compile its methods anew, where a msgspec.Struct is just made.
    made = """
ours = [module for name, module in sys.modules.items() if name.startswith("proxy.")]
print(len(ours) > 60)
for module in ours:
    for found in vars(module).values():
        if isinstance(found, type) and "__dataclass_fields__" in vars(found):
            print(found.__module__ + "." + found.__qualname__)
"""
    assert printed(START + made) == {"True"}


CHANNEL = """
from kernels import sm4
from proxy.sm4.keyring import EnvelopeKey, Keyring
from proxy.sm4.frames import StreamCipher
from proxy.sm4.cipher import choose_tier
choose_tier({tier!r})
key = EnvelopeKey(kid=bytes(8), root=bytes(32), client="c", audience="a", tenant="t",
                  suite={suite}, digest="sha256", not_before_ms=0, not_after_ms=1)
derived = Keyring([key]).get(key.kid)
derived.request.open(bytes(12), derived.request.seal(bytes(12), b"body", b""), b"")
StreamCipher(derived.response_streams, {suite}, b"", bytes(12)).seal(b"token", 512, last=True)
"""


@pytest.mark.skipif(not sm4.AVAILABLE, reason="capability: kernels.sm4 was built")
def test_the_sm4_channel_does_not_load_cryptography() -> None:
    assert "cryptography" not in loaded_after(CHANNEL.format(suite=1, tier="auto"))


@pytest.mark.parametrize(("suite", "tier"), [(2, "auto"), (1, "cryptography")])
def test_what_needs_cryptography_loads_it(suite: int, tier: str) -> None:
    assert "cryptography" in loaded_after(CHANNEL.format(suite=suite, tier=tier))


def test_heavy_modules_would_be_seen() -> None:
    assert "click" in loaded_after("import click")
