"""Node classification: the same Head that trains a GPT, on a graph of papers.

Shapes: N nodes, C features, E edges in edge order; features may be `(N, C)`, `(B, N, C)` on one shared graph, or
`SparseFeatures`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .features import Projection, SparseFeatures, drop
from .graph import Graph
from .head import SCORES, Head

BLOCKS = ("gat", "transformer")
NORMS = ("layer", "batch")
Features = Tensor | SparseFeatures


class GATLayer(nn.Module):
    """One layer of GAT (Velickovic et al. 2018, equations 4 to 6): heads concatenated, or averaged, plus a bias.

    Args:
        dim: width of the features.
        head_dim, heads: width and number of heads.
        concat: heads side by side, `heads * head_dim` wide; else their mean, `head_dim` wide.
        score: "additive" (GAT), "gatv2" or "dot".
        dropout: probability of dropping an edge; value_dropout: an entry of the values, as in the authors' code.
        edge_dim: width of edge features, which enter the score before its nonlinearity ("dot": keys and values).
        tied: of `Head`.
        residual: a learned projection of the features is added.
        hops, teleport: the attention is applied `hops` times, each time keeping a share `teleport` of the values
            (attention diffusion, Wang et al. 2021, equation 6); one hop is GAT.
    """

    def __init__(
        self, dim: int, head_dim: int, heads: int = 1, *, concat: bool = True, score: str = "additive",
        dropout: float = 0.0, value_dropout: float = 0.0, slope: float = 0.2, edge_dim: int | None = None,
        tied: bool = False, residual: bool = False, hops: int = 1, teleport: float = 0.1,
    ) -> None:  # fmt: skip
        super().__init__()
        if hops < 1:
            raise ValueError(f"hops must be at least 1, got {hops}")
        if not 0 <= teleport < 1:
            raise ValueError(f"teleport must be in [0, 1), got {teleport}")
        self.value_dropout, self.hops, self.teleport = value_dropout, hops, teleport
        self.head = _projected(Head(dim, head_dim, heads, score=score, tied=tied, dropout=dropout, slope=slope))
        self.concat = concat
        width = heads * head_dim if concat else head_dim
        self.bias = nn.Parameter(torch.zeros(width))
        self.skip = Projection(dim, width, bias=False) if residual else None
        self.edges = EdgeFeatures(edge_dim, self.head) if edge_dim is not None else None

    def forward(
        self, x: Features, graph: Graph, edge_features: Tensor | None = None, *, pairs: Graph | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """`(..., N, dim)` to `(..., N, width)`; edge_features `(E, edge_dim)` in edge order.

        With pairs, also the scores of these pairs (without edge features), `(..., heads, P)`.
        """
        options |= _edge_options(self.edges, edge_features)
        # the head's projections take sparse features too
        given = cast(Tensor, x)
        queries, keys, values = self.head.project(given)
        values = drop(values, self.value_dropout, self.training)  # (..., heads, N, head_dim)
        out = self.head.attend(queries, keys, values, graph, **options)  # (..., N, heads * head_dim)
        if self.hops > 1:
            own = self.teleport * values.transpose(-3, -2).flatten(-2)
            out = (1 - self.teleport) * out + own
            for hop in range(1, self.hops):
                far = out.unflatten(-1, (self.head.heads, self.head.head_dim)).transpose(-3, -2)
                mine = later(options, hop)
                out = (1 - self.teleport) * self.head.attend(queries, keys, far, graph, **mine) + own
        if not self.concat:
            out = out.unflatten(-1, (self.head.heads, self.head.head_dim)).mean(-2)
        out = out + self.bias
        if self.skip is not None:
            out = out + self.skip(x)
        return out if pairs is None else (out, self.head.edge_scores(queries, keys, pairs))


class NodeNorm(nn.BatchNorm1d):
    """Batch norm over all nodes of all samples, `(..., N, C)`."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


class GraphBlock(nn.Module):
    """A transformer block on a graph: normalised attention, then a normalised two-layer network, each added to x.

    Dwivedi and Bresson 2021, with the norms in front (Xiong et al. 2020).  norm: "layer", or "batch" over all nodes.
    degree: what is read is also scaled by log(1 + degree) and projected (Corso et al. 2020): a mean forgets how many.
    """

    def __init__(
        self, dim: int, heads: int, *, score: str = "dot", dropout: float = 0.0, edge_dropout: float = 0.0,
        edge_dim: int | None = None, expand: int = 2, norm: str = "layer", degree: bool = False, tied: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        if dim % heads:
            raise ValueError(f"the width must be a multiple of the number of heads, got {dim} and {heads}")
        if norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}; got {norm!r}")
        made = nn.LayerNorm if norm == "layer" else NodeNorm
        self.attention_norm, self.network_norm = made(dim), made(dim)
        self.head = Head(dim, dim // heads, heads, score=score, tied=tied, bias=True, dropout=edge_dropout)
        self.out = nn.Linear(dim, dim)
        self.by_degree = nn.Linear(dim, dim) if degree else None
        self.network = nn.Sequential(
            nn.Linear(dim, expand * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(expand * dim, dim)
        )
        self.dropout = nn.Dropout(dropout)
        self.edges = EdgeFeatures(edge_dim, self.head) if edge_dim is not None else None

    def forward(
        self, x: Tensor, graph: Graph, edge_features: Tensor | None = None, *, pairs: Graph | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """`(..., N, dim)` to the same; edge_features `(E, edge_dim)` in edge order; pairs as in `GATLayer`."""
        options |= _edge_options(self.edges, edge_features)
        queries, keys, values = self.head.project(self.attention_norm(x))
        read = self.head.attend(queries, keys, values, graph, **options)
        heard = self.out(read)
        if self.by_degree is not None:
            heard = heard + self.by_degree(read * torch.log1p(graph.degree().to(read.dtype))[..., None])
        x = x + self.dropout(heard)
        x = x + self.dropout(self.network(self.network_norm(x)))
        return x if pairs is None else (x, self.head.edge_scores(queries, keys, pairs))


class EdgeFeatures(nn.Module):
    """Edge features as the options of `attend` that carry them, for a given head.

    dot: added to keys and values (Shi et al. 2021, equation 3).
    additive, gatv2: inside the score, before the leaky ReLU.
    """

    def __init__(self, edge_dim: int, head: Head) -> None:
        super().__init__()
        self.heads, self.head_dim, self.score = head.heads, head.head_dim, head.score
        if head.kv_heads != head.heads:
            raise ValueError(f"edge features need one key per query head, got {head.kv_heads} for {head.heads}")
        self.project = Projection(edge_dim, self.heads * self.head_dim, bias=False)
        if self.score == "additive":
            self.vector = nn.Parameter(torch.empty(self.heads, self.head_dim))
            nn.init.xavier_uniform_(self.vector)

    def forward(self, edge_features: Tensor | None) -> dict[str, Tensor]:
        if edge_features is None:
            raise ValueError("built with edge_dim, this layer needs edge_features (E, edge_dim) in edge order")
        e = self.project(edge_features).unflatten(-1, (self.heads, self.head_dim))  # (E, heads, head_dim)
        if self.score == "additive":
            return {"edge_key": (e * self.vector).sum(-1, keepdim=True)}
        return {"edge_key": e} if self.score == "gatv2" else {"edge_key": e, "edge_value": e}


class NodeClassifier(nn.Module):
    """A score per class for every node of a graph that is given with each call.

    The defaults are GAT as published for Cora: 8 heads of 8, ELU, one output head, dropout 0.6 on features and edges.
    PubMed: `out_heads=8`.  Self-loops exist only if the graph has them: pass `graph | ga.self_loops(n)` as GAT does.

    Args:
        features: width C of the node features; classes: number of outputs.
        block: "gat" (layers of `GATLayer`, ELU between them) or "transformer" (`GraphBlock`s between a projection and
            a normalised output layer).
        layers: rounds of messages.
        heads, head_dim: of every hidden layer, whose width is their product.
        out_heads: heads averaged in the last GAT layer.
        score: "additive", "gatv2" or "dot"; by default "additive" for gat and "dot" for transformer.
        dropout: on the features that enter each layer; edge_dropout: on edges; value_dropout: on values (gat alone).
        residual: GAT layers add a projection of their input.
        hops, teleport: of the last GAT layer, see `GATLayer`: classes are passed on along paths of that length.
        tied: one projection for queries, keys and values of dot products, see `Head`.
        degree: transformer blocks also read how many neighbours there are, see `GraphBlock`.
        edge_dim: width of edge features.
    """

    def __init__(
        self, features: int, classes: int, *, block: str = "gat", layers: int = 2, heads: int = 8, head_dim: int = 8,
        out_heads: int = 1, score: str | None = None, dropout: float = 0.6, edge_dropout: float = 0.6,
        value_dropout: float = 0.0, slope: float = 0.2, residual: bool = False, hops: int = 1, teleport: float = 0.1,
        tied: bool = False, degree: bool = False, edge_dim: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if block not in BLOCKS:
            raise ValueError(f"block must be one of {', '.join(BLOCKS)}; got {block!r}")
        if score is None:
            score = "additive" if block == "gat" else "dot"
        if score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}; got {score!r}")
        for name, n in (("features", features), ("classes", classes), ("layers", layers)):
            if n < 1:
                raise ValueError(f"{name} must be at least 1, got {n}")
        for name, p in (("dropout", dropout), ("edge_dropout", edge_dropout), ("value_dropout", value_dropout)):
            if not 0 <= p < 1:
                raise ValueError(f"{name} must be in [0, 1), got {p}")
        self.block, self.dropout, self.features, self.classes = block, dropout, features, classes
        width = heads * head_dim
        if block == "gat":
            made = []
            for n in range(layers):
                last = n == layers - 1
                made.append(
                    GATLayer(
                        width if n else features,
                        classes if last else head_dim,
                        out_heads if last else heads,
                        concat=not last,
                        score=score,
                        dropout=edge_dropout,
                        value_dropout=value_dropout,
                        slope=slope,
                        edge_dim=edge_dim,
                        tied=tied,
                        residual=residual,
                        hops=hops if last else 1,
                        teleport=teleport,
                    )  # fmt: skip
                )
            self.layers = nn.ModuleList(made)
        else:
            self.enter = Projection(features, width)
            blocks = (
                GraphBlock(width, heads, score=score, dropout=dropout, edge_dropout=edge_dropout, edge_dim=edge_dim,
                           degree=degree, tied=tied)
                for _ in range(layers)
            )  # fmt: skip
            self.layers = nn.ModuleList(blocks)
            self.leave = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(
        self, x: Features, graph: Graph, edge_features: Tensor | None = None, *, pairs: Graph | None = None,
        **options: Any,
    ) -> Any:  # fmt: skip
        """`(..., N, features)` to `(..., N, classes)`.

        Args:
            x: a tensor, or `SparseFeatures` `(N, features)`.
            graph: `(N <- N)`; another one with every call, if you like.
            edge_features: `(E, edge_dim)` in edge order (see `graphattn.edge_ids`), if built with edge_dim.
            pairs: any pairs of nodes `(N <- N)`; the call then returns `(out, scores)`, for each layer the scores of
                these pairs before a softmax, `(..., heads, P)` in edge order (without edge features).
            options: of `attend`: bias, softcap, seed, backend.
        """
        found = []
        for _, out, scores in self._rounds(x, graph, edge_features, options, pairs):  # noqa: B007
            found.append(scores)
        out = self.leave(out) if self.block == "transformer" else out
        return out if pairs is None else (out, found)

    def weights(self, x: Features, graph: Graph, edge_features: Tensor | None = None) -> list[Tensor]:
        """Per layer the attention weight of every edge, `(..., heads, E)` in edge order, nothing dropped.

        In the order of an edge list of yours: `weights[..., ga.edge_ids(graph, edge_index)]`.
        """
        training = self.training
        self.eval()
        try:
            found = []
            layers: Any = self.layers
            for layer, (given, *_) in zip(layers, self._rounds(x, graph, edge_features, {}), strict=True):
                edges = _edge_options(layer.edges, edge_features)
                edges.pop("edge_value", None)
                read = given if self.block == "gat" else layer.attention_norm(given)
                found.append(layer.head.weights(read, graph, **edges))
            return found
        finally:
            self.train(training)

    def _check(self, x: Any, graph: Any, pairs: Any) -> None:
        if x.shape[-1] != self.features:
            raise ValueError(f"x has {x.shape[-1]} features, this model was built for {self.features}")
        for name, given in (("graph", graph), ("pairs", pairs)):
            if given is None and name == "pairs":
                continue
            if not isinstance(given, Graph):
                raise TypeError(
                    f"{name} must be a Graph, got {type(given).__name__}: graphattn.from_edge_index(edge_index, n) makes one"
                )
            if not given.t == given.s == x.shape[-2]:
                raise ValueError(f"x has {x.shape[-2]} nodes, but {name} is {given!r}: both must be of the same nodes")
        first: Any = self.layers[0]
        weight = first.head.value.weight
        if isinstance(x, Tensor) and x.dtype != weight.dtype and not torch.is_autocast_enabled(weight.device.type):
            raise TypeError(f"x is {x.dtype}, the model {weight.dtype}: x.to({weight.dtype}) or model.to({x.dtype})")

    def _rounds(
        self, x: Any, graph: Graph, edge_features: Tensor | None, options: dict[str, Any], pairs: Graph | None = None
    ) -> Any:
        """For each layer, what it takes, what it gives, and the scores of pairs (None without them)."""
        layers: Any = self.layers
        self._check(x, graph, pairs)
        if self.block == "transformer":
            x = drop(F.gelu(self.enter(x)), self.dropout, self.training)
        for n, layer in enumerate(layers):
            mine = later(options, n, 0x9E3779B97F4A7C15)
            if self.block == "gat":
                x = drop(x if n == 0 else F.elu(x), self.dropout, self.training)
            given, scores = x, None
            x = layer(x, graph, edge_features, pairs=pairs, **mine)
            if pairs is not None:
                x, scores = x
            yield given, x, scores


class Ensemble(nn.Module):
    """Classifiers trained apart, asked together: the log of the mean of their class probabilities.

    Train each as you like, then `Ensemble([a, b, c])`; `graphattn.node_train.fit` with `Recipe(members=3)` does both.

    Raises:
        ValueError: no members, or other numbers of classes.  TypeError: members that are no `NodeClassifier`.
    """

    def __init__(self, members: Iterable[NodeClassifier]) -> None:
        super().__init__()
        made = [members] if isinstance(members, nn.Module) else list(members)
        if not made:
            raise ValueError("an ensemble needs at least one member")
        if not all(isinstance(m, NodeClassifier) for m in made):
            raise TypeError(f"members must be NodeClassifiers, got {', '.join(type(m).__name__ for m in made)}")
        if len({m.classes for m in made}) > 1:
            raise ValueError(f"members must agree on the classes, got {[m.classes for m in made]}")
        self.members = nn.ModuleList(made)

    def forward(self, x: Features, graph: Graph, edge_features: Tensor | None = None, **options: Any) -> Tensor:
        """As `NodeClassifier`, without pairs."""
        if "pairs" in options:
            raise TypeError(
                "an ensemble gives no scores of pairs: ask its members, ensemble.members[0](x, graph, pairs=...)"
            )
        found = [m(x, graph, edge_features, **options).log_softmax(-1) for m in self.members]
        return torch.stack(found).logsumexp(0) - math.log(len(found))

    def weights(self, x: Features, graph: Graph, edge_features: Tensor | None = None) -> list[Tensor]:
        """The members' mean attention weights, per layer as `NodeClassifier.weights` gives them."""
        members: Any = self.members
        found = [m.weights(x, graph, edge_features) for m in members]
        return [torch.stack(layer).mean(0) for layer in zip(*found, strict=True)]


def _edge_options(edges: EdgeFeatures | None, edge_features: Tensor | None) -> dict[str, Tensor]:
    """Options of `attend` for a layer's edge features; none for a layer without them."""
    if edges is not None:
        return edges(edge_features)
    if edge_features is not None:
        raise ValueError("edge_features were given, but the model was built without edge_dim: pass edge_dim=D to it")
    return {}


def later(options: dict[str, Any], n: int, stride: int = 0xD1B54A32D192ED03) -> dict[str, Any]:
    """Options of the n-th of several calls of `attend`: each drops edges of its own."""
    seed = options.get("seed")
    return options if seed is None else options | {"seed": (seed + n * stride) % 2**63}


def _projected(head: Head) -> Head:
    """Projections that also take sparse features, with Glorot's initial weights."""
    for name in ("value", "key", "query"):
        old = getattr(head, name, None)
        if old is not None:
            setattr(head, name, Projection(old.in_features, old.out_features, bias=old.bias is not None))
    return head
