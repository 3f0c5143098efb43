"""Codes chosen for the output: less error than by the weights alone, and nothing out of range."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import calibrated, exporters, importers, quant, reference


def case(k, rows=13, seed=0):
    """Return weights, and inputs that have some eight directions and little else."""
    rng = np.random.default_rng(seed)
    w = rng.normal(0, 1, (rows, k)).astype(np.float32)
    x = rng.normal(0, 1, (400, 8)) @ rng.normal(0, 1, (8, k)) + 0.1 * rng.normal(0, 1, (400, k))
    return w, x.astype(np.float32)


def error(packed, w, x):
    return np.linalg.norm(x @ (quant.dequantize(packed) - w).T) / np.linalg.norm(x @ w.T)


def moments_of(x, **options):
    moments = calibrated.Moments(x.shape[1], **options)
    for part in np.array_split(x, 3):
        moments.add(part)
    return moments


@pytest.mark.parametrize(("k", "group"), [(576, 128), (96, 32), (200, 64), (40, 128)])
def test_the_outputs_error_is_a_fraction_of_that_of_the_nearest_weights(k, group):
    w, x = case(k)
    packed = calibrated.quantize(w, group, moments_of(x[:300]))
    assert error(packed, w, x[300:]) < 0.4 * error(quant.quantize(w, group), w, x[300:])
    assert (packed.k, packed.group, packed.rows) == (k, group, 13)


def test_slabs_of_columns_bound_the_moments():
    w, x = case(320)
    moments = moments_of(x, width=128)
    assert [slab.shape for slab in moments.slabs] == [(128, 128), (128, 128), (64, 64)]
    packed = calibrated.quantize(w, 128, moments)
    assert packed.meta.shape == (3, 13)
    assert error(packed, w, x) < error(quant.quantize(w, 128), w, x)


def test_inputs_that_are_always_zero_leave_the_weights_own_error_to_count():
    w, x = case(64)
    packed = calibrated.quantize(w, 32, moments_of(np.zeros_like(x)))
    plain = quant.dequantize(quant.quantize(w, 32))
    assert np.abs(quant.dequantize(packed) - w).max() <= 1.01 * np.abs(plain - w).max()


def test_a_constant_matrix_of_zeros_stays_zero():
    _, x = case(64)
    packed = calibrated.quantize(np.zeros((3, 64), np.float32), 32, moments_of(x))
    assert not quant.dequantize(packed).any()


@pytest.mark.parametrize("fault", ["group", "nan", "rows", "width", "inputs"])
def test_what_cannot_be_is_refused(fault):
    w, x = case(64)
    moments, group = moments_of(x), 32
    if fault == "group":
        group = 48
    elif fault == "nan":
        w[0, 0] = np.nan
    elif fault == "rows":
        moments = calibrated.Moments(64)
    elif fault == "width":
        moments = moments_of(x[:, :32])
    else:
        moments.slabs[0][0, 0] = np.inf
    with pytest.raises(quant.QuantError):
        calibrated.quantize(w, group, moments)


@pytest.mark.parametrize(("rows", "k", "group"), [(13, 576, 128), (8, 96, 32), (3, 70, 64)])
@pytest.mark.parametrize("minima", [False, True])
def test_what_is_exported_comes_in_again(rows, k, group, minima):
    rng = np.random.default_rng(4)
    groups = -(-k // group)
    q = rng.integers(0, 16, (rows, k)).astype(np.uint8)
    scale = rng.uniform(0.01, 0.1, (rows, groups)).astype(np.float16)
    offset = rng.normal(0, 1, (rows, groups)) if minima else rng.integers(0, 16, (rows, groups))
    packed = quant.pack(q, scale, offset.astype(np.float16), group, minima=minima)
    parts = exporters.tensors(packed)
    shape = tuple(int(v) for v in parts["shape"])
    if minima:
        again = importers.with_minima(parts["packed"], parts["scale"], parts["minimum"], shape)
    else:
        again = importers.compressed_tensors(
            parts["packed"], parts["scale"], parts["zero_point"], shape
        )
    assert np.array_equal(again.codes, packed.codes)
    assert np.array_equal(again.meta, packed.meta)
    assert (again.k, again.group, again.minima) == (k, group, minima)


@pytest.mark.parametrize("minima", [False, True])
def test_fp32_values_are_the_oracles_before_its_rounding(minima):
    w, _ = case(96)
    packed = quant.quantize(w, 32)
    if minima:
        halves = np.full((13, 3), -0.5, np.float16)
        scale = np.full((13, 3), 0.1, np.float16)
        packed = quant.pack(quant.unpack(packed), scale, halves, 32, minima=True)
    values = quant.dequantize(packed)
    assert values.dtype == np.float32
    assert np.array_equal(values.astype(np.float16), reference.dequant(packed))


def test_only_matrices_of_one_form_are_joined():
    w, _ = case(64)
    one, two = quant.quantize(w, 32), quant.quantize(w[:5], 32)
    both = quant.joined([one, two])
    assert np.array_equal(
        quant.dequantize(both), np.concatenate([quant.dequantize(one), quant.dequantize(two)])
    )
    assert quant.joined([one, quant.quantize(w, 64)]) is None
    assert quant.joined([]) is None
