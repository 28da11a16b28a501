"""The models behind `helpers.statements_slides` and `helpers.statements_code`.

Each computes one number as the section of the notebook does to which the lecture map points.
"""

import functools
import operator

import numpy as np
import torch

from helpers import access, block_order, peaks, results, specs, traffic, waves
from helpers.gemm_names import decode_gemm

HALF, FLOAT = torch.float16, torch.float32
A100, A100_40GB = specs.get("A100 SXM4 80GB"), specs.get("A100 SXM4 40GB")
H100, H200, RTX_4080 = (specs.get(name) for name in ("H100 SXM", "H200 SXM", "RTX 4080"))
SLIDE_46 = (64, 16, 1024, 64)  # batch, heads, tokens, head dim


def cpu_growth(quantity: str) -> float:
    """Times in two years from 2005 on, by a fit; a quantity's name as it begins in the file."""
    import pandas as pd

    trends = pd.read_csv(results.ROOT / "data" / "cpu_trends.csv")
    of = trends[trends["quantity"].str.startswith(quantity) & (trends["year"] >= 2005)]
    return 2 ** (2 * np.polyfit(of["year"], np.log2(of["value"]), 1)[0])


@functools.cache
def sigmoid_accesses(recomputing: bool) -> tuple[float, float, float, float]:
    """Reads and writes an element of three sigmoids: forward, then backward, a kernel each."""
    from helpers.recompute import (
        backward_from_saved,
        backward_recomputing,
        forward_only,
        forward_saving,
        fused_work,
    )

    x, grad = torch.zeros(16), torch.zeros(16)
    if recomputing:
        passes = fused_work(forward_only, x), fused_work(backward_recomputing, x, grad)
    else:
        backward = fused_work(backward_from_saved, *forward_saving(x), grad)
        passes = fused_work(forward_saving, x), backward
    return tuple(n / x.nbytes for work in passes for n in (work.bytes_read, work.bytes_written))


def lines_touched(pattern: str) -> int:
    """Lines of 128 bytes that a warp's load of floats touches."""
    return len(access.lines(access.addresses(pattern)))


def loads_of_each(n: int, tile: int) -> float:
    """How often an n x n matmul with square tiles loads each element of its inputs."""
    return traffic.tiled_matmul(n, n, n, tile, tile, FLOAT).bytes_read / FLOAT.itemsize / 2 / n**2


def nearly_empty(n: int, tile: int) -> int:
    """Tiles of an n x n result with one row or one column in it."""
    return sum(1 in (t.rows, t.columns) for t in waves.tile_sizes(n, n, tile, tile))


def attention_matmuls() -> int:
    """Matrix products of one head's attention, from its input on."""

    def attention(x, w_q, w_k, w_v):
        return torch.softmax((x @ w_q) @ (x @ w_k).T, dim=-1) @ (x @ w_v)

    nodes = torch.fx.symbolic_trace(attention).graph.nodes
    return sum(node.target is operator.matmul for node in nodes)


def attention_gflop(recomputing: bool) -> float:
    """Matmuls of slide 46's shape, forward and backward: six products, with scores anew seven."""
    batch, heads, tokens, dim = SLIDE_46
    product = traffic.matmul(tokens, tokens, dim, HALF, batch=batch * heads)
    return (7 if recomputing else 6) * product.flops / 1e9


def naive_matmul(stores: bool) -> float:
    """Numbers that a naive matmul loads, of MKN, or stores, of MN."""
    m, n, k = 13, 21, 10
    work = traffic.tiled_matmul(m, n, k, 1, 1, FLOAT)
    moved, of = (work.bytes_written, m * n) if stores else (work.bytes_read, m * k * n)
    return moved / FLOAT.itemsize / of


def softmax_accesses() -> dict[str, float]:
    """What softmax as five operations moves, in fp32 elements: multiples of MN and of M."""
    m, n = 16, 1000  # so that one M is not mistaken for MN
    work = traffic.manual_softmax(m, n, FLOAT)
    found = {}
    for name, moved in (("reads", work.bytes_read), ("writes", work.bytes_written)):
        found[f"{name}, MN"], rest = divmod(moved / FLOAT.itemsize, m * n)
        found[f"{name}, M"] = rest / m
    return found


def softmax_bytes(manual: bool = True) -> float:
    """At the lecture's size."""
    count = traffic.manual_softmax if manual else traffic.softmax
    return count(2**14, 2**14, FLOAT).bytes


def softmax_of(*row: float) -> list[float]:
    from helpers.kernels.softmax import manual_softmax

    return manual_softmax(torch.tensor([row])).flatten().tolist()


def gelu_of_one() -> float:
    from helpers.kernels.gelu import manual_gelu

    return manual_gelu(torch.ones(1)).item()


def sram_tb_per_s(gpu: specs.GPU) -> float:
    """What the L1s of all SMs give together."""
    return gpu.sms * peaks.l1_bytes_per_clock(gpu) * gpu.boost_mhz / 1e6


def online_looks(looks) -> float:
    """From the recorded curve "looks": how often online softmax reads a row from memory."""
    return looks.set_index("kernel")["read"]["online: two looks"].iloc[0]


def named_tile(kernels) -> str:
    """From the recorded curve "kernels": the tile in the name of the first matmul's kernel."""
    name = kernels.set_index("operation")["name"]["matmul"].iloc[0]
    tile_m, tile_n, *_ = decode_gemm(name)["tile"]
    return f"{tile_m}x{tile_n}"


def generated_kernel(generated) -> str:
    """From the recorded text of torch.compile's GeLU: its function's name."""
    (line,) = generated["line"][generated["line"].str.startswith("def ", na=False)]
    return line.removeprefix("def ").split("(")[0]


def blocks_of_nine_tiles(group: int) -> int:
    """Blocks of A and B that the first nine of 9 x 9 tiles need, in groups of so many rows."""
    return sum(block_order.blocks_loaded(block_order.tiles_in_order(9, 9, group)[:9], 9))
