"""Whole graphs and pairs of nodes, with the blocks that classify nodes.

A batch is one disjoint graph (`graphattn.disjoint`) and `index (N,)`, which of the G graphs each node is in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .features import drop
from .graph import Graph
from .nodes import Features, GraphBlock

POOLS = ("sum", "mean", "max")


def pool(x: Tensor, index: Tensor, count: int, how: str) -> Tensor:
    """`(N, C)` to `(count, C)`: the sum, mean or maximum over the nodes of each graph; 0 for a graph without nodes."""
    if how not in POOLS:
        raise ValueError(f"how must be one of {', '.join(POOLS)}; got {how!r}")
    if how == "max":
        out = x.new_zeros(count, x.shape[1])
        return out.scatter_reduce(0, index[:, None].expand_as(x), x, "amax", include_self=False)
    total = x.new_zeros(count, x.shape[1]).index_add(0, index, x)
    if how == "sum":
        return total
    size = torch.bincount(index, minlength=count).clamp(min=1)
    return total / size[:, None]


class GraphPredictor(nn.Module):
    """One vector of outputs for each graph of a disjoint batch: classes, or a regression's value.

    A projection, `layers` of `GraphBlock`, and a two-layer network on what the layers' nodes pool to (every layer is
    pooled, as in Xu et al. 2019, section 4.2).

    Args:
        features: width of the node features; outputs: numbers per graph.
        width, heads, layers: of the blocks.
        score: "dot", "additive" or "gatv2".
        pools: any of "sum", "mean", "max", side by side.
        dropout, edge_dropout: see `GraphBlock`.
        edge_dim: width of edge features.
        norm: "layer" or "batch".
        degree: blocks see how many edges each node has (attention is a mean, which forgets it).
    """

    def __init__(
        self, features: int, outputs: int, *, width: int = 64, heads: int = 4, layers: int = 4, score: str = "dot",
        pools: Sequence[str] = ("mean", "max"), dropout: float = 0.0, edge_dropout: float = 0.0,
        edge_dim: int | None = None, norm: str = "layer", degree: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        pools = tuple(pools)
        if not pools or any(p not in POOLS for p in pools):
            raise ValueError(f"pools must name some of {', '.join(POOLS)}; got {pools!r}")
        self.features, self.pools, self.dropout = features, pools, dropout
        self.enter = nn.Linear(features, width)
        self.blocks = nn.ModuleList(
            GraphBlock(
                width, heads, score=score, dropout=dropout, edge_dropout=edge_dropout, edge_dim=edge_dim, norm=norm,
                degree=degree,
            )
            for _ in range(layers)
        )  # fmt: skip
        # a layer norm here would forget how large a sum is
        wide = width * len(pools)
        self.norms = nn.ModuleList(
            nn.BatchNorm1d(wide) if norm == "batch" else nn.Identity() for _ in range(layers + 1)
        )
        self.leave = nn.Sequential(
            nn.Linear(wide * (layers + 1), width), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(width, outputs),
        )  # fmt: skip

    def forward(
        self, x: Tensor, graph: Graph, index: Tensor, count: int | None = None, edge_features: Tensor | None = None,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """`(N, features)` to `(G, outputs)`.

        Args:
            graph: `(N <- N)`, disjoint.
            index: `(N,)` int64, the graph each node is in.
            count: G, by default the last index and one.
            edge_features: `(E, edge_dim)` in edge order.
            options: of `attend`.
        """
        if index.shape != x.shape[:1]:
            raise ValueError(f"index must say of each of {x.shape[0]} nodes its graph, got shape {tuple(index.shape)}")
        if count is None:
            count = int(index.max()) + 1 if index.numel() else 0
        x = F.gelu(self.enter(x))
        found = [self._pooled(x, index, count)]
        for block in self.blocks:
            x = block(x, graph, edge_features, **options)
            found.append(self._pooled(x, index, count))
        return self.leave(torch.cat([norm(v) for norm, v in zip(self.norms, found, strict=True)], 1))

    def _pooled(self, x: Tensor, index: Tensor, count: int) -> Tensor:
        return torch.cat([pool(x, index, count, how) for how in self.pools], 1)


class LinkScorer(nn.Module):
    """A score for each pair of nodes, from what an encoder makes of them on the graph.

    score(a, b) = sum_c w_c z_ac z_bc + bias, the same in both directions (DistMult, Yang et al. 2015); with
    `directed=True`, source and target have projections of their own.

    Args:
        encoder: any module that takes (x, graph) and gives `(N, width)`, such as `NodeClassifier(features, width)`.
    """

    def __init__(self, encoder: nn.Module, width: int, *, directed: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder, self.dropout = encoder, dropout
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(()))
        self.source = nn.Linear(width, width) if directed else None
        self.target = nn.Linear(width, width) if directed else None

    def forward(self, x: Features, graph: Graph, pairs: Tensor, **options: Any) -> Tensor:
        """`(P,)` scores of pairs `(2, P)` (source, target), to be told from 0 by `binary_cross_entropy_with_logits`.

        The graph must lack the edges that are asked about, or the encoder reads the answer: see `split_links`.
        """
        z = drop(self.encoder(x, graph, **options), self.dropout, self.training)
        source = z if self.source is None else self.source(z)
        target = z if self.target is None else self.target(z)
        both = source.index_select(0, pairs[0]) * target.index_select(0, pairs[1])
        return both @ self.weight + self.bias


def split_links(
    graph: Graph, val: float = 0.05, test: float = 0.1, seed: int = 0
) -> tuple[Graph, dict[str, tuple[Tensor, Tensor]]]:
    """Hide some edges of an undirected graph, to be told from pairs that are no edges.

    Returns:
        The graph of the remaining edges, both directions, and for "train", "val", "test" the pairs `(2, P)` and labels
        `(P,)`, 1 for an edge (each once) and as many 0 for pairs that are no edge of the whole graph.

    Raises:
        ValueError: the graph is not symmetric, or has too few pairs that are no edge.
    """
    if graph != graph.T:
        raise ValueError(f"{graph!r} is not symmetric: unite it with its transpose, graph | graph.T")
    draw = torch.Generator().manual_seed(seed)
    target, source = graph.targets_sources()
    once = source < target
    edges = torch.stack([source[once], target[once]])
    edges = edges[:, torch.randperm(edges.shape[1], generator=draw)]
    n, total = graph.t, edges.shape[1]
    if total > n * (n - 1) // 2 - total:
        raise ValueError(f"{graph!r} has fewer pairs without an edge than pairs with one")
    taken = graph.edge_keys()
    fake = torch.zeros(0, dtype=torch.int64)
    while fake.numel() < total:
        ends = torch.randint(n, (2, 2 * total + 16), generator=draw).sort(0).values
        ends = ends[:, ends[0] < ends[1]]
        keys = ends[1] * (graph.s + 1) + ends[0]
        keys = torch.cat([fake, keys[~torch.isin(keys, taken)]]).unique()
        fake = keys[torch.randperm(keys.numel(), generator=draw)]
    wrong = torch.stack([fake[:total] % (graph.s + 1), fake[:total] // (graph.s + 1)])
    sizes = [round(val * total), round(test * total)]
    parts, at = {}, 0
    for name, size in (("val", sizes[0]), ("test", sizes[1]), ("train", total - sum(sizes))):
        pairs = torch.cat([edges[:, at : at + size], wrong[:, at : at + size]], 1)
        parts[name] = (pairs, torch.cat([torch.ones(size), torch.zeros(size)]))
        at += size
    hidden = edges[:, : sum(sizes)]
    keys = torch.cat([hidden[1] * (graph.s + 1) + hidden[0], hidden[0] * (graph.s + 1) + hidden[1]])
    return graph - Graph.from_keys(keys, graph.shape), parts
