"""Notebook 02: three broken benchmarks on a virtual device, and the check of their repair."""

import inspect
from collections.abc import Callable

from helpers.exercises.answers import is_number, plain
from helpers.virtual_device import VirtualDevice


def broken_stop(gpu: VirtualDevice, run: Callable) -> float:
    """Mean time of `run()` in ms. Broken: see exercise 02.1."""
    run()
    gpu.synchronize()
    start = gpu.time()
    for _ in range(3):
        run()
    end = gpu.time()
    gpu.synchronize()
    return (end - start) / 3 * 1000


def broken_start(gpu: VirtualDevice, run: Callable) -> float:
    """Mean time of `run()` in ms. Broken: see exercise 02.1."""
    run()
    start = gpu.time()
    for _ in range(3):
        run()
    gpu.synchronize()
    return (gpu.time() - start) / 3 * 1000


def broken_first(gpu: VirtualDevice, run: Callable) -> float:
    """Mean time of `run()` in ms. Broken: see exercise 02.1."""
    gpu.synchronize()
    start = gpu.time()
    for _ in range(3):
        run()
        gpu.synchronize()
    return (gpu.time() - start) / 3 * 1000


BROKEN = (broken_stop, broken_start, broken_first)

# Kernel time (µs), first-call cost (µs), kernels a call, work already queued when the timer is
# called (µs): long and short kernels, launch-bound ones, a cold start that dwarfs the work.
SITUATIONS = (
    (5_000, 40_000, 1, 0),
    (200, 400_000, 3, 0),
    (900, 50, 1, 70_000),
    (2, 10_000, 8, 0),
    (30_000, 40_000, 1, 20_000),
)


def _situation(kernel_us: float, first_call_us: float, kernels: int, queued_us: float):
    gpu = VirtualDevice(first_call_us=first_call_us)
    if queued_us:
        gpu.launch("somebody else's kernel", queued_us)

    def run() -> None:
        for number in range(kernels):
            gpu.launch(f"kernel {number}", kernel_us)

    return gpu, run


def _steady_state_ms(kernel_us: float, first_call_us: float, kernels: int, queued_us: float):
    # A device that is warm and idle: the shortest and the longest that an honest timer may read
    # differ by whether it waits after every call (the launch is then not hidden).
    gpu, run = _situation(kernel_us, 0, kernels, 0)
    for _ in range(2):
        run()
        gpu.synchronize()
    start = gpu.time()
    run()
    gpu.synchronize()
    waiting_ms = (gpu.time() - start) * 1000
    pipelined_ms = max(kernels * kernel_us, kernels * gpu.launch_us) / 1000
    return pipelined_ms, waiting_ms


def repaired_benchmarks(*answers: Callable) -> None:
    """AssertionError unless each answer reads the steady-state time in every situation.

    Each answer is a function of (gpu, run), like the three broken ones, and is tried on devices
    of its own: it must warm up, wait before the clock starts and wait before it stops.
    """
    assert len(answers) == len(BROKEN), f"three functions are asked for, {len(answers)} given"
    for answer in answers:
        name = getattr(answer, "__name__", "the answer")
        try:
            inspect.signature(answer).bind("gpu", "run")
        except (TypeError, ValueError):
            raise AssertionError(f"{name} must be a function of (gpu, run)") from None
        for situation in SITUATIONS:
            gpu, run = _situation(*situation)
            reading_ms = answer(gpu, run)
            looks = list(gpu.read_while_busy)
            low_ms, high_ms = _steady_state_ms(*situation)
            assert reading_ms is not None, f"{name} returns nothing"
            if not is_number(reading_ms := plain(reading_ms)):
                raise AssertionError(f"{name} has to return ms, a number, not {reading_ms!r}")
            assert gpu.spans and looks, f"{name} did not run anything, or never looked at the clock"
            if not reading_ms >= 0.99 * low_ms:  # NaN is not right either
                raise AssertionError(
                    f"{name} reads {reading_ms:.4g} ms where {low_ms:.4g} ms is true: "
                    "was the work done when the clock stopped?"
                )
            if not reading_ms <= 1.01 * high_ms:
                raise AssertionError(
                    f"{name} reads {reading_ms:.4g} ms where {high_ms:.4g} ms is true: what else "
                    "was the device, or the first call, still busy with?"
                )
            assert not looks[0], f"{name} starts its clock while the device is busy"
            assert not looks[-1], f"{name} stops its clock while the device is busy"
