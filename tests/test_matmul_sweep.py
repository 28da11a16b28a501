"""Sweeps of matmuls: what is multiplied, what comes out, and what kernels' names say."""

import pandas as pd
import pytest
import torch

from helpers import matmul_sweep
from helpers.check import assert_close
from helpers.device import device, has_cuda


def test_the_order_is_shuffled_and_can_be_repeated():
    items = list(range(50))
    order = matmul_sweep.shuffled(items)
    assert order != items and sorted(order) == items == list(range(50))
    assert order == matmul_sweep.shuffled(items) != matmul_sweep.shuffled(items, seed=1)


def test_operands_are_contiguous_views_of_one_buffer():
    shapes = [(3, 5, 7), (8, 2, 9), (1, 1, 1)]
    operands = matmul_sweep.Operands.of(shapes, torch.float32)
    for m, n, k in shapes:
        a, b, c = operands.matrices(m, n, k)
        assert (a.shape, b.shape, c.shape) == ((m, k), (k, n), (m, n))
        assert all(x.is_contiguous() for x in (a, b, c))
        assert [x.data_ptr() for x in (a, b, c)] == [
            x.data_ptr() for x in (operands.a, operands.b, operands.c)
        ]


def test_a_sweep_multiplies_each_shape_and_is_sorted():
    shapes, seen = [(33, 17, 5), (4, 8, 64), (4, 8, 64), (16, 16, 16)], []

    def run(a, b, c):
        torch.mm(a, b, out=c)
        assert_close(c, a.double() @ b.double())
        seen.append((*c.shape, a.shape[1]))

    found = matmul_sweep.sweep(shapes, torch.float32, run=run, budget_ms=0.1)
    assert set(seen) == set(shapes)
    assert list(map(tuple, found[["m", "n", "k"]].to_numpy())) == sorted(shapes)
    rate = 2 * found["m"] * found["n"] * found["k"] / found["ms"] / 1e9
    assert found["tflop_per_s"].tolist() == pytest.approx(rate.tolist())
    assert (found["p20"] <= found["ms"]).all() and (found["ms"] <= found["p80"]).all()
    assert found["ms"].gt(0).all() and matmul_sweep.drift(found) >= 0


def test_squares():
    found = matmul_sweep.squares([24, 8], torch.float32, budget_ms=0.1)
    assert found[["m", "n", "k"]].to_numpy().tolist() == [[8] * 3, [24] * 3]


def test_drift_is_between_times_of_one_shape():
    frame = pd.DataFrame({"m": [1, 1, 2, 2, 3], "n": 1, "k": 1, "ms": [1.0, 1.1, 5.0, 6.0, 90.0]})
    assert matmul_sweep.drift(frame) == pytest.approx(0.2)
    assert matmul_sweep.drift(frame.tail(1)) == 0


@pytest.mark.parametrize(
    "name, alignment",
    [
        ("cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_nn_align8", "8"),
        ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x64_32x4_nn_align1", "1"),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize64x64x64_aligna4_alignc8_x", "4/8"),
        ("sm80_xmma_gemm_f16f16_f16f32_f32_nn_n_tilesize64x64x64_aligna8_alignc8_x", "8"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", ""),
    ],
)
def test_alignment_in_a_name(name, alignment):
    assert matmul_sweep.alignment_in(name) == alignment


def fake_kernels(*names):
    kernels = [
        {"full_name": name, "name": name, "duration_us": 10.0 + i, "grid": (4, 3, 2)}
        for i, name in enumerate(names)
    ]
    return pd.DataFrame(kernels)


MARK, NVJET = "elementwise cos", "nvjet_tst_128x256_64x4_1x2_h_bz_splitK_NNT"


@pytest.fixture
def profiled(monkeypatch):
    """A profiler that sees what the test says."""

    def see(frame):
        monkeypatch.setattr(matmul_sweep, "has_cuda", lambda: True)
        monkeypatch.setattr(matmul_sweep.profiling, "capture", lambda run: run())
        monkeypatch.setattr(matmul_sweep.profiling, "kernels", lambda capture: frame)
        monkeypatch.setattr(matmul_sweep, "device", lambda: torch.device("cpu"))

    return see


def test_kernels_are_told_apart_by_the_mark(profiled):
    align1 = "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x64_32x4_nn_align1"
    profiled(fake_kernels(MARK, "fill", NVJET, MARK, align1))
    found = matmul_sweep.matmul_kernels({"one": lambda: None, 7: lambda: None})
    assert found["run"].tolist() == ["one", 7]
    assert found["tile"].tolist() == ["128x256", "256x64"]
    assert found["alignment"].tolist() == ["?", "1"]
    assert found["others"].tolist() == [1, 0] and found["blocks"].tolist() == [24, 24]
    assert found["beside"].tolist() == ["fill", ""]
    assert found["us"].tolist() == [23.0, 14.0]


def test_a_call_without_a_kernel_is_an_error(profiled):
    profiled(fake_kernels(MARK, MARK, NVJET))
    with pytest.raises(ValueError, match="2 calls"):
        matmul_sweep.matmul_kernels({"none": lambda: None, "one": lambda: None})


def test_no_kernels_no_rows(profiled):
    assert matmul_sweep.matmul_kernels({}).empty
    profiled(fake_kernels())
    assert matmul_sweep.matmul_kernels({"unseen": lambda: None}).empty


@pytest.mark.skipif(not has_cuda(), reason="looks at a GPU's kernels")
def test_kernels_of_this_gpu():
    a, b = (torch.randn(512, 512, device=device()).bfloat16() for _ in range(2))
    odd = torch.randn(511, 511, device=device()).bfloat16()
    found = matmul_sweep.matmul_kernels({"even": lambda: a @ b, "odd": lambda: odd @ odd})
    assert found["run"].tolist() == ["even", "odd"] and (found["blocks"] > 0).all()
