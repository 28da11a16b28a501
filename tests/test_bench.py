"""Timers, on functions whose time is known. No test asserts that something is fast."""

import math
import statistics
import subprocess
import sys
import time

import pytest
import torch

from helpers import bench, timers
from helpers.device import has_cuda
from helpers.virtual_device import VirtualDevice

NEEDS_GPU = pytest.mark.skipif(not has_cuda(), reason="needs a GPU")


def busy(ms: float):
    def run():
        end = time.perf_counter() + ms / 1000
        while time.perf_counter() < end:
            pass

    return run


def measurement(samples, **work) -> bench.Measurement:
    return bench.Measurement(tuple(samples), "host", "made up", **work)


def test_benchmark_calls_as_often_as_asked():
    calls = []
    bench.benchmark("count", lambda: calls.append(1), num_warmups=2, num_trials=5)
    assert len(calls) == 7


def test_benchmark_is_the_mean_and_leaves_the_warm_up_out():
    durations = iter([80, 2, 4, 6])  # ms; the first is the slow first call
    ms = bench.benchmark("known", lambda: busy(next(durations))())
    assert 4 <= ms < 20  # on a busy machine longer, but without the 80


@pytest.fixture
def gpu(monkeypatch):
    """A device in virtual time, whose clock and queue the timers see instead of the real ones."""
    gpu = VirtualDevice(launch_us=5, first_call_us=400)
    for module in (bench, timers):
        monkeypatch.setattr(module, "synchronize", gpu.synchronize)
        monkeypatch.setattr(module.time, "perf_counter", gpu.time)
        monkeypatch.setattr(module.time, "perf_counter_ns", lambda: round(gpu.time() * 1e9))
    return gpu


@pytest.mark.case("M01")
def test_benchmark_waits_at_both_ends(gpu):
    gpu.launch("somebody else's kernel", 90_000)
    assert bench.benchmark("k", lambda: gpu.launch("k", 1000)) == pytest.approx(1.005)


@pytest.mark.case("M01")
def test_the_host_clock_waits_at_both_ends_and_divides_by_the_calls(gpu):
    gpu.launch("somebody else's kernel", 90_000)
    long = bench.measure(lambda: gpu.launch("k", 1000), clock="host", budget_ms=10)
    assert long.samples_ms == pytest.approx([1.005] * 9)
    short = bench.measure(lambda: gpu.launch("k", 20), clock="host", budget_ms=10)
    # 100 µs must pass in a sample: four calls, of which the first launch is not hidden.
    assert short.median_ms == pytest.approx((5 + 4 * 20) / 4 / 1000, rel=1e-3)
    assert "of 4 calls" in short.method


def test_at_least_five_samples_however_long_one_takes(gpu):
    m = bench.measure(lambda: gpu.launch("k", 1e6), clock="host", budget_ms=1)
    assert len(m.samples_ms) == 5


def test_ceilings_count_the_fastest_sample(monkeypatch):
    """64 MiB copied (twice its bytes), filled and read in at best 1 ms; 2 x 1024^3 FLOPs."""
    if has_cuda():
        pytest.skip("the sizes of a GPU's ceilings depend on its memory")
    monkeypatch.setattr(bench, "measure", lambda run: measurement([3.0, 1.0, 2.0]))
    assert bench.memory_ceiling_gb_per_s.__wrapped__() == pytest.approx(2 * 2**26 / 1e-3 / 1e9)
    assert bench.compute_ceiling_tflop_per_s.__wrapped__() == pytest.approx(
        2 * 1024**3 / 1e-3 / 1e12
    )


@pytest.mark.case("M03")
def test_first_call_is_not_in_the_samples():
    """Case M03: the first call compiles."""
    slow = iter([300])
    m = bench.measure(lambda: busy(next(slow, 1))(), clock="host", budget_ms=20)
    assert 1 <= m.median_ms < 100
    assert max(m.samples_ms) < 300


@pytest.mark.parametrize("ms", [0.02, 1, 20])
def test_host_clock_reads_a_known_time(ms):
    m = bench.measure(busy(ms), clock="host", budget_ms=40)
    assert min(m.samples_ms) >= ms
    assert m.p20_ms < 3 * ms + 1
    assert m.clock == "host" and "host clock" in m.method


@pytest.mark.case("M02")
def test_cpu_work_gets_the_host_clock():
    """Case M02: also on a machine with a GPU, and where torch was built without CUDA."""
    x = torch.randn(64, 64)
    for run in (lambda: x @ x, lambda: [{"out": x + x}], lambda: time.sleep(0.001), lambda: None):
        m = bench.measure(run, budget_ms=10)
        assert m.clock == "host"
        assert 0 < m.median_ms < 1000


def test_percentiles_agree_with_the_standard_library():
    samples = (torch.rand(37, dtype=torch.float64) * 9).tolist()
    m = measurement(samples)
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    assert (m.p20_ms, m.p80_ms) == pytest.approx((fifths[0], fifths[3]), rel=1e-12)
    assert m.median_ms == pytest.approx(statistics.median(samples), rel=1e-12)


def test_rates_have_the_units_they_say(monkeypatch):
    monkeypatch.setattr(bench, "memory_ceiling_gb_per_s", lambda: 4000.0)
    monkeypatch.setattr(bench, "compute_ceiling_tflop_per_s", lambda: 700.0)
    m = measurement([2.0, 2.0, 2.0], bytes=6e9, flops=1e12)
    assert m.gb_per_s == pytest.approx(3000)
    assert m.tflop_per_s == pytest.approx(500)
    assert m.warnings == ()
    assert "3,000.0 GB/s" in str(m) and "500.00 TFLOP/s" in str(m)
    assert measurement([1.0]).gb_per_s is None and measurement([1.0]).tflop_per_s is None


@pytest.mark.case("M04")
def test_an_impossible_rate_is_flagged_not_printed_as_fact(monkeypatch):
    """Case M04: a working set in the cache exceeds the memory's bandwidth."""
    monkeypatch.setattr(bench, "memory_ceiling_gb_per_s", lambda: 4000.0)
    monkeypatch.setattr(bench, "compute_ceiling_tflop_per_s", lambda: 700.0)
    fast = measurement([1.0], bytes=9e9, flops=2e12)
    assert len(fast.warnings) == 2
    assert "above the 4,000 GB/s" in fast.warnings[0] and "cache" in fast.warnings[0]
    assert "above the 700.0 TFLOP/s" in fast.warnings[1]
    assert "not to be believed" in str(fast)
    assert measurement([1.0], bytes=4.19e9, flops=0.73e12).warnings == ()
    assert len(measurement([1.0], bytes=4.21e9, flops=0.74e12).warnings) == 2  # 5% is the margin


@pytest.mark.case("N14")
def test_a_clock_that_did_not_tick_divides_by_nothing():
    m = measurement([0.0, 0.0], bytes=10, flops=10)
    assert math.isnan(m.gb_per_s) and math.isnan(m.tflop_per_s)
    assert "nan" in str(m)


@pytest.mark.case("N14")
def test_zero_work_is_allowed():
    m = bench.measure(lambda: None, bytes=0, flops=0, clock="host", budget_ms=5)
    assert m.gb_per_s == 0 and m.tflop_per_s == 0


@pytest.mark.parametrize("work", [{"bytes": -1}, {"flops": math.inf}, {"bytes": math.nan}])
def test_bad_counts_are_refused_before_anything_runs(work):
    with pytest.raises(ValueError, match="at least 0"):
        bench.measure(lambda: pytest.fail("must not run"), **work)


@pytest.mark.parametrize("budget_ms", [0, -1, math.nan, math.inf])
def test_a_budget_must_be_a_time(budget_ms):
    with pytest.raises(ValueError, match="budget_ms"):
        bench.measure(lambda: pytest.fail("must not run"), budget_ms=budget_ms)


@pytest.mark.parametrize("option", ["clock", "cache"])
def test_unknown_options_are_refused(option):
    with pytest.raises(ValueError, match="sundial"):
        bench.measure(lambda: pytest.fail("must not run"), **{option: "sundial"})


@pytest.mark.skipif(has_cuda(), reason="needs a machine without a GPU")
def test_event_clock_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="there is none here"):
        bench.measure(lambda: pytest.fail("must not run"), clock="event")


def test_import_is_cheap():
    """The promise: 0.3 s beyond importing torch; asserted by what is loaded, not by time."""
    code = (
        "import torch, sys; before = set(sys.modules); import helpers.bench;"
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = eval(done.stdout)
    assert "helpers" in loaded
    assert not {"pandas", "matplotlib", "triton", "numpy", "IPython"} & set(loaded)


def nothing_returned(work):
    def run():
        work()

    return run


@NEEDS_GPU
def test_gpu_work_gets_the_event_clock_whatever_it_returns():
    x, small = torch.randn(1024, 1024, device="cuda"), torch.randn(8, device="cuda")
    on_gpu = (
        lambda: x @ x,
        nothing_returned(lambda: x @ x),
        nothing_returned(lambda: small.add_(1)),
    )
    for run in on_gpu:
        assert bench.measure(run).clock == "event"
    for run in (
        lambda: None,
        lambda: time.sleep(0.0001),
        busy(5),
        nothing_returned(lambda: sum(range(999))),
    ):
        assert bench.measure(run, budget_ms=20).clock == "host"


@NEEDS_GPU
def test_the_state_of_the_cache_is_said():
    source = torch.randn(2**20, device="cuda")
    target = torch.empty_like(source)
    methods = {
        bench.measure(lambda: target.copy_(source), cache=c).method
        for c in ("cold", "clean", "warm")
    }
    assert len(methods) == 3


@NEEDS_GPU
def test_measure_agrees_with_do_bench():
    """The promise: within max(5%, 1 us) of do_bench's median; interleaved, clocks drift."""
    from triton.testing import do_bench

    for megabytes in (1, 16, 256):
        source = torch.randn(megabytes * 250_000, device="cuda")
        target = torch.empty_like(source)

        def run(source=source, target=target):
            return target.copy_(source)

        pairs = [
            (bench.measure(run).median_ms, do_bench(run, return_mode="median")) for _ in range(3)
        ]
        ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        assert abs(ours - theirs) <= max(0.05 * theirs, 0.001)


@pytest.mark.case("M05")
def test_in_turn_gives_each_the_median_of_all_rounds(monkeypatch):
    calls, samples = [], {"fast": iter([[1, 9], [2, 2]]), "slow": iter([[5], [7]])}

    def measure(run, budget_ms):
        calls.append((run(), budget_ms))
        return bench.Measurement(tuple(next(samples[run()])), "host", "pretended")

    monkeypatch.setattr(bench, "measure", measure)
    runs = {"a": lambda: "fast", 2: lambda: "slow"}
    assert bench.in_turn(runs, rounds=2, budget_ms=3) == {"a": 2, 2: 6}
    assert calls == [("fast", 3), ("slow", 3)] * 2
