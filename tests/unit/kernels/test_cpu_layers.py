"""Layers in one call on this CPU, against float64 of the same weights and cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kernels import cpu, reference
from tests.unit.kernels import cuda_kit as kit
from tests.unit.kernels.test_cpu_products import floats

pytestmark = pytest.mark.skipif(not cpu.AVAILABLE, reason="capability: AVX2 and kernels.cpu")

EPS = 1e-5


@dataclass
class Shape:
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    gates: int = 96
    bias: bool = False
    blocks: int = 40
    tokens: int = 4


class Layers:
    """Random layers, as the extension holds them and in float64."""

    def __init__(self, shape, seed=0):
        self.shape = shape
        rng = np.random.default_rng(seed)
        width, kv = shape.heads * shape.dim, shape.kv_heads * shape.dim
        self.exact, held = [], []
        for number in range(shape.layers):
            sizes = (
                (width + 2 * kv, shape.hidden), (shape.hidden, width),
                (2 * shape.gates, shape.hidden), (shape.hidden, shape.gates),
            )  # fmt: skip
            # Each product in each form: what is four bits in one layer is FP16 in the next.
            made = [self.matrix(rng, *size, small=(i + number) % 2) for i, size in enumerate(sizes)]
            norms = [rng.uniform(0.5, 1.5, shape.hidden).astype(np.float32) for _ in range(2)]
            bias = rng.normal(0, 0.3, width + 2 * kv).astype(np.float32) if shape.bias else None
            held.append(cpu.layer(tuple(m for m, _ in made), tuple(norms), bias))
            self.exact.append(([w for _, w in made], norms, bias))
        self.stack = cpu.Stack(
            held, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads, dim=shape.dim,
            eps=EPS,
        )  # fmt: skip
        self.inverse = 100.0 ** -(np.arange(shape.dim // 2) / (shape.dim / 2))

    @staticmethod
    def matrix(rng, rows, k, *, small):
        if small:
            packed = kit.matrix(rng, rows, k, 32, minima=bool(rows % 3))
            return cpu.four_bits(packed), floats(packed)
        w = rng.normal(0, k**-0.5, (rows, k)).astype(np.float16)
        return cpu.halves(w), w.astype(np.float64)

    def cache(self):
        s = self.shape
        return np.full((s.layers, 2, s.blocks, s.tokens, s.kv_heads, s.dim), np.nan, np.float16)

    def angles(self, positions):
        angle = np.array(positions)[:, None] * self.inverse[None, :]
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def step(self, x, positions, offsets, tables, kv, threads=2):
        given = kit.guarded(x)
        self.stack.step(
            given.array, self.angles(positions), np.array(positions, np.int64),
            np.array(offsets, np.int64), np.array(tables, np.int32), kv, threads,
        )  # fmt: skip
        return given.check()

    def by_hand(self, x, positions, offsets, tables, kv):
        """Compute the same in float64; keys and values are rounded to FP16, as the cache is."""
        s = self.shape
        width, kv_width = s.heads * s.dim, s.kv_heads * s.dim
        x, one = x.astype(np.float64), np.ones(s.hidden)
        for index, ((qkv, out, gate_up, down), norms, bias) in enumerate(self.exact):
            h = reference.rms_norm(x, one, EPS) * norms[0] @ qkv.T
            h = h if bias is None else h + bias
            queries = self.turn(h[:, :width].reshape(-1, s.heads, s.dim), positions)
            keys = self.turn(
                h[:, width : width + kv_width].reshape(-1, s.kv_heads, s.dim), positions
            )
            values = h[:, width + kv_width :].reshape(-1, s.kv_heads, s.dim)
            pages = [np.array(tables[offset:], np.int32) for offset in offsets]
            for i, position in enumerate(positions):
                block, place = pages[i][position // s.tokens], position % s.tokens
                kv[index, 0, block, place], kv[index, 1, block, place] = keys[i], values[i]
            attended = [
                reference.paged_attention(
                    queries[i : i + 1], kv[index, 0], kv[index, 1], pages[i][None], [position + 1]
                ).reshape(-1)
                for i, position in enumerate(positions)
            ]
            x = x + np.array(attended) @ out.T
            both = reference.rms_norm(x, one, EPS) * norms[1] @ gate_up.T
            x = x + (reference.silu(both[:, : s.gates]) * both[:, s.gates :]) @ down.T
        return x

    def turn(self, x, positions):
        angle = np.array(positions)[:, None, None] * self.inverse
        low, high = x[..., : self.shape.dim // 2], x[..., self.shape.dim // 2 :]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate((low * cos - high * sin, high * cos + low * sin), axis=-1)


def near(got, exact):
    return np.abs(got - exact).max() <= 2e-3 * np.abs(exact).max()


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(heads=9, kv_heads=3, dim=64, hidden=160, gates=32, bias=True, tokens=16),
        Shape(heads=6, kv_heads=1, dim=32, gates=224, layers=1),
        Shape(heads=10, kv_heads=2, dim=48, hidden=32, layers=3, bias=True),
        Shape(heads=2, kv_heads=2, dim=256, layers=1, blocks=12),
        Shape(heads=16, kv_heads=2, dim=16),
    ],
)
def test_sequences_token_by_token(shape):
    made = Layers(shape)
    rng = np.random.default_rng(1)
    kv, exact = made.cache(), made.cache()
    tables = rng.permutation(shape.blocks).tolist()
    half = len(tables) // 2
    for position in range(9):
        # Two sequences of their own tables, the second some tokens behind.
        rows = [(position, 0), (position - 3, half)] if position >= 3 else [(position, 0)]
        positions, offsets = zip(*rows, strict=True)
        x = rng.normal(0, 1, (len(rows), shape.hidden)).astype(np.float32)
        got = made.step(x, positions, offsets, tables, kv, threads=1 + position % 3)
        assert near(got, made.by_hand(x, positions, offsets, tables, exact)), position
    assert np.array_equal(np.isnan(kv), np.isnan(exact)), "only what was asked for is written"


def test_a_long_sequence_read_in_pieces_sees_all_of_it():
    shape = Shape(layers=1, blocks=64, tokens=4)
    made = Layers(shape, seed=2)
    rng = np.random.default_rng(3)
    kv, exact = made.cache(), made.cache()
    tables = rng.permutation(shape.blocks).tolist()
    start = 0
    for count in (32, 31, 1, 1, 32, 32, 17, 1, 32, 5):
        positions = list(range(start, start + count))
        x = rng.normal(0, 3, (count, shape.hidden)).astype(np.float32)
        got = made.step(x, positions, [0] * count, tables, kv)
        assert near(got, made.by_hand(x, positions, [0] * count, tables, exact)), start
        start += count


def test_any_number_of_threads_gives_the_same_bits():
    made = Layers(Shape(), seed=4)
    x = np.random.default_rng(5).normal(0, 1, (7, 64)).astype(np.float32)
    first = made.step(x, range(7), [0] * 7, [3, 1, 2], made.cache(), threads=1)
    for threads in (2, 3, 7, 16) * 5:
        again = made.step(x, range(7), [0] * 7, [3, 1, 2], made.cache(), threads=threads)
        assert np.array_equal(first, again)


def test_a_token_has_the_same_bits_whatever_it_is_computed_with():
    made = Layers(Shape(bias=True), seed=8)
    x = np.random.default_rng(9).normal(0, 1, (23, 64)).astype(np.float32)
    tables = list(range(10))
    whole = made.step(x, range(23), [0] * 23, tables, made.cache())
    for size in (1, 2, 3, 7):
        kv, pieces = made.cache(), []
        for start in range(0, 23, size):
            some = range(start, min(start + size, 23))
            pieces.append(made.step(x[some], some, [0] * len(some), tables, kv))
        assert np.array_equal(np.concatenate(pieces), whole), size


def test_scores_far_apart_stay_finite_and_what_is_not_finite_is_not_hidden():
    made = Layers(Shape(layers=1), seed=6)
    x = np.full((1, 64), 1e4, np.float32)
    assert np.isfinite(made.step(x, [0], [0], [0], made.cache())).all()
    for bad in (np.nan, np.inf):
        x[0, 5] = bad
        assert not np.isfinite(made.step(x, [0], [0], [0], made.cache())).all()


def test_indices_that_would_leave_an_array_are_refused():
    made = Layers(Shape())
    x, kv = np.zeros((1, 64), np.float32), made.cache()
    good = {"positions": [5], "offsets": [0], "tables": [0, 39], "kv": kv}
    made.step(x, **good)
    for name, value in (
        ("positions", [8]), ("positions", [-1]), ("positions", [1 << 62]), ("offsets", [1]),
        ("offsets", [-1]), ("offsets", [2]), ("offsets", [0, 0]), ("tables", []),
        ("tables", [0, 40]), ("tables", [0, -1]), ("kv", kv[:1].copy()), ("threads", 0),
        ("threads", 1000),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"belong together"):
            made.step(x, **good | {name: value})
    with pytest.raises(ValueError, match="belong together"):
        made.step(np.zeros((33, 64), np.float32), [0] * 33, [0] * 33, [0], kv)
    with pytest.raises(ValueError, match="belong together"):
        made.step(np.zeros((0, 64), np.float32), [], [], [0], kv)


def test_layers_that_do_not_belong_together_are_refused():
    rng = np.random.default_rng(7)

    def made(changed=None, hidden=64, dim=16, heads=4, count=1, norm=64):
        sizes = {"qkv": (128, 64), "out": (64, 64), "gate_up": (192, 64), "down": (64, 96)}
        sizes |= changed or {}
        matrices = tuple(cpu.halves(np.zeros(size, np.float16)) for size in sizes.values())
        norms = (np.ones(norm, np.float32), np.ones(64, np.float32))
        layers = [cpu.layer(matrices, norms, rng.normal(0, 1, 128).astype(np.float32))] * count
        return cpu.Stack(layers, hidden=hidden, heads=heads, kv_heads=2, dim=dim, eps=EPS)

    assert made()
    for wrong in (
        {"changed": {"qkv": (127, 64)}}, {"changed": {"out": (64, 96)}},
        {"changed": {"gate_up": (190, 64)}}, {"changed": {"down": (32, 96)}}, {"hidden": 32},
        {"dim": 8}, {"dim": 24}, {"heads": 3}, {"count": 0}, {"count": 1025}, {"norm": 65},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"belong together|another size"):
            made(**wrong)
