"""Which kernels compute attention's gradients, and with which tiles: on machines that are faked."""

import itertools
import types

import pytest
import torch

from helpers.device import has_cuda, triton_version
from helpers.kernels import attention_backward_plans
from helpers.kernels.attention import flash_attention
from helpers.kernels.attention_backward_plans import (
    INTERPRETED,
    configs,
    in_one_pass,
    launch_attention_backward,
)
from helpers.kernels.attention_plans import SMALLEST, has_descriptor
from helpers.kernels.attention_tiles import Config
from helpers.kernels.matmul_plans import OutOfResources
from helpers.triton_mode import triton
from tests.test_attention import BF16, CAPABILITY, FP16, FP32, lies_as
from tests.test_attention_backward import all_operands, assert_gradients, autograd
from tests.test_attention_plans import CAPABILITIES, DIMS, MULTIPLIED

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")
X = torch.zeros(2, 3, 200, 64, dtype=FP16)


# The configurations of each generation


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("dtype, multiplied", MULTIPLIED, ids=str)
def test_every_gpu_has_configurations(capability, dtype, multiplied):
    """The last asks for little, and none for what tl.dot or a thread cannot take."""
    for dim in DIMS:
        width = max(16, triton.next_power_of_2(dim))
        for_keys, for_queries = configs(capability, dtype, dim, multiplied)
        for sums, found in ((2, for_keys), (1, for_queries)):
            for c in found:
                assert c.warps in (2, 4, 8) and c.stages >= 1
                for side in (c.tile_q, c.tile_k):
                    assert side >= 16 and side & (side - 1) == 0
                # Scores, dP, and the sums, at most 15/16 of the registers in all.
                rows = c.tile_k if sums == 2 else c.tile_q
                assert 2 * c.tile_q * c.tile_k + sums * rows * width <= 240 * 32 * c.warps
            assert found[-1] == SMALLEST
            assert all(c.tile_q * c.tile_k >= SMALLEST.tile_q * SMALLEST.tile_k for c in found)


@pytest.mark.parametrize(
    "dim, widest", [(16, 64), (48, 64), (80, 128), (144, 256), (1, 63), (72, 127)]
)
def test_configurations_go_by_the_width_that_fits(dim, widest):
    for capability in CAPABILITIES:
        assert configs(capability, FP16, dim, "ieee") == configs(capability, FP16, widest, "ieee")


# Who is launched


@pytest.fixture
def gpu(monkeypatch):
    """As on a GPU of any generation; `launched` lists what would run on it, `too_large` fails."""
    faked = types.SimpleNamespace(launched=[], too_large=set(), capability=(8, 0), tensors=[])

    def keys(q, k, v, do, lse, delta, dk, dv, config, *options):
        launch("keys", (dk, dv), config, *options)

    def queries(q, k, v, do, lse, delta, dq, config, *options):
        launch("queries", (dq,), config, *options)

    def launch(name, written, config, *options):
        faked.launched.append((name, config, *options))
        faked.tensors.append(written)
        if config in faked.too_large:
            raise OutOfResources(300_000, 232_448, "shared memory")

    def one_pass(q, k, v, o, lse, do, dq_sum, dk, dv, *options):
        faked.launched.append(("one pass", *options))
        faked.tensors.append((q, k, v, do, dq_sum, dk, dv))
        for x, value in ((dq_sum, 8), (dk, 2), (dv, 3)):
            x.fill_(value)

    plans = attention_backward_plans
    monkeypatch.setattr(plans, "launch_delta", lambda *_: faked.launched.append("delta"))
    monkeypatch.setattr(plans, "launch_keys_gradient", keys)
    monkeypatch.setattr(plans, "launch_queries_gradient", queries)
    monkeypatch.setattr(plans, "launch_one_pass", one_pass)
    monkeypatch.setattr(plans, "interpreting", lambda: False)
    monkeypatch.setattr(plans, "sms", lambda device: 132)
    monkeypatch.setattr(plans, "precision", lambda dtype, device: "as told")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: faked.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this GPU")
    return faked


def launch(x, wanted=(True, True, True), causal=True, scale=0.5) -> list:
    """What is given for dq, dk and dv."""
    lse = torch.zeros(x.shape[:3])
    gradients = [torch.empty_like(x) if each else None for each in wanted]
    launch_attention_backward(x, x, x, x, lse, x, *gradients, causal, scale)
    return gradients


@pytest.mark.case("E16")
def test_a_configuration_that_does_not_fit_is_passed_over(gpu, monkeypatch):
    """Case E16: for each of the two kernels of its own."""
    large, small = Config(64, 64), Config(16, 16)
    asked = []
    monkeypatch.setattr(
        attention_backward_plans,
        "configs",
        lambda *about: asked.append(about) or ((large, small), (Config(32, 64), small)),
    )
    gpu.too_large = {large}
    launch(X)
    assert gpu.launched == [
        "delta",
        ("keys", large, True, 0.5, "as told"),
        ("keys", small, True, 0.5, "as told"),
        ("queries", Config(32, 64), True, 0.5, "as told"),
    ]
    assert asked == 2 * [((8, 0), FP16, 64, "as told")]
    gpu.too_large |= {small}
    with pytest.raises(RuntimeError, match="no plan of attention fits this GPU"):
        launch(X, causal=False, scale=2.0)


def test_other_errors_are_not_passed_over(gpu, monkeypatch):
    def fail(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(attention_backward_plans, "launch_keys_gradient", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        launch(X)


def test_only_what_is_wanted_is_launched(gpu):
    for capability, wanted in itertools.product(
        CAPABILITIES, itertools.product((True, False), repeat=3)
    ):
        gpu.capability = capability
        gpu.launched.clear()
        launch(X, wanted)
        names = [one if isinstance(one, str) else one[0] for one in gpu.launched]
        if capability == (9, 0) and all(wanted):
            assert names == ["one pass"]
        else:
            expected = ["keys"] * (wanted[1] or wanted[2]) + ["queries"] * wanted[0]
            assert names == ["delta", *expected]


@pytest.mark.parametrize(
    "dtype, dim, possible",
    [(BF16, 8, True), (FP16, 72, True), (FP16, 128, True)]
    + [(FP16, 136, False), (BF16, 63, False), (BF16, 4, False), (FP32, 64, False)],
    ids=str,
)
def test_who_has_one_pass(gpu, dtype, dim, possible):
    """On Hopper; without a mask only where all begin at queries of their own."""
    for capability in CAPABILITIES:
        gpu.capability = capability
        here = possible and capability == (9, 0)
        for queries, keys, apart in (
            *((64, 128, True), (64, 129, False), (512, 1024, True), (512, 1025, False)),
            *((4096, 4096, True), (132 * 64, 10**5, True), (131 * 64, 10**5, False)),
        ):
            q, k = (torch.empty(1, 1, n, dim, dtype=dtype, device="meta") for n in (queries, keys))
            assert in_one_pass(q, k, causal=True) == here
            assert in_one_pass(q, k, causal=False) == (here and apart)


def test_one_pass_gets_what_it_can_read_and_write(gpu):
    """Of what the copy engine cannot take, others; dq is the sum, scaled."""
    gpu.capability = (9, 0)
    for x in (X, X.view(2, 200, 3, 64).transpose(1, 2), X.view(2, 3, 64, 200).mT):
        dq, dk, dv = launch(x, causal=False, scale=0.25)
        *read, dq_sum, dk_there, dv_there = gpu.tensors.pop()
        assert gpu.launched.pop() == ("one pass", False, 0.25)
        assert all(y is x or (y.is_contiguous() and torch.equal(y, x)) for y in read)
        assert all((y is x) == (x.stride(3) == 1) for y in read)
        assert all(map(has_descriptor, (dk_there, dv_there)))
        assert lies_as(dq_sum, dq) and dq_sum.dtype == FP32
        assert (dk_there is dk) == (dv_there is dv) == has_descriptor(x)
        assert dq.eq(2).all() and dk.eq(2).all() and dv.eq(3).all()


@pytest.mark.skipif(has_cuda(), reason="of the interpreter")
def test_the_interpreter_has_one_configuration(monkeypatch):
    seen = []
    for name in ("launch_keys_gradient", "launch_queries_gradient"):
        monkeypatch.setattr(attention_backward_plans, name, lambda *x: seen.append(x[-3:]))
    launch(X)
    assert seen == 2 * [(INTERPRETED, True, 0.5)]


@pytest.mark.case("E16")
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_no_room_for_the_first_configurations(monkeypatch):
    """Case E16, with Triton's own error."""
    found = tuple((Config(32, 64, 4, 16), *each) for each in configs(CAPABILITY, FP32, 64, "ieee"))
    monkeypatch.setattr(attention_backward_plans, "configs", lambda *_: found)
    x = all_operands(100, 300, 64, FP32)
    assert_gradients(autograd(flash_attention, *x), *x)
