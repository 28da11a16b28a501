"""C = A B for Hopper, in Gluon: two groups of warps take turns at the tensor cores.

A third one loads. While one group multiplies, the other writes the tile that it has finished and
computes its activation: in `matmul_persistent`, whose warps do all of it one after the other, the
tensor cores wait meanwhile. CUTLASS calls this ping-pong.

Operands go through a ring of slots in shared memory, in the order in which they are multiplied.
Barriers in shared memory say that a slot is ready (its bytes have come), that it is free (its
product has been computed), and whose turn it is. Each counts phases, and a wait is for the phase's
parity, so nobody may be two phases ahead: a group that waited for its slots before its turn would
take an old phase for its own.
"""

import functools

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
import torch

from helpers.kernels.matmul_persistent import described, sms
from helpers.kernels.matmul_tiles import Config, tile_of
from helpers.triton_mode import gl, gluon, hopper, on_device_of

mbarrier, tma = hopper.mbarrier, hopper.tma
# Registers of the second group that multiplies and of the one that loads; what they leave is the
# first group's.
WORKER_WARPS, WORKER_REGISTERS = (4, 1), (232, 40)


@gluon.jit
def activate(c, ACTIVATION: gl.constexpr):
    # As helpers.kernels.matmul_tiles has it, in seven instructions in place of twelve: PTX's own
    # reciprocal and power of 2, without what denormals would need. On an H200 gelu(a @ b) of
    # 8192 x 8192 gained 5% at K = 512 and 2% at 2048.
    if ACTIVATION == "gelu":
        t = c * (-2.302208198 - 0.1029432396 * c * c)
        power = gl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [t], gl.float32, True, 1
        )
        part = gl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + power], gl.float32, True, 1
        )
        c = c * part
    return c


@gluon.jit
def load(
    a_matrix,
    b_matrix,
    a_ring,
    b_ring,
    ready,
    free,
    rows,
    columns,
    steps,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    TILE_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    A_COLUMNS: gl.constexpr,
    B_COLUMNS: gl.constexpr,
):
    count = 0
    for tile in range(gl.program_id(0), rows * columns, gl.num_programs(0)):
        row, column = tile_of(tile, rows, columns, GROUP)
        i, j = row * TILE_M, column * TILE_N
        for step in range(steps):
            at, slot = step * TILE_K, count % STAGES
            # The phase before the first counts as over: at first all slots are free.
            mbarrier.wait(free.index(slot), (count // STAGES & 1) ^ 1)
            came = ready.index(slot)
            mbarrier.expect(came, a_matrix.block_type.nbytes + b_matrix.block_type.nbytes)
            a_at = [at, i] if A_COLUMNS else [i, at]
            b_at = [j, at] if B_COLUMNS else [at, j]
            tma.async_copy_global_to_shared(a_matrix, a_at, came, a_ring.index(slot))
            tma.async_copy_global_to_shared(b_matrix, b_at, came, b_ring.index(slot))
            count += 1


@gluon.jit
def multiply(
    ME: gl.constexpr,
    a_ring,
    b_ring,
    c_matrix,
    c_part,
    ready,
    free,
    turn,
    rows,
    columns,
    steps,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    A_COLUMNS: gl.constexpr,
    B_COLUMNS: gl.constexpr,
    ACTIVATION: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE_N, 16]
    )
    count, turns = ME * steps, 0
    programs = gl.num_programs(0)
    for tile in range(gl.program_id(0) + ME * programs, rows * columns, 2 * programs):
        row, column = tile_of(tile, rows, columns, GROUP)
        c = gl.zeros((TILE_M, TILE_N), gl.float32, layout)
        mbarrier.wait(turn.index(ME), (turns & 1) ^ (1 - ME))  # the first turn is group 0's
        turns += 1
        for step in range(steps):
            slot = count % STAGES
            mbarrier.wait(ready.index(slot), count // STAGES & 1)
            a, b = a_ring.index(slot), b_ring.index(slot)
            a = a.permute((1, 0)) if A_COLUMNS else a
            b = b.permute((1, 0)) if B_COLUMNS else b
            c = hopper.warpgroup_mma(a, b, c, is_async=True)
            c = hopper.warpgroup_mma_wait(1, deps=[c])  # for the product before this one
            mbarrier.arrive(free.index((count + STAGES - 1) % STAGES), pred=step > 0)
            count += 1
        mbarrier.arrive(turn.index(1 - ME))
        c = hopper.warpgroup_mma_wait(0, deps=[c])
        mbarrier.arrive(free.index((count + STAGES - 1) % STAGES))
        count += steps  # the other group's
        # In halves: the second is computed while the first is written.
        halves = c.reshape([TILE_M, 2, TILE_N // 2]).permute((0, 2, 1)).split()
        for half in gl.static_range(2):
            y = activate(halves[half], ACTIVATION).to(c_matrix.dtype)
            tma.store_wait(0)  # until what was written before has been read
            c_part.store(y)
            hopper.fence_async_shared()
            at = [row * TILE_M, column * TILE_N + half * (TILE_N // 2)]
            tma.async_copy_shared_to_global(c_matrix, at, c_part)
    tma.store_wait(0)


@gluon.jit
def matmul_pingpong_kernel(
    a_matrix,
    b_matrix,
    c_matrix,
    m,
    n,
    k,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    TILE_K: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    A_COLUMNS: gl.constexpr,
    B_COLUMNS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    WORKER_WARPS: gl.constexpr,
    WORKER_REGISTERS: gl.constexpr,
):
    rows, columns, steps = gl.cdiv(m, TILE_M), gl.cdiv(n, TILE_N), gl.cdiv(k, TILE_K)
    a_shape: gl.constexpr = [STAGES] + a_matrix.block_type.shape
    b_shape: gl.constexpr = [STAGES] + b_matrix.block_type.shape
    c_shape: gl.constexpr = [2] + c_matrix.block_type.shape
    a_ring = gl.allocate_shared_memory(a_matrix.dtype, a_shape, a_matrix.layout)
    b_ring = gl.allocate_shared_memory(b_matrix.dtype, b_shape, b_matrix.layout)
    c_parts = gl.allocate_shared_memory(c_matrix.dtype, c_shape, c_matrix.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    for group in gl.static_range(2):
        mbarrier.init(turn.index(group), count=1)
    hopper.fence_async_shared()
    # An argument a line would hide that the two groups differ in a number:
    # fmt: off
    gl.warp_specialize([
        (multiply, (0, a_ring, b_ring, c_matrix, c_parts.index(0), ready, free, turn, rows, columns,
                    steps, TILE_M, TILE_N, GROUP, STAGES, A_COLUMNS, B_COLUMNS, ACTIVATION)),
        (multiply, (1, a_ring, b_ring, c_matrix, c_parts.index(1), ready, free, turn, rows, columns,
                    steps, TILE_M, TILE_N, GROUP, STAGES, A_COLUMNS, B_COLUMNS, ACTIVATION)),
        (load, (a_matrix, b_matrix, a_ring, b_ring, ready, free, rows, columns,
                steps, TILE_M, TILE_N, TILE_K, GROUP, STAGES, A_COLUMNS, B_COLUMNS)),
    ], WORKER_WARPS, WORKER_REGISTERS)
    # fmt: on


def launch_pingpong(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    config: Config,
    activation: str | None = None,
):
    """As `launch_persistent`, on a GPU of compute capability 9.0 only.

    config: tiles of at most 128 x 128 elements, which are 128 registers for each of a group's 128
    threads, and of 64 rows or 128; 4 warps, those of the first group.
    """
    with on_device_of(a):
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        def make(x, shape, strides, block):
            return TensorDescriptor(x, shape, strides, block, _layout(*block, x.dtype))

        matrices, columns, tiles = described(a, b, c, config, make, config.tile_n // 2)
        return matmul_pingpong_kernel[(min(tiles, sms(a.device)),)](
            *matrices,
            *(config.tile_m, config.tile_n, config.tile_k, config.group, config.stages),
            *(*columns, activation, WORKER_WARPS, WORKER_REGISTERS),
            num_warps=config.warps,
        )


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype):
    element = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)
