"""Attention, changed wrongly on purpose: comparing with float64 must notice each change.

Beside q, k and v lies NaN, or a number; beside the result a number. On a GPU each mutant is
compiled for one to six launches, about 200 compilations in all; those of the Hopper kernel are left
out everywhere: one that misses a barrier waits forever.
"""

import functools
import inspect
import re
from unittest import mock

import pytest
import torch

from helpers import ptx
from helpers.check import assert_close
from helpers.device import interpreting, triton_version
from helpers.kernels import attention, attention_plans, attention_tiles
from helpers.kernels.attention_tiles import Config
from tests import test_softmax_mutants
from tests.test_attention import (
    BF16,
    FENCE,
    FP16,
    FP32,
    INF,
    NAN,
    assert_attention,
    by_token,
    lies_as,
    operands,
    surrounded,
    weights,
)
from tests.test_softmax_mutants import deadline, each_of

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")
MODULES = (attention_tiles, attention_plans, attention)  # each after what it imports


changed = functools.partial(test_softmax_mutants.changed, all_modules=MODULES)


def placed(x: torch.Tensor, order: tuple[int, ...], fill: float):
    """A buffer full of one number, and x within it, its dimensions in this order in memory."""
    back = torch.tensor(order).argsort().tolist()
    whole, inside = surrounded(x.permute(order), fill)
    return whole, inside.permute(back)


def check_launch(launch, tensors, config: Config, causal: bool, scale: float, fill: float) -> None:
    """No two tensors have the same strides, nor are those of any one alike or 1."""
    q, k, v = (
        placed(x, order, fill)[1]
        for x, order in zip(tensors, ((0, 2, 1, 3), (0, 1, 3, 2), (2, 0, 1, 3)), strict=True)
    )
    whole, o = placed(torch.full_like(q, -7), (1, 3, 0, 2), FENCE)
    launch(q, k, v, o, config, causal, scale)
    assert_attention(o, q, k, v, causal, scale)
    o.fill_(FENCE)
    assert whole.eq(FENCE).all(), "written outside"


def check_tiles(modules) -> None:
    """The last tiles are not whole; tiles of queries and of keys differ."""
    launch = modules["attention_tiles"].launch_tiles
    wide, flat = Config(16, 32), Config(32, 16)
    for (queries, keys, dim), dtype, heads, config, causal, fill in (
        ((33, 20, 17), FP32, (1, 1, 1), flat, True, NAN),
        ((17, 18, 16), FP16, (1, 1, 1), Config(16, 16), True, FENCE),
        ((5, 33, 16), BF16, (2, 2, 2), wide, False, FENCE),
        ((17, 37, 5), FP32, (1, 4, 2), wide, True, NAN),
    ):
        batch, heads, kv_heads = heads
        x = operands(queries, keys, dim, dtype, batch, heads, kv_heads)
        check_launch(launch, x, config, causal, 0.3, fill)
    q, k, v = operands(3, 40)
    q[0, :, :, 0], k[..., 0] = 32, torch.linspace(400, 100, 40)
    q[0, 1] *= -1  # from -800 up, times the scale; the other head from 800 down
    check_launch(launch, (q, k, v), wide, False, 0.0625, NAN)
    q, k, v = (x.abs() for x in operands(3, 40))
    q[0, :, 1], k[:, 0, :33], k[:, 1, 32:] = INF, INF, INF
    check_launch(launch, (-q, k, v), wide, False, 1.0, NAN)  # nothing but -inf, or in one tile


def check_public(modules) -> None:
    module = modules["attention"]
    q, k, v = operands(20, 19, 9, kv_heads=1)
    for scale, causal in ((None, True), (0.7, False), (-0.5, True), (0, False), (1e-60, True)):
        for x in (q.mT.contiguous().mT, by_token(q)):
            o = module.flash_attention(x, k, v, causal, scale)
            assert_attention(o, q, k, v, causal, scale)
            assert lies_as(o, x)
    negated = [*map(torch._neg_view, (q, k, v))]
    for place in range(3):
        x = [q, k, v]
        x[place] = negated[place]
        assert_attention(module.flash_attention(*x), *(y.resolve_neg() for y in x))
    with mock.patch.object(module, "launch_attention", side_effect=AssertionError("launched")):
        assert module.flash_attention(q[:, :, :0], k, v).numel() == 0
        with mock.patch.object(torch, "empty_like", torch.ones_like):
            assert not module.flash_attention(q, k[:, :, :0], v[:, :, :0]).any()


def check_reference(modules) -> None:
    for causal, dtype in ((False, FP32), (True, BF16)):
        q, k, v = operands(9, 14, dtype=dtype, batch=2, heads=4, kv_heads=2)
        q = q * 6
        found = modules["attention"].attention_reference(q, k, v, causal, 0.3)
        x = [y.cpu().double() for y in (q, k, v)]
        w = weights(*x[:2], causal, 0.3)[1]
        assert_close(found, w @ x[2].repeat_interleave(2, 1), 1e-5 if dtype == FP32 else 3e-3)
        assert found.dtype == dtype


CHECKS = {
    "tiles": (check_tiles, attention_tiles),
    "interpreted": (check_tiles, attention_tiles),
    "public": (check_public, attention),
    "reference": (check_reference, attention),
}


@pytest.mark.parametrize("kernel", CHECKS)
def test_unchanged_kernels_are_right(tmp_path, kernel):
    check, owner = CHECKS[kernel]
    check(changed(tmp_path, owner, "import", "import"))


MAXIMUM = "tl.maximum(m, tl.max(s, axis=1) * scale)"
ROWS_MASK = "(row[:, None] < rows) & (column < DIM)"
STORE = "mask=(i[:, None] < queries) & (column < DIM))"
CALL = " launch_flash_attention(q, k, v, o, causal, scale, lse)"
END = "tl.minimum(queries, tile * TILE_Q + TILE_Q)"
MUTANTS = {
    "tiles": {
        "keys beyond the last read": (ROWS_MASK, "(column < DIM)"),
        "columns not masked with rows": (ROWS_MASK, "(row[:, None] < rows)"),
        "columns not masked": ("if WIDTH > DIM:", "if False:"),
        "one row too few": ("(row[:, None] < rows)", "(row[:, None] < rows - 1)"),
        "a column too few": (ROWS_MASK, "(row[:, None] < rows) & (column < DIM - 1)"),
        "rows for columns": ("* row_stride + column * stride", "* stride + column * row_stride"),
        "always the first keys": ("j = first + tl.arange", "j = 0 * first + tl.arange"),
        "always the first values": ("load_rows(v_ptr, j,", "load_rows(v_ptr, j - first,"),
        "k's strides for v": ("v_stride[2], v_stride[3]", "k_stride[2], k_stride[3]"),
        "v's strides for k": ("k_stride[2], k_stride[3]", "v_stride[2], v_stride[3]"),
        "not masked": ("s = tl.where(j[None, :] <= last[:, None], s, ", "_ = (s, "),
        "masked with 0": ('last[:, None], s, -float("inf"))', "last[:, None], s, 0.0)"),
        "a key too few": ("j[None, :] <= last", "j[None, :] < last"),
        "a key too many": ("else keys - 1 + 0", "else keys + 0"),
        "the next key too": ("tl.minimum(i, keys - 1)", "tl.minimum(i + 1, keys - 1)"),
        "not its own key": ("tl.minimum(i, keys - 1)", "tl.minimum(i - 1, keys - 1)"),
        "the end forgotten": ("tl.minimum(i, keys - 1)", "i"),
        "not causal": ("if CAUSAL else keys - 1", "if False else keys - 1"),
        "causal from the last query": (
            "tl.minimum(i, keys - 1)",
            "tl.minimum(i + keys - 17, keys - 1)",
        ),
        "scale twice": (
            "k.T, input_precision=PRECISION)",
            "k.T, input_precision=PRECISION) * scale",
        ),
        "scale forgotten": ("scale * LOG2_E", "LOG2_E"),
        "scale without log2 e": ("scale * LOG2_E", "scale"),
        "base e": ("tl.exp2(s * scale", "tl.exp(s * scale"),
        "a coarse log2 e": ("LOG2_E = 1 / math.log(2)", "LOG2_E = 1.443"),
        "scores in 16 bits": (
            "k.T, input_precision=PRECISION)",
            "k.T, input_precision=PRECISION).to(tl.float16).to(tl.float32)",
        ),
        "maximum not scaled": (MAXIMUM, "tl.maximum(m, tl.max(s, axis=1))"),
        "maximum of the last tile": (MAXIMUM, "tl.max(s, axis=1) * scale"),
        "maximum of the first tile": (
            "m_new = " + MAXIMUM,
            'm_new = tl.where(m == -float("inf"), tl.max(s, axis=1) * scale, m)',
        ),
        "no maximum": ("m_new = " + MAXIMUM, "m_new = 0 * " + MAXIMUM),
        "minimum": ("tl.max(s, axis=1)", "tl.min(s, axis=1)"),
        "maximum from 0 on": (
            'm, l = tl.full((TILE_Q,), -float("inf"), tl.float32)',
            "m, l = tl.zeros((TILE_Q,), tl.float32)",
        ),
        "NaN after -inf": ('tl.where(m_new == -float("inf"), 0.0, m_new)', "m_new"),
        "l not rescaled": ("l * rescale +", "l +"),
        "o not rescaled": ("o * rescale[:, None]", "o"),
        "rescaled the wrong way": ("tl.exp2(m - shift)", "tl.exp2(shift - m)"),
        "rescaled by nothing": ("tl.exp2(m - shift)", "tl.exp2(m_new - shift)"),
        "rescaled as in base e": ("tl.exp2(m - shift)", "tl.exp(m - shift)"),
        "new weights rescaled": (
            "l = l * rescale + tl.sum(p, axis=1)",
            "l = (l + tl.sum(p, axis=1)) * rescale",
        ),
        "l of the last tile": ("l = l * rescale +", "l = 0 * l +"),
        "o of the last tile": ("o * rescale[:, None]", "o * 0"),
        "l rescaled twice": ("l * rescale +", "l * rescale * rescale +"),
        "the old maximum kept": ("return m_new, l, o", "return m, l, o"),
        "weights in 16 bits": ("p = p.to(v.dtype)", "p = p.to(tl.float16).to(v.dtype)"),
        "a tile of queries too far": (
            "tiles - 1 - tl.program_id(0) % tiles",
            "tiles - tl.program_id(0) % tiles",
        ),
        "batch and head exchanged": ("pair // heads, pair % heads", "pair % heads, pair // heads"),
        "heads in batches of one": ("pair // heads, pair % heads", "pair * 0, pair % heads"),
        "k's heads not shared": (
            "k_ptr += batch * k_stride[0] + head // group",
            "k_ptr += batch * k_stride[0] + head",
        ),
        "v's heads not shared": (
            "v_ptr += batch * v_stride[0] + head // group",
            "v_ptr += batch * v_stride[0] + head",
        ),
        "heads far apart share": ("head // group *", "head % (heads // group) *"),
        "batches without keys of their own": ("batch * k_stride[0]", "0 * k_stride[0]"),
        "v's batches by k's stride": ("batch * v_stride[0]", "batch * k_stride[0]"),
        "q's strides for o": (
            "batch * o_stride[0] + head * o_stride[1]",
            "batch * q_stride[0] + head * q_stride[1]",
        ),
        "q's batches as heads": (
            "batch * q_stride[0] + head * q_stride[1]",
            "batch * q_stride[1] + head * q_stride[0]",
        ),
        "queries by tiles of keys": ("i = tile * TILE_Q", "i = tile * TILE_K"),
        "the first queries": ("i = tile * TILE_Q", "i = 0 * tile * TILE_Q"),
        "causal, a tile without a mask": (
            "tile * TILE_Q + 1) // TILE_K",
            "tile * TILE_Q + TILE_Q) // TILE_K",
        ),
        "full, the last tile without a mask": (
            "full, end = keys // TILE_K * TILE_K",
            "full, end = tl.cdiv(keys, TILE_K) * TILE_K",
        ),
        "causal, without masks": ("CAUSAL, True, PRECISION", "CAUSAL, False, PRECISION"),
        "the first tile left out": ("range(0, full, TILE_K)", "range(TILE_K, full, TILE_K)"),
        "tiles that overlap": ("range(0, full, TILE_K)", "range(0, full, TILE_K // 2)"),
        "the first masked tile left out": ("range(full, end,", "range(full + TILE_K, end,"),
        "the last full tile twice": ("range(full, end,", "range(full - TILE_K, end,"),
        "causal, the diagonal left out": (END, "tile * TILE_Q"),
        "causal, one key too few": (END, END + " - 1"),
        "causal, beyond the last key": (
            "tl.minimum(keys, tile * TILE_Q + 1)",
            "(tile * TILE_Q + 1)",
        ),
        "full, the last keys left out": ("* TILE_K, keys\n", "* TILE_K, keys - 1\n"),
        "0 by 0": ("tl.where(l == 0, 1.0, l)", "l"),
        "not divided": ("o / tl.where(l == 0, 1.0, l)[:, None]", "o"),
        "queries beyond the last written": (STORE, "mask=(column < DIM))"),
        "columns beyond the last written": (STORE, "mask=(i[:, None] < queries))"),
        "one query too many written": (STORE, STORE.replace("<", "<=", 1)),
        "one query too few written": (STORE, STORE.replace("queries", "queries - 1")),
        "o's strides exchanged": (
            "* o_stride[2] + column * o_stride[3]",
            "* o_stride[3] + column * o_stride[2]",
        ),
        "grid rounded down": (
            "triton.cdiv(queries, rows)",
            "max(1, queries // rows)",
        ),
        "a head too few": ("blocks = batch * heads *", "blocks = (batch * heads - 1) *"),
        "launched with k's and v's strides exchanged": (
            "k.stride(), v.stride()",
            "v.stride(), k.stride()",
        ),
        "launched without groups": ("heads // k.shape[1]", "1"),
        "launched with k's heads": ("*(heads, heads //", "*(k.shape[1], heads //"),
        "launched with lengths exchanged": ("queries, k.shape[2],", "k.shape[2], queries,"),
        "launched with tiles exchanged": (
            "config.tile_q, config.tile_k)",
            "config.tile_k, config.tile_q)",
        ),
        "launched the other way": ("*(causal, precision", "*(not causal, precision"),
        "launched for heads of powers of two": (
            "*(dim, max(16",
            "*(triton.next_power_of_2(dim), max(16",
        ),
    },
    "interpreted": {
        "bits of bf16 multiplied": ("if UPCAST:", "if False:"),
        "bits of bf16 scores": ("q, k = q.to(tl.float32), k.to(tl.float32)", "q, k = q, k"),
        "bits of bf16 weights": ("p, v = p.to(tl.float32), v.to(tl.float32)", "p, v = p, v"),
    },
    "public": {
        "a view's sign forgotten": ("x.resolve_neg() for x in", "x for x in"),
        "scale of another dim": ("max(1, q.shape[3]) ** -0.5", "16 ** -0.5"),
        "scale not of the root": ("max(1, q.shape[3]) ** -0.5", "1 / q.shape[-1]"),
        "negative scales as they are": ("scale < LEAST_SCALE:", "abs(scale) < LEAST_SCALE:"),
        "negative scales without their sign": ("(-1, -scale)", "(1, -scale)"),
        "scale of 0 taken for 1": ("else (0, 1.0)", "else (1, 1.0)"),
        "the smallest scales as they are": ("scale < LEAST_SCALE:", "scale <= 0:"),
        "scale not passed on": (CALL, CALL.replace("scale, lse)", "None, lse)")),
        "causal not passed on": (CALL, CALL.replace("causal,", "False,")),
        "always causal": (CALL, CALL.replace("causal,", "True,")),
        "keys and values exchanged": ("launch_attention(q, k, v,", "launch_attention(q, v, k,"),
        "launched without a result": ("if not o.numel():", "if False:"),
        "launched without keys": ("if not k.numel():", "if False:"),
        "whatever there was without keys": ("        o.zero_()\n", ""),
        "laid out as q": ("o = empty_as(q)", "o = torch.empty_like(q)"),
        "laid out head by head": ("o = empty_as(q)", "o = q.new_empty(q.shape)"),
    },
    "reference": {
        "scale forgotten": ("k.transpose(-2, -1) * _scale(q, scale)", "k.transpose(-2, -1)"),
        "causal from the last query": (".tril()", ".tril(k.shape[2] - q.shape[2])"),
        "the next key too": (".tril()", ".tril(1)"),
        "mask the other way": (".tril()", ".triu()"),
        "heads far apart share": (
            "x.to(dtype).repeat_interleave(group, dim=1)",
            "x.to(dtype).repeat(1, group, 1, 1)",
        ),
        "computed in 16 bits": ("torch.promote_types(q.dtype, torch.float32)", "q.dtype"),
        "weights of queries": ("nothing, 0), dim=-1)", "nothing, 0), dim=-2)"),
    },
}


@pytest.mark.parametrize("kernel, old, new", each_of(MUTANTS))
def test_a_mutant_is_noticed(tmp_path, kernel, old, new):
    if kernel == "interpreted" and not interpreting():
        pytest.skip("of the interpreter")
    check, owner = CHECKS[kernel]
    modules = changed(tmp_path, owner, old, new)  # which asserts too, that there is an `old`
    with deadline(), pytest.raises(AssertionError):
        check(modules)


def test_offsets_are_64_bits_wide(tmp_path):
    """Case N15: beyond 2^31 elements a product of an index and a stride in 32 bits wraps around."""
    parameters = inspect.signature(attention_tiles.attention_tiles_kernel.fn).parameters
    constants = dict(DIM=16, WIDTH=16, TILE_Q=16, TILE_K=32, CAUSAL=True)
    constants |= dict(PRECISION="ieee", UPCAST=False)
    kinds = {"ptr": "*fp16", "stride": ("i32",) * 4, "scale": "fp32"}
    types = {name: kinds.get(name.rpartition("_")[2], "i32") for name in parameters}
    types = {name: kind for name, kind in types.items() if name not in constants}
    requests = []
    for new in (".to(tl.int64)", ""):
        (folder := tmp_path / f"{len(requests)}").mkdir()
        kernel = changed(folder, attention_tiles, ".to(tl.int64)", new)["attention_tiles"]
        requests.append(ptx.Request(kernel.attention_tiles_kernel, types, constants))
    found = []
    for compiled in ptx.triton_compile_many(requests):
        # Not those with a constant: indices of tiles and of rows fit into 32 bits.
        product = r"arith\.muli %\w+, %(?!c\d)\w+ : (?:tensor<\w+x)?(i\d+)"
        found.append(re.findall(product, compiled.ttir))
    assert len(found[0]) >= 18  # 8 of batches and heads, 10 of rows and columns
    assert set(found[0]) == {"i64"} and found[1] == ["i32"] * len(found[0])
