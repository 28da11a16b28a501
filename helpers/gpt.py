"""A small GPT: the model of nanoGPT without dropout; attention and GeLU are arguments.

model = GPT(GPTConfig(vocabulary=50257))      # 124,439,808 parameters, as GPT-2's smallest
logits = model(tokens)                        # (batch, sequence, vocabulary)
loss = training_step(model, optimizer, tokens, targets)
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

# (q, k, v) -> out, all (batch, heads, sequence, head_dim); each position sees itself and earlier.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (x, weight, bias) -> gelu(x weightᵀ + bias); (..., width), (4 width, width), (4 width,) or None.
Hidden = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """By default the smallest GPT-2: 12 layers of width 768, 12 heads of 64.

    bias: whether linear layers and layer norms have one.
    """

    vocabulary: int = 50257
    context: int = 1024  # the most positions
    layers: int = 12
    heads: int = 12
    width: int = 768
    bias: bool = True

    def __post_init__(self):
        for name, size in dataclasses.asdict(self).items():
            if name != "bias" and size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads do not divide a width of {self.width}")


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's own."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def linear_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The MLP's hidden layer by PyTorch: a matmul and a kernel for GeLU, in its tanh form."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


class Block(nn.Module):
    """Attention, then an MLP, each on normalised input and added to it (pre-norm)."""

    def __init__(self, config: GPTConfig, attention: Attention, hidden: Hidden):
        super().__init__()
        width, bias = config.width, config.bias
        self.heads, self.attention, self.hidden = config.heads, attention, hidden
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, bias=bias) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias)
        self.projection = nn.Linear(width, width, bias)
        self.up = nn.Linear(width, 4 * width, bias)
        self.down = nn.Linear(4 * width, width, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, sequence, width) to the same."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        x = x + self.projection(self.attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.hidden(self.norm_2(x), self.up.weight, self.up.bias))


class GPT(nn.Module):
    """Tokens to the logits of the next; the projection to them shares the embedding's weights."""

    def __init__(
        self,
        config: GPTConfig,
        attention: Attention = causal_attention,
        hidden: Hidden = linear_gelu,
    ):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config, attention, hidden) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.apply(self._initialise)
        for block in self.blocks:  # 2 x layers of them are added up: keep the sum's size
            for layer in (block.projection, block.down):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * config.layers))

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, sequence) of token numbers to (batch, sequence, vocabulary).

        ValueError for tokens of another shape, or a sequence that is longer than the context.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens are (batch, sequence), not {tuple(tokens.shape)}")
        if tokens.shape[1] > self.config.context:
            raise ValueError(f"{tokens.shape[1]} tokens, and a context of {self.config.context}")
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    autocast: torch.dtype | None = None,
) -> torch.Tensor:
    """One step on (batch, sequence) tokens and the tokens that follow them; the loss before it.

    autocast: the 16-bit type in which matmuls run; None leaves all in the weights' own.
    """
    with torch.autocast(tokens.device.type, dtype=autocast, enabled=autocast is not None):
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()
