"""Attention with tiles of queries and keys, in Triton: the kernel that notebook 11 teaches.

One program has a tile of queries of one head, and goes over the keys a tile at a time. For each
query it keeps the maximum m of its scores so far, the sum l of their exponentials, and the sum o of
these times the values: after every tile o / l is exact attention over the keys seen so far.
"""

import dataclasses
import math

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch

from helpers.device import interpreting
from helpers.triton_mode import on_device_of, tl, triton

LOG2_E = 1 / math.log(2)
MOST_BLOCKS = 2**31 - 2**16  # of a grid's first axis, and one a program more can be counted


@dataclasses.dataclass(frozen=True)
class Config:
    """Queries a program, keys a step (at least 16 of both), warps, tiles of keys on their way."""

    tile_q: int
    tile_k: int
    warps: int = 4
    stages: int = 2


@triton.jit
def load_rows(
    ptr, row, rows, row_stride, stride, DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    # WIDTH is a power of two. Columns from DIM on are 0 and add nothing to a product.
    column = tl.arange(0, WIDTH).to(tl.int64)[None, :]
    at = ptr + row[:, None].to(tl.int64) * row_stride + column * stride
    if MASKED:
        return tl.load(at, mask=(row[:, None] < rows) & (column < DIM), other=0.0)
    if WIDTH > DIM:
        return tl.load(at, mask=column < DIM, other=0.0)
    return tl.load(at)


# fmt: off
@triton.jit
def attend_tile(
    state, q, k_ptr, v_ptr, first, i, keys, k_stride, v_stride, scale, DIM: tl.constexpr,
    WIDTH: tl.constexpr, TILE_K: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    m, l, o = state
    j = first + tl.arange(0, TILE_K)
    k = load_rows(k_ptr, j, keys, k_stride[2], k_stride[3], DIM, WIDTH, MASKED)
    v = load_rows(v_ptr, j, keys, v_stride[2], v_stride[3], DIM, WIDTH, MASKED)
    if UPCAST:  # the interpreter's tl.dot would multiply bf16's bits
        q, k = q.to(tl.float32), k.to(tl.float32)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    if MASKED:
        last = tl.minimum(i, keys - 1) if CAUSAL else keys - 1 + 0 * i
        s = tl.where(j[None, :] <= last[:, None], s, -float("inf"))
    # scale holds log2(e) as well, so that exp2, which the hardware has, gives exp.
    m_new = tl.maximum(m, tl.max(s, axis=1) * scale)
    shift = tl.where(m_new == -float("inf"), 0.0, m_new)  # -inf - (-inf) would be NaN
    p = tl.exp2(s * scale - shift[:, None])
    rescale = tl.exp2(m - shift)
    l = l * rescale + tl.sum(p, axis=1)
    p = p.to(v.dtype)
    if UPCAST:
        p, v = p.to(tl.float32), v.to(tl.float32)
    o = tl.dot(p, v, o * rescale[:, None], input_precision=PRECISION)
    return m_new, l, o


@triton.jit
def attention_tiles_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_stride, k_stride, v_stride, o_stride, heads, group,
    queries, keys, scale, DIM: tl.constexpr, WIDTH: tl.constexpr, TILE_Q: tl.constexpr,
    TILE_K: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    tiles = tl.cdiv(queries, TILE_Q)
    # In a causal head the last queries see most keys: longest first, none is left for the end.
    tile = tiles - 1 - tl.program_id(0) % tiles
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = pair // heads, pair % heads
    q_ptr += batch * q_stride[0] + head * q_stride[1]
    k_ptr += batch * k_stride[0] + head // group * k_stride[1]  # `group` heads share their keys
    v_ptr += batch * v_stride[0] + head // group * v_stride[1]
    o_ptr += batch * o_stride[0] + head * o_stride[1]

    i = tile * TILE_Q + tl.arange(0, TILE_Q)
    q = load_rows(q_ptr, i, queries, q_stride[2], q_stride[3], DIM, WIDTH, True)
    m, l = tl.full((TILE_Q,), -float("inf"), tl.float32), tl.zeros((TILE_Q,), tl.float32)
    state = m, l, tl.zeros((TILE_Q, WIDTH), tl.float32)
    if CAUSAL:
        full = tl.minimum(keys, tile * TILE_Q + 1) // TILE_K * TILE_K
        end = tl.minimum(keys, tl.minimum(queries, tile * TILE_Q + TILE_Q))
    else:
        full, end = keys // TILE_K * TILE_K, keys
    for first in range(0, full, TILE_K):  # all queries see all keys
        state = attend_tile(state, q, k_ptr, v_ptr, first, i, keys, k_stride, v_stride, scale,
                            DIM, WIDTH, TILE_K, CAUSAL, False, PRECISION, UPCAST)
    for first in range(full, end, TILE_K):  # the diagonal, and the last keys
        state = attend_tile(state, q, k_ptr, v_ptr, first, i, keys, k_stride, v_stride, scale,
                            DIM, WIDTH, TILE_K, CAUSAL, True, PRECISION, UPCAST)
    m, l, o = state
    o = o / tl.where(l == 0, 1.0, l)[:, None]  # a query that sees nothing gets 0
    column = tl.arange(0, WIDTH).to(tl.int64)[None, :]
    at = o_ptr + i[:, None].to(tl.int64) * o_stride[2] + column * o_stride[3]
    tl.store(at, o.to(o_ptr.dtype.element_ty), mask=(i[:, None] < queries) & (column < DIM))
    if lse_ptr is not None:  # all that the backward pass needs of the softmax
        lse = tl.where(l == 0, float("inf"), m + tl.log2(l))
        tl.store(lse_ptr + pair * queries + i, lse, mask=i < queries)
# fmt: on


def launch_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    config: Config,
    causal: bool = False,
    scale: float = 1.0,
    precision: str = "ieee",
    lse: torch.Tensor | None = None,
):
    """Write softmax(q kᵀ scale) v to o; returns what Triton compiled, None when interpreted.

    q, o: (batch, heads, queries, dim); k, v: (batch, heads / group, keys, dim). Any strides; no
    dimension is 0 and scale > 0. None of this is checked; ValueError as for `blocks_of`.
    precision: what tl.dot makes of fp32, "ieee" or "tf32". lse: (batch, heads, queries), fp32,
    contiguous; gets log2 of the sum of exp(score scale), and +inf where that sum is 0.
    """
    heads, queries, dim = q.shape[1:]
    with on_device_of(q):
        return attention_tiles_kernel[(blocks_of(q, config.tile_q),)](
            *(q, k, v, o, lse, q.stride(), k.stride(), v.stride(), o.stride()),
            *(heads, heads // k.shape[1], queries, k.shape[2], scale * LOG2_E),
            *(dim, max(16, triton.next_power_of_2(dim)), config.tile_q, config.tile_k),
            *(causal, precision, interpreting()),
            num_warps=config.warps,
            num_stages=config.stages,
        )


def blocks_of(q: torch.Tensor, rows: int) -> int:
    """Blocks of `rows` queries of one head in q; ValueError for more than `MOST_BLOCKS`."""
    batch, heads, queries, _ = q.shape
    blocks = batch * heads * triton.cdiv(queries, rows)
    if blocks > MOST_BLOCKS:
        raise ValueError(f"attention of {tuple(q.shape)} has {blocks:,} blocks: too many")
    return blocks
