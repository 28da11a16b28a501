"""What the name of a kernel says when it is not a matrix multiply.

PyTorch's own kernels are C++ templates in aten/src/ATen/native/cuda/
(CUDALoops.cuh, Reduce.cuh, SoftMax.cu, PersistentSoftmax.cuh, Shape.cu) whose arguments give the
types and widths; TorchInductor names its Triton kernels triton_<kind>_fused_<operations>_<number>
(torch/_inductor/codegen/triton.py); FlashAttention's traits are head size, tile and warps
(csrc/flash_attn/src/kernel_traits.h). The names of cuBLAS's other kernels (gemv, split-k) and of
cuDNN's attention are not documented and are read by observation.
A part that a name does not state is None, and an unknown name decodes to nothing.
"""

import re
from collections.abc import Callable

from helpers.gemm_names import SCALARS

# What stands for an operation inside ATen's templates: CUDAFunctor_add<float>, MulFunctor<float>,
# GeluCUDAKernelImpl(...)::{lambda...}, direct_copy_kernel_cuda(...)::{lambda...}, MeanOps<...>.
_FUNCTOR = re.compile(
    r"\b(?:CUDAFunctor(?:OnSelf|OnOther)?_(\w+)|(\w+?)_?Functor\b|(\w+)_functor\b"
    r"|(?!ReduceOps|OutOps)(\w+?)Ops\b|(\w+?)(?:CUDA)?KernelImpl\b|(\w+?)_kernel_(?:cuda|impl)\b)"
)
# These only adapt another functor, which follows them as a template argument.
_ADAPTERS = {"Binary", "AUnary", "BUnary", "UnaryOp", "BinaryOpScalar", "BinaryOpList"}
_INDUCTOR = {
    "poi": "pointwise",
    "red": "reduction",
    "per": "persistent reduction",
}
_DIRECTIONS = {"H": "host", "D": "device", "P": "peer"}


def decode_op(name: str) -> dict | None:
    """Fields of `helpers.kernel_names.KernelName`; None when no rule knows the name."""
    for pattern, build in _RULES:
        match = re.search(pattern, name)
        if match:
            return build(match, name)
    return None


def function_name(name: str) -> str:
    """The function's own name: "void a::b::f<x, y>(z)" gives "f"; other names stay as they are."""
    if name.startswith(("Memcpy", "Memset")):
        return name
    plain = re.sub(r"\(anonymous namespace\)::|<unnamed>::|unnamed>::", "", name)
    plain = re.sub(r"^std::enable_if<.*?>::type ", "", plain).removeprefix("void ")
    path = re.split(r"[<(]", plain, maxsplit=1)[0].strip().split("::")
    if path[-1] == "kernel":  # internal::gemvx::kernel
        return "::".join(path[-2:])
    if path[-1] == "device_kernel":  # CUTLASS 3: the class that does the work is the argument
        inner = re.search(r"device_kernel<(?:(?:\w+::)*enable\w*<)?(?:\w+::)*(\w+)", plain)
        return f"device_kernel {inner[1]}" if inner else path[-1]
    return path[-1] or name


def functor_name(name: str) -> str | None:
    """What an ATen template computes: "add", "gelu", "mul", "sum", "direct copy"."""
    for match in _FUNCTOR.finditer(name.partition("<")[2]):
        what = next(group for group in match.groups() if group)
        if what not in _ADAPTERS:
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", what).replace("_", " ")
            return words.replace(" CUDA", "").lower()
    return None


def _arguments(name: str, function: str) -> list[str]:
    """The plain template arguments of `function` before the first that is itself a template."""
    match = re.search(rf"{function}<([^<>]*)", name)
    texts = match[1].split(",") if match else []
    return [re.sub(r"\((?:int|bool)\)", "", text).strip() for text in texts]


def _scalars(name: str, function: str) -> list[str]:
    return [SCALARS[text] for text in _arguments(name, function) if text in SCALARS]


def _elementwise(match: re.Match, name: str) -> dict:
    what = functor_name(name)
    first = re.search(r"[<(](float|double|bool|c10::Half|c10::BFloat16)(?=[,>)])", name)
    # A copy's functor does not say from which type it converts.
    known = first and what and "copy" not in what
    width = re.search(r"vectorized_elementwise_kernel<(?:\(int\))?(\d+)", name)
    return {
        "library": "PyTorch",
        "operation": f"elementwise {what}" if what else "elementwise",
        "dtype_in": SCALARS[first[1]] if known else None,
        "vector_width": int(width[1]) if width else None,
    }


def _reduce(match: re.Match, name: str) -> dict:
    what = functor_name(name)
    types = _scalars(name, r"\w+_functor")  # input, accumulator, output
    threads = _arguments(name, "reduce_kernel")[:1]
    return {
        "library": "PyTorch",
        "operation": f"reduction {what}" if what else "reduction",
        "dtype_in": types[0] if len(types) == 3 else None,
        "dtype_accumulate": types[1] if len(types) == 3 else None,
        "dtype_out": types[2] if len(types) == 3 else None,
        "extra": (f"at most {threads[0]} threads per block",) if threads else (),
    }


def _softmax(match: re.Match, name: str) -> dict:
    function = match[0]
    log = "log softmax" if "LogSoftMax" in name else "softmax"
    direction = "backward" if "Backward" in function or "backward" in function else "forward"
    types = _scalars(name, function)
    order = [0, 2, 1] if "warp" in function else [0, 1, 2]  # in, out, acc / in, acc, out
    types = [types[i] for i in order] if len(types) >= 3 else [None] * 3
    numbers = [text for text in _arguments(name, function) if text.isdigit()]
    extra = []
    if function.endswith("Smem"):
        extra.append("a block holds its row in shared memory")
    if function.endswith("Reg"):
        extra.append("a block holds its row in registers")
    if "warp" in function:
        extra.append("a warp holds its rows in registers")
        if numbers:
            extra.append(f"rows of up to {2 ** int(numbers[0])} elements")
    return {
        "library": "PyTorch",
        "operation": f"{log} {direction}",
        "dtype_in": types[0],
        "dtype_accumulate": types[1],
        "dtype_out": types[2],
        "vector_width": int(numbers[0]) if numbers and "cunn" in function else None,
        "extra": tuple(extra),
    }


def _multi_tensor(match: re.Match, name: str) -> dict:
    what = functor_name(name)
    operation = "one launch over a list of tensors" + (f": {what}" if what else "")
    return {"library": "PyTorch", "operation": operation}


def _inductor(match: re.Match, name: str) -> dict:
    kind = _INDUCTOR.get(match["kind"], match["kind"])
    return {"library": "TorchInductor (Triton)", "operation": f"fused {kind}: {match['what']}"}


def _flash(match: re.Match, name: str) -> dict:
    direction = "backward" if "bwd" in match[0] else "forward"
    traits = _arguments(name, r"Flash_\w+_traits")
    tile = warps = head = None
    if len(traits) >= 4 and all(text.isdigit() for text in traits[:4]):
        head, tile_m, tile_n, warps = (int(text) for text in traits[:4])
        tile = (tile_m, tile_n, None)
    return {
        "library": "FlashAttention",
        "operation": f"attention {direction}",
        "dtype_in": (_scalars(name, r"Flash_\w+_traits") or [None])[0],
        "tile": tile,
        "warps": f"{warps} warps" if warps else None,
        "extra": (f"head size {head}",) if head else (),
    }


def _cudnn_attention(match: re.Match, name: str) -> dict:
    tile = re.search(r"_(\d+)x(\d+)x\d+(?:_|$)", name)
    return {
        "library": "cuDNN",
        "operation": f"attention {'backward' if match['pass'] == 'b' else 'forward'}",
        "architecture": f"sm{match['arch']}",
        "datapath": "wgmma" if "_wgmma_" in name else None,
        "tile": (int(tile[1]), int(tile[2]), None) if tile else None,
    }


def _gemv(match: re.Match, name: str) -> dict:
    types = set(_scalars(name, match[0])) - {"i32", "i64", "bool"}
    dtype = types.pop() if len(types) == 1 else None
    return {"library": "cuBLAS", "operation": "matrix times vector", "dtype_in": dtype}


def _magma(match: re.Match, name: str) -> dict:
    return {"library": "cuBLAS", "operation": "matrix multiply", "extra": ("MAGMA's kernel",)}


def _memcpy(match: re.Match, name: str) -> dict:
    source, target = _DIRECTIONS[match["source"]], _DIRECTIONS[match["target"]]
    return {"library": "CUDA", "operation": f"copy {source} to {target}"}


def _fixed(library: str, operation: str) -> Callable[[re.Match, str], dict]:
    return lambda match, name: {"library": library, "operation": operation}


def _other(library: str) -> Callable[[re.Match, str], dict]:
    return lambda match, name: {"library": library, "operation": function_name(name)}


_RULES: list[tuple[str, Callable[[re.Match, str], dict]]] = [
    (r"^Memcpy (?P<source>[HDP])to(?P<target>[HDP])", _memcpy),
    (r"^Memset", _fixed("CUDA", "fill memory")),
    (r"triton_(?P<kind>[a-z]{3})_fused_(?P<what>\w+?)_\d+", _inductor),
    (r"cunn_SoftMax\w+|softmax_warp_\w+", _softmax),
    (r"distribution_elementwise", _fixed("PyTorch", "random numbers")),
    (r"\w*elementwise_kernel\w*<", _elementwise),
    (r"\breduce_kernel<", _reduce),
    (r"multi_tensor_apply_kernel", _multi_tensor),
    (r"CatArrayBatchedCopy", _fixed("PyTorch", "concatenate")),
    (r"\w*layer_norm\w*|RowwiseMoments\w*", _fixed("PyTorch", "layer norm")),
    (r"flash_(?:fwd|bwd)\w*kernel", _flash),
    (r"FlashAttnFwdSm90", _fixed("FlashAttention 3", "attention forward")),
    (r"FlashAttnBwdSm90", _fixed("FlashAttention 3", "attention backward")),
    (r"fmha_cutlassF", _fixed("CUTLASS", "memory-efficient attention forward")),
    (r"fmha_cutlassB", _fixed("CUTLASS", "memory-efficient attention backward")),
    (
        r"cudnn_generated_fort_native_sdpa_sm(?P<arch>\d+)_flash_(?P<pass>[fb])prop",
        _cudnn_attention,
    ),
    (r"gemv\w+_kernel\w*|gemvx::kernel|gemvk1_kernel", _gemv),
    (
        r"splitKreduce_kernel",
        _fixed("cuBLAS", "sum of the parts of a split-k matrix multiply"),
    ),
    (r"magma_sgemm", _magma),
    (r"^ncclDevKernel", _other("NCCL")),
    (r"\bcub::", _other("CUB")),
    (r"cutlass::", _other("CUTLASS")),
    (r"\bat::(?:native|cuda)::", _other("PyTorch")),
]
