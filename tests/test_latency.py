"""Rings, levels, and the frames of latency and in_flight; their kernels through the emulator."""

import dataclasses
import itertools
import re

import pandas as pd
import pytest
import torch
from cuda_cases import CASES

from helpers import cuda, in_flight, latency, native, rings, specs, strides
from helpers.check import relative_error
from helpers.device import device, has_cuda
from helpers.emulator import KernelFault, Unsupported
from helpers.ptx import ToolMissing

CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(has_cuda(), reason="there is a GPU")
on_gpu = pytest.mark.skipif(not has_cuda(), reason="needs a GPU")


@pytest.mark.parametrize("order", rings.ORDERS)
@pytest.mark.parametrize("lines, step_bytes", [(2, 4), (7, 64), (100, 128)])
def test_a_ring_meets_every_line_once(order, lines, step_bytes):
    chain, places = rings.ring(lines * step_bytes + step_bytes - 4, order, step_bytes, CPU)
    assert chain.nbytes == lines * step_bytes and chain.dtype == torch.int32
    met, at = [], int(places[0])
    for _ in range(lines):
        met.append(at)
        at = int(chain[at])
    assert at == places[0] and met == places.tolist()
    assert sorted(met) == [i * step_bytes // 4 for i in range(lines)]
    assert (met == sorted(met)) == (order == "sequential" or lines == 2 and met[0] == 0)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("order", rings.ORDERS)
@pytest.mark.parametrize("lines, step_bytes", [(2, 8), (7, 64), (100, 128)])
def test_a_ring_of_addresses_meets_every_line_once(where, order, lines, step_bytes):
    chain, places = rings.ring(lines * step_bytes, order, step_bytes, where, "address")
    assert chain.nbytes == lines * step_bytes and chain.dtype == torch.int64
    base = chain.data_ptr() if where == "cuda" else 0
    met, at = [], int(places[0])
    for _ in range(lines):
        met.append(at)
        at = int(chain[at // 8]) - base
    assert at == places[0] and met == places.tolist()
    assert sorted(met) == [i * step_bytes for i in range(lines)]


def test_rings_of_one_piece_of_memory():
    into = torch.full((4096,), -1, dtype=torch.int32)
    for footprint in (1 << 14, 1 << 10):
        chain, places = rings.ring(footprint, "random", 64, CPU, into=into)
        assert chain.data_ptr() == into.data_ptr()
        other, others = rings.ring(footprint, "random", 64, CPU)
        assert torch.equal(places, others) and torch.equal(chain[places], other[places])


def test_where_to_measure():
    assert rings.measured_on(None) == device() and rings.measured_on("cpu") == CPU
    with pytest.raises(ValueError, match='"cpu" or "cuda", not "meta"'):
        rings.measured_on("meta")
    if has_cuda():
        assert rings.measured_on("cuda") == device()
        return
    calls = (latency.staircase, latency.cycle_ns, in_flight.in_flight, strides.strides)
    for call in (*calls, strides.misaligned, lambda where: latency.levels(None, where)):
        with pytest.raises(Unsupported, match="measured on a GPU, and there is none here"):
            call(where="cuda")


def test_rings_that_cannot_be():
    with pytest.raises(ValueError, match="step must be one of index, address, not 'pointer'"):
        rings.ring(1000, "random", 64, CPU, "pointer")
    with pytest.raises(ValueError, match="100 bytes are too small a footprint"):
        rings.ring(100, "random", 64, CPU)
    with pytest.raises(ValueError, match="order must be one of sequential, random, not 'up'"):
        rings.ring(1000, "up", 64, CPU)
    with pytest.raises(ValueError, match="reach 8 GB"):
        rings.ring(1 << 34, "random", 64, CPU)


def frame(cycles: dict) -> pd.DataFrame:
    columns = {"footprint_bytes": list(cycles), "cycles": list(cycles.values())}
    return pd.DataFrame(columns).assign(ns=lambda frame: frame["cycles"] / 2)


def listed(found: pd.DataFrame) -> list[tuple]:
    assert list(found.columns) == ["level", "cycles", "ns"]
    assert (found["ns"] == found["cycles"] / 2).all()
    return list(zip(found["level"], found["cycles"], strict=True))


KB = 1 << 10
H200 = {16: 41, 128: 40, 512: 287, 4096: 341, 16384: 416, 32768: 571, 131072: 651, 2 << 20: 671}


def test_levels_are_taken_well_inside_the_caches(monkeypatch):
    monkeypatch.setattr(latency, "_own_caches", lambda _: {"L1": 256 * KB, "L2": 50 << 20})
    found = latency.levels(frame({k * KB: v for k, v in H200.items()}))
    assert listed(found) == [("L1", 40.5), ("L2", 341), ("memory", 661)]
    assert listed(latency.levels(frame({KB: 30, 64 << 20: 600}))) == [("L1", 30)]


def test_levels_by_plateaus_where_sizes_are_unknown(monkeypatch):
    monkeypatch.setattr(latency, "_own_caches", lambda _: {})
    cycles = dict(zip((KB << k for k in range(7)), (4, 4, 14, 14, 60, 300, 310), strict=True))
    assert listed(latency.levels(frame(cycles))) == [("L1", 4), ("L2", 14), ("memory", 305)]


def test_own_caches_are_those_of_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        two = latency._own_caches(CPU)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        assert latency._own_caches(CPU) == two
    finally:
        torch.set_num_threads(before)


def test_own_caches_of_a_gpu_are_one_sms_l1_and_the_l2(monkeypatch):
    h100 = specs.get("H100 SXM")
    monkeypatch.setattr(specs, "this_gpu", lambda: h100)
    gpu = torch.device("cuda")
    assert latency._own_caches(gpu) == {"L1": 256 * KB, "L2": 50 << 20}
    unknown = dataclasses.replace(h100, l2_mb=None)
    monkeypatch.setattr(specs, "this_gpu", lambda: unknown)
    assert latency._own_caches(gpu) == {}  # then levels are told apart by plateaus


def test_staircase_on_a_cpu(compiled):
    found = latency.staircase([1 << 20, 1 << 12], budget_s=0.02, where="cpu")
    assert list(found.columns) == ["footprint_bytes", "cycles", "ns"]
    assert found["footprint_bytes"].tolist() == [1 << 12, 1 << 20]
    assert (found[["cycles", "ns"]] > 0).all(axis=None)
    ratios = found["cycles"] / found["ns"]
    assert ratios[0] == pytest.approx(ratios[1])
    with pytest.raises(ValueError, match="no footprint"):
        latency.staircase([1 << 60], where="cpu")
    with pytest.raises(Unsupported, match="a CPU's load makes its address itself"):
        latency.staircase(where="cpu", step="address")
    with pytest.raises(ValueError, match="step must be one of index, address, not 'pointer'"):
        latency.staircase(where="cpu", step="pointer")


@pytest.fixture
def additions(monkeypatch):
    """A CPU with a cycle of 0.25 ns, unless it is interrupted."""
    times_ns = itertools.cycle((0.5, 0.25, 1.0))
    monkeypatch.setattr(native, "add_ns", lambda *_: next(times_ns))


def test_a_staircase_is_the_time_of_one_step(monkeypatch, additions):
    step_ns = {1 << 12: 1.5, 1 << 14: 6.0}

    def chase(chain, at, steps):
        return int(step_ns[chain.nbytes] * steps)

    monkeypatch.setattr(native, "chase", chase)
    assert latency.cycle_ns("cpu") == 0.25
    found = latency.staircase(step_ns, budget_s=0, where="cpu")
    assert found.values.tolist() == [[1 << 12, 6, 1.5], [1 << 14, 24, 6]]


def test_a_typical_time_is_one_that_nothing_interrupted():
    assert rings.typical([60.0, 4.0, 3.0, 5.0, 900.0, 70.0]) == 4


@pytest.mark.parametrize("step", rings.STEPS)
def test_walks_of_a_gpu_in_the_emulator(step):
    try:
        samples = latency._gpu_cycles(1 << 12, "random", step, 0.0, CPU, steps=100)
    except Unsupported as reason:
        pytest.skip(str(reason))
    assert len(samples) == rings.MIN_SLICES and min(samples) > 0
    assert latency._shared_cycles(1 << 10, 100, step, CPU) > 0
    with pytest.raises(ValueError, match="holds 16 KB, not 32 KB"):
        latency._shared_cycles(32 << 10, 100, step, CPU)


@on_gpu
@pytest.mark.parametrize("step", rings.STEPS)
def test_latencies_of_a_gpu(step):
    found = latency.staircase([1 << 14, 1 << 22], budget_s=0.05, where="cuda", step=step)
    assert (found[["cycles", "ns"]] > 0).all(axis=None)
    assert latency.shared_latency_cycles(step=step) > 0


@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_between_two_loads_of_addresses_is_nothing(arch):
    walks = {"chase_addresses": r"LDG\.E\.64", "chase_shared": "LDS"}
    for name, load in walks.items():
        defines = {"SHARED_STEP": "4"} if name == "chase_shared" else {}
        try:
            lines = cuda.load("memory.cu", name, **defines).sass(arch).splitlines()
        except ToolMissing as reason:
            pytest.skip(str(reason))
        loads = "".join("x" if re.search(rf"\s{load}", line) else "." for line in lines)
        assert "x" * 14 in loads, (name, loads)


@on_cpu
def test_what_only_a_gpu_has():
    for call in (latency.shared_latency_cycles, strides.vector_widths):
        with pytest.raises(Unsupported, match="measured on a GPU, and there is none here"):
            call()


COLUMNS = ["warps", "loads", "in_flight", "bytes_each", "bytes_in_flight", "gb_per_s"]


def test_in_flight_on_a_cpu(compiled):
    found = in_flight.in_flight([1, 16], 1 << 20, budget_s=0.01, where="cpu")
    assert list(found.columns) == COLUMNS
    assert found[COLUMNS[:-1]].values.tolist() == [[1, 1, 1, 64, 64], [16, 1, 16, 64, 1024]]
    assert (found["gb_per_s"] > 0).all()
    with pytest.raises(ValueError, match="1 to 16 chains"):
        in_flight.in_flight([17], 1 << 20, where="cpu")
    assert in_flight.bytes_needed(350, 4800) == 1_680_000


def test_in_flight_counts_the_lines_of_all_chains(monkeypatch):
    monkeypatch.setattr(native, "chase", lambda chain, at, steps: 16 * steps)
    found = in_flight.in_flight([1, 3, 16], 1 << 20, budget_s=0, where="cpu")
    assert found["gb_per_s"].tolist() == [4, 12, 64]  # 64 bytes a chain in 16 ns


def test_in_flight_of_a_gpu_counts_lanes_loads_warps_and_sms(monkeypatch):
    """A GPU of 2 SMs, on which a launch's rate is its number."""
    launches = []

    def read_launch(x, warps, lane_bytes, loads):
        launches.append((warps, lane_bytes, loads))
        return len(launches)

    def measure(run, nbytes, **_):
        assert nbytes == 1 << 16
        return type("Measurement", (), {"gb_per_s": float(run)})

    monkeypatch.setattr(in_flight, "measured_on", torch.device)
    monkeypatch.setattr(torch, "rand", lambda n, device: torch.zeros(n))
    monkeypatch.setattr(in_flight, "read_launch", read_launch)
    monkeypatch.setattr(in_flight, "measure", measure)
    found = in_flight.in_flight((1, 8), 1 << 16, ((4, 1), (16, 4)), where="cuda")
    assert launches == [(1, 4, 1), (8, 4, 1), (1, 16, 4), (8, 16, 4)]
    assert found[COLUMNS].values.tolist() == [
        [1, 1, 1, 128, 256, 1],
        [8, 1, 8, 128, 2048, 2],
        [1, 4, 4, 512, 4096, 3],
        [8, 4, 32, 512, 32768, 4],
    ]


@pytest.mark.parametrize("warps, lane_bytes, loads", [(1, 4, 1), (3, 8, 2), (34, 16, 4)])
def test_read_launch_reads_all_once(warps, lane_bytes, loads):
    x = torch.rand(3 * 4 * 1025, generator=torch.Generator().manual_seed(0))
    run = in_flight.read_launch(x, warps, lane_bytes, loads)
    try:
        sums = run()
    except Unsupported as reason:
        pytest.skip(str(reason))
    assert sums.numel() == 2 * 32 * warps  # two SMs
    assert sums.double().sum().item() == pytest.approx(x.double().sum().item(), rel=1e-6)


def test_launches_that_cannot_be():
    x = torch.zeros(64)
    with pytest.raises(ValueError, match="loads 4, 8, 16 bytes, not 12"):
        in_flight.read_launch(x, 1, 12)
    with pytest.raises(ValueError, match="whole loads of 16 bytes"):
        in_flight.read_launch(x[:63], 1, 16)
    with pytest.raises(ValueError, match="33 warps on an SM are not 2 equal blocks"):
        in_flight.read_launch(x, 33, 4)


# Edits of a kernel's text, each of which makes it wrong.
MUTANTS = (
    ("chase", "i < warmup", "i < warmup + 1"),
    ("chase", "i < steps", "i < steps - 1"),
    ("chase", "int here = *at", "int here = 0"),
    ("chase_addresses", "i < warmup", "i < warmup + 1"),
    ("chase_addresses", "i < steps", "i < steps - 1"),
    ("chase_addresses", "next + *at / 8", "next"),
    ("chase_addresses", "next[i] -= (long long)next", "next[i] += 0"),
    ("chase_shared", "i < n;", "i < n - 1;"),
    ("chase_shared", "SHARED_STEP * *at", "*at"),
    ("chase_shared", "here / SHARED_STEP", "here"),
    ("chase_shared", "__syncthreads();", ""),
    ("chain_fma", "fmaf(a, v, a)", "fmaf(a, a, v)"),
    ("chain_fma", "blockIdx.x * (long long)blockDim.x + ", ""),
    ("read_strided", "i < n;", "i <= n;"),
    ("read_strided", "x + offset", "x"),
    ("read_strided", "i += threads", "i += blockDim.x"),
    ("read_strided", "round < rounds", "round < 1"),
    ("read_strided", "block = (block + 37) % gridDim.x;", ""),
    ("read_strided", "block = (block + 37)", "block = (block + 38)"),
    ("read_in_flight", "(LOADS - 1) * threads < n", "threads < n"),
    ("read_in_flight", "i += LOADS * threads", "i += threads"),
    ("read_in_flight", "total += sum(x[i])", "total = sum(x[i])"),
)


@pytest.mark.parametrize("name, before, after", MUTANTS)
def test_mutants_of_the_kernels_are_caught(name, before, after):
    case = [case for case in CASES if case.kernel == name and case.file == "memory.cu"][-1]
    right = case.load()
    assert before in right.function
    text = right.text.replace(right.function, right.function.replace(before, after))
    mutant = cuda.Kernel(text, name, case.file, case.defines)
    for size in case.sizes:
        launch = case.launch(size, CPU)
        try:
            mutant.emulate(launch.grid, launch.block, *launch.arguments, order="reverse")
        except KernelFault:
            return
        except Unsupported as reason:
            pytest.skip(str(reason))
        for position, expected in launch.expected.items():
            if not relative_error(launch.arguments[position], expected) <= case.tolerance:
                return
    pytest.fail("the mutant's results are right for all sizes")


def test_a_stream_counts_every_array_once(monkeypatch):
    monkeypatch.setattr(native, "read", lambda x, threads: (1000 * threads, 0.0))
    monkeypatch.setattr(native, "copy", lambda x, y, threads: 2000)
    monkeypatch.setattr(native, "triad", lambda x, z, y, scale, threads: 1000)
    found = in_flight.cpu_stream(2, array_bytes=1 << 20)
    assert found.values.tolist() == [
        ["read", (1 << 20) / 2000],
        ["copy", 2 * (1 << 20) / 2000],
        ["triad", 3 * (1 << 20) / 1000],
    ]


def test_a_stream_on_this_cpu(compiled):
    found = in_flight.cpu_stream(array_bytes=1 << 16)
    assert found["operation"].tolist() == ["read", "copy", "triad"]
    assert (found["gb_per_s"] > 0).all()
