"""What torch.compile's backend, TorchInductor, writes: the source of its kernels."""

import re
from collections.abc import Callable

import helpers.device  # noqa: F401  sets Triton's mode before torch.compile loads Triton

_KERNEL = re.compile(r"(\w+) = async_compile\.\w+\(.*?'''(.*?)'''", re.S)
# In front of it stands how the kernel is to be compiled: in Triton on a GPU, in C++ on a CPU.
_START = re.compile(r'^@triton\.jit|^extern "C"', re.M)


def kernels(function: Callable, *arguments) -> tuple[object, dict[str, str]]:
    """Call a compiled function as for the first time: (its result, its kernels' sources by name).

    On a GPU they are Triton kernels (`triton_poi_fused_…`), on a CPU C++ functions. Kernels that
    come from a library, such as a matmul's, have no source and are not among them.
    """
    from torch._inductor.utils import run_and_get_code

    result, programs = run_and_get_code(function, *arguments)
    found = _KERNEL.findall("\n".join(programs))
    return result, {name: text[_START.search(text).start() :].strip() for name, text in found}
