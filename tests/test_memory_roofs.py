"""Levels of memory told apart, on ladders whose levels are known, and what the readers read."""

import dataclasses
import inspect

import pandas as pd
import pytest
import torch

from helpers import memory_roofs, specs
from helpers.check import assert_close
from helpers.device import device, has_cuda, triton_version
from helpers.memory_roofs import plateaus, size_text

NEEDS_GPU = pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
NEEDS_TRITON = pytest.mark.skipif(not triton_version(), reason="needs Triton")


@pytest.mark.parametrize(
    "rates, levels",
    [
        ([100] * 4 + [40] * 3 + [10] * 2, [(0, 3), (4, 6), (7, 8)]),  # clean
        ([100, 91, 110, 95, 44, 36, 40, 10, 9.1, 11], [(0, 3), (4, 6), (7, 9)]),  # within 10%
        ([50, 70, 100, 99, 20, 20], [(2, 3), (4, 5)]),  # a slow start: the cost of the call
        ([50, 50, 100, 100, 20, 20], [(2, 3), (4, 5)]),
        ([79, 100, 100], [(1, 2)]),
        ([81, 100, 100], [(0, 2)]),  # within the factor
        ([100, 100, 70, 40, 40, 20, 10, 10], [(0, 1), (3, 4), (6, 7)]),  # mixtures of two levels
        ([100, 100, 40], [(0, 1)]),
        ([1, 2, 4, 8], []),  # rising: the cost of the call throughout
        ([8, 4, 2, 1], []),
        ([100], []),
        ([], []),
        ([100, 100], [(0, 1)]),
        ([100] * 5, [(0, 4)]),
        ([100, 100, 85, 85], [(0, 3)]),  # too close to be two levels
        ([100, 100, 78, 78], [(0, 1), (2, 3)]),
        ([100, 100, 60, 90, 90], [(0, 4)]),  # one slow sample does not make two levels
        ([100, 100, 50, 50, 70, 70], [(0, 1), (2, 5)]),  # never faster with a larger footprint
        ([100, 100, 50, 40, 40, 20, 20], [(0, 1), (2, 4), (5, 6)]),
    ],
)
def test_plateaus_of_ladders_that_are_known(rates, levels):
    found = plateaus(rates)
    assert found == levels
    assert plateaus([rate * 1e-3 for rate in rates]) == found  # whatever the unit
    top = [max(rates[first : last + 1]) for first, last in found]
    assert all(a >= memory_roofs.SAME_LEVEL * b for a, b in zip(top, top[1:], strict=False))


def ladder(**paths) -> pd.DataFrame:
    """A frame like memory_ladder's: rates by path, for footprints of 1 KB, 2 KB, 4 KB …"""
    rows = [
        (1024 * 2**place, path.replace("_", " "), rate)
        for path, rates in paths.items()
        for place, rate in enumerate(rates)
    ]
    return pd.DataFrame(rows, columns=["footprint_bytes", "path", "gb_per_s"])


def named(frame) -> dict[str, float]:
    roofs = memory_roofs.memory_roofs(frame)
    assert [roof.value for roof in roofs] == sorted((roof.value for roof in roofs), reverse=True)
    return {roof.name: roof.value for roof in roofs}


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(memory_roofs, "has_cuda", lambda: True)


@pytest.fixture
def cpu(monkeypatch):
    """One whose L1, L2 and L3 hold 4 KB, 32 KB and 256 KB."""
    monkeypatch.setattr(memory_roofs, "has_cuda", lambda: False)
    sizes = {"L1": 4 * 1024, "L2": 32 * 1024, "L3": 256 * 1024}
    monkeypatch.setattr(memory_roofs, "cpu_caches", lambda: sizes)


def test_a_gpus_l1_is_what_only_one_path_sees(gpu):
    frame = ladder(
        all_caches=[200, 200, 200, 80, 80, 10, 10],
        past_the_L1=[84, 86, 82, 83, 85, 11, 11],
    )
    assert named(frame) == {"L1": 200, "L2": 84, "memory, read": 11}


def test_a_gpu_without_a_faster_l1_starts_at_the_l2(gpu):
    frame = ladder(all_caches=[90, 90, 80, 10, 10], past_the_L1=[80, 80, 80, 11, 11])
    assert named(frame) == {"L2": 90, "memory, read": 11}


def test_one_path_alone_counts_from_the_l1(gpu):
    assert named(ladder(all_caches=[90, 90, 30, 30, 10, 10])) == {
        "L1": 90,
        "L2": 30,
        "memory, read": 10,
    }


def test_a_ladder_without_cliffs_is_the_memory(gpu):
    assert named(ladder(all_caches=[10, 10.5, 10])) == {"memory, read": 10}


def test_no_ladder_has_no_roofs(gpu):
    assert named(ladder()) == named(ladder(all_caches=[])) == {}
    assert named(ladder(all_caches=[10])) == named(ladder(all_caches=[8, 4, 2])) == {}


def test_a_roof_is_the_median_of_its_level_and_says_how_it_was_found(gpu):
    roofs = memory_roofs.memory_roofs(ladder(all_caches=[100, 101, 109, 30, 10, 12, 11]))
    assert [roof.value for roof in roofs] == [101, 11]
    assert roofs[0].how == "all caches, footprints 1 KB to 4 KB"
    assert roofs[1].how == "all caches, footprints 16 KB to 64 KB"


def test_a_cpus_levels_are_named_by_their_sizes(cpu):
    rates = [100] * 3 + [60] * 3 + [30] * 3 + [10] * 2  # 1, 2, 4; 8, 16, 32; 64, 128, 256 KB; …
    assert named(ladder(all_caches=rates)) == {"L1": 100, "L2": 60, "L3": 30, "memory, read": 10}
    as_fast = [60] * 6 + [30] * 3 + [10] * 2
    assert named(ladder(all_caches=as_fast)) == {"L1, L2": 60, "L3": 30, "memory, read": 10}
    late = [20, 40] + [60] * 4 + [30] * 3 + [10] * 2  # the smallest footprints are all overhead
    assert named(ladder(all_caches=late)) == {"L1, L2": 60, "L3": 30, "memory, read": 10}


def test_a_cpu_that_hides_its_caches_counts_from_the_l1(cpu, monkeypatch):
    monkeypatch.setattr(memory_roofs, "cpu_caches", dict)
    assert named(ladder(all_caches=[60] * 3 + [30] * 3 + [10] * 2)) == {
        "L1": 60,
        "L2": 30,
        "memory, read": 10,
    }


def test_a_gpus_caches_are_those_of_its_datasheet(gpu, monkeypatch):
    h100 = specs.get("H100 SXM")
    monkeypatch.setattr(specs, "this_gpu", lambda: h100)
    assert memory_roofs.cache_bytes() == {"all L1s": 132 * 256 * 1024, "L2": 50 * 2**20}
    unknown = dataclasses.replace(h100, l1_kb_per_sm=None)
    monkeypatch.setattr(specs, "this_gpu", lambda: unknown)
    assert memory_roofs.cache_bytes() == {"L2": 50 * 2**20}


def test_cpu_caches_never_fails_and_grows():
    sizes = list(memory_roofs.cpu_caches().values())
    assert sizes == sorted(sizes) and all(size >= 1024 for size in sizes)


def read_by(run):
    """The tensor that a reader reads, from its closure."""
    return inspect.getclosurevars(run).nonlocals["x"]


@pytest.mark.parametrize("footprint", [4096, 10_000, 2**20])
def test_sum_repeatedly_reads_what_it_says(footprint, monkeypatch):
    monkeypatch.setattr(memory_roofs, "READ_BYTES", {"cpu": 2**22, "cuda": 2**22})
    run, nbytes, read = memory_roofs.sum_repeatedly(footprint)
    x = read_by(run)
    assert x.device.type == device().type and x.dtype == torch.float32
    assert x.std() > 0.2  # zeros would draw less power
    assert nbytes == x.nbytes and footprint - 4 * len(x) < nbytes <= footprint
    sums = run()
    assert read == sums.numel() // len(x) * nbytes  # each sum is one pass over one row
    if not has_cuda():
        assert 2**22 - nbytes < read <= 2**22
    once = x.double().sum()
    assert_close(sums.double().sum(), sums.shape[1] * once, 1e-6)
    assert_close(sums, x.double().sum(2).expand(sums.shape), 1e-6)


def test_sum_repeatedly_gives_every_thread_a_row(monkeypatch):
    monkeypatch.setattr(memory_roofs, "has_cuda", lambda: False)
    monkeypatch.setattr(memory_roofs, "device", lambda: torch.device("cpu"))
    monkeypatch.setattr(memory_roofs, "READ_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    run, nbytes, read = memory_roofs.sum_repeatedly(6 * 1024)
    assert run().shape == (6, 2**16 // (6 * 1024))
    assert (nbytes, read) == (6 * 1024, 6 * 1024 * (2**16 // (6 * 1024)))
    run, nbytes, read = memory_roofs.sum_repeatedly(2**17)  # more than is to be read: once
    assert run().shape == (6, 1) and read == nbytes
    assert memory_roofs.sum_repeatedly(1)[1] == 6 * 4  # an element a thread at least


def walked(x, programs, chunk, steps, block):
    """What the kernel reads, in float64: each program its own chunk, round and round."""
    parts = x.double().reshape(programs, chunk // block, block).sum(2)
    visits = [len(range(i, steps, chunk // block)) for i in range(chunk // block)]
    return parts @ torch.tensor(visits, dtype=torch.float64, device=x.device)


@NEEDS_TRITON
@pytest.mark.parametrize("path", memory_roofs.PATHS)
@pytest.mark.parametrize("programs, blocks, steps", [(1, 1, 1), (3, 4, 4), (2, 3, 7), (5, 1, 6)])
def test_the_kernels_sums_against_float64(programs, blocks, steps, path):
    """In Triton's interpreter where there is no GPU."""
    block = 64
    x = torch.rand(programs * blocks * block, device=device())
    out = torch.full((programs + 1,), -1.0, device=device())
    memory_roofs.read_repeatedly_kernel[(programs,)](
        x, out, blocks * block, steps, block, memory_roofs.PATHS[path]
    )
    assert_close(out[:programs], walked(x, programs, blocks * block, steps, block), 1e-6)
    assert out[programs] == -1  # and nothing beyond


@NEEDS_GPU
@NEEDS_TRITON
@pytest.mark.parametrize("path", memory_roofs.PATHS)
@pytest.mark.parametrize("footprint", [1, 5_000_000, 2**26 + 17])
def test_read_repeatedly_reads_what_it_says(footprint, path, monkeypatch):
    monkeypatch.setattr(memory_roofs, "READ_BYTES", {"cuda": 2**25})
    run, nbytes, read = memory_roofs.read_repeatedly(footprint, path)
    x, out = read_by(run), run()
    smallest = 4 * len(out) * memory_roofs.BLOCK
    assert nbytes == x.nbytes and (nbytes <= footprint or nbytes == smallest)
    assert footprint - nbytes < smallest
    chunk, steps = x.numel() // len(out), read // 4 // len(out) // memory_roofs.BLOCK
    assert read == 4 * len(out) * steps * memory_roofs.BLOCK >= nbytes
    assert_close(out, walked(x, len(out), chunk, steps, memory_roofs.BLOCK), 1e-5)


def test_a_ladder_has_the_rates_of_its_readers(monkeypatch):
    """1 ms a call at best: so many bytes are so many MB/s."""
    monkeypatch.setattr(memory_roofs, "has_cuda", lambda: False)
    monkeypatch.setattr(memory_roofs, "free_bytes", lambda: 8192)
    monkeypatch.setattr(
        memory_roofs, "sum_repeatedly", lambda wanted: (None, wanted // 1000 * 1000, 6e6)
    )
    fake = type("Fake", (), {"samples_ms": (3.0, 1.0, 2.0)})
    monkeypatch.setattr(memory_roofs, "measure", lambda *_, cache, budget_ms: fake)
    frame = memory_roofs.memory_ladder([8192, 4096, 2048, 2049])
    # Too large a footprint is left out, one that is there already too; the rest grow.
    assert frame["footprint_bytes"].tolist() == [2000, 4000] and frame.index.tolist() == [0, 1]
    assert set(frame["path"]) == {"all caches"}
    assert frame["gb_per_s"].tolist() == pytest.approx([6, 6])


def test_there_is_a_copy_roof():
    roof = memory_roofs.copy_roof()
    assert roof.name == "memory, copy" and roof.value > 0 and "copied" in roof.how


def test_the_link_to_the_host_has_two_directions():
    roofs = memory_roofs.host_link_roofs()
    assert [roof.name for roof in roofs] == (
        ["CPU's memory to GPU", "GPU to CPU's memory"] if has_cuda() else []
    )
    assert all(roof.value > 0 for roof in roofs)


@pytest.mark.parametrize(
    "nbytes, text",
    [
        (0, "0 bytes"),
        (17, "17 bytes"),
        (999, "999 bytes"),
        (1000, "0.977 KB"),
        (1023, "0.999 KB"),
        (1024, "1 KB"),
        (16 * 1024, "16 KB"),
        (1010 * 1024, "0.986 MB"),
        (3 * 2**19, "1.5 MB"),
        (2**30, "1 GB"),
        (3 * 2**29, "1.5 GB"),
        (141 * 2**30, "141 GB"),
    ],
)
def test_size_text(nbytes, text):
    assert size_text(nbytes) == text


def test_cpu_caches_of_more_threads_are_as_large_or_larger():
    one, many = memory_roofs.cpu_caches(threads=1), memory_roofs.cpu_caches(threads=1 << 12)
    assert set(one) == set(many)
    assert all(many[level] >= 4 * one[level] for level in one)  # no cache serves 1,024 threads
    assert memory_roofs.cpu_caches() == memory_roofs.cpu_caches(torch.get_num_threads())
