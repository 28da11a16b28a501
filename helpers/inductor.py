"""What torch.compile's backend, TorchInductor, writes: the source of its kernels."""

import re
from collections.abc import Callable

import helpers.device  # noqa: F401  sets Triton's mode before torch.compile loads Triton

# isort: split
import torch

_KERNEL = re.compile(r"(\w+) = async_compile\.\w+\(.*?'''(.*?)'''", re.S)
# In front of it stands how the kernel is to be compiled: in Triton on a GPU, in C++ on a CPU.
_START = re.compile(r'^@triton\.jit|^extern "C"', re.M)


def kernels(function: Callable, *arguments) -> tuple[object, dict[str, str]]:
    """Call a compiled function, compiling it anew: (its result, its kernels' sources by name).

    On a GPU they are Triton kernels (`triton_poi_fused_…`), on a CPU C++ functions. Kernels that
    come from a library, such as a matmul's, have no source and are not among them.
    """
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor
    from torch._inductor.utils import run_and_get_code

    torch.compiler.reset()
    with (  # what is found in a cache would not be written again
        autograd.patch(enable_autograd_cache=False),
        inductor.patch(fx_graph_cache=False),
    ):
        result, programs = run_and_get_code(function, *arguments)
    found = _KERNEL.findall("\n".join(programs))
    return result, {name: text[_START.search(text).start() :].strip() for name, text in found}
