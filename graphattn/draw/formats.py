"""The graph for other programs: networkx, GraphML and DOT, with labels and weights, safe for any label."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphattn.draw.text import labels_of
from graphattn.draw.view import edge_values, view_of
from graphattn.graph import Graph

MAX_EDGES = 1_000_000  # about 100 bytes of text each


def networkx_of(
    graph: Graph,
    weights: Any = None,
    labels: Sequence[object] | None = None,
    source_labels: Sequence[object] | None = None,
) -> Any:
    """A `networkx.DiGraph` with an edge source -> target per edge, weights and labels on it.

    A square graph has nodes 0..T-1 in order; a rectangle has nodes ("source", j) and ("target", i) with the attribute
    `bipartite` 0 and 1.  Nodes carry `label` if labels are given; edges `weight`, and for `(H, E)` weights
    `weight_h0`, `weight_h1`, ... with their mean as `weight`.

    Raises:
        ValueError: leading axes of more than one graph, sizes that do not fit, more than a million edges.
    """
    import networkx as nx

    if graph.num_edges > MAX_EDGES:
        raise ValueError(f"{graph!r} has more than {MAX_EDGES:,} edges: export a part, graph[rows, cols]")
    if graph.rows != graph.t:
        raise ValueError(f"{graph!r} is several graphs: choose one with graph.select(batch, head)")
    view = view_of(graph, weights)
    target_labels, source_labels_ = labels_of(graph, labels, source_labels)
    out = nx.DiGraph()
    square = graph.t == graph.s
    if square:
        out.add_nodes_from((i, {"label": target_labels[i]} if target_labels else {}) for i in range(graph.t))
    else:
        for side, n, names in (("source", graph.s, source_labels_), ("target", graph.t, target_labels)):
            for i in range(n):
                out.add_node((side, i), bipartite=int(side == "target"), **({"label": names[i]} if names else {}))
    target, source = (x.tolist() for x in view.edges())
    heads = None
    if weights is not None:
        w = edge_values(graph, weights)
        heads = w.reshape(-1, graph.num_edges) if w.shape[0] == 1 and w.shape[1] > 1 else None
    mean = None if view.value is None else view.value.tolist()
    per_head = None if heads is None else heads.T.tolist()
    for e, (i, j) in enumerate(zip(target, source, strict=True)):
        data: dict[str, float] = {} if mean is None else {"weight": mean[e]}
        if per_head is not None:
            data.update({f"weight_h{h}": x for h, x in enumerate(per_head[e])})
        out.add_edge(j if square else ("source", j), i if square else ("target", i), **data)
    return out
