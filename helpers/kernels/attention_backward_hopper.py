"""The backward pass of attention for Hopper, in Gluon: one pass, five products a tile.

A program has 128 keys, half of them in each of two groups of four warps, which keep dK and dV in
registers; queries come tile by tile, 64 of them. Scores are computed transposed, keys x queries, so
that the weights are where the products for dK and dV need them. dQ needs all keys: each program
adds its part to memory, in fp32, when its turn has come (`attention_backward_deal`). One warp
loads, two add. Heads of up to 64: the groups alternate at tiles of dQ; else each has half.
"""

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch

from helpers.kernels.attention_backward_deal import (
    KEYS,
    block_and_steps,
    blocks_of_item,
    items_of_head,
    shift_of,
)
from helpers.kernels.attention_backward_roles import ROWS, add, load, prepare_kernel
from helpers.kernels.attention_hopper import descriptor, power_of_2
from helpers.kernels.attention_tiles import LOG2_E, blocks_of
from helpers.kernels.matmul_persistent import sms
from helpers.triton_mode import gl, gluon, hopper, on_device_of, triton

mbarrier, tma = hopper.mbarrier, hopper.tma
LN_2 = gl.constexpr(1 / LOG2_E)
SLOTS = {64: 3, 128: 2}  # of tiles of queries, by the width of a head
WORKER_WARPS, WORKER_REGISTERS = (4, 1, 1, 1), (240, 24, 24, 24)


# fmt: off
@gluon.jit
def write(matrix, at, x, part):
    part.reshape(x.type.shape).store(x.to(matrix.dtype))
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(matrix, at, part)
    tma.store_wait(0)  # until shared memory has been read


@gluon.jit
def hand_over(ME: gl.constexpr, dq, dq_parts, came, free, added):
    part = ME * 2 + (added & 1)
    mbarrier.wait(free.index(part), (added >> 1 & 1) ^ 1)
    dq_parts.index(part).reshape([ROWS, ROWS]).store(dq)
    hopper.fence_async_shared()
    mbarrier.arrive(came.index(part))


@gluon.jit
def gradients(
    ME: gl.constexpr, dk_matrix, dv_matrix, rings, parts, barriers, sizes, score_scale,
    WIDTH: gl.constexpr, SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
    TAIL: gl.constexpr,
):
    # Narrow heads leave registers for the next tile's scores, which are computed beside dQ then.
    AHEAD: gl.constexpr = WIDTH == ROWS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    FACTOR: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    KEY: gl.constexpr = gl.SliceLayout(1, SCORES)
    QUERY: gl.constexpr = gl.SliceLayout(0, SCORES)
    q_ring, do_ring, stats_ring = rings
    k_parts, v_parts, ds_parts, dq_parts = parts
    ready, free, k_came, k_free, v_came, v_free, ds_came, dq_came, dq_free = barriers
    group, keys = sizes[1], sizes[4]
    i, j = gl.arange(0, ROWS, layout=QUERY), gl.arange(0, ROWS, layout=KEY)
    zero = gl.zeros((ROWS, ROWS), gl.float32, SCORES)
    k = k_parts.index(ME).reshape([ROWS, WIDTH])
    v = v_parts.index(ME).reshape([ROWS, WIDTH])
    count, visited, added = 0, 0, 0
    total = sizes[2] * items_of_head(sizes, CAUSAL)
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, head, item, blocks = blocks_of_item(number, sizes, CAUSAL)
        for back in range(blocks):
            block, steps = block_and_steps(item, back, sizes, ROWS, CAUSAL)
            first = block * KEYS + ME * ROWS
            dk = gl.zeros((ROWS, WIDTH), gl.float32, SUMS)
            dv = gl.zeros((ROWS, WIDTH), gl.float32, SUMS)
            mbarrier.wait(k_came, visited & 1)
            mbarrier.wait(v_came, visited & 1)
            visited += 1
            step = 0
            if AHEAD:
                if steps > 0:
                    mbarrier.wait(ready.index(count % SLOTS), count // SLOTS & 1)
                q = q_ring.index(count % SLOTS).reshape([ROWS, WIDTH])
                s = hopper.warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False)
            for each in range(group * steps):
                slot, now = count % SLOTS, count & 1
                q = q_ring.index(slot).reshape([ROWS, WIDTH])
                do = do_ring.index(slot).reshape([ROWS, WIDTH])
                if not AHEAD:
                    mbarrier.wait(ready.index(slot), count // SLOTS & 1)
                    s = hopper.warpgroup_mma(
                        k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
                dp = hopper.warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
                if not AHEAD:
                    s = hopper.warpgroup_mma_wait(1, deps=[s])
                if CAUSAL:
                    ahead = gl.where(back == 0, step, steps - 1 - step)
                    step = gl.where(step + 1 == steps, 0, step + 1)
                    if ahead <= ME:  # the diagonal; and queries before all of these keys
                        # Split, so that what is compared with is known when this is compiled.
                        hidden = j[:, None] + ((ME - ahead) * ROWS - (i & 6)[None, :])
                        s = gl.where((i & 57)[None, :] >= hidden, s, -float("inf"))
                if TAIL:
                    if first + ROWS > keys:
                        s = gl.where(j[:, None] < keys - first, s, -float("inf"))
                lse = stats_ring.index(2 * slot).load(QUERY)
                p = power_of_2(s * score_scale - lse[None, :])
                weights = gl.convert_layout(p.to(q.dtype), FACTOR)
                dv = hopper.warpgroup_mma(weights, do, dv, is_async=True)
                delta = stats_ring.index(2 * slot + 1).load(QUERY)
                dp = hopper.warpgroup_mma_wait(1, deps=[dp])
                ds = (p * (dp - delta[None, :])).to(q.dtype)
                ds_parts.index(now * 2 + ME).store(ds)
                hopper.fence_async_shared()
                mbarrier.arrive(ds_came.index(now))
                dk = hopper.warpgroup_mma(gl.convert_layout(ds, FACTOR), q, dk, is_async=True)
                if AHEAD:
                    next = count + 1
                    if each + 1 < group * steps:  # what follows the last is not used
                        mbarrier.wait(ready.index(next % SLOTS), next // SLOTS & 1)
                    q_next = q_ring.index(next % SLOTS).reshape([ROWS, WIDTH]).permute((1, 0))
                    s_next = hopper.warpgroup_mma(k, q_next, zero, use_acc=False, is_async=True)
                mbarrier.wait(ds_came.index(now), count >> 1 & 1)
                ds_0 = ds_parts.index(now * 2).permute((1, 0))
                ds_1 = ds_parts.index(now * 2 + 1).permute((1, 0))
                k_0, k_1 = k_parts.index(0), k_parts.index(1)
                k_0, k_1 = k_0.reshape([ROWS, WIDTH]), k_1.reshape([ROWS, WIDTH])
                if AHEAD:
                    if now == ME:
                        dq = hopper.warpgroup_mma(ds_0, k_0, zero, use_acc=False, is_async=True)
                        dq = hopper.warpgroup_mma(ds_1, k_1, dq, is_async=True)
                        dq = hopper.warpgroup_mma_wait(0, deps=[dq])
                        hand_over(ME, dq, dq_parts, dq_came, dq_free, added)
                        added += 1
                    dk, dv, s = hopper.warpgroup_mma_wait(0, deps=[dk, dv, s_next])
                    mbarrier.arrive(free.index(slot))
                else:
                    k_0, k_1 = k_0.slice(ME * ROWS, ROWS, 1), k_1.slice(ME * ROWS, ROWS, 1)
                    dq = hopper.warpgroup_mma(ds_0, k_0, zero, use_acc=False, is_async=True)
                    dq = hopper.warpgroup_mma(ds_1, k_1, dq, is_async=True)
                    dq, dk, dv = hopper.warpgroup_mma_wait(0, deps=[dq, dk, dv])
                    mbarrier.arrive(free.index(slot))
                    hand_over(ME, dq, dq_parts, dq_came, dq_free, added)
                    added += 1
                count += 1
            mbarrier.arrive(k_free)
            # V's place is this group's own, and the next block's can come when these have gone.
            at, v_part = [batch, head, first, 0], v_parts.index(ME)
            write(dv_matrix, at, dv, v_part)
            write(dk_matrix, at, dk * (score_scale * LN_2), v_part)
            mbarrier.arrive(v_free)


@gluon.jit
def attention_backward_hopper_kernel(
    q_matrix, k_matrix, v_matrix, do_matrix, dq_matrix, dk_matrix, dv_matrix, stats_ptr,
    turns_ptr, sizes, score_scale, WIDTH: gl.constexpr,
    SLOTS: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr, IN_TURN: gl.constexpr,
    WARPS: gl.constexpr, REGISTERS: gl.constexpr,
):
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    DTYPE: gl.constexpr = q_matrix.dtype
    TILE: gl.constexpr = q_matrix.block_type.shape
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], DTYPE)
    DQ: gl.constexpr = dq_matrix.block_type.shape
    q_ring = gl.allocate_shared_memory(DTYPE, [SLOTS] + TILE, q_matrix.layout)
    do_ring = gl.allocate_shared_memory(DTYPE, [SLOTS] + TILE, q_matrix.layout)
    stats_ring = gl.allocate_shared_memory(gl.float32, [2 * SLOTS, ROWS], LINE)
    k_parts = gl.allocate_shared_memory(DTYPE, [2] + TILE, q_matrix.layout)
    v_parts = gl.allocate_shared_memory(DTYPE, [2] + TILE, q_matrix.layout)
    ds_parts = gl.allocate_shared_memory(DTYPE, [4, ROWS, ROWS], DS)
    dq_parts = gl.allocate_shared_memory(gl.float32, [4] + DQ, dq_matrix.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    k_came = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    k_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_came = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_free = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    ds_came = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    dq_came = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    dq_free = gl.allocate_shared_memory(gl.int64, [4, 1], BARRIER)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=2)  # the copies, and the stats
        mbarrier.init(free.index(slot), count=2)
    mbarrier.init(k_came, count=1)
    mbarrier.init(v_came, count=1)
    mbarrier.init(k_free, count=2)
    mbarrier.init(v_free, count=2)
    mbarrier.init(ds_came.index(0), count=2)
    mbarrier.init(ds_came.index(1), count=2)
    for part in gl.static_range(4):
        mbarrier.init(dq_came.index(part), count=1)
        mbarrier.init(dq_free.index(part), count=1)
    hopper.fence_async_shared()
    rings = q_ring, do_ring, stats_ring
    parts = k_parts, v_parts, ds_parts, dq_parts
    barriers = ready, free, k_came, k_free, v_came, v_free, ds_came, dq_came, dq_free
    gl.warp_specialize([
        (gradients, (0, dk_matrix, dv_matrix, rings, parts, barriers, sizes, score_scale,
                     WIDTH, SLOTS, CAUSAL, TAIL)),
        (gradients, (1, dk_matrix, dv_matrix, rings, parts, barriers, sizes, score_scale,
                     WIDTH, SLOTS, CAUSAL, TAIL)),
        (load, (q_matrix, k_matrix, v_matrix, do_matrix, stats_ptr, rings, parts, barriers, sizes,
                SLOTS, CAUSAL)),
        (add, (0, dq_matrix, turns_ptr, parts, barriers, sizes, WIDTH, CAUSAL, IN_TURN)),
        (add, (1, dq_matrix, turns_ptr, parts, barriers, sizes, WIDTH, CAUSAL, IN_TURN)),
    ], WARPS, REGISTERS)
# fmt: on


def launch_one_pass(
    q, k, v, o, lse, do, dq_sum, dk, dv, causal=False, scale=1.0, in_turn=True
) -> None:
    """dq / scale in dq_sum, fp32, its rows dense; and dk and dv.

    In 16 bits, on a GPU of compute capability 9.0, for heads of up to 128 and tensors of which
    `attention_plans.has_descriptor` holds; otherwise as `attention_backward`. in_turn: False adds
    as it comes, to a dq_sum of zeros, which no two runs need do in the same order.
    """
    (batch, heads, queries, dim), kv_heads, keys = q.shape, k.shape[1], k.shape[2]
    width = max(64, triton.next_power_of_2(dim))
    blocks, tiles = triton.cdiv(keys, 128), triton.cdiv(queries, 64)
    items = batch * kv_heads * (triton.cdiv(blocks, 2) if causal else blocks)
    programs = min(items, sms(q.device))
    shift = shift_of(queries, keys, programs)
    sizes = (heads, heads // kv_heads, batch * kv_heads, queries, keys, shift)
    stats = lse.new_empty(batch, heads, 2, tiles * 64)
    turns = torch.empty(batch, heads, tiles, 2, dtype=torch.int32, device=q.device)
    with on_device_of(q):
        prepare_kernel[(blocks_of(q, 64),)](
            *(o, do, lse, stats, turns, o.stride(), do.stride(), heads, queries),
            *(dim, width, 64),
            num_warps=4,
        )
        attention_backward_hopper_kernel[(programs,)](
            *(descriptor(q, width), descriptor(k, width), descriptor(v, width)),
            *(descriptor(do, width), descriptor(dq_sum, 64), descriptor(dk, width)),
            *(descriptor(dv, width), stats, turns, sizes, scale * LOG2_E),
            *(width, SLOTS[width], causal, keys % 128 > 0, in_turn),
            *(WORKER_WARPS, WORKER_REGISTERS),
            num_warps=4,
            launch_cooperative_grid=in_turn,  # those who wait for one another run at the same time
        )
