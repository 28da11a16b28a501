"""Two ways to time a function: the lecture's `benchmark`, and `measure`.

`benchmark` reads the host's clock, as lecture 6 does. `measure` reads the GPU's own clock with a
cold L2 cache, keeps every sample, and says how it measured. Notebook 02 builds both step by step.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Hashable

import torch

from helpers.device import device, has_cuda, synchronize
from helpers.memory import uncached_bytes
from helpers.timers import CACHES, does_gpu_work, event_samples_ms, host_samples_ms

BUDGET_MS = 100  # as triton.testing.do_bench
MARGIN = 1.05  # a ceiling is itself a measurement


def benchmark(description: str, run: Callable, num_warmups: int = 1, num_trials: int = 3) -> float:
    """Mean wall-clock time of `run()` in ms, as lecture 6 defines it."""
    for _ in range(num_warmups):  # the first call compiles, allocates, fills caches
        run()
    synchronize()  # the warm-ups must not be running when the clock starts

    times_ms = []
    for _ in range(num_trials):
        start = time.perf_counter()
        run()
        synchronize()  # run() has only queued the work: wait until it is done
        times_ms.append((time.perf_counter() - start) * 1000)
    return statistics.mean(times_ms)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Times of one function, in ms, one per sample, and the work that was counted for it."""

    samples_ms: tuple[float, ...]
    clock: str  # "event" (the GPU's) or "host"
    method: str
    bytes: float | None = None
    flops: float | None = None

    def _percentile(self, percent: float) -> float:
        samples = torch.tensor(self.samples_ms, dtype=torch.float64)
        return torch.quantile(samples, percent / 100).item()

    @property
    def median_ms(self) -> float:
        return self._percentile(50)

    @property
    def p20_ms(self) -> float:
        return self._percentile(20)

    @property
    def p80_ms(self) -> float:
        return self._percentile(80)

    @property
    def gb_per_s(self) -> float | None:
        """Gigabytes (10^9) per second; None when no bytes were given."""
        return _rate(self.bytes, self.median_ms, 1e9)

    @property
    def tflop_per_s(self) -> float | None:
        """10^12 floating-point operations per second; None when no flops were given."""
        return _rate(self.flops, self.median_ms, 1e12)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why a rate cannot be true: it lies above what this device has been seen to reach."""
        found = []
        if self.bytes and self.gb_per_s > MARGIN * memory_ceiling_gb_per_s():
            found.append(
                f"{self.gb_per_s:,.0f} GB/s is above the {memory_ceiling_gb_per_s():,.0f} GB/s "
                "that this device's memory reaches: the data came from a cache, "
                "or the bytes are miscounted"
            )
        if self.flops and self.tflop_per_s > MARGIN * compute_ceiling_tflop_per_s():
            found.append(
                f"{self.tflop_per_s:,.1f} TFLOP/s is above the "
                f"{compute_ceiling_tflop_per_s():,.1f} TFLOP/s of this device's fastest large "
                "matmul: the FLOPs are miscounted, or the work was not done"
            )
        return tuple(found)

    def __str__(self) -> str:
        parts = [f"{self.median_ms:.4g} ms (p20 {self.p20_ms:.4g}, p80 {self.p80_ms:.4g})"]
        if self.warnings:
            parts += [f"not to be believed: {warning}" for warning in self.warnings]
        else:
            if self.bytes is not None:
                parts.append(f"{self.gb_per_s:,.1f} GB/s")
            if self.flops is not None:
                parts.append(f"{self.tflop_per_s:,.2f} TFLOP/s")
        return "; ".join([*parts, self.method])


def _rate(amount: float | None, ms: float, unit: float) -> float | None:
    if amount is None:
        return None
    # A clock that did not tick gives no rate: not infinity, and not an exception either.
    return amount / (ms / 1000) / unit if ms > 0 else math.nan


def measure(
    run: Callable,
    bytes: float | None = None,
    flops: float | None = None,
    *,
    clock: str | None = None,
    cache: str = "cold",
    budget_ms: float = BUDGET_MS,
) -> Measurement:
    """Time `run()` and keep the samples; `bytes` and `flops` are what one call moves and computes.

    clock: "event" reads the GPU's clock before and after the call; "host" reads the CPU's and
        waits for the GPU. By default the one that fits: events when `run()` does GPU work.
    cache: the state of the GPU's L2 before every call. "cold": flushed by writing, as
        triton.testing.do_bench does; "clean": flushed by reading, so that the call need not first
        write somebody else's lines back; "warm": as the previous call left it. The host's clock
        takes the caches as they are.
    budget_ms: about how long to sample; at least 5 calls are timed all the same.

    Events see the GPU's work alone: the GPU is held back until the host has launched all of
    `run()`. The host's clock sees launches, Python and everything else that a caller waits for.
    ValueError for an unknown clock or cache, a budget that is no time, or counts that are negative
    or not finite.
    """
    if clock not in (None, "event", "host"):
        raise ValueError(f'clock must be "event" or "host", not {clock!r}')
    if cache not in CACHES:
        raise ValueError(f"cache must be one of {', '.join(CACHES)}, not {cache!r}")
    if not 0 < budget_ms < math.inf:
        raise ValueError(f"budget_ms must be a positive number, not {budget_ms!r}")
    for name, amount in (("bytes", bytes), ("flops", flops)):
        if amount is not None and not (amount >= 0 and math.isfinite(amount)):
            raise ValueError(f"{name} must be a finite number of at least 0, not {amount!r}")
    if clock == "event" and not has_cuda():
        raise ValueError('clock="event" reads a GPU\'s clock, and there is none here')
    if clock is None:
        clock = "event" if has_cuda() and does_gpu_work(run) else "host"
    samples, method = (
        event_samples_ms(run, cache, budget_ms)
        if clock == "event"
        else host_samples_ms(run, budget_ms)
    )
    return Measurement(tuple(samples), clock, method, bytes, flops)


def in_turn(
    runs: dict[Hashable, Callable], rounds: int = 5, budget_ms: float = BUDGET_MS
) -> dict[Hashable, float]:
    """Median ms of each function, all of them measured once a round: a clock that drifts meets all.

    budget_ms: about how long to sample one function in one round.
    """
    samples = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            samples[name] += measure(run, budget_ms=budget_ms).samples_ms
    return {name: statistics.median(found) for name, found in samples.items()}


@functools.cache
def memory_ceiling_gb_per_s() -> float:
    """The fastest that large tensors were read, written or copied on this device, in GB/s."""
    size = uncached_bytes()
    source = torch.ones(size // 4, device=device())
    target = torch.empty_like(source)
    operations = (
        (lambda: target.copy_(source), 2 * size),
        (lambda: target.fill_(1.0), size),
        (lambda: source.sum(), size),
    )
    return max(_fastest(run, amount, 1e9) for run, amount in operations)


@functools.cache
def compute_ceiling_tflop_per_s() -> float:
    """TFLOP/s of the fastest large matmul of random numbers: 16-bit on a GPU, fp32 on a CPU."""
    n, dtypes = (4096, (torch.float16, torch.bfloat16)) if has_cuda() else (1024, (torch.float32,))
    rates = []
    for dtype in dtypes:
        a, b = (torch.randn(n, n, device=device()).to(dtype) for _ in range(2))
        rates.append(_fastest(lambda a=a, b=b: a @ b, 2 * n**3, 1e12))
    return max(rates)


def _fastest(run: Callable, amount: float, unit: float) -> float:
    return _rate(amount, min(measure(run).samples_ms), unit)
