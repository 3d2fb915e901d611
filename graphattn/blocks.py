"""A graph seen in tiles of targets x sources: which tiles hold no edge, some, or every edge they could.

Both answers are graphs again, over blocks of targets and blocks of sources, so they cost what their runs cost: nothing
here reads T_q x T_kv cells, except the bit patterns of tiles that hold some edges, where they are asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .graph import Graph

_CELLS = 2**24  # cells of partial tiles unpacked at once


class Tiling(NamedTuple):
    """`some` and `all`: graphs of shape `(*lead, ceil(T_q / bm), ceil(T_kv / bn))` with an edge per tile.

    A tile of `all` holds every edge it could; one of `some` holds an edge, and lacks one.  Disjoint.
    """

    some: Graph
    all: Graph
    bm: int
    bn: int


def tiling(graph: Graph, bm: int, bn: int) -> Tiling:
    """The tiles of `bm` targets by `bn` sources; O(runs log runs), O(T_q) if runs only ever move right."""
    return graph.cached(("tiling", bm, bn), lambda: _tiling(graph, bm, bn))


def _tiling(graph: Graph, bm: int, bn: int) -> Tiling:
    shape = (*graph.lead, -(-graph.t // bm), -(-graph.s // bn))
    if graph.num_edges == 0 or graph.is_full():
        every = _whole(graph, shape)
        none = every - every
        return Tiling(none, none if graph.num_edges == 0 else every, bm, bn)
    if is_one_sided(graph):
        return _monotone(graph, shape, bm, bn)
    touched = _coarse(graph, shape, bm, bn)
    # a tile is full iff the complement does not touch it
    full = touched - _coarse(~graph, shape, bm, bn)
    return Tiling(touched - full, full, bm, bn)


def _whole(graph: Graph, shape: tuple[int, ...]) -> Graph:
    rows = shape[-2] * (graph.rows // graph.t if graph.t else 0)
    zero = torch.zeros(rows, dtype=torch.int64, device=graph.device)
    return Graph.from_runs(torch.arange(rows + 1, device=graph.device), zero, zero + shape[-1], shape)


def _coarse(graph: Graph, shape: tuple[int, ...], bm: int, bn: int) -> Graph:
    """The tiles an edge falls in."""
    row = graph.run_row()
    lead = torch.div(row, graph.t, rounding_mode="floor")
    block = lead * shape[-2] + torch.div(row - lead * graph.t, bm, rounding_mode="floor")
    start = torch.div(graph.start, bn, rounding_mode="floor")
    stop = torch.div(graph.stop + bn - 1, bn, rounding_mode="floor")
    return Graph._from_pieces(block, start, stop, shape)


def is_one_sided(graph: Graph) -> bool:
    """Every target reads one run, and neither end of it moves left from one target to the next."""

    def make() -> bool:
        if graph.t == 0 or graph.num_runs != graph.rows or bool((graph.indptr.diff() != 1).any()):
            return False
        return all(bool((x.view(-1, graph.t).diff(dim=1) >= 0).all()) for x in (graph.start, graph.stop))

    return graph.cached("one_sided", make)


def _monotone(graph: Graph, shape: tuple[int, ...], bm: int, bn: int) -> Tiling:
    # with ends that only move right, a block of targets reads at least what lies between its extreme runs
    t, (nq, nk) = graph.t, shape[-2:]
    first = torch.arange(nq, device=graph.device) * bm
    last = (first + bm - 1).clamp_(max=t - 1)
    start, stop = graph.start.view(-1, t), graph.stop.view(-1, t)
    low = torch.div(start[:, first], bn, rounding_mode="floor").reshape(-1)
    high = torch.div(stop[:, last] + bn - 1, bn, rounding_mode="floor").reshape(-1)
    # every target of the block reads [start of the last, stop of the first)
    inner = torch.div(start[:, last] + bn - 1, bn, rounding_mode="floor").reshape(-1)
    end = stop[:, first]
    outer = torch.where(end == graph.s, nk, torch.div(end, bn, rounding_mode="floor")).reshape(-1)
    row = torch.arange(low.numel(), device=graph.device)
    full = Graph._from_pieces(row, inner, outer, shape)
    # between the runs of consecutive targets there may be a gap: a tile that no target reads is not `some`
    if bool((start[:, 1:] > stop[:, :-1]).any()):
        touched = _coarse(graph, shape, bm, bn)
    else:
        touched = Graph._from_pieces(row, low, high, shape)
    return Tiling(touched - full, full, bm, bn)


def bounds(graph: Graph, most: int) -> tuple[Tensor, Tensor] | None:
    """`(start, stop)`, each int32 `(rows, K)`: the runs of every row, padded with empty ones; None if K > most."""

    def make() -> tuple[Tensor, Tensor] | None:
        count = graph.indptr.diff()
        k = max(int(count.max()), 1) if count.numel() else 1
        if k > most:
            return None
        k = 1 << (k - 1).bit_length()  # few different widths, so that few kernels are compiled
        if k == 1 and graph.num_runs == graph.rows:
            return graph.start.to(torch.int32).unsqueeze(1), graph.stop.to(torch.int32).unsqueeze(1)
        start = torch.zeros(graph.rows, k, dtype=torch.int32, device=graph.device)
        stop = torch.zeros_like(start)
        row = graph.run_row()
        slot = torch.arange(graph.num_runs, device=graph.device) - graph.indptr[row]
        start[row, slot], stop[row, slot] = graph.start.to(torch.int32), graph.stop.to(torch.int32)
        return start, stop

    return graph.cached(("bounds", most), make)


def tile_bits(graph: Graph, tiles: Tiling) -> Tensor:
    """int32 `(tiles of some, bm, ceil(bn / 32))`: bit j % 32 of word j // 32: is the tile's j-th source read?

    Tiles are in edge order of `some`.  Costs the cells of those tiles, a few at a time.
    """
    return graph.cached(("tile_bits", tiles.bm, tiles.bn), lambda: _tile_bits(graph, tiles))


def _tile_bits(graph: Graph, tiles: Tiling) -> Tensor:
    some, bm, bn = tiles.some, tiles.bm, tiles.bn
    device, nq, words = graph.device, tiles.some.t, -(-tiles.bn // 32)
    block, col = some.edges()
    out = torch.zeros(block.numel(), bm, words, dtype=torch.int32, device=device)
    points, width = graph._points(), graph.s + 1
    each = bn // words  # bits of a word
    power = torch.ones(each, dtype=torch.int64, device=device) << torch.arange(each, device=device)
    step = max(1, _CELLS // (bm * bn))
    for at in range(0, block.numel(), step):
        b, c = block[at : at + step, None], col[at : at + step, None]
        lead, m = torch.div(b, max(nq, 1), rounding_mode="floor"), b % max(nq, 1)
        i = m * bm + torch.arange(bm, device=device)  # (tiles, bm) targets
        low = (c * bn).expand_as(i)
        high = (low + bn).clamp(max=graph.s)
        base = (lead * graph.t + i) * width
        # where the boundaries of the row lie: those at or before the tile's first source tell whether it is inside
        first = torch.searchsorted(points, (base + low).reshape(-1), right=True)
        last = torch.searchsorted(points, (base + high).reshape(-1))
        inside = i.reshape(-1) < graph.t
        count = torch.where(inside, last - first, 0).clamp_(min=0)
        toggle = torch.zeros(i.numel(), bn, dtype=torch.int8, device=device)
        toggle[:, 0] = (first % 2) * inside
        which = torch.repeat_interleave(torch.arange(i.numel(), device=device), count)
        rank = torch.arange(which.numel(), device=device) - (count.cumsum(0) - count)[which]
        cell = points[first[which] + rank] - (base + low).reshape(-1)[which]
        toggle[which, cell] += 1
        on = torch.cumsum(toggle, 1, dtype=torch.int64) % 2
        # the last tile's sources past the end
        on = on * (torch.arange(bn, device=device) < (high - low).reshape(-1, 1))
        packed = (on.view(-1, bm, words, each) * power).sum(-1)
        out[at : at + step] = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return out
