"""A fault of the runtime as a sentence of the kernel's author."""

import math
from collections.abc import Callable

from helpers.emulator.errors import KernelFault
from helpers.emulator.library import KINDS

# In the order of FaultKind (runtime.h).
NAMES = (
    "",
    "out of bounds",
    "misaligned access",
    "barrier",
    "warp operation",
    "shared-memory race",
    "timeout",
    "division by zero",
    "stack overflow",
    "crash",
    "out of bounds",
    "trap",
)


def fault(launch, kernel: str, name: str, buffers: list, line_of: dict, timeout_s: float):
    """The KernelFault to raise for `launch.fault`; `line_of` gives an instruction's line."""
    found = launch.fault
    block, thread = tuple(found.block), _position(found.thread, launch.block)
    line = found.line or line_of.get(found.pc)
    kind = NAMES[found.kind]
    sentence = _SENTENCES[found.kind](launch, buffers, name, timeout_s)
    place = f" ({name}:{line})" if line else ""
    message = f"{kernel}, block {block}, thread {thread}: {sentence}{place}"
    return KernelFault(message, kernel=kernel, block=block, thread=thread, kind=kind)


def _position(thread: int, block) -> tuple[int, int, int]:
    x, y, _ = block
    return thread % x, thread // x % y, thread // (x * y)


def _verb(found) -> str:
    return {"load": "reads", "store": "writes"}.get(
        KINDS[found.access].removeprefix("shared "), "updates"
    )


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _out_of_bounds(launch, buffers, *_) -> str:
    found = launch.fault
    verb = f"{_verb(found)} {_count(found.bytes, 'byte')}"
    if found.address < 4096:
        return f"{verb} through a null pointer"
    where = _shared(launch, found.address)
    if where:
        return f"{verb} at {where}"
    near = [b for b in buffers if b.low <= found.address < b.high]
    if not near:
        return f"{verb} at an address of no argument"
    nearest = min(near, key=lambda b: max(b.begin - found.address, found.address - b.end))
    element = math.floor((found.address - nearest.begin) / nearest.itemsize)
    return f"{verb} at element {element} of {nearest.name}, which {nearest.extent}"


def _shared(launch, address: int) -> str:
    """Where in shared memory, "" when it is far from both parts."""
    parts = (
        ("static", launch.static_shared, launch.static_shared_bytes),
        ("dynamic", launch.dynamic_shared, launch.shared_bytes),
    )
    for slack in (0, 4096):  # the two may be neighbours
        for name, begin, size in parts:
            if size and begin - slack <= address < begin + size + slack:
                return f"byte {address - begin} of the {name} shared memory, which has {size}"
    return ""


def _misaligned(launch, buffers, *_) -> str:
    found = launch.fault
    owner = next((b for b in buffers if b.begin <= found.address < b.end), None)
    offset = f"byte {found.address - owner.begin} of {owner.name}" if owner else "shared memory"
    return (
        f"{_verb(found)} {found.bytes} bytes at {offset}, an address that is no multiple of "
        f"{found.bytes}"
    )


def _missing(launch) -> str:
    """One of the threads that others wait for, and where it is instead."""
    found = launch.fault
    other = _position(found.other_thread, launch.block)
    does = f"waits at line {found.other_line}" if found.other_line else "has ended"
    return f"thread {other} {does}"


def _barrier(launch, *_) -> str:
    found = launch.fault
    threads = math.prod(launch.block)
    return (
        f"waits at __syncthreads with {found.count - 1} others of the block's {threads} threads, "
        f"but {found.other_count} never come: {_missing(launch)}"
    )


def _warp(launch, *_) -> str:
    found = launch.fault
    if found.count and not found.other_count:
        return (
            f"takes the value of lane {found.count - 1} in a shuffle with the mask "
            f"{found.mask:#x}, and that lane does not take part"
        )
    if not found.other_count:
        return f"calls a warp operation with the mask {found.mask:#x}, which leaves out its lane"
    return (
        f"waits in a warp operation for the lanes of mask {found.mask:#x}, but "
        f"{found.other_count} of them never come: {_missing(launch)}"
    )


def _race(launch, *_) -> str:
    found = launch.fault
    other = _position(found.other_thread, launch.block)
    who = f"thread {other}" if found.other_thread != found.thread else "several threads"
    return (
        f"{_verb(found)} {_shared(launch, found.address).split(', which')[0]}, which {who} also "
        "used, one of them writing, without a barrier between"
    )


def _timeout(launch, _, __, timeout_s) -> str:
    return f"still runs after {timeout_s:g} s: an endless loop, or too large a launch"


def _index(launch, *_) -> str:
    found = launch.fault
    kind = found.type.decode(errors="replace").strip("'")
    return f"index {found.index} is outside an array of type {kind}"


_SENTENCES: tuple[Callable, ...] = (
    lambda *_: "",
    _out_of_bounds,
    _misaligned,
    _barrier,
    _warp,
    _race,
    _timeout,
    lambda *_: "divides by zero",
    lambda *_: "its local arrays and calls need more than 256 KB of stack",
    lambda *_: "touches memory that does not exist",
    _index,
    lambda launch, *_: f"stops at {launch.fault.type.decode(errors='replace')}",
)
