"""Samples of a function's time from the host's clock or from the GPU's: what `measure` is made of.

All functions take the function to time, without arguments, and give milliseconds.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from helpers.device import synchronize
from helpers.memory import free_bytes

WARMUP_MS = 25  # as triton.testing.do_bench, so that the two can be compared
MIN_SAMPLES, MAX_SAMPLES = 5, 1000
SHORTEST_HOST_SAMPLE_MS = 0.1  # below this the host clock's own cost would show
LONGEST_HOLD_MS = 20  # a function that waits for the GPU itself would be held back for nothing
FLUSH_BYTES = 256 * 2**20  # what do_bench writes between calls; more where the L2 is larger
CACHES = {
    "cold": "cold L2, flushed by writing",
    "clean": "cold L2, flushed by reading",
    "warm": "warm L2",
}


def number_of_samples(estimate_ms: float, budget_ms: float) -> int:
    """How many calls of `estimate_ms` to time within about `budget_ms`."""
    return max(MIN_SAMPLES, min(MAX_SAMPLES, int(budget_ms / max(estimate_ms, 1e-6))))


def host_sample_ms(run: Callable, calls: int = 1) -> float:
    """Time per call on the host's clock, waiting for the GPU before and after."""
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(calls):
        run()
    synchronize()
    return (time.perf_counter_ns() - start) / 1e6 / calls


def host_samples_ms(run: Callable, budget_ms: float) -> tuple[list[float], str]:
    """Samples on the host's clock and how they were taken; short calls are timed in groups."""
    run()
    estimate_ms = min(host_sample_ms(run) for _ in range(3))
    calls = max(1, math.ceil(SHORTEST_HOST_SAMPLE_MS / max(estimate_ms, 1e-6)))
    repeats = number_of_samples(estimate_ms * calls, budget_ms)
    samples = [host_sample_ms(run, calls) for _ in range(repeats)]
    each = f" of {calls} calls" if calls > 1 else ""
    return samples, f"host clock, caches as they are, {repeats} samples{each}"


def event_samples_ms(run: Callable, cache: str, budget_ms: float) -> tuple[list[float], str]:
    """Samples between two CUDA events around each call, and how they were taken.

    cache: a key of `CACHES`. Before each call the GPU is held back until the host has launched
    all of `run`, so that the events see the GPU's work and not the launches.
    """
    prepare = _preparation(cache)
    run()
    estimate_ms = statistics.median(_event_pair_ms(run) for _ in range(3))
    for _ in range(min(MAX_SAMPLES, int(WARMUP_MS / max(estimate_ms, 1e-3)))):
        run()
    # Flushing the cache holds the GPU back too, mostly for longer than one operation's launches.
    flush_ms = statistics.median(_event_pair_ms(prepare) for _ in range(3))
    launch_ms = min(_launch_ms(run) for _ in range(3))
    need_ms = 2 * launch_ms + (0.05 if cache == "warm" else 0.02)
    hold_ms = min(LONGEST_HOLD_MS, max(0, need_ms - flush_ms))
    pairs = [_events() for _ in range(number_of_samples(estimate_ms + hold_ms, budget_ms))]
    for start, end in pairs:
        if hold_ms:
            _hold(hold_ms)
        prepare()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    samples = [start.elapsed_time(end) for start, end in pairs]
    return samples, f"GPU events, {CACHES[cache]}, {len(samples)} calls"


def does_gpu_work(run: Callable) -> bool:
    """True when `run()` puts work on the GPU: told by the tensors it returns, else by trying."""
    found = list(_tensors(run()))
    if found:
        return any(tensor.is_cuda for tensor in found)
    # Nothing returned. While the GPU is held busy for longer than the host needs for `run()`, two
    # events that only a host function separates fire one right after the other; work parts them.
    hold_ms = min(10 * LONGEST_HOLD_MS, 2 * min(host_sample_ms(run) for _ in range(3)) + 0.1)
    empty_ms, run_ms = (
        statistics.median(_event_pair_ms(call, hold_ms) for _ in range(5))
        for call in (lambda: None, run)
    )
    return run_ms > 1.5 * empty_ms


def _tensors(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _launch_ms(run: Callable) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1000


def _event_pair_ms(run: Callable, hold_ms: float = 0) -> float:
    start, end = _events()
    torch.cuda.synchronize()
    if hold_ms:
        _hold(hold_ms)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def _hold(ms: float) -> None:
    # A kernel that spins and touches no memory. Without PyTorch's name for it there is no other:
    # every kernel of the public API that takes long enough also moves data through the L2.
    torch.cuda._sleep(int(ms * 2e6))  # cycles: at 2 GHz, the fastest clock of today's GPUs


def _preparation(cache: str) -> Callable[[], object]:
    if cache == "warm":
        return lambda: None
    l2_bytes = getattr(torch.cuda.get_device_properties(None), "L2_cache_size", 0)
    size = min(max(FLUSH_BYTES, 4 * l2_bytes), free_bytes() // 8)  # small cards keep their memory
    buffer = torch.zeros(max(1, size // 4), dtype=torch.int32, device="cuda")
    # Writing leaves the cache full of lines that the timed call must first send back to memory.
    return buffer.zero_ if cache == "cold" else buffer.max
