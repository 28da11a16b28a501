"""Attention, softmax(Q Kᵀ scale) V: by its formula, and by our kernels without Q Kᵀ in memory.

All tensors are (batch, heads, sequence, head dim); Triton's kernel for every GPU and the one for
Hopper are in `attention_tiles` and `attention_hopper`, and `attention_plans` chooses.
"""

import math

import torch

from helpers.kernels.attention_plans import launch_attention
from helpers.kernels.contract import checked

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDEST = 256  # numbers of a head, whose sums are held in registers
LEAST_SCALE = 2.0**-126  # less could be 0 in fp32, and is taken for it
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
    scale = _checked(q, k, v, scale, (*DTYPES, torch.float64))
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.to(dtype) @ k.transpose(-2, -1) * scale
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return (torch.softmax(scores, dim=-1) @ v).to(q.dtype)  # no keys: sums of nothing, 0


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
    TypeError), computed in fp32, dim 1 to 256, any lengths and strides; the result is contiguous.
    causal: query i sees keys 0 to i, also where there are more keys than queries, as PyTorch's
    is_causal has it. scale: by default 1/√dim. A query that sees no key, or only scores of -inf,
    gets 0. NaN and +inf spread as in the formula, but that a causal query may not look at the keys
    behind it at all, where the formula has 0 times their values. fp32 is multiplied in TF32 where
    PyTorch's switch allows it (`matmul_plans.precision`). ValueError for other shapes, and where a
    launch would be too large; RuntimeError where a gradient is asked for.
    """
    _checked(q, k, v, scale, DTYPES)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise RuntimeError(
            "flash_attention has no backward pass yet: detach q, k and v, or use torch.no_grad()"
        )
    launch = launch_flash_attention
    if torch.compiler.is_compiling():  # it would try to look into the interpreter
        launch = torch._dynamo.disable(launch)
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    launch(q, k, v, o, causal, scale)
    return o


def launch_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
) -> None:
    """`flash_attention`, written to o: q's shape and dtype, any strides. None of it is checked."""
    if not o.numel():
        return  # a grid of no programs cannot be launched
    if not k.numel():
        o.zero_()
        return
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    # A view that stands for its negative has the positive numbers in memory.
    q, k, v = (x.resolve_neg() for x in (q, k, v))
    if scale < LEAST_SCALE:  # kernels scale after the maximum
        q, scale = (-q, -scale) if scale <= -LEAST_SCALE else (q * 0, 1.0)
    launch_attention(q, k, v, o, causal, scale)


def _checked(q, k, v, scale: float | None, dtypes: tuple[torch.dtype, ...]) -> float:
    """The scale; TypeError or ValueError for what no attention takes."""
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
    if not 1 <= q.shape[3] <= WIDEST:
        raise ValueError(f"head dims are 1 to {WIDEST}: {shapes}")
    if max(q.shape[2], k.shape[2]) > LARGEST:
        raise ValueError(f"sequences are at most {LARGEST:,} long: {shapes}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale is a finite number or None, not {scale!r}")
    return q.shape[3] ** -0.5 if scale is None else float(scale)
