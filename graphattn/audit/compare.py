"""What one mask has that another has not, in words and counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..graph import Graph


@dataclass(frozen=True)
class Difference:
    """Two graphs side by side; `str` says it in words.

    Attributes:
        a, b: the graphs compared.  only_a, only_b: the edges one has and the other has not, as graphs.
        both: number of edges they share, over the leading axes they have together.
    """

    a: Graph
    b: Graph
    only_a: Graph
    only_b: Graph
    both: int

    @property
    def equal(self) -> bool:
        return self.only_a.num_edges == 0 and self.only_b.num_edges == 0

    def __str__(self) -> str:
        lines = [f"a {self.a!r}", f"b {self.b!r}", self._relation()]
        for name, other, extra in (("a", "b", self.only_a), ("b", "a", self.only_b)):
            if extra.num_edges:
                lines.append(f"only in {name}: {describe(extra)}")
            mine, theirs = (self.a, self.b) if name == "a" else (self.b, self.a)
            fresh = int(((mine.degree() == 0) & (theirs.degree() > 0)).sum())
            if fresh:
                lines.append(f"{_many(fresh, 'target')} without a source in {name}, but not in {other}")
        return "\n".join(lines)

    def _relation(self) -> str:
        x, y = self.only_a.num_edges, self.only_b.num_edges
        if self.equal:
            return f"equal: {_many(self.both, 'edge')}"
        counts = f"{_many(self.both, 'edge')} in both, {x} only in a, {y} only in b"
        a, b = self.a, self.b
        if b == ~a:
            return f"{counts}: each is the other's complement, so True means keep in one and blocked in the other"
        if a.t == a.s and a.lead == b.lead and x == y and 2 * a.num_runs < 2**24 and b == a.T:
            return f"{counts}: each is the other's transpose, so rows are targets in one and sources in the other"
        for k in (1, -1):
            if b == _shifted(a, k):
                return f"{counts}: b is a with every source moved by {k:+d}"
        if x == 0:
            return f"{counts}: a is a part of b"
        if y == 0:
            return f"{counts}: b is a part of a"
        return f"{counts}: they are disjoint" if self.both == 0 else counts


def compare(a: Graph, b: Graph) -> Difference:
    """How two masks of one size differ: counts, kinds of edges, and the usual mistakes by name.

    Recognised: complement (polarity), transpose (orientation), a shift by one source (off by one), containment.

    Raises:
        ValueError: sizes that differ.
    """
    return Difference(a, b, a - b, b - a, (a & b).num_edges)


def describe(graph: Graph) -> str:
    """Edges in words: how many, in how many targets, from where."""
    row = graph.run_row()
    length = graph.stop - graph.start
    rows = torch.unique(row).numel()
    words = f"{_many(graph.num_edges, 'edge')} in {rows} of {_many(graph.rows, 'row')}"
    if graph.t == graph.s:
        own = row % max(graph.t, 1)
        past = int((torch.minimum(graph.stop, own) - graph.start).clamp(min=0).sum())
        loops = int(((graph.start <= own) & (own < graph.stop)).sum())
        future = int(length.sum()) - past - loops
        kinds = [(past, "from the past"), (loops, "to oneself"), (future, "from the future")]
        words += " (" + ", ".join(f"{n} {what}" for n, what in kinds if n) + ")"
    low, high = int(graph.start.min()), int(graph.stop.max()) - 1
    first = int(row[0])
    where = (
        ""
        if not graph.lead
        else f" of batch {first // graph.t // graph.lead[1]}, head {first // graph.t % graph.lead[1]}"
    )
    return f"{words}, sources {low}..{high}, first {int(graph.start[0])} -> {first % max(graph.t, 1)}{where}"


def _shifted(graph: Graph, k: int) -> Graph:
    start, stop = (graph.start + k).clamp(0, graph.s), (graph.stop + k).clamp(0, graph.s)
    return Graph.from_runs(graph.indptr, start, stop, graph.shape)


def _many(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")
