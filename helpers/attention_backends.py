"""Attention by everything at hand, each a function of (q, k, v, causal=False), to be compared.

q is (batch, heads, queries, head dim), k and v (batch, kv heads, keys, head dim); a causal query i
sees the keys 0 to i. No dropout. Each allocates its result and what it needs in between: PyTorch
keeps that memory from call to call, so it takes no GPU time. `missing` says what cannot run where.
All of them are differentiable: `gradients` runs both passes, `backward_of` the second alone.
"""

import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch.backends import cuda as switches
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from helpers import compute_roofs
from helpers.device import triton_version
from helpers.kernels import attention
from helpers.memory import free_bytes
from helpers.triton_mode import MISSING as NO_TRITON
from helpers.triton_mode import cannot_launch

SDPA = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
LABELS = {
    "standard": "matmul, softmax, matmul",
    "math": "SDPA, math",
    "efficient": "SDPA, memory-efficient",
    "flash": "FlashAttention-2 (SDPA)",
    "cudnn": "cuDNN (SDPA)",
    "flex": "FlexAttention",
    "ours": "flash_attention",
}
MOST_RECOMPILES = 256  # every shape is one, full and causal, with gradients and without


def standard(q, k, v, causal=False):
    """The formula in separate operations, in the inputs' dtype, as models without a kernel do."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    scores = q @ k.transpose(-2, -1)
    scores = scores * (1 / math.sqrt(q.shape[-1]))
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    return torch.softmax(scores, dim=-1) @ v


def _sdpa(backend: SDPBackend, q, k, v, causal=False):
    grouped = q.shape[1] != k.shape[1]
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def flex(q, k, v, causal=False):
    """FlexAttention, compiled anew for each shape; causal: only blocks that are seen at all."""
    blocks = _causal_blocks(q.shape[-2], k.shape[-2], q.device) if causal else None
    grouped = q.shape[1] != k.shape[1]
    return _compiled_flex()(q, k, v, block_mask=blocks, enable_gqa=grouped)


def _sees(batch, head, query, key):
    return query >= key


@functools.lru_cache(maxsize=MOST_RECOMPILES)
def _causal_blocks(queries: int, keys: int, device: torch.device):
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_sees, None, None, queries, keys, device=str(device))


@functools.cache
def _compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    # Past the limit it would run eagerly, with all scores in memory; with fullgraph it raises.
    limit = max(MOST_RECOMPILES, torch._dynamo.config.recompile_limit)
    torch._dynamo.config.recompile_limit = limit
    # With it a compiled backward pass overwrites what the forward one kept: it could run only once.
    torch._functorch.config.donated_buffer = False
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def ours(q, k, v, causal=False):
    """`helpers.kernels.attention.flash_attention`; on a CPU in Triton's interpreter."""
    return attention.flash_attention(q, k, v, causal)


BACKENDS: dict[str, Callable[..., torch.Tensor]] = {
    "standard": standard,
    **{name: functools.partial(_sdpa, backend) for name, backend in SDPA.items()},
    "flex": flex,
    "ours": ours,
}


def backward_of(
    name: str, q, k, v, do, causal: bool = False
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A backend's backward pass alone, a function that gives (dq, dk, dv) for the gradient do of o.

    The forward pass runs here, once. All backends go through autograd: direct calls of PyTorch's
    operations would spare the host's time alone, which `helpers.bench.measure` does not see, and
    their arguments differ from version to version.
    """
    out, leaves = _differentiable(name, q, k, v, causal)
    return lambda: torch.autograd.grad(out, leaves, do, retain_graph=True)


def gradients(name: str, q, k, v, do, causal: bool = False) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv) of a backend for the gradient do of o: both passes, and all that was kept goes.

    As in training: the backward pass frees what it has used.
    """
    out, leaves = _differentiable(name, q, k, v, causal)
    return torch.autograd.grad(out, leaves, do)


def _differentiable(name: str, q, k, v, causal: bool):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with torch.enable_grad():
        return BACKENDS[name](*leaves, causal), leaves


def missing(name: str, q, k, v, causal: bool = False, backward: bool = False) -> str:
    """Why a backend cannot take these tensors here, in one sentence; "" when it can.

    backward: whether it can differentiate them as well. PyTorch's own reasons where it has some.
    ValueError for an unknown name.
    """
    if name not in BACKENDS:
        raise ValueError(f"there is no backend {name!r}; there are {', '.join(BACKENDS)}")
    if name == "ours":
        return cannot_launch() if triton_version() else NO_TRITON
    if name == "flex":
        return _flex_missing(q, k)
    if name in ("standard", "math"):
        return ""
    if q.device.type != "cuda":  # the CPU has a FlashAttention of its own
        return "" if name == "flash" else f"{LABELS[name]} needs a GPU"
    usable = {
        "efficient": switches.can_use_efficient_attention,
        "flash": switches.can_use_flash_attention,
        "cudnn": switches.can_use_cudnn_attention,
    }[name]
    grouped = q.shape[1] != k.shape[1]
    if backward:
        q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with warnings.catch_warnings(record=True) as reasons, sdpa_kernel(SDPA[name]):
        warnings.simplefilter("always")
        if usable(switches.SDPAParams(q, k, v, None, 0.0, causal, grouped), debug=True):
            return ""
    said = [str(reason.message).split(" (Triggered")[0].strip() for reason in reasons]
    return f"{LABELS[name]}: {said[-1] if said else 'PyTorch gives no reason'}"


def _flex_missing(q, k) -> str:
    if q.device.type != "cuda":
        return f"{LABELS['flex']} is compiled for GPUs only here"
    if reason := compute_roofs.compiler_missing():
        return reason
    if 4 * q.shape[-2] * k.shape[-2] > free_bytes(q.device):
        return f"{LABELS['flex']} makes its block mask from a mask of queries x keys: no room"
    return ""
