"""Train the small GPT on this course's own text, by PyTorch's kernels or by ours, and compare.

text = course_text()
characters = Characters(text)
model = GPT(GPTConfig(len(characters), context=256, bias=False), *VARIANTS["ours, fused"])
losses = train(model, excerpts(characters.encode(text), 256, batch=4, steps=100), peak=3e-4)
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional as F

from helpers import profiling
from helpers.gpt import GPT, Attention, Hidden, causal_attention, linear_gelu, training_step
from helpers.kernel_names import decode
from helpers.kernels.attention import flash_attention
from helpers.kernels.gelu import triton_gelu
from helpers.kernels.matmul import triton_matmul

if TYPE_CHECKING:
    import pandas as pd

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
LAST = 11  # the text must not depend on the notebook that trains with it
BETAS, DECAY = (0.9, 0.95), 0.1  # nanoGPT's, https://github.com/karpathy/nanoGPT (train.py)
KINDS = {  # of kernels, by their full names and what `kernel_names` makes of them
    "GeLU": "gelu",
    "attention": r"attention|flash|fmha|(gradient|delta|prepare)_kernel|dot_do_o|convert_dq",
    "matmuls": "matrix multiply|matmul",
    "AdamW": "adam",
}
REST = "rest"


def course_text(last: int = LAST) -> str:
    """Text and code of the notebooks 01 to `last`, in order; no outputs."""
    paths = sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb"))
    found = [path for path in paths if int(path.name[:2]) <= last]
    cells = [cell for path in found for cell in json.loads(path.read_text("utf-8"))["cells"]]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


class Characters:
    """The characters of a text, in order, and their numbers."""

    def __init__(self, text: str):
        self.all = "".join(sorted(set(text)))
        self._numbers = {character: number for number, character in enumerate(self.all)}

    def __len__(self) -> int:
        return len(self.all)

    def encode(self, text: str) -> torch.Tensor:
        """Numbers in int64; ValueError for a character that is not among them."""
        if foreign := set(text) - set(self.all):
            raise ValueError(f"unknown characters: {''.join(sorted(foreign))!r}")
        return torch.tensor([self._numbers[character] for character in text], dtype=torch.int64)

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(self.all[token] for token in tokens.tolist())


def our_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As `helpers.gpt.causal_attention`, by our kernels."""
    return flash_attention(q, k, v, causal=True)


def linear_triton_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """As `helpers.gpt.linear_gelu`, with our GeLU after PyTorch's matmul."""
    return triton_gelu(F.linear(x, weight, bias))


def fused_linear_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """As `helpers.gpt.linear_gelu`, by one kernel of ours; ValueError for a bias, which it lacks.

    The product before GeLU is not kept: the backward pass computes it once more.
    """
    if bias is not None:
        raise ValueError("linear and GeLU are fused without a bias: GPTConfig(bias=False)")
    kind = x.device.type
    if torch.is_autocast_enabled(kind):  # which does not see into our functions
        x, weight = (t.to(torch.get_autocast_dtype(kind)) for t in (x, weight))
    hidden = triton_matmul(x.flatten(0, -2), weight.t(), activation="gelu")
    return hidden.unflatten(0, x.shape[:-1])


# Attention and the MLP's hidden layer, for GPT.
VARIANTS: dict[str, tuple[Attention, Hidden]] = {
    "PyTorch": (causal_attention, linear_gelu),
    "our attention": (our_attention, linear_gelu),
    "our attention, GeLU": (our_attention, linear_triton_gelu),
    "ours, fused": (our_attention, fused_linear_gelu),
}


def excerpts(
    tokens: torch.Tensor, context: int, batch: int, steps: int, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` batches from anywhere in the tokens (1-d): (batch, context), and what follows each.

    A seed gives the same ones on every device. ValueError for fewer than context + 1 tokens.
    """
    if len(tokens) <= context:
        raise ValueError(f"{len(tokens)} tokens are too few for excerpts of {context} and the next")
    draw = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(tokens) - context, (steps, batch, 1), generator=draw)
    places = torch.arange(context + 1, device=tokens.device)
    for first in starts.to(tokens.device):
        found = tokens[first + places]
        yield found[:, :-1], found[:, 1:]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Of a step, counted from 0: up for a tenth of the steps, then down to a tenth of the peak."""
    rise = max(1, steps // 10)
    return peak * min((step + 1) / rise, 1 - 0.9 * (step + 1 - rise) / max(1, steps - rise))


def train(
    model: nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    peak: float,
    autocast: torch.dtype | None = None,
) -> list[float]:
    """A step of AdamW for each batch; the losses before them.

    peak: of `learning_rate`. autocast: as for `helpers.gpt.training_step`. The host waits for the
    device at the end only.
    """
    batches = list(batches)
    optimizer = adamw(model, peak)
    losses = []
    for step, (tokens, targets) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches), peak)
        losses.append(training_step(model, optimizer, tokens, targets, autocast))
    return torch.stack(losses).tolist() if losses else []


def adamw(model: nn.Module, rate: float) -> torch.optim.AdamW:
    """The optimizer of `train`: on a GPU one kernel for many weights."""
    return torch.optim.AdamW(model.parameters(), rate, BETAS, weight_decay=DECAY, fused=True)


def gradients(
    model: GPT,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    autocast: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """The loss's gradient of each weight, by name; "blocks.0.qkv.weight" in parts q, k and v."""
    with torch.autocast(tokens.device.type, dtype=autocast, enabled=autocast is not None):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    names, weights = zip(*model.named_parameters(), strict=True)
    found = {}
    for name, gradient in zip(names, torch.autograd.grad(loss, weights), strict=True):
        if ".qkv." in name:
            parts = zip("qkv", gradient.chunk(3), strict=True)
            found |= {name.replace("qkv", part): of_part for part, of_part in parts}
        else:
            found[name] = gradient
    return found


@torch.no_grad()
def mean_loss(
    model: GPT, tokens: torch.Tensor, batch: int, autocast: torch.dtype | None = None
) -> float:
    """Of tokens (1-d) cut into pieces of the model's context; what is left at the end is not used.

    batch: so many pieces at once. ValueError for fewer tokens than one piece and the next.
    """
    context = model.config.context
    pieces = (len(tokens) - 1) // context
    if pieces < 1:
        raise ValueError(f"{len(tokens)} tokens are fewer than a piece of {context} and the next")
    inputs, targets = (tokens[i : i + pieces * context].view(pieces, context) for i in (0, 1))
    total = tokens.new_zeros((), dtype=torch.float64)
    with torch.autocast(tokens.device.type, dtype=autocast, enabled=autocast is not None):
        for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
            total += loss.double()
    return total.item() / (pieces * context)


@torch.no_grad()
def continued(
    model: GPT,
    tokens: torch.Tensor,
    count: int,
    words: int,
    temperature: float = 0.8,
    seed: int = 0,
    autocast: torch.dtype | None = None,
) -> torch.Tensor:
    """tokens (1-d) and `count` more, each drawn from what the model expects after those before.

    words: only tokens below it are drawn; rows of a padded vocabulary lie above. temperature: 0
    takes the likeliest. The model sees its context's last tokens.
    """
    draw = torch.Generator().manual_seed(seed)
    for _ in range(count):
        with torch.autocast(tokens.device.type, dtype=autocast, enabled=autocast is not None):
            logits = model(tokens[None, -model.config.context :])[0, -1, :words].float().cpu()
        if temperature:
            chances = torch.softmax(logits / temperature, dim=0)
            new = torch.multinomial(chances, 1, generator=draw)
        else:
            new = logits.argmax(keepdim=True)
        tokens = torch.cat([tokens, new.to(tokens.device)])
    return tokens


@functools.cache
def kind_of_kernel(name: str) -> str:
    """A key of `KINDS`, or `REST`, for a kernel's full name. A fused matmul counts as a matmul."""
    text = f"{decode(name).operation} {name}".lower()
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, text)), REST)


def ms_by_kind(capture: profiling.Capture) -> "pd.Series":
    """What the kernels of each kind took together, in ms; of kinds that ran none, 0."""
    kernels = profiling.kernels(capture)
    us = kernels.groupby(kernels["full_name"].map(kind_of_kernel))["duration_us"].sum()
    return us.reindex([*KINDS, REST], fill_value=0.0) / 1000
