"""How much memory is left, and running out of it."""

import gc
import weakref

import psutil
import pytest
import torch

from helpers import memory
from helpers.device import device, has_cuda
from helpers.memory import OUT_OF_MEMORY, attempt, free_bytes, largest_power_of_2

NEEDS_GPU = pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
ABSURD = 2**50  # bytes: more than any machine has, and no overflow


def test_attempt_passes_results_on():
    assert attempt(lambda: 42) == 42
    assert attempt(lambda: None) is None
    result = torch.ones(3)
    assert attempt(lambda: result) is result


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes do not match"), KeyError(1), MemoryError(), OSError("not enough memory")],
)
def test_attempt_passes_other_errors_on(error):
    def run():
        raise error

    with pytest.raises(type(error)) as caught:
        attempt(run)
    assert caught.value is error


def test_attempt_leaves_an_overflow_to_the_caller():
    """A size that no machine could address is a mistake, not a lack of memory."""
    with pytest.raises(RuntimeError, match="overflow|size"):
        attempt(lambda: torch.empty(2**62, 2**62))


def test_attempt_says_that_the_cpus_memory_is_out():
    assert attempt(lambda: torch.empty(ABSURD, dtype=torch.int8)) == OUT_OF_MEMORY
    assert attempt(lambda: 1) == 1


@pytest.mark.case("E17")
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5 GiB."),
        # The allocators of Linux and macOS, and of Windows.
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried"),
    ],
)
def test_attempt_knows_the_messages(error):
    def run():
        raise error

    assert attempt(run) == OUT_OF_MEMORY


@pytest.mark.parametrize("where", ["cpu", "cuda", "faked"])
def test_attempt_lets_go_of_what_the_function_held(where):
    if where == "cuda" and not has_cuda():
        pytest.skip("needs a GPU")
    held, seen = [], []

    def run():
        large = torch.empty(2**20, device="cpu" if where == "faked" else where)
        held.append(weakref.ref(large))
        if where == "faked":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        torch.empty(ABSURD, dtype=torch.int8, device=where)

    def release():
        seen.append(held[0]())

    original, memory.release = memory.release, release
    gc.disable()  # not the collector, but the end of the exception
    try:
        assert attempt(run) == OUT_OF_MEMORY
    finally:
        gc.enable()
        memory.release = original
    assert seen == [None]  # free before it is given back, and given back once


def test_free_bytes_of_this_machine():
    whole = psutil.virtual_memory().total
    if has_cuda():
        whole = torch.cuda.get_device_properties(device()).total_memory
    assert 0 < free_bytes() <= whole


def test_free_bytes_of_a_cpu_is_what_can_be_had_without_swapping(monkeypatch):
    monkeypatch.setattr(memory, "has_cuda", lambda: False)
    faked = type("Memory", (), {"available": 123, "free": 45, "total": 678})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: faked)
    assert free_bytes() == 123


GB = 2**30


@pytest.mark.case("E17")
@pytest.mark.parametrize(
    "free, reserved, allocated, fraction, expected",
    [
        (60 * GB, 0, 0, 1.0, 60 * GB),  # others hold 20 GB
        (60 * GB, 12 * GB, 5 * GB, 1.0, 67 * GB),  # what the allocator keeps unused is free too
        (60 * GB, 0, 0, 0.5, 40 * GB),  # the process's share, not what is left
        (60 * GB, 10 * GB, 4 * GB, 0.5, 36 * GB),  # what is allocated takes from the share
        (10 * GB, 0, 0, 0.5, 10 * GB),
        (60 * GB, 10 * GB, 10 * GB, 0.1, 0),  # beyond its share: nothing, not a negative number
    ],
)
def test_free_bytes_of_a_gpu(monkeypatch, free, reserved, allocated, fraction, expected):
    monkeypatch.setattr(memory, "has_cuda", lambda: True)
    for name, value in (
        ("mem_get_info", (free, 80 * GB)),
        ("memory_reserved", reserved),
        ("memory_allocated", allocated),
        ("get_per_process_memory_fraction", fraction),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert free_bytes() == expected


@pytest.mark.case("E17")
@NEEDS_GPU
def test_free_bytes_keeps_to_this_process_share():
    before = torch.cuda.get_per_process_memory_fraction()
    total = torch.cuda.mem_get_info()[1]
    allocated = torch.cuda.memory_allocated()
    try:
        torch.cuda.set_per_process_memory_fraction(0.02 + allocated / total)
        free = free_bytes()
        assert free <= 0.021 * total
        assert attempt(lambda: torch.empty(4 * free, dtype=torch.int8, device=device())) == (
            OUT_OF_MEMORY
        )
        assert attempt(lambda: torch.empty(free // 2, dtype=torch.int8, device=device())).nbytes
    finally:
        torch.cuda.set_per_process_memory_fraction(before)
        memory.release()


@NEEDS_GPU
def test_release_gives_memory_back_to_the_driver():
    memory.release()
    reserved = torch.cuda.memory_reserved()
    x = torch.empty(2**26, device=device())
    x_and_itself = [x]
    x_and_itself.append(x_and_itself)  # a cycle, which only the collector undoes
    assert torch.cuda.memory_reserved() > reserved
    del x, x_and_itself
    memory.release()
    assert torch.cuda.memory_reserved() <= reserved


@pytest.mark.parametrize(
    "limit, expected",
    [(1, 1), (1.9, 1), (2, 2), (3, 2), (4, 4), (1023, 512), (1024, 1024), (2**40 + 0.5, 2**40)],
)
def test_largest_power_of_2(limit, expected):
    assert largest_power_of_2(limit) == expected


@pytest.mark.parametrize("limit", [0.99, 0, -8])
def test_there_is_no_power_of_2_below_1(limit):
    with pytest.raises(ValueError, match="no power of two"):
        largest_power_of_2(limit)


@pytest.mark.parametrize(("free", "expected"), [(80, 10), (2**40, 2**30)])
def test_uncached_bytes_leave_a_small_card_room(monkeypatch, free, expected):
    monkeypatch.setattr(memory, "has_cuda", lambda: True)
    monkeypatch.setattr(memory, "free_bytes", lambda: free)
    assert memory.uncached_bytes() == expected


def test_free_bytes_of_the_cpu_on_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(memory, "has_cuda", lambda: True)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 123}))
    assert free_bytes(torch.device("cpu")) == 123
