"""Kernels for wide rows: in tiles, looked at three times and loaded from memory once.

The maximum, the sum of the exponentials, the output: each is a look of its own at the row, and only
the first goes to memory. The others find the row in the SM's L1, or in L2 where the rows in flight
are more than L1 holds. Three looks on the chip are faster here than the two of the online form,
whose rescaling costs registers and a pause after every tile.

`softmax_tiles_kernel`: one program a row. `softmax_shared_kernel`: several programs share a row.
Each finds maximum and sum (m, d) of its part, hands the pair to the others through memory and takes
theirs: pairs merge in any order.

exp2 on a GPU makes zero of what is below 1.2e-38; else results agree with those of
`softmax_rows_kernel` up to rounding.
"""

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton
from helpers.triton_mode import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def power(x):
    """e to the x: two machine instructions on sm_90; tl.exp takes five, to keep subnormals."""
    return tl.exp2(x * LOG2E)


@triton.jit
def highest(x_ptr, count, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """The maximum of `count` elements, which are to stay in L1."""
    tile = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), -float("inf"), tl.float32)
    for i in tl.static_range(TILES):
        at = i * BLOCK + tile
        x = tl.load(x_ptr + at, mask=at < count, other=-float("inf"), eviction_policy="evict_last")
        top = tl.maximum(top, x.to(tl.float32))
    return tl.max(top, axis=0)


@triton.jit
def total(x_ptr, m, count, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """The sum of exp(x - m); of no numbers but -inf, whose m is -inf, it is 0."""
    tile = tl.arange(0, BLOCK)
    shift = tl.where(m == -float("inf"), 0.0, m)
    d = tl.full((BLOCK,), 0.0, tl.float32)
    for i in tl.static_range(TILES):
        at = i * BLOCK + tile
        x = tl.load(x_ptr + at, mask=at < count, other=-float("inf"))
        d += power(x.to(tl.float32) - shift)
    return tl.sum(d, axis=0)


@triton.jit
def write(x_ptr, y_ptr, m, d, count, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """y = exp(x - m) / d."""
    tile = tl.arange(0, BLOCK)
    scale = 1.0 / d
    for i in tl.static_range(TILES):
        at = i * BLOCK + tile
        x = tl.load(x_ptr + at, mask=at < count, eviction_policy="evict_first").to(tl.float32)
        y = (power(x - m) * scale).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + at, y, mask=at < count, cache_modifier=".cs")


@triton.jit
def inner(row, stride, columns, UNIT: tl.constexpr):
    """Where the row's first whole unit of UNIT elements begins, how many elements lie before it,
    and how many there are in whole units."""
    start = row * stride
    first = (start + UNIT - 1) // UNIT * UNIT
    head = (first - start).to(tl.int32)
    return first, head, (columns - head) // UNIT * UNIT


@triton.jit
def edges(head, whole, columns, UNIT: tl.constexpr):
    """The elements before the first whole unit and behind the last, counted from the first."""
    k = tl.arange(0, 2 * UNIT)
    at = tl.where(k < UNIT, k - UNIT, whole + k - UNIT)
    return at, (at >= -head) & (at < columns - head)


@triton.jit
def softmax_tiles_kernel(
    x_ptr,
    y_ptr,
    columns,
    x_stride,
    y_stride,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    UNIT: tl.constexpr,
    EDGES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first, head, whole = inner(row, x_stride, columns, UNIT)
    x, y = x_ptr + first, y_ptr + inner(row, y_stride, columns, UNIT)[0]
    m = highest(x, whole, BLOCK, TILES)
    if EDGES:
        at, mask = edges(head, whole, columns, UNIT)
        edge = tl.load(x + at, mask=mask, other=-float("inf")).to(tl.float32)
        m = tl.maximum(m, tl.max(edge, axis=0))
    d = total(x, m, whole, BLOCK, TILES)
    if EDGES:
        d += tl.sum(power(edge - m), axis=0)
    write(x, y, m, d, whole, BLOCK, TILES)
    if EDGES:
        tl.store(y + at, (power(edge - m) / d).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def publish(pair_ptr, m, d):
    """m and d in one word of 64 bits: who reads it has both, or neither. It is never 0."""
    low = m.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    high = d.to(tl.int32, bitcast=True).to(tl.int64) << 32
    tl.atomic_xchg(pair_ptr, high | low, sem="relaxed")


@triton.jit
def gather(pairs_ptr, parts, PARTS: tl.constexpr):
    """The pairs of a row's parts, merged, as soon as all are there."""
    each = tl.arange(0, PARTS)
    words = tl.load(pairs_ptr + each, mask=each < parts, other=1, volatile=True)
    while tl.min((words != 0).to(tl.int32), axis=0) == 0:
        words = tl.load(pairs_ptr + each, mask=each < parts, other=1, volatile=True)
    m = (words & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    d = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    m = tl.where(each < parts, m, -float("inf"))
    whole = tl.max(m, axis=0)
    return whole, tl.sum(tl.where(each < parts, d * power(m - whole), 0.0), axis=0)


@triton.jit
def softmax_shared_kernel(
    x_ptr,
    y_ptr,
    pairs_ptr,
    rows,
    columns,
    x_stride,
    y_stride,
    parts,
    chunk,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    UNIT: tl.constexpr,
    EDGES: tl.constexpr,
    PARTS: tl.constexpr,
    STEP: tl.constexpr,
):
    part = tl.program_id(0) % parts
    groups = tl.num_programs(0) // parts
    begin = part.to(tl.int64) * (chunk // UNIT * UNIT)
    for i in range(tl.program_id(0) // parts, rows, groups):
        row = tl.cast(i, tl.int64)
        first, head, whole = inner(row, x_stride, columns, UNIT)
        x = x_ptr + first + begin
        y = y_ptr + inner(row, y_stride, columns, UNIT)[0] + begin
        count = tl.minimum(whole - begin, chunk // UNIT * UNIT).to(tl.int32)
        pairs = pairs_ptr + row * parts
        m = highest(x, count, BLOCK, TILES)
        if EDGES:  # all of them belong to part 0, which begins where the first whole unit does
            at, mask = edges(head, whole, columns, UNIT)
            mask = mask & (part == 0)
            edge = tl.load(x + at, mask=mask, other=-float("inf")).to(tl.float32)
            m = tl.maximum(m, tl.max(edge, axis=0))
        if STEP != 2:
            d = total(x, m, count, BLOCK, TILES)
            if EDGES:
                d += tl.sum(power(edge - tl.where(m == -float("inf"), 0.0, m)), axis=0)
            publish(pairs + part, m, d)
        if STEP != 1:
            m, d = gather(pairs, parts, PARTS)
            write(x, y, m, d, count, BLOCK, TILES)
            if EDGES:
                tl.store(y + at, (power(edge - m) / d).to(y_ptr.dtype.element_ty), mask=mask)
