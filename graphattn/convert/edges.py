"""Edge lists: edge_index, CSR, scipy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..graph import Graph, _integers, plainly, square_or_shape
from .door import _edge, _plain, _tensor

if TYPE_CHECKING:
    import scipy.sparse


@plainly
def from_edge_index(
    edge_index: Any, shape: int | Sequence[int], return_ids: bool = False
) -> Graph | tuple[Graph, Tensor]:
    """Edges as `(2, E)` integers, row 0 = source, row 1 = target (PyG's `source_to_target`), in any order.

    Duplicates collapse.  `ids` says where each given edge went, so that per-edge values can follow:
    `torch.empty(graph.num_edges).index_put_((ids,), values)`.

    Args:
        edge_index: `(2, E)` of any integer type.
        shape: `(T_q, T_kv)`, or the number of nodes of a square graph; isolated last nodes need it.
        return_ids: also return `(E,)` int64, the edge number of each given edge.

    Raises:
        TypeError: not integers.  ValueError: not `(2, E)`, or an index outside the shape (-1 is never the last node).
    """
    source, target, shape = _pairs(edge_index, shape)
    keys = target * (shape[1] + 1) + source
    graph = Graph.from_keys(keys, shape, owned=not return_ids)
    if return_ids:
        return graph, _ids(graph, keys)
    return graph


def to_edge_index(graph: Graph) -> Tensor:
    """`(2, E)` int64 in edge order (by target, then source): row 0 = source, row 1 = target.

    Raises:
        ValueError: the graph has leading axes.
    """
    target, source = _plain(graph, "edge_index").edges()
    return torch.stack([source, target])


@plainly
def edge_ids(graph: Graph, edge_index: Any) -> Tensor:
    """`(E,)` int64: the number, in edge order, of each given edge (source, target).

    `values[edge_ids(g, edge_index)]` reads per-edge values of the graph in the caller's order.

    Raises:
        ValueError: a pair that is no edge of the graph, named.
    """
    _plain(graph, "edge_index")
    source, target, _ = _pairs(edge_index, graph.shape)
    return _ids(graph, target * (graph.s + 1) + source)


def _pairs(edge_index: Any, shape: int | Sequence[int]) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    shape = square_or_shape(shape)
    if len(shape) != 2:
        raise ValueError(f"edge_index has no leading axes: shape must be (T_q, T_kv), got {shape}")
    edge_index = _tensor(edge_index)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(
            f"edge_index must be (2, E), row 0 = source, row 1 = target, got shape {tuple(edge_index.shape)}"
        )
    source, target = (_integers(x, "edge_index") for x in edge_index)
    for name, x, n, what in (("source", source, shape[1], "sources"), ("target", target, shape[0], "targets")):
        if x.numel():
            low, high = (int(v) for v in torch.aminmax(x))
            if low < 0 or high >= n:
                raise ValueError(
                    f"edge_index {name} spans {low}..{high}, but shape {shape} has {n} {what}: "
                    f"each needs 0 <= {name} < {n}"
                )
    return source, target, shape


def _ids(graph: Graph, keys: Tensor) -> Tensor:
    width = graph.s + 1
    if keys.numel() == 0:
        return torch.zeros_like(keys)
    first = graph.run_row() * width + graph.start
    run = torch.searchsorted(first, keys, right=True) - 1
    inside = run.clamp(min=0)
    within = keys - first[inside] if first.numel() else keys
    ok = (
        (run >= 0) & (within < (graph.stop - graph.start)[inside])
        if first.numel()
        else torch.zeros_like(keys, dtype=torch.bool)
    )
    if not bool(ok.all()):
        target, source = divmod(int(keys[~ok][0]), width)
        raise ValueError(f"{source} -> {target} is no edge of {graph!r}")
    return graph.run_edge()[run] + within


@plainly
def from_csr(indptr: Any, indices: Any = None, shape: int | Sequence[int] | None = None) -> Graph:
    """Compressed rows, a row per target: target i reads `indices[indptr[i]:indptr[i + 1]]`, in any order.

    Args:
        indptr: `(T_q + 1,)` integers; or a `torch.sparse_csr` tensor `(T_q, T_kv)` alone, whose stored entries are the
            edges, zeros included.
        indices: `(E,)` integers, the source of each edge.
        shape: `(T_q, T_kv)`, or the number of nodes of a square graph.

    Raises:
        TypeError: not integers.  ValueError: sizes that do not fit together, or a source out of range.
    """
    if isinstance(indptr, Tensor) and indptr.layout == torch.sparse_csr:
        shape = tuple(indptr.shape) if shape is None else shape
        indptr, indices = indptr.crow_indices(), indptr.col_indices()
    if indices is None or shape is None:
        raise ValueError(
            "from_csr needs indptr, indices and shape (T_q, T_kv): the number of sources is in neither array"
        )
    shape = square_or_shape(shape)
    indptr, indices = _integers(_tensor(indptr), "indptr"), _integers(_tensor(indices), "indices")
    return Graph.from_runs(indptr, indices, indices + 1, shape)


def to_csr(graph: Graph) -> tuple[Tensor, Tensor]:
    """`(indptr (T_q + 1), indices (E))` int64, a row per target, sources rising.

    Raises:
        ValueError: the graph has leading axes.
    """
    return _plain(graph, "CSR").edge_ptr().clone(), graph.edges()[1].clone()


@plainly
def from_scipy(matrix: Any) -> Graph:
    """A scipy sparse matrix or array: stored entry (i, j) is the edge i -> j, so it is `(T_kv, T_q)`.

    Stored zeros are edges (an edge whose score is 0 is still an edge): `matrix.eliminate_zeros()` drops them.
    A dense mask, whose rows are targets, is `from_mask`; a matrix with a row per target is passed as `matrix.T`.

    Raises:
        TypeError: not a scipy sparse matrix.
    """
    if not hasattr(matrix, "tocoo"):
        raise TypeError(
            f"matrix must be a scipy sparse matrix or array, got {type(matrix).__name__}: a dense one with a row per source "
            "is from_mask(torch.as_tensor(matrix).bool().T), with a row per target without the .T"
        )
    matrix = matrix.tocoo()
    pairs = torch.stack([torch.as_tensor(np.asarray(x, dtype=np.int64)) for x in (matrix.row, matrix.col)])
    out = from_edge_index(pairs, (matrix.shape[1], matrix.shape[0]))
    assert isinstance(out, Graph)
    return out


def to_scipy(graph: Graph) -> scipy.sparse.csr_array:
    """Bool `csr_array (T_kv, T_q)`: entry (i, j) is the edge i -> j; its transpose is the mask.

    Raises:
        ValueError: the graph has leading axes.
    """
    import scipy.sparse as sp

    indptr, indices = (x.cpu().numpy() for x in to_csr(graph))
    data = np.ones(indices.size, dtype=bool)
    return sp.csr_array(sp.csr_array((data, indices, indptr), shape=(graph.t, graph.s)).T)


@plainly
def from_cu_seqlens(cu_seqlens: Any, cu_seqlens_k: Any = None) -> Graph:
    """Packed sequences by their cumulative lengths, `[0, n1, n1 + n2, ...]`: each sequence reads itself.

    FlashAttention's varlen arguments; `& causal(t)` makes it causal.

    Args:
        cu_seqlens: `(n + 1,)` integers for targets.
        cu_seqlens_k: for sources, if they differ.

    Raises:
        ValueError: not rising from 0, or a different number of sequences.
    """
    q = _cumulative(cu_seqlens, "cu_seqlens")
    k = q if cu_seqlens_k is None else _cumulative(cu_seqlens_k, "cu_seqlens_k")
    if q.numel() != k.numel():
        raise ValueError(f"cu_seqlens has {q.numel() - 1} sequences, cu_seqlens_k {k.numel() - 1}")
    n = q.diff()
    shape = square_or_shape((int(q[-1]), int(k[-1])))
    return Graph.from_runs(
        torch.arange(shape[0] + 1, device=q.device), k[:-1].repeat_interleave(n), k[1:].repeat_interleave(n), shape
    )


def to_cu_seqlens(graph: Graph, pair: bool = False) -> Any:
    """int32 `(n + 1,)`: the boundaries of packed sequences; with `pair=True` a tuple, of targets and of sources.

    Sequences of length 0 are not seen, so they are not returned (but one side may be empty with `pair=True`).

    Raises:
        ValueError: not block diagonal in order; the first edge out of place is named.
    """
    _plain(graph, "cu_seqlens")
    what = f"{graph!r} is not a row of full blocks"
    counts = graph.indptr.diff()
    many = counts > 1
    if bool(many.any()):
        row = int(many.nonzero()[0])
        raise ValueError(f"{what}: {_edge(graph, int(graph.run_edge()[graph.indptr[row] + 1]))} comes after a gap")
    start, stop = graph.start, graph.stop
    same = (start[1:] == start[:-1]) & (stop[1:] == stop[:-1]) & (graph.run_row().diff() == 1)
    wrong = ~same & (start[1:] < stop[:-1])
    if bool(wrong.any()):
        run = int(wrong.nonzero()[0]) + 1
        raise ValueError(
            f"{what}: {_edge(graph, int(graph.run_edge()[run]))} shares sources with the row of another block"
        )
    # a block begins where a row's run differs from that of the row before; an empty row belongs to an empty block
    first, last = torch.zeros_like(counts), torch.zeros_like(counts)
    first[counts > 0], last[counts > 0] = start, stop
    fresh = torch.ones_like(counts, dtype=torch.bool)
    fresh[1:] = (first[1:] != first[:-1]) | (last[1:] != last[:-1])
    at = fresh.nonzero().squeeze(1).tolist()
    q, k, reach = [0], [0], 0
    for n, row in enumerate(at):
        a, b = int(first[row]), int(last[row])
        end = at[n + 1] if n + 1 < len(at) else graph.t
        if b > a and a > reach:  # sources that nobody reads: a block without targets
            q.append(row)
            k.append(a)
        q.append(end)
        reach = max(reach, b)
        k.append(reach)
    if reach < graph.s:
        q.append(graph.t)
        k.append(graph.s)
    targets, sources = (torch.tensor(x, dtype=torch.int32, device=graph.device) for x in (q, k))
    if pair:
        return targets, sources
    if graph.t != graph.s or q != k:
        edge = f", first {_edge(graph)}" if graph.num_edges else ""
        raise ValueError(f"targets and sources of {graph!r} have other boundaries{edge}: use pair=True")
    return targets


def _cumulative(x: Any, name: str) -> Tensor:
    out = _integers(_tensor(x), name)
    if out.numel() == 0 or int(out[0]) != 0 or bool((out.diff() < 0).any()):
        raise ValueError(f"{name} must rise from 0, got {out[:8].tolist()}{'...' if out.numel() > 8 else ''}")
    return out
