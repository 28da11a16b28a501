"""The law of steps: t = t0 + ceil(tiles / slots) * t_wave, fitted to a sweep of tile counts.

A slot is a place for a block: SMs x blocks per SM. With slots = 1 the law is a straight line, time
in proportion to the work: what the steps have to be better than.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from helpers.waves import utilisation


@dataclasses.dataclass(frozen=True)
class Fit:
    """t0 and t_wave of a sweep, by least squares, and the share of its variance they explain."""

    slots: int
    t0_ms: float
    t_wave_ms: float
    r_squared: float
    residual_ms2: float  # sum of the squares of what is left

    def ms(self, num_tiles: Sequence[int] | np.ndarray) -> np.ndarray:
        """The fitted time for each number of tiles."""
        return self.t0_ms + self.t_wave_ms * _waves(num_tiles, self.slots)


def fit(num_tiles: Sequence[int], times_ms: Sequence[float], slots: int) -> Fit:
    """The law of steps for a GPU of so many slots.

    ValueError unless there is a finite time for each count of at least one tile, of at least two
    numbers of waves, and the times are not all the same.
    """
    if slots < 1 or slots % 1:
        raise ValueError(f"slots must be a whole number of at least 1, not {slots}")
    times = np.asarray(times_ms, dtype=float)
    if not (np.asarray(num_tiles) >= 1).all():
        raise ValueError("a number of tiles is at least 1")
    waves = _waves(num_tiles, slots)
    if times.shape != waves.shape or not np.isfinite(times).all():
        raise ValueError("each number of tiles needs a finite time")
    if len(set(waves)) < 2:
        raise ValueError(f"all are {waves[:1]} waves of {slots} slots: a step needs two heights")
    design = np.stack([np.ones_like(waves), waves], axis=1)
    (t0_ms, t_wave_ms), *_ = np.linalg.lstsq(design, times, rcond=None)
    residual = float(((times - design @ [t0_ms, t_wave_ms]) ** 2).sum())
    total = float(((times - times.mean()) ** 2).sum())
    if total == 0:
        raise ValueError("all times are the same: there is no variance to explain")
    return Fit(int(slots), float(t0_ms), float(t_wave_ms), 1 - residual / total, residual)


def explained_beyond_a_line(steps: Fit, num_tiles: Sequence[int], times_ms) -> float:
    """The share of what a straight line leaves unexplained that the steps explain.

    A line follows w equal steps closely: it explains about 1 - 1/w^2 of their variance, of four
    94%. Negative when the line is better.
    """
    line = fit(num_tiles, times_ms, slots=1)
    return 1 - steps.residual_ms2 / line.residual_ms2 if line.residual_ms2 else -math.inf


def likely_slots(
    num_tiles: Sequence[int], times_ms: Sequence[float], candidates: Iterable[int] | None = None
) -> tuple[int, int]:
    """The fewest and the most slots that fit a sweep best: between two samples nothing decides.

    By default all numbers up to half the largest count are tried, so that the sweep has two steps.
    """
    if candidates is None:
        candidates = range(1, max(num_tiles) // 2 + 1)
    tried = [slots for slots in candidates if len(set(_waves(num_tiles, slots))) > 1]
    if not tried:
        raise ValueError("no number of slots gives these tiles two numbers of waves")
    fits = [fit(num_tiles, times_ms, slots) for slots in tried]
    best = min(each.residual_ms2 for each in fits)
    same = [each.slots for each in fits if each.residual_ms2 <= best * (1 + 1e-9)]
    return min(same), max(same)


def grid_of(num_tiles: int) -> tuple[int, int]:
    """(rows, columns) of that many tiles in the most nearly square rectangle; rows <= columns."""
    if num_tiles < 1:
        raise ValueError(f"there is no grid of {num_tiles} tiles")
    rows = next(r for r in range(math.isqrt(num_tiles), 0, -1) if num_tiles % r == 0)
    return rows, num_tiles // rows


def tile_counts(slots: int, waves: int = 4, per_wave: int = 14, narrowest: int = 4) -> list[int]:
    """Numbers of tiles to measure, from 1 to waves x slots: evenly spread, and all around borders.

    A border is a full wave; the counts from 3 below to 6 above it are taken.

    Left out are those whose most nearly square grid has fewer than `narrowest` rows, such as
    primes: long strips of tiles share little, and memory would be measured in place of waves.
    """
    if min(slots, waves, per_wave, narrowest) < 1:
        raise ValueError("slots, waves, per_wave and narrowest must be at least 1")
    most = slots * waves
    counts = {1, *np.linspace(1, most, per_wave * waves).round().astype(int).tolist()}
    for border in range(slots, most + 1, slots):
        counts |= {border + shift for shift in range(-3, 7) if 0 < border + shift <= most}
    return sorted(t for t in counts if grid_of(t)[0] >= min(narrowest, math.isqrt(t)))


def worst_utilisation(waves: int, slots: int) -> float:
    """The least share of busy slots in so many waves: one block alone in the last of them."""
    if min(waves, slots) < 1:
        raise ValueError("waves and slots must be at least 1")
    return utilisation((waves - 1) * slots + 1, slots)


def _waves(num_tiles, slots: int) -> np.ndarray:
    return np.ceil(np.asarray(num_tiles) / slots)
