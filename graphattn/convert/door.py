"""What every converter checks at its door, and how it names the edge it cannot express."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..graph import Graph

# cells looked at in one go, so that scanning a mask costs little beside it
BLOCK = 2**24
# cells of a dense mask that is built without complaint: 4 GiB of bool
DENSE_LIMIT = 2**32


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
        raise ValueError(
            f"{what} has no leading axes, but the graph is {graph!r}{first}: take one with graph.select(b, h)"
        )
    return graph


def _square(graph: Graph, what: str) -> Graph:
    _plain(graph, what)
    if graph.t != graph.s:
        first = f", first {_edge(graph)}" if graph.num_edges else ""
        raise ValueError(f"{what} has one set of nodes, but the graph is {graph!r}{first}: targets and sources differ")
    return graph


def _tensor(x: Any) -> Tensor:
    if isinstance(x, Tensor) and x.layout != torch.strided:
        raise TypeError(
            f"a dense tensor is needed, got layout {x.layout}: give a sparse mask (row = target) as "
            "from_edge_index(mask.coalesce().indices().flip(0), mask.shape), or call to_dense()"
        )
    return x if isinstance(x, Tensor) else torch.as_tensor(np.asarray(x))


def _from_rows(keep: Tensor, shape: tuple[int, ...]) -> Graph:
    """Canonical runs of a bool tensor, read in blocks of rows."""
    s = shape[-1]
    if keep.numel() == 0:
        return Graph.from_keys(torch.zeros(0, dtype=torch.int64, device=keep.device), shape)
    keep = keep.reshape(-1, s)
    step = max(1, BLOCK // s)
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


def _zero_one(mask: Tensor, what: str) -> Tensor:
    if mask.dtype.is_floating_point or mask.dtype.is_complex:
        if mask.numel() == 0:
            return mask.bool()
        raise TypeError(f"a {what} must be bool or 0/1 integers, got {mask.dtype}")
    wrong = (mask != 0) & (mask != 1)
    if bool(wrong.any()):
        raise ValueError(f"a {what} must be 0 or 1, got {int(mask[wrong][0])}")
    return mask.bool()
