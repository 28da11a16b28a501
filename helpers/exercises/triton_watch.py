"""Watching a function that launches Triton kernels: PyTorch's operations, launches, accesses."""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from unittest import mock

from helpers.device import device, interpreting, triton_version  # before Triton is loaded

# isort: split
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.exercises.written_kernels import UNWRITTEN

# Elements on either side of every tensor: on a GPU nothing else tells that a kernel writes too far.
MARGIN = 1 << 16


@dataclasses.dataclass(frozen=True)
class Launch:
    """One launch: the kernel's arguments by name, and options such as num_warps."""

    kernel: object
    grid: tuple[int, ...]
    arguments: dict[str, object]
    options: dict[str, object]


class Guarded:
    """A contiguous tensor between two margins, all of it filled with `fill`."""

    def __init__(self, name, shape, dtype, fill: float, values: torch.Tensor | None = None):
        self.name, self.size = name, math.prod(shape)
        self.whole = torch.full((self.size + 2 * MARGIN,), fill, dtype=dtype, device=device())
        self.tensor = self.whole[MARGIN : MARGIN + self.size].view(shape)
        if values is not None:
            self.tensor.copy_(values)

    def places(self, addresses: np.ndarray) -> np.ndarray:
        """The elements at these addresses; the tensor's own are 0 to size - 1."""
        return (addresses.astype(np.int64) - self.whole.data_ptr()) // self.whole.itemsize - MARGIN

    def assert_margins(self, where: str) -> None:
        changed = self.whole != self.whole.new_tensor(UNWRITTEN)
        changed[MARGIN : MARGIN + self.size] = False
        if changed.any():
            place = int(changed.nonzero()[0]) - MARGIN
            raise AssertionError(f"{where} {self.outside('it', 'writes', place)}")

    def outside(self, who: str, doing: str, place: int) -> str:
        """A sentence on an access next to the tensor."""
        count = f"{self.size:,} element{'s' if self.size != 1 else ''}"
        what = {"reads": "load", "writes": "store"}[doing]
        return f"{who} {doing} {self.name}[{place}], and it has {count}: is the {what} masked?"


class Watch(TorchDispatchMode):
    """Refuses PyTorch's arithmetic outside of kernels; notes launches and, interpreted, accesses.

    fault: what an interpreted kernel did that is not allowed. widest: the longest side of a block
    of addresses that was loaded or stored at once.
    """

    def __init__(self, guarded: list[Guarded], outputs: set[str], where: str):
        super().__init__()
        self.guarded, self._outputs, self._where = guarded, outputs, where
        self.launches: list[Launch] = []
        self.fault: str | None = None
        self.widest = 0
        self.counts = {
            doing: {each.name: np.zeros(each.size, np.int64) for each in guarded}
            for doing in ("reads", "writes")
        }
        self._launching = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if not (self._launching or func.is_view or name.startswith(("empty", "new_empty"))):
            raise AssertionError(
                f"{self._where} it calls PyTorch's {name}: all of the work is the Triton kernel's"
            )
        return func(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def everything(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if triton_version():
                self._patch(stack)
            stack.enter_context(self)
            yield

    def _patch(self, stack: contextlib.ExitStack) -> None:
        from triton.runtime import interpreter, jit

        def wrap(owner: type, name: str, before: Callable, after: Callable = lambda: None):
            original = getattr(owner, name)

            def wrapped(*args, **kwargs):
                before(*args, **kwargs)
                try:
                    return original(*args, **kwargs)
                finally:
                    after()

            stack.enter_context(mock.patch.object(owner, name, wrapped))

        kernels = interpreter.InterpretedFunction if interpreting() else jit.JITFunction
        wrap(kernels, "run", self._launch, self._launched)
        if not interpreting():
            return
        builder = interpreter.InterpreterBuilder
        wrap(builder, "create_masked_load", self._load)
        wrap(builder, "create_masked_store", self._store)
        for name in ("create_atomic_rmw", "create_atomic_cas"):
            wrap(builder, name, self._atomic)

    def _launch(self, kernel, *args, grid, warmup, **kwargs) -> None:
        self._launching = True
        if warmup:
            return
        signature = inspect.signature(kernel.fn)
        own = {key: value for key, value in kwargs.items() if key in signature.parameters}
        bound = signature.bind(*args, **own)
        bound.apply_defaults()
        sizes = grid(dict(bound.arguments)) if callable(grid) else grid
        sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        options = {key: value for key, value in kwargs.items() if key not in own}
        self.launches.append(Launch(kernel, sizes, dict(bound.arguments), options))

    def _launched(self) -> None:
        self._launching = False

    def _load(self, builder, pointers, mask, *_args, **_kwargs) -> None:
        self._touch("reads", builder, pointers, mask)

    def _store(self, builder, pointers, _value, mask, *_args, **_kwargs) -> None:
        self._touch("writes", builder, pointers, mask)

    def _touch(self, doing: str, builder, pointers, mask) -> None:
        self.widest = max(self.widest, 1, *pointers.data.shape)
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        for each in self.guarded:
            places = each.places(addresses)
            inside = (places >= 0) & (places < each.size)
            if doing == "writes" and each.name not in self._outputs and inside.any():
                self._fail(f"{self._block(builder)} writes to {each.name}, which is an input")
            self.counts[doing][each.name] += np.bincount(places[inside], minlength=each.size)
            addresses = addresses[~inside]
        if not addresses.size:
            return
        who = self._block(builder)
        for each in self.guarded:
            place = int(each.places(addresses[:1])[0])
            if -MARGIN <= place < each.size + MARGIN:
                self._fail(each.outside(who, doing, place))
        names = " nor ".join(f"{each.name}'s" for each in self.guarded)
        self._fail(f"{who} {doing} memory that is neither {names}")

    def _atomic(self, *_args, **_kwargs) -> None:
        self._fail("it takes atomics: a plain load or store is enough")

    def _block(self, builder) -> str:
        return f"block {builder.grid_idx[0]}"

    def _fail(self, what: str) -> None:
        self.fault = f"{self._where} {what}"
        raise AssertionError(self.fault)
