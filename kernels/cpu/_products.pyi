from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

Float: TypeAlias = NDArray[np.float32]

class Weights: ...
class Stack: ...

Layer: TypeAlias = tuple[Weights, Weights, Weights, Weights, Float, Float, Float | None]

def supported() -> bool: ...
def four_bits(
    codes: Buffer, meta: Buffer, rows: int, k: int, group_log2: int, zeros: bool, /
) -> Weights: ...
def halves(values: Buffer, rows: int, k: int, /) -> Weights: ...
def linear(weights: Weights, x: Buffer, y: Buffer, threads: int, /) -> None: ...
def ffn(
    wide: Weights, narrow: Weights, x: Buffer, middle: Buffer, y: Buffer, threads: int, /
) -> None: ...
def unpack(weights: Weights, out: Buffer, threads: int, /) -> None: ...
def stack(
    layers: tuple[Layer, ...], hidden: int, heads: int, kv_heads: int, dim: int, eps: float, /
) -> Stack: ...
def step(
    stack: Stack,
    x: Buffer,
    cosines: Buffer,
    sines: Buffer,
    positions: Buffer,
    offsets: Buffer,
    tables: Buffer,
    kv: Buffer,
    block_tokens: int,
    threads: int,
    /,
) -> None: ...
