"""Faults put into kernels/cpu on purpose: the checks of the other files must see each of them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import shutil
import subprocess
import sysconfig

import numpy as np
import pytest

from kernels import cpu
from tests.unit.kernels import cuda_kit as kit
from tests.unit.kernels.test_cpu_layers import Layers, Shape, near
from tests.unit.kernels.test_cpu_native import COMPILER, SOURCES, built, run
from tests.unit.kernels.test_cpu_products import close, floats, linear, rows_of_x

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason="capability: AVX2 and kernels.cpu")


def products_are_right(_folder):
    rng = np.random.default_rng(1)
    for group, minima in ((32, False), (64, True), (128, False)):
        packed = kit.matrix(rng, 7, 288, group, minima=minima)
        for m in (1, 3, 7):
            x = rows_of_x(rng, m, 288)
            if not close(linear(cpu.four_bits(packed), x), floats(packed), x):
                return False
    return True


def layers_are_right(_folder):
    shape = Shape(heads=6, kv_heads=2, dim=32, hidden=64, bias=True)
    made, rng = Layers(shape), np.random.default_rng(2)
    kv, exact = made.cache(), made.cache()
    tables = rng.permutation(shape.blocks).tolist()
    for start, count in ((0, 31), (31, 32), (63, 32), (95, 1)):
        positions = list(range(start, start + count))
        x = rng.normal(0, 2, (count, shape.hidden)).astype(np.float32)
        got = made.step(x, positions, [0] * count, tables, kv)
        if not near(got, made.by_hand(x, positions, [0] * count, tables, exact)):
            return False
    return bool(np.array_equal(np.isnan(kv), np.isnan(exact)))


def threads_agree(folder):
    driver = built(folder, "-O1", source=folder)
    return run(driver, "heap", 3, 200).returncode == 0


def fences_hold(folder):
    driver = built(folder, "-O1", source=folder)
    return run(driver, "fenced", 4, 60).returncode == 0


# name: the file, what is there, what is put in its place, the check.
MUTANTS = {
    "nibbles exchanged": (
        "tiles.c", "_mm256_madd_epi16(low[i % R], _mm256_loadu_si256(at))",
        "_mm256_madd_epi16(high[i % R], _mm256_loadu_si256(at))", products_are_right,
    ),
    "zero points one too high": (
        "tiles.c", "_mm256_fnmadd_ps(*offset, *scale, _mm256_setzero_ps())",
        "_mm256_fnmsub_ps(*offset, *scale, *scale)", products_are_right,
    ),
    "the next group's scale": (
        "tiles.c", "meta[(block + i) >> shift]", "meta[(block + i + 1) >> shift]",
        products_are_right,
    ),
    "scales read behind the last": (
        "tiles.c", "count > 8 ? 8 : (int)count", "count > 0 ? 8 : (int)count", fences_hold,
    ),
    "a row of x left out": ("tiles.c", "if (m < x->m)", "if (0)", products_are_right),
    "a row of weights left out": ("tiles.c", "if (row < last)", "if (0)", products_are_right),
    "x rounded to eight bits": (
        "rows.c", "greatest > 1e-30f ? 32767.0f / greatest : 0.0f",
        "greatest > 1e-30f ? 127.0f / greatest : 0.0f", products_are_right,
    ),
    "no wait at a phase's end": (
        "team.h", "__atomic_load_n(&phase->done, __ATOMIC_ACQUIRE) < pieces", "0", threads_agree,
    ),
    "a residual left out": (
        "layers.c", "room->attended, NULL, t->x, t->m, 0, 1, room, own",
        "room->attended, NULL, t->x, t->m, 0, 0, room, own", layers_are_right,
    ),
    "an unturned half": (
        "attention.c", "_mm256_fmsub_ps(first, cosine, across)",
        "_mm256_fmadd_ps(first, cosine, across)", layers_are_right,
    ),
    "the last token not seen": (
        "attention.c", "position + 1 - first < TOKENS ? (int)(position + 1 - first)",
        "position + 1 - first < TOKENS ? (int)(position - first)", layers_are_right,
    ),
    "a softmax not corrected": (
        "attention.c", "_mm_mul_ps(sum, _mm_loadu_ps(correction))", "sum", layers_are_right,
    ),
    "values of the first piece again": (
        "attention.c", "slot_of(a, table, first + t)", "slot_of(a, table, t)", layers_are_right,
    ),
    "keys not kept": (
        "attention.c", "store8(a->keys + slot * width + i,", "store8(a->values + slot * width + i,",
        layers_are_right,
    ),
    "a norm's epsilon for its mean": (
        "rows.c", "sqrtf(mean + eps)", "sqrtf(eps)", layers_are_right,
    ),
}  # fmt: skip


@pytest.fixture
def copy(tmp_path):
    if shutil.which(COMPILER) is None:
        pytest.skip(f"capability: {COMPILER}")
    folder = tmp_path / "cpu"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def extension(folder):
    """Build and load the extension out of `folder`."""
    path = folder / "_products.so"
    words = [COMPILER, "-O1", "-fopenmp", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
    files = sorted(folder.glob("*.c"))
    subprocess.run([*words, "-o", path, *files, "-lm"], check=True, capture_output=True)
    loader = importlib.machinery.ExtensionFileLoader("_products", str(path))
    module = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("_products", loader)  # type: ignore[arg-type]
    )
    loader.exec_module(module)
    return module


def holds(check, folder, monkeypatch):
    if check in {products_are_right, layers_are_right}:
        monkeypatch.setattr(cpu, "_products", extension(folder))
    return check(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_seen(copy, monkeypatch, name):
    file, there, instead, check = MUTANTS[name]
    source = (copy / file).read_text()
    assert source.count(there) == 1, "the line to change is there once"
    (copy / file).write_text(source.replace(there, instead))
    assert not holds(check, copy, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "check", [products_are_right, layers_are_right, threads_agree, fences_hold]
)
def test_without_a_fault_nothing_is_seen(copy, monkeypatch, check):
    assert holds(check, copy, monkeypatch)
