"""What is computed of each row of queries before the one pass on Hopper, against float64."""

import pytest
import torch

from helpers.device import device, triton_version
from helpers.triton_mode import on_device_of

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")


def randn(*shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device(), dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries, dim, width", [(1, 64, 64), (64, 40, 64), (150, 128, 128)])
def test_prepared_rows(queries, dim, width, dtype):
    from helpers.kernels.attention_backward_roles import ROWS, prepare_kernel

    batch, heads, tile = 2, 3, ROWS.value
    tiles = -(-queries // tile)
    o = randn(batch, queries, heads, dim, dtype=dtype).transpose(1, 2)
    do = randn(batch, heads, dim, queries, dtype=dtype, seed=1).transpose(2, 3)
    lse = randn(batch, heads, queries, seed=2)
    stats = torch.full((batch, heads, 2, tiles * tile), torch.nan, device=device())
    turns = torch.full((batch, heads, tiles, 2), -1, dtype=torch.int32, device=device())
    with on_device_of(o):
        prepare_kernel[(batch * heads * tiles,)](
            *(o, do, lse, stats, turns, o.stride(), do.stride(), heads, queries),
            *(dim, width, tile),
            num_warps=4,
        )
    delta = (o.double() * do.double()).sum(-1)
    assert stats[:, :, 0, :queries].equal(lse)
    assert torch.allclose(stats[:, :, 1, :queries].double(), delta, rtol=0, atol=1e-4)
    # Rows past the last give weights of exp(-inf) and add nothing.
    assert stats[:, :, 0, queries:].eq(torch.inf).all() and stats[:, :, 1, queries:].eq(0).all()
    assert turns.eq(0).all()
