"""Sectors, lines and banks of one access: against brute force, and against the emulator."""

import random

import numpy as np
import pytest
import torch
from emulation import needs_emulator
from matplotlib import colors
from matplotlib import pyplot as plt

from helpers import access, access_plot, cuda

WIDTHS = (1, 2, 4, 8, 16)
PATTERNS = {
    "lane": lambda lane: lane,
    "2 * lane + 1": lambda lane: 2 * lane + 1,
    "32 * (lane % 4)": lambda lane: 32 * (lane % 4),
    "lane ^ 1": lambda lane: lane ^ 1,
    "(lane * 7) % 32": lambda lane: lane * 7 % 32,
    "lane if lane < 16 else None": lambda lane: lane if lane < 16 else None,
    "None if lane % 3 == 1 else lane << 2": lambda lane: None if lane % 3 == 1 else 4 * lane,
    "31 - lane": lambda lane: 31 - lane,
    "lane // 8 | 64": lambda lane: lane // 8 | 64,
    "(lane & 3) * 2 ** 3 + (~lane & 1)": lambda lane: (lane & 3) * 8 + 1 - lane % 2,
    "min(lane, 5) + max(lane, 9, 2) + abs(lane - 40)": lambda lane: (
        min(lane, 5) + max(lane, 9) + 40 - lane
    ),
    "3 if 4 <= lane < 9 or lane == 20 and not lane % 2 else 0": lambda lane: (
        3 if lane in (4, 5, 6, 7, 8, 20) else 0
    ),
    "(lane > 15) * 8 + (lane >> 1) - -1": lambda lane: 8 * (lane > 15) + lane // 2 + 1,
    " 5 ": lambda lane: 5,
}


@pytest.mark.parametrize("text", PATTERNS)
def test_a_text_a_function_and_a_list_mean_the_same(text):
    function = PATTERNS[text]
    listed = [function(lane) for lane in range(32)]
    for width, offset in ((4, 0), (1, 3), (16, 128)):
        expected = tuple(None if i is None else offset + width * i for i in listed)
        for pattern in (text, function, listed, tuple(listed), iter(listed)):
            found = access.addresses(pattern, element_bytes=width, offset_bytes=offset)
            assert found == expected
    assert access.addresses(text, lanes=7) == access.addresses(text)[:7]


def test_indices_of_numpy_and_torch_are_whole_numbers():
    expected = access.addresses("3 * lane")
    assert access.addresses(3 * np.arange(32)) == expected
    assert access.addresses(3 * torch.arange(32)) == expected
    assert all(type(address) is int for address in access.addresses(np.arange(32)))


@pytest.mark.parametrize(
    "text, said",
    [
        ("lane / 2", "write // instead of /"),
        ("lane +", "no expression"),
        ("", "no expression"),
        ("lane = 3", "no expression"),
        ("lane\0", "no expression"),
        ("(" * 150 + "lane" + ")" * 46, "no expression"),
        ("1.5 * lane", "1.5 is not understood"),
        ("'a' * 3", "'a' is not understood"),
        ("x", "x is not understood"),
        ("lane.real", "lane.real is not understood"),
        ("__import__('os').system('true')", "is not understood"),
        ("[lane][0]", "is not understood"),
        ("(lambda: 3)()", "is not understood"),
        ("pow(2, lane)", "is not understood"),
        ("min(lane, 3, key=abs)", "is not understood"),
        ("min(*lane)", "is not understood"),
        ("max()", "at least 1 argument"),
        ("lane in (1, 2)", "is not understood"),
        ("(lane := 3)", "is not understood"),
        ("sum(i for i in range(10**9))", "is not understood"),
        ("f'{lane}'", "is not understood"),
        ("2 + None", "unsupported operand"),
        ("lane < None", "not supported"),
        ("lane % (lane - 3)", "lane 3: integer .*by zero"),
        ("9 ** 9 ** 9", "powers and shifts are by 0 to 60"),
        ("1 << 10 ** 9", "powers and shifts"),
        ("2 ** -lane", "lane 1: powers and shifts"),
        ("10 ** 18 * 10 ** 18", "above 2\\^60"),
        ("9" * 190, "above 2\\^60"),
        ("lane + " * 50 + "1", "at most 200 characters"),
        ("lane - 1", "lane 0 the address -4"),
        ("1 << 59", "address 2305843009213693952: 0 to 2\\^60"),
    ],
)
def test_other_texts_are_refused_in_a_sentence(text, said):
    with pytest.raises(ValueError, match=said) as refused:
        access.addresses(text)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 450


@pytest.mark.parametrize(
    "pattern, options, said",
    [
        (lambda lane: lane / 1, {}, "lane 0 the index 0.0: a whole number"),
        (lambda lane: "1", {}, "index '1'"),
        (lambda lane: -lane, {}, "lane 1 the address -4"),
        ([0] * 31, {}, "each of 32 lanes, please, not 31"),
        ([0.5] * 32, {}, "lane 0 the index 0.5"),
        ("lane", {"lanes": 33}, "1 to 32 lanes"),
        ("lane", {"lanes": 0}, "1 to 32 lanes"),
        ("lane", {"element_bytes": 3}, "1, 2, 4, 8 or 16 bytes"),
        ("lane", {"offset_bytes": -1}, "lane 0 the address -1"),
    ],
)
def test_bad_patterns_and_sizes(pattern, options, said):
    with pytest.raises(ValueError, match=said):
        access.addresses(pattern, **options)


def test_a_section_and_an_element_have_a_size():
    with pytest.raises(ValueError, match="at least one byte, not 0"):
        access.sections((0,), 0)
    with pytest.raises(ValueError, match="not 12"):
        access.bank_conflicts((0,), 12)


@pytest.mark.parametrize(
    "pattern, width, sectors, lines, share",
    [
        ("lane", 4, 4, 1, 1),
        ("lane", 1, 1, 1, 1),
        ("lane", 16, 16, 4, 1),
        ("lane + 1", 4, 5, 2, 0.8),
        ("2 * lane", 4, 8, 2, 0.5),
        ("8 * lane", 4, 32, 8, 0.125),
        ("32 * lane", 4, 32, 32, 0.125),
        ("0", 4, 1, 1, 0.125),
        ("lane // 8", 4, 1, 1, 0.5),
        ("None", 4, 0, 0, 0),
    ],
)
def test_well_known_patterns(pattern, width, sectors, lines, share):
    where = access.addresses(pattern, element_bytes=width)
    assert len(access.sectors(where, width)) == sectors
    assert len(access.lines(where, width)) == lines
    assert access.efficiency(where, width) == share
    assert access.efficiency(where, width, 128) == (share * sectors / lines / 4 if lines else 0)


def random_addresses(seed: int, width: int, aligned: bool) -> list[int | None]:
    draw = random.Random(seed)
    span, step = draw.choice((40, 300, 5000)), width if aligned else 1
    return [draw.choice((None, *[step * draw.randrange(span)] * 5)) for _ in range(32)]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("seed", range(6))
def test_sections_by_brute_force_over_bytes(width, seed):
    where = random_addresses(seed, width, aligned=False)
    wanted = {a + i for a in where if a is not None for i in range(width)}
    for size, found in (
        (32, access.sectors(where, width)),
        (128, access.lines(where, width)),
        (48, access.sections(where, 48, width)),
    ):
        assert found == tuple(sorted({byte // size for byte in wanted}))
    assert access.bytes_used(where, width) == len(wanted)
    fetched = 32 * len({byte // 32 for byte in wanted})
    assert access.efficiency(where, width) == pytest.approx(len(wanted) / fetched)


@pytest.mark.parametrize(
    "pattern, width, conflicts",
    [
        ("lane", 4, 0),
        ("0", 4, 0),  # one word goes to all
        ("2 * lane", 4, 1),
        ("32 * lane", 4, 31),
        ("33 * lane", 4, 0),
        ("32 * (lane % 4)", 4, 3),
        ("lane", 1, 0),
        ("lane", 8, 0),  # half a warp at a time
        ("lane", 16, 0),
        ("2 * lane", 8, 2),  # two ways in each half
        ("16 * lane", 8, 30),
        ("8 * lane", 16, 28),
        ("lane if lane < 1 else None", 4, 0),
        ("None", 4, 0),
    ],
)
def test_bank_conflicts(pattern, width, conflicts):
    where = access.addresses(pattern, element_bytes=width)
    assert access.bank_conflicts(where, width) == conflicts


# y[lane] = x[index[lane]], in global and in shared memory
GATHER = """
extern "C" __global__ void gather(const word* x, const int* index, word* y) {
    int i = index[threadIdx.x];
    if (i >= 0) y[threadIdx.x] = x[i];
}
extern "C" __global__ void gather_shared(const int* index, word* y) {
    __shared__ word s[1024];
    for (int k = threadIdx.x; k < 1024; k += 32) s[k] = word();
    __syncwarp();
    int i = index[threadIdx.x];
    if (i >= 0) y[threadIdx.x] = s[i];
}
"""
WORDS = {1: "char", 2: "short", 4: "float", 8: "float2", 16: "float4"}


@needs_emulator
@pytest.mark.parametrize("width", WIDTHS)
def test_the_emulator_counts_the_same(width):
    defines = (("word", WORDS[width]),)
    gather = cuda.Kernel(GATHER, "gather", defines=defines)
    shared = cuda.Kernel(GATHER, "gather_shared", defines=defines)
    of_word = {1: torch.int8, 2: torch.int16, 4: torch.float32}.get(width, torch.float32)
    x = torch.zeros(1024 * max(1, width // 4), dtype=of_word)
    y = torch.zeros(32 * max(1, width // 4), dtype=of_word)
    for seed in range(8):
        draw = random.Random(seed)
        span = draw.choice((16, 100, 1024))
        indices = [draw.choice((-1, *[draw.randrange(span)] * 9)) for _ in range(32)]
        where = access.addresses([None if i < 0 else i for i in indices], element_bytes=width)
        index = torch.tensor(indices, dtype=torch.int32)
        counts = gather.emulate(1, 32, x, index, y)
        # The indices themselves are loaded too: 4 sectors of one line.
        assert counts.load_sectors - 4 == len(access.sectors(where, width))
        assert counts.load_lines - 1 == len(access.lines(where, width))
        found = shared.emulate(1, 32, index, y)
        assert found.bank_conflicts == access.bank_conflicts(where, width)


# The picture

FETCHED = colors.to_rgb(access_plot.FETCHED)


def drawn(*patterns, **options):
    figure = access_plot.paint(*patterns, **options)
    figure.canvas.draw()
    plt.close(figure)
    return figure.axes


def labels(ax) -> list[str]:
    return [text.get_text() for text in ax.texts]


def shaded_bytes(ax) -> int:
    (boxes,) = ax.collections
    looks = zip(boxes.get_paths(), boxes.get_facecolors(), strict=True)
    return sum(
        int(path.get_extents().width) for path, face in looks if tuple(face) == (*FETCHED, 1)
    )


def test_lanes_are_painted_where_they_load():
    (ax,) = drawn("lane + 1")
    assert labels(ax) == [str(lane) for lane in range(32)]
    assert ax.texts[0].get_position() == (4 + 2, 0.52)
    assert ax.texts[31].get_position() == (0 + 2, 1.52)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["line 0", "line 1"]
    assert shaded_bytes(ax) == 5 * 32
    assert ax.get_title() == (
        "lane + 1  →  5 sectors in 2 lines, 80 % of the bytes fetched are wanted"
    )


def test_lines_are_shaded_whole_where_they_are_what_is_fetched():
    (ax,) = drawn("lane + 1", unit="line")
    assert shaded_bytes(ax) == 2 * 128 and "50 % of the bytes" in ax.get_title()


@pytest.mark.parametrize(
    "pattern, width, expected",
    [
        ("lane // 8", 4, ["0–7", "8–15", "16–23", "24–31"]),
        ("32 * (lane % 2)", 4, ["×16", "×16"]),
        ("lane if lane < 2 else None", 16, list("00001111")),
        ("lane if lane < 6 else None", 1, ["0–3", "4–5"]),
        ("None", 4, []),
    ],
)
def test_shared_and_wide_words(pattern, width, expected):
    (ax,) = drawn(pattern, element_bytes=width)
    assert labels(ax) == expected


def test_only_touched_lines_are_shown_and_not_too_many():
    few, many = drawn("320 * (lane % 2)", "32 * lane")
    assert [tick.get_text() for tick in few.get_yticklabels()] == ["line 0", "line 10"]
    assert len(many.get_yticklabels()) == 8 and labels(many)[-1] == "… and 24 more lines"
    (ax,) = drawn("32 * lane", max_lines=31)
    assert labels(ax)[-1] == "… and 1 more line"


def test_the_unit_is_checked():
    with pytest.raises(ValueError, match="unit must be one of sector, line, not 'page'"):
        drawn("lane", unit="page")
