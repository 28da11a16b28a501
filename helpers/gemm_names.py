"""What the name of a matrix-multiply kernel says: its tile, its types, its kind of core.

Where the grammars come from:
- CUTLASS documents its names: https://docs.nvidia.com/cutlass/latest/media/docs/cpp/profiler.html
  ("GEMM procedural names"); python/cutlass_library/gemm_operation.py builds them:
  cutlass_<arch>_<simt|tensorop>_<C><instruction>gemm_<A>_<tile m>x<n>_<tile k>x<stages>_<layout>
  _align<elements>, where the types of C and A are left out if they equal the accumulator's; and
  cutlass3x_sm<arch>_<simt|tensorop>_<instruction>gemm_<A>_<B>_<accumulator>_<C>_<D>_
  <tile m>x<n>x<k>_<cluster>_<stages>_<layout>_align<elements>_<schedule>.
- cuBLAS documents no format. Its xmma, nvjet and ampere_ names are read by observation: only what
  agrees with the types, shapes and shared memory of published traces is decoded. For nvjet that is
  the three type letters (input, accumulator, output), the tile, k x stages (tile x k x stages is
  what fits in shared memory), the cluster, split-k, bias, and the first two layout letters.

cuBLAS is column-major. For a row-major product it computes the transpose, so m and n of a tile and
the letters of the layout are those of the swapped operands. A part that a name leaves out is None.
"""

import re

SCALARS = {
    "float": "f32",
    "double": "f64",
    "fp16": "f16",
    "c10::Half": "f16",
    "__half": "f16",
    "cutlass::half_t": "f16",
    "c10::BFloat16": "bf16",
    "__nv_bfloat16": "bf16",
    "cutlass::bfloat16_t": "bf16",
    "int": "i32",
    "long": "i64",
    "bool": "bool",
}
_BLAS = {"s": "f32", "d": "f64", "h": "f16", "i": "i32"}
_NVJET = {"h": "f16", "t": "bf16", "s": "f32"}
_GENERATIONS = {"maxwell": "sm50", "volta": "sm70", "turing": "sm75", "ampere": "sm80"}
_INSTRUCTIONS = {
    "884": "8x8x4",
    "1688": "16x8x8",
    "8816": "8x8x16",
    "16816": "16x8x16",
    "16832": "16x8x32",
    "161616": "16x16x16",
}


def decode_gemm(name: str) -> dict | None:
    """Fields of `helpers.kernel_names.KernelName`; None when the name is of another kind."""
    for pattern, build in _GRAMMARS:
        match = re.search(pattern, name)
        if match:
            return build(match.groupdict())
    return None


def _cutlass2(part: dict) -> dict:
    accumulate = _BLAS.get(part["letter"])
    dtype_in = SCALARS.get(part["a"], part["a"]) or accumulate
    tensor = part["path"] == "tensorop"
    extra = [_instruction(part["shape"])]
    if tensor and dtype_in == "f32":
        extra.append("f32 inputs are rounded to TF32")
    return {
        "library": "CUTLASS",
        "operation": "matrix multiply",
        "architecture": f"sm{part['arch']}",
        "datapath": part["path"],
        "dtype_in": dtype_in,
        "dtype_accumulate": accumulate,
        "dtype_out": SCALARS.get(part["c"], part["c"]) or accumulate,
        "tile": (*_numbers(part["tile"]), _number(part["k"])),
        "stages": _number(part["stages"]),
        "layout": part["layout"],
        "extra": tuple(filter(None, extra)),
    }


def _cutlass3(part: dict) -> dict:
    words = [word for word in ("pingpong", "cooperative", "stream_k") if word in part["rest"]]
    instruction = f"instruction {part['shape']}" if part["shape"] else None
    return {
        "library": "CUTLASS",
        "operation": "matrix multiply",
        "architecture": f"sm{part['arch']}",
        "datapath": part["path"],
        "dtype_in": part["a"],
        "dtype_accumulate": part["acc"],
        "dtype_out": part["d"],
        "tile": _numbers(part["tile"]),
        "stages": _number(part["stages"]) or None,  # 0: the builder chose, the name does not say
        "layout": part["layout"],
        "extra": tuple(filter(None, [instruction, f"cluster {part['cluster']}", *words])),
    }


def _xmma(part: dict) -> dict:
    rest = part["rest"]
    stored, math = (re.findall(r"[a-z]+\d+(?:m\d)?", part[key]) for key in ("stored", "math"))
    stored, math = (types if len(types) == 2 else [None, None] for types in (stored, math))
    warps = re.search(r"_warp(group)?size(\d+x\d+x\d+)", rest)
    stages = re.search(r"_stage(\d+)", rest)
    if warps and warps[1]:
        datapath = "wgmma"  # the only instruction that a whole warpgroup issues
    else:
        datapath = "simt" if "_ffma" in rest else "tensorop" if "_tensor" in rest else None
    return {
        "library": "cuBLAS" if "cublas" in rest else "NVIDIA xmma",
        "operation": "matrix multiply",
        "architecture": f"sm{part['arch']}",
        "datapath": datapath,
        "dtype_in": math[0],
        "dtype_accumulate": math[1],
        "dtype_out": stored[1],
        "tile": _numbers(part["tile"]),
        "stages": _number(stages[1]) if stages else None,
        "layout": part["layout"],
        "warps": f"{warps[2]} {'warpgroups' if warps[1] else 'warps'}" if warps else None,
    }


def _nvjet(part: dict) -> dict:
    rest = part["rest"]
    layout = re.search(r"_([NT]{2})[NT]{1,2}$", rest)
    extra = [
        f"cluster {part['cluster']}" if part["cluster"] else None,
        "k split over several blocks" if "_splitK" in rest else None,
        "adds a bias" if "_bias" in rest else None,
    ]
    return {
        "library": "cuBLAS",
        "operation": "matrix multiply",
        "architecture": f"sm{part['arch']}" if part["arch"] else None,
        "datapath": "tensorop",
        "dtype_in": "tf32" if part["tf32"] else "fp8" if part["fp8"] else _NVJET.get(part["a"]),
        "dtype_accumulate": _NVJET.get(part["acc"]),
        "dtype_out": _NVJET.get(part["d"]),
        "tile": (*_numbers(part["tile"]), _number(part["k"])) if part["tile"] else None,
        "stages": _number(part["stages"]),
        "layout": layout[1].lower() if layout else None,
        "extra": tuple(filter(None, extra)),
    }


def _by_generation(part: dict) -> dict:
    accumulate = _BLAS.get(part["letter"])
    depth = re.search(r"_stages_(\d+)x(\d+)", part["rest"])
    # Without an instruction's shape, sgemm and dgemm are the kernels of the CUDA cores.
    simt = not part["shape"] and part["letter"] in "sd"
    default = accumulate if simt else None
    return {
        "library": "cuBLAS",
        "operation": "matrix multiply",
        "architecture": _GENERATIONS[part["generation"]],
        "datapath": "simt" if simt else "tensorop" if part["shape"] else None,
        "dtype_in": SCALARS.get(part["a"], part["a"]) or default,
        "dtype_accumulate": accumulate,
        "dtype_out": SCALARS.get(part["c"], part["c"]) or default,
        "tile": (*_numbers(part["tile"]), int(depth[1]) if depth else None),
        "stages": int(depth[2]) if depth else None,
        "layout": part["layout"],
        "extra": tuple(filter(None, [_instruction(part["shape"])])),
    }


def _instruction(shape: str | None) -> str | None:
    return f"instruction {_INSTRUCTIONS[shape]}" if shape in _INSTRUCTIONS else None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("x"))


def _number(text: str | None) -> int | None:
    return int(text) if text else None


_TYPE = r"[a-z]*f\d+|fp16|[su]\d+|e\dm\d"
_GRAMMARS = [
    (
        (
            r"cutlass3x_sm(?P<arch>\d+)_(?P<path>simt|tensorop)_[a-z]?(?P<shape>\d+x\d+x\d+)?gemm"
            rf"_(?P<a>{_TYPE})_({_TYPE})_(?P<acc>{_TYPE})_({_TYPE}|void)_(?P<d>{_TYPE})"
            r"_(?P<tile>\d+x\d+x\d+)_(?P<cluster>\d+x\d+x\d+)_(?P<stages>\d+)_(?P<layout>[nt]{3})"
            r"(?P<rest>\w*)"
        ),
        _cutlass3,
    ),
    (
        (
            r"cutlass_(?P<arch>\d+)_(wmma_)?(?P<path>simt|tensorop)"
            rf"_((?P<c>{_TYPE})_)?(?P<letter>[sdhi])(?P<shape>\d+)?gemm(_relu)?(_(?P<a>{_TYPE}))?"
            r"_(?P<tile>\d+x\d+)(_(?P<k>\d+)x(?P<stages>\d+))?_(?P<layout>[nt]{2})_align\d+"
        ),
        _cutlass2,
    ),
    (
        (
            r"sm(?P<arch>\d+)_xmma_gemm_(?P<stored>[a-z\d]+)_(?P<math>[a-z\d]+)_[a-z\d]+"
            r"_(?P<layout>[nt]{2})_[nt]_tilesize(?P<tile>\d+x\d+x\d+)(?P<rest>\w*)"
        ),
        _xmma,
    ),
    (
        (
            r"nvjet_(sm(?P<arch>\d+)_)?((?P<fp8>qq[a-z])|(?P<a>[a-z]))(?P<acc>[a-z])(?P<d>[a-z])"
            r"(?P<tf32>_tf32)?(?=_)(_(?P<tile>\d+x\d+)_(?P<k>\d+)x(?P<stages>\d+)"
            r"(_(?P<cluster>\d+x\d+)(?=_))?)?(?P<rest>\w*)"
        ),
        _nvjet,
    ),
    (
        (
            rf"(?P<generation>{'|'.join(_GENERATIONS)})_((?P<c>{_TYPE})_)?(?P<letter>[sdhi])"
            rf"(?P<shape>\d+)?gemm(_(?P<a>{_TYPE}))?_(?P<tile>\d+x\d+)(?P<rest>\w*?)"
            r"_(?P<layout>[nt]{2})\b"
        ),
        _by_generation,
    ),
]
