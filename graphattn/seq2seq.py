"""Cross-attention models: queries from the stream that is written, keys and values from the one that is read.

An encoder-decoder is three graphs: who reads whom in the source, in the target, and across.  All are arguments.
Shapes: B samples, S source and T target positions, C features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from graphattn.gpt import GPT, Block, GPTConfig, cycle, loss_of
from graphattn.graph import Graph
from graphattn.head import Head
from graphattn.patterns import causal, padding


class CrossBlock(Block):
    """The decoder block of Vaswani et al. 2017 (pre-norm): attend to oneself, attend to the context, think."""

    def __init__(self, config: GPTConfig, context_dim: int | None = None):
        super().__init__(config)
        width, bias = config.width, config.bias
        self.norm_cross = nn.LayerNorm(width, bias=bias)
        self.cross = Head(
            width, config.head_dim, config.heads, context_dim=context_dim, qk_norm=config.qk_norm, bias=bias,
            dropout=config.dropout,
        )  # fmt: skip
        self.out_cross = nn.Linear(width, width, bias=bias)

    def forward(  # type: ignore[override]
        self, x: Tensor, graph: Graph, context: Tensor, cross: Graph, *, backend: str = "auto"
    ) -> Tensor:
        """`x (B, T, C)`, `graph (T <- T)`, `context (B, S, context_dim)`, `cross (T <- S)` to `(B, T, C)`."""
        heard = self.head(self.norm1(x), graph, bias=self.bias(), softcap=self.softcap, backend=backend)
        x = x + self.drop(self.out(heard))
        read = self.cross(self.norm_cross(x), cross, context, backend=backend)
        return self.think(x + self.drop(self.out_cross(read)))


class Graphs(NamedTuple):
    """Who reads whom in an encoder-decoder: `encoder (S <- S)`, `decoder (T <- T)`, `cross (T <- S)`."""

    encoder: Graph
    decoder: Graph
    cross: Graph

    @classmethod
    def of(cls, lengths: Tensor | Sequence[int], s: int, t: int) -> Graphs:
        """Sample b has `lengths[b]` source tokens of s; its t target tokens are written left to right."""
        return cls(padding(lengths, s), causal(t), padding(lengths, s, t))


class EncoderDecoder(nn.Module):
    """A full encoder-decoder (Vaswani et al. 2017, pre-norm): one vocabulary, learned positions, tied predictions.

    Args:
        config: of both stacks; `block` bounds the source and the target, `position` is "learned".
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        if config.position != "learned":
            raise ValueError(f"an encoder-decoder has learned positions, got position={config.position!r}")
        self.config = config
        width = config.width
        self.tokens = nn.Embedding(config.vocab, width)
        self.source_positions = nn.Embedding(config.block, width)
        self.target_positions = nn.Embedding(config.block, width)
        self.encoder = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.encoder_norm = nn.LayerNorm(width, bias=config.bias)
        self.decoder = nn.ModuleList(CrossBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width, bias=config.bias)
        _initialise(self)

    def encode(self, source: Tensor, graph: Graph) -> Tensor:
        """`(B, S)` ids to `(B, S, C)`."""
        x = self.tokens(source) + self.source_positions.weight[: source.shape[-1]]
        for block in self.encoder:
            x = block(x, graph)
        return self.encoder_norm(x)

    def decode(self, target: Tensor, context: Tensor, graph: Graph, cross: Graph) -> Tensor:
        """`(B, T)` ids and `(B, S, C)` to logits `(B, T, vocab)`."""
        x = self.tokens(target) + self.target_positions.weight[: target.shape[-1]]
        for block in self.decoder:
            x = block(x, graph, context, cross)
        return F.linear(self.norm(x), self.tokens.weight)

    def forward(
        self, source: Tensor, target: Tensor, graphs: Graphs, targets: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Predictions and, with targets, their mean cross-entropy.

        Args:
            source: `(B, S)`, target: `(B, T)` int64 ids, at most `config.block` long.
            targets: `(B, T)`, the id each target position should predict, -1 where it counts for nothing.

        Returns:
            `(logits (B, T, vocab), loss)`, the loss None without targets.
        """
        context = self.encode(source, graphs.encoder)
        logits = self.decode(target, context, graphs.decoder, graphs.cross)
        return logits, None if targets is None else loss_of(logits, targets)

    @torch.no_grad()
    def greedy(self, source: Tensor, lengths: Tensor | Sequence[int], start: int, stop: int, length: int) -> Tensor:
        """The most likely token at each step: `(B, n)` ids, n <= length, without `start`, filled up with `stop`."""
        training = self.training
        self.eval()
        s = source.shape[-1]
        context = self.encode(source, padding(lengths, s))
        out = source.new_full((len(source), 1), start)
        done = torch.zeros(len(source), dtype=torch.bool, device=source.device)
        for n in range(1, length + 1):
            new = self.decode(out, context, causal(n), padding(lengths, s, n))[:, -1].argmax(-1)
            new = torch.where(done, stop, new)
            out, done = torch.cat([out, new[:, None]], 1), done | (new == stop)
            if bool(done.all()):
                break
        self.train(training)
        return out[:, 1:]


class GatedCross(nn.Module):
    """A gated cross-attention block (Flamingo, Alayrac et al. 2022): the identity until its gates open.

    `x + tanh(a) * attend(x, context)`, then `x + tanh(b) * mlp(x)`, with a = b = 0 at first: adding exact zeros.
    """

    def __init__(self, config: GPTConfig, context_dim: int):
        super().__init__()
        width = config.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = Head(width, config.head_dim, config.heads, context_dim=context_dim)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.gate_attend, self.gate_think = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, context: Tensor, graph: Graph) -> Tensor:
        """`x (B, T, C)`, `context (B, S, context_dim)`, `graph (T <- S)` to `(B, T, C)`."""
        x = x + self.gate_attend.tanh() * self.out(self.head(self.norm1(x), graph, context))
        return x + self.gate_think.tanh() * self.down(F.gelu(self.up(self.norm2(x))))


class Conditioned(nn.Module):
    """A frozen GPT with a gated cross-attention block before each of its own: only the new blocks learn.

    Args:
        model: the language model; its parameters stop requiring gradients.
        context_dim: width of the stream it learns to read.
    """

    def __init__(self, model: GPT, context_dim: int):
        super().__init__()
        self.model = model.requires_grad_(False)
        self.gated = nn.ModuleList(GatedCross(model.config, context_dim) for _ in model.blocks)
        _initialise(self.gated)

    def forward(
        self, tokens: Tensor, graphs: Graph | Sequence[Graph], context: Tensor, cross: Graph,
        targets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """As `GPT.forward`, with `context (B, S, context_dim)` and `cross (T <- S)`: which token reads which of it."""
        model, t = self.model, tokens.shape[-1]
        x = model.tokens(tokens)
        if model.positions is not None:
            x = x + model.positions.weight[:t]
        for gated, block, graph in zip(self.gated, model.blocks, cycle(graphs, model.config.layers), strict=True):
            x = block(gated(x, context, cross), graph)
        logits = model.logits(x)
        return logits, None if targets is None else loss_of(logits, targets)


def _initialise(module: nn.Module) -> None:
    """Matrices normal with deviation 0.02, norms 1, biases 0 (GPT-2); gates and other scalars as they are."""
    for name, p in module.named_parameters():
        if p.dim() >= 2:
            nn.init.normal_(p, std=0.02)
        elif name.endswith("bias"):
            nn.init.zeros_(p)
