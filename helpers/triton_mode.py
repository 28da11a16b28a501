"""Triton in the mode that this machine needs; where it cannot be installed, stand-ins for it.

`from helpers.triton_mode import tl, triton` in place of Triton's two imports; `gluon`, `gl` and
`hopper` are the language below it, in which layouts and barriers are written out. Where there is no
Triton (macOS, Windows), kernels can still be defined, and only launching one raises ToolMissing.
"""

import contextlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager

from helpers.device import interpreting  # first: it chooses the mode, before Triton is loaded

# isort: split
import numpy as np
import torch

from helpers.cuda_source import check_traced
from helpers.ptx.assembler import ToolMissing

MISSING = (
    "Triton is not installed here, so its kernels cannot run: it needs Linux (on Windows WSL), "
    "pip install triton"
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


def on_device_of(x: torch.Tensor) -> AbstractContextManager:
    """A context for launching Triton kernels on x: its GPU is the current one, and interpreted
    kernels warn of no overflow, as a GPU does not.

    ToolMissing without Triton; ValueError for a tensor that Triton's mode cannot reach: compiled
    kernels take tensors on a GPU, interpreted ones tensors on the CPU. TypeError while PyTorch
    traces.
    """
    check_traced("x", x)
    if isinstance(triton, _Missing):
        raise ToolMissing(MISSING)
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
