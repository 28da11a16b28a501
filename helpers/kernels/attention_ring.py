"""How queries, keys and values come to the groups of warps of `attention_hopper`.

One warp loads keys and values into a ring of slots in shared memory, in the order in which they are
used: K0 K1 V0 K2 V1 ... Barriers say that a slot is ready, that all groups are done with it, that a
group's queries have come, and whose turn it is; see `matmul_pingpong` for their phases.
"""

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
from helpers.kernels.attention_deal import block_of
from helpers.triton_mode import gl, gluon, hopper

mbarrier, tma = hopper.mbarrier, hopper.tma
ROWS = gl.constexpr(64)  # queries of a group: those of one wgmma


# fmt: off
@gluon.jit
def load_slot(matrix, batch, head, first, ring, ready, free, count, SLOTS: gl.constexpr):
    slot = count % SLOTS
    # The phase before the first counts as over: at first all slots are free.
    mbarrier.wait(free.index(slot), (count // SLOTS & 1) ^ 1)
    mbarrier.expect(ready.index(slot), matrix.block_type.nbytes)
    at = [batch, head, first, 0]
    tma.async_copy_global_to_shared(matrix, at, ready.index(slot), ring.index(slot))


@gluon.jit
def load(
    k_matrix, v_matrix, ring, barriers, sizes, GROUPS: gl.constexpr, TILE_K: gl.constexpr,
    SLOTS: gl.constexpr, CAUSAL: gl.constexpr,
):
    ready, free, came, turn = barriers
    ROWS_AT_ONCE: gl.constexpr = GROUPS * ROWS
    count = 0
    group, pairs, queries = sizes[1], sizes[2], sizes[3]
    total = pairs * gl.cdiv(queries, ROWS_AT_ONCE)
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        batch, head, start, keys = block_of(number, sizes, ROWS_AT_ONCE, CAUSAL)
        head //= group
        steps = gl.cdiv(keys, TILE_K)
        for step in range(steps + 1):
            first = (steps - 1 - step) * TILE_K
            if step < steps:
                load_slot(k_matrix, batch, head, first, ring, ready, free, count, SLOTS)
                count += 1
            if step > 0:
                load_slot(v_matrix, batch, head, first + TILE_K, ring, ready, free, count, SLOTS)
                count += 1


@gluon.jit
def load_queries(
    ME: gl.constexpr, number, q_matrix, q_part, came, sizes, GROUPS: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    # Those of a group in a block, if there is one of this number.
    pairs, queries = sizes[2], sizes[3]
    if number < pairs * gl.cdiv(queries, GROUPS * ROWS):
        batch, head, start, keys = block_of(number, sizes, GROUPS * ROWS, CAUSAL)
        mbarrier.expect(came, q_matrix.block_type.nbytes)
        at = [batch, head, start + ME * ROWS, 0]
        tma.async_copy_global_to_shared(q_matrix, at, came, q_part)


@gluon.jit
def wait_for(ring, ready, count, SLOTS: gl.constexpr, TILE_K: gl.constexpr, DIM: gl.constexpr):
    mbarrier.wait(ready.index(count % SLOTS), count // SLOTS & 1)
    return ring.index(count % SLOTS).reshape([TILE_K, DIM])
# fmt: on
