"""The backward pass of attention, changed wrongly on purpose: float64 must notice each change.

Beside all that is read lies NaN, or a number; beside the gradients a number. On a GPU each mutant
of a kernel is compiled for one to five launches; those of the Hopper kernel are left out
everywhere: one that misses a barrier waits forever.
"""

import functools
import inspect
import re
from unittest import mock

import pytest
import torch

from helpers import ptx
from helpers.device import interpreting, triton_version
from helpers.kernels import (
    attention,
    attention_backward,
    attention_backward_plans,
    attention_tiles,
)
from helpers.kernels.attention_tiles import Config
from tests.test_attention import (
    BF16,
    DEVICE,
    FENCE,
    FP16,
    FP32,
    INF,
    NAN,
    by_token,
    lies_as,
)
from tests.test_attention_backward import (
    LOG2_E,
    Exact,
    all_operands,
    alone,
    assert_gradients,
    assert_weights_below_1,
    autograd,
    deltas,
    far_apart_scores,
    launch_keys,
    launch_queries,
    with_a_key_of_no_weight,
)
from tests.test_attention_mutants import placed
from tests.test_softmax_mutants import changed, deadline, each_of

pytestmark = pytest.mark.skipif(not triton_version(), reason="needs Triton")
ORDERS = [(0, 2, 1, 3), (0, 1, 3, 2), (2, 0, 1, 3), (1, 3, 0, 2), (3, 1, 0, 2)]  # q, k, v, o, do
GRADIENT_ORDERS = [(1, 0, 3, 2), (3, 0, 2, 1), (2, 3, 1, 0)]


def check_launch(launch, places, module, x, config: Config, causal: bool, scale, fill) -> None:
    """No two tensors have the same strides, nor are those of any one alike or 1."""
    exact = Exact(*x, causal, scale)
    tensors = *x[:3], exact.o.to(x[0]), x[3]
    q, k, v, o, do = (placed(y, order, fill)[1] for y, order in zip(tensors, ORDERS, strict=True))
    lse = alone(exact.lse.to(DEVICE, FP32), fill)[1]
    buffers = [
        placed(torch.full_like(y, -7), order, FENCE)
        for y, order in zip(x[:3], GRADIENT_ORDERS, strict=True)
    ]
    gradients = [y for _, y in buffers]
    launch(q, k, v, o, lse, do, *gradients, causal, exact.scale, config, module)
    assert_gradients([y if i in places else None for i, y in enumerate(gradients)], exact)
    for i in places:
        gradients[i].fill_(FENCE)
        assert buffers[i][0].eq(FENCE).all(), "written outside"


def check_both(launch, places, modules) -> None:
    """The last tiles are not whole; tiles of queries and of keys differ."""
    module = modules["attention_backward"]
    module.DELTA_ROWS = 16  # several tiles of them as well
    wide, flat = Config(16, 32), Config(32, 16)
    for (queries, keys, dim), dtype, heads, config, causal, fill in (
        ((17, 18, 16), FP16, (1, 1, 1), Config(16, 16), True, FENCE),
        ((5, 9, 5), FP32, (2, 2, 1), wide, False, NAN),
        ((5, 9, 5), FP32, (1, 4, 2), wide, True, NAN),
        ((33, 5, 16), BF16, (1, 1, 1), flat, False, FENCE),
        ((50, 20, 17), FP32, (1, 1, 1), flat, True, NAN),
        ((17, 37, 5), FP32, (1, 2, 1), wide, True, NAN),
        ((40, 40, 16), FP16, (1, 1, 1), wide, False, NAN),
    ):
        x = all_operands(queries, keys, dim, dtype, *heads)
        check_launch(launch, places, module, x, config, causal, 0.3, fill)
    x = far_apart_scores(1e9)
    exact, found = Exact(*x), [torch.empty_like(y) for y in x[:3]]
    forward = exact.o.to(x[0]), exact.lse.to(DEVICE, FP32)
    launch(*x[:3], *forward, x[3], *found, False, exact.scale, flat, module)
    assert_weights_below_1([y if i in places else None for i, y in enumerate(found)], exact)


def check_keys(modules) -> None:
    check_both(launch_keys, (1, 2), modules)
    x, module = with_a_key_of_no_weight(), modules["attention_backward"]
    exact, found = Exact(*x), [torch.empty_like(y) for y in x[:3]]
    forward = exact.o.to(x[0]), exact.lse.to(DEVICE, FP32)
    launch_keys(*x[:3], *forward, x[3], *found, False, exact.scale, Config(32, 16), module)
    assert not found[1][..., 5, :].any() and not found[2][..., 5, :].any()


def check_delta(modules) -> None:
    module = modules["attention_backward"]
    module.DELTA_ROWS = 16
    for (queries, dim), dtype, heads, fill in (
        ((47, 17), FP32, (2, 3), NAN),
        ((16, 16), FP16, (1, 2), FENCE),
        ((5, 5), BF16, (1, 1), NAN),
    ):
        batch, heads = heads
        o, _, _, do = all_operands(queries, 3, dim, dtype, batch, heads)
        o, do = placed(o, ORDERS[3], fill)[1], placed(do, ORDERS[4], fill)[1]
        deltas(o, torch.empty(o.shape[:3], device=DEVICE), do, module)


def check_lse(modules) -> None:
    for (queries, keys), heads, config, causal in (
        ((17, 37), (2, 2, 1), Config(16, 32), True),
        ((37, 18), (1, 2, 1), Config(16, 16), False),
    ):
        q, k, v, do = all_operands(queries, keys, 16, FP32, *heads)
        k[..., 0], q[..., 0] = torch.linspace(-3, 3, keys), 3
        if not causal:
            q[..., 1], k[..., 1], q[0, 1, 3, 1] = 0, 1e30, -1e30
        exact = Exact(q, k, v, do, causal, 0.3)
        assert exact.lse.eq(INF).sum() == (0 if causal else 1)
        whole, lse = alone(torch.full(q.shape[:3], -7.0, device=DEVICE), FENCE)
        modules["attention_tiles"].launch_tiles(
            q, k, v, torch.empty_like(q), config, causal, 0.3, lse=lse
        )
        lse_there, seen = lse.cpu(), exact.lse < INF
        assert torch.equal(lse_there == INF, ~seen)
        gap, allowed = (lse_there - exact.lse).abs(), exact.lse_error() * LOG2_E
        assert (gap <= allowed)[seen].all()
        lse.fill_(FENCE)
        assert whole.eq(FENCE).all(), "written outside"


def check_public(modules) -> None:
    module = modules["attention"]
    q, k, v, do = all_operands(20, 19, 9, heads=2)
    for scale, causal in ((None, True), (-0.5, False), (0, False)):
        x = by_token(q), k.mT.contiguous().mT, v, do.mT.contiguous().mT
        found = autograd(module.flash_attention, *x, causal, scale)
        assert_gradients(found, *x, causal, scale)
        assert all(map(lies_as, found, x))
    x = [torch._neg_view(q), k, torch._neg_view(v), torch._neg_view(do)]
    found = autograd(module.flash_attention, *x)
    assert_gradients(found, *(y.resolve_neg() for y in x))
    check_what_is_wanted(modules, q, k, v, do)
    check_what_is_kept(module, (q, k, v))
    check_refusals(module, q, k, v)


def check_what_is_wanted(modules, q, k, v, do) -> None:
    """Nothing else is launched, and nothing where there are no queries or no keys."""
    module, plans = modules["attention"], modules["attention_backward_plans"]
    fail, exact = mock.Mock(side_effect=AssertionError("launched")), Exact(q, k, v, do)
    for wanted in ((0,), (1,), (2,)):
        x = [y.clone().requires_grad_(i in wanted) for i, y in enumerate((q, k, v))]
        others = "launch_keys_gradient" if wanted == (0,) else "launch_queries_gradient"
        with mock.patch.object(plans, others, fail):
            module.flash_attention(*x).backward(do)
        assert [y.grad is not None for y in x] == [i in wanted for i in range(3)]
        assert_gradients([y.grad for y in x], exact)
    with (
        mock.patch.multiple(module, launch_attention=fail, launch_attention_backward=fail),
        mock.patch.object(torch, "empty_like", torch.ones_like),
    ):
        for queries, keys in ((0, 5), (5, 0)):
            x = [y[:, :, :n].clone() for y, n in ((q, queries), (k, keys), (v, keys))]
            x = [y.requires_grad_() for y in x]
            module.flash_attention(*x).sum().backward()
            assert not any(y.grad.any() for y in x)


def check_what_is_kept(module, x) -> None:
    """Nothing where no gradient can be asked for."""
    x = [y.clone().requires_grad_() for y in x]
    with mock.patch.object(module, "launch_attention", wraps=module.launch_attention) as launch:
        module.flash_attention(*(y.detach() for y in x))
        with torch.no_grad():
            module.flash_attention(*x)
    assert [call.args[-1] for call in launch.call_args_list] == [None, None], "lse is computed"


def check_refusals(module, q, k, v) -> None:
    for changed_later in range(4):
        x = [y.clone().requires_grad_() for y in (q, k, v)]
        o = module.flash_attention(*x)
        with torch.no_grad():
            (*x, o)[changed_later].mul_(2)
        assert refusal(lambda o=o: o.sum().backward(), "inplace"), "changed in place"
    x = [y.clone().requires_grad_() for y in (q, k, v)]
    first = torch.autograd.grad(module.flash_attention(*x).sin().sum(), x, create_graph=True)
    assert refusal(first[0].sum().backward, "once|twice|second"), "differentiated twice"


def refusal(run, text: str) -> bool:
    """Whether it raises RuntimeError with such a text."""
    try:
        run()
    except RuntimeError as error:
        return bool(re.search(text, str(error)))
    return False


PUBLIC = attention_backward_plans, attention
CHECKS = {  # the module that is changed, and all that the check takes, each after what it imports
    "keys": (check_keys, attention_backward),
    "queries": (functools.partial(check_both, launch_queries, (0,)), attention_backward),
    "interpreted": (functools.partial(check_both, launch_keys, (1, 2)), attention_backward),
    "delta": (check_delta, attention_backward),
    "lse": (check_lse, attention_tiles),
    "plans": (check_public, attention_backward_plans, PUBLIC),
    "public": (check_public, attention, PUBLIC),
}


def check_changed(folder, kernel: str, old: str, new: str) -> None:
    check, owner, *modules = CHECKS[kernel]
    loaded = changed(folder, owner, old, new, *(modules or [(owner,)]))
    with deadline():
        check(loaded)


@pytest.mark.parametrize("kernel", CHECKS)
def test_unchanged_kernels_are_right(tmp_path, kernel):
    check_changed(tmp_path, kernel, "import", "import")


STORE = "mask=(row[:, None] < rows) & (column < DIM))"
EXP = "tl.exp2(tl.minimum(s * scale - lse, 0.0, tl.PropagateNan.ALL))"
DS = "p * (dp - delta)"
VISIBLE = "(i < queries) & (j < keys) & (j <= i if CAUSAL else True)"
HIDDEN = "tl.where(visible, p, 0.0), tl.where(visible, ds, 0.0)"
PAIR = "pair // (heads // group), pair % (heads // group)"
HEADS = "range(0, group)"
HEAD = "head = kv_head * group + member"
ROW = "row = (batch * heads + head) * queries"
DIAGONAL = "tl.cdiv(first_key + TILE_K - 1, TILE_Q) * TILE_Q"
FIRST = "begin + step if step < diagonal else rest + step - diagonal"
RECOMPUTE_KEYS = "recompute_tile(k, q, v, do, i[None, :], j[:, None], lse[None, :], delta[None, :],"
RECOMPUTE_QUERIES = (
    "recompute_tile(q, k, do, v, i[:, None], j[None, :], lse[:, None], delta[:, None],"
)
END = "tl.minimum(queries, tile * TILE_Q + TILE_Q)"
BOTH = {  # in what both kernels share
    "scores without scale": (EXP, EXP.replace(" * scale", "")),
    "without lse": (EXP, EXP.replace(" - lse", "")),
    "base e": (EXP, EXP.replace("exp2", "exp")),
    "weights above 1": (EXP, "tl.exp2(s * scale - lse)"),
    "delta forgotten": (DS, "p * dp"),
    "delta added": (DS, "p * (dp + delta)"),
    "dp without p": (DS, "(dp - delta)"),
    "p for dp": (DS, "p * (p - delta)"),
    "delta weighed wrongly": (DS, "p * dp - delta"),
    "ds from scores": (DS, "s * (dp - delta)"),
    "nothing hidden": ("visible = " + VISIBLE, "visible = (j + i) > -1"),
    "not its own key": ("(j <= i if", "(j < i if"),
    "the next key too": ("(j <= i if", "(j <= i + 1 if"),
    "the mask transposed": ("(j <= i if", "(i <= j if"),
    "never causal": ("j <= i if CAUSAL", "j <= i if False"),
    "always causal": ("j <= i if CAUSAL", "j <= i if True"),
    "ds not hidden": (HIDDEN, "tl.where(visible, p, 0.0), ds"),
    "hidden with 1": (HIDDEN, "tl.where(visible, p, 1.0), tl.where(visible, ds, 1.0)"),
    "masked tiles not masked": (
        "    if MASKED:\n        visible",
        "    if False:\n        visible",
    ),
    "products of the last tile": ("tl.dot(a, b, total, ", "tl.dot(a, b, "),
    "p and ds in bf16": ("a = a.to(b.dtype)", "a = a.to(tl.bfloat16).to(b.dtype)"),
    "scale twice": (
        "queries, k.shape[2], scale, scale * LOG2_E",
        "queries, k.shape[2], scale * scale, scale * LOG2_E",
    ),
    "scale with log2 e": (
        "k.shape[2], scale, scale * LOG2_E",
        "k.shape[2], scale * LOG2_E, scale * LOG2_E",
    ),
    "scale without log2 e": ("scale, scale * LOG2_E", "scale, scale"),
    "rows beyond the last written": (STORE, "mask=(column < DIM))"),
    "columns beyond the last written": (STORE, "mask=(row[:, None] < rows))"),
    "one row too few written": (STORE, STORE.replace("rows)", "rows - 1)")),
    "one row too many written": (STORE, STORE.replace("< rows", "<= rows")),
    "one column too few written": (STORE, STORE.replace("DIM)", "DIM - 1)")),
    "strides exchanged": ("* row_stride + column * stride", "* stride + column * row_stride"),
    "launched without groups": ("*(heads, heads // k.shape[1],", "*(heads, 1,"),
    "launched with k's heads": ("*(heads, heads //", "*(k.shape[1], heads //"),
    "launched with lengths exchanged": (
        "queries, k.shape[2], scale,",
        "k.shape[2], queries, scale,",
    ),
    "launched with tiles exchanged": (
        "config.tile_q, config.tile_k)",
        "config.tile_k, config.tile_q)",
    ),
    "launched the other way": ("*(causal, precision", "*(not causal, precision"),
    "launched for heads of powers of two": (
        "*(dim, max(16, triton.next_power_of_2(dim)), config",
        "*(triton.next_power_of_2(dim), max(16, triton.next_power_of_2(dim)), config",
    ),
}
MUTANTS = {
    "keys": {
        "p not hidden": (HIDDEN, "p, tl.where(visible, ds, 0.0)"),
        "scale lost in dk": ("dk * scale", "dk"),
        "log2 e in dk": ("dk * scale", "dk * score_scale"),
        "scale in dv": ("dv_ptr, dv,", "dv_ptr, dv * scale,"),
        "dk and dv exchanged": ("dk, dv = state\n    dk_ptr", "dv, dk = state\n    dk_ptr"),
        "v's gradient of ds": ("add_product(dv, p, do,", "add_product(dv, ds, do,"),
        "k's gradient of p": ("add_product(dk, ds, q,", "add_product(dk, p, q,"),
        "v's gradient with q": ("add_product(dv, p, do,", "add_product(dv, p, q,"),
        "k's gradient with do": ("add_product(dk, ds, q,", "add_product(dk, ds, do,"),
        "always the first queries": (
            "i = first + tl.arange(0, TILE_Q)",
            "i = 0 * first + tl.arange(0, TILE_Q)",
        ),
        "do's strides for q": (
            "queries, q_stride[2], q_stride[3], DIM, WIDTH, MASKED",
            "queries, do_stride[2], do_stride[3], DIM, WIDTH, MASKED",
        ),
        "q's strides for do": (
            "queries, do_stride[2], do_stride[3], DIM, WIDTH, MASKED",
            "queries, q_stride[2], q_stride[3], DIM, WIDTH, MASKED",
        ),
        "queries past the end not hidden": ("(i < queries) & (j < keys)", "(j < keys)"),
        "a query too few": ("(i < queries) & (j", "(i < queries - 1) & (j"),
        "lse of one query too few": (
            "lse_ptr + i, mask=i < queries,",
            "lse_ptr + i, mask=i < queries - 1,",
        ),
        "delta of one query too few": (
            "delta_ptr + i, mask=i < queries,",
            "delta_ptr + i, mask=i < queries - 1,",
        ),
        "lse of the first queries": ("tl.load(lse_ptr + i,", "tl.load(lse_ptr + i - first,"),
        "delta of the first queries": ("tl.load(delta_ptr + i,", "tl.load(delta_ptr + i - first,"),
        "operands exchanged": (
            RECOMPUTE_KEYS,
            RECOMPUTE_KEYS.replace("k, q, v, do", "v, q, k, do"),
        ),
        "lse and delta exchanged": (
            RECOMPUTE_KEYS,
            RECOMPUTE_KEYS.replace("lse[None, :], delta", "delta[None, :], lse"),
        ),
        "the first keys": ("% tiles * TILE_K", "% tiles * 0"),
        "keys by tiles of queries": ("% tiles * TILE_K", "% tiles * TILE_Q"),
        "batch and head exchanged": (PAIR, "pair % (heads // group), pair // (heads // group)"),
        "heads in batches of one": (PAIR, "pair * 0, pair % (heads // group)"),
        "k's batches by v's stride": (
            "k_ptr += batch * k_stride[0]",
            "k_ptr += batch * v_stride[0]",
        ),
        "v's batches by k's stride": (
            "v_ptr += batch * v_stride[0]",
            "v_ptr += batch * k_stride[0]",
        ),
        "k's heads by v's stride": (
            "k_ptr += batch * k_stride[0] + kv_head * k_stride[1]",
            "k_ptr += batch * k_stride[0] + kv_head * v_stride[1]",
        ),
        "v's heads by k's stride": (
            "v_ptr += batch * v_stride[0] + kv_head * v_stride[1]",
            "v_ptr += batch * v_stride[0] + kv_head * k_stride[1]",
        ),
        "v's strides for k": (
            "keys, k_stride[2], k_stride[3], DIM, WIDTH, True",
            "keys, v_stride[2], v_stride[3], DIM, WIDTH, True",
        ),
        "k's strides for v": (
            "keys, v_stride[2], v_stride[3], DIM, WIDTH, True",
            "keys, k_stride[2], k_stride[3], DIM, WIDTH, True",
        ),
        "the diagonal for whole": ("full = tl.minimum(" + DIAGONAL, "full = tl.minimum(begin"),
        "one query less on the diagonal": (DIAGONAL, "(first_key + TILE_K - 1) // TILE_Q * TILE_Q"),
        "the tail for whole": (
            "whole = 0, 0, queries // TILE_Q * TILE_Q",
            "whole = 0, 0, tl.cdiv(queries, TILE_Q) * TILE_Q",
        ),
        "the tail twice": (
            "range(begin + diagonal, whole,",
            "range(begin + diagonal, whole + TILE_Q,",
        ),
        "the tail left out": ("range(0, diagonal + queries - rest,", "range(0, diagonal,"),
        "the diagonal left out": (
            "range(0, diagonal + queries - rest,",
            "range(diagonal, diagonal + queries - rest,",
        ),
        "the tail for the diagonal": (FIRST, "rest + step"),
        "the diagonal for the tail": (FIRST, "begin + step"),
        "the tail too far": (FIRST, "begin + step if step < diagonal else rest + step"),
        "whole tiles left out": (
            "range(begin + diagonal, whole,",
            "range(begin + diagonal + TILE_Q, whole,",
        ),
        "the diagonal twice": ("range(begin + diagonal, whole,", "range(begin, whole,"),
        "tiles that overlap": (
            "range(begin + diagonal, whole, TILE_Q)",
            "range(begin + diagonal, whole, TILE_Q // 2)",
        ),
        "causal from a tile too far": (
            "begin = first_key // TILE_Q * TILE_Q",
            "begin = tl.cdiv(first_key + 1, TILE_Q) * TILE_Q",
        ),
        "one head of the group": (HEADS, "range(0, 1)"),
        "one head too few": (HEADS, "range(0, group - 1)"),
        "heads far apart share": (HEAD, "head = kv_head + member * (heads // group)"),
        "the last head alone": (HEAD, HEAD + "\n        state = 0 * state[0], 0 * state[1]"),
        "q's batches as do's": ("q_ptr + batch * q_stride[0]", "q_ptr + batch * do_stride[0]"),
        "do's batches as q's": ("do_ptr + batch * do_stride[0]", "do_ptr + batch * q_stride[0]"),
        "q of the first head": (
            "batch * q_stride[0] + head * q_stride[1]\n        do_at",
            "batch * q_stride[0]\n        do_at",
        ),
        "do of the first head": (
            "do_ptr + batch * do_stride[0] + head * do_stride[1]\n        row",
            "do_ptr + batch * do_stride[0]\n        row",
        ),
        "lse of the first batch": (ROW, "row = head * queries"),
        "lse of k's heads": (ROW, "row = (batch * heads + kv_head) * queries"),
        "lse by k's heads": (ROW, "row = (batch * (heads // group) + head) * queries"),
        "lse by keys": (ROW, "row = (batch * heads + head) * keys"),
        "dv's batches for dk": ("dk_ptr += batch * dk_stride[0]", "dk_ptr += batch * dv_stride[0]"),
        "dk's batches for dv": ("dv_ptr += batch * dv_stride[0]", "dv_ptr += batch * dk_stride[0]"),
        "dk of the first head": ("dk_stride[0] + kv_head * dk_stride[1]", "dk_stride[0]"),
        "dv of the first head": ("dv_stride[0] + kv_head * dv_stride[1]", "dv_stride[0]"),
        "dv's strides for dk": (
            "keys, dk_stride[2], dk_stride[3]",
            "keys, dv_stride[2], dv_stride[3]",
        ),
        "dk's strides for dv": (
            "keys, dv_stride[2], dv_stride[3]",
            "keys, dk_stride[2], dk_stride[3]",
        ),
        "a block too few": (
            "blocks_of(k, config.tile_k)",
            "max(1, blocks_of(k, config.tile_k) - 1)",
        ),
        "launched with other strides": (
            "for x in (q, k, v, do, dk, dv)",
            "for x in (q, v, k, do, dk, dv)",
        ),
        "launched with do's strides for q": (
            "for x in (q, k, v, do, dk, dv)",
            "for x in (do, k, v, q, dk, dv)",
        ),
        "launched with dk's strides for dv": (
            "for x in (q, k, v, do, dk, dv)",
            "for x in (q, k, v, do, dv, dk)",
        ),
    },
    "queries": BOTH
    | {
        "scale lost in dq": ("dq * scale", "dq"),
        "log2 e in dq": ("dq * scale", "dq * score_scale"),
        "gradient of p": ("add_product(dq, ds, k,", "add_product(dq, p, k,"),
        "gradient with v": ("add_product(dq, ds, k,", "add_product(dq, ds, v,"),
        "always the first keys": ("j = first + tl.arange", "j = 0 * first + tl.arange"),
        "v's strides for k": (
            "keys, k_stride[2], k_stride[3], DIM, WIDTH, MASKED",
            "keys, v_stride[2], v_stride[3], DIM, WIDTH, MASKED",
        ),
        "k's strides for v": (
            "keys, v_stride[2], v_stride[3], DIM, WIDTH, MASKED",
            "keys, k_stride[2], k_stride[3], DIM, WIDTH, MASKED",
        ),
        "operands exchanged": (
            RECOMPUTE_QUERIES,
            RECOMPUTE_QUERIES.replace("q, k, do, v", "do, k, q, v"),
        ),
        "lse and delta exchanged": (
            RECOMPUTE_QUERIES,
            RECOMPUTE_QUERIES.replace("lse[:, None], delta", "delta[:, None], lse"),
        ),
        "a key too few": ("& (j < keys) &", "& (j < keys - 1) &"),
        "a query too few": ("(i < queries) & (j", "(i < queries - 1) & (j"),
        "a tile of queries too far": (
            "tiles - 1 - tl.program_id(0) % tiles",
            "tiles - tl.program_id(0) % tiles",
        ),
        "batch and head exchanged": (
            "pair // heads, pair % heads\n    q_ptr",
            "pair % heads, pair // heads\n    q_ptr",
        ),
        "heads in batches of one": (
            "pair // heads, pair % heads\n    q_ptr",
            "pair * 0, pair % heads\n    q_ptr",
        ),
        "q's batches as do's": ("q_ptr += batch * q_stride[0]", "q_ptr += batch * do_stride[0]"),
        "q of the first head": (
            "q_ptr += batch * q_stride[0] + head * q_stride[1]",
            "q_ptr += batch * q_stride[0]",
        ),
        "k's batches as v's": (
            "k_ptr += batch * k_stride[0] + head",
            "k_ptr += batch * v_stride[0] + head",
        ),
        "v's batches as k's": (
            "v_ptr += batch * v_stride[0] + head",
            "v_ptr += batch * k_stride[0] + head",
        ),
        "k's heads not shared": ("k_stride[0] + head // group", "k_stride[0] + head"),
        "v's heads not shared": ("v_stride[0] + head // group", "v_stride[0] + head"),
        "heads far apart share": ("head // group *", "head % (heads // group) *"),
        "do's batches as q's": (
            "do_ptr += batch * do_stride[0] + head * do_stride[1]\n    dq_ptr",
            "do_ptr += batch * q_stride[0] + head * do_stride[1]\n    dq_ptr",
        ),
        "do of the first head": (
            "do_ptr += batch * do_stride[0] + head * do_stride[1]\n    dq_ptr",
            "do_ptr += batch * do_stride[0]\n    dq_ptr",
        ),
        "q's strides for dq": (
            "dq_ptr += batch * dq_stride[0] + head * dq_stride[1]",
            "dq_ptr += batch * q_stride[0] + head * q_stride[1]",
        ),
        "q's strides for dq's rows": (
            "queries, dq_stride[2], dq_stride[3]",
            "queries, q_stride[2], q_stride[3]",
        ),
        "queries by tiles of keys": ("i = tile * TILE_Q", "i = tile * TILE_K"),
        "the first queries": ("i = tile * TILE_Q", "i = 0 * tile * TILE_Q"),
        "do's strides for q": (
            "queries, q_stride[2], q_stride[3], DIM, WIDTH, True",
            "queries, do_stride[2], do_stride[3], DIM, WIDTH, True",
        ),
        "q's strides for do": (
            "queries, do_stride[2], do_stride[3], DIM, WIDTH, True)\n    lse",
            "queries, q_stride[2], q_stride[3], DIM, WIDTH, True)\n    lse",
        ),
        "lse of another head": ("lse_ptr + pair * queries + i", "lse_ptr + head * queries + i"),
        "lse of the first head": ("lse_ptr + pair * queries + i", "lse_ptr + i"),
        "delta of another head": (
            "tl.load(delta_ptr + pair * queries + i",
            "tl.load(delta_ptr + head * queries + i",
        ),
        "delta by keys": (
            "tl.load(delta_ptr + pair * queries + i",
            "tl.load(delta_ptr + pair * keys + i",
        ),
        "causal, a tile without a mask": (
            "tile * TILE_Q + 1) // TILE_K",
            "tile * TILE_Q + TILE_Q) // TILE_K",
        ),
        "full, the last tile without a mask": (
            "full, end = keys // TILE_K * TILE_K",
            "full, end = tl.cdiv(keys, TILE_K) * TILE_K",
        ),
        "the first tile left out": ("range(0, full, TILE_K)", "range(TILE_K, full, TILE_K)"),
        "tiles that overlap": ("range(0, full, TILE_K)", "range(0, full, TILE_K // 2)"),
        "the first masked tile left out": ("range(full, end,", "range(full + TILE_K, end,"),
        "the last full tile twice": ("range(full, end,", "range(full - TILE_K, end,"),
        "the diagonal left out": (END, "tile * TILE_Q"),
        "one key too few": (END, END + " - 1"),
        "causal, beyond the last key": (
            "tl.minimum(keys, tile * TILE_Q + 1)",
            "(tile * TILE_Q + 1)",
        ),
        "not causal": (
            "    if CAUSAL:\n        full = tl.minimum(keys",
            "    if False:\n        full = tl.minimum(keys",
        ),
        "a block too few": (
            "(blocks_of(q, config.tile_q),)",
            "(max(1, blocks_of(q, config.tile_q) - 1),)",
        ),
        "launched with k's and v's strides exchanged": (
            "for x in (q, k, v, do, dq)",
            "for x in (q, v, k, do, dq)",
        ),
        "launched with do's strides for q": (
            "for x in (q, k, v, do, dq)",
            "for x in (do, k, v, q, dq)",
        ),
        "launched with q's strides for dq": (
            "for x in (q, k, v, do, dq)",
            "for x in (q, k, v, do, q)",
        ),
    },
    "interpreted": {
        "bits of bf16 q and k": ("a, b = a.to(tl.float32), b.to(tl.float32)\n        c", "c"),
        "bits of bf16 v and do": ("c, d = c.to(tl.float32), d.to(tl.float32)", "c, d = c, d"),
        "bits of bf16 p": (
            "    if UPCAST:\n        a, b = a.to(tl.float32), b.to(tl.float32)\n    return",
            "    return",
        ),
    },
    "delta": {
        "o alone": ("o.to(tl.float32) * do.to(tl.float32)", "o.to(tl.float32)"),
        "o squared": (
            "o.to(tl.float32) * do.to(tl.float32)",
            "o.to(tl.float32) * o.to(tl.float32)",
        ),
        "in 16 bits": ("o.to(tl.float32) * do.to(tl.float32)", "(o * do).to(tl.float32)"),
        "the mean of two": (
            "axis=1)\n    tl.store(delta_ptr",
            "axis=1) / 2\n    tl.store(delta_ptr",
        ),
        "the first rows": ("% tiles * ROWS + tl.arange", "% tiles * 0 + tl.arange"),
        "rows that overlap": ("% tiles * ROWS + tl.arange", "% tiles * (ROWS - 1) + tl.arange"),
        "batch and head exchanged": (
            "pair // heads, pair % heads\n    o_ptr",
            "pair % heads, pair // heads\n    o_ptr",
        ),
        "batches forgotten": (
            "pair // heads, pair % heads\n    o_ptr",
            "pair * 0, pair % heads\n    o_ptr",
        ),
        "do's strides for o": (
            "o_ptr += batch * o_stride[0] + head * o_stride[1]",
            "o_ptr += batch * do_stride[0] + head * do_stride[1]",
        ),
        "o's strides for do": (
            "do_ptr += batch * do_stride[0] + head * do_stride[1]\n    i",
            "do_ptr += batch * o_stride[0] + head * o_stride[1]\n    i",
        ),
        "do's strides for o's rows": (
            "queries, o_stride[2], o_stride[3]",
            "queries, do_stride[2], do_stride[3]",
        ),
        "o's strides for do's rows": (
            "queries, do_stride[2], do_stride[3], DIM, WIDTH, True)\n    delta",
            "queries, o_stride[2], o_stride[3], DIM, WIDTH, True)\n    delta",
        ),
        "of the first head": ("delta_ptr + pair * queries + i, delta,", "delta_ptr + i, delta,"),
        "of one batch": (
            "delta_ptr + pair * queries + i, delta,",
            "delta_ptr + head * queries + i, delta,",
        ),
        "queries beyond the last written": (", delta, mask=i < queries)", ", delta)"),
        "one query too few": (", delta, mask=i < queries)", ", delta, mask=i < queries - 1)"),
        "launched with strides exchanged": ("o.stride(), do.stride()", "do.stride(), o.stride()"),
        "launched with too few blocks": (
            "(blocks_of(o, DELTA_ROWS),)",
            "(blocks_of(o, 2 * DELTA_ROWS),)",
        ),
    },
    "lse": {
        "without the maximum": ("m + tl.log2(l)", "tl.log2(l)"),
        "without the sum": ("m + tl.log2(l)", "m + 0 * tl.log2(l)"),
        "to the base of e": ("m + tl.log2(l)", "m + tl.log(l)"),
        "the sum itself": ("m + tl.log2(l)", "m + l"),
        "-inf of nothing": (
            'lse = tl.where(l == 0, float("inf"),',
            'lse = tl.where(l == 0, -float("inf"),',
        ),
        "NaN of nothing": (
            'lse = tl.where(l == 0, float("inf"), m + tl.log2(l))',
            "lse = m + tl.log2(l)",
        ),
        "of another head": ("lse_ptr + pair * queries", "lse_ptr + head * queries"),
        "of the first head": ("lse_ptr + pair * queries", "lse_ptr"),
        "by keys": ("lse_ptr + pair * queries", "lse_ptr + pair * keys"),
        "queries beyond the last written": ("+ i, lse, mask=i < queries)", "+ i, lse)"),
        "one query too few": ("+ i, lse, mask=i < queries)", "+ i, lse, mask=i < queries - 1)"),
        "not written": ("if lse_ptr is not None:", "if False:"),
    },
    "plans": {
        "do for o": ("launch_delta(o, do, delta)", "launch_delta(do, do, delta)"),
        "dk alone not computed": ("dk is not None or dv is not None", "dv is not None"),
        "dv alone not computed": ("dk is not None or dv is not None", "dk is not None"),
        "dk and dv for nothing": ("dk is not None or dv is not None", "True"),
        "dq for nothing": (
            "if dq is not None:",
            "dq = torch.empty_like(q) if dq is None else dq\n    if True:",
        ),
        "dq not computed": ("if dq is not None:", "if False:"),
        "delta and lse exchanged": ("do, lse, delta\n", "do, delta, lse\n"),
        "dk and dv exchanged": ("(*given, dk, dv)", "(*given, dv, dk)"),
        "never causal": ("INTERPRETED, causal, scale)", "INTERPRETED, False, scale)"),
        "always causal": ("INTERPRETED, causal, scale)", "INTERPRETED, True, scale)"),
        "scale lost": ("INTERPRETED, causal, scale)", "INTERPRETED, causal)"),
    },
    "public": {
        "do's sign forgotten": ("do.resolve_neg()", "do"),
        "other signs forgotten": ("x.resolve_neg() for x in", "x for x in"),
        "dq of a negative scale": ("dq.mul_(sign)", "dq"),
        "dq of a scale of 0": ("sign != 1", "sign == -1"),
        "q not turned": ("q = q * sign", "q = q"),
        "scale not kept": ("ctx.choices = causal, scale", "ctx.choices = causal, None"),
        "causal not kept": ("ctx.choices = causal, scale", "ctx.choices = False, scale"),
        "always causal": ("ctx.choices = causal, scale", "ctx.choices = True, scale"),
        "all or nothing": ("if wanted else None", "if True else None"),
        "laid out as their inputs": ("empty_as(x) if", "torch.empty_like(x) if"),
        "laid out head by head": ("empty_as(x) if", "x.new_empty(x.shape) if"),
        "k's and v's gradients exchanged": ("return dq, dk, dv\n", "return dq, dv, dk\n"),
        "a copy of q kept": (
            "save_for_backward(q, k, v, o, lse)",
            "save_for_backward(q.clone(), k, v, o, lse)",
        ),
        "a copy of k kept": (
            "save_for_backward(q, k, v, o, lse)",
            "save_for_backward(q, k.clone(), v, o, lse)",
        ),
        "a copy of v kept": (
            "save_for_backward(q, k, v, o, lse)",
            "save_for_backward(q, k, v.clone(), o, lse)",
        ),
        "a copy of o kept": (
            "save_for_backward(q, k, v, o, lse)",
            "save_for_backward(q, k, v, o.clone(), lse)",
        ),
        "a second derivative of nothing": (
            'raise RuntimeError("flash_attention can be differentiated once, not twice")',
            "return (None,) * 9",
        ),
        "lse for nothing": ("if grad_enabled and any(", "if any("),
        "lse always": ("if grad_enabled and any(ctx.needs_input_grad):", "if True:"),
        "launched without queries": ("if not o.numel() or not k.numel():", "if not k.numel():"),
        "launched without keys": ("if not o.numel() or not k.numel():", "if not o.numel():"),
        "whatever there was without keys": ("            x.zero_()\n", "            x\n"),
        "the kernels' arguments exchanged": (
            "launch_attention_backward(q, k, v, o, lse,",
            "launch_attention_backward(q, v, k, o, lse,",
        ),
    },
}


@pytest.mark.parametrize("kernel, old, new", each_of(MUTANTS))
def test_a_mutant_is_noticed(tmp_path, kernel, old, new):
    if kernel in ("interpreted", "plans") and not interpreting():
        pytest.skip("of the interpreter")
    with pytest.raises(AssertionError) as raised:
        check_changed(tmp_path, kernel, old, new)
    assert "change this test with it" not in str(raised.value), "there is no `old`"


def test_offsets_are_64_bits_wide(tmp_path):
    """Case N15: beyond 2^31 elements a product of an index and a stride in 32 bits wraps around."""
    choices = dict(DIM=16, WIDTH=16, TILE_Q=16, TILE_K=32, ROWS=16, CAUSAL=True)
    choices |= dict(PRECISION="ieee", UPCAST=False)
    kinds = {"ptr": "*fp16", "stride": ("i32",) * 4, "scale": "fp32"}
    kinds |= {"lse_ptr": "*fp32", "delta_ptr": "*fp32"}
    requests = []
    for new in (".to(tl.int64)", ""):
        (folder := tmp_path / f"{len(requests)}").mkdir()
        module = changed(folder, attention_backward, ".to(tl.int64)", new, (attention_backward,))
        for name in ("delta_kernel", "keys_gradient_kernel", "queries_gradient_kernel"):
            kernel = getattr(module["attention_backward"], name)
            names = inspect.signature(kernel.fn).parameters
            constants = {one: choices[one] for one in names if one in choices}
            types = {one: kinds.get(one, kinds.get(one.rpartition("_")[2], "i32")) for one in names}
            types = {one: kind for one, kind in types.items() if one not in constants}
            requests.append(ptx.Request(kernel, types, constants))
    found = []
    for compiled in ptx.triton_compile_many(requests):
        # Not those with a constant: indices of tiles and of rows fit into 32 bits.
        product = r"arith\.muli %\w+, %(?!c\d)\w+ : (?:tensor<\w+x)?(i\d+)"
        found.append(re.findall(product, compiled.ttir))
    assert [len(widths) >= n for widths, n in zip(found, (9, 20, 20), strict=False)] == [True] * 3
    assert all({*widths} == {"i64"} for widths in found[:3])
    assert all("i32" in widths for widths in found[3:])
