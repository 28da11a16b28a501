"""Cases for the kernels of schedule.cu; see cuda_cases."""

from collections.abc import Iterator

import torch
from cuda_cases import BLOCK, Case, Launch, placed, unwritten


def record_schedule(blocks: int, device: torch.device) -> Launch:
    block, thread = torch.arange(blocks * BLOCK) // BLOCK, torch.arange(blocks * BLOCK) % BLOCK
    known = torch.stack((block, thread, thread // 32 * 32), dim=-1)
    who = placed(unwritten(known.int()), device)
    # The SM is the machine's choice, and so are the times.
    sm = placed(torch.full((len(known),), -2, dtype=torch.int32), device)
    times = placed(torch.full((len(known), 2), -1), device)
    cycles = torch.arange(blocks, dtype=torch.int32, device=device) % 7 * 10
    return Launch(blocks, BLOCK, (who, sm, times, cycles), {0: known})


def count_in_shared(blocks: int, device: torch.device) -> Launch:
    found = placed(unwritten(torch.zeros(blocks, dtype=torch.int32)), device)
    return Launch(blocks, BLOCK, (found,), {0: torch.full((blocks,), BLOCK)})


def count_in_global(blocks: int, device: torch.device) -> Launch:
    found = placed(unwritten(torch.zeros(blocks, dtype=torch.int32)), device)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    return Launch(blocks, BLOCK, (found, counter), {1: torch.full((1,), blocks * BLOCK)})


def schedule() -> Iterator[Case]:
    file, grids = "schedule.cu", (1, 2, 13)
    yield Case(file, "count_in_shared", grids, count_in_shared)
    yield Case(file, "count_in_global", grids, count_in_global)
    yield Case(file, "record_schedule", grids, record_schedule)
