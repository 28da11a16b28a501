"""Tiles and bytes of attention, against loops that count what they touch, pair by pair."""

import itertools
import math

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from helpers import attention_io, attention_plot, traffic, waves
from helpers.attention_io import (
    FULL,
    MASKED,
    SKIPPED,
    dram_bytes,
    key_outer,
    key_outer_backward,
    keys_read,
    paper_tiles,
    query_outer,
    tile_kinds,
)

F16, F32 = torch.float16, torch.float32
SIZES = ((1, 1), (1, 20), (20, 1), (7, 7), (16, 16), (17, 33), (33, 17), (40, 24))
TILES = ((1, 1), (4, 4), (8, 4), (4, 8), (5, 3), (16, 16), (64, 16), (16, 64))


def kinds_by_pairs(sequence_q, sequence_k, tile_q, tile_k, causal):
    """Every pair of a query and a place for a key is looked at."""
    kinds = []
    for i in range(0, sequence_q, tile_q):
        kinds.append([])
        for j in range(0, sequence_k, tile_k):
            rows = range(i, min(i + tile_q, sequence_q))
            pairs = itertools.product(rows, range(j, j + tile_k))
            seen = [key < sequence_k and (key <= row or not causal) for row, key in pairs]
            kinds[-1].append(FULL if all(seen) else MASKED if any(seen) else SKIPPED)
    return kinds


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("sizes", SIZES)
def test_kinds_are_those_of_the_mask(sizes, tiles, causal):
    expected = kinds_by_pairs(*sizes, *tiles, causal)
    assert tile_kinds(*sizes, *tiles, causal).tolist() == expected
    seen = [
        sum(
            min(tiles[1], sizes[1] - column * tiles[1])
            for column, kind in enumerate(row)
            if kind != SKIPPED
        )
        for row in expected
    ]
    assert keys_read(*sizes, *tiles, causal).tolist() == seen


def test_a_causal_picture_by_hand():
    assert tile_kinds(4, 4, 2, 2).tolist() == [[MASKED, SKIPPED], [FULL, MASKED]]
    assert tile_kinds(2, 6, 2, 2).tolist() == [[MASKED, SKIPPED, SKIPPED]]
    assert tile_kinds(6, 2, 2, 2).tolist() == [[MASKED], [FULL], [FULL]]
    assert tile_kinds(5, 5, 4, 4, causal=False).tolist() == [[FULL, MASKED]] * 2


class Memory:
    """Tensors outside the chip; it counts the bytes that come and go."""

    def __init__(self):
        self.read = self.written = 0

    def load(self, x):
        self.read += x.nbytes
        return x.clone()

    def store(self, at, x):
        self.written += at.nbytes
        at.copy_(x)


def spans(sequence, tile):
    return [slice(i, min(i + tile, sequence)) for i in range(0, sequence, tile)]


def scores(q, k, rows, keys, causal):
    s = q.double() @ k.double().T
    if causal:
        hidden = torch.arange(keys.start, keys.stop) > torch.arange(rows.start, rows.stop)[:, None]
        s = s.masked_fill(hidden, -math.inf)
    return s


def step(s, v, m, ell, o):
    """One tile: new m, l and o, which is kept divided by l, as in FlashAttention-1."""
    new_m = torch.maximum(m.double(), s.amax(1))
    shift = torch.where(new_m == -math.inf, 0, new_m)
    old, p = ell * torch.exp(m - shift), torch.exp(s - shift[:, None])
    new_l = old + p.sum(1)
    mixed = o.double() * old[:, None] + p @ v.double()
    return new_m, new_l, mixed / torch.where(new_l == 0, 1, new_l)[:, None]


def by_keys(memory, q, k, v, tile_q, tile_k, causal):
    n, o = len(q), torch.empty_like(q)
    m, ell = torch.empty(n, dtype=F32), torch.empty(n, dtype=F32)
    for tensor, value in ((o, 0.0), (ell, 0.0), (m, -math.inf)):
        memory.store(tensor, torch.full_like(tensor, value))
    for keys in spans(n, tile_k):
        k_tile, v_tile = memory.load(k[keys]), memory.load(v[keys])
        for rows in spans(n, tile_q):
            if causal and keys.start >= rows.stop:
                continue
            q_tile = memory.load(q[rows])
            state = [memory.load(x[rows]) for x in (m, ell, o)]
            s = scores(q_tile, k_tile, rows, keys, causal)
            for x, new in zip((m, ell, o), step(s, v_tile, *state), strict=True):
                memory.store(x[rows], new)
    return o


def by_queries(memory, q, k, v, tile_q, tile_k, causal):
    n, o, log_sum = len(q), torch.empty_like(q), torch.empty(len(q), dtype=F32)
    for rows in spans(n, tile_q):
        q_tile = memory.load(q[rows])
        state = (torch.full((len(q_tile),), -math.inf), torch.zeros(len(q_tile)), q_tile * 0)
        for keys in spans(n, tile_k):
            if not causal or keys.start < rows.stop:
                k_tile, v_tile = memory.load(k[keys]), memory.load(v[keys])
                state = step(scores(q_tile, k_tile, rows, keys, causal), v_tile, *state)
        memory.store(o[rows], state[2])
        memory.store(log_sum[rows], state[0] + state[1].log())
    return o


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [F16, F32])
@pytest.mark.parametrize(
    ("n", "dim", "tile_q", "tile_k"), [(12, 4, 4, 3), (13, 4, 3, 5), (8, 6, 8, 8), (5, 2, 8, 2)]
)
@pytest.mark.parametrize(("loop", "model"), [(by_keys, key_outer), (by_queries, query_outer)])
def test_bytes_are_those_that_a_loop_touches(loop, model, n, dim, tile_q, tile_k, dtype, causal):
    generator = torch.Generator().manual_seed(n)
    q, k, v = (torch.randn(n, dim, generator=generator).to(dtype) for _ in range(3))
    memory = Memory()
    o = loop(memory, q, k, v, tile_q, tile_k, causal)
    whole = slice(0, n)
    exact = torch.softmax(scores(q, k, whole, whole, causal), dim=1) @ v.double()
    assert torch.allclose(o.double(), exact, rtol=0, atol=5e-3 if dtype is F16 else 1e-5)
    work = model(1, 1, n, dim, dtype, tile_q, tile_k, causal)
    assert (work.bytes_read, work.bytes_written) == (memory.read, memory.written)
    pairs = sum(
        (rows.stop - rows.start) * (keys.stop - keys.start)
        for rows in spans(n, tile_q)
        for keys in spans(n, tile_k)
        if not causal or keys.start < rows.stop
    )
    assert work.flops == 2 * 2 * pairs * dim
    many = model(3, 5, n, dim, dtype, tile_q, tile_k, causal)
    assert (many.bytes, many.flops) == (15 * work.bytes, 15 * work.flops)


def test_one_tile_of_queries_is_the_least():
    least = traffic.attention(2, 3, 100, 64, F16)
    assert query_outer(2, 3, 100, 64, F16, 128, 32) == least
    assert query_outer(2, 3, 100, 64, F16, 99, 32).bytes > least.bytes
    # Alone, a second tile of keys brings Q and O again.
    rows = 6 * 100
    one, two = (key_outer(2, 3, 100, 64, F16, 50, tile) for tile in (100, 50))
    assert two.bytes - one.bytes == rows * (3 * 64 * 2 + 2 * 2 * 4)


def test_backward_by_hand():
    """Three tiles of keys: 2 + 4 x 3 tensors read, 3 + 3 + 2 written, m and l three times."""
    tensor, state = 2 * 3 * 96 * 64 * 2, 2 * 3 * 96 * 2 * 4
    work = key_outer_backward(2, 3, 96, 64, F16, 16, 32)
    assert work.bytes_read == 14 * tensor + 3 * state
    assert work.bytes_written == 8 * tensor
    assert work.flops == traffic.attention_backward(2, 3, 96, 64, F16).flops


def test_the_papers_configuration():
    assert paper_tiles(192 * 1024, 64, F16) == (64, 384)
    assert paper_tiles(192 * 1024, 128, F16) == (128, 192)
    assert paper_tiles(1000, 64, F16) == (2, 2)  # 500 elements / 256, rounded up
    case = (64, 16, 1024, 64, F16, *paper_tiles(192 * 1024, 64, F16))
    both = key_outer(*case) + key_outer_backward(*case)
    assert both.bytes / 1e9 == pytest.approx(4.4, rel=0.1)  # slide 46: 4.4 GB


def test_dram_bytes_of_a_large_cache_are_the_least():
    case = (2, 4, 1000, 64, F16)
    for causal in (False, True):
        least = traffic.attention(*case, causal=causal).bytes_read
        room = dict(l2_bytes=1e9, programs=8, causal=causal)
        assert dram_bytes(*case, 128, 64, **room) == least
        nothing = dict(l2_bytes=0, programs=8, causal=causal)
        # Eight programs are the eight tiles of a head: together they read K and V once.
        assert dram_bytes(*case, 128, 64, **nothing) == least
        alone = dram_bytes(*case, 128, 64, **nothing, in_step=False)
        assert alone == query_outer(*case, 128, 64, causal).bytes_read


def test_dram_bytes_grow_with_what_does_not_fit():
    # K and V of one head: 2 x 1024 x 64 x 2 bytes = 256 KB; 16 tiles of queries, 4 at once.
    case, kv = (1, 3, 1024, 64, F16, 64, 64), 2**18
    found = [
        dram_bytes(*case, l2_bytes=share * kv, programs=4) - 3 * kv / 2
        for share in (2, 1, 0.75, 0.5, 0)
    ]
    assert found == [3 * kv * (1 + 3 * missing) for missing in (0, 0, 0.25, 0.5, 1)]
    # Twice the programs of a head: two heads at once, whose K and V need twice the room.
    fits, half = (dram_bytes(*case, l2_bytes=kv, programs=p, in_step=False) for p in (16, 32))
    assert (fits, half) == (3 * 1.5 * kv, 3 * kv * (0.5 + 1 + 15 / 2))
    # There are no more than three heads, however many programs could run.
    assert dram_bytes(*case, l2_bytes=3 * kv, programs=10_000, in_step=False) == 3 * 1.5 * kv
    # Causal, in groups of four: the groups end at keys 256, 512, 768 and 1024.
    causal = dram_bytes(*case, l2_bytes=0, programs=4, causal=True)
    assert causal == 3 * kv * (0.5 + (1 + 2 + 3 + 4) / 4)


def test_nonsense_is_refused():
    for wrong in ((0, 4, 2, 2), (4, -1, 2, 2), (4, 4, 0, 2), (4, 4, 2, 1.5)):
        with pytest.raises(ValueError, match="at least 1"):
            tile_kinds(*wrong)
    for model in (key_outer, query_outer, key_outer_backward):
        with pytest.raises(ValueError, match="heads must be"):
            model(1, 0, 8, 8, F16, 4, 4)
    with pytest.raises(ValueError, match="l2_bytes"):
        dram_bytes(1, 1, 8, 8, F16, 4, 4, l2_bytes=math.nan, programs=1)
    with pytest.raises(ValueError, match="programs"):
        dram_bytes(1, 1, 8, 8, F16, 4, 4, l2_bytes=1, programs=0)
    with pytest.raises(ValueError, match="dim"):
        paper_tiles(1024, 0, F16)


def test_names_of_kinds_fit_their_numbers():
    assert attention_io.KIND_NAMES[SKIPPED] == "skipped"
    assert attention_io.KIND_NAMES[MASKED] == "masked" and attention_io.KIND_NAMES[FULL] == "full"
    assert np.unique(tile_kinds(9, 9, 3, 3)).tolist() == [SKIPPED, MASKED, FULL]


def colours(ax):
    (cells,) = ax.collections
    return [matplotlib.colors.to_hex(face) for face in cells.get_facecolors()]


def test_pictures_show_kinds_and_progress():
    kinds = tile_kinds(6, 6, 2, 2)
    figure, (left, right) = plt.subplots(1, 2)
    attention_plot.draw_kinds(left, kinds)
    names = [attention_plot.COLOURS[int(kind)] for kind in kinds.ravel()]
    assert colours(left) == [matplotlib.colors.to_hex(name) for name in names]
    attention_plot.draw_progress(right, kinds, at=(1, 0))
    done, live, waiting = map(
        matplotlib.colors.to_hex,
        (attention_plot.DONE, attention_plot.LIVE, attention_plot.WAITING),
    )
    empty = "#ffffff"
    rows = [[done, empty, empty], [live, waiting, empty], [waiting] * 3]
    assert colours(right) == sum(rows, [])
    plt.close(figure)


def test_pictures_of_levels_and_programs():
    figure, (left, right) = plt.subplots(1, 2)
    levels = [("L1", 2**15, 100.0), ("L2", 2**20, 50.0), ("memory", math.inf, 5.0)]
    attention_plot.draw_pyramid(left, levels)
    figure.canvas.draw()
    texts = [text.get_text() for text in left.texts]
    assert texts == ["L1\n32 KB", "100 GB/s", "L2\n1 MB", "50 GB/s", "memory", "5 GB/s"]
    bars = [patch.get_width() for patch in left.patches if hasattr(patch, "get_width")]
    assert bars == pytest.approx([1, 0.5, 0.05])
    placed = waves.schedule([3, 2, 1, 1], 2)
    attention_plot.draw_schedule(right, placed)
    assert [bar.get_width() for bar in right.patches] == [3, 2, 1, 1]
    plt.close(figure)
    assert attention_plot.rate_text(19_491) == "19.5 TB/s"
