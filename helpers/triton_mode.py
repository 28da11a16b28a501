"""Triton in the mode that this machine needs; where it cannot be installed, stand-ins for it.

`from helpers.triton_mode import tl, triton` in place of Triton's two imports; `gluon`, `gl` and
`hopper` are the language below it, in which layouts and barriers are written out. Where there is no
Triton (macOS, Windows), kernels can still be defined, and only launching one raises ToolMissing.
"""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager

from helpers.device import interpreting  # first: it chooses the mode, before Triton is loaded

# isort: split
import numpy as np
import torch

from helpers import toolchain
from helpers.cuda_source import check_traced
from helpers.ptx.assembler import ToolMissing

MISSING = (
    "Triton is not installed here, so its kernels cannot run: it needs Linux (on Windows WSL), "
    "pip install triton"
)
NO_COMPILER = (
    "Triton cannot launch kernels here: on a GPU it needs a C compiler with Python's headers "
    "(gcc, python3-dev)"
)


class _Missing:
    """Stands for Triton and all that is in it: a kernel can be decorated, but not launched."""

    def __getattr__(self, name: str):
        if name.startswith("__") or name == "fn":  # a kernel's function: here none is kept
            raise AttributeError(name)
        return self

    def __call__(self, *args, **kwargs):
        return self

    def __getitem__(self, grid):
        raise ToolMissing(MISSING)


try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
except ImportError:
    triton = tl = gluon = gl = hopper = _Missing()


def _mend_indices() -> None:
    """Triton 3.6's interpreter makes an index, as of range, of an array of one number: NumPy
    refuses that from 2.4 on."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)  # which also notes what to put back
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_lang_tensor


if interpreting() and str(getattr(triton, "__version__", "")).startswith("3.6."):
    _mend_indices()


@functools.cache
def cannot_launch() -> str:
    """Why Triton's kernels cannot run in this process, in one line; "" when they can."""
    if isinstance(triton, _Missing):
        return MISSING
    return "" if interpreting() or toolchain.triton_can_build() else NO_COMPILER


def on_device_of(x: torch.Tensor) -> AbstractContextManager:
    """A context for launching Triton kernels on x: its GPU is the current one, and interpreted
    kernels warn of no overflow, as a GPU does not.

    ToolMissing where kernels cannot be launched (`cannot_launch`); ValueError for a tensor that
    Triton's mode cannot reach: compiled kernels take tensors on a GPU, interpreted ones tensors on
    the CPU. TypeError while PyTorch traces.
    """
    check_traced("x", x)
    if reason := cannot_launch():
        raise ToolMissing(reason)
    mode, place = ("interpreted", "cpu") if interpreting() else ("compiled", "cuda")
    if x.device.type != place:
        raise ValueError(
            f"Triton kernels are {mode} in this process and take {place} tensors, not {x.device}; "
            "TRITON_INTERPRET=1, set before Python starts, chooses the interpreter"
        )
    return _quiet() if interpreting() else torch.cuda.device_of(x)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a maximum of NaN alone, say
        yield
