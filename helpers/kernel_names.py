"""What a GPU kernel's name says about what it computes and how.

    decode("ampere_sgemm_128x64_tn").sentence()

`helpers.gemm_names` reads matrix multiplies and `helpers.op_names` the rest; both say which of the
names are documented and which are read by observation. A part that a name leaves out is None, and
a name that follows no known pattern decodes to library None, operation "unknown".
"""

import re
from dataclasses import dataclass

from helpers.gemm_names import decode_gemm
from helpers.op_names import decode_op, function_name, functor_name

# Kernels that say what they compute only in their template arguments.
_TEMPLATES = ("elementwise_kernel", "_unroll", "reduce_kernel", "multi_tensor_apply_kernel")
_DATAPATHS = {
    "simt": "on ordinary CUDA cores, not tensor cores",
    "tensorop": "on tensor cores",
    "wgmma": "on tensor cores through warpgroup instructions (wgmma)",
}


@dataclass(frozen=True)
class KernelName:
    """The parts of one kernel's name; None where the name does not say."""

    library: str | None = None
    operation: str = "unknown"
    architecture: str | None = None  # the GPU generation it was built for, e.g. "sm80"
    datapath: str | None = None  # "simt" = CUDA cores; "tensorop", "wgmma" = tensor cores
    dtype_in: str | None = None
    dtype_accumulate: str | None = None
    dtype_out: str | None = None
    tile: tuple[int | None, ...] | None = None  # m, n of a block's output tile; k of one step
    stages: int | None = None  # tiles on their way from global to shared memory at once
    layout: str | None = None  # one letter an operand: n = as stored, t = transposed
    warps: str | None = None  # how a block's warps divide m, n, k
    vector_width: int | None = None  # elements that a thread reads at once
    extra: tuple[str, ...] = ()

    def sentence(self) -> str:
        """The decoded parts in words."""
        if self.library is None:
            return "A name that follows no pattern decoded here."
        types = [
            f"{self.dtype_in} in" if self.dtype_in else None,
            f"accumulated in {self.dtype_accumulate}" if self.dtype_accumulate else None,
            f"{self.dtype_out} out" if self.dtype_out else None,
        ]
        tile = None
        if self.tile:
            m, n, k = self.tile
            tile = f"a {m}x{n} tile per block" + (f" in steps of k = {k}" if k else "")
        parts = [
            " ".join(filter(None, [self.operation, _DATAPATHS.get(self.datapath)])),
            f"built for {self.architecture}" if self.architecture else None,
            ", ".join(filter(None, types)),
            tile,
            f"{self.stages} stages" if self.stages else None,
            f"layout {self.layout}" if self.layout else None,
            self.warps,
            f"{self.vector_width} elements per read" if self.vector_width else None,
            *self.extra,
        ]
        return f"{self.library}: " + "; ".join(filter(None, parts)) + "."


def decode(name: str) -> KernelName:
    """The parts of a kernel's full name; an unknown name gives operation "unknown"."""
    return KernelName(**(decode_gemm(name) or decode_op(name) or {}))


def short(name: str, width: int = 60) -> str:
    """A name for a table: no namespaces, arguments or template clutter, at most `width` characters.

    The functor of an elementwise or reduction kernel stays, because it says what is computed:
    "vectorized_elementwise_kernel<4> add". Raises ValueError when `width` is below 2.
    """
    if width < 2:
        raise ValueError(f"width must be 2 or more, got {width}")
    inner = re.search(r"cutlass::Kernel2?<(?:\w+::)*(\w+)>", name)
    text = inner[1] if inner else function_name(name)
    if text.endswith(_TEMPLATES):
        vector = re.search(r"vectorized_elementwise_kernel<(?:\(int\))?(\d+)", name)
        what = functor_name(name)
        text += (f"<{vector[1]}>" if vector else "") + (f" {what}" if what else "")
    return text if len(text) <= width else text[: width - 1] + "…"
