"""Converters, in pairs: `from_x(to_x(g)) == g` for every graph the format can express, else a ValueError.

Masks and CSR have a row per target; `edge_index` is (source, target); networkx and scipy entry (i, j) is edge i -> j.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from .graph import Graph, _integers, check_shape

if TYPE_CHECKING:
    import networkx as nx

# cells of a dense mask that is built without complaint: 4 GiB of bool
DENSE_LIMIT = 2**32
# cells looked at in one go, so that scanning a mask costs little beside it
_BLOCK = 2**24


def _edge(graph: Graph, e: int = 0) -> str:
    """Edge number e in words."""
    row = int(torch.searchsorted(graph.edge_ptr(), e, right=True)) - 1
    run = int(torch.searchsorted(graph.run_edge(), e, right=True)) - 1
    source = int(graph.start[run]) + e - int(graph.run_edge()[run])
    where = ""
    if graph.lead:
        b, h = divmod(row // graph.t, graph.lead[1])
        where = f" of batch {b}, head {h}"
    return f"edge {source} -> {row % graph.t}{where}"


def _plain(graph: Graph, what: str) -> Graph:
    """A graph without leading axes, or the refusal."""
    if graph.lead:
        first = f", first {_edge(graph)}" if graph.num_edges else ""
        raise ValueError(f"{what} has no leading axes, but the graph is {graph!r}{first}: take one with graph.select(b, h)")
    return graph


def _square(graph: Graph, what: str) -> Graph:
    _plain(graph, what)
    if graph.t != graph.s:
        first = f", first {_edge(graph)}" if graph.num_edges else ""
        raise ValueError(f"{what} has one set of nodes, but the graph is {graph!r}{first}: targets and sources differ")
    return graph


# ---------------------------------------------------------------------- masks


def from_mask(mask: Any) -> Graph:
    """A bool mask, `mask[i, j]` True = target i reads source j: `(T_q, T_kv)` or `(B, H, T_q, T_kv)`.

    The meaning of a bool `attn_mask` in `scaled_dot_product_attention`; the opposite of `nn.MultiheadAttention`, whose
    True means blocked: pass `~mask`.

    Args:
        mask: tensor, array or nested list of bools; size 1 on a leading axis broadcasts.

    Raises:
        TypeError: not bool (0/1 in floats would be *added* by SDPA: `mask.bool()` or `from_additive` say which).
        ValueError: 1, 3 or more than 4 axes; a 3-D mask fits a batch and heads alike.
    """
    mask = _tensor(mask)
    if mask.dtype != torch.bool and mask.numel():
        raise TypeError(
            f"a mask must be bool, got {mask.dtype}: use mask.bool() if nonzero means keep, from_additive(mask) if it "
            "holds 0 and -inf, ~mask.bool() if nonzero means blocked"
        )
    return _from_rows(mask.bool(), _mask_shape(mask))


def to_mask(graph: Graph) -> Tensor:
    """Bool of `graph.shape`, True = target i reads source j.

    Raises:
        ValueError: more than 2**32 cells (4 GiB); the figure is named.
    """
    s, rows = graph.s, graph.rows
    _refuse_dense(graph, 1)
    out = torch.zeros(rows, s, dtype=torch.bool, device=graph.device)
    step = max(1, _BLOCK // (s + 1))
    for low in range(0, rows, step):
        high = min(rows, low + step)
        a, b = graph.indptr[low], graph.indptr[high]
        base = torch.repeat_interleave(torch.arange(high - low, device=graph.device), graph.indptr[low : high + 1].diff())
        base *= s + 1
        change = torch.zeros((high - low) * (s + 1), dtype=torch.int8, device=graph.device)
        change[base + graph.start[a:b]] = 1
        change[base + graph.stop[a:b]] = -1
        out[low:high] = torch.cumsum(change, 0, dtype=torch.int8).view(-1, s + 1)[:, :s].bool()
    return out.view(graph.shape)


def from_additive(mask: Any) -> Graph:
    """A float mask that is added to scores: 0 = target i reads source j, -inf = it does not.

    Raises:
        TypeError: not floating point.
        ValueError: another value, named with its place: a bias belongs in `attend(bias=...)`, and -1e9 or the least
            float are not -inf (`from_hf` takes them where a library promises them).
    """
    mask = _tensor(mask)
    if not mask.dtype.is_floating_point:
        raise TypeError(f"an additive mask must be floating point, got {mask.dtype}: from_mask takes bool")
    shape = _mask_shape(mask)
    keep = mask == 0
    wrong = ~(keep | (mask == -torch.inf))
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"additive mask holds {float(mask[at])} at {list(at)}: only 0 (edge) and -inf (no edge) say a graph")
    return _from_rows(keep, shape)


def to_additive(graph: Graph, dtype: torch.dtype = torch.float32) -> Tensor:
    """Float of `graph.shape`: 0 where target i reads source j, -inf elsewhere.

    Raises:
        ValueError: more than 2**32 bytes.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"an additive mask must be floating point, got {dtype}")
    _refuse_dense(graph, dtype.itemsize)
    out = torch.zeros(graph.shape, dtype=dtype, device=graph.device)
    return out.masked_fill_(~to_mask(graph), -torch.inf)


def _tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.as_tensor(np.asarray(x))


def _mask_shape(mask: Tensor) -> tuple[int, ...]:
    if mask.dim() == 3:
        raise ValueError(
            f"a 3-D mask of shape {tuple(mask.shape)} fits a batch and heads alike: use mask[:, None] (one per sample) or "
            "mask[None] (one per head)"
        )
    if mask.dim() not in (2, 4):
        raise ValueError(f"a mask must be (T_q, T_kv) or (B, H, T_q, T_kv), got shape {tuple(mask.shape)}")
    return tuple(mask.shape)


def _from_rows(keep: Tensor, shape: tuple[int, ...]) -> Graph:
    """Canonical runs of a bool tensor, read in blocks of rows."""
    s = shape[-1]
    if keep.numel() == 0:
        return Graph.from_keys(torch.zeros(0, dtype=torch.int64, device=keep.device), shape)
    keep = keep.reshape(-1, s)
    step = max(1, _BLOCK // s)
    parts = []
    for low in range(0, keep.shape[0], step):
        block = keep[low : low + step]
        padded = torch.zeros(block.shape[0] * (s + 1) + 1, dtype=torch.bool, device=keep.device)
        padded[1:].view(-1, s + 1)[:, :s] = block
        # a boundary wherever a cell differs from the one before; the pad column separates rows
        parts.append((padded[1:] != padded[:-1]).nonzero().squeeze(1) + low * (s + 1))
    return Graph._from_points(torch.cat(parts), shape)


def _refuse_dense(graph: Graph, size: int) -> None:
    cells = graph.rows * graph.s
    if cells * size > DENSE_LIMIT:
        raise ValueError(
            f"a dense mask of {graph!r} has {cells:,} cells ({cells * size / 2**30:.1f} GiB), over the limit of "
            f"{DENSE_LIMIT / 2**30:.0f} GiB: attention takes the graph itself"
        )


def from_key_padding(mask: Any, true_means: Literal["keep", "drop"], t: int | None = None) -> Graph:
    """A mask over sources alone: `(B, T_kv)` gives a `(B, 1, t, T_kv)` graph, `(T_kv,)` a plain one.

    `true_means="keep"` is Hugging Face's `attention_mask`, "drop" is torch's `key_padding_mask`.

    Args:
        mask: bool, or integers that are 0 or 1.
        true_means: what True (1) says about a source; there is no default, since libraries disagree.
        t: number of targets, all reading alike; T_kv if not given.

    Raises:
        TypeError: floats.  ValueError: integers other than 0 and 1, another `true_means`, or more than two axes.
    """
    if true_means not in ("keep", "drop"):
        raise ValueError(f'true_means must be "keep" or "drop", got {true_means!r}')
    mask = _tensor(mask)
    if mask.dim() not in (1, 2):
        raise ValueError(f"a key padding mask must be (T_kv,) or (B, T_kv), got shape {tuple(mask.shape)}")
    keep = _zero_one(mask, "key padding mask")
    if true_means == "drop":
        keep = ~keep
    s = keep.shape[-1]
    t = s if t is None else t
    one = _from_rows(keep, tuple(keep.shape) if keep.dim() == 2 else (1, s))
    rows = torch.arange(one.rows, device=keep.device).repeat_interleave(t)
    return one._gather_rows(rows, check_shape((one.rows, 1, t, s) if keep.dim() == 2 else (t, s)))


def to_key_padding(graph: Graph, true_means: Literal["keep", "drop"]) -> Tensor:
    """Bool `(B, T_kv)` of a `(B, 1, T_q, T_kv)` graph, `(T_kv,)` of a plain one: the sources that all targets read.

    Raises:
        ValueError: some target of a sample reads otherwise than its first, or heads differ; the edge is named.
    """
    if true_means not in ("keep", "drop"):
        raise ValueError(f'true_means must be "keep" or "drop", got {true_means!r}')
    if graph.lead and graph.lead[1] != 1:
        raise ValueError(f"a key padding mask has no heads, but the graph is {graph!r}: use graph.select(head=0)")
    if graph.t == 0:
        raise ValueError(f"{graph!r} has no targets: a key padding mask would not be told from any other")
    n = graph.rows // graph.t
    first = graph._gather_rows(torch.arange(n, device=graph.device) * graph.t, (n, 1, 1, graph.s))
    alike = first._gather_rows(torch.arange(n, device=graph.device).repeat_interleave(graph.t), (n, 1, graph.t, graph.s))
    own = graph if graph.lead else graph.expand(1, 1)
    odd = own ^ alike
    if odd.num_edges:
        raise ValueError(f"targets of {graph!r} read different sources: {_edge(odd)} is in one of two rows only")
    keep = to_mask(first).view(n, graph.s)
    keep = keep if true_means == "keep" else ~keep
    return keep if graph.lead else keep[0]


def _zero_one(mask: Tensor, what: str) -> Tensor:
    if mask.dtype.is_floating_point or mask.dtype.is_complex:
        if mask.numel() == 0:
            return mask.bool()
        raise TypeError(f"a {what} must be bool or 0/1 integers, got {mask.dtype}")
    wrong = (mask != 0) & (mask != 1)
    if bool(wrong.any()):
        raise ValueError(f"a {what} must be 0 or 1, got {int(mask[wrong][0])}")
    return mask.bool()


# ---------------------------------------------------------------------- edge lists


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
    shape = check_shape((shape, shape) if isinstance(shape, int) else shape)
    if len(shape) != 2:
        raise ValueError(f"edge_index has no leading axes: shape must be (T_q, T_kv), got {shape}")
    edge_index = _tensor(edge_index)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index must be (2, E), row 0 = source, row 1 = target, got shape {tuple(edge_index.shape)}")
    source, target = (_integers(x, "edge_index") for x in edge_index)
    for name, x, n, what in (("source", source, shape[1], "sources"), ("target", target, shape[0], "targets")):
        if x.numel():
            low, high = (int(v) for v in torch.aminmax(x))
            if low < 0 or high >= n:
                raise ValueError(
                    f"edge_index {name} spans {low}..{high}, but shape {shape} has {n} {what}: each needs 0 <= {name} < {n}"
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
    ok = (run >= 0) & (within < (graph.stop - graph.start)[inside]) if first.numel() else torch.zeros_like(keys, dtype=torch.bool)
    if not bool(ok.all()):
        target, source = divmod(int(keys[~ok][0]), width)
        raise ValueError(f"{source} -> {target} is no edge of {graph!r}")
    return graph.run_edge()[run] + within


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
        raise ValueError("from_csr needs indptr, indices and shape (T_q, T_kv): the number of sources is in neither array")
    shape = check_shape((shape, shape) if isinstance(shape, int) else shape)
    indptr, indices = _integers(_tensor(indptr), "indptr"), _integers(_tensor(indices), "indices")
    return Graph.from_runs(indptr, indices, indices + 1, shape)


def to_csr(graph: Graph) -> tuple[Tensor, Tensor]:
    """`(indptr (T_q + 1), indices (E))` int64, a row per target, sources rising.

    Raises:
        ValueError: the graph has leading axes.
    """
    return _plain(graph, "CSR").edge_ptr(), graph.edges()[1]


# ---------------------------------------------------------------------- networkx


def from_networkx(graph: nx.Graph, order: Sequence[Hashable] | None = None) -> Graph:
    """A networkx graph: arc (i, j) is the edge i -> j, so target j reads source i; an undirected edge goes both ways.

    Parallel arcs collapse, attributes are left behind.  Nodes labelled 0..n-1 are taken by label, however they were
    added.  Any other labels need `order`, the label of node 0, 1, ...: the order your feature rows have.

    Raises:
        ValueError: labels that are not 0..n-1 without `order`, or an `order` that does not list every node once.
    """
    n = graph.number_of_nodes()
    if order is None:
        if any(type(v) is bool or not isinstance(v, (int, np.integer)) or not 0 <= v < n for v in graph.nodes):
            some = list(graph.nodes)[:5]
            raise ValueError(
                f"nodes are labelled {some}{', ...' if n > 5 else ''}, not 0..{n - 1}: pass order=list(graph) or the order "
                "your feature rows have"
            )
        number: dict[Hashable, int] = {v: int(v) for v in graph.nodes}
    else:
        number = {v: k for k, v in enumerate(order)}
        if len(number) != len(order) or set(number) != set(graph.nodes):
            raise ValueError(f"order must list each of the {n} nodes once, got {len(order)} entries, {len(number)} distinct")
    pairs = np.array([(number[u], number[v]) for u, v in graph.edges()], dtype=np.int64).reshape(-1, 2)
    if not graph.is_directed():
        pairs = np.concatenate([pairs, pairs[:, ::-1]])
    out = from_edge_index(torch.from_numpy(np.ascontiguousarray(pairs.T)), (n, n))
    assert isinstance(out, Graph)
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
