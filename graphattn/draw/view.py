"""What one picture shows: a graph without leading axes and at most one number per edge."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphattn.graph import Graph


@dataclass(frozen=True)
class View:
    """One graph `(t <- s)` and a value per edge, with the words that say where they come from."""

    graph: Graph
    value: Tensor | None  # (E,) float64 on the CPU, edge order
    measure: str  # what the value is, for the colour bar
    shown: str  # which of the leading axes, for the title; may be empty
    name: str = ""  # of the graph it is a view of, where that has other axes

    def edges(self) -> tuple[Tensor, Tensor]:
        """`(target, source)`, each `(E,)`."""
        return self.graph.edges()


def view_of(
    graph: Graph,
    weights: object = None,
    batch: int | None = None,
    head: int | None = None,
    measure: str = "attention weight",
) -> View:
    """Reduce leading axes of graph and weights to one picture: the chosen index, else the mean, and say which.

    Args:
        weights: None or per edge in edge order: a plain graph `(E,)`, `(H, E)` or `(B, H, E)`; an axis the graph owns
            is inside E.
    Raises:
        ValueError: weights that do not fit the graph or are not finite; an index out of range.
    """
    if not isinstance(graph, Graph):
        raise TypeError(
            f"draw takes a Graph, got {type(graph).__name__}: build one with ga.from_mask, ga.from_edge_index, ..."
        )
    graph = given = graph.to("cpu")
    value = None if weights is None else edge_values(graph, weights)
    owned = graph.lead or (1, 1)
    free = (1, 1) if value is None else tuple(value.shape[:2])
    picks, words, over = [], [], []
    for name, index, own, extra in zip(("batch", "head"), (batch, head), owned, free, strict=True):
        n = max(own, extra)
        if index is not None and not -n <= index < n:
            raise ValueError(f"{name} {index} is out of range: there {'is' if n == 1 else 'are'} {n} of {graph!r}")
        picks.append(None if index is None else index % n)
        if index is not None:
            words.append(f"{name} {index % n}")
        elif n != 1:
            over.append(f"{n} {'batch entries' if name == 'batch' else 'heads'}")

    if value is not None:
        for axis, (pick, extra) in enumerate(zip(picks, free, strict=True)):
            if extra > 1:
                value = value.mean(axis, keepdim=True) if pick is None else value.narrow(axis, pick, 1)
        value = value.reshape(-1) if value.numel() else value.new_zeros(graph.num_edges)
    if graph.lead:
        graph, value = _without_lead(graph, value, picks)
    shared = over and value is not None and weights is None
    if over:
        measure = f"share of {' x '.join(over)} with the edge" if shared else f"{measure}, mean of {' x '.join(over)}"
    return View(graph, value, measure, ", ".join(words), repr(given) if over else "")


def _without_lead(graph: Graph, value: Tensor | None, picks: list[int | None]) -> tuple[Graph, Tensor | None]:
    b, h = graph.lead
    rows = torch.arange(graph.rows).view(b, h, graph.t)
    rows = rows if picks[0] is None or b == 1 else rows[picks[0] : picks[0] + 1]
    rows = rows if picks[1] is None or h == 1 else rows[:, picks[1] : picks[1] + 1]
    n = rows.shape[0] * rows.shape[1]
    if n == 0:
        return Graph.from_keys(torch.zeros(0, dtype=torch.int64), (graph.t, graph.s)), None if value is None else value[
            :0
        ]
    flat = rows.reshape(-1)
    if value is not None and flat.numel() != graph.rows:
        ptr = graph.edge_ptr()
        keep = [value[ptr[r[0]] : ptr[r[-1] + 1]] for r in rows.reshape(n, -1)] if graph.t else []
        value = torch.cat(keep) if keep else value[:0]
    graph = graph._gather_rows(flat, (*rows.shape[:2], graph.t, graph.s))
    plain = (graph.t, graph.s)
    if n == 1:
        return Graph.from_runs(graph.indptr, graph.start, graph.stop, plain), value
    same = all(graph.select(i // rows.shape[1], i % rows.shape[1]) == graph.select(0, 0) for i in range(1, n))
    if value is None and same:
        return graph.select(0, 0), None
    target, source = graph.targets_sources()
    key, where = torch.unique(target * (graph.s + 1) + source, return_inverse=True)
    each = torch.ones(where.numel(), dtype=torch.float64) if value is None else value
    mean = torch.zeros(key.numel(), dtype=torch.float64).index_add_(0, where, each) / n
    return Graph.from_keys(key, plain), mean


def edge_values(graph: Graph, weights: object) -> Tensor:
    """`(B or 1, H or 1, E)` float64 on the CPU; 1 where the graph owns the axis or there is none."""
    w = torch.as_tensor(weights).detach().to("cpu", torch.float64)
    e = graph.num_edges
    owned = graph.lead or (1, 1)
    names = [n for n, own in zip(("B", "H"), owned, strict=True) if own == 1]
    forms = ["(" + ", ".join([*names[k:], "E"]) + ")" for k in range(len(names), -1, -1)]
    if not 1 <= w.dim() <= 1 + len(names) or w.shape[-1] != e:
        hint = ""
        if w.dim() >= 2 and tuple(w.shape[-2:]) == graph.shape[-2:]:
            hint = "; dense weights become per-edge ones by w[..., ga.to_mask(graph)]"
        raise ValueError(
            f"weights have shape {tuple(w.shape)}, but {graph!r} has {e} edges: "
            f"they need {' or '.join(forms)} with E = {e}, in edge order{hint}"
        )
    bad = ~torch.isfinite(w)
    if bool(bad.any()):
        edge = int(bad.nonzero()[0, -1])
        target, source = graph.targets_sources()
        raise ValueError(
            f"weights hold {int(bad.sum())} values that are not finite, the first at edge {edge}, "
            f"target {int(target[edge])} <- source {int(source[edge])}"
        )
    if owned[0] > 1 and owned[1] > 1:
        return w.view(1, 1, e)
    if owned[0] > 1:
        return w.reshape(1, -1, e)
    if owned[1] > 1:
        return w.reshape(-1, 1, e)
    return w.reshape((1,) * (3 - w.dim()) + tuple(w.shape))
