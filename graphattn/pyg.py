"""`GraphAttentionConv` fits into any PyG model; `from_pyg_conv` takes over the weights of PyG's attention layers.

PyG numbers edges as the caller gave them, a graph in edge order (target, then source): the layer translates edge
features and weights both ways, so that callers see their own order alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from torch_geometric.nn.conv import GATConv, GATv2Conv, MessagePassing, TransformerConv
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.utils import add_self_loops, remove_self_loops

from . import backends
from .convert import from_csr, from_edge_index, to_edge_index
from .graph import Graph
from .head import SCORES, Head
from .nodes import EdgeFeatures


class GraphAttentionConv(MessagePassing):
    """Attention along the edges of `edge_index`, with the signature of PyG's convolutions.

    Fits into `nn.Sequential`, `to_hetero`, bipartite pairs `(x_source, x_target)` and sampled mini-batches.  It is a
    `Head` and nothing else scores or normalises: score "dot" is PyG's `TransformerConv`, "additive" its `GATConv`,
    "gatv2" its `GATv2Conv`, numbers included.

    A multigraph is refused: an edge that is given twice would count twice in PyG and once in a graph, which is a set.

    Args:
        in_channels: width of the features, or a pair (source, target); -1 is found at the first call.
        out_channels: width of one head.
        heads: number of heads, concatenated, or averaged with `concat=False`.
        score: "dot", "additive" or "gatv2".
        edge_dim: width of edge features: added to keys and values ("dot"), else inside the score.
        dropout: probability of dropping an edge while training.
        negative_slope: of the leaky ReLU of "additive" and "gatv2".
        bias: projections of "dot" and "gatv2" have one, and the output of "additive" and "gatv2".
        add_self_loops: replace self-loops by one for each node; `fill_value` makes their edge features, as in PyG, which
            gives a bipartite pair loops for as many nodes as both sides have.
        residual: add a projection of the target's features; by default for "dot" only (`root_weight` in PyG).
        beta: gate that residual (Shi et al. 2021, equation 5).
        share_weights: "gatv2" projects targets and sources with one matrix.
        backend: of `graphattn.attend`.
    """

    def __init__(
        self, in_channels: int | tuple[int, int], out_channels: int, heads: int = 1, *, score: str = "dot",
        concat: bool = True, edge_dim: int | None = None, dropout: float = 0.0, negative_slope: float = 0.2,
        bias: bool = True, add_self_loops: bool = False, fill_value: float | Tensor | str = "mean",
        residual: bool | None = None, beta: bool = False, share_weights: bool = False, backend: str = "auto",
    ) -> None:  # fmt: skip
        super().__init__(aggr="add", node_dim=0)
        if score not in SCORES:
            raise ValueError(f"score must be one of {', '.join(SCORES)}; got {score!r}")
        residual = score == "dot" if residual is None else residual
        if beta and not residual:
            raise ValueError("beta gates the residual: it needs residual=True")
        if share_weights and score != "gatv2":
            raise ValueError(f"share_weights belongs to the gatv2 score, not to {score}")
        source, target = (in_channels, in_channels) if isinstance(in_channels, int) else in_channels
        self.in_channels, self.out_channels, self.heads, self.concat = in_channels, out_channels, heads, concat
        self.score, self.edge_dim, self.backend = score, edge_dim, backend
        self.add_self_loops, self.fill_value, self.negative_slope = add_self_loops, fill_value, negative_slope
        width, total = heads * out_channels, out_channels * (heads if concat else 1)

        def linear(inside: int, outside: int, bias: bool) -> Linear:
            return Linear(inside, outside, bias=bias, weight_initializer="glorot")

        # PyG's Linear finds an input width of -1 at the first call, and resets as PyG's layers do
        inner = bias and score != "additive"
        self.head = Head(1, out_channels, heads, score=score, bias=inner, dropout=dropout, slope=negative_slope)
        self.head.value = linear(source, width, inner)  # type: ignore[assignment]
        if score == "dot":
            self.head.key = linear(source, width, inner)
        if score == "additive":
            # one matrix for both ends, unless the widths are a pair
            self.head.query = None if isinstance(in_channels, int) else linear(target, width, False)  # type: ignore[assignment]
        else:
            self.head.query = self.head.value if share_weights else linear(target, width, inner)  # type: ignore[assignment]
        self.edges = None
        if edge_dim is not None:
            self.edges = EdgeFeatures(1, self.head)
            self.edges.project = linear(edge_dim, width, False)  # type: ignore[assignment]
        self.skip = linear(target, total, bias and score == "dot") if residual else None
        self.gate = linear(3 * total, 1, False) if beta else None
        self.bias = nn.Parameter(torch.zeros(total)) if bias and score != "dot" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        for module in self.modules():
            if isinstance(module, Linear):
                module.reset_parameters()
        vectors = [getattr(self.head, n, None) for n in ("vector", "source_vector", "target_vector")]
        for vector in (*vectors, getattr(self.edges, "vector", None)):
            if vector is not None:
                nn.init.xavier_uniform_(vector)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(  # type: ignore[override]
        self, x: Tensor | tuple[Tensor, Tensor | None], edge_index: Tensor | Graph, edge_attr: Tensor | None = None,
        size: tuple[int, int] | None = None, return_attention_weights: bool | None = None,
    ) -> Any:  # fmt: skip
        """`(N, in)` to `(N, heads * out_channels)`, or `(N, out_channels)` averaged.

        Args:
            x: `(N, in)` or, all batch entries sharing the edges, `(B, N, in)`; or a pair (sources, targets).  Targets
                may be None for the additive score: they then score with their sources alone.
            edge_index: `(2, E)`, row 0 = source, row 1 = target; or a sparse `(T_q, T_kv)` adjacency, a row per
                target; or a `Graph`.
            edge_attr: `(E, edge_dim)` in the order of edge_index (edge order for a `Graph`).
            size: (sources, targets), checked.
            return_attention_weights: also return (edge_index, weights `(E, heads)`), self-loops included, undropped.

        Raises:
            ValueError: the first edge that is given twice; edge features without `edge_dim`, or sizes that do not fit.
        """
        source, target = (x, x) if isinstance(x, Tensor) else x
        t = _targets(source, target, size)
        both = _edges_of(edge_index, (t, source.shape[-2]), self._loops(source, target, size))
        if target is source:
            queries, keys, values = self.head.project(source)
        else:
            keys, values = self.head.keys_values(source)
            queries = self._queries(source, target, values, t)
        options = self._edge_options(both, edge_attr)
        out = self.head.attend(queries, keys, values, both.graph, backend=self.backend, **options)
        if not self.concat:
            out = out.unflatten(-1, (self.heads, self.out_channels)).mean(-2)
        if self.skip is not None and target is not None:
            own = self.skip(target)
            if self.gate is None:
                out = out + own
            else:
                gate = self.gate(torch.cat([out, own, out - own], -1)).sigmoid()
                out = gate * own + (1 - gate) * out
        if self.bias is not None:
            out = out + self.bias
        if not return_attention_weights:
            return out
        options.pop("edge_value", None)
        weights = backends.weights(queries, keys, both.graph, score=self.head._score(), **options)
        return out, (both.edge_index, weights.index_select(-1, both.ids).transpose(-2, -1))

    def _loops(self, source: Tensor, target: Tensor | None, size: tuple[int, int] | None) -> int | None:
        """How many nodes get a self-loop: those that are both source and target; None to leave them alone."""
        if not self.add_self_loops:
            return None
        if size is not None:
            return min(size)
        return min(source.shape[-2], source.shape[-2] if target is None else target.shape[-2])

    def _queries(self, source: Tensor, target: Tensor | None, values: Tensor, t: int) -> Tensor:
        if target is not None:
            return self.head.queries(target)
        if self.score != "additive":
            raise ValueError(f"the {self.score} score needs the targets' features, but x is (sources, None)")
        return values.new_zeros(*values.shape[:-2], t, 1)

    def _edge_options(self, both: _Both, edge_attr: Tensor | None) -> dict[str, Any]:
        if edge_attr is None:
            if self.edges is not None and self.score == "dot":
                raise ValueError(f"built with edge_dim={self.edge_dim}, this layer needs edge_attr")
            return {}
        if self.edges is None:
            raise ValueError("edge_attr was given, but the layer was built without edge_dim")
        edge_attr = edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr
        if edge_attr.shape[0] != both.given.shape[1]:
            raise ValueError(f"edge_attr has {edge_attr.shape[0]} rows, but edge_index has {both.given.shape[1]} edges")
        if both.loops is not None:
            bare, edge_attr = remove_self_loops(both.given, edge_attr)
            _, edge_attr = add_self_loops(bare, edge_attr, self.fill_value, both.loops)
        assert edge_attr is not None
        return self.edges(edge_attr.index_select(0, both.order))

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, heads={self.heads}, score={self.score!r}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"


class _Both(NamedTuple):
    """Edges as the caller gave them, and as a graph."""

    graph: Graph
    given: Tensor  # (2, E) as it came
    edge_index: Tensor  # with self-loops, if asked for
    ids: Tensor  # edge number of each of its columns
    order: Tensor  # the column of each edge number
    loops: int | None


# A model calls several layers, epoch after epoch, with one edge_index: its graph is made once, and dies with it.
_SEEN: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _edges_of(edge_index: Tensor | Graph, shape: tuple[int, int], loops: int | None) -> _Both:
    if isinstance(edge_index, Graph):
        graph = edge_index
        if graph.shape != shape:
            raise ValueError(f"x has {shape[0]} targets and {shape[1]} sources, but the graph is {graph!r}")
        return graph.cached(("pyg", loops), lambda: _pair(to_edge_index(graph), shape, loops))
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            f"edge_index must be a (2, E) tensor, a torch sparse adjacency or a Graph, got {type(edge_index).__name__}"
        )
    if edge_index.is_inference():  # changes in place go unseen there
        return _pair(_plain(edge_index, shape), shape, loops)
    if edge_index.layout != torch.strided:
        return _pair(_plain(edge_index, shape), shape, loops)
    kept = _SEEN.setdefault(edge_index, {})
    key = (shape, loops, edge_index._version)
    if key not in kept:
        if len(kept) > 8:
            kept.clear()
        # a clone, since a value that held its own key would never die
        kept[key] = _pair(_plain(edge_index, shape).clone(), shape, loops)
    return kept[key]


def _plain(edge_index: Tensor, shape: tuple[int, int]) -> Tensor:
    """`(2, E)` of the three ways a tensor says edges."""
    if edge_index.layout == torch.sparse_csr:
        return to_edge_index(from_csr(edge_index, shape=shape))
    if edge_index.layout == torch.sparse_coo:
        return edge_index.coalesce().indices().flip(0)
    if edge_index.layout != torch.strided:
        raise TypeError(f"edge_index may be strided, sparse_csr or sparse_coo, got {edge_index.layout}")
    return edge_index.as_tensor() if hasattr(edge_index, "as_tensor") else edge_index


def _pair(given: Tensor, shape: tuple[int, int], loops: int | None) -> _Both:
    edge_index = given
    if loops is not None:
        edge_index, _ = add_self_loops(remove_self_loops(given)[0], num_nodes=loops)
    graph, ids = cast(tuple[Graph, Tensor], from_edge_index(edge_index, shape, return_ids=True))
    if graph.num_edges != ids.numel():
        number, count = torch.unique(ids, return_counts=True)
        at = (ids == number[count > 1][0]).nonzero()[0]
        source, target = edge_index[:, at].flatten().tolist()
        raise ValueError(
            f"edge {source} -> {target} is given more than once, and a graph is a set: unite repeated edges first, for "
            f"instance with torch_geometric.utils.coalesce ({ids.numel()} edges given, {graph.num_edges} distinct)"
        )
    order = torch.empty_like(ids)
    order[ids] = torch.arange(ids.numel(), device=ids.device)
    return _Both(graph, given, edge_index, ids, order, loops)


def _targets(source: Tensor, target: Tensor | None, size: tuple[int, int] | None) -> int:
    t = source.shape[-2] if target is None else target.shape[-2]
    if size is None:
        return t
    if size[0] != source.shape[-2] or (target is not None and size[1] != t):
        raise ValueError(f"size is {tuple(size)}, but x has {source.shape[-2]} sources and {t} targets")
    return size[1]


# ---------------------------------------------------------------------- PyG's layers, taken over


def from_pyg_conv(conv: nn.Module, backend: str = "auto") -> GraphAttentionConv:
    """A `GraphAttentionConv` with a copy of the weights and all options of a PyG layer; it gives the same numbers.

    Takes `GATConv`, `GATv2Conv` and `TransformerConv`.  Two differences remain: repeated edges are refused, and edge
    features given to a layer without `edge_dim` are an error (PyG ignores them, or adds them unprojected).

    Raises:
        TypeError: another layer, or a subclass.
        ValueError: `aggr` other than "add", `flow` other than "source_to_target", or weights not yet initialised (-1).
    """
    kind = type(conv)
    if kind not in (GATConv, GATv2Conv, TransformerConv):
        raise TypeError(f"from_pyg_conv takes GATConv, GATv2Conv and TransformerConv, got {kind.__name__}")
    old: Any = conv
    pairs: list[tuple[Any, Any]]
    vectors: list[tuple[Any, Any]] = []
    aggr = getattr(old.aggr_module, "__class__", type(None)).__name__
    if aggr != "SumAggregation":
        raise ValueError(f"{kind.__name__} has aggr {old.aggr!r}: attention is a weighted sum, so it must be 'add'")
    if old.flow != "source_to_target":
        raise ValueError("flow is 'target_to_source': flip the edge_index and use 'source_to_target'")
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in old.parameters()):
        raise ValueError("the layer was built with in_channels=-1 and never called: call it once, then convert")
    shared = dict(
        concat=old.concat, edge_dim=old.edge_dim, dropout=old.dropout, backend=backend, heads=old.heads,
        in_channels=old.in_channels, out_channels=old.out_channels,
    )  # fmt: skip
    if kind is TransformerConv:
        new = GraphAttentionConv(
            **shared, score="dot", bias=old.lin_query.bias is not None, residual=old.root_weight, beta=old.beta
        )
        pairs = [(new.head.query, old.lin_query), (new.head.key, old.lin_key), (new.head.value, old.lin_value)]
        pairs += [(new.skip, old.lin_skip), (new.gate, old.lin_beta)]
    else:
        shared |= dict(
            negative_slope=old.negative_slope, bias=old.bias is not None, add_self_loops=old.add_self_loops,
            fill_value=old.fill_value, residual=old.res is not None,
        )  # fmt: skip
        if kind is GATConv:
            new = GraphAttentionConv(**shared, score="additive")
            pairs = [(new.head.value, old.lin if old.lin is not None else old.lin_src), (new.head.query, old.lin_dst)]
            vectors = [(new.head.source_vector, old.att_src), (new.head.target_vector, old.att_dst)]
            if new.edges is not None:
                vectors.append((new.edges.vector, old.att_edge))
        else:
            new = GraphAttentionConv(**shared, score="gatv2", share_weights=old.share_weights)
            pairs = [(new.head.value, old.lin_l), (new.head.query, old.lin_r)]
            vectors = [(new.head.vector, old.att)]
        pairs.append((new.skip, old.res))
        vectors.append((new.bias, old.bias))
    if new.edges is not None:
        pairs.append((new.edges.project, old.lin_edge))
    first = next(old.parameters())
    new.to(device=first.device, dtype=first.dtype)
    for mine, its in pairs:
        if mine is not None and its is not None:
            mine.load_state_dict(its.state_dict())
    with torch.no_grad():
        for mine, its in vectors:
            if mine is not None:
                mine.copy_(its.view_as(mine))
    return new.train(old.training)
