"""Cases for the kernels of memory.cu; see cuda_cases."""

from collections.abc import Iterator

import torch
from cuda_cases import BLOCK, Case, Launch, numbers, placed

FILE = "memory.cu"
VECTORS = {"float": 1, "float2": 2, "float4": 4}


def walked(n: int, steps: int) -> tuple[torch.Tensor, int, int]:
    """A closed chain through n indices in a random order: (it, where to begin, where to end)."""
    places = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    chain = torch.empty(n, dtype=torch.int32)
    chain[places] = places.roll(-1).int()
    return chain, int(places[0]), int(places[steps % n])


def chase(size: tuple[int, int, int], device: torch.device) -> Launch:
    n, warmup, steps = size
    chain, first, last = walked(n, warmup + steps)
    at, cycles = torch.tensor([first], dtype=torch.int32), torch.tensor([-1])
    arguments = (placed(chain, device), placed(at, device), warmup, steps, placed(cycles, device))
    return Launch(1, 1, arguments, {1: torch.tensor([last])})


def chase_addresses(size: tuple[int, int, int], device: torch.device) -> Launch:
    n, warmup, steps = size
    chain, first, last = walked(n, warmup + steps)
    offsets, at = 8 * chain.long(), torch.tensor([8 * first])
    arguments = (placed(offsets, device), placed(at, device), n, warmup, steps)
    expected = {0: offsets, 1: torch.tensor([8 * last])}
    return Launch(1, 1, (*arguments, torch.full((1,), -1, device=device)), expected)


def chase_shared(size: tuple[int, int], device: torch.device) -> Launch:
    n, steps = size
    chain, first, last = walked(n, steps)
    at, cycles = torch.tensor([first], dtype=torch.int32), torch.tensor([-1])
    arguments = (placed(chain, device), n, placed(at, device), steps, placed(cycles, device))
    return Launch(1, BLOCK, arguments, {2: torch.tensor([last])})


def chain_fma(size: tuple[int, int], device: torch.device) -> Launch:
    blocks, steps = size
    values, a = numbers(blocks * BLOCK), -0.75
    expected = values.double()
    for _ in range(steps):
        expected = a * expected + a
    cycles = torch.full((1,), -1, device=device)
    return Launch(blocks, BLOCK, (placed(values, device), a, steps, cycles), {0: expected})


def sums(values: torch.Tensor, threads: int) -> torch.Tensor:
    """What each thread has to sum, when thread t takes the values t, t + threads, and so on."""
    rows = -(-values.shape[0] // threads)
    padded = values.new_zeros(rows * threads, *values.shape[1:])
    padded[: values.shape[0]] = values
    return padded.reshape(rows, threads, -1).sum((0, 2))


def read_strided(size: tuple[int, int, int, int], device: torch.device) -> Launch:
    n, stride, offset, rounds = size
    blocks = 3
    x = numbers(offset + stride * (n - 1) + 1)  # not one more: what lies behind is out of bounds
    y = torch.full((blocks * BLOCK,), torch.nan, device=device)
    once = sums(x.double()[offset::stride], blocks * BLOCK).view(blocks, BLOCK)
    # In round r block b takes the part of block b + 37 r, around the grid.
    expected = sum(once.roll(-37 * turn, 0) for turn in range(rounds)).flatten()
    arguments = (placed(x, device), y, n, stride, offset, rounds)
    return Launch(blocks, BLOCK, arguments, {1: expected})


def read_in_flight(width: int):
    def launch(n: int, device: torch.device) -> Launch:
        blocks = 2
        x = numbers(width * n)
        y = torch.full((blocks * BLOCK,), torch.nan, device=device)
        expected = sums(x.double().view(n, width), blocks * BLOCK)
        return Launch(blocks, BLOCK, (placed(x, device), y, n), {1: expected})

    return launch


def memory() -> Iterator[Case]:
    walks = ((2, 0, 1), (7, 3, 0), (97, 97, 33), (64, 5, 1000))
    yield Case(FILE, "chase", walks, chase)
    yield Case(FILE, "chase_addresses", walks, chase_addresses)
    for step in ("1", "4"):
        sizes, defines = ((2, 1), (1, 5), (4096, 100), (1000, 1015)), (("SHARED_STEP", step),)
        yield Case(FILE, "chase_shared", sizes, chase_shared, defines)
    yield Case(FILE, "chain_fma", ((1, 0), (1, 1), (3, 33), (2, 100)), chain_fma)
    strided = ((1, 1, 0, 1), (31, 3, 5, 2), (192, 8, 1, 3), (1000, 2, 0, 1), (1025, 33, 31, 2))
    yield Case(FILE, "read_strided", strided, read_strided)
    for vector, width in VECTORS.items():
        for loads in (1, 3, 4):
            defines = (("VECTOR", vector), ("LOADS", str(loads)))
            launch = read_in_flight(width)
            yield Case(FILE, "read_in_flight", (1, 127, 129, 1025, 1537), launch, defines)
