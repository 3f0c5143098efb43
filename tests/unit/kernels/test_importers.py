"""Other projects' forms, packed here from their descriptions, come in with every value kept."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from kernels import importers, quant, reference

ROWS, K, GROUP = 24, 256, 64
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


@pytest.fixture
def parts():
    rng = np.random.default_rng(0)
    q = rng.integers(0, 16, (ROWS, K))
    zero = rng.integers(1, 16, (ROWS, K // GROUP))
    scale = rng.uniform(0.001, 0.1, (ROWS, K // GROUP)).astype(np.float16)
    return q, zero, scale


def weights(q, zero, scale, group=GROUP):
    spread = np.repeat(zero, group, axis=1), np.repeat(scale, group, axis=1)
    return (q.astype(np.float16) - spread[0].astype(np.float16)) * spread[1]


def words(codes, order=range(8)):
    """Pack eight neighbours of the last axis, the one at order[i] in nibble i."""
    eights = codes.reshape(codes.shape[0], -1, 8).astype(np.uint64)
    packed = sum(eights[:, :, place] << np.uint64(4 * i) for i, place in enumerate(order))
    return packed.astype(np.uint32).view(np.int32)


def along_rows(codes):
    return np.ascontiguousarray(words(np.ascontiguousarray(codes.T)).T)


@pytest.mark.parametrize("version", [1, 2])
def test_gptq(parts, version):
    q, zero, scale = parts
    stored = zero - 1 if version == 1 else zero
    packed, order = importers.gptq(
        np.ascontiguousarray(words(q).T), words(stored.T.copy()), scale.T, version=version
    )
    assert order is None
    assert np.array_equal(reference.dequant(packed), weights(q, zero, scale))


def test_gptq_with_columns_sorted_by_activation(parts):
    q, zero, scale = parts
    g_idx = np.random.default_rng(1).permutation(np.arange(K) // GROUP).astype(np.int32)
    packed, order = importers.gptq(
        np.ascontiguousarray(words(q).T), words(zero.T - 1), scale.T, g_idx
    )
    w = (q.astype(np.float16) - zero[:, g_idx].astype(np.float16)) * scale[:, g_idx]
    x = np.random.default_rng(2).normal(0, 1, (3, K))
    ours = x[:, order] @ reference.dequant(packed).astype(np.float64).T
    assert np.allclose(ours, x @ w.astype(np.float64).T, rtol=1e-12, atol=1e-9)


def test_awq(parts):
    q, zero, scale = parts
    packed = importers.awq(words(q.T.copy(), AWQ), words(zero.T.copy(), AWQ), scale.T)
    assert np.array_equal(reference.dequant(packed), weights(q, zero, scale))


def test_compressed_tensors(parts):
    q, zero, scale = parts
    packed = importers.compressed_tensors(words(q), scale, along_rows(zero), (ROWS, K))
    assert np.array_equal(reference.dequant(packed), weights(q, zero, scale))
    symmetric = importers.compressed_tensors(words(q), scale.astype(np.float32), None, (ROWS, K))
    eights = np.full_like(zero, 8)
    assert np.array_equal(reference.dequant(symmetric), weights(q, eights, scale))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_gguf_keeps_codes_and_rounds_once(kind):
    w = np.random.default_rng(3).normal(0, 0.05, (7, 160)).astype(np.float32)
    raw = gguf.quants.quantize(w, gguf.GGMLQuantizationType[kind])
    packed = importers.gguf(raw, kind)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    assert packed.group == 32
    assert np.allclose(reference.dequant(packed), expected, rtol=2.0**-11, atol=2.0**-25)


def test_gguf_q8_0_is_quantised_anew():
    w = np.random.default_rng(4).normal(0, 0.05, (7, 256)).astype(np.float32)
    raw = gguf.quants.quantize(w, gguf.GGMLQuantizationType.Q8_0)
    packed = importers.gguf(raw, "Q8_0", group=64)
    got = reference.dequant(packed).astype(np.float64)
    assert np.linalg.norm(got - w) < 0.1 * np.linalg.norm(w)


def test_what_cannot_be_held_is_named(parts):
    q, zero, scale = parts
    with pytest.raises(quant.QuantError, match="version 2"):
        importers.gptq(np.ascontiguousarray(words(q).T), words(zero.T.copy()), scale.T)
    with pytest.raises(quant.QuantError, match="FP16"):
        importers.compressed_tensors(
            words(q), np.full(scale.shape, 1e6, np.float32), None, (ROWS, K)
        )
    with pytest.raises(quant.QuantError, match="groups are"):
        importers.compressed_tensors(words(q), scale[:, :1], None, (ROWS, K))
    with pytest.raises(quant.QuantError, match="Q5_0"):
        importers.gguf(np.zeros((1, 22), np.uint8), "Q5_0")


@pytest.mark.parametrize("group", quant.GROUPS)
def test_quantising_with_a_search_is_never_worse_and_packing_has_an_inverse(group):
    rng = np.random.default_rng(group)
    w = (rng.standard_t(4, (16, 576)) * 0.05).astype(np.float32)
    w[0] = 0.0
    w[1] = 3.0  # all alike
    errors = []
    for search in (False, True):
        packed = quant.quantize(w, group, search=search)
        got = reference.dequant(packed).astype(np.float64)
        errors.append(((got - w) ** 2).sum(1))
        assert np.array_equal(quant.unpack(packed), reference.codes(packed))
    assert (errors[1] <= errors[0] * 1.001 + 1e-12).all()
    assert errors[1].sum() < 0.97 * errors[0].sum()
    assert not got[0].any()
    assert np.allclose(got[1], 3.0, rtol=1e-3)
