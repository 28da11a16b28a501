"""The cases of attention's backward pass for `helpers.peers`: sizes as `helpers.attention_peers`.

Timed is the backward pass alone, with what it prepares; its forward pass runs once, before. FLOPs
are counted 2.5 times the forward pass's, however many products a kernel makes.
"""

import functools
from collections.abc import Callable, Iterator

import torch

from helpers import attention_peers
from helpers.attention_backends import backward_of, missing
from helpers.attention_peers import (
    MOST_ERROR,
    PEERS,
    Errors,
    Size,
    case_beside,
    errors,
    exact_weights,
    some_rows,
)
from helpers.check import assert_close
from helpers.kernels import attention
from helpers.peer_cases import Case

NAMES = ("dq", "dk", "dv")
FLEX_QUERIES = 4096
BLOCK = 2**26  # float64 scores at once: 512 MB

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def exact_gradients(
    q, k, v, do, rows: list[int], columns: list[int], causal: bool = False
) -> Gradients:
    """In float64: dq of some queries, dk and dv of some keys, all heads, for the gradient do of o.

    A query's gradient needs its own weights alone. A key's needs all queries, and from each the
    sum of its weights and its D: so all scores are made, a block of queries at a time.
    """
    groups = q.shape[1] // k.shape[1]
    q, do = q.double(), do.double()
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5

    p = exact_weights(q, k, rows, causal)
    dp = do[:, :, rows] @ v.mT
    dq = p * (dp - (p * dp).sum(-1, keepdim=True)) @ k * scale

    v_some = v[:, :, columns]
    dk, dv = torch.zeros_like(v_some), torch.zeros_like(v_some)
    length = max(1, BLOCK // (q.shape[0] * q.shape[1] * k.shape[2]))
    for block in torch.arange(q.shape[2]).split(length):
        some = block.tolist()
        p, do_block = exact_weights(q, k, some, causal), do[:, :, some]
        d = (p @ v * do_block).sum(-1, keepdim=True)
        p = p[..., columns]
        dv += p.mT @ do_block
        dk += (p * (do_block @ v_some.mT - d)).mT @ q[:, :, some] * scale
    return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


def gradient_errors(found: Gradients, exact: Gradients, rows, columns) -> dict[str, Errors]:
    """The errors of whole gradients by name, against `exact_gradients` of these rows, columns."""
    return {
        name: errors(gradient[:, :, some], right)
        for name, gradient, right, some in zip(
            NAMES, found, exact, (rows, columns, columns), strict=True
        )
    }


def case(size: Size) -> Case:
    """Our backward pass of one size beside its peers', and cuDNN's as the ceiling, if there is one.

    Ours writes gradients that are there, peers allocate theirs. Each is right as in
    `helpers.attention_peers.case`: ours when none of its errors, for dq, dk and dv each, is more
    than `MOST_ERROR` times FlashAttention-2's.
    """
    q, k, v = size.tensors()
    do = torch.randn_like(q)
    written = tuple(map(torch.empty_like, (q, k, v)))
    rows, columns = some_rows(size.queries), some_rows(k.shape[2])

    @functools.cache
    def exact() -> Gradients:
        return exact_gradients(q, k, v, do, rows, columns, size.causal)

    @functools.cache
    def kept() -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        attention.launch_flash_attention(q, k, v, o, size.causal, None, lse)
        return o, lse

    def ours():
        attention.launch_flash_attention_backward(q, k, v, *kept(), do, *written, size.causal)

    @functools.cache
    def after_forward(name: str) -> Callable[[], Gradients]:
        return backward_of(name, q, k, v, do, size.causal)

    def backend(name: str) -> Callable[[], Gradients]:
        return lambda: after_forward(name)()

    reasons = {name: missing(name, q, k, v, size.causal, backward=True) for name in PEERS}
    if size.queries != FLEX_QUERIES:
        reasons["flex"] = f"compiled, for seconds, with {FLEX_QUERIES:,} queries only"

    def check(run: Callable) -> None:
        for gradient in written:
            gradient.fill_(torch.nan)  # what an earlier function wrote must not count
        returned = run()
        found = written if returned is None else returned
        for gradient, right, some in zip(found, exact(), (rows, columns, columns), strict=True):
            assert_close(gradient[:, :, some], right)
            assert gradient.isfinite().all(), "not all of a gradient was written"
        truncated = q.dtype == torch.bfloat16 and not q.is_cuda  # by Triton's interpreter
        if run is ours and not (reasons["flash"] or truncated):
            of_flash = gradient_errors(after_forward("flash")(), exact(), rows, columns)
            for name, error in gradient_errors(found, exact(), rows, columns).items():
                assert error.within(of_flash[name]), (
                    f"{name}: {error} is more than {MOST_ERROR} times FlashAttention-2's "
                    f"{of_flash[name]}"
                )

    return case_beside("flash_attention_backward", size, ours, backend, reasons, check)


def flash_attention_backward_cases() -> Iterator[Case]:
    """The backward pass of `flash_attention` at every size of `attention_peers.SIZES`."""
    return map(case, attention_peers.SIZES)


OPERATIONS: dict[str, Callable[[], Iterator[Case]]] = {
    "flash_attention_backward": flash_attention_backward_cases
}
