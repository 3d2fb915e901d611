"""What a graph's kernels walk: items of bounded work per target and per source, and tiles; kept on the graph.

torch alone, on the graph's device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...blocks import bounds, tile_bits, tiling
from ...graph import Graph

CHUNK = 1024  # edges; a target or source with more is split, and its parts merged
LONG_RUN = 16  # mean sources per run from which runs are walked instead of a list of columns
ENDS = 4  # runs per target whose bounds are compared within a tile; above, bits are looked up
SOURCES = 16  # sources that one program of runs_backward_sources owns
_CAPS = (4, 16, 64)  # degrees up to which a bucket's kernels are made for so many edges at a time


class Bucket(NamedTuple):
    """Items `first : first + size`, of nodes with degree at most `cap` edges at a time; `split`: parts of nodes."""

    first: int
    size: int
    cap: int
    split: bool


class Items(NamedTuple):
    """Pieces of work: node, and its edges `[begin, end)`; `run` (2n) the runs they are in, if runs are walked."""

    row: Tensor
    begin: Tensor
    end: Tensor
    run: Tensor | None
    buckets: tuple[Bucket, ...]
    hub_row: Tensor
    hub_ptr: Tensor

    @property
    def parts(self) -> int:
        return sum(b.size for b in self.buckets if b.split)


class Rows(NamedTuple):
    """The sparse form: items by target; `cols` (E) unless runs are walked."""

    items: Items
    cols: Tensor | None
    run_start: Tensor
    run_stop: Tensor
    run_edge: Tensor

    @property
    def walks_runs(self) -> bool:
        return self.cols is None


class Sources(NamedTuple):
    """Edges by source: items, the target of each, and which edge it is."""

    items: Items
    targets: Tensor
    edges: Tensor


class RunList(NamedTuple):
    """Per block of sources, the runs that meet it."""

    ptr: Tensor
    run: Tensor
    row: Tensor
    blocks: int


class Tiles(NamedTuple):
    """Tiles by target or by source: which hold every edge, which hold some; how pairs of the latter are told."""

    grid: tuple[Tensor, ...]  # of tiles that hold every edge: ptr, start, stop of runs; of the others too, and edge
    ends: int  # bounds per target, or 0: bits
    start: Tensor
    stop: Tensor
    bits: Tensor
    order: Tensor  # by source only: the number of each tile of `some` among tiles by target


def small(x: Tensor, most: int) -> Tensor:
    """int32 where the largest value allows it."""
    return x.to(torch.int32) if most < 2**31 else x


def rows(graph: Graph) -> Rows:
    def make() -> Rows:
        walk = graph.num_edges >= LONG_RUN * graph.num_runs
        items = _items(graph.edge_ptr(), graph.run_edge() if walk else None)
        cols = None if walk else small(graph._edges()[1], graph.s)
        return Rows(items, cols, graph.start, graph.stop, graph.run_edge())

    return graph.cached("triton_rows", make)


def sources(graph: Graph) -> Sources:
    def make() -> Sources:
        row, source = graph._edges()
        lead = torch.div(row, graph.t, rounding_mode="floor")
        node = lead * graph.s + source
        order = torch.argsort(node, stable=True)
        nodes = (graph.rows // graph.t) * graph.s
        ptr = torch.searchsorted(node[order], torch.arange(nodes + 1, device=graph.device))
        target = small((row - lead * graph.t)[order], graph.t)
        return Sources(_items(ptr, None), target, small(order, graph.num_edges))

    return graph.cached("triton_sources", make)


def run_list(graph: Graph) -> RunList:
    def make() -> RunList:
        blocks = -(-graph.s // SOURCES)
        row = graph.run_row()
        first = torch.div(graph.start, SOURCES, rounding_mode="floor")
        count = torch.div(graph.stop - 1, SOURCES, rounding_mode="floor") - first + 1
        run = torch.repeat_interleave(torch.arange(graph.num_runs, device=graph.device), count)
        within = torch.arange(run.numel(), device=graph.device) - (count.cumsum(0) - count)[run]
        block = torch.div(row, graph.t, rounding_mode="floor")[run] * blocks + first[run] + within
        order = torch.argsort(block, stable=True)
        every = torch.arange((graph.rows // graph.t) * blocks + 1, device=graph.device)
        ptr = torch.searchsorted(block[order], every)
        return RunList(ptr, small(run[order], graph.num_runs), row, blocks)

    return graph.cached("triton_run_list", make)


def _items(ptr: Tensor, run_edge: Tensor | None) -> Items:
    degree = ptr.diff()
    node, begin, end, buckets = [], [], [], []
    low, at = -1, 0
    for cap, high in zip(_CAPS, (*_CAPS[:-1], CHUNK), strict=True):
        high = min(high, CHUNK)
        row = ((degree > low) & (degree <= high)).nonzero().squeeze(1)
        low = high
        if row.numel():
            buckets.append(Bucket(at, row.numel(), cap, False))
            at += row.numel()
            node.append(row)
            begin.append(ptr[row])
            end.append(ptr[row + 1])
    hub = (degree > CHUNK).nonzero().squeeze(1)
    parts = torch.div(degree[hub] + CHUNK - 1, CHUNK, rounding_mode="floor")
    hub_ptr = torch.cat([parts.new_zeros(1), parts.cumsum(0)])
    if hub.numel():
        row = torch.repeat_interleave(hub, parts)
        part = torch.arange(row.numel(), device=ptr.device) - torch.repeat_interleave(hub_ptr[:-1], parts)
        first = ptr[row] + part * CHUNK
        buckets.append(Bucket(at, row.numel(), _CAPS[-1], True))
        node.append(row)
        begin.append(first)
        end.append(torch.minimum(first + CHUNK, ptr[row + 1]))
    edges = int(ptr[-1])
    rows, first, last = torch.cat(node), torch.cat(begin), torch.cat(end)
    run = None
    if run_edge is not None:
        from_run = (torch.searchsorted(run_edge, first, right=True) - 1).clamp_(min=0)
        run = torch.stack([from_run, torch.searchsorted(run_edge, last)], 1).reshape(-1)
    return Items(
        small(rows, degree.numel()), small(first, edges), small(last, edges), run, tuple(buckets), hub, hub_ptr
    )  # fmt: skip


def fill(graph: Graph, bm: int, bn: int) -> float:
    """The share of pairs that are edges among those of tiles that hold any."""

    def make() -> float:
        tiles = tiling(graph, bm, bn)
        count = tiles.some.num_edges + tiles.all.num_edges
        return graph.num_edges / (count * bm * bn) if count else 0.0

    return graph.cached(("triton_fill", bm, bn), make)


def tiles(graph: Graph, bm: int, bn: int, runs: int) -> Tiles:
    """Tiles by target; up to `runs` runs per target are compared, otherwise bits are looked up."""
    return graph.cached(("triton_tiles", bm, bn), lambda: _tiles(graph, bm, bn, runs))


def _tiles(graph: Graph, bm: int, bn: int, runs: int) -> Tiles:
    tiled = tiling(graph, bm, bn)
    ends = bounds(graph, runs)
    none = torch.zeros(1, dtype=torch.int32, device=graph.device)
    if ends is not None:
        return Tiles(_grid(tiled.all, tiled.some), ends[0].shape[1], ends[0], ends[1], none, none)
    bits = tile_bits(graph, tiled)
    return Tiles(_grid(tiled.all, tiled.some), 0, none, none, bits if bits.numel() else none, none)


def _grid(every: Graph, some: Graph) -> tuple[Tensor, ...]:
    # 32 bits: tiles are counted here, not edges
    parts = (every.indptr, every.start, every.stop, some.indptr, some.start, some.stop, some.run_edge())
    return tuple(x.to(torch.int32) for x in parts)


def tiles_by_source(graph: Graph, bm: int, bn: int, runs: int) -> Tiles:
    def make() -> Tiles:
        by_target, (some, every, _, _) = tiles(graph, bm, bn, runs), tiling(graph, bm, bn)
        order = by_target.order
        if by_target.ends == 0:
            row, col = some.edges()
            lead = torch.div(row, max(some.t, 1), rounding_mode="floor")
            order = torch.argsort((lead * some.s + col) * some.t + row - lead * some.t).to(torch.int32)
        return by_target._replace(grid=_grid(every.T, some.T), order=order)

    return graph.cached(("triton_tiles_by_source", bm, bn), make)
