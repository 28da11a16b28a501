"""The GPU's clock, read on a device in virtual time: what events see, exactly and anywhere."""

import types

import pytest
import torch

from helpers import timers
from helpers.virtual_device import VirtualDevice

LAUNCH_US = 20
FLUSH_US = 90
CYCLES = 2000  # in a microsecond, at 2 GHz
L2_BYTES = 100 * 2**20


class Event:
    """As torch.cuda.Event: its time is that at which the device comes to it in its queue."""

    def __init__(self, gpu: VirtualDevice):
        self.gpu = gpu

    def record(self) -> None:
        self.gpu.launch("event", 0)
        self.at_us = self.gpu.spans[-1].end_us

    def elapsed_time(self, other: "Event") -> float:
        return (other.at_us - self.at_us) / 1000


@pytest.fixture
def gpu(monkeypatch):
    """A virtual GPU in place of the real one; `buffers` are the sizes that were allocated there."""
    gpu = VirtualDevice(LAUNCH_US, first_call_us=0)
    gpu.buffers = []

    def zeros(n, dtype, device):
        assert device == "cuda"
        gpu.buffers.append(n * dtype.itemsize)
        return types.SimpleNamespace(
            zero_=lambda: gpu.launch("write", FLUSH_US), max=lambda: gpu.launch("read", FLUSH_US)
        )

    monkeypatch.setattr(timers, "synchronize", gpu.synchronize)
    monkeypatch.setattr(timers.time, "perf_counter", gpu.time)
    monkeypatch.setattr(timers.time, "perf_counter_ns", lambda: round(gpu.time() * 1e9))
    monkeypatch.setattr(timers, "_events", lambda: (Event(gpu), Event(gpu)))
    monkeypatch.setattr(timers, "free_bytes", lambda: 2**40)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.launch("hold", cycles / CYCLES))
    properties = types.SimpleNamespace(L2_cache_size=L2_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch, "zeros", zeros)
    return gpu


@pytest.mark.parametrize("cache", timers.CACHES)
def test_events_see_the_gpus_work_and_not_the_launches(gpu, cache):
    def run():  # three launches take twice as long as the kernels
        for name in "abc":
            gpu.launch(name, 10)

    samples, method = timers.event_samples_ms(run, cache, budget_ms=5)
    assert samples == pytest.approx([0.03] * len(samples))
    assert method == f"GPU events, {timers.CACHES[cache]}, {len(samples)} calls"


@pytest.mark.parametrize("cache, flush", [("cold", "write"), ("clean", "read"), ("warm", None)])
def test_the_cache_is_flushed_before_every_call_that_counts(gpu, cache, flush):
    samples, _ = timers.event_samples_ms(lambda: gpu.launch("run", 40), cache, budget_ms=5)
    done = [span.name for span in gpu.spans if span.lane == "device" and span.name != "hold"]
    before = [flush] * bool(flush)
    each = [*before, "event", "run", "event"]
    assert done[-len(each) * len(samples) :] == each * len(samples)
    assert {"write", "read"} & set(done) == set(before)


@pytest.mark.parametrize(
    "free_bytes, l2_bytes, flushed",
    [
        (2**40, 100 * 2**20, 400 * 2**20),  # four times the L2
        (2**40, 6 * 2**20, timers.FLUSH_BYTES),
        (2**40, None, timers.FLUSH_BYTES),  # AMD's GPUs do not tell
        (2**30, 100 * 2**20, 2**27),  # a small card keeps its memory
    ],
)
def test_a_flush_is_larger_than_the_l2(gpu, monkeypatch, free_bytes, l2_bytes, flushed):
    properties = types.SimpleNamespace(**({"L2_cache_size": l2_bytes} if l2_bytes else {}))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(timers, "free_bytes", lambda: free_bytes)
    timers.event_samples_ms(lambda: gpu.launch("run", 40), "cold", budget_ms=1)
    assert gpu.buffers == [flushed]


def test_what_waits_for_the_gpu_is_not_held_back_for_long(gpu):
    def run():
        gpu.launch("run", 400_000)
        gpu.synchronize()

    timers.event_samples_ms(run, "warm", budget_ms=1)
    holds = [span.end_us - span.start_us for span in gpu.spans if span.name == "hold"]
    assert len([us for us in holds if us]) == timers.MIN_SAMPLES
    assert max(holds) == 1000 * timers.LONGEST_HOLD_MS


@pytest.mark.parametrize(
    "estimate_ms, budget_ms, number",
    [(1, 50, 50), (20, 50, timers.MIN_SAMPLES), (1e-3, 50, timers.MAX_SAMPLES), (0, 1, 1000)],
)
def test_as_many_samples_as_fit_the_budget(estimate_ms, budget_ms, number):
    assert timers.number_of_samples(estimate_ms, budget_ms) == number


@pytest.mark.parametrize("kernel_us", [5, 100, 3000])
def test_work_is_noticed_that_returns_nothing(gpu, kernel_us):
    assert timers.does_gpu_work(lambda: gpu.launch("run", kernel_us))
    assert not timers.does_gpu_work(lambda: gpu.work_on_host("python", kernel_us))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [1, (x,)], lambda x: {"loss": [None, x]}])
def test_a_tensor_that_is_returned_tells_where_the_work_was(wrap):
    assert not timers.does_gpu_work(lambda: wrap(torch.ones(2)))
    there = torch.ones(2).as_subclass(type("OnGpu", (torch.Tensor,), {"is_cuda": True}))
    assert timers.does_gpu_work(lambda: wrap(there))
