"""Tiles, waves and occupancy: against the lecture, brute force and NVIDIA's own calculator."""

import dataclasses
import importlib.util
import itertools
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from helpers import specs, waves

A100 = specs.get("A100 SXM4 40GB")


def test_the_lecture_s_numbers():
    assert waves.tiles(1792, 1792, 256, 128) == 7 * 14 == 98
    assert waves.tiles(1793, 1793, 256, 128) == 8 * 15 == 120
    assert (waves.waves(98, A100.sms), waves.waves(120, A100.sms)) == (1, 2)
    assert waves.utilisation(98, A100.sms) == 98 / 108
    assert waves.utilisation(120, A100.sms) == 120 / 216
    assert waves.tiles(256, 256, 128, 128) == 4
    assert waves.cover_utilisation(256, 256, 128, 128) == 1
    assert waves.cover_utilisation(257, 257, 128, 128) == 257**2 / (9 * 128**2)
    nearly_empty = [t for t in waves.tile_sizes(257, 257, 128, 128) if 1 in (t.rows, t.columns)]
    assert len(waves.tile_sizes(257, 257, 128, 128)) == 9 and len(nearly_empty) == 5


SIZES = tuple(itertools.product((1, 2, 7, 16, 33), (1, 5, 16), (1, 3, 16), (1, 4, 40)))


@pytest.mark.parametrize("m, n, tile_m, tile_n", SIZES)
def test_tiles_by_brute_force(m, n, tile_m, tile_n):
    owner = {(i, j): (i // tile_m, j // tile_n) for i in range(m) for j in range(n)}
    found = waves.tile_sizes(m, n, tile_m, tile_n)
    assert waves.tiles(m, n, tile_m, tile_n) == len(found) == len(set(owner.values()))
    covered = [
        (i, j)
        for tile in found
        for i in range(tile.row, tile.row + tile.rows)
        for j in range(tile.column, tile.column + tile.columns)
    ]
    assert sorted(covered) == sorted(owner)  # each element once, none outside
    assert [(t.row // tile_m, t.column // tile_n) for t in found] == sorted(set(owner.values()))
    share = m * n / sum(tile_m * tile_n for _ in found)
    assert waves.cover_utilisation(m, n, tile_m, tile_n) == pytest.approx(share)


@pytest.mark.parametrize("num_sms, places", tuple(itertools.product((1, 3, 108), (1, 2, 5))))
@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3, 107, 108, 109, 216, 541])
def test_waves_by_brute_force(num_blocks, num_sms, places):
    left, count, busy = num_blocks, 0, 0
    while left > 0:
        busy += min(left, num_sms * places)
        left -= num_sms * places
        count += 1
    assert waves.waves(num_blocks, num_sms, places) == count
    expected = busy / (count * num_sms * places) if count else 0
    assert waves.utilisation(num_blocks, num_sms, places) == pytest.approx(expected)


@pytest.mark.parametrize(
    "function, arguments, said",
    [
        (waves.tiles, (0, 1, 1, 1), "m must be at least 1, not 0"),
        (waves.tiles, (1, -1, 1, 1), "n must be at least 1, not -1"),
        (waves.tile_sizes, (1, 1, 0, 1), "tile_m must be"),
        (waves.cover_utilisation, (1, 1, 1, 0), "tile_n must be"),
        (waves.waves, (-1, 1), "num_blocks must be at least 0"),
        (waves.waves, (1.5, 1), "num_blocks must be a whole number, not 1.5"),
        (waves.waves, (float("nan"), 1), "num_blocks must be a whole number, not nan"),
        (waves.tiles, (float("inf"), 1, 1, 1), "m must be a whole number, not inf"),
        (waves.waves, (1, 0), "num_sms must be"),
        (waves.utilisation, (1, 1, 0), "blocks_per_sm must be"),
        (waves.schedule, ([1], 0), "num_sms must be"),
        (waves.schedule, ([1], 1, 0), "blocks_per_sm must be"),
        (waves.schedule, ([1, -1], 1), "block 1 lasts -1"),
        (waves.schedule, ([float("nan")], 1), "block 0 lasts nan"),
        (waves.schedule, ([float("inf")], 1), "block 0 lasts inf"),
        (waves.blocks_per_sm, (0, 32, 0, A100), "threads must be at least 1"),
        (waves.blocks_per_sm, (1025, 32, 0, A100), "at most 1024 threads"),
        (waves.blocks_per_sm, (32, 0, 0, A100), "registers_per_thread must be"),
        (waves.blocks_per_sm, (32, 256, 0, A100), "255 registers, not 32 and 256"),
        (waves.blocks_per_sm, (32, 32, -1, A100), "shared_bytes must be at least 0"),
    ],
)
def test_sizes_that_make_no_sense(function, arguments, said):
    with pytest.raises(ValueError, match=said):
        function(*arguments)


@pytest.mark.parametrize("tile", [(256, 128), (128, 256), (64, 192), (96, 160), (1, 1)])
@pytest.mark.parametrize("num_sms, places", [(1, 1), (76, 1), (108, 1), (132, 2)])
def test_the_first_tooth_by_brute_force(num_sms, places, tile):
    one_by_one = (
        n for n in itertools.count(1) if waves.waves(waves.tiles(n, n, *tile), num_sms, places) > 1
    )
    assert waves.first_tooth(num_sms, *tile, places) == next(one_by_one)


def test_the_lecture_s_first_teeth():
    assert [waves.first_tooth(sms, 256, 128) for sms in (76, 108, 132)] == [1537, 1793, 2049]


# The schedule


def test_equal_blocks_make_waves():
    placed = waves.schedule([2.0] * 7, 2, 2)
    assert [(p.block, p.sm, p.slot) for p in placed[:4]] == [
        (0, 0, 0),
        (1, 1, 0),
        (2, 0, 1),
        (3, 1, 1),
    ]
    assert [p.start for p in placed] == [0] * 4 + [2] * 3
    assert max(p.end for p in placed) == 2 * waves.waves(7, 2, 2)
    assert [(p.sm, p.slot) for p in placed[4:]] == [(p.sm, p.slot) for p in placed[:3]]
    assert waves.schedule([], 3) == []


@pytest.mark.parametrize("seed", range(12))
def test_schedule_by_brute_force(seed):
    draw = random.Random(seed)
    num_sms, places = draw.randint(1, 5), draw.randint(1, 3)
    durations = [draw.randint(0, 6) for _ in range(draw.randint(1, 60))]
    free = {(slot, sm): 0 for slot in range(places) for sm in range(num_sms)}
    for placed, (block, duration) in zip(
        waves.schedule(durations, num_sms, places), enumerate(durations), strict=True
    ):
        start = min(free.values())
        slot, sm = min(place for place in free if free[place] == start)
        free[slot, sm] = start + duration
        assert dataclasses.astuple(placed) == (block, sm, slot, start, start + duration)


# Occupancy


@pytest.mark.parametrize(
    "name, block, expected",
    [
        ("A100 SXM4 40GB", (256, 32, 0), (8, "threads and registers")),
        ("A100 SXM4 40GB", (256, 33, 0), (6, "registers")),
        ("A100 SXM4 40GB", (32, 16, 0), (32, "blocks")),
        ("A100 SXM4 40GB", (1024, 65, 0), (0, "registers")),
        ("H100 SXM", (128, 255, 0), (2, "registers")),
        ("H100 SXM", (128, 32, 113 << 10), (2, "shared memory")),
        ("H100 SXM", (128, 32, (113 << 10) + 1), (1, "shared memory")),
        ("H100 SXM", (128, 32, 227 << 10), (1, "shared memory")),
        ("H100 SXM", (128, 32, (227 << 10) + 1), (0, "shared memory")),
        ("T4", (256, 32, 0), (4, "threads")),
        ("T4", (33, 32, 0), (16, "threads and blocks")),
        ("T4", (64, 32, 64 << 10), (1, "shared memory")),
        ("RTX 4090", (1024, 32, 0), (1, "threads")),
        ("RTX 4090", (32, 32, 0), (24, "blocks")),
        ("RTX 3090", (64, 32, 0), (16, "blocks")),
    ],
)
def test_blocks_that_fit_on_an_sm(name, block, expected):
    assert waves.blocks_per_sm(*block, specs.get(name)) == expected


def test_what_is_unknown_is_said():
    for gpu, said in (
        (specs.get("MI300X"), "unknown: the limits of compute capability gfx942"),
        (dataclasses.replace(A100, compute_capability=None), "compute capability None"),
        (dataclasses.replace(A100, registers_kb_per_sm=None), "registers or shared memory of"),
        (dataclasses.replace(A100, shared_kb_per_sm=None), "registers or shared memory of"),
    ):
        blocks, limit = waves.blocks_per_sm(256, 32, 0, gpu)
        assert blocks is None and said in limit


def test_the_limits_are_those_of_all_nvidia_gpus_in_the_table():
    listed = {g.compute_capability for g in specs.gpus() if not g.architecture.startswith("CDNA")}
    assert listed == set(waves.RESIDENT)


CALCULATOR = r"""
#include <climits>
#include <cstdio>
#include <cstring>
#include "cuda_occupancy.h"
int main() {
    int major, minor, max_threads, shared_kb, threads, registers, shared;
    while (scanf("%d %d %d %d %d %d %d", &major, &minor, &max_threads, &shared_kb, &threads,
                 &registers, &shared) == 7) {
        cudaOccDeviceProp gpu;
        gpu.computeMajor = major;
        gpu.computeMinor = minor;
        gpu.maxThreadsPerBlock = 1024;
        gpu.maxThreadsPerMultiprocessor = max_threads;
        gpu.regsPerBlock = gpu.regsPerMultiprocessor = 65536;
        gpu.warpSize = 32;
        gpu.sharedMemPerBlock = 48 << 10;
        gpu.sharedMemPerMultiprocessor = shared_kb << 10;
        gpu.reservedSharedMemPerBlock = major >= 8 ? 1024 : 0;
        gpu.sharedMemPerBlockOptin = (shared_kb << 10) - gpu.reservedSharedMemPerBlock;
        gpu.numSms = 100;
        cudaOccFuncAttributes kernel;
        kernel.maxThreadsPerBlock = INT_MAX;
        kernel.numRegs = registers;
        kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
        kernel.maxDynamicSharedSizeBytes = gpu.sharedMemPerBlockOptin;
        kernel.numBlockBarriers = 1;
        cudaOccDeviceState state;
        state.carveoutConfig = SHAREDMEM_CARVEOUT_MAX_SHARED;
        cudaOccResult result;
        cudaOccError error = cudaOccMaxActiveBlocksPerMultiprocessor(
            &result, &gpu, &kernel, &state, threads, shared);
        printf("%d %d\n", error ? -error : result.activeBlocksPerMultiprocessor,
               int(result.limitingFactors));
    }
}
"""
LIMITS = {1: "threads", 2: "registers", 4: "shared memory", 8: "blocks"}


def header() -> Path | None:
    """The folder with NVIDIA's occupancy calculator, which Triton brings along."""
    triton = importlib.util.find_spec("triton")
    if not triton:
        return None
    folder = Path(triton.origin).parent / "backends/nvidia/include"
    return folder if (folder / "cuda_occupancy.h").exists() else None


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.skipif(header() is None, reason="needs cuda_occupancy.h")
def test_nvidia_s_own_calculator_agrees(tmp_path):
    (tmp_path / "calculator.cpp").write_text(CALCULATOR)
    program = tmp_path / "calculator"
    subprocess.run(
        ["g++", "-w", "-I", header(), tmp_path / "calculator.cpp", "-o", program], check=True
    )
    draw, cases = random.Random(0), []
    gpus = {g.compute_capability: g for g in specs.gpus() if g.compute_capability in waves.RESIDENT}
    for capability, gpu in gpus.items():
        for _ in range(500):
            threads = draw.choice((draw.randint(1, 1024), 32 * draw.randint(1, 32)))
            most = int(gpu.shared_kb_per_sm) << 10
            just_fits = most // draw.randint(1, 32) // 128 * 128 - draw.choice((0, 1024))
            shared = draw.choice((0, draw.randint(0, most), just_fits, just_fits + 1))
            cases.append((capability, gpu, threads, draw.randint(1, 255), shared))
    lines = [
        f"{capability.replace('.', ' ')} {waves.RESIDENT[capability][0]} "
        f"{gpu.shared_kb_per_sm:.0f} {threads} {registers} {shared}"
        for capability, gpu, threads, registers, shared in cases
    ]
    answers = subprocess.run(
        [program], input="\n".join(lines), capture_output=True, text=True, check=True
    ).stdout.splitlines()
    compared = set()
    for (capability, gpu, threads, registers, shared), answer in zip(cases, answers, strict=True):
        blocks, flags = map(int, answer.split())
        if blocks < 0:  # a calculator that is older than this GPU
            continue
        compared.add(capability)
        found, limit = waves.blocks_per_sm(threads, registers, shared, gpu)
        case = (gpu.name, threads, registers, shared)
        assert found == blocks, (case, limit)
        assert set(limit.split(" and ")) == {LIMITS[f] for f in LIMITS if flags & f}, case
    assert compared >= {"7.0", "7.5", "8.0", "8.6", "8.9", "9.0"}
