"""Attention, softmax(Q Kᵀ scale) V: by its formula, and by our kernels without Q Kᵀ in memory.

All tensors are (batch, heads, sequence, head dim); Triton's kernel for every GPU and the one for
Hopper are in `attention_tiles` and `attention_hopper`, and `attention_plans` chooses.
"""

import math
import numbers

import torch

from helpers.kernels.attention_backward_plans import launch_attention_backward
from helpers.kernels.attention_plans import empty_as, launch_attention
from helpers.kernels.contract import apply, checked

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 256  # numbers of a head, whose sums are held in registers
LEAST_SCALE, MOST_SCALE = 2.0**-126, 2.0**126  # in fp32; less is taken for 0
LARGEST = 2**31 - 1024  # queries and keys are counted in 32 bits, and a tile beyond their end


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """The formula in PyTorch's operations, with its queries x keys matrices in memory.

    Arguments and result as for `flash_attention`, and float64 as well; computed in fp32 at least.
    Differentiable.
    """
    _check(q, k, v, causal, scale, (*DTYPES, torch.float64))
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    with torch.autocast(q.device.type, enabled=False):
        scores = q.to(dtype) @ k.transpose(-2, -1) * _scale(q, scale)
        if causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
            scores = scores.masked_fill(~visible, -math.inf)
        nothing = (scores == -math.inf).all(dim=-1, keepdim=True)
        # Filled before as well: behind a softmax of nothing the gradient would be NaN.
        weights = torch.softmax(scores.masked_fill(nothing, 0), dim=-1).masked_fill(nothing, 0)
        return (weights @ v).to(q.dtype)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention by our kernels; CPU tensors go through Triton's interpreter.

    q: (batch, heads, queries, dim); k, v: (batch, kv heads, keys, dim), of which heads / kv heads
    neighbouring heads of q share one (grouped-query attention). fp32, fp16 or bf16 (else
    TypeError), computed in fp32, dim up to 256, any lengths and strides. The result is dense: in
    memory token by token where q is, else head by head; so is each gradient, after its tensor.
    causal: query i sees keys 0 to i, also where there are more keys than queries, as PyTorch's
    is_causal has it. scale: by default 1/√dim. A query that sees no key, or only scores of -inf,
    gets 0. NaN and +inf spread as in the formula, except that a causal query need not read the keys
    after it, where the formula has 0 times their values; and weights times values are added up
    before they are divided by the sum of the weights, which overflows sooner; as do, on a GPU,
    scaled scores beyond some 10^8, where a maximum is not rounded as its score is. fp32 is
    multiplied in TF32 where PyTorch's switch allows it (`matmul_plans.precision`). ValueError for
    other shapes, and where a launch would be too large.

    Differentiable once (RuntimeError for a second derivative), by kernels that compute the weights
    again: q, k, v, the result and one number a query are kept. Gradients are the same bits each
    time, and 0 for a query that gets 0. Weights come back with a relative error of some
    |score scale| 2^-23; dq and dk are scaled after they were added up, which overflows sooner; a
    key with NaN or infinities may get NaN where the formula gives 0. No batched gradients (vmap).
    On Hopper programs wait for one another: where not all SMs are this process's, the launch fails.
    """
    _check(q, k, v, causal, scale, DTYPES)
    return apply(_FlashAttention, q, k, v, causal, scale, torch.is_grad_enabled())


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal, scale, grad_enabled):
        o = empty_as(q)
        lse = None
        if grad_enabled and any(ctx.needs_input_grad):
            lse = q.new_empty(q.shape[:3], dtype=torch.float32)
            ctx.save_for_backward(q, k, v, o, lse)
            ctx.choices = causal, scale
        launch_flash_attention(q, k, v, o, causal, scale, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        needed = ctx.needs_input_grad[:3]
        gradients = apply(_Gradients, *ctx.saved_tensors, do, needed, *ctx.choices)
        return *gradients, None, None, None


class _Gradients(torch.autograd.Function):
    """Of its own, so that a second derivative is refused, and not lost."""

    @staticmethod
    def forward(ctx, q, k, v, o, lse, do, needed, causal, scale):
        dq, dk, dv = (
            empty_as(x) if wanted else None for x, wanted in zip((q, k, v), needed, strict=True)
        )
        launch_flash_attention_backward(q, k, v, o, lse, do, dq, dk, dv, causal, scale)
        return dq, dk, dv

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("flash_attention can be differentiated once, not twice")


def launch_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """`flash_attention`, written to o: q's shape and dtype, any strides. None of it is checked.

    lse: None, or (batch, heads, queries), fp32, contiguous, for what the backward pass needs: log2
    of the sum of exp(score scale) over the keys that a query sees, +inf where that is 0.
    """
    if not o.numel():
        return  # a grid of no programs cannot be launched
    if not k.numel():
        o.zero_()
        return
    q, k, v, scale, _ = _prepared(q, k, v, scale)
    launch_attention(q, k, v, o, causal, scale, lse)


def launch_flash_attention_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    causal: bool = False,
    scale: float | None = None,
) -> None:
    """The gradients of `launch_flash_attention`, from its results o and lse and the gradient do.

    They are written to dq, dk and dv: shapes and dtype of q, k and v, any strides; those that are
    None are not wanted. None of it is checked.
    """
    gradients = [x for x in (dq, dk, dv) if x is not None]
    if not o.numel() or not k.numel():
        for x in gradients:
            x.zero_()
        return
    q, k, v, scale, sign = _prepared(q, k, v, scale)
    launch_attention_backward(q, k, v, o, lse, do.resolve_neg(), dq, dk, dv, causal, scale)
    if dq is not None and sign != 1:
        dq.mul_(sign)


def _prepared(q, k, v, scale: float | None) -> tuple:
    """q, k, v and a positive scale for the kernels; and by what they have multiplied q for it."""
    scale, sign = _scale(q, scale), 1
    # A view that stands for its negative has the positive numbers in memory.
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    if scale < LEAST_SCALE:  # kernels scale after the maximum
        sign, scale = (-1, -scale) if scale <= -LEAST_SCALE else (0, 1.0)
        q = q * sign
    return q, k, v, scale, sign


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return max(1, q.shape[3]) ** -0.5 if scale is None else float(scale)


def _check(q, k, v, causal: bool, scale: float | None, dtypes: tuple) -> None:
    """TypeError or ValueError for what no attention takes."""
    for x in (q, k, v):
        checked(x, "attention", dtypes)
    names = {"q": q, "k": k, "v": v}
    for what, found in (
        ("dtype", {name: x.dtype for name, x in names.items()}),
        ("device", {name: x.device for name, x in names.items()}),
    ):
        if len({*found.values()}) > 1:
            listed = ", ".join(f"{name} {kind}" for name, kind in found.items())
            raise (TypeError if what == "dtype" else ValueError)(
                f"q, k and v are of one {what}, not {listed}: convert or move some of them"
            )
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in names.items())
    if any(x.ndim != 4 for x in (q, k, v)):
        raise ValueError(f"q, k and v are (batch, heads, sequence, head dim), not {shapes}")
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"k and v are alike, and like q but for heads and sequence: {shapes}")
    if q.shape[1] != k.shape[1] and (not k.shape[1] or q.shape[1] % k.shape[1]):
        raise ValueError(f"q's heads are a multiple of those of k and v: {shapes}")
    if q.shape[3] > WIDEST:
        raise ValueError(f"head dims are at most {WIDEST}: {shapes}")
    if max(q.shape[2], k.shape[2]) > LARGEST:
        raise ValueError(f"sequences are at most {LARGEST:,} long: {shapes}")
    if not isinstance(causal, bool):
        raise TypeError(f"causal is True or False, and no mask: {type(causal).__name__}")
    if not isinstance(scale, (numbers.Real, type(None))):
        raise TypeError(f"scale is None or a number, not {type(scale).__name__}")
    if scale is not None and not abs(scale) <= MOST_SCALE:
        raise ValueError(f"scale is None or a number of at most {MOST_SCALE:.1e}, not {scale!r}")
