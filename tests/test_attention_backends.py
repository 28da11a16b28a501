"""Attention by every backend against the formula in float64, and the cases of `helpers.peers`.

Both passes.
"""

import dataclasses
import math
import warnings

import pandas as pd
import pytest
import torch

from helpers import attention_backends, attention_backward_peers, attention_peers, peers
from helpers.attention_backends import BACKENDS, LABELS, backward_of, gradients, missing
from helpers.attention_backward_peers import exact_gradients, gradient_errors
from helpers.attention_peers import EQUAL_SIZES, SIZES, Errors, Size, errors, exact_rows, some_rows
from helpers.check import assert_close
from helpers.device import has_cuda, triton_version
from helpers.kernels import attention

ALWAYS = ("standard", "math", *(["ours"] if triton_version() else []))

TINY = Size(1, 2, 32, 16, causal=True, dtype=torch.float16)
SHAPES = (
    Size(1, 2, 33, 16, False, torch.float32),
    Size(2, 2, 17, 16, True, torch.float16),
    Size(1, 2, 20, 16, False, torch.float32, keys=9),
    Size(1, 4, 16, 16, True, torch.float32, kv_heads=2),
)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(attention_peers, "SIZES", (TINY,))
    (one,) = peers.OPERATIONS["flash_attention"]()
    return one


@pytest.fixture
def tiny_backward(monkeypatch):
    monkeypatch.setattr(attention_peers, "SIZES", (TINY,))
    (one,) = peers.OPERATIONS["flash_attention_backward"]()
    return one


def with_gradient(size: Size) -> list[torch.Tensor]:
    """q, k, v, and a gradient of the result."""
    q, k, v = size.tensors()
    return [q, k, v, torch.randn_like(q)]


def softmax_by_hand(q, k, v, causal):
    """One query after the other, in float64: as far from the functions tested as it can be."""
    out, groups = torch.zeros(q.shape, dtype=torch.float64), q.shape[1] // k.shape[1]
    q, k, v = (x.cpu().double() for x in (q, k, v))
    for batch, head, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        seen = slice(i + 1 if causal else None)
        keys, values = (x[batch, head // groups, seen] for x in (k, v))
        weights = (keys @ q[batch, head, i] / math.sqrt(q.shape[3])).exp()
        out[batch, head, i] = weights @ values / weights.sum()
    return out


@pytest.mark.parametrize("size", SHAPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_is_right_or_says_why_it_cannot_run(name, size):
    q, k, v = size.tensors()
    if reason := missing(name, q, k, v, size.causal):
        assert reason.strip() and "\n" not in reason
        assert name not in ALWAYS
        return
    found = BACKENDS[name](q, k, v, size.causal)
    assert (found.dtype, found.device) == (q.dtype, q.device)
    assert_close(found, softmax_by_hand(q, k, v, size.causal).to(found.device))


def gradients_by_hand(q, k, v, do, causal):
    leaves = [x.cpu().double().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(softmax_by_hand(*leaves, causal), leaves, do.cpu().double())


@pytest.mark.parametrize("size", SHAPES, ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backends_gradients_are_right_or_it_says_why_there_are_none(name, size):
    tensors = with_gradient(size)
    if reason := missing(name, *tensors[:3], size.causal, backward=True):
        assert reason.strip() and "\n" not in reason
        assert name not in ALWAYS
        return
    alone = backward_of(name, *tensors, size.causal)
    expected = gradients_by_hand(*tensors, size.causal)
    for found in (gradients(name, *tensors, size.causal), alone(), alone()):
        for one, tensor, right in zip(found, tensors, expected, strict=False):
            assert (one.dtype, one.device) == (tensor.dtype, tensor.device)
            assert_close(one, right.to(one.device))
    assert not any(x.requires_grad or x.grad is not None for x in tensors)


def test_gradients_are_there_where_none_are_recorded():
    with torch.no_grad():
        found = gradients("standard", *with_gradient(TINY), True)
    assert [x.shape for x in found] == [x.shape for x in TINY.tensors()]


@pytest.mark.parametrize("block", [1, 200, 2**26])
def test_exact_gradients_are_those_of_the_formula(monkeypatch, block):
    """However few queries are worked on at a time."""
    monkeypatch.setattr(attention_backward_peers, "BLOCK", block)
    for size in SHAPES:
        tensors = with_gradient(size)
        places = [0, 3, size.queries - 1], [0, 2, (size.keys or size.queries) - 1]
        expected = gradients_by_hand(*tensors, size.causal)
        found = exact_gradients(*tensors, *places, size.causal)
        for one, right, some in zip(found, expected, (*places, places[1]), strict=False):
            assert_close(one.cpu(), right[:, :, some], 1e-12)
        for error in gradient_errors(expected, [x.cpu() for x in found], *places).values():
            assert error.max < 1e-12
        wrong = gradient_errors([x + 1 for x in expected], [x.cpu() for x in found], *places)
        assert {*wrong} == {"dq", "dk", "dv"}
        assert all(abs(error.rms - 1) < 1e-12 for error in wrong.values())


def test_exact_rows_are_those_of_the_formula():
    for size in SHAPES:
        q, k, v = size.tensors()
        rows = [0, 3, size.queries - 1]
        expected = softmax_by_hand(q, k, v, size.causal)[:, :, rows]
        assert_close(exact_rows(q, k, v, rows, size.causal).cpu(), expected, 1e-12)


@pytest.mark.skipif(has_cuda(), reason="what a CPU lacks")
def test_what_a_cpu_lacks_is_said():
    q, k, v = TINY.tensors()
    for name in ("efficient", "cudnn", "flex"):
        assert missing(name, q, k, v).startswith(LABELS[name])
    assert not missing("flash", q, k, v)


def test_unknown_names_and_a_missing_triton(monkeypatch):
    with pytest.raises(ValueError, match="no backend 'fast'; there are standard, math"):
        missing("fast", *TINY.tensors())
    monkeypatch.setattr(attention_backends, "triton_version", lambda: "")
    assert "Triton is not installed" in missing("ours", *TINY.tensors())
    assert set(LABELS) == set(BACKENDS)


@pytest.fixture
def on_gpu(monkeypatch):
    """Tensors of a GPU as far as their type goes, on which torch.compile would work."""
    monkeypatch.setattr(attention_backends.compute_roofs, "compiler_missing", lambda: "")
    monkeypatch.setattr(attention_backends, "free_bytes", lambda _: 4 * 32 * 32)

    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    return [x.cpu().as_subclass(OnGpu) for x in TINY.tensors()]


@pytest.mark.parametrize("name", ["efficient", "flash", "cudnn"])
@pytest.mark.parametrize(
    "reasons, said",
    [
        (None, ""),
        (["cuDNN attention was not compiled in. (Triggered internally at sdp_utils.cpp:1.)"], None),
        (["the first", "head dim 320 is too large"], "head dim 320 is too large"),
        ([], "PyTorch gives no reason"),
    ],
)
def test_on_a_gpu_pytorch_says_why_not(on_gpu, monkeypatch, name, reasons, said):
    asked = []

    def usable(parameters, debug):
        asked.append(parameters)
        for reason in reasons or ():
            warnings.warn(reason, stacklevel=1)
        return reasons is None

    monkeypatch.setattr(attention_backends.switches, f"can_use_{name}_attention", usable)
    answer = missing(name, *on_gpu, causal=True, backward=True)
    said = "cuDNN attention was not compiled in." if said is None else said
    assert answer == (f"{LABELS[name]}: {said}" if said else "")
    (parameters,) = asked
    assert parameters.is_causal and not parameters.enable_gqa and parameters.query.requires_grad


def test_flex_needs_a_compiler_and_room_for_its_mask(on_gpu, monkeypatch):
    assert missing("flex", *on_gpu) == ""
    monkeypatch.setattr(attention_backends, "free_bytes", lambda _: 4 * 32 * 32 - 1)
    assert "mask of queries x keys: no room" in missing("flex", *on_gpu)
    monkeypatch.setattr(attention_backends.compute_roofs, "compiler_missing", lambda: "no g++")
    assert missing("flex", *on_gpu) == "no g++"


def test_rows_compared_are_the_first_the_last_and_some_between():
    assert some_rows(1) == [0]
    assert some_rows(5) == [0, 1, 2, 3, 4]
    rows = some_rows(16384)
    assert {0, 16381, 16382, 16383} <= set(rows) and 60 < len(rows) < 70


def test_errors_are_the_root_mean_square_and_the_largest():
    exact = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    found = errors(torch.tensor([0.0, 3.0, 0.0, -4.0]).reshape(1, 1, 1, 4), exact)
    assert found == Errors(2.5, 4.0)
    assert found.within(Errors(2.5, 4.0), 1) and found.within(Errors(2.0, 3.0))
    assert not found.within(Errors(1.6, 9.0)) and not found.within(Errors(9.0, 2.6))
    nan = errors(torch.full((1, 1, 1, 4), torch.nan), exact)
    assert not nan.within(Errors(1.0, 1.0))


def test_sizes_are_of_every_length_and_kind():
    shown = [str(size) for size in SIZES]
    assert len({(str(size), size.dtype) for size in SIZES}) == len(SIZES)
    assert {"1x16x16384x128 causal", "32x32x512x64", "4x16x512x128 keys 8192"} <= set(shown)
    assert "4x32x4096x128 kv-heads 8 causal" in shown
    assert {(size.batch * size.queries, size.heads * size.dim) for size in EQUAL_SIZES} == {
        (16384, 2048)
    }
    assert {size.dtype for size in SIZES} == {torch.bfloat16, torch.float16, torch.float32}


def test_flops_are_of_two_matmuls_and_half_when_causal():
    assert Size(2, 3, 5, 7).flops == 2 * (2 * 3) * (2 * 5 * 5 * 7)
    assert Size(2, 3, 5, 7, causal=True).flops == 2 * 3 * (2 * 5 * 5 * 7)
    assert Size(2, 3, 5, 7, keys=11).flops == 2 * (2 * 3) * (2 * 5 * 11 * 7)


def test_speeds_are_ours_over_the_peers():
    row = {"operation": "flash_attention", "dtype": "bfloat16", "shape": "1x16x16384x128 causal"}
    row |= {"ours_ms": 2.0, "ceiling_ms": 1.0}
    rows = [row | {"peer": "a", "peer_ms": 3.0}, row | {"peer": "b", "peer_ms": 1.0}]
    rows += [row | {"shape": "4x16x512x128 keys 8192", "peer": math.nan}]
    rows += [row | {"operation": "softmax", "peer": "a", "peer_ms": 9.0}]
    first, second = attention_peers.speeds(pd.DataFrame(rows)).to_dict("records")
    assert first | {"TFLOP/s": 0} == {
        "dtype": "bfloat16",
        "shape": row["shape"],
        "dim": 128,
        "mask": "causal",
        "tokens": 16384,
        "TFLOP/s": 0,
        "× a": 1.5,
        "× b": 0.5,
    }
    assert first["TFLOP/s"] == pytest.approx(2 * 16 * 16384**2 * 128 / 2e-3 / 1e12)
    assert (second["tokens"], second["mask"]) == (512, "full") and math.isnan(second["× a"])
    assert attention_peers.speeds(pd.DataFrame(rows[-1:])).empty

    rows += [row | {"operation": "flash_attention_backward", "peer": "a", "peer_ms": 3.0}]
    found = attention_peers.speeds(pd.DataFrame(rows), "flash_attention_backward")
    assert found["TFLOP/s"].tolist() == [2.5 * first["TFLOP/s"]]
    assert found["× a"].tolist() == [1.5] and "× b" not in found


@pytest.mark.parametrize(
    "operation, rows", [("flash_attention", 16), ("flash_attention_backward", 8)]
)
def test_flash_attn_4_was_measured_at_sizes_that_are_ours(operation, rows):
    found = attention_peers.references(operation)
    assert len(found) == rows and found["tflop_per_s"].between(100, 989).all()
    of_ours = {(size.batch, size.heads, size.queries, size.dim) for size in EQUAL_SIZES}
    assert set(found[["batch", "heads", "sequence", "dim"]].itertuples(index=False, name=None)) <= (
        of_ours
    )
    row = found[(found["dim"] == 64) & (found["sequence"] == 8192) & found["causal"]].iloc[0]
    ratio = 509.7 / 421.3 if operation == "flash_attention" else 504.5 / 422.9
    assert row["mask"] == "causal" and row["ratio_to_cudnn"] == pytest.approx(ratio)


def test_a_case_is_right_and_its_check_sees_what_is_not(tiny, monkeypatch):
    assert (tiny.operation, tiny.dtype, tiny.shape) == (
        "flash_attention",
        "float16",
        "1x2x32x16 causal",
    )
    for run in (tiny.ours, tiny.ceiling[1], tiny.peers[LABELS["flash"]]):
        tiny.check(run)
    with pytest.raises(AssertionError):
        tiny.check(lambda: None)  # what others wrote before does not count
    rows, left_out = peers.compare(tiny, rounds=1, budget_ms=1)
    assert rows and {row["shape"] for row in rows} == {tiny.shape}
    if not has_cuda():
        assert f"{LABELS['cudnn']} left out: {LABELS['cudnn']} needs a GPU" in left_out

    launch = attention.launch_flash_attention

    def unscaled(q, k, v, o, causal, scale):
        launch(q, k, v, o, causal, 1.0)

    def full(q, k, v, o, causal, scale):
        launch(q, k, v, o, False, scale)

    def unwritten(q, k, v, o, causal, scale):
        launch(q[:, :, :-1], k, v, o[:, :, :-1], causal, scale)

    def rounded(q, k, v, o, causal, scale):
        launch(q, k, v, o, causal, scale)
        o.mul_(1 + 2**-8)  # within the tolerance of fp16, but worse than FlashAttention-2

    for broken in (unscaled, full, unwritten):
        monkeypatch.setattr(attention, "launch_flash_attention", broken)
        with pytest.raises(AssertionError, match=r"relative error|not all"):
            tiny.check(tiny.ours)
    monkeypatch.setattr(attention_peers, "assert_close", lambda *_: None)
    monkeypatch.setattr(attention, "launch_flash_attention", rounded)
    with pytest.raises(AssertionError, match=r"more than 1.5 times FlashAttention-2's"):
        tiny.check(tiny.ours)


def test_an_unwritten_query_that_is_not_compared_is_seen(monkeypatch):
    monkeypatch.setattr(attention_peers, "COMPARED_ROWS", 2)
    one = attention_peers.case(dataclasses.replace(TINY, queries=48))
    launch = attention.launch_flash_attention

    def without_one(q, k, v, o, causal, scale):
        launch(q, k, v, o, causal, scale)
        o[0, 1, 20] = torch.nan

    monkeypatch.setattr(attention, "launch_flash_attention", without_one)
    with pytest.raises(AssertionError, match="not all of the output was written"):
        one.check(one.ours)


def test_a_case_of_the_backward_pass_is_right_and_its_check_sees_what_is_not(
    tiny_backward, monkeypatch
):
    one = tiny_backward
    assert (one.operation, one.dtype, one.shape) == (
        "flash_attention_backward",
        "float16",
        "1x2x32x16 causal",
    )
    for run in (one.ours, one.ceiling[1], one.peers[LABELS["flash"]]):
        one.check(run)
        one.check(run)  # a backward pass can run again
    with pytest.raises(AssertionError):
        one.check(lambda: None)  # what others wrote before does not count
    rows, left_out = peers.compare(one, rounds=1, budget_ms=1)
    assert rows and {row["shape"] for row in rows} == {one.shape}
    if not has_cuda():
        assert f"{LABELS['cudnn']} left out: {LABELS['cudnn']} needs a GPU" in left_out


LAUNCH = attention.launch_flash_attention_backward


def another_mask(*tensors_and_causal):
    LAUNCH(*tensors_and_causal[:-1], False)


def swapped(q, k, v, o, lse, do, dq, dk, dv, causal):
    LAUNCH(q, k, v, o, lse, do, dq, dv, dk, causal)


def without_row_term(q, k, v, o, lse, do, *gradients_and_causal):
    LAUNCH(q, k, v, torch.zeros_like(o), lse, do, *gradients_and_causal)


def unwritten(q, k, v, o, lse, do, dq, dk, dv, causal):
    LAUNCH(q, k, v, o, lse, do, dq, None, None, causal)


def unscaled(q, k, v, o, lse, do, dq, dk, dv, causal):
    LAUNCH(q, k, v, o, lse, do, dq, dk, dv, causal)
    dk.mul_(q.shape[-1] ** 0.5)


@pytest.mark.parametrize(
    "broken",
    [another_mask, swapped, without_row_term, unwritten, unscaled],
    ids=lambda f: f.__name__,
)
def test_a_wrong_backward_pass_is_not_timed(tiny_backward, monkeypatch, broken):
    monkeypatch.setattr(attention, "launch_flash_attention_backward", broken)
    with pytest.raises(AssertionError, match=r"relative error|not all"):
        tiny_backward.check(tiny_backward.ours)


@pytest.mark.parametrize("place", range(3))
def test_each_gradient_must_be_as_exact_as_that_of_flash_attention_2(
    tiny_backward, monkeypatch, place
):
    """Within the tolerance of fp16, but worse."""

    def rounded(*tensors_and_causal):
        LAUNCH(*tensors_and_causal)
        tensors_and_causal[6 + place].mul_(1 + 2**-8)

    monkeypatch.setattr(attention, "launch_flash_attention_backward", rounded)
    monkeypatch.setattr(attention_backward_peers, "assert_close", lambda *_: None)
    name = attention_backward_peers.NAMES[place]
    with pytest.raises(AssertionError, match=f"{name}: .* more than 1.5 times FlashAttention-2's"):
        tiny_backward.check(tiny_backward.ours)


def test_an_unwritten_gradient_that_is_not_compared_is_seen(monkeypatch):
    monkeypatch.setattr(attention_peers, "COMPARED_ROWS", 2)
    one = attention_backward_peers.case(dataclasses.replace(TINY, queries=48))

    def without_one(*tensors_and_causal):
        LAUNCH(*tensors_and_causal)
        tensors_and_causal[7][0, 1, 20] = torch.nan

    monkeypatch.setattr(attention, "launch_flash_attention_backward", without_one)
    with pytest.raises(AssertionError, match="not all of a gradient was written"):
        one.check(one.ours)
