"""What is around the products of `attention_backward_hopper`: preparing, loading, adding dQ up.

Barriers say that a slot with a tile of queries is ready or free, that the keys have come or are
free, that both groups' dS has come, and that a part of dQ has come or has been read.
"""

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
from helpers.kernels.attention_backward_deal import (
    KEYS,
    adders_before,
    block_and_steps,
    blocks_of_item,
    items_of_head,
    round_of,
    tile_at,
)
from helpers.kernels.attention_tiles import load_rows
from helpers.triton_mode import gl, gluon, hopper, tl, triton

mbarrier, tma = hopper.mbarrier, hopper.tma
ROWS = gl.constexpr(64)  # queries of a tile, keys of a group, both sides of a part of dQ


# fmt: off
@gluon.jit
def load_keys(matrix, batch, head, block, came, free, parts, visited):
    # The phase before the first counts as over: at first all is free.
    mbarrier.wait(free, (visited & 1) ^ 1)
    mbarrier.expect(came, 2 * matrix.block_type.nbytes)
    for part in gl.static_range(2):
        at = [batch, head, block * KEYS + part * ROWS, 0]
        tma.async_copy_global_to_shared(matrix, at, came, parts.index(part))


@gluon.jit
def load(
    q_matrix, k_matrix, v_matrix, do_matrix, stats_ptr, rings, parts, barriers, sizes,
    SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
):
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    q_ring, do_ring, stats_ring = rings
    k_parts, v_parts = parts[0], parts[1]
    ready, free, k_came, k_free, v_came, v_free = barriers[:6]
    heads, group = sizes[0], sizes[1]
    padded = gl.cdiv(sizes[3], ROWS) * ROWS
    count, visited = 0, 0
    total = sizes[2] * items_of_head(sizes, CAUSAL)
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, kv_head, item, blocks = blocks_of_item(number, sizes, CAUSAL)
        begin, end = round_of(number, item, sizes, CAUSAL)
        for back in range(blocks):
            block, steps = block_and_steps(item, back, sizes, ROWS, CAUSAL)
            load_keys(k_matrix, batch, kv_head, block, k_came, k_free, k_parts, visited)
            load_keys(v_matrix, batch, kv_head, block, v_came, v_free, v_parts, visited)
            visited += 1
            for each in range(group * steps):
                head = kv_head * group + each // steps
                tile = tile_at(each % steps, item, begin, block, back, sizes, ROWS, CAUSAL)
                slot = count % SLOTS
                mbarrier.wait(free.index(slot), (count // SLOTS & 1) ^ 1)
                mbarrier.expect(ready.index(slot), 2 * q_matrix.block_type.nbytes)
                at, came = [batch, head, tile * ROWS, 0], ready.index(slot)
                tma.async_copy_global_to_shared(q_matrix, at, came, q_ring.index(slot))
                tma.async_copy_global_to_shared(do_matrix, at, came, do_ring.index(slot))
                row = (2 * (batch * heads + head)).to(gl.int64) * padded + tile * ROWS
                line = stats_ptr + row + gl.arange(0, ROWS, layout=LINE)
                stats_ring.index(2 * slot).store(gl.load(line))
                stats_ring.index(2 * slot + 1).store(gl.load(line + padded))
                mbarrier.arrive(ready.index(slot))
                count += 1


@tl.core.builtin
def async_add_shared_to_global(matrix, at, part, _semantic=None):
    # As tma.async_copy_shared_to_global, for an instruction for which Gluon has no name.
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    kind = tl.core.ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, matrix.handle, at, part.handle)


@gluon.jit
def acquire(ptr):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr.to(gl.int64)], gl.int32, False, 1)


@gluon.jit
def wait_until_written(x):
    # tma.store_wait(0) only waits until shared memory has been read.
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def add(
    PART: gl.constexpr, dq_matrix, turns_ptr, parts, barriers, sizes, WIDTH: gl.constexpr,
    CAUSAL: gl.constexpr, IN_TURN: gl.constexpr,
):
    # In turn: the first to come writes, so that nothing has to be filled with zeros before.
    EACH: gl.constexpr = WIDTH // ROWS  # parts of a tile
    dq_parts, came, free = parts[3], barriers[7], barriers[8]
    heads, group, tiles = sizes[0], sizes[1], gl.cdiv(sizes[3], ROWS)
    count, added = 0, 0
    total = sizes[2] * items_of_head(sizes, CAUSAL)
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, kv_head, item, blocks = blocks_of_item(number, sizes, CAUSAL)
        begin, end = round_of(number, item, sizes, CAUSAL)
        for back in range(blocks):
            block, steps = block_and_steps(item, back, sizes, ROWS, CAUSAL)
            for each in range(group * steps):
                if EACH == 2 or count & 1 == PART:
                    g = each // steps
                    tile = tile_at(each % steps, item, begin, block, back, sizes, ROWS, CAUSAL)
                    at = [batch, kv_head * group + g, tile * ROWS, (EACH - 1) * PART * ROWS]
                    part = PART * 2 + (added & 1)
                    mbarrier.wait(came.index(part), added >> 1 & 1)
                    if IN_TURN:
                        place = (batch * heads + kv_head * group + g).to(gl.int64) * tiles + tile
                        turn = turns_ptr + place * EACH + (EACH - 1) * PART
                        before = adders_before(tile, g, item, back, begin, end, sizes, ROWS, CAUSAL)
                        while acquire(turn) != before:
                            pass
                        if before == 0:
                            tma.async_copy_shared_to_global(dq_matrix, at, dq_parts.index(part))
                        else:
                            async_add_shared_to_global(dq_matrix, at, dq_parts.index(part))
                        tma.store_wait(0)
                        mbarrier.arrive(free.index(part))
                        gl.atomic_add(turn, wait_until_written(1), sem="release", scope="gpu")
                    else:
                        async_add_shared_to_global(dq_matrix, at, dq_parts.index(part))
                        tma.store_wait(0)
                        mbarrier.arrive(free.index(part))
                    added += 1
                count += 1
# fmt: on


@triton.jit
def prepare_kernel(
    o_ptr, do_ptr, lse_ptr, stats_ptr, turns_ptr, o_stride, do_stride, heads, queries,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # What is needed of a row beside q and do, whole tiles of it: lse, then delta.
    tiles = tl.cdiv(queries, TILE)
    tile, pair = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = pair // heads, pair % heads
    o_ptr += batch * o_stride[0] + head * o_stride[1]
    do_ptr += batch * do_stride[0] + head * do_stride[1]
    i = tile * TILE + tl.arange(0, TILE)
    o = load_rows(o_ptr, i, queries, o_stride[2], o_stride[3], DIM, WIDTH, True)
    do = load_rows(do_ptr, i, queries, do_stride[2], do_stride[3], DIM, WIDTH, True)
    lse = tl.load(lse_ptr + pair * queries + i, mask=i < queries, other=float("inf"))
    at = stats_ptr + 2 * pair * tiles * TILE + i
    tl.store(at, lse)
    tl.store(at + tiles * TILE, tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1))
    tl.store(turns_ptr + tl.program_id(0) * 2 + tl.arange(0, 2), tl.zeros((2,), tl.int32))
