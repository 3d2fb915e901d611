"""Graph objects of other libraries: networkx and PyTorch Geometric."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..graph import Graph
from .door import _edge, _square
from .edges import from_csr, from_edge_index, to_edge_index

if TYPE_CHECKING:
    import networkx as nx
    from torch_geometric.data import Data


def from_networkx(
    graph: nx.Graph, order: Sequence[Hashable] | None = None, return_order: bool = False
) -> Graph | tuple[Graph, list[Hashable]]:
    """A networkx graph: arc (i, j) is the edge i -> j, so target j reads source i; an undirected edge goes both ways.

    Parallel arcs collapse, attributes are left behind.  Nodes labelled 0..n-1 are taken by label, however they were
    added.  Any other labels need `order`, the label of node 0, 1, ...: the order your feature rows have.
    `return_order=True` also returns that list, 0..n-1 if none was needed.

    Raises:
        TypeError: not a networkx graph.
        ValueError: labels that are not 0..n-1 without `order`, or an `order` that does not list every node once.
    """
    if not hasattr(graph, "number_of_nodes"):
        raise TypeError(
            f"graph must be a networkx graph, got {type(graph).__name__}: a matrix is from_mask(mask), with a row per "
            "target, or from_scipy(matrix), with a row per source"
        )
    n = graph.number_of_nodes()
    if order is None:
        if any(type(v) is bool or not isinstance(v, (int, np.integer)) or not 0 <= v < n for v in graph.nodes):
            some = list(graph.nodes)[:5]
            raise ValueError(
                f"nodes are labelled {some}{', ...' if n > 5 else ''}, not 0..{n - 1}: pass "
                "order=list(graph) or the order your feature rows have"
            )
        number: dict[Hashable, int] = {v: int(v) for v in graph.nodes}
    else:
        number = {v: k for k, v in enumerate(order)}
        if len(number) != len(order) or set(number) != set(graph.nodes):
            raise ValueError(
                f"order must list each of the {n} nodes once, got {len(order)} entries, {len(number)} distinct"
            )
    pairs = np.array([(number[u], number[v]) for u, v in graph.edges()], dtype=np.int64).reshape(-1, 2)
    if not graph.is_directed():
        pairs = np.concatenate([pairs, pairs[:, ::-1]])
    out = from_edge_index(torch.from_numpy(np.ascontiguousarray(pairs.T)), (n, n))
    assert isinstance(out, Graph)
    if return_order:
        return out, list(range(n)) if order is None else list(order)
    return out


def to_networkx(graph: Graph, order: Sequence[Hashable] | None = None) -> nx.DiGraph:
    """A `DiGraph` on nodes 0..n-1 (or labelled by `order`): the edge j -> i is arc (j, i).

    `nx.to_numpy_array(G, nodelist=range(n)).T == to_mask(graph)`.

    Raises:
        ValueError: targets and sources differ in number, or the graph has leading axes.
    """
    import networkx as nx

    _square(graph, "networkx")
    out = nx.DiGraph()
    names = range(graph.t) if order is None else list(order)
    if len(names) != graph.t or len(set(names)) != graph.t:
        raise ValueError(f"order must name each of the {graph.t} nodes once, got {len(names)} entries")
    out.add_nodes_from(names)
    source, target = (x.tolist() for x in to_edge_index(graph))
    out.add_edges_from((names[j], names[i]) for j, i in zip(source, target, strict=True))
    return out


# ---------------------------------------------------------------------- PyTorch Geometric


def from_pyg(data: Data) -> Graph:
    """A `Data` or `Batch`: its `edge_index`, row 0 = source, row 1 = target; a batch is one graph of disjoint parts.

    Raises:
        TypeError: no object of PyG.
        ValueError: no `edge_index` (nor `adj_t`), a heterogeneous graph, or a number of nodes that PyG could only guess
            from the largest index, which loses isolated last nodes.
    """
    if not hasattr(data, "edge_types") and not hasattr(data, "_store"):
        raise TypeError(
            f"data must be a PyG Data or Batch, got {type(data).__name__}: an edge_index is from_edge_index(edge_index, n)"
        )
    store = data._store if hasattr(data, "_store") else None
    if store is None:
        raise ValueError(
            f"{type(data).__name__} has several kinds of nodes: convert each edge_index with from_edge_index"
        )
    if not ({"num_nodes", "ptr", "batch", "adj", "adj_t"} & set(store.keys())) and not _has_node_features(data):
        raise ValueError(
            "the number of nodes is not stored, and guessing it from edge_index loses isolated nodes: set num_nodes"
        )
    n = int(data.num_nodes)  # type: ignore[arg-type]
    if data.edge_index is not None:
        pairs = data.edge_index
        pairs = pairs.as_tensor() if hasattr(pairs, "as_tensor") else pairs
        out = from_edge_index(pairs, (n, n))
        assert isinstance(out, Graph)
        return out
    if isinstance(data.adj_t, Tensor) and data.adj_t.layout == torch.sparse_csr:
        return from_csr(data.adj_t)
    raise ValueError("data has no edge_index and no sparse_csr adj_t")


def to_pyg(graph: Graph, lengths: Sequence[int] | None = None) -> Data:
    """A `Data` with `edge_index` (source, target) and `num_nodes`; with `lengths`, a `Batch` of so many nodes each.

    Raises:
        ValueError: targets and sources differ in number, leading axes, or an edge between two parts, which is named.
    """
    from torch_geometric.data import Batch, Data

    _square(graph, "PyG's Data")
    pairs = to_edge_index(graph)
    if lengths is None:
        return Data(edge_index=pairs, num_nodes=graph.t)
    size = torch.as_tensor(lengths, dtype=torch.int64, device=graph.device)
    if int(size.sum()) != graph.t:
        raise ValueError(f"lengths sum to {int(size.sum())}, but the graph is {graph!r}")
    part = torch.arange(size.numel(), device=graph.device).repeat_interleave(size)
    cross = part[pairs[0]] != part[pairs[1]]
    if bool(cross.any()):
        raise ValueError(f"{_edge(graph, int(cross.nonzero()[0]))} joins two parts of the batch")
    edge_part = part[pairs[1]]
    begin = torch.cumsum(size, 0) - size
    items = []
    for k, n in enumerate(size.tolist()):
        items.append(Data(edge_index=pairs[:, edge_part == k] - begin[k], num_nodes=n))
    return Batch.from_data_list(items)


def _has_node_features(data: Any) -> bool:
    return any(isinstance(data.get(key), Tensor) for key in ("x", "y", "pos") if key in data and data.is_node_attr(key))
