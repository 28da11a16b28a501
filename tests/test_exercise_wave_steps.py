"""The checkers of exercises 10.1 and 10.2 take what is right, and say what is wrong."""

import dataclasses
import itertools
import math
import re

import numpy as np
import pytest
import torch
from verdicts import verdict

from helpers import specs
from helpers.exercises import wave_steps

A100, H200, RTX_4080 = map(specs.get, ("A100 SXM4 80GB", "H200 SXM", "RTX 4080"))


@pytest.fixture(autouse=True)
def no_gpu_at_hand(monkeypatch):
    monkeypatch.setattr(specs, "this_gpu", lambda: None)  # an H200 then stands for it


def tflop_per_s(n, ms):
    return 2 * n**3 / (ms / 1e3) / 1e12


def num_waves(n, num_sms, tile_m=256, tile_n=128, blocks_per_sm=1):
    """Counted out, without a division."""
    num_tiles = len(range(0, n, tile_m)) * len(range(0, n, tile_n))
    return len(range(0, num_tiles, num_sms * blocks_per_sm))


# 10.1: the rate, and the teeth of a GPU


def solution_teeth(first, last, num_sms, tile_m=256, tile_n=128, blocks_per_sm=1):  # the notebook's
    def waves_of(n):
        num_tiles = math.ceil(n / tile_m) * math.ceil(n / tile_n)
        return math.ceil(num_tiles / (num_sms * blocks_per_sm))

    return [n for n in range(first + 1, last + 1) if waves_of(n) > waves_of(n - 1)]


def in_numpy(first, last, num_sms, tile_m=256, tile_n=128, blocks_per_sm=1):
    n = np.arange(first, last + 1)
    num_tiles = -(-n // tile_m) * -(-n // tile_n)
    return n[1:][np.diff(-(-num_tiles // (num_sms * blocks_per_sm))) > 0]


def teeth_of(waves_of, steps=lambda new, old: new > old):
    """An answer with its own count of the waves of N."""

    def answer(first, last, num_sms, tile_m=256, tile_n=128, blocks_per_sm=1):
        at = (num_sms, tile_m, tile_n, blocks_per_sm)
        sizes = range(first + 1, last + 1)
        return [n for n in sizes if steps(waves_of(n, *at), waves_of(n - 1, *at))]

    return answer


@pytest.mark.parametrize(
    "right",
    [
        solution_teeth,
        in_numpy,
        teeth_of(num_waves),
        lambda *at: tuple(solution_teeth(*at)),
        lambda *at: set(solution_teeth(*at)),
        lambda *at: solution_teeth(*at)[::-1],
        lambda *at: iter(solution_teeth(*at)),
        lambda *at: torch.tensor(solution_teeth(*at)),
        lambda *at: list(torch.tensor(solution_teeth(*at), dtype=torch.int64)),
    ],
)
def test_right_teeth(capsys, right):
    assert verdict(capsys, "10.1", tflop_per_s, right) == "correct."


@pytest.mark.parametrize(
    "right",
    [
        lambda n, ms: 2e-9 * n**3 / ms,
        lambda n, ms: np.float64(2 * n * n * n / 1e12 / (ms * 1e-3)),
        lambda n, ms: torch.tensor(2e-9 * n**3 / ms),
    ],
)
def test_right_rates(capsys, right):
    assert verdict(capsys, "10.1", right, solution_teeth) == "correct."


def test_where_the_teeth_are():
    assert solution_teeth(1536, 2048, 108) == [1793]
    assert solution_teeth(1536, 2048, 76) == [1537]
    assert solution_teeth(1, 2048, 132) == solution_teeth(1792, 2048, 132) == []
    assert solution_teeth(1792, 2304, 132) == [2049]


RATE = r"^not yet\. a matmul of n = 8192 in 1\.5 ms is 733\.008 TFLOP/s, not "
WRONG_RATES = {
    "n^3": (lambda n, ms: n**3 / ms / 1e9, "366.504: a multiply-add is two FLOPs"),
    "seconds": (lambda n, ms: 2 * n**3 / ms / 1e12, "0.733008: a millisecond is 10.-3 s$"),
    "ms times 1000": (lambda n, ms: 2 * n**3 / (ms * 1e3) / 1e12, "10.-3 s, not 10.3 s"),
    "giga": (lambda n, ms: 2 * n**3 / (ms / 1e3) / 1e9, "733008: these are GFLOP/s"),
    "FLOP/s": (lambda n, ms: 2 * n**3 / (ms / 1e3), "these are FLOP/s"),
    "FLOPs per ms": (lambda n, ms: 2 * n**3 / ms, r"7.33008e.11$"),
    "2^40": (lambda n, ms: 2 * n**3 / (ms / 1e3) / 2**40, "tera is 10.12, not 2.40"),
    "n^2": (lambda n, ms: 2 * n**2 / ms / 1e9, "0.0894785$"),
    "three n^2 bytes": (lambda n, ms: 3 * n**2 * 4 / ms / 1e9, "0.536871$"),
    "the time": (lambda n, ms: ms, "1.5$"),
    "NaN": (lambda n, ms: math.nan, "nan$"),
}


@pytest.mark.parametrize("name", WRONG_RATES)
def test_wrong_rates(capsys, name):
    wrong, hint = WRONG_RATES[name]
    said = verdict(capsys, "10.1", wrong, solution_teeth)
    assert re.search(RATE + ".*" + hint, said), said


@pytest.mark.parametrize("wrong", [None, True, "733", (733,)])
def test_no_rates(capsys, wrong):
    said = verdict(capsys, "10.1", lambda n, ms: wrong, solution_teeth)
    assert re.search(r"needs a number of TFLOP/s, not ", said), said


def test_a_rate_by_heart(capsys):
    said = verdict(capsys, "10.1", lambda n, ms: tflop_per_s(8192, 1.5), solution_teeth)
    assert "n = 1000 in 2 ms is 1 TFLOP/s" in said


# The waves of N, as they are often counted: for 10.1 and 10.2.


def floor_of_tiles(n, num_sms, tile_m, tile_n, blocks):
    return math.ceil((n // tile_m) * (n // tile_n) / (num_sms * blocks))


def floor_of_tiles_and_waves(n, num_sms, tile_m, tile_n, blocks):
    return (n // tile_m) * (n // tile_n) // (num_sms * blocks)


def one_tile_more(n, num_sms, tile_m, tile_n, blocks):
    return math.ceil((n // tile_m + 1) * (n // tile_n + 1) / (num_sms * blocks))


def tiles_of(n, num_sms, tile_m, tile_n, blocks):
    return math.ceil(n / tile_m) * math.ceil(n / tile_n)


def floor_of_waves(n, num_sms, tile_m, tile_n, blocks):
    return tiles_of(n, num_sms, tile_m, tile_n, blocks) // (num_sms * blocks)


def ratio(n, num_sms, tile_m, tile_n, blocks):
    return tiles_of(n, num_sms, tile_m, tile_n, blocks) / (num_sms * blocks)


def area(n, num_sms, tile_m, tile_n, blocks):
    return math.ceil(n * n / (tile_m * tile_n) / (num_sms * blocks))


def area_of_tiles(n, num_sms, tile_m, tile_n, blocks):
    return math.ceil(math.ceil(n * n / (tile_m * tile_n)) / (num_sms * blocks))


WRONG_WAVES = {
    "108 SMs": (lambda n, sms, *at: num_waves(n, 108, *at), "right for 108 SMs, an A100's"),
    "132 SMs": (lambda n, sms, *at: num_waves(n, 132, *at), ""),
    "floor of tiles": (floor_of_tiles, "a tile that is partly used is a tile"),
    "floors": (floor_of_tiles_and_waves, ""),
    "one tile more": (one_tile_more, "the last"),
    "floor of waves": (floor_of_waves, "tiles that fill their waves exactly need no further one"),
    "every tile": (tiles_of, "a new row or column of tiles is a new wave only if"),
    "ratio": (ratio, "a new row or column of tiles is a new wave only if the old waves"),
    "area": (area, "count their rows and columns, each rounded up, not the area"),
    "area of tiles": (area_of_tiles, "count their rows and columns, each rounded up, not the area"),
    "one block an SM": (
        lambda n, sms, m, k, blocks: num_waves(n, sms, m, k),
        "an SM holds several blocks at once here",
    ),
    "fewer SMs for blocks": (
        lambda n, sms, m, k, blocks: num_waves(n, sms, m, k) * blocks,
        "an SM holds several blocks at once here",
    ),
    "SMs divided": (
        lambda n, sms, m, k, blocks: math.ceil(tiles_of(n, sms, m, k, 1) * blocks / sms),
        "more blocks an SM are fewer waves",
    ),
    "tile_m twice": (
        lambda n, sms, m, k, blocks: num_waves(n, sms, m, m, blocks),
        "a tile has tile_m rows and tile_n columns, which differ here",
    ),
    "tile_n twice": (
        lambda n, sms, m, k, blocks: num_waves(n, sms, k, k, blocks),
        "a tile has tile_m rows and tile_n columns, which differ here",
    ),
    "256 x 128": (
        lambda n, sms, m, k, blocks: num_waves(n, sms, 256, 128, blocks),
        "that is right for tiles of 256 x 128",
    ),
    "rows of tiles alone": (
        lambda n, sms, m, k, blocks: math.ceil(n / m / (sms * blocks)),
        "",
    ),
    "SMs alone": (lambda n, sms, m, k, blocks: math.ceil(n / sms), ""),
}

FROM_TO = r"\d+ has \d+ x \d+ = \d+ tiles?, \d+ waves?, and \d+ has \d+ x \d+ = \d+ tiles, \d+ wave"


@pytest.mark.parametrize("name", WRONG_WAVES)
def test_wrong_waves_in_teeth(capsys, name):
    wrong, hint = WRONG_WAVES[name]
    said = verdict(capsys, "10.1", tflop_per_s, teeth_of(wrong))
    assert re.search(FROM_TO + ".*" + hint, said), said
    assert len(said) < 400


WRONG_TEETH = {
    "the last size of the old wave": (
        lambda *at: [n - 1 for n in solution_teeth(*at)],
        r"from 1536 to 3200 .* 1792 is not one: 1791 .*give the first size with more waves",
    ),
    "this in the range": (
        lambda first, last, *at: [n - 1 for n in solution_teeth(first + 1, last + 1, *at)],
        "1792 is not one: 1791 .*give the first size with more waves, not the last before it",
    ),
    "without last": (
        lambda first, last, *at: solution_teeth(first, last - 1, *at),
        "from 1792 to 1793 .* 1793 is missing: .*`last` itself is asked for",
    ),
    "with first": (
        lambda first, last, *at: solution_teeth(first - 1, last, *at),
        "from 1793 to 2560 .* 1793 is not one: .*`first` itself is not asked for",
    ),
    "the first tooth alone": (
        lambda *at: solution_teeth(*at)[:1],
        "from 1536 to 3200 .* 2561 is missing: .*tiles, 3 waves$",
    ),
    "waves one by one": (
        teeth_of(num_waves, lambda new, old: new == old + 1),
        "from 1 to 4096 .*RTX 4060.* several waves more at once are a tooth, too",
    ),
    "from the second wave on": (
        teeth_of(num_waves, lambda new, old: new > old > 1),
        r"1793 is missing: 1792 has 7 x 14 = 98 tiles, 1 wave, and 1793 has 8 x 15 = 120 tiles, 2",
    ),
    "every size of later waves": (
        lambda first, last, sms: [n for n in range(first + 1, last + 1) if num_waves(n, sms) > 1],
        "1794 is not one: .*; only the first size of a wave is asked for",
    ),
    "nothing": (lambda *at: [], r"1793 is missing: .* tiles, 2 waves$"),
    "all": (
        lambda first, last, *at: range(first + 1, last + 1),
        "1537 is not one: 1536 has 6 x 12",
    ),
    "by heart": (lambda *at: [1793, 2561, 3073], "from 1792 to 1793 .* 2561 is not one"),
    "twice": (lambda *at: solution_teeth(*at) * 2, r"a size comes twice: \[1793, 1793, 2561, 2561"),
    "a number": (lambda *at: 1793, "needs a list of whole numbers, not 1793$"),
    "None": (lambda *at: None, "needs a list of whole numbers, not None$"),
    "floats": (lambda *at: [float(n) for n in solution_teeth(*at)], r"not \[1793\.0, "),
    "truth values": (
        lambda first, last, num_sms: [n == 1793 for n in range(first + 1, last + 1)],
        r"needs a list of whole numbers, not \[False, False, False, .{,60}$",
    ),
    "without tiles": (lambda first, last, num_sms: solution_teeth(first, last, num_sms), "TypeEr"),
}


@pytest.mark.parametrize("name", WRONG_TEETH)
def test_wrong_teeth(capsys, name):
    wrong, hint = WRONG_TEETH[name]
    said = verdict(capsys, "10.1", tflop_per_s, wrong)
    assert re.search(hint, said), said


@pytest.mark.parametrize("sms", [23, 76, 108])
def test_108_sms_are_wrong_for_every_gpu_at_hand(capsys, monkeypatch, sms):
    gpu = dataclasses.replace(H200, name="a GPU", sms=sms)
    monkeypatch.setattr(specs, "this_gpu", lambda: gpu)
    for answer in (
        ("10.1", tflop_per_s, teeth_of(WRONG_WAVES["108 SMs"][0])),
        ("10.2", step_of(WRONG_WAVES["108 SMs"][0])),
    ):
        said = verdict(capsys, *answer)
        assert ("a GPU" if sms != 108 else " SMs") in said and "right for 108 SMs" in said


def test_a_gpu_at_hand_that_says_little(monkeypatch):
    monkeypatch.setattr(specs, "this_gpu", lambda: dataclasses.replace(H200, name="?", sms=None))
    assert "H200 SXM" in {at.gpu.name for _, at in wave_steps._sizes_to_start_from()}
    assert "?" not in {at.gpu.name for _, _, at in wave_steps._ranges()}


# 10.2: the next step


def solution_step(n, gpu, tile, blocks_per_sm):  # the notebook's
    def waves_of(size):
        num_tiles = math.ceil(size / tile[0]) * math.ceil(size / tile[1])
        return math.ceil(num_tiles / (gpu.sms * blocks_per_sm))

    size = n
    while waves_of(size) == waves_of(n):
        size = min(math.ceil(size / side) * side + 1 for side in tile)
    return size


def one_by_one(n, gpu, tile, blocks_per_sm):
    at = (gpu.sms, *tile, blocks_per_sm)
    size = n + 1
    while num_waves(size, *at) == num_waves(n, *at):
        size += 1
    return size


def by_bisection(n, gpu, tile, blocks_per_sm):
    at = (gpu.sms, *tile, blocks_per_sm)
    low, high = n, n + 20_000  # waves at low are n's, at high more
    while high - low > 1:
        middle = (low + high) // 2
        if num_waves(middle, *at) > num_waves(n, *at):
            high = middle
        else:
            low = middle
    return high


def step_of(waves_of, steps=lambda new, old: new > old, start=1, limit=40_000):
    def answer(n, gpu, tile, blocks_per_sm):
        at = (gpu.sms, *tile, blocks_per_sm)
        old = waves_of(n, *at)
        return next(
            (size for size in range(n + start, n + limit) if steps(waves_of(size, *at), old)), None
        )

    return answer


def test_next_steps_by_hand():
    assert one_by_one(1792, A100, (256, 128), 1) == 1793
    assert one_by_one(1793, A100, (256, 128), 1) == 2561
    assert one_by_one(1, H200, (256, 128), 1) == one_by_one(2048, H200, (256, 128), 1) == 2049
    assert one_by_one(1, RTX_4080, (256, 128), 1) == 1537
    assert one_by_one(1024, H200, (128, 128), 2) == 2049


@pytest.mark.parametrize(
    "right",
    [
        solution_step,
        one_by_one,
        by_bisection,
        step_of(num_waves),
        lambda *at: np.int64(solution_step(*at)),
        lambda *at: torch.tensor(solution_step(*at)),
    ],
)
def test_right_steps(capsys, right):
    assert verdict(capsys, "10.2", right) == "correct."


def test_the_cases_have_what_goes_wrong():
    cases = list(wave_steps._sizes_to_start_from())
    assert {at.blocks_per_sm for _, at in cases} == {1, 2, 3, 4}
    assert {at.tile for _, at in cases} == set(wave_steps.TILES)
    assert len({at.gpu.sms for _, at in cases}) > 15
    sizes = [n for n, _ in cases]
    assert min(sizes) == 1 and max(sizes) > 15_000


@pytest.mark.parametrize("name", WRONG_WAVES)
def test_wrong_waves_in_steps(capsys, name):
    wrong, hint = WRONG_WAVES[name]
    said = verdict(capsys, "10.2", step_of(wrong))
    assert re.search(FROM_TO + ".*" + hint, said), said
    assert len(said) < 400


def multiples_of(side, plus=1):
    """Looks at the sizes side * k + plus alone."""

    def answer(n, gpu, tile, blocks_per_sm):
        at = (gpu.sms, *tile, blocks_per_sm)
        sizes = (k * tile[side] + plus for k in itertools.count(n // tile[side]))
        return next(s for s in sizes if s > n and num_waves(s, *at) > num_waves(n, *at))

    return answer


WRONG_STEPS = {
    "n itself": (lambda n, *at: n, "it is 1793, not 1600: .*N is larger than n"),
    "below n": (lambda n, *at: n - 1, "not 1599: .*N is larger than n"),
    "one less": (lambda *at: one_by_one(*at) - 1, "not 1792: .*1792 is the last size that still"),
    "one more": (lambda *at: one_by_one(*at) + 1, "it is 1793, not 1794"),
    "the next size": (lambda n, *at: n + 1, r"it is 1793, not 1601: 1600 has 7 x 13 = 91 tiles, 1"),
    "tile_m's multiples": (
        multiples_of(0),
        "it is 1409, not 1537: .*; a new column of tiles begins at 1409, and counts",
    ),
    "without a new row": (multiples_of(0, 0), ""),
    "tile_n's multiples": (multiples_of(1), "; a new row of tiles begins at "),
    "multiples": (
        lambda n, gpu, tile, blocks: next(
            size
            for size in itertools.count(n + 1)
            if not all(size % side for side in tile)
            and num_waves(size, gpu.sms, *tile, blocks) > num_waves(n, gpu.sms, *tile, blocks)
        ),
        "it is 1793, not 1920: .*; a wave begins one above a multiple of a tile's side",
    ),
    "by eights": (
        lambda n, gpu, tile, blocks: next(
            size
            for size in itertools.count(n + 8, 8)
            if num_waves(size, gpu.sms, *tile, blocks) > num_waves(n, gpu.sms, *tile, blocks)
        ),
        "it is 1793, not 1800: .*; a wave may begin at any size",
    ),
    "the second wave": (
        lambda n, *at: one_by_one(1, *at),
        r"from n = 1793 .*it is 2561, not 1793: .*N is larger than n",
    ),
    "one wave more, if there is": (
        step_of(num_waves, lambda new, old: new == old + 1),
        "needs a whole number, not None",
    ),
    "waves": (lambda n, gpu, tile, blocks: num_waves(n, gpu.sms) + 1, "not 2: .*larger than n"),
    "None": (lambda *at: None, "needs a whole number, not None"),
    "float": (lambda *at: float(one_by_one(*at)), r"needs a whole number, not 1793\.0"),
    "True": (lambda *at: True, "needs a whole number, not True"),
    "several": (lambda *at: torch.tensor([1793, 2561]), r"needs a whole number, not \[1793, 2561"),
    "SMs for a GPU": (lambda n, num_sms, tile, b: n + num_sms, "It raises TypeError"),
    "by heart": (lambda *at: 1793, "from n = 1793"),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_wrong_steps(capsys, name):
    wrong, hint = WRONG_STEPS[name]
    said = verdict(capsys, "10.2", wrong)
    assert re.search(hint, said), said
