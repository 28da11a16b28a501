"""Count what a sequence of PyTorch operations reads, writes and computes when each is a kernel."""

import math
from collections.abc import Callable

import helpers.device  # noqa: F401  sets Triton's mode before flop_counter loads Triton

# isort: split
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from helpers.traffic import Work

# These fill their first argument without looking at what was in it.
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_"}
OVERWRITES |= {"bernoulli_", "cauchy_", "geometric_", "log_normal_"}
MOVES = {"clone", "_to_copy", "cat", "stack", "repeat", "flip", "roll", "constant_pad_nd"}
MOVES |= {"_local_scalar_dense"}  # a tensor's item()
# These look at what they pick alone.
GATHERS = {"embedding", "index_select", "gather", "index", "take", "masked_select"}
# Matrix-vector products, which PyTorch's counter leaves out, and the place of their matrix.
VECTOR_PRODUCTS = {"mv": 0, "dot": 0, "vdot": 0, "addmv": 1, "addmv_": 1}


def count(run: Callable) -> Work:
    """The work of the operations that `run()` calls, each one reading and writing memory.

    An element that a stride repeats counts once, and so does a tensor that is given twice; one
    that is scattered into (`x[indices] = y`) counts as a whole. FLOPs follow the conventions of
    `helpers.traffic`: matrix products as PyTorch's own FlopCounterMode, one an element for
    pointwise operations and reductions, none for moves. Runs on tensors of any device; on the
    "meta" device nothing is allocated. Compiled functions must be counted before compilation.
    """
    counter = _Counter()
    with counter:
        run()
    return counter.work


def _nbytes(tensor: torch.Tensor) -> int:
    if not tensor.numel():
        return 0
    axes = [a for a in zip(tensor.shape, tensor.stride(), strict=True) if a[1]]
    span = 1 + sum((size - 1) * stride for size, stride in axes)  # less where windows overlap
    return min(math.prod(size for size, _ in axes), span) * tensor.element_size()


class _Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.work = Work(0, 0, 0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::").removeprefix("_foreach_")
        if not _is_free(func, name):
            self.work += _work_of(func, name, args, kwargs, result)
        return result


def _is_free(func, name: str) -> bool:
    """Nothing is moved: memory is set aside, or seen under another shape."""
    if func.is_view or torch.Tag.inplace_view in func.tags:
        return True
    return name == "_unsafe_view" or name.startswith(("empty", "new_empty"))


def _work_of(func, name: str, args: tuple, kwargs: dict, result) -> Work:
    # zeros_like and new_zeros take no more than the shape or the dtype of their first argument.
    first_unread = name in OVERWRITES or name.endswith("_like") or name.startswith("new_")
    reads: dict[int, int] = {}  # bytes by tensor: an operation reads one that it gets twice once
    written = elements_in = 0
    for place, argument in enumerate(func._schema.arguments):
        tensors = _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += sum(map(_nbytes, tensors))
        if not argument.is_out and not (place == 0 and first_unread):
            reads |= {id(tensor): _nbytes(tensor) for tensor in tensors}
            elements_in = max(elements_in, sum(tensor.numel() for tensor in tensors))
    outputs, kinds = _tensors(result), func._schema.returns
    # What is no alias of an argument is new.
    results = (result,) if len(kinds) == 1 else result or ()
    new = [r for r, kind in zip(results, kinds, strict=True) if kind.alias_info is None]
    written += sum(map(_nbytes, _tensors(new)))
    read = sum(reads.values())
    if name in GATHERS:
        table = _nbytes(_tensors(args)[0])
        read += min(sum(map(_nbytes, outputs)), table) - table
    return Work(read, written, _flops(func, name, args, kwargs, result, elements_in, outputs))


def _flops(func, name, args, kwargs, result, elements_in, outputs) -> float:
    # The CPU's attention has a name of its own, which PyTorch's counter does not know.
    known = getattr(torch.ops.aten, name.replace("_for_cpu", ""), func.overloadpacket)
    if known in flop_registry:
        return flop_registry[known](*args, **kwargs, out_val=result)
    if name in MOVES | OVERWRITES | GATHERS:
        return 0
    if name in VECTOR_PRODUCTS:
        return 2 * args[VECTOR_PRODUCTS[name]].numel()
    elements_out = sum(tensor.numel() for tensor in outputs)
    # A pointwise operation works on what it makes, a reduction on its largest argument.
    return elements_out if torch.Tag.pointwise in func.tags else elements_in


def _tensors(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
