"""The law of steps: found again in staircases that are made here, and told from a straight line."""

import math
import random

import numpy as np
import pytest

from helpers import wave_fit, waves


def staircase(counts, slots, t0=0.005, wave=0.1):
    times = []
    for count in counts:
        ms, left = t0, count
        while left > 0:
            ms, left = ms + wave, left - slots
        times.append(ms)
    return times


@pytest.mark.parametrize("slots", [1, 24, 132, 264])
def test_a_perfect_staircase_is_found_again(slots):
    counts = list(range(1, 4 * slots + 1))
    fit = wave_fit.fit(counts, staircase(counts, slots), slots)
    assert fit.t0_ms == pytest.approx(0.005) and fit.t_wave_ms == pytest.approx(0.1)
    assert fit.r_squared == pytest.approx(1) and fit.slots == slots
    assert fit.ms([1, slots, slots + 1]) == pytest.approx([0.105, 0.105, 0.205])


def test_r_squared_by_hand():
    # Waves 1, 1, 2, 2: the means of each pair are the best fit.
    fit = wave_fit.fit([1, 2, 3, 4], [10.0, 12.0, 21.0, 25.0], slots=2)
    assert (fit.t0_ms, fit.t_wave_ms) == pytest.approx((-1.0, 12.0))
    residual, total = 1 + 1 + 4 + 4, sum((t - 17) ** 2 for t in (10, 12, 21, 25))
    assert fit.residual_ms2 == pytest.approx(residual)
    assert fit.r_squared == pytest.approx(1 - residual / total)


def test_one_slot_is_a_straight_line():
    counts, times = [1, 5, 9, 20], [1.0, 2.5, 2.0, 7.0]
    slope, start = np.polyfit(counts, times, 1)
    line = wave_fit.fit(counts, times, slots=1)
    assert (line.t0_ms, line.t_wave_ms) == pytest.approx((start, slope))


@pytest.mark.parametrize("num_waves", [2, 4, 8])
def test_a_line_explains_most_of_a_staircase(num_waves):
    counts = list(range(1, 1000 * num_waves + 1))
    times = staircase(counts, 1000)
    line = wave_fit.fit(counts, times, slots=1)
    assert line.r_squared == pytest.approx(1 - 1 / num_waves**2, abs=0.01)
    steps = wave_fit.fit(counts, times, slots=1000)
    assert wave_fit.explained_beyond_a_line(steps, counts, times) == pytest.approx(1)
    wrong = wave_fit.fit(counts, times, slots=1500)
    assert wave_fit.explained_beyond_a_line(wrong, counts, times) < 0


def test_steps_are_no_better_than_a_line_on_a_line():
    counts = list(range(1, 400))
    times = [0.01 * count for count in counts]
    steps = wave_fit.fit(counts, times, slots=100)
    assert wave_fit.explained_beyond_a_line(steps, counts, times) < -1e6
    noisy = [t + 1e-3 * (-1) ** i for i, t in enumerate(times)]
    steps = wave_fit.fit(counts, noisy, slots=100)
    assert wave_fit.explained_beyond_a_line(steps, counts, noisy) < 0


@pytest.mark.parametrize("slots", [36, 80, 132])
def test_the_slots_are_found_in_a_noisy_run(slots):
    rng = random.Random(slots)

    def simulated(count):
        blocks = waves.schedule([rng.gauss(1, 0.02) for _ in range(count)], slots)
        return 0.05 + max(block.end for block in blocks)

    counts = wave_fit.tile_counts(slots)
    fewest, most = wave_fit.likely_slots(counts, [simulated(count) for count in counts])
    assert fewest <= slots <= most and most - fewest <= 3


def test_slots_that_no_sample_tells_apart_are_all_named():
    counts = [4, 8, 12, 20, 24, 30]
    assert wave_fit.likely_slots(counts, staircase(counts, 9)) == (8, 9)
    assert wave_fit.likely_slots(counts, staircase(counts, 9), candidates=[5, 9]) == (9, 9)


@pytest.mark.parametrize(
    "counts, times, slots",
    [
        ([1, 2], [1.0, 2.0], 0),
        ([1, 2], [1.0, 2.0], 1.5),
        ([1, 2], [1.0], 1),
        ([1, 2], [1.0, math.nan], 1),
        ([1, 2], [1.0, 2.0], 2),  # one wave only
        ([1, 2], [1.0, 1.0], 1),
        ([], [], 1),
        ([0, 2], [1.0, 2.0], 1),
    ],
)
def test_what_cannot_be_fitted_is_refused(counts, times, slots):
    with pytest.raises(ValueError):
        wave_fit.fit(counts, times, slots)


def test_slots_with_one_height_are_passed_over():
    assert wave_fit.likely_slots([30, 31, 40], [1.0, 2.0, 3.0]) is not None
    for counts, candidates in (([1], None), ([1, 2], []), ([3, 4], [7])):
        with pytest.raises(ValueError, match="no number of slots"):
            wave_fit.likely_slots(counts, [1.0] * len(counts), candidates)


def test_grids_are_the_most_nearly_square():
    for tiles in range(1, 600):
        rows, columns = wave_fit.grid_of(tiles)
        assert rows * columns == tiles and rows <= columns
        assert not any(tiles % r == 0 for r in range(rows + 1, math.isqrt(tiles) + 1))
    with pytest.raises(ValueError):
        wave_fit.grid_of(0)


@pytest.mark.parametrize("slots", [1, 7, 24, 108, 132, 264])
def test_counts_lie_on_both_sides_of_every_border(slots):
    counts = wave_fit.tile_counts(slots)
    assert counts == sorted(set(counts)) and counts[0] == 1 and counts[-1] <= 4 * slots
    for border in range(slots, 4 * slots, slots):
        assert any(border - 6 <= count <= border for count in counts)
        assert any(border < count <= border + 6 for count in counts)
    assert all(wave_fit.grid_of(t)[0] >= min(4, math.isqrt(t)) for t in counts)
    assert 131 not in counts and 127 not in counts  # primes are strips


@pytest.mark.parametrize("slots", [1, 2, 76, 108, 132])
def test_the_worst_case_by_brute_force(slots):
    for num_waves in range(1, 6):
        counts = range((num_waves - 1) * slots + 1, num_waves * slots + 1)
        worst = min(waves.utilisation(count, slots) for count in counts)
        assert wave_fit.worst_utilisation(num_waves, slots) == worst
        # ... and whatever comes after is no worse.
        later = range((num_waves - 1) * slots + 1, (num_waves + 4) * slots)
        assert min(waves.utilisation(count, slots) for count in later) == worst


def test_the_lecture_s_rule():
    assert wave_fit.worst_utilisation(5, 132) == pytest.approx(0.8015, abs=1e-4)
    with pytest.raises(ValueError):
        wave_fit.worst_utilisation(0, 132)
