"""Who computes what in attention's backward pass on Hopper, and in which order dQ is added up.

An item is a block of 128 keys of one kv head; causal, where the first keys are seen by most
queries, two blocks, the p-th from the front and then the p-th from the back, so that all items are
equally long. Programs take items in rounds. Every item adds to the dQ of many tiles of queries, and
so that the sum is the same bits each time, each tile has its order: that in which the items of a
round would come by if all began together and all steps took equally long. Nobody waits then, as
items begin at different tiles: without a mask the x-th of a head's items in this round begins at
tile x shift, and comes round; causal, front blocks go from their first tile to the last, back
blocks from the last to their first. Items of an earlier round come before.

Shifted starts are described by Qiang et al., "DASH: Deterministic Attention Scheduling for
High-throughput Reproducible LLM Training" (2026).
"""

import helpers.device  # noqa: F401  sets Triton's mode before anything loads Triton

# isort: split
from helpers.triton_mode import gl, gluon

KEYS = gl.constexpr(128)  # of a block


# fmt: off
@gluon.jit
def items_of_head(sizes, CAUSAL: gl.constexpr):
    blocks = gl.cdiv(sizes[4], KEYS)
    return gl.cdiv(blocks, 2) if CAUSAL else blocks


@gluon.jit
def blocks_of_item(number, sizes, CAUSAL: gl.constexpr):
    """Batch, kv head, which of the head's items this is, and how many blocks it has: 1 or 2."""
    heads, group, pairs, queries, keys, shift = sizes
    items = items_of_head(sizes, CAUSAL)
    pair, item = number // items, number % items
    blocks = 1
    if CAUSAL:
        blocks = gl.where(2 * item + 1 == gl.cdiv(keys, KEYS), 1, 2)
    return pair // (heads // group), pair % (heads // group), item, blocks


@gluon.jit
def block_and_steps(item, back, sizes, TILE_Q: gl.constexpr, CAUSAL: gl.constexpr):
    """The item's front or back block, and how many tiles of one head's queries see any of it."""
    tiles = gl.cdiv(sizes[3], TILE_Q)
    block = item
    if CAUSAL:
        block = gl.where(back == 0, item, gl.cdiv(sizes[4], KEYS) - 1 - item)
        tiles = gl.maximum(tiles - block * (KEYS // TILE_Q), 0)
    return block, tiles


@gluon.jit
def round_of(number, item, sizes, CAUSAL: gl.constexpr):
    """The first and last of this head's items that are computed in the same round."""
    programs = gl.num_programs(0)
    head, begin = number - item, number // programs * programs
    first = gl.maximum(begin - head, 0)
    last = gl.minimum(begin + programs - head, items_of_head(sizes, CAUSAL)) - 1
    return first, last


@gluon.jit
def tile_at(step, item, first, block, back, sizes, TILE_Q: gl.constexpr, CAUSAL: gl.constexpr):
    """The tile of queries that an item visits at a step of one head."""
    tiles = gl.cdiv(sizes[3], TILE_Q)
    if CAUSAL:
        return gl.where(back == 0, block * (KEYS // TILE_Q) + step, tiles - 1 - step)
    return ((item - first) * sizes[5] + step) % tiles


@gluon.jit
def adders_before(tile, g, item, back, first, last, sizes, TILE_Q: gl.constexpr,
                  CAUSAL: gl.constexpr):
    """How many items add to a tile's dQ before this one does. g: the head's number in its group."""
    heads, group, pairs, queries, keys, shift = sizes
    if not CAUSAL:
        count = last - first + 1
        latest = gl.minimum(tile // shift, count - 1)  # of those that began at this tile or before
        return first + (latest + count - (item - first)) % count
    tiles, blocks, ratio = gl.cdiv(queries, TILE_Q), gl.cdiv(keys, KEYS), KEYS // TILE_Q
    # Front blocks of items up to `seen` are visible in this tile, back ones from `unseen` on.
    seen, unseen = tile // ratio, gl.maximum(blocks - 1 - tile // ratio, 0)
    earlier = first + gl.maximum(first - unseen, 0)  # front blocks of all, back ones of some
    # The step of item x's front block at this tile is front - x front_each; likewise its back's.
    front, front_each = g * tiles + tile, ratio * (g + 1)
    back_steps = tiles - ratio * (blocks - 1)
    back_step, back_each = (group + 1) * tiles + g * back_steps - 1 - tile, ratio * (group - g)
    from_back, to_back = gl.maximum(first, unseen), gl.minimum(last, blocks // 2 - 1)
    to_front = gl.minimum(last, seen)
    if back == 0:
        wait = gl.maximum(back_step - (front - item * front_each), -1)
        since = gl.where(wait < 0, 0, wait // back_each + 1)
        before = to_front - item + gl.maximum(to_back - gl.maximum(from_back, since) + 1, 0)
    else:
        wait = gl.maximum(front - (back_step - item * back_each), 0)
        since = (wait + front_each - 1) // front_each
        before = to_back - item + gl.maximum(to_front - gl.maximum(first, since) + 1, 0)
    return earlier + before
# fmt: on


def shift_of(queries: int, keys: int, programs: int) -> int:
    """By how many tiles of 64 queries neighbouring items begin apart, without a mask.

    0: there are fewer tiles than items that run at the same time, and some would begin at the same.
    """
    return -(-queries // 64) // min(-(-keys // KEYS.value), programs)
