"""Tensors copied to where the emulator guards them: storages apart, laid out as on a GPU."""

import contextlib
import ctypes
import dataclasses
import mmap

import torch

ALIGNMENT = 512  # of a storage's first byte: PyTorch's CUDA allocator's
GUARD_BYTES = 16 << 20  # address space only; an access in it is named by the nearest tensor


@dataclasses.dataclass(frozen=True)
class Region:
    """One tensor: its bytes are at [begin, end), and addresses in [low, high) are near it."""

    name: str
    tensor: torch.Tensor
    begin: int
    end: int
    low: int
    high: int

    @property
    def itemsize(self) -> int:
        return self.tensor.element_size()

    @property
    def extent(self) -> str:
        """ "has 1025", or for a tensor with gaps what it spans."""
        span = (self.end - self.begin) // self.itemsize
        return f"has {span}" if span == self.tensor.numel() else f"spans {span}"


def _span_bytes(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    steps = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (steps + 1) * tensor.element_size()


def _storages(tensors: dict[str, torch.Tensor]) -> dict[int, list[str]]:
    """The tensors' names by where their memory begins.

    Two storages may overlap: arrays of NumPy that are views of one array become tensors with a
    storage each.
    """
    storages, end = {}, 0
    storage = {name: tensor.untyped_storage() for name, tensor in tensors.items()}
    for name in sorted(tensors, key=lambda name: storage[name].data_ptr()):
        begin = storage[name].data_ptr()
        if begin >= end:
            start = begin
        storages.setdefault(start, []).append(name)
        end = max(end, begin + storage[name].nbytes())
    return storages


@contextlib.contextmanager
def placed(tensors: dict[str, torch.Tensor]):
    """The regions of the tensors, with their contents. Tensors that share memory share it here."""
    storages = _storages(tensors)
    offset = {
        name: tensors[name].untyped_storage().data_ptr()
        + tensors[name].storage_offset() * tensors[name].element_size()
        - start
        for start, names in storages.items()
        for name in names
    }
    ends = {
        start: max(offset[name] + _span_bytes(tensors[name]) for name in names)
        for start, names in storages.items()
    }
    size = sum(end + ALIGNMENT + GUARD_BYTES for end in ends.values()) + GUARD_BYTES
    with contextlib.closing(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)) as m:
        view = ctypes.c_char.from_buffer(m)
        base = at = ctypes.addressof(view)
        regions = []
        for start, names in storages.items():
            at = -(-(at + GUARD_BYTES) // ALIGNMENT) * ALIGNMENT
            for name in names:
                begin = at + offset[name]
                end = begin + _span_bytes(tensors[name])
                regions.append(Region(name, tensors[name], begin, end, base, base + size))
                ctypes.memmove(begin, tensors[name].data_ptr(), end - begin)
            at += ends[start]
        try:
            order = list(tensors)
            yield sorted(regions, key=lambda region: order.index(region.name))
        finally:
            del view


def copy_back(region: Region) -> None:
    """The region's bytes to its tensor."""
    ctypes.memmove(region.tensor.data_ptr(), region.begin, region.end - region.begin)
