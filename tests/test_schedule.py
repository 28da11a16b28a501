"""The kernels of schedule.cu: what is wrong with them is seen."""

import pytest
import torch
from cuda_cases import BLOCK, CASES

from helpers import cuda
from helpers.check import relative_error
from helpers.device import device, has_cuda
from helpers.emulator import KernelFault

CASE = {case.kernel: case for case in CASES if case.file == "schedule.cu"}
MUTANTS = (
    ("record_schedule", "blockIdx.x * blockDim.x + threadIdx.x", "threadIdx.x"),
    ("record_schedule", "who[3 * i + 0] = blockIdx.x", "who[3 * i + 0] = 0"),
    ("record_schedule", "(int)threadIdx.x, 0)", "(int)threadIdx.x, 1)"),
    ("record_schedule", "__shfl_sync(0xffffffff, (int)threadIdx.x, 0)", "threadIdx.x / 32"),
    ("record_schedule", "3 * i + 2", "3 * i + 3"),
    ("count_in_shared", "if (threadIdx.x == 0) counter = 0;\n    __syncthreads();", "counter = 0;"),
    ("count_in_shared", "atomicAdd(&counter, 1);\n    __syncthreads();", "atomicAdd(&counter, 1);"),
    ("count_in_shared", "atomicAdd(&counter, 1)", "counter = counter + 1"),
    ("count_in_shared", "found[blockIdx.x]", "found[blockIdx.x + 1]"),
    ("count_in_global", "atomicAdd(counter, 1);", "if (blockIdx.x == 0) atomicAdd(counter, 1);"),
    ("count_in_global", "atomicAdd(counter, 0)", "atomicAdd(counter, 1)"),
)


def seen(kernel: cuda.Kernel, case, size, order) -> bool:
    """True when a launch ends in a fault or in other numbers than the case's."""
    launch = case.launch(size, torch.device("cpu"))
    try:
        kernel.emulate(launch.grid, launch.block, *launch.arguments, order=order)
    except KernelFault:
        return True
    pairs = ((launch.arguments[place], right) for place, right in launch.expected.items())
    return any(relative_error(given, right) > 0 for given, right in pairs)


@pytest.mark.parametrize("name, before, after", MUTANTS)
def test_mutants_are_caught(name, before, after):
    case = CASE[name]
    right = case.load()
    assert before in right.function
    wrong = right.text.replace(right.function, right.function.replace(before, after))
    mutant = cuda.Kernel(wrong, name, case.file)
    orders = ("forward", "reverse", 1)
    assert any(seen(mutant, case, size, order) for size in case.sizes for order in orders)
    assert not any(seen(right, case, case.sizes[-1], order) for order in orders)


def recorded(cycles: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """SMs (blocks, threads) and times (blocks, threads, 2) of record_schedule on this machine."""
    threads = len(cycles) * BLOCK
    who = torch.zeros(threads, 3, dtype=torch.int32, device=device())
    sm = torch.full((threads,), -2, dtype=torch.int32, device=device())
    times = torch.full((threads, 2), -1, device=device())
    waits = torch.tensor(cycles, dtype=torch.int32, device=device())
    cuda.load("schedule.cu", "record_schedule")(len(cycles), BLOCK, who, sm, times, waits)
    return sm.cpu().view(-1, BLOCK), times.cpu().view(-1, BLOCK, 2)


def test_every_thread_notes_its_sm_and_its_times():
    sm, times = recorded([0, 100, 1000])
    assert (times[..., 1] >= times[..., 0]).all() and (times >= 0).all()
    assert (sm == sm[:, :1]).all()  # a block stays on one SM
    if has_cuda():
        assert sm.min() >= 0
    else:
        assert (sm == -1).all()


def test_a_block_waits_for_its_cycles():
    # The emulator's clock counts its readings, a GPU's cycles: both go on.
    _, times = recorded([0, 1_000_000])
    lasted = (times[:, :, 1] - times[:, :, 0]).max(dim=1).values
    assert lasted[1] > lasted[0]
