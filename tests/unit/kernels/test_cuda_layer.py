"""Norm, rotation and paged attention through the host build, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from kernels import launch, plans, reference
from tests.unit.kernels import cuda_kit as kit


def near(got, exact):
    """Within two roundings to FP16."""
    return (np.abs(got.astype(np.float64) - exact) <= np.abs(exact) * 2.0**-10 + 2.0**-20).all()


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize(("rows", "hidden"), [(1, 1), (3, 100), (5, 576)])
def test_rms_norm(rows, hidden, falling):
    backend = kit.host(falling=falling)
    rng = np.random.default_rng(hidden)
    x, weight = (
        kit.guarded(kit.half_rows(rng, rows, hidden)),
        kit.guarded(kit.half_rows(rng, 1, hidden)[0]),
    )
    out = kit.Guarded((rows, hidden), np.float16)
    backend.run(plans.rms_norm(backend, x.array, weight.array, out.array, eps=1e-5))
    assert near(out.check(), reference.rms_norm(x.check(), weight.check(), 1e-5))


@pytest.mark.parametrize(("rows", "heads", "dim"), [(1, 1, 2), (4, 3, 64), (2, 9, 32)])
def test_rope(rows, heads, dim):
    backend = kit.host()
    rng = np.random.default_rng(dim)
    start = rng.normal(0, 1, (rows, heads, dim)).astype(np.float16)
    x = kit.guarded(start)
    positions = kit.guarded(rng.integers(0, 9_000, rows).astype(np.int32))
    inverse = kit.guarded((10_000.0 ** -(np.arange(dim // 2) / (dim / 2))).astype(np.float32))
    backend.run(plans.rope(backend, x.array, positions.array, inverse.array))
    # The angle is a product in FP32: of 9,000 turns the last bits are gone, as in the engine.
    angle = (positions.array.astype(np.float32)[:, None] * inverse.array[None, :]).astype(float)
    turned = reference.rope(start, np.ones(rows, np.int32), np.zeros(dim // 2, np.float32))
    assert np.array_equal(turned, start)  # the oracle itself: no turn
    low, high = start[..., : dim // 2].astype(float), start[..., dim // 2 :].astype(float)
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    exact = np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)
    assert (np.abs(x.check() - exact) <= 2.0**-9 * np.abs(start).max()).all()
    assert np.abs(reference.rope(start, positions.array, inverse.array) - exact).max() < 2e-2


@pytest.mark.parametrize("falling", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "tokens", "lengths"),
    [(9, 3, 64, 16, (1, 3, 17, 64)), (4, 4, 32, 8, (5, 8, 9)), (2, 1, 256, 4, (6,))],
)
def test_paged_attention(heads, kv_heads, dim, tokens, lengths, falling):
    backend = kit.host(falling=falling)
    rng = np.random.default_rng(dim)
    width = -(-max(lengths) // tokens)
    blocks = width * len(lengths) + 2
    query = kit.guarded(rng.normal(0, 2, (len(lengths), heads, dim)).astype(np.float16))
    pool = (blocks, tokens, kv_heads, dim)
    keys = rng.normal(0, 2, pool).astype(np.float16)
    values = rng.normal(0, 1, pool).astype(np.float16)
    table = rng.permutation(blocks)[: width * len(lengths)].reshape(len(lengths), width)
    pages = kit.guarded(table.astype(np.int32))
    counts = kit.guarded(np.array(lengths, np.int32))
    # Slots behind a sequence's last token hold what was there before: it must not be read.
    for row, length in zip(table, lengths, strict=True):
        for position in range(length, width * tokens):
            keys[row[position // tokens], position % tokens] = np.nan
            values[row[position // tokens], position % tokens] = np.nan
    stored, also = kit.guarded(keys), kit.guarded(values)
    out = kit.Guarded((len(lengths), heads, dim), np.float16)
    backend.run(
        plans.paged_attention(
            backend, query.array, stored.array, also.array, pages.array, counts.array, out.array
        )
    )
    exact = reference.paged_attention(query.array, keys, values, pages.array, counts.array)
    assert (np.abs(out.check() - exact) <= 1e-3 * np.nanmax(np.abs(values))).all()


def test_plans_refuse_shapes_that_do_not_belong_together():
    backend = kit.host()
    zeros = np.zeros
    x = kit.Guarded((2, 3, 48), np.float16, 0).array
    pool = kit.Guarded((2, 4, 1, 48), np.float16, 0).array
    ints = kit.Guarded((2, 1), np.int32, 0).array
    with pytest.raises(launch.LaunchError, match="steps of 32"):
        plans.paged_attention(backend, x, pool, pool, ints, ints[:, 0].copy(), x)
    with pytest.raises(launch.LaunchError, match="even"):
        plans.rope(backend, zeros((1, 1, 3), np.float16), ints, ints)
