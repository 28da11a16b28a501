"""The backward pass of attention in tiles, in Triton: the kernels that notebook 12 teaches.

Scores and weights are computed once more, tile by tile, from one number a query, the log-sum-exp of
its scores; another one, delta, stands for its whole row of the gradient. Two passes: a tile of keys
goes over the queries, for dK and dV; a tile of queries over the keys, for dQ. Every number has one
owner, and its terms one order. lse and delta are (batch, heads, queries), fp32, contiguous; lse is
log2 Σ exp(score scale), +inf for a query that sees nothing. All else: `attention_tiles`.
"""

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch

from helpers.device import interpreting
from helpers.kernels.attention_tiles import LOG2_E, Config, blocks_of, load_rows
from helpers.triton_mode import on_device_of, tl, triton

DELTA_ROWS = 32  # of a program that computes delta


# fmt: off
@triton.jit
def store_rows(
    ptr, x, row, rows, row_stride, stride, DIM: tl.constexpr, WIDTH: tl.constexpr,
):
    column = tl.arange(0, WIDTH).to(tl.int64)[None, :]
    at = ptr + row[:, None].to(tl.int64) * row_stride + column * stride
    tl.store(at, x.to(ptr.dtype.element_ty), mask=(row[:, None] < rows) & (column < DIM))


@triton.jit
def delta_kernel(
    o_ptr, do_ptr, delta_ptr, o_stride, do_stride, heads, queries, DIM: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):
    tiles = tl.cdiv(queries, ROWS)
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = pair // heads, pair % heads
    o_ptr += batch * o_stride[0] + head * o_stride[1]
    do_ptr += batch * do_stride[0] + head * do_stride[1]
    i = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    o = load_rows(o_ptr, i, queries, o_stride[2], o_stride[3], DIM, WIDTH, True)
    do = load_rows(do_ptr, i, queries, do_stride[2], do_stride[3], DIM, WIDTH, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    tl.store(delta_ptr + pair * queries + i, delta, mask=i < queries)


@triton.jit
def recompute_tile(
    a, b, c, d, i, j, lse, delta, queries, keys, scale, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    # a, b, c, d are q, k, do, v for a tile of queries x keys, and k, q, v, do for its transpose.
    if UPCAST:  # the interpreter's tl.dot would multiply bf16's bits
        a, b = a.to(tl.float32), b.to(tl.float32)
        c, d = c.to(tl.float32), d.to(tl.float32)
    s = tl.dot(a, b.T, input_precision=PRECISION)
    # The softmax itself: no maximum, no sum. Above 0 is only what rounding makes of large scores.
    p = tl.exp2(tl.minimum(s * scale - lse, 0.0, tl.PropagateNan.ALL))
    dp = tl.dot(c, d.T, input_precision=PRECISION)
    ds = p * (dp - delta)
    if MASKED:
        visible = (i < queries) & (j < keys) & (j <= i if CAUSAL else True)
        p, ds = tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0)
    return p, ds


@triton.jit
def add_product(total, a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    a = a.to(b.dtype)  # rounded, as tensor cores need it
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def visit_queries(
    state, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, first, j, queries, keys, q_stride, do_stride,
    scale, DIM: tl.constexpr, WIDTH: tl.constexpr, TILE_Q: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    dk, dv = state
    i = first + tl.arange(0, TILE_Q)
    q = load_rows(q_ptr, i, queries, q_stride[2], q_stride[3], DIM, WIDTH, MASKED)
    do = load_rows(do_ptr, i, queries, do_stride[2], do_stride[3], DIM, WIDTH, MASKED)
    lse = tl.load(lse_ptr + i, mask=i < queries, other=float("inf"))  # past the end p is 0
    delta = tl.load(delta_ptr + i, mask=i < queries, other=0.0)
    p, ds = recompute_tile(k, q, v, do, i[None, :], j[:, None], lse[None, :], delta[None, :],
                           queries, keys, scale, CAUSAL, MASKED, PRECISION, UPCAST)
    dv = add_product(dv, p, do, PRECISION, UPCAST)
    dk = add_product(dk, ds, q, PRECISION, UPCAST)
    return dk, dv


@triton.jit
def sum_over_queries(
    state, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, first_key, queries, keys, q_stride, do_stride,
    scale, DIM: tl.constexpr, WIDTH: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    j = first_key + tl.arange(0, TILE_K)
    begin, full, whole = 0, 0, queries // TILE_Q * TILE_Q
    if CAUSAL:
        begin = first_key // TILE_Q * TILE_Q
        full = tl.minimum(tl.cdiv(first_key + TILE_K - 1, TILE_Q) * TILE_Q, whole)
    diagonal = tl.maximum(full - begin, 0)  # queries that do not see all of these keys
    rest = tl.maximum(begin, whole)  # the last tile, if it is not whole
    for step in range(0, diagonal + queries - rest, TILE_Q):
        first = begin + step if step < diagonal else rest + step - diagonal
        state = visit_queries(state, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, first, j, queries,
                              keys, q_stride, do_stride, scale, DIM, WIDTH, TILE_Q, CAUSAL, True,
                              PRECISION, UPCAST)
    for first in range(begin + diagonal, whole, TILE_Q):
        state = visit_queries(state, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, first, j, queries,
                              keys, q_stride, do_stride, scale, DIM, WIDTH, TILE_Q, CAUSAL, False,
                              PRECISION, UPCAST)
    return state


@triton.jit
def keys_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, q_stride, k_stride, v_stride,
    do_stride, dk_stride, dv_stride, heads, group, queries, keys, scale, score_scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    tiles = tl.cdiv(keys, TILE_K)
    first_key = tl.program_id(0) % tiles * TILE_K  # in a causal head the first are seen by most
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    batch, kv_head = pair // (heads // group), pair % (heads // group)
    k_ptr += batch * k_stride[0] + kv_head * k_stride[1]
    v_ptr += batch * v_stride[0] + kv_head * v_stride[1]
    j = first_key + tl.arange(0, TILE_K)
    k = load_rows(k_ptr, j, keys, k_stride[2], k_stride[3], DIM, WIDTH, True)
    v = load_rows(v_ptr, j, keys, v_stride[2], v_stride[3], DIM, WIDTH, True)
    state = tl.zeros((TILE_K, WIDTH), tl.float32), tl.zeros((TILE_K, WIDTH), tl.float32)
    for member in range(0, group):  # all heads that share these keys
        head = kv_head * group + member
        q_at = q_ptr + batch * q_stride[0] + head * q_stride[1]
        do_at = do_ptr + batch * do_stride[0] + head * do_stride[1]
        row = (batch * heads + head) * queries
        state = sum_over_queries(state, k, v, q_at, do_at, lse_ptr + row, delta_ptr + row,
                                 first_key, queries, keys, q_stride, do_stride, score_scale, DIM,
                                 WIDTH, TILE_Q, TILE_K, CAUSAL, PRECISION, UPCAST)
    dk, dv = state
    dk_ptr += batch * dk_stride[0] + kv_head * dk_stride[1]
    dv_ptr += batch * dv_stride[0] + kv_head * dv_stride[1]
    store_rows(dk_ptr, dk * scale, j, keys, dk_stride[2], dk_stride[3], DIM, WIDTH)
    store_rows(dv_ptr, dv, j, keys, dv_stride[2], dv_stride[3], DIM, WIDTH)


@triton.jit
def visit_keys(
    dq, q, do, lse, delta, k_ptr, v_ptr, first, i, queries, keys, k_stride, v_stride, scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TILE_K: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    j = first + tl.arange(0, TILE_K)
    k = load_rows(k_ptr, j, keys, k_stride[2], k_stride[3], DIM, WIDTH, MASKED)
    v = load_rows(v_ptr, j, keys, v_stride[2], v_stride[3], DIM, WIDTH, MASKED)
    p, ds = recompute_tile(q, k, do, v, i[:, None], j[None, :], lse[:, None], delta[:, None],
                           queries, keys, scale, CAUSAL, MASKED, PRECISION, UPCAST)
    return add_product(dq, ds, k, PRECISION, UPCAST)


@triton.jit
def queries_gradient_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, q_stride, k_stride, v_stride,
    do_stride, dq_stride, heads, group, queries, keys, scale, score_scale, DIM: tl.constexpr,
    WIDTH: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    tiles = tl.cdiv(queries, TILE_Q)
    tile = tiles - 1 - tl.program_id(0) % tiles  # in a causal head the last see most keys
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = pair // heads, pair % heads
    q_ptr += batch * q_stride[0] + head * q_stride[1]
    k_ptr += batch * k_stride[0] + head // group * k_stride[1]
    v_ptr += batch * v_stride[0] + head // group * v_stride[1]
    do_ptr += batch * do_stride[0] + head * do_stride[1]
    dq_ptr += batch * dq_stride[0] + head * dq_stride[1]

    i = tile * TILE_Q + tl.arange(0, TILE_Q)
    q = load_rows(q_ptr, i, queries, q_stride[2], q_stride[3], DIM, WIDTH, True)
    do = load_rows(do_ptr, i, queries, do_stride[2], do_stride[3], DIM, WIDTH, True)
    lse = tl.load(lse_ptr + pair * queries + i, mask=i < queries, other=float("inf"))
    delta = tl.load(delta_ptr + pair * queries + i, mask=i < queries, other=0.0)
    dq = tl.zeros((TILE_Q, WIDTH), tl.float32)
    full, end = keys // TILE_K * TILE_K, keys
    if CAUSAL:
        full = tl.minimum(keys, tile * TILE_Q + 1) // TILE_K * TILE_K
        end = tl.minimum(keys, tl.minimum(queries, tile * TILE_Q + TILE_Q))
    for first in range(0, full, TILE_K):  # all queries see all keys
        dq = visit_keys(dq, q, do, lse, delta, k_ptr, v_ptr, first, i, queries, keys, k_stride,
                        v_stride, score_scale, DIM, WIDTH, TILE_K, CAUSAL, False, PRECISION, UPCAST)
    for first in range(full, end, TILE_K):  # the diagonal, and the last keys
        dq = visit_keys(dq, q, do, lse, delta, k_ptr, v_ptr, first, i, queries, keys, k_stride,
                        v_stride, score_scale, DIM, WIDTH, TILE_K, CAUSAL, True, PRECISION, UPCAST)
    store_rows(dq_ptr, dq * scale, i, queries, dq_stride[2], dq_stride[3], DIM, WIDTH)
# fmt: on


def launch_delta(o: torch.Tensor, do: torch.Tensor, delta: torch.Tensor):
    """delta = the sum of o do over a head's numbers, in fp32."""
    heads, queries, dim = o.shape[1:]
    with on_device_of(o):
        return delta_kernel[(blocks_of(o, DELTA_ROWS),)](
            *(o, do, delta, o.stride(), do.stride(), heads, queries),
            *(dim, max(16, triton.next_power_of_2(dim)), DELTA_ROWS),
            num_warps=4,
        )


def launch_keys_gradient(
    q, k, v, do, lse, delta, dk, dv, config: Config, causal=False, scale=1.0, precision="ieee"
):
    """dk and dv, for tiles of config.tile_k keys."""
    strides = [x.stride() for x in (q, k, v, do, dk, dv)]
    with on_device_of(q):
        return keys_gradient_kernel[(blocks_of(k, config.tile_k),)](
            *(q, k, v, do, lse, delta, dk, dv, *strides),
            *_sizes_and_choices(q, k, config, causal, scale, precision),
            num_warps=config.warps,
            num_stages=config.stages,
        )


def launch_queries_gradient(
    q, k, v, do, lse, delta, dq, config: Config, causal=False, scale=1.0, precision="ieee"
):
    """dq, for tiles of config.tile_q queries."""
    strides = [x.stride() for x in (q, k, v, do, dq)]
    with on_device_of(q):
        return queries_gradient_kernel[(blocks_of(q, config.tile_q),)](
            *(q, k, v, do, lse, delta, dq, *strides),
            *_sizes_and_choices(q, k, config, causal, scale, precision),
            num_warps=config.warps,
            num_stages=config.stages,
        )


def _sizes_and_choices(q, k, config: Config, causal: bool, scale: float, precision: str) -> tuple:
    heads, queries, dim = q.shape[1:]
    return (
        *(heads, heads // k.shape[1], queries, k.shape[2], scale, scale * LOG2_E),
        *(dim, max(16, triton.next_power_of_2(dim)), config.tile_q, config.tile_k),
        *(causal, precision, interpreting()),
    )
