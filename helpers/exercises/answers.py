"""What the checkers of functions that a reader writes have in common."""

import weakref
from collections.abc import Callable
from numbers import Integral, Real

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves


def plain(given: object) -> object:
    """The numbers of an array or a tensor as Python's own; anything else as it is."""
    return given.tolist() if hasattr(given, "tolist") else given


def is_number(given: object) -> bool:
    """Whether it is a real number, of Python or NumPy, and no truth value."""
    return isinstance(given, Real) and not isinstance(given, bool)


def is_whole(given: object) -> bool:
    """Whether it is a whole number, of Python or NumPy, and no truth value."""
    return isinstance(given, Integral) and not isinstance(given, bool)


class Results(TorchFunctionMode):
    """What PyTorch's functions return inside: `largest`, the elements of the largest tensor."""

    def __init__(self):
        super().__init__()
        self.largest = 0
        self._tensors: dict[int, weakref.ref] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in filter(torch.is_tensor, tree_leaves(result)):
            self.largest = max(self.largest, each.numel())
            self._tensors[id(each)] = weakref.ref(each)
        return result

    def alive(self) -> int:
        """How many of the tensors still exist."""
        return sum(tensor() is not None for tensor in self._tensors.values())


def assert_small_tensors(
    run: Callable[[Results], object], where: str, plenty: int, why: str
) -> None:
    """AssertionError, which says where and why, if run(results) makes a larger tensor."""
    with (results := Results()):
        run(results)
    if results.largest > plenty:
        raise AssertionError(
            f"the values are right, but it makes a tensor of {results.largest} elements {where}, "
            f"where {plenty} are plenty: {why}"
        )
