"""What the public functions of this package ask of a tensor, and how they enter autograd."""

import sys
from collections.abc import Callable, Collection

import torch


def checked(x: torch.Tensor, what: str, dtypes: Collection[torch.dtype]) -> torch.Tensor:
    """x; TypeError for anything but a dense tensor of one of the dtypes. what: the operation."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{what} takes a dense tensor, not {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(f"{what} takes a dense tensor, not {'nested' if x.is_nested else x.layout}")
    if x.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{what} takes {names}, not {x.dtype}")
    return x


def apply(function: type[torch.autograd.Function], *arguments):
    """function.apply, which torch.compile goes around: it would try to look into the interpreter,
    or the emulator."""
    return outside_compiler(function.apply)(*arguments)


def outside_compiler(function: Callable) -> Callable:
    """The function as torch.compile calls it without looking inside.

    Also where nothing is being compiled just now: what fails to compile is run, and what it calls
    then is looked into.
    """
    return torch._dynamo.disable(function) if "torch._dynamo" in sys.modules else function
