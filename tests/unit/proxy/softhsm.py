"""A token of SoftHSM for tests: Debian's softhsm2, in a directory of the test's own."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from pathlib import Path

import pytest

MODULES = (
    "/usr/lib/softhsm/libsofthsm2.so",
    "/usr/lib/x86_64-linux-gnu/softhsm/libsofthsm2.so",
    "/usr/lib64/pkcs11/libsofthsm2.so",
)
MODULE = next((path for path in MODULES if Path(path).exists()), "")
needs_softhsm = pytest.mark.skipif(
    not MODULE or shutil.which("softhsm2-util") is None,
    reason="softhsm2 is not installed: the PKCS#11 provider needs a token",
)
PIN = "271828"


@dataclasses.dataclass(frozen=True)
class SoftToken:
    module: str
    label: str
    pin_file: str
    environ: dict


@pytest.fixture
def token(tmp_path, monkeypatch):
    """Return a fresh token that this process and its children see."""
    (tmp_path / "tokens").mkdir()
    conf = tmp_path / "softhsm2.conf"
    conf.write_text(f"directories.tokendir = {tmp_path}/tokens\nlog.level = ERROR\n")
    monkeypatch.setenv("SOFTHSM2_CONF", str(conf))
    subprocess.run(
        [
            "softhsm2-util",
            "--init-token",
            "--free",
            "--label",
            "pod",
            "--pin",
            PIN,
            "--so-pin",
            PIN,
        ],
        check=True,
        capture_output=True,
        env=os.environ | {"SOFTHSM2_CONF": str(conf)},
    )
    pin = tmp_path / "pin"
    pin.write_text(PIN + "\n")
    pin.chmod(0o600)
    return SoftToken(MODULE, "pod", str(pin), {"SOFTHSM2_CONF": str(conf)})
