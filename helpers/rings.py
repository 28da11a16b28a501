"""What latency, in_flight and strides share: where they measure, closed chains, and samples."""

import time
from collections.abc import Callable

import torch

from helpers.device import device, has_cuda
from helpers.emulator import Unsupported
from helpers.memory_roofs import cpu_caches, size_text

ORDERS = ("sequential", "random")
STEPS = ("index", "address")
INDEX_BYTES, ADDRESS_BYTES = 4, 8
MAX_RING_BYTES = INDEX_BYTES << 31  # an index is an int32
MIN_SLICES = 5


def measured_on(where: str | torch.device | None) -> torch.device:
    """The device that is to be measured: `where`, "cpu" or "cuda", by default the notebooks' own.

    Unsupported where a GPU is asked for that there is not.
    """
    if where is None:
        return device()
    where = torch.device(where)
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f'where must be "cpu" or "cuda", not "{where}"')
    if where.type == "cuda" and not has_cuda():
        raise Unsupported("this is measured on a GPU, and there is none here")
    return device() if where.type == "cuda" and where.index is None else where


def uncached_cpu_bytes() -> int:
    """What no cache of a CPU holds: 128 MB, or four times the largest cache up to 1 GB."""
    return min(max(1 << 27, 4 * max(cpu_caches(threads=1).values(), default=0)), 1 << 30)


def ring(
    footprint_bytes: int,
    order: str,
    step_bytes: int,
    where: str | torch.device | None = None,
    step: str = "index",
    into: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A closed chain through a footprint, one place every `step_bytes`: (the ring, its places).

    order: of `ORDERS`; "random" defeats a CPU's prefetchers and every TLB.
    step: what an element holds, of `STEPS`. "index": int32, and ring[places[i]] is places[i + 1].
        "address": int64; the places are offsets in bytes, and a GPU's element is the next one's
        address; a CPU's is its place, for the emulator, which moves the ring.
    into: memory for the ring, of its type, at least as large as the footprint. Elements between
        the places are not written.
    """
    for name, value, known in (("order", order, ORDERS), ("step", step, STEPS)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    least = INDEX_BYTES if step == "index" else ADDRESS_BYTES
    if step_bytes < least or step_bytes % least:
        raise ValueError(f"steps are multiples of {least} bytes, not {step_bytes}")
    lines = footprint_bytes // step_bytes
    if lines < 2:
        raise ValueError(
            f"a ring needs two steps of {step_bytes} bytes at least: {footprint_bytes:,} bytes are "
            "too small a footprint"
        )
    if footprint_bytes > MAX_RING_BYTES:
        raise ValueError(f"a ring's indices reach {size_text(MAX_RING_BYTES)}, not further")
    where = measured_on(where)
    dtype, item, unit = (
        (torch.int32, INDEX_BYTES, INDEX_BYTES)
        if step == "index"
        else (torch.int64, ADDRESS_BYTES, 1)
    )
    generator = torch.Generator(where).manual_seed(0)
    numbers = (
        torch.arange(lines, dtype=torch.int32, device=where)
        if order == "sequential"
        else torch.randperm(lines, dtype=torch.int32, device=where, generator=generator)
    )
    places = numbers.to(dtype) * (step_bytes // unit)
    elements = lines * (step_bytes // item)
    chain = torch.empty(elements, dtype=dtype, device=where) if into is None else into[:elements]
    # By number first and then in the order of memory: a third of the time of a scatter.
    next_place = torch.empty_like(places)
    next_place[numbers.long()] = places.roll(-1)
    if step == "address" and where.type == "cuda":
        next_place += chain.data_ptr()
    chain.view(lines, -1)[:, 0] = next_place
    return chain, places


def slices(run: Callable[[], float], budget_s: float, least: int = MIN_SLICES) -> list[float]:
    """What `run()` gives, again and again for `budget_s`; `least` times at least."""
    found, end = [], time.perf_counter() + budget_s
    while len(found) < least or (time.perf_counter() < end and len(found) < 100):
        found.append(run())
    return found


def typical(samples: list[float]) -> float:
    """The time that a fifth of the samples are below: other programs interrupt the others."""
    return torch.tensor(samples, dtype=torch.float64).quantile(0.2).item()
