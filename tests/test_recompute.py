"""Three sigmoids two ways against autograd in float64; what is kept and held, by arithmetic."""

import dataclasses

import pytest
import torch

from helpers import recompute
from helpers.check import TOLERANCE, assert_close
from helpers.device import device
from helpers.recompute import RECOMPUTE, SAVE, bytes_kept, fused_work, peak_bytes
from helpers.traffic import Work

WAYS = {"save": SAVE, "recompute": RECOMPUTE}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
N = 100_000


def plain(x):
    return torch.sigmoid(torch.sigmoid(torch.sigmoid(x)))


def gradient(function, x, grad):
    x = x.detach().requires_grad_()
    y = function(x)
    return y, *torch.autograd.grad(y, x, grad)


def tensors(shape=(N,), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device(), dtype) for _ in range(2)]


@each_way
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (1025,), (3, 5, 7)])
def test_value_and_gradient(way, dtype, shape):
    x, grad = tensors(shape, dtype)
    y, dx = gradient(way, x, grad)
    expected_y, expected_dx = gradient(plain, x.double(), grad.double())
    assert y.dtype == dx.dtype == dtype
    rounded = 4 * TOLERANCE[dtype]  # each operation rounds to x's dtype
    assert_close(y, expected_y, rounded)
    assert_close(dx, expected_dx, rounded)


@each_way
def test_any_strides(way):
    x, grad = tensors((64, 48))
    given = x.t()[::2], grad.t()[::2]
    y, dx = gradient(way, *given)
    expected_y, expected_dx = gradient(plain, *(tensor.double() for tensor in given))
    assert_close(y, expected_y)
    assert_close(dx, expected_dx)


@each_way
def test_large_numbers_and_nan(way):
    x = torch.tensor([-torch.inf, -1e4, 0, 1e4, torch.inf, torch.nan], device=device())
    y, dx = gradient(way, x, torch.ones_like(x))
    expected_y, expected_dx = gradient(plain, x.double(), torch.ones_like(x).double())
    assert_close(y, expected_y)
    assert_close(dx, expected_dx)


@each_way
def test_gradcheck(way):
    x = tensors((3, 5), torch.float64)[0].requires_grad_()
    assert torch.autograd.gradcheck(way, x)


@each_way
def test_a_second_derivative_is_refused(way):
    x = tensors((3,))[0].requires_grad_()
    (dx,) = torch.autograd.grad(way(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):  # rather than a wrong one
        torch.autograd.grad(dx.sum(), x)


def no_chain(s1, s2, s3, grad):
    return grad * s3 * (1 - s3)


def wrong_order(s1, s2, s3, grad):
    return recompute.backward_from_saved(s3, s2, s2, grad)


def no_gradient(s1, s2, s3, grad):
    return recompute.backward_from_saved(s1, s2, s3, torch.ones_like(grad))


@pytest.mark.parametrize("wrong", [no_chain, wrong_order, no_gradient])
def test_the_comparison_finds(wrong):
    x, grad = tensors()
    dx = gradient(dataclasses.replace(SAVE, backward=wrong), x, grad)[1]
    with pytest.raises(AssertionError):
        assert_close(dx, gradient(plain, x.double(), grad.double())[1])


def test_traffic_of_one_kernel():
    x, grad = tensors()
    size, saved = x.nbytes, recompute.forward_saving(x)
    assert fused_work(SAVE.forward, x) == Work(size, 3 * size, 3 * N)
    assert fused_work(SAVE.backward, *saved, grad) == Work(4 * size, size, 9 * N)
    assert fused_work(RECOMPUTE.forward, x) == Work(size, size, 3 * N)
    assert fused_work(RECOMPUTE.backward, x, grad) == Work(2 * size, size, 12 * N)


@pytest.mark.parametrize("shape", [(1,), (48,), (1025,)])
def test_all_passes_at_once(shape, monkeypatch):
    """As on a CPU, without the compiler."""
    monkeypatch.setattr(recompute, "has_cuda", lambda: False)
    monkeypatch.setattr(recompute.compute_roofs, "compiled", lambda function, dynamic: function)
    x, grad = tensors(shape, torch.float64)
    for way, plain_way in zip(recompute.compiled_ways(), (SAVE, RECOMPUTE), strict=True):
        assert way.keeps_results == plain_way.keeps_results
        assert len(way.forward(x)) == len(plain_way.forward(x))
        for found, expected in zip(gradient(way, x, grad), gradient(plain, x, grad), strict=True):
            assert_close(found, expected)
        kept = plain_way.forward(x) if way.keeps_results else (x,)
        assert_close(way.backward(*kept, grad), gradient(plain, x, grad)[1])


def test_bytes_kept():
    x = tensors()[0].requires_grad_()
    size = x.nbytes
    assert bytes_kept(lambda: plain(x)) == bytes_kept(lambda: SAVE(x)) == 3 * size
    assert bytes_kept(lambda: RECOMPUTE(x)) == size
    assert bytes_kept(lambda: RECOMPUTE(x), besides=[x]) == 0
    assert bytes_kept(lambda: x + 1) == bytes_kept(lambda: None) == 0
    assert bytes_kept(lambda: x * x) == size  # saved twice
    assert bytes_kept(lambda: x[: N // 2].exp().exp()) == size // 2 * 2
    assert bytes_kept(lambda: x[: N // 2].sin()) == size  # a view keeps all that it looks at
    with torch.no_grad():
        assert bytes_kept(lambda: plain(x)) == 0
    kept = bytes_kept(lambda: [x.exp() for _ in range(4)] and None)
    assert kept == 4 * size  # although each result is gone before the next is made


def test_what_bytes_kept_looks_at_can_still_be_differentiated():
    x = tensors((5,), torch.float64)[0].requires_grad_()
    results = []
    bytes_kept(lambda: results.append(plain(x)))
    (dx,) = torch.autograd.grad(results[0].sum(), x)
    assert_close(dx, gradient(plain, x, torch.ones_like(x))[1])


def test_bytes_kept_of_a_checkpoint():
    from torch.utils.checkpoint import checkpoint

    x = tensors()[0].requires_grad_()
    assert bytes_kept(lambda: checkpoint(plain, x, use_reentrant=False)) == x.nbytes


def test_peak_bytes():
    x = torch.ones(2**20, device=device())
    size = x.nbytes

    def close(run, tensors_held):
        return abs(peak_bytes(run) - tensors_held * size) < size // 8

    assert close(lambda: None, 0)
    assert close(lambda: x + 1, 1)
    assert close(lambda: [x + i for i in range(5)], 5)
    assert close(lambda: [x + i for i in range(5)] and None, 5)
    assert close(lambda: ((x + 1) + 1) + 1, 2)  # each result is needed until the next is there
    assert close(lambda: x.add_(1), 0)


@pytest.mark.parametrize(("way", "held"), [(SAVE, 3), (RECOMPUTE, 2)], ids=WAYS)
def test_peak_of_a_forward_pass(way, held):
    """s1, s2 and y; or no more than one result and the next."""
    x = torch.ones(2**20, device=device(), requires_grad=True)
    assert abs(peak_bytes(lambda: way(x)) / x.nbytes - held) < 0.1
