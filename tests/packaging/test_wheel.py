"""The built wheel, alone in an environment with the sidecar's needs and no more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("agent", "ebpf", "kernels", "proxy")
NO_INDEX = ("no matching distribution", "connection", "name or service", "name resolution")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what would lead Python or us elsewhere."""
    dropped = ("PYTHON", "TONGGUAN_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def run(
    command: list[str | Path], folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=clean_environment() | environment,
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=480,
    )


def build(tree: Path, out: Path, **environment: str) -> Path:
    """Build from the files git knows, in a copy: leftovers of earlier builds cannot get in."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "-co", "--exclude-standard"],
        check=True,
        capture_output=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name.startswith(OURS) or name in {"pyproject.toml", "setup.py", "README.md", "LICENSE"}:
            target = tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "wheel", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--no-index", "--wheel-dir", out, "."]
    built = run(command, tree, **environment)
    assert built.returncode == 0, built.stdout + built.stderr
    (found,) = out.glob("tongguan-*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folders = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    return build(*folders, TONGGUAN_UP_COMPILE="quick")


@pytest.fixture(scope="module")
def image(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel with its base dependencies into an empty environment."""
    folder = tmp_path_factory.mktemp("image")
    venv.create(folder / "venv", with_pip=True)
    pip: list[str | Path] = [folder / "venv/bin/python", "-m", "pip", "install", "--quiet"]
    pip.append("--no-compile")
    done = run([*pip, "--retries", "1", "-c", ROOT / "constraints.txt", wheel], folder)
    if done.returncode and any(sign in done.stderr.lower() for sign in NO_INDEX):
        pytest.skip("package index: not reachable, base dependencies cannot be installed")
    assert done.returncode == 0, done.stderr
    return folder


def test_wheel_holds_the_four_rooms_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(OURS)
    assert {f"{room}/py.typed" for room in OURS} <= set(names)
    assert {"agent/page/index.html", "agent/texts/NOTICE"} <= set(names)


def extensions(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if name.endswith(".so")]


def test_wheel_holds_the_extensions_where_they_can_be_built(wheel: Path) -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which(compiler) is None or not header.exists():
        pytest.skip("no C compiler or no Python.h here")
    names = {name.partition(".")[0] for name in extensions(wheel)}
    with (ROOT / "pyproject.toml").open("rb") as file:
        compiled = tomllib.load(file)["tool"]["tongguan"]["compiled"]
    path = {name.removesuffix(".py") for name in compiled} | {"proxy/path__mypyc"}
    assert names == {"kernels/cpu/_products", "kernels/sm4/_sm4", "kernels/wire/_wire"} | path


def test_wheel_without_a_compiler_is_pure_and_works(tmp_path: Path) -> None:
    wheel = build(tmp_path / "tree", tmp_path, CC="/bin/false")
    assert extensions(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "there")
    code = (
        "from kernels import sm4, wire; from proxy.http import body; from proxy.sm4 import cipher;"
        "import proxy.relay;"
        "print(wire.AVAILABLE, body.members(b'{}'));"
        "key = cipher.aead(1, bytes(16));"
        "sealed = key.seal(bytes(12), b'text', b'');"
        "print(sm4.AVAILABLE, cipher.tier(), key.open(bytes(12), sealed, b''))"
    )
    done = run([sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, '.'); {code}"],
               tmp_path / "there")  # fmt: skip
    assert (done.stdout, done.stderr) == ("False {}\nFalse cryptography b'text'\n", "")


def test_our_packages_are_ours(wheel: Path, image: Path) -> None:
    code = "import proxy, kernels; print(proxy.__file__, kernels.__file__)"
    done = run([image / "venv/bin/python", "-c", code], image)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(wheel) as archive:
        for room, file in zip(("proxy", "kernels"), done.stdout.split(), strict=True):
            path = Path(file)
            assert path.is_relative_to(image / "venv")
            assert path.read_bytes() == archive.read(f"{room}/__init__.py")


def test_sidecar_helps_without_what_the_agent_needs(image: Path) -> None:
    python = image / "venv/bin/python"
    code = (
        "from importlib.util import find_spec\n"
        "print([n for n in ('torch', 'httpx', 'numpy', 'starlette') if find_spec(n)])"
    )
    assert run([python, "-c", code], image).stdout.strip() == "[]"
    done = run([python, "-m", "proxy", "--help"], image)
    assert done.returncode == 0, done.stderr
    assert "--config" in done.stdout


def test_command_teaches_its_subcommands(image: Path) -> None:
    done = run([image / "venv/bin/tongguan", "--help"], image)
    assert done.returncode == 0, done.stderr
    for command in ("up", "ask", "sidecar", "keys", "audit"):
        assert f"  {command} " in done.stdout


@pytest.mark.parametrize(
    "words", [["ask", "hi"], ["agent"], ["up", "--oneshot"]], ids=["ask", "agent", "up"]
)
def test_command_without_its_needs_says_so(image: Path, words: list[str]) -> None:
    done = run([image / "venv/bin/tongguan", *words], image)
    assert "not in this image" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 4


def test_commands_of_the_sidecar_work_there(image: Path) -> None:
    tongguan = image / "venv/bin/tongguan"
    made = run([tongguan, "keys", "new", "--dir", image / "keys"], image)
    assert made.returncode == 0, made.stderr
    assert (image / "keys/sidecar.json").stat().st_mode & 0o077 == 0
    assert run([tongguan, "version"], image).returncode == 0
