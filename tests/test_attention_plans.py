"""Which attention kernel runs with which tiles, and who computes what: on machines that are faked.

Compiled, on a GPU, one of these tests takes two variants of the plain kernel.
"""

import contextlib
import itertools
import types

import pytest
import torch

from helpers.device import device, has_cuda, triton_version
from helpers.kernels import attention_deal, attention_plans, matmul_tiles
from helpers.kernels.attention import flash_attention
from helpers.kernels.attention_deal import LEAST_REUSE, imbalance, section
from helpers.kernels.attention_hopper import HopperConfig
from helpers.kernels.attention_plans import (
    INTERPRETED,
    WIDTHS,
    configs,
    has_descriptor,
    hopper_config,
    launch_attention,
)
from helpers.kernels.attention_tiles import Config
from helpers.kernels.matmul_plans import OutOfResources
from helpers.triton_mode import triton
from tests.test_attention import BF16, CAPABILITY, DTYPES, FP16, FP32, assert_attention, operands

DEVICE = device()
needs_triton = pytest.mark.skipif(not triton_version(), reason="needs Triton")
CAPABILITIES = [(7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
CAPABILITIES += [(8, 7), (11, 0), (12, 1), (14, 0)]  # that no test has met
DIMS = (1, 16, 31, 64, 65, 80, 128, 129, 200, 256)
MULTIPLIED = [(FP32, "ieee"), (FP32, "tf32"), (FP16, "ieee"), (BF16, "ieee")]


# The configurations of each generation


@needs_triton
@pytest.mark.case("E16")
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("dtype, multiplied", MULTIPLIED, ids=str)
def test_every_gpu_has_configurations(capability, dtype, multiplied):
    """Case E16: the last asks for little, and none for what tl.dot or a thread cannot take."""
    for dim in DIMS:
        found = configs(capability, dtype, dim, multiplied)
        assert found
        width = max(16, triton.next_power_of_2(dim))
        for c in found:
            assert c.warps in (1, 2, 4, 8) and c.stages >= 1
            for side in (c.tile_q, c.tile_k):
                assert side >= 16 and side & (side - 1) == 0
            # The scores and the result, at most three quarters of the registers in all.
            assert c.tile_q * (c.tile_k + width) <= 192 * 32 * c.warps
        last = found[-1]
        area = last.tile_q * last.tile_k
        assert area == min(c.tile_q * c.tile_k for c in found) <= 32 * 32
        assert (last.tile_q + 2 * last.tile_k) * width * dtype.itemsize <= 48 * 1024
        assert last.stages == 1


def test_wider_heads_never_get_larger_tiles():
    for capability, (dtype, multiplied) in itertools.product(CAPABILITIES, MULTIPLIED):
        areas = [
            c.tile_q * c.tile_k
            for c in (configs(capability, dtype, dim, multiplied)[0] for dim in WIDTHS)
        ]
        assert areas == sorted(areas, reverse=True)


@pytest.mark.parametrize(
    "dim, widest", [(16, 64), (48, 64), (80, 128), (144, 256), (1, 63), (72, 127)]
)
def test_configurations_go_by_the_width_that_fits(dim, widest):
    for capability in CAPABILITIES:
        assert configs(capability, FP16, dim, "ieee") == configs(capability, FP16, widest, "ieee")


@needs_triton
def test_hopper_has_three_groups_where_they_are_not_wasted():
    for dim, causal, queries in itertools.product(
        (8, 64, 72, 128, 136, 256), (False, True), (1, 512, 2048, 2049, 10**5)
    ):
        config = hopper_config(dim, queries, causal)
        width = max(64, triton.next_power_of_2(dim))
        assert config.groups in (2, 3) and config.tile_k in (64, 128)
        assert config.slots >= 3  # a tile's values, and the next one's keys and values
        # Queries and results of every group, and the ring: 227 KB less what barriers take.
        in_shared = 2 * width * (2 * 64 * config.groups + config.tile_k * config.slots)
        assert in_shared <= 227 * 1024 - 256
        assert width <= 128 or config.groups == 2  # three groups have 160 registers a thread
    assert hopper_config(64, 2049, True) == hopper_config(64, 1, False)
    assert hopper_config(64, 2049, True).groups == 3
    assert hopper_config(64, 2048, True).groups == 2


# What the copy engine can take

X = torch.zeros(2, 3, 40, 64, dtype=FP16)
DESCRIBED = {
    "dense": (X, True),
    "bf16": (X.bfloat16(), True),
    "fp32": (X.float(), False),
    "one head of each": (X[:, 1:2], True),
    "heads within tokens": (X.view(2, 40, 3, 64).transpose(1, 2), True),
    "every second token": (X[:, :, ::2], True),
    "dims of 24": (X[..., :24], True),
    "dims of 28": (X[..., :28], False),
    "dims of 28, dense": (torch.zeros(2, 3, 40, 28, dtype=FP16), False),
    "tokens of 28": (torch.zeros(2, 3, 40, 28, dtype=FP16)[..., :24], False),
    "from the eighth number on": (X[..., 8:16], True),
    "from the fourth number on": (X[..., 4:12], False),
    "every second number": (X[..., ::2], False),
    "tokens last": (X.view(2, 3, 64, 40).mT, False),
    "one number a token": (X[..., :1], False),
    "one token": (X[:, :, :1], True),
    "one token, of any distance": (X.as_strided((2, 3, 1, 64), (7680, 2560, 3, 1)), True),
    "heads at any distance": (X.as_strided((2, 3, 4, 64), (7680, 2564, 64, 1)), False),
    "batches, expanded": (X[:1].expand(2, -1, -1, -1), False),
    "heads, expanded": (X[:, :1].expand(-1, 3, -1, -1), False),
    "tokens, expanded": (X[:, :, :1].expand(-1, -1, 40, -1), False),
    "one batch, expanded": (X[:1].expand(1, -1, -1, -1), True),
    "too far apart": (torch.empty_strided((2, 1, 1, 8), (2**39, 8, 8, 1), device="meta"), False),
}


@pytest.mark.parametrize("x, expected", DESCRIBED.values(), ids=DESCRIBED)
def test_what_has_a_descriptor(x, expected):
    assert has_descriptor(x) == expected


# Who is launched


@pytest.fixture
def gpu(monkeypatch):
    """As on a GPU of any generation; `launched` lists what would run on it, `too_large` fails."""
    faked = types.SimpleNamespace(launched=[], too_large=set(), capability=(8, 0))

    def launch_tiles(q, k, v, o, config, causal, scale, precision, lse):
        faked.launched.append((config, causal, scale, precision))
        if config in faked.too_large:
            raise OutOfResources(300_000, 232_448, "shared memory")

    def launch_hopper(q, k, v, o, config, causal, scale, section, lse):
        faked.launched.append((config, causal, scale, section))

    monkeypatch.setattr(attention_plans, "launch_tiles", launch_tiles)
    monkeypatch.setattr(attention_plans, "launch_hopper", launch_hopper)
    monkeypatch.setattr(attention_plans, "interpreting", lambda: False)
    monkeypatch.setattr(attention_plans, "on_device_of", lambda x: contextlib.nullcontext())
    monkeypatch.setattr(attention_plans, "sms", lambda device: 132)
    monkeypatch.setattr(attention_plans, "precision", lambda dtype, device: "as told")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: faked.capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "this GPU")
    return faked


@pytest.mark.case("E16")
@needs_triton
def test_a_configuration_that_does_not_fit_is_passed_over(gpu, monkeypatch):
    """Case E16."""
    found = (Config(128, 128), Config(64, 64), Config(16, 16))
    asked = []
    monkeypatch.setattr(attention_plans, "configs", lambda *about: asked.append(about) or found)
    gpu.too_large = {*found[:2]}
    launch_attention(X, X, X, X, True, 0.5)
    assert gpu.launched == [(config, True, 0.5, "as told") for config in found]
    assert asked == [((8, 0), FP16, 64, "as told")]
    gpu.too_large = {found[0]}
    gpu.launched.clear()
    launch_attention(X, X, X, X, False, 2.0)
    assert gpu.launched == [(config, False, 2.0, "as told") for config in found[:2]]
    gpu.too_large = {*found}
    with pytest.raises(RuntimeError, match="no plan of attention fits this GPU"):
        launch_attention(X, X, X, X, True, 0.5)


@needs_triton
def test_other_errors_are_not_passed_over(gpu, monkeypatch):
    def launch(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(attention_plans, "launch_tiles", launch)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        launch_attention(X, X, X, X, False, 1.0)


def test_the_hopper_kernel_runs_where_all_tensors_can_be_described(gpu):
    for capability in CAPABILITIES:
        gpu.capability = capability
        launch_attention(X, X, X, X, False, 0.5)
        config, *options = gpu.launched.pop()
        assert isinstance(config, HopperConfig) == (capability == (9, 0))
        assert options == [False, 0.5, 1 if capability == (9, 0) else "as told"]
        assert not gpu.launched
    gpu.capability, other = (9, 0), X.view(2, 3, 64, 40).mT
    for place in range(4):
        tensors = [other if place == i else X for i in range(4)]
        launch_attention(*tensors, True, 0.5)
        assert isinstance(gpu.launched.pop()[0], Config)
    launch_attention(*4 * [X.float()], True, 0.5)
    assert isinstance(gpu.launched.pop()[0], Config)


def test_blocks_are_dealt_together_where_that_is_fairer(gpu):
    gpu.capability = (9, 0)
    for heads, n, dim in ((64, 4096, 128), (16, 16384, 128), (64, 8192, 64), (5, 300, 256)):
        x = torch.empty(1, 1, 1, 1, dtype=FP16).expand(1, heads, n, dim)
        x = torch.empty_strided(x.shape, (8, 8, 8, 1), dtype=FP16)
        for causal in (False, True):
            launch_attention(x, x, x, x, causal, 1.0)
            config, found, _, together = gpu.launched.pop()
            assert (config, found) == (hopper_config(dim, n, causal), causal)
            rows = 64 * config.groups
            assert together == (section(heads, -(-n // rows), 132, rows) if causal else 1)


@pytest.mark.case("E01")
@needs_triton
@pytest.mark.skipif(has_cuda(), reason="of the interpreter")
def test_the_interpreter_has_one_configuration(monkeypatch):
    seen = []
    monkeypatch.setattr(attention_plans, "launch_tiles", lambda *x, lse: seen.append((*x[4:], lse)))
    launch_attention(X, X, X, X, True, 0.5, "here")
    assert seen == [(INTERPRETED, True, 0.5, "here")]


@pytest.mark.case("E16")
@needs_triton
@pytest.mark.skipif(not has_cuda(), reason="needs a GPU")
def test_no_room_for_the_first_configuration(monkeypatch):
    """Case E16, with Triton's own error."""
    found = configs(CAPABILITY, FP32, 64, "ieee")
    monkeypatch.setattr(attention_plans, "configs", lambda *_: (Config(64, 128, 8, 6), *found))
    q, k, v = operands(100, 300, 64, FP32)
    assert_attention(flash_attention(q, k, v), q, k, v)


# Who computes which block

PROGRAMS = [
    # pairs of batch and head, queries, programs, how many pairs are dealt together
    *((1, 1, 1, 1), (1, 128, 3, 1), (3, 500, 7, 1), (3, 500, 7, 2), (3, 500, 7, 3), (5, 129, 4, 2)),
    *((6, 1000, 132, 4), (12, 1500, 132, 12), (7, 640, 16, 5), (4, 2000, 1, 3), (64, 129, 10, 8)),
]


def dealt(pairs, heads, queries, keys, programs, together, rows, causal) -> list[list[tuple]]:
    """Each program's blocks in turn, by `attention_deal.block_of` itself, run as plain Python."""
    least = types.SimpleNamespace(minimum=min)
    tile_of = types.FunctionType(_source(matmul_tiles.tile_of), {"tl": least})
    gl = types.SimpleNamespace(cdiv=lambda a, b: -(-a // b), minimum=min)
    gl.num_programs = lambda axis: programs
    block_of = types.FunctionType(_source(attention_deal.block_of), {"gl": gl, "tile_of": tile_of})
    sizes = (heads, 1, pairs, queries, keys, together)
    total = pairs * -(-queries // rows)
    return [
        [block_of(number, sizes, rows, causal) for number in range(program, total, programs)]
        for program in range(min(programs, total))
    ]


def _source(kernel) -> types.CodeType:
    return kernel.fn.__code__


@needs_triton
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("pairs, queries, programs, together", PROGRAMS)
def test_every_block_is_dealt_once(pairs, queries, programs, together, causal):
    heads = 3 if pairs % 3 == 0 else pairs
    for rows, keys in ((128, queries), (192, 100), (128, 2 * queries)):
        found = dealt(pairs, heads, queries, keys, programs, together, rows, causal)
        blocks = [block[:3] for program in found for block in program]
        assert sorted(blocks) == [
            (pair // heads, pair % heads, start)
            for pair in range(pairs)
            for start in range(0, queries, rows)
        ]
        for _, _, start, seen in itertools.chain(*found):
            assert seen == (min(keys, start + rows, queries) if causal else keys) > 0
        counts = [len(program) for program in found]
        assert max(counts) - min(counts) <= 1


@needs_triton
@pytest.mark.parametrize("pairs, queries, programs, together", PROGRAMS)
def test_the_imbalance_is_that_of_the_blocks_dealt(pairs, queries, programs, together):
    found = dealt(pairs, pairs, queries, queries, programs, together, 128, True)
    steps = [sum(start // 128 + 2 for _, _, start, _ in program) for program in found]
    steps += [0] * (programs - len(found))
    expected = max(steps) / (sum(steps) / programs)
    assert imbalance(pairs, -(-queries // 128), programs, together) == pytest.approx(expected)


@pytest.mark.parametrize("pairs, blocks", [(1, 1), (16, 128), (64, 32), (64, 8), (5, 3), (300, 20)])
@pytest.mark.parametrize("programs, rows", [(132, 128), (132, 192), (7, 128), (1, 128)])
def test_no_section_is_much_fairer(pairs, blocks, programs, rows):
    """Of those whose keys can come from memory in time."""
    found = section(pairs, blocks, programs, rows)
    most = min(pairs, max(1, rows * programs // LEAST_REUSE))
    assert 1 <= found <= most
    tried = {2**i for i in range(most.bit_length())} | {most}
    fairest = min(imbalance(pairs, blocks, programs, size) for size in tried if size <= most)
    assert imbalance(pairs, blocks, programs, found) <= fairest + 0.03
    assert all(
        imbalance(pairs, blocks, programs, size) > fairest + 0.01 for size in tried if size < found
    )


def test_so_many_blocks_are_not_looked_at(monkeypatch):
    monkeypatch.setattr(attention_deal, "imbalance", lambda *_: pytest.fail("looked at"))
    assert section(2**20, 3, 132, 128) == 1


def test_deals_of_the_docstring():
    assert section(64, 32, 132, 128) == 1  # of 4096 tokens
    assert section(16, 128, 132, 128) > 1


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_chosen_kernel_is_right(dtype):
    q, k, v = operands(100, 130, 40, dtype, heads=4, kv_heads=2)
    assert_attention(flash_attention(q, k, v, True), q, k, v, True)
