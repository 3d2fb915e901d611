"""A character GPT: the general model, attention over any graph, which a triangular one makes a decoder.

Shapes: B windows, T positions, C features.  The graph is an argument of `forward`, never a buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn.graph import Graph
from graphattn.head import Head
from graphattn.scores import Position, alibi, relative

_POSITIONS = ("learned", "none", "rotary", "alibi", "relative")


@dataclass(frozen=True)
class GPTConfig:
    """Sizes and choices of a GPT.

    `position` says how order enters: a `learned` table, `none` (the graph alone), or inside attention as `rotary`,
    `alibi`, or a learned bias per distance, `relative`.
    """

    vocab: int
    block: int = 64
    layers: int = 4
    heads: int = 4
    width: int = 128
    kv_heads: int | None = None
    position: str = "learned"
    qk_norm: bool = False
    softcap: float | None = None
    bias: bool = False
    tie: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab", "block", "layers", "heads", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, {self.heads}, got {self.width}")
        if self.position not in _POSITIONS:
            raise ValueError(f"position must be one of {', '.join(_POSITIONS)}, got {self.position!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Block(nn.Module):
    """One round of messages and one step of thought: `x + attend(norm(x))`, then `x + mlp(norm(x))`."""

    slopes: Tensor

    def __init__(self, config: GPTConfig):
        super().__init__()
        width, bias = config.width, config.bias
        self.position, self.softcap, self.dropout = config.position, config.softcap, config.dropout
        self.norm1 = nn.LayerNorm(width, bias=bias)
        self.head = Head(
            width,
            config.head_dim,
            config.heads,
            kv_heads=config.kv_heads,
            qk_norm=config.qk_norm,
            rotary=config.position == "rotary",
            bias=bias,
            dropout=config.dropout,
        )
        self.out = nn.Linear(width, width, bias=bias)
        self.norm2 = nn.LayerNorm(width, bias=bias)
        self.up = nn.Linear(width, 4 * width, bias=bias)
        self.down = nn.Linear(4 * width, width, bias=bias)
        if config.position == "alibi":
            self.register_buffer("slopes", torch.empty(config.heads), persistent=False)
            self.reset_buffers()
        elif config.position == "relative":
            self.table = nn.Parameter(torch.zeros(config.heads, 2 * config.block - 1))

    def reset_buffers(self) -> None:
        """Slopes 2**(-8 h / H) for heads h = 1..H (Press et al. 2022), which no checkpoint holds."""
        if self.position == "alibi":
            heads, own = self.slopes.numel(), self.norm1.weight
            if not own.is_meta:
                self.slopes = 2.0 ** (-8.0 * torch.arange(1, heads + 1, device=own.device, dtype=own.dtype) / heads)

    def bias(self, offset: int = 0) -> Position | None:
        """What a score gains by distance; `offset` is the position of the first target."""
        if self.position == "alibi":
            return alibi(self.slopes, offset)
        return relative(self.table, offset) if self.position == "relative" else None

    def forward(self, x: Tensor, graph: Graph, *, seed: int | Tensor | None = None, backend: str = "auto") -> Tensor:
        """`(B, T, C)` to `(B, T, C)`."""
        heard = self.head(self.norm1(x), graph, bias=self.bias(), softcap=self.softcap, seed=seed, backend=backend)
        return self.think(x + self.drop(self.out(heard)))

    def think(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """A decoder, encoder or anything between, depending on the graph it is given.

    Example:
        >>> model = GPT(GPTConfig(vocab=65, block=8))
        >>> logits, loss = model(tokens, ga.causal(8), targets)
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.block, config.width) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=config.bias)
        self.predict = None if config.tie else nn.Linear(config.width, config.vocab, bias=False)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Normal weights of deviation 0.02, less on the way into the residual stream (GPT-2); norms 1, biases 0."""
        into_residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, p in self.named_parameters():
            if p.dim() < 2:
                nn.init.zeros_(p) if name.endswith("bias") else nn.init.ones_(p)
            elif name.endswith("table"):
                nn.init.zeros_(p)
            else:
                std = into_residual if name.endswith(("out.weight", "down.weight")) else 0.02
                nn.init.normal_(p, std=std, generator=generator)

    def forward(
        self,
        tokens: Tensor,
        graphs: Graph | Sequence[Graph],
        targets: Tensor | None = None,
        *,
        seed: int | Tensor | None = None,
        backend: str = "auto",
    ) -> tuple[Tensor, Tensor | None]:
        """Predictions and, with targets, their mean cross-entropy.

        Args:
            tokens: `(B, T)` or `(T,)` int64 ids, T at most `config.block`.
            graphs: one `T <- T` Graph for all layers, or several, cycled over the layers.
            targets: `(B, T)` int64, the id each position should predict, -1 where it counts for nothing.
            seed: of edge dropout, the same on every backend; without it torch's random state is used.
            backend: as in `attend`.

        Returns:
            `(logits (B, T, vocab), loss)`; the loss, in nats per character and float32, is None without targets.

        Raises:
            ValueError: more positions than the block, or a graph of another size.
        """
        t = tokens.shape[-1]
        if t > self.config.block:
            raise ValueError(f"the input has {t} positions, but the model's block is {self.config.block}: cut it")
        layers = cycle(graphs, self.config.layers)
        for graph in layers:
            if (graph.t, graph.s) != (t, t):
                raise ValueError(f"the input has {t} positions, but the graph is {graph!r}: it needs {t} <- {t}")
        x = self.tokens(tokens)  # (B, T, C)
        if self.positions is not None:
            x = x + self.positions.weight[:t]
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        for number, (block, graph) in enumerate(zip(self.blocks, layers, strict=True)):
            x = block(x, graph, seed=_layer_seed(seed, number), backend=backend)
        logits = self.logits(x)
        return logits, None if targets is None else loss_of(logits, targets)

    def logits(self, x: Tensor) -> Tensor:
        """`(..., C)` after the last block to `(..., vocab)`."""
        table = self.tokens.weight if self.predict is None else self.predict.weight
        return F.linear(self.norm(x), table)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy per counted target in nats, float32 at least; 0 if none counts."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    flat, wanted = wide.reshape(-1, wide.shape[-1]), targets.reshape(-1)
    total = F.cross_entropy(flat, wanted, ignore_index=-1, reduction="sum")
    return total / (wanted != -1).sum().clamp(min=1)


def _layer_seed(seed: int | Tensor | None, layer: int) -> int | Tensor | None:
    """Layer l drops edges independently of the others; 64-bit arithmetic that wraps."""
    if seed is None:
        return None
    step = 0x1E3779B97F4A7C15 * layer
    return (seed + step) % 2**63 if isinstance(seed, int) else seed + step % 2**61


def cycle(graphs: Graph | Sequence[Graph], layers: int) -> list[Graph]:
    """One graph per layer: layer l has graph l modulo their number."""
    own = [graphs] if isinstance(graphs, Graph) else list(graphs)
    if not own:
        raise ValueError("graphs is empty: give one Graph, or one per layer")
    for g in own:
        if not isinstance(g, Graph):
            raise TypeError(f"graphs must be Graphs, got {type(g).__name__}")
    if len(own) > layers:
        raise ValueError(f"there are {len(own)} graphs for {layers} layers: give at most one per layer")
    return [own[layer % len(own)] for layer in range(layers)]
