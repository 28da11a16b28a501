"""Which matmul kernel runs with which tiles: on all generations, and on machines that are faked.

Compiled, on a GPU, these tests take about 25 variants of the three kernels.
"""

import itertools
import types

import pytest
import torch

from helpers.device import device, has_cuda, interpreting, triton_version
from helpers.kernels import matmul_plans
from helpers.kernels.matmul_plans import (
    HOPPER,
    HOPPER_TF32,
    INTERPRETED,
    LAUNCHES,
    MOST_TRIED,
    TILES_16_BITS,
    TILES_FP32,
    TILES_TF32,
    TUNED_FROM,
    TURING,
    Config,
    OutOfResources,
    Plan,
    by_model,
    launch_triton_matmul,
    plans,
    plans_for,
    precision,
    ring_bytes,
    shared_limit_bytes,
)
from tests.test_triton_matmul import (
    BF16,
    CAPABILITY,
    DTYPES,
    FP16,
    FP32,
    aligned,
    assert_product,
    operands,
)

DEVICE = device()
SHARED_KB = {  # that a block may have; of generations to come, what all of these have
    (7, 0): 96,
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (12, 0): 99,
    (10, 3): 99,
    (14, 0): 99,
}
ASKED = [
    (capability, dtype, multiplied, described)
    for capability, dtype, described in itertools.product(SHARED_KB, DTYPES, (False, True))
    for multiplied in (("ieee", "tf32") if dtype == FP32 else ("ieee",))
]
needs_triton = pytest.mark.skipif(not triton_version(), reason="needs Triton")


# The plans of each generation


@pytest.mark.parametrize("capability", SHARED_KB, ids=str)
def test_the_shared_memory_of_a_block(capability):
    assert shared_limit_bytes(capability) == SHARED_KB[capability] * 1024


def test_what_the_ring_takes():
    assert ring_bytes(Config(128, 256, 64, stages=3), 2, True) == 3 * (128 * 64 + 64 * 256) * 2
    assert ring_bytes(Config(128, 256, 64, stages=3), 2, False) == 2 * (128 * 64 + 64 * 256) * 2
    assert ring_bytes(Config(64, 16, 32, stages=2), 4, False) == (64 * 32 + 32 * 16) * 4


@pytest.mark.case("E16")
@pytest.mark.parametrize("capability, dtype, multiplied, described", ASKED, ids=str)
def test_plans_fit(capability, dtype, multiplied, described):
    """Case E16, and what tl.dot and the registers of a thread can take."""
    found = plans(capability, dtype, multiplied, described)
    assert found and len(set(found)) == len(found)
    assert [plan.rate for plan in found] == sorted((plan.rate for plan in found), reverse=True)
    limit = 1024 * (227 if capability[0] == 10 else SHARED_KB[capability])
    for plan in found:
        c = plan.config
        takes = ring_bytes(c, dtype.itemsize, asynchronous=capability[0] in (9, 10))
        assert 0 < plan.rate <= 1 and takes <= limit
        for side in (c.tile_m, c.tile_n, c.tile_k):
            assert side >= 16 and side & (side - 1) == 0
        assert c.tile_m * c.tile_n <= 128 * 32 * c.warps  # half of a thread's registers for C
        if plan.kernel != "tiles":
            assert dtype != FP32 and described and capability >= (9, 0)
        if plan.kernel == "pingpong":
            assert capability == (9, 0) and c.warps == 4 and c.tile_m in (64, 128)


def test_which_kernels_a_generation_has():
    def kernels(*asked):
        return {plan.kernel for plan in plans(*asked)}

    assert kernels((9, 0), BF16, "ieee", True) == {"persistent", "pingpong"}
    assert kernels((10, 0), BF16, "ieee", True) == {"persistent"}
    assert kernels((9, 0), BF16, "ieee", False) == {"tiles"}
    # 12.0 has the copy engine too, but not the shared memory that these tiles want.
    assert kernels((12, 0), BF16, "ieee", True) == {"tiles"}
    # What has room for everything is given everything.
    assert plans((9, 0), BF16, "ieee", False) == plans((8, 0), BF16, "ieee", True) == TILES_16_BITS
    assert plans((9, 0), FP32, "ieee", True) == plans((8, 0), FP32, "ieee", True) == TILES_FP32
    assert plans((8, 0), FP32, "tf32", True) == plans((10, 0), FP32, "tf32", True) == TILES_TF32
    assert plans((9, 0), FP32, "tf32", True) == HOPPER_TF32
    assert all(plans((7, 5), dtype, "ieee", True) == TURING for dtype in DTYPES)


@needs_triton
@pytest.mark.parametrize("dtype, multiplied", [(FP32, "ieee"), (FP32, "tf32"), (BF16, "ieee")])
def test_all_plans_are_right(dtype, multiplied):
    """Interpreted, those of every generation; pingpong has no interpreter."""
    m, k, n = 200, 72, 264
    a, b = (aligned(x) for x in operands(m, k, n, dtype))
    asked = itertools.product(SHARED_KB if interpreting() else [CAPABILITY], (False, True))
    each = {p for at, described in asked for p in plans(at, dtype, multiplied, described)}
    each.add(INTERPRETED) if interpreting() else None
    assert each
    for plan in each:
        if plan.kernel == "pingpong" and interpreting():
            continue
        c = torch.full((m, n), torch.nan, dtype=dtype, device=DEVICE)
        assert matmul_plans.run(plan, a, b, c, "gelu"), plan
        assert_product(c, a, b, "gelu")


def test_a_plan_says_what_it_is():
    plan = Plan("tiles", Config(128, 64, 32, 8, 4, 3), 0.9)
    assert str(plan) == "tiles 128x64x32, 4 warps, 3 stages"


# The model


def model_time(m, n, plan, num_sms) -> float:
    """Tiles dealt to SMs one by one; the busiest SM's tiles, at the plan's rate."""
    c = plan.config
    tiles = [0] * num_sms
    for at, _ in enumerate(itertools.product(range(0, m, c.tile_m), range(0, n, c.tile_n))):
        tiles[at % num_sms] += 1
    return max(tiles) * c.tile_m * c.tile_n / plan.rate


@pytest.mark.parametrize("num_sms", [40, 108, 132])
@pytest.mark.parametrize("found", [HOPPER, TILES_FP32, TILES_TF32], ids=["16", "fp32", "tf32"])
def test_the_model_against_dealing_tiles(found, num_sms):
    for m, n in ((1, 1), (64, 5000), (1024, 1024), (2048, 2048), (2049, 2048), (3000, 700)):
        ordered = by_model(m, n, found, num_sms)
        # Of equal times those that are faster at large sizes come first.
        assert ordered == sorted(
            found, key=lambda plan: (model_time(m, n, plan, num_sms), found.index(plan))
        )


def test_large_matrices_get_large_tiles_and_small_ones_small_tiles():
    def first(side: int) -> tuple[int, int]:
        best = by_model(side, side, HOPPER, 132)[0].config
        return best.tile_m, best.tile_n

    # 4096: 1024 tiles of 128 x 128 are eight waves of 132, the last nearly full.
    assert first(4096) == first(8192) == first(16384) == (128, 128)
    # 1024: those would be 32 tiles for 132 SMs; 256 of 64 x 64 are two waves, 128 are one.
    assert first(1024) == (64, 128)
    assert first(64) == (64, 64)


# TF32


@pytest.fixture
def tf32_switch(monkeypatch):
    """As on a GPU of capability 9.0, which need not be there; the switch is put back."""
    monkeypatch.setattr(matmul_plans.machine, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    before = torch.get_float32_matmul_precision()
    yield torch.backends.cuda.matmul
    torch.set_float32_matmul_precision(before)


CUDA = torch.device("cuda", 0)


def test_tf32_where_pytorch_allows_it(tf32_switch):
    for choice, expected in (("high", "tf32"), ("medium", "tf32"), ("highest", "ieee")):
        torch.set_float32_matmul_precision(choice)
        assert precision(FP32, CUDA) == expected
        assert precision(FP16, CUDA) == precision(BF16, CUDA) == "ieee"
        assert precision(FP32, torch.device("cpu")) == "ieee"
    for allowed, expected in ((True, "tf32"), (False, "ieee")):
        tf32_switch.allow_tf32 = allowed
        assert precision(FP32, CUDA) == expected


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="an older PyTorch"
)
def test_tf32_by_the_newer_switch(tf32_switch):
    for allowed, expected in (("tf32", "tf32"), ("ieee", "ieee")):
        tf32_switch.fp32_precision = allowed
        assert precision(FP32, CUDA) == expected
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "switches, expected",
    [
        (dict(allow_tf32=True), "tf32"),  # before PyTorch 2.9
        (dict(allow_tf32=False), "ieee"),
        (dict(fp32_precision="none"), "ieee"),  # before anything has been chosen
    ],
    ids=str,
)
def test_other_states_of_the_switch(tf32_switch, monkeypatch, switches, expected):
    monkeypatch.setattr(torch.backends.cuda, "matmul", types.SimpleNamespace(**switches))
    assert precision(FP32, CUDA) == expected


def test_no_tf32_where_there_is_none(tf32_switch, monkeypatch):
    torch.set_float32_matmul_precision("high")
    assert precision(FP32, CUDA) == "tf32"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert precision(FP32, CUDA) == "ieee"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert precision(FP32, CUDA) == "tf32"
    monkeypatch.setattr(matmul_plans.machine, "interpreting", lambda: True)
    assert precision(FP32, CUDA) == "ieee"


# Launching


FIRST, SECOND, THIRD = (Plan("tiles", Config(side, 64, 64), 1.0) for side in (64, 128, 256))


class Launches:
    """Stands for all three kernels, and fails for the plans in `too_large`."""

    def __init__(self):
        self.launched, self.too_large = [], set()

    def __call__(self, a, b, c, config, activation, **options):
        self.launched.append((config, activation, options))
        if config in self.too_large:
            raise OutOfResources(300_000, 232_448, "shared memory")


@pytest.fixture
def launches(monkeypatch):
    fake = Launches()
    for name in LAUNCHES:
        monkeypatch.setitem(LAUNCHES, name, fake)
    return fake


@pytest.mark.case("E16")
@needs_triton
def test_a_plan_that_does_not_fit_is_passed_over(monkeypatch, launches):
    """Case E16."""
    monkeypatch.setattr(matmul_plans, "plans_for", lambda *_: [FIRST, SECOND, THIRD])
    launches.too_large = {FIRST.config}
    x = torch.zeros(3, 3, device=DEVICE)
    launch_triton_matmul(x, x, x, "gelu")
    assert launches.launched == [
        (plan.config, "gelu", {"precision": "ieee"}) for plan in (FIRST, SECOND)
    ]
    launches.too_large = {FIRST.config, SECOND.config, THIRD.config}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this GPU")
    with pytest.raises(RuntimeError, match="no plan of this matmul fits this GPU"):
        launch_triton_matmul(x, x, x)


@needs_triton
def test_other_errors_are_not_passed_over(monkeypatch):
    def launch(*_, **__):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setitem(LAUNCHES, "tiles", launch)
    monkeypatch.setattr(matmul_plans, "plans_for", lambda *_: [FIRST, SECOND])
    x = torch.zeros(3, 3, device=DEVICE)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        launch_triton_matmul(x, x, x)


def test_precision_is_told_to_the_kernel_that_can_choose(launches):
    x = torch.zeros(3, 3, device=DEVICE)
    for name, options in (("tiles", {"precision": "ieee"}), ("persistent", {}), ("pingpong", {})):
        assert matmul_plans.run(Plan(name, FIRST.config, 1.0), x, x, x)
        assert launches.launched.pop() == (FIRST.config, None, options)


# Which plans, and when they are timed


@pytest.fixture
def hopper(monkeypatch, launches):
    """As on an H200 in the profile full; `timed` lists the plans of each tuning."""
    faked = types.SimpleNamespace(launches=launches, timed=[], profile="full", capturing=False)

    def in_turn(runs, rounds, ms):
        faked.timed.append(list(runs))
        for run in runs.values():
            assert run()
        return {plan: len(runs) - place for place, plan in enumerate(runs)}  # the last is best

    for kept in ("_predicted", "_fastest"):
        monkeypatch.setattr(matmul_plans, kept, {})
    monkeypatch.setattr(matmul_plans, "in_turn", in_turn)
    monkeypatch.setattr(matmul_plans, "sms", lambda device: 132)
    monkeypatch.setattr(matmul_plans.machine, "interpreting", lambda: False)
    monkeypatch.setattr(matmul_plans.machine, "profile", lambda: faked.profile)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: faked.capturing)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return faked


def matrices(m: int, k: int, n: int, dtype=FP16) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype) for shape in ((m, k), (k, n), (m, n))]


def test_plans_are_timed_once_for_each_kind_of_large_matmul(hopper):
    abc = matrices(2048, 2048, 2048)
    predicted = by_model(2048, 2048, HOPPER, 132)[:MOST_TRIED]
    assert plans_for(*abc) == predicted[::-1]
    assert hopper.timed == [predicted]
    assert plans_for(*abc) == predicted[::-1] and len(hopper.timed) == 1
    a, b, c = abc
    others = (
        (a, b, c, "gelu"),
        (a.t(), b, c),
        (a, b.t(), c),
        [x.to(BF16) for x in abc],
        matrices(2048, 2049, 2048),
        matrices(4096, 2048, 2048),
        matrices(2048, 2048, 4096),
    )
    for count, other in enumerate(others, start=2):
        plans_for(*other)
        assert len(hopper.timed) == count
        plans_for(*other)
        assert len(hopper.timed) == count
    assert {activation for _, activation, _ in hopper.launches.launched} == {None, "gelu"}


def test_only_the_best_by_the_model_are_timed(hopper, monkeypatch):
    monkeypatch.setattr(matmul_plans, "MOST_TRIED", 3)
    best = by_model(2048, 2048, HOPPER, 132)[:3]
    assert plans_for(*matrices(2048, 2048, 2048)) == best[::-1]
    assert hopper.timed == [best]


def test_what_does_not_fit_is_not_timed(hopper):
    predicted = by_model(2048, 2048, HOPPER, 132)[:MOST_TRIED]
    hopper.launches.too_large = {predicted[0].config, predicted[2].config}
    fit = [predicted[1], *predicted[3:]]
    assert plans_for(*matrices(2048, 2048, 2048)) == fit[::-1]
    assert hopper.timed == [fit]


def test_nothing_is_timed_in_smoke_or_while_a_graph_is_captured_or_for_small_sizes(hopper):
    abc = matrices(2048, 2048, 2048)
    predicted = by_model(2048, 2048, HOPPER, 132)
    hopper.profile = "smoke"
    assert plans_for(*abc) == predicted
    for m, n in ((520, 16384), (16384, 520)):
        assert plans_for(*matrices(m, 64, n)) == by_model(m, n, HOPPER, 132)
    hopper.profile, hopper.capturing = "full", True
    assert plans_for(*abc) == predicted
    hopper.capturing = False
    assert 2048 * 2047 * 2048 < TUNED_FROM == 2048**3
    assert set(plans_for(*matrices(2048, 2047, 2048))) <= set(
        plans((9, 0), FP16, "ieee", described=False)
    )
    assert not hopper.timed and not hopper.launches.launched
    chosen = plans_for(*abc)  # now it may be
    assert len(hopper.timed) == 1
    hopper.capturing = True  # what was found before is what is captured
    assert plans_for(*abc) == chosen != predicted


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, c: (a.as_strided(a.shape, a.stride(), 1), b, c),
        lambda a, b, c: (a, b[:, ::2].expand(-1, -1), c[:, :32]),
        lambda a, b, c: (a, b, c.t()),
        lambda a, b, c: (a, b, c.as_strided(c.shape, c.stride(), 1)),
        lambda a, b, c: (a[:1].expand(64, 64), b, c),
    ],
    ids=["A off a boundary", "gaps in B", "C by columns", "C off a boundary", "A expanded"],
)
def test_what_has_no_descriptor_is_read_through_pointers(hopper, change):
    abc = [x[:64] for x in matrices(65, 64, 64)]  # with room for a view that begins later
    assert {plan.kernel for plan in plans_for(*abc)} == {"persistent", "pingpong"}
    assert {plan.kernel for plan in plans_for(*change(*abc))} == {"tiles"}


def test_fp32_by_what_it_is_multiplied_in(hopper, monkeypatch):
    abc = matrices(64, 64, 64, FP32)
    for multiplied, expected in (("ieee", TILES_FP32), ("tf32", HOPPER_TF32), ("ieee", TILES_FP32)):
        monkeypatch.setattr(matmul_plans, "precision", lambda *_, found=multiplied: found)
        assert set(plans_for(*abc)) == set(expected)


@pytest.mark.case("E01")
@pytest.mark.skipif(not interpreting(), reason="in the interpreter")
def test_the_interpreter_has_one_plan(monkeypatch):
    monkeypatch.setattr(matmul_plans.machine, "profile", lambda: "full")
    assert plans_for(*matrices(2048, 2048, 2048)) == [INTERPRETED]
    assert plans_for(*matrices(1, 1, 1, FP32), "gelu") == [INTERPRETED]


@pytest.mark.case("N31")
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_the_tuned_matmul_is_right(monkeypatch):
    monkeypatch.setattr(matmul_plans, "_fastest", {})
    monkeypatch.setattr(matmul_plans.machine, "profile", lambda: "full")
    a, b = operands(2048, 2048, 2048, BF16)
    c = torch.empty_like(a)
    launch_triton_matmul(a, b, c)
    (found,) = matmul_plans._fastest.values()
    assert 2 <= len(found) <= MOST_TRIED
    assert_product(c[:100], a[:100], b)
