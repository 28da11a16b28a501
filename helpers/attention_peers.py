"""The cases of attention for `helpers.peers`, and how its errors are measured.

The backward pass, of the same sizes, is in `helpers.attention_backward_peers`.

bf16, 16,384 tokens a call, 16 heads of 128 or 32 of 64, from 512 to 16,384 tokens a sequence.
FlexAttention is compiled for each shape, for seconds. To have that done before, by several
processes: `case(size).peers[LABELS["flex"]]()` for each n-th of `SIZES` fills Inductor's cache.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch

from helpers import device as machine
from helpers import results, traffic
from helpers.attention_backends import BACKENDS, LABELS, missing
from helpers.check import assert_close
from helpers.kernels import attention
from helpers.peer_cases import Case

TOKENS = 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
PEERS = ("flash", "flex", "cudnn", "efficient")  # standard and math would need n x n scores
MOST_ERROR = 1.5  # times that of PyTorch's FlashAttention-2
COMPARED_ROWS = 64
# Times `Size.flops`: five matmuls to two.
WORK = {"flash_attention": 1.0, "flash_attention_backward": 2.5}
REFERENCES = {
    "flash_attention": "attention_references.csv",
    "flash_attention_backward": "attention_backward_references.csv",
}


@dataclasses.dataclass(frozen=True)
class Size:
    """Shapes of one call; keys and kv_heads where they differ from queries and heads."""

    batch: int
    heads: int
    queries: int
    dim: int
    causal: bool = False
    dtype: torch.dtype = torch.bfloat16
    keys: int | None = None
    kv_heads: int | None = None

    def __str__(self) -> str:
        notes = [f"{self.batch}x{self.heads}x{self.queries}x{self.dim}"]
        notes += [f"keys {self.keys}"] if self.keys else []
        notes += [f"kv-heads {self.kv_heads}"] if self.kv_heads else []
        return " ".join([*notes, "causal"] if self.causal else notes)

    @property
    def flops(self) -> float:
        """Of the two matmuls; half of them when causal."""
        shape = (self.batch, self.heads, self.queries, self.dim, self.dtype)
        square = traffic.attention(*shape, causal=self.causal).flops
        keys = self.keys or self.queries
        return square * (min(keys, self.queries) if self.causal else keys) / self.queries

    def tensors(self) -> list[torch.Tensor]:
        """Random q, k and v; normal numbers, as after a layer norm."""
        of_keys = (self.batch, self.kv_heads or self.heads, self.keys or self.queries, self.dim)
        shapes = ((self.batch, self.heads, self.queries, self.dim), of_keys, of_keys)
        return [torch.randn(s, device=machine.device()).to(self.dtype) for s in shapes]


EQUAL_SIZES = tuple(  # of equal numbers of tokens, and of numbers in Q
    Size(TOKENS // length, heads, length, dim, causal)
    for heads, dim in ((16, 128), (32, 64))
    for causal in (False, True)
    for length in LENGTHS
)
OTHER_SIZES = (
    Size(4, 16, 4096, 80, True),
    Size(4, 8, 4096, 256, True),
    Size(4, 16, 4096, 128, True, torch.float16),
    Size(4, 16, 2048, 64, True, torch.float32),
    Size(4, 16, 512, 128, keys=8192),
    Size(4, 32, 4096, 128, True, kv_heads=8),
)
SIZES = EQUAL_SIZES + OTHER_SIZES


@dataclasses.dataclass(frozen=True)
class Errors:
    """Differences from attention in float64: root mean square, and the largest."""

    rms: float
    max: float

    def within(self, other: "Errors", factor: float = MOST_ERROR) -> bool:
        """True when neither is more than `factor` times the other's."""
        return self.rms <= factor * other.rms and self.max <= factor * other.max


def some_rows(n: int) -> list[int]:
    """The queries, or keys, whose results are compared: the first, the last three, many between."""
    between = torch.linspace(0, n - 1, min(n, COMPARED_ROWS)).long().tolist()
    return sorted({*between, *range(max(0, n - 3), n)})


def exact_weights(q, k, rows: list[int], causal: bool = False) -> torch.Tensor:
    """The weights of some queries, from float64 q and k of equally many heads."""
    scores = q[:, :, rows] @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if causal:
        queries = torch.tensor(rows, device=q.device)[:, None]
        hidden = torch.arange(k.shape[-2], device=q.device) > queries
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, dim=-1)


def exact_rows(q, k, v, rows: list[int], causal: bool = False) -> torch.Tensor:
    """Attention of some queries in float64: (batch, heads, len(rows), head dim)."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(groups, dim=1) for x in (k, v))
    return exact_weights(q.double(), k, rows, causal) @ v


def errors(found: torch.Tensor, exact: torch.Tensor) -> Errors:
    """Of results against exact ones, for the same rows."""
    gap = (found.double() - exact).abs()
    return Errors(gap.square().mean().sqrt().item(), gap.max().item())


def case(size: Size) -> Case:
    """`flash_attention` of one size beside its peers; cuDNN, the fastest in PyTorch, is the
    ceiling, although no bound: flash-attn-4 is faster. Without cuDNN: the next that there is.

    Ours writes a tensor that is there; peers allocate theirs (see `helpers.attention_backends`).
    Ours is right when its errors are at most `MOST_ERROR` times those of FlashAttention-2; the
    others, and ours where that cannot run, when they are within `helpers.check`'s tolerance.
    """
    q, k, v = size.tensors()
    out = torch.empty_like(q)
    rows = some_rows(size.queries)
    exact = exact_rows(q, k, v, rows, size.causal)

    def ours():
        attention.launch_flash_attention(q, k, v, out, size.causal, None)

    def backend(name: str) -> Callable:
        return lambda: BACKENDS[name](q, k, v, size.causal)

    reasons = {name: missing(name, q, k, v, size.causal) for name in PEERS}

    def check(run: Callable) -> None:
        out.fill_(torch.nan)  # what an earlier function wrote must not count
        returned = run()
        result = out if returned is None else returned
        assert_close(result[:, :, rows], exact)
        assert result.isfinite().all(), "not all of the output was written"
        if run is ours and not reasons["flash"]:
            of_ours = errors(result[:, :, rows], exact)
            of_flash = errors(backend("flash")()[:, :, rows], exact)
            assert of_ours.within(of_flash), (
                f"{of_ours} is more than {MOST_ERROR} times FlashAttention-2's {of_flash}"
            )

    return case_beside("flash_attention", size, ours, backend, reasons, check)


def case_beside(operation: str, size: Size, ours, backend, reasons: dict, check) -> Case:
    """A case whose ceiling is the fastest of PyTorch's backends that can run.

    backend: from a name of `PEERS` to a function. reasons: why some of them cannot run, or "".
    """
    ceiling = next((name for name in ("cudnn", "flash", "efficient") if not reasons[name]), "math")
    return Case(
        operation,
        str(size.dtype).removeprefix("torch."),
        str(size),
        ours=ours,
        peers={LABELS[name]: reasons[name] or backend(name) for name in PEERS},
        ceiling=(LABELS[ceiling], backend(ceiling)),
        check=check,
    )


def speeds(peers, operation: str = "flash_attention"):
    """From rows of `helpers.peers` to a pandas frame, a row each of `SIZES` that is among them.

    operation: a key of `WORK`. dtype and shape are as in the rows, tokens are queries, mask is
    "full" or "causal"; then our TFLOP/s, and our speed as a multiple of each peer's.
    """
    import pandas as pd

    rows = []
    for size in SIZES:
        names = {"dtype": str(size.dtype).removeprefix("torch."), "shape": str(size)}
        found = peers[
            (peers["operation"] == operation)
            & (peers["dtype"] == names["dtype"])
            & (peers["shape"] == names["shape"])
        ]
        if found.empty:
            continue
        ms = found["ours_ms"].iloc[0]
        names |= {"dim": size.dim, "mask": "causal" if size.causal else "full"}
        names |= {"tokens": size.queries, "TFLOP/s": WORK[operation] * size.flops / ms / 1e9}
        ratios = found.dropna(subset="peer").set_index("peer")["peer_ms"] / ms
        rows.append(names | ratios.add_prefix("× ").to_dict())
    return pd.DataFrame(rows)


def references(operation: str = "flash_attention"):
    """flash-attn-4 as measured on an H200 (data/README.md), as a pandas frame.

    operation: a key of `REFERENCES`. Added to the file's columns: mask, "full" or "causal", and the
    speed as a multiple of cuDNN's.
    """
    import pandas as pd

    table = pd.read_csv(results.ROOT / "data" / REFERENCES[operation])
    table["mask"] = table["causal"].map({False: "full", True: "causal"})
    return table.assign(ratio_to_cudnn=table["tflop_per_s"] / table["cudnn_tflop_per_s"])


def flash_attention_cases() -> Iterator[Case]:
    """`flash_attention` at every size of `SIZES`."""
    return map(case, SIZES)


OPERATIONS: dict[str, Callable[[], Iterator[Case]]] = {"flash_attention": flash_attention_cases}
