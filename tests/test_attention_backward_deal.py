"""Who adds to attention's dQ on Hopper, and in which order: the kernel's functions as plain Python.

Each must come by once, and nobody may wait for one who waits for it.
"""

import random
import types
from collections import Counter, defaultdict

import pytest

from helpers.device import triton_version
from helpers.kernels import attention_backward_deal
from tests.test_softmax_mutants import changed, each_of

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")
TILE_Q, KEYS = 64, attention_backward_deal.KEYS.value if triton_version() else 128
NAMES = ("items_of_head", "blocks_of_item", "block_and_steps", "round_of", "tile_at")
NAMES += ("adders_before",)


class Deal:
    """A module's functions for one launch; batch, kv_heads: as many, of `group` heads each."""

    def __init__(self, module, batch, kv_heads, group, queries, keys, programs, causal):
        self.batch, self.kv_heads, self.group, self.causal = batch, kv_heads, group, causal
        self.tiles, self.blocks = -(-queries // TILE_Q), -(-keys // KEYS)
        items = -(-self.blocks // 2) if causal else self.blocks
        self.total = batch * kv_heads * items
        self.programs = min(programs, self.total)
        shift = module.shift_of(queries, keys, self.programs)
        self.sizes = (kv_heads * group, group, batch * kv_heads, queries, keys, shift)
        self.possible = causal or shift > 0
        gl = types.SimpleNamespace(maximum=max, minimum=min, cdiv=lambda a, b: -(-a // b))
        gl.where, gl.num_programs = lambda a, b, c: b if a else c, lambda axis: self.programs
        space = {"gl": gl, "KEYS": KEYS}
        for name in NAMES:
            space[name] = types.FunctionType(getattr(module, name).fn.__code__, space)
        self.call = types.SimpleNamespace(**space)

    def visits(self, program: int) -> list[tuple]:
        """What a program adds to (batch, head, tile), as which, and of which block of keys."""
        call, sizes, causal = self.call, self.sizes, self.causal
        found = []
        for number in range(program, self.total, self.programs):
            batch, kv_head, item, blocks = call.blocks_of_item(number, sizes, causal)
            first, last = call.round_of(number, item, sizes, causal)
            for back in range(blocks):
                block, steps = call.block_and_steps(item, back, sizes, TILE_Q, causal)
                for g in range(self.group):
                    for step in range(steps):
                        tile = call.tile_at(step, item, first, block, back, sizes, TILE_Q, causal)
                        rank = call.adders_before(
                            tile, g, item, back, first, last, sizes, TILE_Q, causal
                        )
                        found.append(((batch, kv_head * self.group + g, tile), rank, block))
        return found

    def expected(self) -> Counter:
        """Each tile of queries, and each block of keys that it sees any of."""
        return Counter(
            ((batch, head, tile), block)
            for batch in range(self.batch)
            for head in range(self.kv_heads * self.group)
            for tile in range(self.tiles)
            for block in range(self.blocks)
            if not self.causal or block * KEYS < (tile + 1) * TILE_Q
        )


def check(deal: Deal) -> tuple[int, int]:
    """The longest program's steps; and when the last ends, if all begin at 0 and a step takes 1."""
    visits = [deal.visits(program) for program in range(deal.programs)]
    assert Counter((at, block) for one in visits for at, _, block in one) == deal.expected()
    ranks = defaultdict(list)
    for at, rank, _ in (visit for one in visits for visit in one):
        ranks[at].append(rank)
    assert all(sorted(found) == [*range(len(found))] for found in ranks.values())
    done, ended, last = [0] * deal.programs, [0] * deal.programs, defaultdict(lambda: (0, 0))
    moved = True
    while moved:  # each goes on until it has to wait for another's addition
        moved = False
        for program, own in enumerate(visits):
            while done[program] < len(own):
                at, rank, _ = own[done[program]]
                added, when = last[at]
                if added != rank:
                    break
                ended[program] = max(ended[program], when) + 1
                last[at] = added + 1, ended[program]
                done[program] += 1
                moved = True
    steps = [*map(len, visits)]
    assert done == steps, "all wait"
    return max(steps), max(ended)


def some(causal: bool, number: int) -> list[tuple]:
    """Arguments of a `Deal`: odd sizes, several rounds, more programs than items."""
    draw = random.Random(number)
    found = [
        (draw.randint(1, 2), draw.randint(1, 3), draw.randint(1, 3))
        + (draw.randint(1, 700), draw.randint(1, 1000), draw.randint(1, 9), causal)
        for _ in range(number)
    ]
    return [*found, (1, 2, 1, 1, 1, 132, causal), (1, 1, 2, 100, 1500, 4, causal)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_each_adds_once_and_nobody_waits_forever(causal):
    deals = [Deal(attention_backward_deal, *each) for each in some(causal, 200)]
    possible = [deal for deal in deals if deal.possible]
    assert len(possible) > 50
    for deal in possible:
        check(deal)


def punctual(module) -> None:
    """Where all items of a round are equally long, nobody waits at all."""
    for sizes in (
        *((1, 2, 1, 512, 512, 4, False), (1, 1, 2, 1024, 500, 3, False)),
        *((2, 1, 1, 1024, 1024, 4, True), (1, 2, 4, 768, 768, 3, True)),
        (1, 4, 1, 768, 768, 5, True),
    ):
        steps, end = check(Deal(module, *sizes))
        assert end == steps, f"{sizes}: {end - steps} steps are waited"


def test_nobody_waits_where_all_steps_take_equally_long():
    punctual(attention_backward_deal)


MUTANTS = {
    "items": {
        "batch and head exchanged": (
            "return pair // (heads // group), pair % (heads // group)",
            "return pair % (heads // group), pair // (heads // group)",
        ),
        "the block in the middle twice": ("2 * item + 1 ==", "2 * item =="),
        "a block is a tile": ("tiles - block * (KEYS // TILE_Q), 0", "tiles - block, 0"),
        "all begin at the first": ("* sizes[5] + step", "* 0 + step"),
        "back blocks from the front": ("tiles - 1 - step)", "block * (KEYS // TILE_Q) + step)"),
        "rounds from the head's first": ("gl.maximum(begin - head, 0)", "0 * begin"),
        "a round too long": ("begin + programs - head", "begin + programs + 1 - head"),
        "a shift too far": ("return -(-queries // 64)", "return -(-queries // 32)"),
    },
    "order": {
        "earlier rounds forgotten": ("return first + (latest", "return (latest"),
        "not round": ("(latest + count - (item - first)) % count", "item - first"),
        "more than there are": ("gl.minimum(tile // shift, count - 1)", "tile // shift"),
        "backs that see nothing": ("gl.maximum(first - unseen, 0)", "first"),
        "fronts that see nothing": ("gl.minimum(last, seen)", "last"),
        "the middle has no back": ("gl.minimum(last, blocks // 2 - 1)", "last"),
        "both first": ("wait // back_each + 1)", "wait // back_each)"),
        "backs always later": ("gl.where(wait < 0, 0, wait // back_each + 1)", "blocks"),
        "fronts of earlier rounds": ("gl.maximum(first, since)", "since"),
        "fronts without heads": ("ratio * (g + 1)", "ratio"),
        "the back's steps forgotten": ("+ g * back_steps - 1", "- 1"),
    },
}


@pytest.mark.parametrize("kind, old, new", each_of(MUTANTS))
def test_a_mutant_is_noticed(tmp_path, kind, old, new):
    found = changed(tmp_path, attention_backward_deal, old, new, (attention_backward_deal,))
    module = found["attention_backward_deal"]
    with pytest.raises((AssertionError, ZeroDivisionError)):
        for each in some(False, 20) + some(True, 30):
            deal = Deal(module, *each)
            if deal.possible:
                check(deal)
        punctual(module)
