"""The count of what PyTorch operations move, against sizes worked out by hand."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from helpers.device import device
from helpers.eager_traffic import count
from helpers.traffic import Work

ROWS, COLUMNS = 8, 16
N = ROWS * COLUMNS
BYTES = 4 * N  # of one fp32 matrix


@pytest.fixture
def x():
    return torch.rand(ROWS, COLUMNS, device=device())


@pytest.fixture
def y():
    return torch.rand(ROWS, COLUMNS, device=device())


@pytest.fixture
def row():
    return torch.rand(COLUMNS, device=device())


def moved(run) -> tuple[float, float]:
    work = count(run)
    return work.bytes_read, work.bytes_written


def test_nothing_costs_nothing(x):
    assert count(lambda: None) == Work(0, 0, 0)
    assert count(lambda: x.shape) == count(lambda: x.to(torch.float32)) == Work(0, 0, 0)


def test_several_operations_add_up(x, y, row):
    assert count(lambda: (x + y).relu()) == Work(3 * BYTES, 2 * BYTES, 2 * N)
    assert count(lambda: x + row) == Work(BYTES + 4 * COLUMNS, BYTES, N)
    assert count(lambda: row[:, None] * row) == Work(2 * row.nbytes, 4 * COLUMNS**2, COLUMNS**2)
    assert count(lambda: torch.addcmul(x, y, row)) == Work(2 * BYTES + 4 * COLUMNS, BYTES, N)


def test_strides(x, y, row):
    expanded = row.expand(ROWS, COLUMNS)
    assert count(expanded.clone) == Work(row.nbytes, BYTES, 0)
    assert count(expanded.sum) == Work(row.nbytes, 4, N)
    assert moved(lambda: x + row[:, None][:ROWS]) == (BYTES + 4 * ROWS, BYTES)
    assert moved(lambda: x[:, ::2] * 2) == (BYTES / 2, BYTES / 2)
    assert moved(lambda: x[3:5].relu()) == (4 * 2 * COLUMNS,) * 2
    assert moved(lambda: x[:, ::2].expand(5, ROWS, COLUMNS // 2).sum()) == (BYTES / 2, 4)
    assert moved(lambda: x.t() + y.t()) == (2 * BYTES, BYTES)
    assert moved(lambda: x[:0].relu()) == (0, 0)
    assert moved(lambda: x.expand(0, ROWS, COLUMNS).clone()) == (0, 0)


def test_windows_that_overlap_are_read_once(row):
    windows = row.unfold(0, 8, 1)  # 9 windows of 8 elements, over 16
    assert windows.numel() == 72
    assert count(windows.clone) == Work(row.nbytes, 4 * 72, 0)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[1:, ::3],
        lambda x: x.reshape(N),
        lambda x: x.view(2, -1),
        lambda x: x.flatten().unflatten(0, (4, 4, 8)),
        lambda x: x.expand(3, ROWS, COLUMNS),
        lambda x: x.detach(),
        lambda x: x.chunk(3),
        lambda x: x.split([1, 7]),
        lambda x: x.unbind(),
        lambda x: x.as_strided((4, 4), (1, 1)),
        lambda x: x.unfold(1, 3, 2),
        lambda x: x.view(torch.int32),
        lambda x: x.unsqueeze_(0).squeeze_(0).t_().t_(),
        lambda x: x.transpose_(0, 1).transpose_(0, 1),
        lambda x: x.contiguous(),
        lambda x: torch.empty(N, device=device()).set_(x),
        lambda x: torch.empty_like(x),
        lambda x: torch.empty_permuted((3, 4), (1, 0), device=device()),
        lambda x: torch.empty_strided((3, 4), (1, 3), device=device()),
        lambda x: x.new_empty(7),
        lambda x: x.new_empty_strided((3, 4), (1, 3)),
        lambda x: torch.empty(0, device=device()).resize_(100),
    ],
)
def test_views_and_memory_set_aside_are_free(view, x):
    assert count(lambda: view(x)) == Work(0, 0, 0)


def test_a_copy_is_not_a_view(x):
    assert count(lambda: x.t().reshape(N)) == Work(BYTES, BYTES, 0)
    assert count(lambda: x.t().contiguous()) == Work(BYTES, BYTES, 0)


def test_in_place(x, y, row):
    assert count(lambda: x.add_(y)) == Work(2 * BYTES, BYTES, N)
    assert count(lambda: x.mul_(2)) == Work(BYTES, BYTES, N)
    assert count(lambda: x.relu_()) == Work(BYTES, BYTES, N)
    assert count(lambda: x[:, ::2].add_(1)) == Work(BYTES / 2, BYTES / 2, N / 2)
    assert count(lambda: x.masked_fill_(y > 0.5, 0)) == Work(2 * BYTES + N, BYTES + N, 2 * N)
    assert count(lambda: x.addcmul_(y, row)) == Work(2 * BYTES + row.nbytes, BYTES, N)


@pytest.mark.parametrize(
    "fill",
    [
        lambda x: x.zero_(),
        lambda x: x.fill_(1),
        lambda x: x.normal_(),
        lambda x: x.uniform_(),
        lambda x: x.exponential_(),
        lambda x: x.bernoulli_(0.5),
        lambda x: x.cauchy_(),
        lambda x: x.geometric_(0.5),
        lambda x: x.log_normal_(),
        lambda x: x.random_(),
        lambda x: torch._foreach_zero_([x]),
        lambda x: torch.zeros_like(x),
        lambda x: torch.full_like(x, 2),
        lambda x: torch.rand_like(x),
        lambda x: torch.randn_like(x),
        lambda x: torch.randint_like(x, 9),
        lambda x: x.new_ones(ROWS, COLUMNS),
        lambda x: x.new_full((ROWS, COLUMNS), 2),
        lambda x: torch.zeros(ROWS, COLUMNS, device=device()),
        lambda x: torch.full((ROWS, COLUMNS), 1.0, device=device()),
        lambda x: torch.arange(float(N), device=device()),
    ],
)
def test_filling_reads_nothing(fill, x):
    assert count(lambda: fill(x)) == Work(0, BYTES, 0)


def test_out_is_written_and_not_read(x, y):
    target = torch.empty_like(x)
    assert count(lambda: torch.add(x, y, out=target)) == Work(2 * BYTES, BYTES, N)
    empty = torch.empty(0, device=device())
    assert count(lambda: torch.add(x, y, out=empty)) == Work(2 * BYTES, BYTES, N)
    values, places = x.max(1)
    assert count(lambda: torch.max(x, 1, out=(values, places))) == Work(BYTES, ROWS * 12, N)
    product = torch.empty(ROWS, ROWS, device=device())
    assert count(lambda: torch.mm(x, y.t(), out=product)) == Work(
        2 * BYTES, product.nbytes, 2 * ROWS * N
    )
    assert count(lambda: torch.add(x, 1, out=x)) == Work(BYTES, BYTES, N)


def test_a_tensor_given_twice_is_read_once(x):
    assert count(lambda: x * x) == Work(BYTES, BYTES, N)
    assert count(lambda: x.add_(x)) == Work(BYTES, BYTES, N)
    assert count(lambda: torch.cat([x, x])) == Work(BYTES, 2 * BYTES, 0)


def test_copies_between_dtypes(x):
    half = x.half()
    assert count(lambda: x.half()) == Work(BYTES, BYTES / 2, 0)
    assert count(lambda: half.double()) == Work(BYTES / 2, 2 * BYTES, 0)
    assert count(lambda: half.copy_(x)) == Work(BYTES, BYTES / 2, 0)
    assert count(lambda: x.copy_(half[0])) == Work(2 * COLUMNS, BYTES, 0)
    assert count(lambda: half + x) == Work(1.5 * BYTES, BYTES, N)  # cast on the way
    assert count(lambda: x > 0.5) == Work(BYTES, N, N)  # a truth value is a byte
    assert count(lambda: torch._foreach_copy_([half], [x])) == Work(BYTES, BYTES / 2, 0)


def test_gathers_read_what_they_pick(x):
    picked = torch.tensor([1, 2, 2], device=device())
    rows = 3 * COLUMNS * 4
    expected = Work(rows + picked.nbytes, rows, 0)
    assert count(lambda: F.embedding(picked, x)) == expected
    assert count(lambda: x.index_select(0, picked)) == expected
    assert count(lambda: x[picked]) == expected
    target = torch.empty(3, COLUMNS, device=device())
    assert count(lambda: torch.index_select(x, 0, picked, out=target)) == expected
    assert moved(lambda: x[:, picked]) == (3 * ROWS * 4 + picked.nbytes, 3 * ROWS * 4)
    assert moved(lambda: x.take(picked)) == (12 + picked.nbytes, 12)
    places = torch.zeros(ROWS, 2, dtype=torch.int64, device=device())
    assert count(lambda: x.gather(1, places)) == Work(2 * ROWS * 4 + places.nbytes, 2 * ROWS * 4, 0)
    many = torch.zeros(1000, dtype=torch.int64, device=device())
    assert moved(lambda: x[many]) == (BYTES + many.nbytes, 1000 * COLUMNS * 4)  # all of x at most
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, 3] = True
    assert moved(lambda: x.masked_select(mask)) == (N + 4 * ROWS, 4 * ROWS)


def test_scattering_counts_the_whole_target(x):
    """An upper bound, as the docstring says."""
    picked, rows = torch.tensor([1, 2], device=device()), x[:2].clone()
    read, written = moved(lambda: x.index_copy_(0, picked, rows))
    assert (read, written) == (BYTES + rows.nbytes + picked.nbytes, BYTES)


def test_reductions(x, row):
    assert count(x.sum) == Work(BYTES, 4, N)
    assert count(lambda: x.amax(1)) == Work(BYTES, 4 * ROWS, N)
    assert count(lambda: x.max(1)) == Work(BYTES, 12 * ROWS, N)  # and int64 indices
    assert count(lambda: x.argmax(0)) == Work(BYTES, 8 * COLUMNS, N)
    assert count(lambda: x.half().sum()).bytes_written == BYTES / 2 + 2
    assert count(lambda: x.softmax(1)) == Work(BYTES, BYTES, N)
    norm = count(lambda: F.layer_norm(x, (COLUMNS,), row, row + 1))
    assert norm.flops == N + COLUMNS  # the second term: row + 1
    assert count(lambda: x.sum().item()) == Work(BYTES + 4, 4, N)


def test_matrix_products(x, y, row):
    w = torch.rand(ROWS, device=device())
    expected = Work(2 * BYTES, 4 * ROWS**2, 2 * ROWS * N)
    assert count(lambda: x @ y.t()) == count(lambda: F.linear(x, y)) == expected
    assert count(lambda: torch.einsum("ik,jk->ij", x, y)) == expected
    assert count(lambda: F.linear(x, y, w)) == expected + Work(4 * ROWS, 0, 0)
    assert count(lambda: x[None] @ y.t()[None]) == expected
    assert count(lambda: torch.mv(x, row)) == Work(BYTES + row.nbytes, 4 * ROWS, 2 * N)
    assert count(lambda: w @ x) == Work(BYTES + w.nbytes, row.nbytes, 2 * N)
    assert count(lambda: torch.dot(row, row.clone())).flops == 2 * COLUMNS
    assert count(lambda: torch.vdot(row, row.clone())).flops == 2 * COLUMNS
    assert count(lambda: torch.addmv(w, x, row)) == Work(
        BYTES + row.nbytes + w.nbytes, w.nbytes, 2 * N
    )
    assert count(lambda: w.addmv_(x, row)) == count(lambda: torch.addmv(w, x, row))
    # A batch with one matrix is one matmul.
    assert count(lambda: x.view(2, ROWS // 2, COLUMNS) @ y.t()) == expected


def test_convolution():
    image = torch.rand(2, 3, 8, 8, device=device())
    kernel = torch.rand(5, 3, 3, 3, device=device())
    run = lambda: F.conv2d(image, kernel, padding=1)  # noqa: E731
    assert count(run) == Work(image.nbytes + kernel.nbytes, run().nbytes, 2 * 2 * 64 * 5 * 27)


@pytest.mark.parametrize("training", [False, True])
def test_attention_has_the_flops_of_its_two_matmuls(training):
    """Also on a CPU, whose operator PyTorch's counter does not know."""
    q, k, v = (torch.rand(1, 2, 32, 16, device=device()) for _ in range(3))
    q.requires_grad_(training)
    forward = 4 * 2 * 32 * 32 * 16
    run = lambda: F.scaled_dot_product_attention(q, k, v)  # noqa: E731
    seen = count(run)
    assert seen.flops == forward
    assert seen.bytes_read == 3 * q.nbytes
    if training:
        seed = torch.rand_like(q)
        result = run()
        assert count(lambda: result.backward(seed)).flops == 2.5 * forward


def test_moves_compute_nothing(x, y):
    assert count(lambda: torch.cat([x, y])) == Work(2 * BYTES, 2 * BYTES, 0)
    assert count(lambda: torch.stack((x, y), 1)) == Work(2 * BYTES, 2 * BYTES, 0)
    assert count(lambda: x.repeat(3, 1)) == Work(BYTES, 3 * BYTES, 0)
    assert count(lambda: x.flip(0)) == count(lambda: x.roll(3)) == Work(BYTES, BYTES, 0)
    assert count(lambda: F.pad(x, (1, 1))) == Work(BYTES, BYTES + 8 * ROWS, 0)


def test_lists_of_tensors(x, y):
    both = torch._foreach_add
    assert count(lambda: both([x, y], 1)) == Work(2 * BYTES, 2 * BYTES, 2 * N)
    assert count(lambda: torch._foreach_add_([x, y], 1)) == Work(2 * BYTES, 2 * BYTES, 2 * N)
    others = [x.clone(), y.clone()]
    assert count(lambda: torch._foreach_mul([x, y], others)) == Work(4 * BYTES, 2 * BYTES, 2 * N)
    assert count(lambda: torch._foreach_norm([x, y])) == Work(2 * BYTES, 8, 2 * N)


def test_empty_tensors():
    nothing = torch.empty(0, 3, device=device())
    assert count(lambda: nothing.relu() + nothing) == Work(0, 0, 0)
    assert count(nothing.clone) == Work(0, 0, 0)
    assert count(lambda: nothing.sum(0)) == Work(0, 12, 0)  # zeros


def test_the_meta_device_allocates_nothing():
    large = torch.empty(2**20, 2**20, device="meta")
    assert count(lambda: large + 1) == Work(2**42, 2**42, 2**40)


def test_results_beside_changed_arguments():
    """Running statistics are updated in place, and the result is new all the same."""
    x, mean, var = torch.rand(16, 4), torch.zeros(4), torch.ones(4)
    batch_norm = torch.ops.aten._native_batch_norm_legit
    result = batch_norm(x, None, None, mean, var, True, 0.1, 1e-5)
    seen = count(lambda: batch_norm(x, None, None, mean, var, True, 0.1, 1e-5))
    assert seen.bytes_read == x.nbytes + mean.nbytes + var.nbytes
    assert seen.bytes_written == sum(t.nbytes for t in (*result, mean, var))


def test_a_backward_pass_counts_too(x, y):
    x.requires_grad_()
    assert count(lambda: x.sigmoid().sigmoid().sigmoid()) == Work(3 * BYTES, 3 * BYTES, 3 * N)
    result = x.sigmoid().sigmoid().sigmoid()
    # Each step back reads the gradient and its own output, and writes a gradient.
    backward = Work(6 * BYTES, 3 * BYTES, 3 * N)
    assert count(lambda: result.backward(y)) == backward
    # A second gradient is added to the first.
    both = count(lambda: x.sigmoid().sigmoid().sigmoid().backward(y))
    assert both == Work(3 * BYTES, 3 * BYTES, 3 * N) + backward + Work(2 * BYTES, BYTES, N)


def test_a_backward_pass_from_a_sum(x):
    """Its gradient is one number that a stride of 0 repeats."""
    x.requires_grad_()
    total = x.sigmoid().sum()
    assert count(total.backward) == Work(BYTES + 4, BYTES + 4, N)


def test_a_matmuls_backward_is_two_matmuls(x, y):
    x.requires_grad_()
    y.requires_grad_()
    product = x @ y.t()
    seed = torch.rand_like(product)
    assert count(lambda: product.backward(seed)).flops == 2 * count(lambda: x @ y.t()).flops


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_recording_for_autograd_moves_nothing(mode, x, y):
    x.requires_grad_()
    with mode():
        assert count(lambda: (x * y).exp().sum()) == Work(4 * BYTES, 2 * BYTES + 4, 3 * N)


def test_counting_changes_no_result_and_ends(x, y):
    kept = []
    count(lambda: kept.append(torch.relu(x @ y.t())))
    assert torch.equal(kept[0], torch.relu(x @ y.t()))
    with pytest.raises(ZeroDivisionError):
        count(lambda: 1 / 0)
    assert count(lambda: x + y) == count(lambda: x + y)


def test_the_module_may_be_imported_first():
    """PyTorch's counter loads Triton, whose mode helpers.device must have set before."""
    command = "from helpers.eager_traffic import count; import helpers.device"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", command], check=True, env=env)
