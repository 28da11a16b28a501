"""The checkers of exercises 10.1 and 10.2: the sizes at which a matmul needs more waves."""

import dataclasses
import itertools
import math
import random
import reprlib
from collections.abc import Callable, Iterable, Iterator
from numbers import Real

from helpers import specs, waves
from helpers.exercises.answers import is_number, is_whole, plain

DEFAULT_TILE = (256, 128)
TILES = (DEFAULT_TILE, (128, 256), (128, 128), (64, 192), (128, 64), (96, 160))
LARGEST_N, RANDOM_CASES = 20_000, 120


@dataclasses.dataclass(frozen=True)
class Setting:
    """What computes an N x N result: a GPU, tiles, and the blocks that an SM holds at once."""

    gpu: specs.GPU
    tile: tuple[int, int] = DEFAULT_TILE  # rows and columns
    blocks_per_sm: int = 1

    def __str__(self) -> str:
        blocks = f", {self.blocks_per_sm} blocks an SM" if self.blocks_per_sm > 1 else ""
        return f"{self.gpu.name}: {self.sms} SMs{blocks}, tiles of {self.tile[0]} x {self.tile[1]}"

    @property
    def sms(self) -> int:
        return int(self.gpu.sms)

    def tiles(self, n: int) -> int:
        """How many tiles cover N x N."""
        return waves.tiles(n, n, *self.tile)

    def waves(self, n: int) -> int:
        """How many waves N x N needs."""
        return self.waves_of(self.tiles(n))

    def waves_of(self, num_tiles: int) -> int:
        """How many waves so many tiles need."""
        return waves.waves(num_tiles, self.sms, self.blocks_per_sm)

    def counted(self, n: int) -> str:
        """N's tiles and waves in words: "2049 has 9 x 17 = 153 tiles, 2 waves"."""
        rows, columns = (math.ceil(n / side) for side in self.tile)
        counts = ((self.tiles(n), "tile"), (self.waves(n), "wave"))
        said = ", ".join(f"{count} {what}{'s' * (count > 1)}" for count, what in counts)
        return f"{n} has {rows} x {columns} = {said}"


# What is often computed for the waves of N, and what to say to it. Each grows with N.
_SLIPS: tuple[tuple[Callable[[int, Setting], Real], str], ...] = (
    (
        lambda n, at: waves.waves(at.tiles(n), 108, at.blocks_per_sm),
        "that is right for 108 SMs, an A100's",
    ),
    (
        lambda n, at: waves.waves(at.tiles(n), at.sms),
        "an SM holds several blocks at once here, and a wave as many more",
    ),
    (
        lambda n, at: waves.waves(at.tiles(n) * at.blocks_per_sm, at.sms),
        "more blocks an SM are fewer waves, not more",
    ),
    (
        lambda n, at: at.tiles(n) // (at.sms * at.blocks_per_sm),
        "tiles that fill their waves exactly need no further one: round waves up, not down",
    ),
    (
        lambda n, at: at.tiles(n),
        "a new row or column of tiles is a new wave only if the old waves are full",
    ),
    (
        lambda n, at: math.ceil(n * n / math.prod(at.tile) / (at.sms * at.blocks_per_sm)),
        "tiles are not cut to fit: count their rows and columns, each rounded up, not the area",
    ),
    (
        lambda n, at: at.waves_of((n // at.tile[0]) * (n // at.tile[1])),
        "a tile that is partly used is a tile: round rows and columns of tiles up",
    ),
    (
        lambda n, at: at.waves_of(waves.tiles(n, n, at.tile[0], at.tile[0])),
        "a tile has tile_m rows and tile_n columns, which differ here",
    ),
    (
        lambda n, at: at.waves_of(waves.tiles(n, n, at.tile[1], at.tile[1])),
        "a tile has tile_m rows and tile_n columns, which differ here",
    ),
    (
        lambda n, at: at.waves_of(waves.tiles(n, n, *DEFAULT_TILE)),
        "that is right for tiles of 256 x 128, and these are others",
    ),
)


def expected_teeth(tflop_per_s: Callable, answer: Callable) -> None:
    """AssertionError unless both are right.

    tflop_per_s(n, ms): the rate of a matmul of two N x N matrices that takes so many milliseconds.
    answer(first, last, num_sms, tile_m=256, tile_n=128, blocks_per_sm=1): the sizes N in
    first < N <= last whose result needs more waves than that of N - 1; first is at least 1.
    """
    _assert_rate(tflop_per_s)
    for first, last, at in _ranges():
        standard = at.tile == DEFAULT_TILE and at.blocks_per_sm == 1
        given = answer(first, last, at.sms, *(() if standard else (*at.tile, at.blocks_per_sm)))
        where = f"from {first} to {last} ({at})"
        sizes = _sizes(given, where)
        expected = _teeth(at.waves, first, last)
        if differing := set(sizes) ^ set(expected):
            n = min(differing)
            said = f"{n} is {'missing' if n in expected else 'not one'}"
            counted = f"{at.counted(n - 1)}, and {at.counted(n)}"
            why = _why_teeth(sizes, first, last, n, at)
            raise AssertionError(f"{where} {said}: {counted}{why}")
        if len(sizes) > len(expected):
            raise AssertionError(f"{where} a size comes twice: {sizes}")


def next_step(answer: Callable) -> None:
    """AssertionError unless answer(n, gpu, tile, blocks_per_sm) is the next size with more waves.

    `gpu` is a specs.GPU, `tile` the rows and columns of a tile.
    """
    for n, at in _sizes_to_start_from():
        given = plain(answer(n, at.gpu, at.tile, at.blocks_per_sm))
        where = f"from n = {n} ({at})"
        if not is_whole(given):
            raise AssertionError(f"{where} it needs a whole number, not {given!r}")
        old = at.waves(n)
        expected = next(size for size in itertools.count(n + 1) if at.waves(size) > old)
        if given != expected:
            counted = f"{at.counted(n)}, and {at.counted(expected)}"
            why = _why_step(int(given), expected, n, at)
            raise AssertionError(f"{where} it is {expected}, not {given}: {counted}{why}")


def _assert_rate(tflop_per_s: Callable) -> None:
    hints = {
        1 / 2: "a multiply-add is two FLOPs: 2 n^3",
        1e-3: "a millisecond is 10^-3 s",
        1e-6: "a millisecond is 10^-3 s, not 10^3 s",
        1e3: "these are GFLOP/s",
        1e12: "these are FLOP/s",
        1e12 / 2**40: "tera is 10^12, not 2^40",
    }
    for n, ms in ((8192, 1.5), (1000, 2), (1, 1e-3)):
        given, expected = plain(tflop_per_s(n, ms)), 2 * n**3 / (ms * 1e-3) / 1e12
        if not is_number(given):
            raise AssertionError(f"tflop_per_s needs a number of TFLOP/s, not {given!r}")
        if not math.isclose(given, expected, rel_tol=1e-6):
            said = f"a matmul of n = {n} in {ms} ms is {expected:.6g} TFLOP/s, not {given:.6g}"
            near = [f": {h}" for r, h in hints.items() if math.isclose(given, r * expected)]
            raise AssertionError("".join([said, *near[:1]]))


def _here() -> specs.GPU:
    """The GPU at hand; without one, an H200."""
    gpu = specs.this_gpu()
    return gpu if gpu and gpu.sms else specs.get("H200 SXM")


def _ranges() -> Iterator[tuple[int, int, Setting]]:
    """first, last and where, the easiest first."""
    a100 = Setting(specs.get("A100 SXM4 80GB"))
    yield 1536, 3200, a100
    yield 1792, 1793, a100  # last is one
    yield 1793, 2560, a100  # first is one
    yield 1, 4096, Setting(_here())
    for name, first, last in (
        ("A10", 1280, 2048),  # 72 SMs, which 72 tiles fill exactly
        ("RTX 4080", 1536, 2048),
        ("H200 SXM", 1792, 2304),  # no tooth up to 2048
        ("RTX 4060", 1, 4096),  # 24 SMs: two waves more at once
    ):
        yield first, last, Setting(specs.get(name))
    for gpu in {gpu.sms: gpu for gpu in specs.gpus()}.values():
        yield 1536, 2304, Setting(gpu)
    for name, blocks in (("RTX 2070", 1), ("H200 SXM", 2), ("T4", 3)):
        for tile in TILES:
            yield 1024, 2048, Setting(specs.get(name), tile, blocks)


def _sizes_to_start_from() -> Iterator[tuple[int, Setting]]:
    """n and where, the easiest first."""
    for n in (1600, 1792, 1793):
        yield n, Setting(specs.get("A100 SXM4 80GB"))
    yield 1, Setting(_here())
    yield 2048, Setting(specs.get("H200 SXM"))
    yield 1300, Setting(specs.get("A10"))  # 72 SMs, which 72 tiles fill exactly
    yield 1, Setting(specs.get("RTX 2080 Ti"))  # at a new column of tiles …
    yield 1, Setting(specs.get("RTX 2080 Ti"), (128, 256))  # … and at a new row
    yield 1024, Setting(specs.get("H200 SXM"), (128, 128), 2)
    rng = random.Random(0)
    for _ in range(RANDOM_CASES):
        at = Setting(rng.choice(specs.gpus()), rng.choice(TILES), rng.randint(1, 4))
        yield rng.choice((rng.randint(1, 2048), rng.randint(1, LARGEST_N))), at


def _sizes(given: object, where: str) -> list[int]:
    sizes = list(map(plain, many)) if isinstance(many := plain(given), Iterable) else [None]
    if not all(map(is_whole, sizes)):
        raise AssertionError(f"{where} it needs a list of whole numbers, not {reprlib.repr(given)}")
    return sorted(map(int, sizes))


def _teeth(count: Callable[[int], Real], first: int, last: int) -> list[int]:
    """Where a count of waves is larger than one size before, in first < N <= last."""
    counts = [count(n) for n in range(first, last + 1)]
    return [first + 1 + i for i, (a, b) in enumerate(itertools.pairwise(counts)) if b > a]


def _why_teeth(sizes: list[int], first: int, last: int, n: int, at: Setting) -> str:
    """A hint; n is the first size that is missing or too many."""
    if n == first:
        return "; `first` itself is not asked for"
    if sizes and all(i > 0 and at.waves(i) < at.waves(i + 1) for i in sizes):
        return "; give the first size with more waves, not the last before it"
    if set(sizes) == {i for i in range(first + 1, last + 1) if at.waves(i) > at.waves(first)}:
        return "; only the first size of a wave is asked for"
    for slip, hint in _SLIPS:
        # Empty lists are alike, whatever made them.
        if sizes and sizes == _teeth(lambda i, slip=slip: slip(i, at), first, last):
            return f"; {hint}"
    if n == last:
        return "; `last` itself is asked for"
    if at.waves(n) > at.waves(n - 1) + 1:
        return "; several waves more at once are a tooth, too"
    return ""


def _why_step(given: int, expected: int, n: int, at: Setting) -> str:
    if given <= n:
        return "; N is larger than n"
    if given == expected - 1:
        return f"; {given} is the last size that still fits"
    for slip, hint in _SLIPS:
        if slip(n, at) == slip(given - 1, at) < slip(given, at):
            return f"; {hint}"
    if given > expected and not all(given % side for side in at.tile):
        return "; a wave begins one above a multiple of a tile's side, not at the multiple"
    rows, columns = at.tile
    for what, side, other in (("row", rows, columns), ("column", columns, rows)):
        if expected % side == 1 and expected % other != 1 and given % other == 1:
            return f"; a new {what} of tiles begins at {expected}, and counts as well"
    return "; a wave may begin at any size" if at.waves(given) == at.waves(expected) else ""
