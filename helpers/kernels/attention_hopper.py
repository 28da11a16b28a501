"""Attention for Hopper, in Gluon: two or three groups of warps multiply, one warp loads.

The steps are those of `attention_tiles`. What is added, after Shah et al., "FlashAttention-3"
(2024): each group of four warps has 64 queries of its own, so that one computes exponentials while
another's products are on the tensor cores; and a group asks for the next tile's scores together
with this tile's values, so that there is work beside its exponentials as well.

`attention_ring` says how keys and values come. They are looked at from the last to the first, since
those that need a mask are the last.
"""

import dataclasses
import functools

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch

from helpers.kernels.attention_deal import block_of
from helpers.kernels.attention_ring import ROWS, load, load_queries, wait_for
from helpers.kernels.attention_tiles import LOG2_E, blocks_of
from helpers.kernels.matmul_persistent import sms
from helpers.triton_mode import gl, gluon, hopper, on_device_of, triton

mbarrier, tma = hopper.mbarrier, hopper.tma
# Of all partitions but the first, by the number of groups. What they leave of the registers is the
# first's.
WORKER_WARPS = {2: (4, 1), 3: (4, 4, 1)}
WORKER_REGISTERS = {2: (240, 40), 3: (160, 160, 32)}


@dataclasses.dataclass(frozen=True)
class HopperConfig:
    """How the Hopper kernel goes about it.

    groups: of four warps and 64 queries each, 2 or 3. tile_k: keys a step. slots: of tile_k keys or
    values in shared memory. turns: whether the groups take turns at asking for products. buffers: 2
    where the next queries have room beside these, else 1.
    """

    groups: int
    tile_k: int
    slots: int
    turns: bool
    buffers: int


@gluon.jit
def power_of_2(x):
    # PTX's own, without what denormals would need: the smallest terms are 0.
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


# fmt: off
@gluon.jit
def hide(s, first, last):
    LAYOUT: gl.constexpr = s.type.layout
    j = first + gl.arange(0, s.type.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    return gl.where(j[None, :] <= last[:, None], s, -float("inf"))


@gluon.jit
def weigh(s, m, l, scale):
    m_new = gl.maximum(m, gl.max(s, axis=1) * scale)
    shift = gl.where(m_new == -float("inf"), 0.0, m_new)  # -inf - (-inf) would be NaN
    p = power_of_2(s * scale - shift[:, None])
    rescale = power_of_2(m - shift)
    return p, m_new, l * rescale + gl.sum(p, axis=1), rescale


@gluon.jit
def attend(
    ME: gl.constexpr, q_matrix, o_matrix, lse_ptr, q_parts, o_parts, ring, barriers, sizes, scale,
    GROUPS: gl.constexpr, TILE_K: gl.constexpr, SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
    TAIL: gl.constexpr, TURNS: gl.constexpr, BUFFERS: gl.constexpr,
):
    DIM: gl.constexpr = q_matrix.block_type.shape[3]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_K, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROWS_AT_ONCE: gl.constexpr = GROUPS * ROWS
    ready, free, came, turn = barriers
    came, mine, next_turn = came.index(ME), turn.index(ME), turn.index((ME + 1) % GROUPS)
    o_part = o_parts.index(ME)
    zero = gl.zeros((ROWS, TILE_K), gl.float32, SCORES)
    number, programs = gl.program_id(0), gl.num_programs(0)
    pairs, queries, keys_in_all = sizes[2], sizes[3], sizes[4]
    total = pairs * gl.cdiv(queries, ROWS_AT_ONCE)
    count, turns, blocks = 0, 1 if ME == 0 else 0, 0  # the first turn is group 0's
    load_queries(ME, number, q_matrix, q_parts.index(ME * BUFFERS), came, sizes, GROUPS, CAUSAL)
    for number in range(gl.program_id(0), total, programs):
        batch, head, start, keys = block_of(number, sizes, ROWS_AT_ONCE, CAUSAL)
        steps, last = gl.cdiv(keys, TILE_K), keys_in_all - 1 + gl.zeros((ROWS,), gl.int32, ROW)
        masked = steps - keys_in_all // TILE_K
        if CAUSAL:
            start_mine = start + ME * ROWS
            last = gl.minimum(last, start_mine + gl.arange(0, ROWS, layout=ROW))
            masked = steps - gl.minimum(keys_in_all, start_mine + 1) // TILE_K
        m = gl.full((ROWS,), -float("inf"), gl.float32, ROW)
        l = gl.zeros((ROWS,), gl.float32, ROW)
        o = gl.zeros((ROWS, DIM), gl.float32, OUTPUT)

        mbarrier.wait(came, blocks & 1)
        q_part = q_parts.index(ME * BUFFERS + blocks % BUFFERS)
        q = q_part.reshape([ROWS, DIM])
        blocks += 1
        if BUFFERS == 2:
            q_next = q_parts.index(ME * BUFFERS + blocks % BUFFERS)
            load_queries(ME, number + programs, q_matrix, q_next, came, sizes, GROUPS, CAUSAL)
        if TURNS:
            mbarrier.wait(mine, turns & 1)
            turns += 1
        k = wait_for(ring, ready, count, SLOTS, TILE_K, DIM)
        s = hopper.warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        if TURNS:
            mbarrier.arrive(next_turn)
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(free.index(count % SLOTS))
        if CAUSAL or TAIL:
            s = hide(s, (steps - 1) * TILE_K, last)
        p, m, l, rescale = weigh(s, m, l, scale)
        p = gl.convert_layout(p.to(q.dtype), WEIGHTS)
        count += 1
        for step in range(1, steps):
            if TURNS:
                mbarrier.wait(mine, turns & 1)
                turns += 1
            k = wait_for(ring, ready, count, SLOTS, TILE_K, DIM)
            s = hopper.warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
            v = wait_for(ring, ready, count + 1, SLOTS, TILE_K, DIM)
            o = hopper.warpgroup_mma(p, v, o, is_async=True)
            if TURNS:
                mbarrier.arrive(next_turn)
            s = hopper.warpgroup_mma_wait(1, deps=[s])  # while o is on its way
            mbarrier.arrive(free.index(count % SLOTS))
            if CAUSAL and ROWS_AT_ONCE > TILE_K:  # else only the first tile was masked
                if step < masked:
                    s = hide(s, (steps - 1 - step) * TILE_K, last)
            p_next, m, l, rescale = weigh(s, m, l, scale)
            o = hopper.warpgroup_mma_wait(0, deps=[o])
            mbarrier.arrive(free.index((count + 1) % SLOTS))
            o = o * gl.convert_layout(rescale, gl.SliceLayout(1, OUTPUT))[:, None]
            p = gl.convert_layout(p_next.to(q.dtype), WEIGHTS)
            count += 2
        if BUFFERS == 1:  # these queries have been used
            load_queries(ME, number + programs, q_matrix, q_part, came, sizes, GROUPS, CAUSAL)
        v = wait_for(ring, ready, count, SLOTS, TILE_K, DIM)
        o = hopper.warpgroup_mma(p, v, o, is_async=True)
        o = hopper.warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(free.index(count % SLOTS))
        count += 1
        if lse_ptr is not None:  # all that the backward pass needs of the softmax
            i = start + ME * ROWS + gl.arange(0, ROWS, layout=ROW)
            lse = gl.where(l == 0, float("inf"), m + gl.log2(l))
            row = (batch * sizes[0] + head).to(gl.int64) * queries
            gl.store(lse_ptr + row + i, lse, mask=i < queries)
        l = gl.convert_layout(l, gl.SliceLayout(1, OUTPUT))
        o = o * (1.0 / gl.where(l == 0, 1.0, l))[:, None]
        tma.store_wait(0)  # until what was written before has been read
        o_part.reshape([ROWS, DIM]).store(o.to(q.dtype))
        hopper.fence_async_shared()
        tma.async_copy_shared_to_global(o_matrix, [batch, head, start + ME * ROWS, 0], o_part)
    tma.store_wait(0)


@gluon.jit
def attention_hopper_kernel(
    q_matrix, k_matrix, v_matrix, o_matrix, lse_ptr, sizes, scale, GROUPS: gl.constexpr,
    TILE_K: gl.constexpr, SLOTS: gl.constexpr, CAUSAL: gl.constexpr, TAIL: gl.constexpr,
    TURNS: gl.constexpr, BUFFERS: gl.constexpr, WARPS: gl.constexpr, REGISTERS: gl.constexpr,
):
    q_shape: gl.constexpr = [GROUPS * BUFFERS] + q_matrix.block_type.shape
    o_shape: gl.constexpr = [GROUPS] + o_matrix.block_type.shape
    k_shape: gl.constexpr = [SLOTS] + k_matrix.block_type.shape
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_parts = gl.allocate_shared_memory(q_matrix.dtype, q_shape, q_matrix.layout)
    o_parts = gl.allocate_shared_memory(o_matrix.dtype, o_shape, o_matrix.layout)
    ring = gl.allocate_shared_memory(k_matrix.dtype, k_shape, k_matrix.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    came = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    turn = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], BARRIER)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=GROUPS)
    for group in gl.static_range(GROUPS):
        mbarrier.init(came.index(group), count=1)
        mbarrier.init(turn.index(group), count=1)
    hopper.fence_async_shared()
    barriers = ready, free, came, turn
    if GROUPS == 2:
        gl.warp_specialize([
            (attend, (0, q_matrix, o_matrix, lse_ptr, q_parts, o_parts, ring, barriers, sizes,
                      scale, GROUPS, TILE_K, SLOTS, CAUSAL, TAIL, TURNS, BUFFERS)),
            (attend, (1, q_matrix, o_matrix, lse_ptr, q_parts, o_parts, ring, barriers, sizes,
                      scale, GROUPS, TILE_K, SLOTS, CAUSAL, TAIL, TURNS, BUFFERS)),
            (load, (k_matrix, v_matrix, ring, barriers, sizes, GROUPS, TILE_K, SLOTS, CAUSAL)),
        ], WARPS, REGISTERS)
    else:
        gl.warp_specialize([
            (attend, (0, q_matrix, o_matrix, lse_ptr, q_parts, o_parts, ring, barriers, sizes,
                      scale, GROUPS, TILE_K, SLOTS, CAUSAL, TAIL, TURNS, BUFFERS)),
            (attend, (1, q_matrix, o_matrix, lse_ptr, q_parts, o_parts, ring, barriers, sizes,
                      scale, GROUPS, TILE_K, SLOTS, CAUSAL, TAIL, TURNS, BUFFERS)),
            (attend, (2, q_matrix, o_matrix, lse_ptr, q_parts, o_parts, ring, barriers, sizes,
                      scale, GROUPS, TILE_K, SLOTS, CAUSAL, TAIL, TURNS, BUFFERS)),
            (load, (k_matrix, v_matrix, ring, barriers, sizes, GROUPS, TILE_K, SLOTS, CAUSAL)),
        ], WARPS, REGISTERS)
# fmt: on


def launch_hopper(q, k, v, o, config: HopperConfig, causal=False, scale=1.0, section=1, lse=None):
    """As `attention_tiles.launch_tiles`, in 16 bits, for tensors of which `has_descriptor` holds.

    On a GPU of compute capability 9.0. section: see `attention_deal.section`.
    """
    with on_device_of(q):
        width = max(64, triton.next_power_of_2(q.shape[3]))
        (batch, heads, queries, _), keys = q.shape, k.shape[2]
        blocks = blocks_of(q, config.groups * 64)
        sizes = (heads, heads // k.shape[1], batch * heads, queries, keys, section)
        return attention_hopper_kernel[(min(blocks, sms(q.device)),)](
            *(descriptor(q, width), descriptor(k, width, config.tile_k)),
            *(descriptor(v, width, config.tile_k), descriptor(o, width)),
            *(lse, sizes, scale * LOG2_E, config.groups, config.tile_k, config.slots),
            *(causal, keys % config.tile_k > 0, config.turns, config.buffers),
            *(WORKER_WARPS[config.groups], WORKER_REGISTERS[config.groups]),
            num_warps=4,
        )


def descriptor(x: torch.Tensor, columns: int, rows: int = 64):
    """What the TMA needs to copy tiles of x (batch, heads, sequence, dim): 16 bits, or fp32."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    strides = [1 << 4 if n == 1 else s for s, n in zip(x.stride(), x.shape, strict=True)]
    strides[3] = 1
    block = [1, 1, rows, columns]
    return TensorDescriptor(x, list(x.shape), strides, block, _layout(x.itemsize, *block))


@functools.cache
def _layout(itemsize: int, *block: int):
    dtype = gl.float32 if itemsize == 4 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(block), dtype)
