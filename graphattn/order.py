"""Orders of nodes that make tiles fuller: permuting tokens and graph alike changes nothing but the tiles."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .blocks import tiling
from .graph import LIMIT, Graph


class Reordering(NamedTuple):
    """`order (T,)` int64, for `x[order]` and `graph.relabel(order)`; `gain`: tile fill after over tile fill before."""

    order: Tensor
    gain: float


def tile_fill(graph: Graph, tile: int = 64) -> float:
    """Edges over the cells of all `tile` x `tile` tiles that hold one; 1.0 for a graph without edges."""
    tiles = tiling(graph, tile, tile)
    cells = (tiles.some.num_edges + tiles.all.num_edges) * tile * tile
    return graph.num_edges / cells if cells else 1.0


def reorder(graph: Graph, tile: int = 64) -> Reordering:
    """A permutation of the nodes that makes tiles fuller, and by what factor.

    Tries reverse Cuthill-McKee (Cuthill & McKee 1969; scipy's), label propagation (communities side by side) and
    grouping of targets by what they read (min-hash), each also refined by Cuthill-McKee within groups, and keeps
    the best; the given order, with gain 1, if none is better.

    Permuting tokens and graph alike gives the same output permuted:
    `attend(q[order], k[order], v[order], graph.relabel(order)) == attend(q, k, v, graph)[order]`.
    Undo with `order.argsort()`.  Patterns of positions (a bias by distance, rotary) must be permuted with the tokens.

    Args:
        graph: as many targets as sources; leading axes share one order.
        tile: side of the tiles, what a tiled kernel skips or computes whole.

    Raises:
        ValueError: a rectangle, or a graph with more than 2**27 edges.
    """
    if graph.t != graph.s:
        raise ValueError(f"reorder needs as many targets as sources, got {graph!r}")
    if graph.num_edges > LIMIT:
        raise ValueError(f"{graph!r} has more than {LIMIT:,} edges: too many to reorder one by one")
    best, before = torch.arange(graph.t, device=graph.device), tile_fill(graph, tile)
    most = before
    if graph.num_edges and not graph.is_full():
        for found in _candidates(graph):
            order = torch.as_tensor(np.ascontiguousarray(found), dtype=torch.int64, device=graph.device)
            try:
                fill = tile_fill(graph.relabel(order), tile)
            except ValueError:  # one more run per edge than there is room for
                continue
            if fill > most * (1 + 1e-9):
                best, most = order, fill
    return Reordering(best, most / before)


def _candidates(graph: Graph) -> list[np.ndarray]:
    import scipy.sparse as sp
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    target, source = (x.cpu().numpy() for x in graph.targets_sources())
    n = graph.t
    reads = sp.csr_array((np.ones(target.size, dtype=np.float32), (target, source)), shape=(n, n))
    both = sp.csr_matrix(reads + reads.T)
    both.sum_duplicates()
    both.setdiag(0)
    both.eliminate_zeros()
    narrow = reverse_cuthill_mckee(both, symmetric_mode=True).astype(np.int64)
    place = np.empty(n, dtype=np.int64)
    place[narrow] = np.arange(n)
    groups = _communities(both)
    _, first = np.unique(groups, return_inverse=True)
    # communities in the order in which Cuthill-McKee meets them, and its order inside
    mean = np.bincount(first, place) / np.maximum(np.bincount(first), 1)
    hashed = _min_hash(reads)
    return [narrow, np.lexsort((place, mean[first])), np.lexsort((place, *hashed))]


def _communities(both: object, rounds: int = 10) -> np.ndarray:
    """Label propagation (Raghavan et al. 2007), half of the nodes at a time so that it does not swing."""
    indptr, indices = both.indptr.astype(np.int64), both.indices.astype(np.int64)  # type: ignore[attr-defined]
    n = indptr.size - 1
    row = np.repeat(np.arange(n), np.diff(indptr))
    label = np.arange(n)
    random = np.random.default_rng(0)
    for _ in range(rounds):
        key = row * n + label[indices]
        pairs, count = np.unique(key, return_counts=True)
        node = pairs // n
        luck = random.permutation(n)  # ties by lot: by number, the least label would wash over everything
        best = np.lexsort((luck[pairs % n], count, node))  # last of each node: the label most neighbours have
        last = np.flatnonzero(np.append(node[best][1:] != node[best][:-1], True)) if best.size else best
        new = label.copy()
        new[node[best][last]] = (pairs % n)[best][last]
        turn = random.random(n) < 0.5
        if np.array_equal(new[turn], label[turn]):
            if np.array_equal(new, label):
                break
            continue
        label = np.where(turn, new, label)
    return label


def _min_hash(reads: object, hashes: int = 3) -> list[np.ndarray]:
    """Per hash the least hashed source that each target reads: rows that read much the same agree."""
    indptr, indices = reads.indptr, reads.indices  # type: ignore[attr-defined]
    filled = np.flatnonzero(np.diff(indptr))
    random = np.random.default_rng(0)
    out = []
    for _ in range(hashes):
        code = random.permutation(indptr.size - 1)
        least = np.full(indptr.size - 1, indptr.size)
        if filled.size:
            least[filled] = np.minimum.reduceat(code[indices], indptr[filled])
        out.append(least)
    return out
