"""Closed forms of bytes and FLOPs, against counts that know nothing of them."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F

from helpers import traffic
from helpers.eager_traffic import count
from helpers.traffic import Work

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (torch.int8, torch.float8_e4m3fn, F16, BF16, F32, F64)


def pytorchs_flops(run) -> int:
    # Loads Triton, whose mode helpers.device must have set before.
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def meta(*shape, dtype=F32):
    return torch.empty(shape, dtype=dtype, device="meta")


def test_work_adds_up():
    work = Work(3, 5, 16) + Work(1, 1, 4)
    assert work == Work(4, 6, 20)
    assert (work.bytes, work.intensity) == (10, 2)
    assert Work(0, 0, 7).intensity == Work(0, 0, 0).intensity == math.inf
    assert Work(4, 4, 0).intensity == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_those_of_the_tensors(dtype):
    """Odd sizes, and dtypes of 1, 2, 4 and 8 bytes."""
    m, n, k, batch = 7, 5, 3, 2
    a, b, c = (meta(batch, *shape, dtype=dtype) for shape in ((m, k), (k, n), (m, n)))
    product = traffic.matmul(m, n, k, dtype, batch=batch)
    assert product == Work(a.nbytes + b.nbytes, c.nbytes, 2 * batch * m * n * k)
    wider = traffic.matmul(m, n, k, dtype, batch=batch, out=F64)
    assert wider == Work(a.nbytes + b.nbytes, c.to(F64).nbytes, product.flops)
    x = meta(m, n, dtype=dtype)
    for operation, flops in ((traffic.relu, 1), (traffic.gelu, 9), (traffic.copy, 0)):
        assert operation(m * n, dtype) == Work(x.nbytes, x.nbytes, flops * m * n)
    assert traffic.add(m * n, dtype) == Work(2 * x.nbytes, x.nbytes, m * n)
    assert traffic.softmax(m, n, dtype) == Work(x.nbytes, x.nbytes, 5 * m * n)
    # p, g, m and v come in; p, m and v go out.
    assert traffic.adam(m * n, dtype) == Work(4 * x.nbytes, 3 * x.nbytes, 12 * m * n)


def test_intensities_by_hand():
    n = 4096
    assert traffic.relu(n, F32).intensity == 1 / 8
    assert traffic.relu(n, F16).intensity == traffic.relu(n, BF16).intensity == 1 / 4
    assert traffic.matmul(n, n, n, F32).intensity == pytest.approx(n / 6, rel=1e-15)
    assert traffic.matmul(n, n, n, F16).intensity == pytest.approx(n / 3, rel=1e-15)
    assert traffic.matmul(n, 1, n, F32).intensity == pytest.approx(1 / 2, rel=1e-3)
    assert traffic.matmul(n, 1, n, F32).intensity < 1 / 2
    assert traffic.multiply_adds(n, 12, F32).intensity == 3  # a quarter of the chain's length
    assert traffic.gelu(n, F32).intensity == 11 * traffic.manual_gelu(n, F32).intensity


def test_where_the_operation_is_one_kernel_its_bytes_are_counted_there():
    x, y = torch.rand(9, 11, dtype=F16), torch.rand(9, 11, dtype=F16)
    assert count(lambda: torch.relu(x)) == traffic.relu(99, F16)
    assert count(lambda: x + y) == traffic.add(99, F16)
    assert count(x.clone) == count(lambda: x.t().contiguous()) == traffic.copy(99, F16)
    kernels = (
        (lambda: F.gelu(x, approximate="tanh"), traffic.gelu(99, F16)),
        (lambda: torch.addcmul(x, y, x), traffic.elementwise(99, F16, reads=2)),
        (x.sum, traffic.reduction(99, F16)),
        (x.amax, traffic.reduction(99, F16)),
        (lambda: x.softmax(1), traffic.softmax(9, 11, F16)),
    )
    for run, expected in kernels:
        seen = count(run)
        assert (seen.bytes_read, seen.bytes_written) == (
            expected.bytes_read,
            expected.bytes_written,
        )


def test_layer_norm_adam_and_cross_entropy_against_pytorch():
    rows, columns = 6, 10
    x, scale, shift = torch.rand(rows, columns), torch.rand(columns), torch.rand(columns)
    seen = count(lambda: F.layer_norm(x, (columns,), scale, shift))
    work = traffic.layer_norm(rows, columns, F32)
    assert seen.bytes_read == work.bytes_read
    # PyTorch also keeps a mean and a deviation a row for the backward pass.
    assert seen.bytes_written == work.bytes_written + 2 * 4 * rows
    assert work.flops == 8 * x.numel()

    logits, targets = torch.rand(rows, columns, dtype=F16), torch.randint(columns, (rows,))
    loss = F.cross_entropy(logits, targets)
    work = traffic.cross_entropy(rows, columns, F16)
    assert work == Work(logits.nbytes + targets.nbytes, loss.nbytes, 4 * logits.numel())

    weights = torch.nn.Parameter(torch.rand(100))
    weights.grad = torch.rand(100)
    adam = torch.optim.Adam([weights], fused=True)
    adam.step()  # makes its state
    seen, work = count(adam.step), traffic.adam(100, F32)
    step = 2 * 4  # the number of the step: increased, then used
    assert seen.bytes_read == work.bytes_read + step
    # The gradient is declared as written too; it is when gradients are scaled.
    assert seen.bytes_written == work.bytes_written + weights.grad.nbytes + step / 2


def test_embedding_reads_the_rows_of_its_tokens():
    table, tokens = torch.rand(50, 3, dtype=F16), torch.tensor([1, 49, 7, 7])
    assert count(lambda: F.embedding(tokens, table)) == traffic.embedding(4, 3, F16)


def test_multiply_adds_stay_in_registers():
    assert traffic.multiply_adds(1000, 32, F32) == Work(4000, 4000, 64_000)


def test_reduction_of_few():
    assert traffic.reduction(0, F32) == Work(0, 0, 0)
    assert traffic.reduction(1, F32) == Work(4, 4, 0)
    assert traffic.reduction(1000, F16) == Work(2000, 2, 999)


@pytest.mark.parametrize("m, n, k", [(1, 1, 1), (17, 1, 5), (1, 19, 3), (33, 65, 129)])
def test_matmul_against_pytorchs_counter(m, n, k):
    a, b, dtype = meta(m, k), meta(k, n), F32
    work = traffic.matmul(m, n, k, dtype)
    assert work.flops == pytorchs_flops(lambda: a @ b)
    assert count(lambda: torch.mm(a, b)) == work
    batched = traffic.matmul(m, n, k, dtype, batch=4)
    assert batched == count(lambda: meta(4, m, k) @ meta(4, k, n))
    assert batched.flops == 4 * work.flops
    assert traffic.linear(m, k, n, dtype) == count(lambda: F.linear(a, meta(n, k)))


def test_a_vector_is_a_matrix_of_one_column():
    matrix, vector, other = torch.rand(9, 13), torch.rand(13), torch.rand(13)
    assert count(lambda: matrix @ vector) == traffic.matmul(9, 1, 13, F32)
    assert count(lambda: other @ vector) == traffic.matmul(1, 1, 13, F32)


def test_linear_with_fewer_bits_a_weight():
    x, w, scales = meta(5, 64, dtype=F16), meta(32, 64, dtype=torch.int8), meta(32, dtype=F16)
    result = meta(5, 32, dtype=F16)
    work = traffic.linear(5, 64, 32, F16, weight=torch.int8)
    assert work.bytes_read == x.nbytes + w.nbytes + scales.nbytes
    assert work.bytes_written == result.nbytes
    assert work.flops == 2 * 5 * 64 * 32 + result.numel()  # each output is scaled once
    assert traffic.linear(5, 64, 32, F16, weight=F16) == traffic.linear(5, 64, 32, F16)


@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_convolution_against_pytorchs_counter(kernel):
    images, channels, filters, height, width = 2, 3, 7, 9, 11
    x = meta(images, channels, height, width, dtype=F16)
    w = meta(filters, channels, kernel, kernel, dtype=F16)
    work = traffic.convolution(images, channels, filters, height, width, kernel, F16)
    result = F.conv2d(x, w, padding=kernel // 2)
    assert work == Work(
        x.nbytes + w.nbytes,
        result.nbytes,
        pytorchs_flops(lambda: F.conv2d(x, w, padding=kernel // 2)),
    )


def test_attention_against_pytorchs_counter():
    """On the meta device, where FlashAttention's operators run without a GPU."""
    batch, heads, sequence, dim = shape = 2, 3, 128, 64
    q, k, v = (meta(*shape, dtype=F16) for _ in range(3))
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    work = traffic.attention(*shape, F16)
    assert work.flops == pytorchs_flops(lambda: flash(q, k, v))
    output, lse = flash(q, k, v)[:2]
    # On meta tensors the log-sum-exp may be padded; its rows are what counts.
    assert lse.dtype == F32 and lse.numel() >= batch * heads * sequence
    assert work.bytes_read == 3 * q.nbytes
    assert work.bytes_written == output.nbytes + 4 * batch * heads * sequence

    backward = traffic.attention_backward(*shape, F16)
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    rest = (None, None, sequence, sequence, 0.0, False, meta(2), meta(2))
    assert backward.flops == 2.5 * work.flops
    assert backward.flops == pytorchs_flops(
        lambda: flash_backward(output, q, k, v, output, lse, *rest)
    )
    assert backward.bytes_read == 5 * q.nbytes + 4 * batch * heads * sequence
    assert backward.bytes_written == 3 * q.nbytes


def test_causal_attention_counts_half_of_the_matmuls():
    for operation in (traffic.attention, traffic.attention_backward):
        full, causal = (operation(2, 3, 128, 64, F16, causal=flag) for flag in (False, True))
        assert causal == Work(full.bytes_read, full.bytes_written, full.flops / 2)


def test_unfused_attention_against_the_operations():
    batch, heads, sequence, dim = 2, 3, 16, 8
    q, k, v = torch.rand(3, batch * heads, sequence, dim)
    seen = count(lambda: torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(2), v))
    work = traffic.unfused_attention(batch, heads, sequence, dim, F32)
    assert (seen.bytes_read, seen.bytes_written) == (work.bytes_read, work.bytes_written)
    softmax = traffic.softmax(batch * heads * sequence, sequence, F32)
    fused = traffic.attention(batch, heads, sequence, dim, F32)
    assert work.flops == fused.flops + softmax.flops


def manual_gelu(x):  # lecture 6
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


def manual_softmax(x):  # lecture 6
    x_max = x.max(dim=1)[0]
    x = x - x_max[:, None]
    numerator = torch.exp(x)
    denominator = numerator.sum(dim=1)
    return numerator / denominator[:, None]


@pytest.mark.parametrize("dtype", [F16, F32, F64])
@pytest.mark.parametrize("rows, columns", [(1, 1), (1, 31), (31, 1), (5, 12), (16, 16)])
def test_the_lectures_formulas_operation_by_operation(rows, columns, dtype):
    x = torch.rand(rows, columns, dtype=dtype)
    assert count(lambda: manual_gelu(x)) == traffic.manual_gelu(x.numel(), dtype)
    assert count(lambda: manual_softmax(x)) == traffic.manual_softmax(rows, columns, dtype)


def tiles_one_by_one(m, n, k, tile_m, tile_n) -> int:
    """Elements that are loaded when every tile of the result loads its rows and columns."""
    loads = 0
    for top in range(0, m, tile_m):
        for left in range(0, n, tile_n):
            rows, columns = min(tile_m, m - top), min(tile_n, n - left)
            loads += rows * k + k * columns
    return loads


@pytest.mark.parametrize("m, n, k", [(64, 96, 32), (17, 5, 9), (1, 100, 3), (33, 64, 1)])
@pytest.mark.parametrize("tile_m, tile_n", [(1, 1), (16, 16), (32, 8), (7, 13), (128, 256)])
def test_tiled_matmul_against_a_loop_over_tiles(m, n, k, tile_m, tile_n):
    work = traffic.tiled_matmul(m, n, k, tile_m, tile_n, F16)
    assert work.bytes_read == 2 * tiles_one_by_one(m, n, k, tile_m, tile_n)
    assert (work.bytes_written, work.flops) == (2 * m * n, 2 * m * n * k)


def test_the_naive_matmul_and_the_best_are_tilings():
    m, n, k = 20, 30, 40
    # Lecture 6: MKN reads of A and as many of B.
    assert traffic.tiled_matmul(m, n, k, 1, 1, F32).bytes_read == 2 * m * n * k * 4
    assert traffic.tiled_matmul(m, n, k, m, n, F32) == traffic.matmul(m, n, k, F32)
    for tile in ((0, 4), (4, 0), (-1, 4)):
        with pytest.raises(ValueError, match="tile"):
            traffic.tiled_matmul(m, n, k, *tile, F32)


OPERATIONS = {  # and how many sizes each takes
    traffic.relu: 1,
    traffic.add: 1,
    traffic.copy: 1,
    traffic.gelu: 1,
    traffic.manual_gelu: 1,
    traffic.reduction: 1,
    traffic.adam: 1,
    traffic.elementwise: 1,
    traffic.multiply_adds: 2,
    traffic.softmax: 2,
    traffic.manual_softmax: 2,
    traffic.layer_norm: 2,
    traffic.cross_entropy: 2,
    traffic.embedding: 2,
    traffic.matmul: 3,
    traffic.linear: 3,
    traffic.attention: 4,
    traffic.unfused_attention: 4,
    traffic.attention_backward: 4,
    traffic.convolution: 6,
}


def test_all_operations_are_among_these():
    public = {
        function
        for name, function in vars(traffic).items()
        if inspect.isfunction(function) and not name.startswith("_")
    }
    assert public == {*OPERATIONS, traffic.tiled_matmul}


@pytest.mark.parametrize(
    "operation, sizes", OPERATIONS.items(), ids=lambda x: getattr(x, "__name__", x)
)
def test_no_elements_and_negative_sizes(operation, sizes):
    """Two negative sizes have a positive product, and are refused all the same."""
    assert operation(*[0] * sizes, F32) == Work(0, 0, 0)
    ones = operation(*[1] * sizes, F32)
    assert ones.bytes_read >= 4 and ones.bytes_written >= 4 and ones.flops >= 0
    for negative in range(1, 2**sizes):
        signed = [-3 if negative >> place & 1 else 2 for place in range(sizes)]
        with pytest.raises(ValueError, match="negative"):
            operation(*signed, F32)


def test_negative_sizes_of_keywords_and_tiles():
    with pytest.raises(ValueError, match="negative"):
        traffic.matmul(2, 2, 2, F32, batch=-1)
    for sizes in ((-2, 2, 2), (2, -2, 2), (2, 2, -2), (-2, -2, 0)):
        with pytest.raises(ValueError, match="negative"):
            traffic.tiled_matmul(*sizes, 1, 1, F32)
    with pytest.raises(ValueError, match="negative"):
        traffic.matmul(-1, -1, 0, F32)
    with pytest.raises(ValueError, match="negative"):
        traffic.elementwise(4, F32, flops=math.nan)
