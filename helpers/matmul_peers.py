"""The cases of matmul for `helpers.peers`: beside cuBLAS, which torch.mm calls, alone and fused."""

from collections.abc import Callable, Iterator

import torch

from helpers import compute_roofs
from helpers.compute_roofs import random_matrix
from helpers.device import device
from helpers.kernels import matmul
from helpers.memory import free_bytes, largest_power_of_2
from helpers.peer_cases import Case, check_of, compiled

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SQUARES = (1024, 2048, 3072, 4096, 8192, 16384)
DEPTHS = (512, 1024, 2048, 16384)  # of products of 8192 x 8192
FUSED_DEPTHS = (512, 1024, 2048)
COMPARED_ROWS = 64  # some of every tile: all of it in fp64 is slow
TF32_TOLERANCE = 2e-3  # 2^-10 where digits are cut off: see notebook 09
SAME_KERNEL = "it calls the same kernel of cuBLAS"


def _cublas(a, b, c):
    return torch.mm(a, b, out=c)


def _case(
    operation: str,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    ours: Callable,
    peers: dict[str, Callable | str],
    reference: Callable = torch.mm,
    layout: str = "",
    tf32: bool = False,
) -> Case:
    """A case of functions of a (m, k), b (k, n) and c (m, n), its side halved until it fits.

    layout: "nt" and the like say which of a and b is transposed in memory. tf32: what PyTorch's
    switch allows all of them for fp32.
    """
    most = largest_power_of_2((free_bytes() / 24) ** 0.5)
    m, n, k = (min(size, most) for size in sizes)
    a = random_matrix(k, m, dtype).t() if layout[:1] == "t" else random_matrix(m, k, dtype)
    b = random_matrix(n, k, dtype).t() if layout[1:] == "t" else random_matrix(k, n, dtype)
    c = torch.empty(m, n, dtype=dtype, device=a.device)
    some = slice(None, None, max(1, m // COMPARED_ROWS))

    def bound(function):
        def run():
            with compute_roofs.tf32_allowed(tf32):
                return function(a, b, c)

        return function if isinstance(function, str) else run

    return Case(
        operation,
        "tfloat32" if tf32 else str(dtype).removeprefix("torch."),
        f"{m}x{n}x{k}{' ' * bool(layout)}{layout}",
        ours=bound(ours),
        peers={name: bound(peer) for name, peer in peers.items()},
        ceiling=("cuBLAS", bound(_cublas)),
        check=check_of(
            c, some, reference(a[some].double(), b.double()), TF32_TOLERANCE if tf32 else None
        ),
    )


def cuda_matmul_cases() -> Iterator[Case]:
    """`cuda_matmul_tiled` in fp32 beside cuBLAS, both without TF32."""
    peers = {"pytorch": _cublas, "torch.compile": SAME_KERNEL}
    yield _case(
        "cuda_matmul_tiled",
        (4096, 4096, 4096),
        FP32,
        lambda a, b, c: matmul.launch_registers(a, b, c),
        peers,
    )


def triton_matmul_cases() -> Iterator[Case]:
    """`triton_matmul` beside cuBLAS: squares, products of 8192 x 8192, transposed operands.

    fp32 without TF32 and with it, which is called tfloat32. Sizes are (m, n, k).
    """
    cases = [((n, n, n), BF16, "") for n in SQUARES]
    cases += [((n, n, n), FP16, "") for n in SQUARES if n >= 4096]
    cases += [((8192, 8192, k), BF16, "") for k in DEPTHS]
    cases += [((4096, 4096, 4096), BF16, layout) for layout in ("nt", "tn", "tt")]
    cases += [((4095, 4095, 4095), BF16, ""), ((4096, 4096, 4096), FP32, "")]
    cases += [((4096, 4096, 4096), "tfloat32", "")]
    for sizes, dtype, layout in cases:
        tf32 = dtype == "tfloat32"
        yield _case(
            "triton_matmul",
            sizes,
            FP32 if tf32 else dtype,
            lambda a, b, c: matmul.launch_triton_matmul(a, b, c),
            {"pytorch": _cublas, "torch.compile": SAME_KERNEL},
            layout=layout,
            tf32=tf32,
        )


def triton_matmul_gelu_cases() -> Iterator[Case]:
    """gelu(a @ b) beside cuBLAS and PyTorch's GeLU, torch.compile, and cuBLAS' own fused GeLU.

    The ceiling is the matmul alone. cuBLAS' GeLU comes with a bias, here of zeros.
    """
    bias = torch.zeros(8192, dtype=BF16, device=device())
    for k in FUSED_DEPTHS:
        peers = {
            "cuBLAS + GeLU": _separate,
            "torch.compile": compiled(_write_fused),
            "_addmm_activation": lambda a, b, c: torch._addmm_activation(
                bias[: b.shape[1]], a, b, use_gelu=True
            ),
        }
        yield _case(
            "triton_matmul_gelu",
            (8192, 8192, k),
            BF16,
            lambda a, b, c: matmul.launch_triton_matmul(a, b, c, "gelu"),
            peers,
            lambda a, b: torch.nn.functional.gelu(a @ b, approximate="tanh"),
        )


def _separate(a, b, c):
    return torch.ops.aten.gelu.out(torch.mm(a, b, out=c), approximate="tanh", out=c)


def _write_fused(a, b, c):
    return c.copy_(torch.nn.functional.gelu(a @ b, approximate="tanh"))


OPERATIONS: dict[str, Callable[[], Iterator[Case]]] = {
    "cuda_matmul_tiled": cuda_matmul_cases,
    "triton_matmul": triton_matmul_cases,
    "triton_matmul_gelu": triton_matmul_gelu_cases,
}
