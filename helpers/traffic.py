"""Bytes and FLOPs of the operations of this course, counted from their sizes.

Every function gives the `Work` of one call in the best case: each input is read from memory once,
each output written once, and what lies between stays on the chip. `helpers.eager_traffic` counts
what a sequence of PyTorch operations moves instead.

Conventions: a multiply-add is two FLOPs; a comparison, an addition, exp, tanh or a division is
one, although the hardware spends several instructions on some. `dtype` is a torch dtype.
"""

import dataclasses
import math

import torch


@dataclasses.dataclass(frozen=True)
class Work:
    """What one call reads from memory and writes to it, in bytes, and computes, in FLOPs."""

    bytes_read: float
    bytes_written: float
    flops: float

    @property
    def bytes(self) -> float:
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte; infinite when nothing is moved."""
        return self.flops / self.bytes if self.bytes else math.inf

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            self.flops + other.flops,
        )


def _work(dtype: torch.dtype, read: float, written: float, flops: float) -> Work:
    """From elements of one dtype to bytes."""
    for amount in (read, written, flops):
        if not amount >= 0:
            raise ValueError(f"sizes must not be negative, and {amount} follows from these")
    return Work(read * dtype.itemsize, written * dtype.itemsize, flops)


def _product(*sizes: int) -> int:
    """Two negative sizes would make a positive product."""
    if min(sizes) < 0:
        raise ValueError(f"sizes must not be negative, and among these is {min(sizes)}")
    return math.prod(sizes)


def elementwise(
    n: int, dtype: torch.dtype, *, reads: int = 1, writes: int = 1, flops: float = 1
) -> Work:
    """n elements, each made from `reads` inputs with `flops` operations: relu, exp, add …"""
    return _work(dtype, reads * n, writes * n, flops * n)


def copy(n: int, dtype: torch.dtype) -> Work:
    """n elements moved and nothing computed: also a transpose or a cast within one dtype."""
    return elementwise(n, dtype, flops=0)


def relu(n: int, dtype: torch.dtype) -> Work:
    """max(x, 0): one comparison an element."""
    return elementwise(n, dtype)


def add(n: int, dtype: torch.dtype) -> Work:
    """a + b."""
    return elementwise(n, dtype, reads=2)


def gelu(n: int, dtype: torch.dtype) -> Work:
    """0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))) in one kernel: nine operations an element."""
    return elementwise(n, dtype, flops=9)


def manual_gelu(n: int, dtype: torch.dtype) -> Work:
    """The same formula as nine separate kernels, as lecture 6 writes it: 13 reads, 9 writes."""
    return elementwise(n, dtype, reads=13, writes=9, flops=9)


def multiply_adds(n: int, length: int, dtype: torch.dtype) -> Work:
    """`length` multiply-adds on each of n elements, which stay in registers in between."""
    return elementwise(n, dtype, flops=2 * length)


def reduction(n: int, dtype: torch.dtype) -> Work:
    """The sum or the maximum of n elements."""
    return _work(dtype, n, min(n, 1), max(n - 1, 0))


def softmax(rows: int, columns: int, dtype: torch.dtype) -> Work:
    """Softmax of each row in one pass: maximum, difference, exp, sum, division."""
    return elementwise(_product(rows, columns), dtype, flops=5)


def manual_softmax(rows: int, columns: int, dtype: torch.dtype) -> Work:
    """The same as five kernels, as lecture 6 writes it, with rows as M and columns as N.

    Reads 5MN + 2M elements, writes 3MN + 2M; torch.max also writes M indices of 8 bytes each.
    """
    mn, m = _product(rows, columns), rows
    return _work(dtype, 5 * mn + 2 * m, 3 * mn + 2 * m, 5 * mn) + Work(0, 8 * m, 0)


def layer_norm(rows: int, columns: int, dtype: torch.dtype) -> Work:
    """Mean, variance, scale and shift of each row: eight operations an element."""
    n = _product(rows, columns)
    return _work(dtype, n + 2 * columns, n, 8 * n)


def cross_entropy(rows: int, classes: int, dtype: torch.dtype) -> Work:
    """Log-softmax and the loss of each row's target: maximum, difference, exp, sum.

    Targets are int64; one number comes out.
    """
    n = _product(rows, classes)
    return _work(dtype, n, min(rows, 1), 4 * n) + Work(8 * rows, 0, 0)


def embedding(tokens: int, width: int, dtype: torch.dtype) -> Work:
    """One row of a table for each token, an int64 index."""
    return copy(_product(tokens, width), dtype) + Work(8 * tokens, 0, 0)


def adam(n: int, dtype: torch.dtype) -> Work:
    """One fused Adam step on n parameters: reads p, g, m, v and writes p, m, v."""
    return elementwise(n, dtype, reads=4, writes=3, flops=12)


def matmul(
    m: int, n: int, k: int, dtype: torch.dtype, *, batch: int = 1, out: torch.dtype | None = None
) -> Work:
    """(m, k) @ (k, n), `batch` of them: 2mnk FLOPs; a matrix-vector product has n = 1.

    out: the result's dtype where it differs.
    """
    inputs = _work(dtype, batch * (m * k + k * n), 0, 2 * _product(batch, m, n, k))
    return inputs + _work(out or dtype, 0, batch * m * n, 0)


def tiled_matmul(m: int, n: int, k: int, tile_m: int, tile_n: int, dtype: torch.dtype) -> Work:
    """The same with tiles of the result on their own: what each tile loads counts again.

    A row of tiles loads its part of A once a tile, a column of tiles its part of B. Tiles of 1 × 1
    are the naive kernel: 2mnk elements loaded.
    """
    if min(tile_m, tile_n) < 1:
        raise ValueError("a tile has at least one row and one column")
    loads = m * k * math.ceil(n / tile_n) + k * n * math.ceil(m / tile_m)
    return _work(dtype, loads, m * n, 2 * _product(m, n, k))


def linear(
    tokens: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    *,
    weight: torch.dtype | None = None,
) -> Work:
    """x @ W.T for x (tokens, inputs), W (outputs, inputs).

    weight: the dtype in which W is stored where it differs; then every row of W has one scale in
    `dtype` and one multiplication an output applies it.
    """
    stored = weight or dtype
    scales = outputs if weight and weight != dtype else 0
    flops = 2 * _product(tokens, inputs, outputs) + tokens * scales
    activations = _work(dtype, tokens * inputs + scales, tokens * outputs, flops)
    return activations + _work(stored, inputs * outputs, 0, 0)


def convolution(
    images: int,
    in_channels: int,
    out_channels: int,
    height: int,
    width: int,
    kernel: int,
    dtype: torch.dtype,
) -> Work:
    """2-D convolution of (images, in_channels, height, width), square kernel, same-size output."""
    pixels = _product(images, height, width)
    weights = _product(in_channels, out_channels, kernel, kernel)
    return _work(dtype, pixels * in_channels + weights, pixels * out_channels, 2 * pixels * weights)


def attention(
    batch: int, heads: int, sequence: int, dim: int, dtype: torch.dtype, *, causal: bool = False
) -> Work:
    """softmax(Q K.T) V without its sequence × sequence matrices in memory, as FlashAttention.

    FLOPs are those of the two matmuls, half of them when causal, as papers count. Reads Q, K, V;
    writes O and one fp32 log-sum-exp a row, which the backward pass needs.
    """
    rows = _product(batch, heads, sequence)
    flops = 4 * rows * sequence * dim / (2 if causal else 1)
    return _work(dtype, 3 * rows * dim, rows * dim, flops) + Work(0, 4 * rows, 0)


def unfused_attention(batch: int, heads: int, sequence: int, dim: int, dtype: torch.dtype) -> Work:
    """The same as matmul, softmax, matmul: the scores and the weights go through memory."""
    matrices = _product(batch, heads)
    return (
        matmul(sequence, sequence, dim, dtype, batch=matrices)
        + softmax(matrices * sequence, sequence, dtype)
        + matmul(sequence, dim, sequence, dtype, batch=matrices)
    )


def attention_backward(
    batch: int, heads: int, sequence: int, dim: int, dtype: torch.dtype, *, causal: bool = False
) -> Work:
    """FlashAttention's backward pass: five matmuls to the forward's two, scores recomputed.

    Reads Q, K, V, O, dO and the log-sum-exp; writes dQ, dK, dV.
    """
    rows = _product(batch, heads, sequence)
    flops = 2.5 * attention(batch, heads, sequence, dim, dtype, causal=causal).flops
    return _work(dtype, 5 * rows * dim, 3 * rows * dim, flops) + Work(4 * rows, 0, 0)
