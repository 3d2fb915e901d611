"""Blocks of targets times the spans of sources they read: plain torch at the speed of its matrix product.

Fast where runs are long and few: causal, windows, prefixes, documents, padding, block patterns; the best route on a CPU
where the native engine isn't built.  On scattered edges it multiplies mostly hidden pairs, or refuses.

Targets are cut into blocks.  A block reads a few spans of sources; equal blocks at equal distances are one batched
product over strided views, and only the columns in which some pair is hidden get a mask.  The backward pass computes
the scores again, so memory is that of one chunk of blocks.  A hidden NaN inside a block's spans spreads to that block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..graph import Graph
from ..scores import Alibi
from . import gpu
from .call import Call
from .numerics import keep_edges, transformed

# Scores of one chunk: small enough that the passes over them stay in cache, large enough to feed every thread.
CELLS = 2**20
# Spans closer than this are one: multiplying the hidden columns between costs less than another span.
GAP = 32
# Bytes of softmax that the forward pass may keep for the backward pass; beyond it they are computed again.
STASH = 2**26
BLOCKS = (64, 128, 192, 256)
# Gradients of blocks that move by less overlap too much to be added in slices of one step.
LEAST_STEP = 16
# A graph whose blocks read more spans than this, together or each, isn't made of intervals.
MOST_SPANS = 4096
MOST_SPANS_PER_BLOCK = 24.0


class Part(NamedTuple):
    """Sources `[first, first + width)` of a group's first block, moved by `step` for each further block."""

    first: int
    width: int
    step: int


class Group(NamedTuple):
    """`size` blocks of `rows` consecutive targets from `first` on, each with the same parts and hidden pairs."""

    lead: int
    first: int
    rows: int
    size: int
    parts: tuple[Part, ...]
    width: int
    # (column, column, which are hidden): the only columns of the spans that need a mask
    edges: tuple[tuple[int, int, Tensor], ...]
    empty: bool  # some target reads nothing


class Plan(NamedTuple):
    groups: tuple[Group, ...]
    cells: int
    rows: int


# ---------------------------------------------------------------------- what it can do, and at what cost


def why_not(call: Call) -> str | None:
    """Sums of products or GAT scores on graphs made of intervals."""
    if call.score.name == "gatv2":
        return "its tiles hold one number per pair, and the score gatv2 needs a vector"
    if call.edge_key is not None or call.edge_value is not None:
        return "it has no vectors per edge (edge_key, edge_value)"
    if 0 in (call.q.shape[-1], call.v.shape[-1]) and call.graph.num_edges:
        return "it needs queries and values of width 1 or more"
    if transformed():
        return "its gradient is written out for plain tensors: not inside torch.func or vmap"
    if call.graph.num_edges and outline(call.graph) is None:
        return "the graph is not made of intervals: its blocks of targets read too many separate spans of sources"
    return None


def memory(call: Call) -> int:
    """Bytes of the chunks in flight, and of copies in the dtype of the arithmetic."""
    shape = outline(call.graph)
    if shape is None:
        return 0
    size = 8 if call.wide == torch.float64 else 4
    pairs = call.batch * call.heads
    widest = min(max(CELLS, shape.widest), pairs * shape.cells)
    kept = pairs * shape.cells if call.needs_grad and size * pairs * shape.cells <= STASH else 0
    copies = (call.q.numel() + call.k.numel() + call.v.numel()) * (2 if call.needs_grad else 1)
    return size * (copies + kept + widest * (4 if call.needs_grad else 2))


def cost(call: Call) -> float:
    """Two products over the cells of all tiles forward and seven in all, some passes, and a price per chunk."""
    pairs = _shared(call)
    shape = outline(call.graph, pairs)
    if shape is None:
        return math.inf
    if call.q.device.type == "cuda":
        return _cuda_cost(call, pairs * shape.cells, max(shape.groups, pairs * shape.cells / CELLS))
    estimate = seconds(shape, pairs, call.q.shape[-1] + call.v.shape[-1], call.needs_grad)
    # each option is another few passes over the cells; hashing 64-bit integers is many
    extra = (call.score.name != "dot") + (call.softcap is not None) + (call.position is not None)
    extra += 4 * (call.bias is not None) + (40 if call.dropout and call.seed is not None else 4 * (call.dropout > 0))
    return estimate + extra * pairs * shape.cells * (2e-9 if call.needs_grad else 1e-9) / torch.get_num_threads()


def _shared(call: Call) -> int:
    """How many batch and head indices share one row of the graph."""
    bg, hg = call.lead
    return (call.batch // max(bg, 1)) * (call.heads // max(hg, 1))


def floor(call: Call) -> float:
    """Never less than this, whatever the graph's shape: no hidden pair multiplied, one group."""
    pairs, edges = _shared(call), call.graph.num_edges
    if call.q.device.type == "cuda":
        return _cuda_cost(call, pairs * edges, max(1, pairs * edges / CELLS))
    return seconds(Outline(BLOCKS[0], edges, 1, edges, 2), pairs, call.q.shape[-1] + call.v.shape[-1], call.needs_grad)


def _cuda_cost(call: Call, cells: float, chunks: float) -> float:
    """Products at torch's own rate, passes over the cells, and for each chunk operations started one by one."""
    options = (call.softcap is not None) + (call.position is not None) + (call.bias is not None) + (call.dropout > 0)
    work = gpu.fused(call, cells, gpu.plain_peak(call), 0.5, 0.5) + gpu.passes(cells, 6 + 2 * options, 12, call)
    return gpu.launches(call, 12 * chunks, 20 * chunks) + work


# multiply-adds of a batched product and cells of a softmax per second and thread; seconds of a call, and of a chunk
RATES = {"product": 47.5e9, "cell": 1.6e9, "call": 25e-6, "chunk": 30e-6}
# share of that rate of a product that is alone in its batch, by targets per block
ALONE = {64: 0.8, 128: 0.85, 192: 1.0, 256: 0.75}


def seconds(shape: Outline, pairs: int, width: int, needs_grad: bool) -> float:
    """Estimated for an outline shared by `pairs` batch and head indices; width is D + D_v."""
    cells = pairs * shape.cells
    chunks = max(shape.groups, cells / CELLS)
    # two products forward; backward the scores again and four more
    products, again = (4.0, 3.0) if needs_grad else (1.0, 1.0)
    rate = RATES["product"]
    if pairs == 1 and shape.groups * 2 > shape.blocks:
        rate *= ALONE.get(shape.rows, 1.0)
    work = cells * (products * width / rate + again / RATES["cell"]) / torch.get_num_threads()
    return again * RATES["call"] + work + chunks * products * RATES["chunk"]


class Outline(NamedTuple):
    """The size of a plan before it is made: targets per block, cells of all tiles, groups, cells of the widest tile,
    and blocks."""

    rows: int
    cells: int
    groups: int
    widest: int
    blocks: int


def outline(graph: Graph, pairs: int = 2) -> Outline | None:
    """The block size that costs least, or None where the graph isn't made of intervals."""
    alone = pairs == 1
    return graph.cached(("tiles_outline", alone), lambda: _outline(graph, 1 if alone else 4))


def _outline(graph: Graph, pairs: int) -> Outline | None:
    if graph.num_edges == 0:
        return Outline(BLOCKS[0], 0, 0, 0, 0)
    mean = graph.num_edges / graph.num_runs
    if mean < 8 and graph.num_runs > 4 * MOST_SPANS and graph.num_runs > graph.rows:
        return None  # scattered; not worth a look
    best, best_seconds = None, math.inf
    for size in BLOCKS:
        if size > BLOCKS[0] and size >= 2 * graph.t:
            break
        blocks, block_spans = _spans(graph, size)
        owner, low, high = block_spans
        if owner.numel() > MOST_SPANS_PER_BLOCK * (blocks.numel() - 1):
            continue
        rows = blocks.diff()
        per_block = torch.zeros(rows.numel(), dtype=torch.int64, device=rows.device).index_add_(0, owner, high - low)
        cells = per_block * rows
        # a block continues the group before it if its shape is the same and its first span moved by as much
        first = torch.full_like(per_block, -1).index_copy_(0, owner.flip(0), low.flip(0))
        step = first.diff()
        same = (per_block[1:] == per_block[:-1]) & (rows[1:] == rows[:-1])
        same[1:] &= step[1:] == step[:-1]
        groups = rows.numel() - int(same.sum())
        if groups > MOST_SPANS:
            continue
        found = Outline(size, int(cells.sum()), groups, int(cells.max()), rows.numel())
        estimate = seconds(found, pairs, 128, True)
        if estimate < best_seconds:
            best, best_seconds = found, estimate
    return best


# ---------------------------------------------------------------------- the plan


def plan(graph: Graph, pairs: int = 2) -> Plan:
    """The tiling for this many batch and head indices, made once per graph and block size."""
    shape = outline(graph, pairs)
    size = BLOCKS[0] if shape is None else shape.rows
    return graph.cached(("tiles_plan", size), lambda: _plan(graph, size))


def _cuts(graph: Graph, size: int) -> Tensor:
    """(blocks + 1,) first row of each block, over all leading indices: every `size` rows, and where rows part."""
    rows, t, device = graph.rows, graph.t, graph.device
    at = torch.zeros(rows + 1, dtype=torch.bool, device=device)
    at[:: max(t, 1)] = True
    filled = graph.indptr.diff() > 0
    first, last = graph.indptr[:-1].clamp(max=graph.num_runs - 1), (graph.indptr[1:] - 1).clamp(min=0)
    low, high = graph.start[first], graph.stop[last]
    apart = (low[1:] >= high[:-1]) | (high[1:] <= low[:-1]) | (filled[1:] != filled[:-1])
    if int(apart.sum()) * 32 <= rows:
        at[1:-1] |= apart
    at[-1] = True
    bounds = at.nonzero().squeeze(1)
    length = bounds.diff()
    pieces = (length + size - 1) // size
    offset = torch.cumsum(pieces, 0) - pieces
    number = torch.arange(int(pieces.sum()), device=device) - torch.repeat_interleave(offset, pieces)
    return torch.cat([torch.repeat_interleave(bounds[:-1], pieces) + number * size, bounds[-1:]])


def _spans(graph: Graph, size: int) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Cuts, and per span of a block: the block, its first source, the source after its last; sorted."""
    cuts = _cuts(graph, size)
    blocks = cuts.numel() - 1
    owner = torch.repeat_interleave(torch.arange(blocks, device=cuts.device), graph.indptr[cuts].diff())
    # a run reaches GAP further, so that near ones touch
    united = Graph._from_pieces(owner, graph.start, graph.stop + GAP, (blocks, graph.s + GAP))
    return cuts, (united.run_row(), united.start, united.stop - GAP)


def _plan(graph: Graph, size: int) -> Plan:
    if graph.num_edges == 0:
        return Plan((), 0, size)
    cuts, (owner, low, high) = _spans(graph, size)
    blocks, t = cuts.numel() - 1, max(graph.t, 1)
    span_ptr = torch.searchsorted(owner, torch.arange(blocks + 1, device=owner.device)).tolist()
    low_, high_, cut = low.tolist(), high.tolist(), cuts.tolist()
    repeats = _same_as_before(graph, cuts, owner, low)
    groups: list[Group] = []
    cells = 0
    masks: dict[tuple[int, int, bytes], Tensor] = {}
    for b in range(blocks):
        a, z = span_ptr[b], span_ptr[b + 1]
        if a == z:  # reads nothing
            continue
        spans = [(low_[k], high_[k] - low_[k]) for k in range(a, z)]
        rows, width = cut[b + 1] - cut[b], sum(w for _, w in spans)
        cells += rows * width
        lead, first = divmod(cut[b], t)
        joined = _join(groups[-1], spans, rows, lead, first) if groups and repeats[b] else None
        if joined is not None:
            groups[-1] = joined
            continue
        edges, empty = _edges(graph, cut[b], cut[b + 1], spans, masks)
        groups.append(Group(lead, first, rows, 1, tuple(Part(f, w, 0) for f, w in spans), width, edges, empty))
    return Plan(tuple(groups), cells, size)


def _same_as_before(graph: Graph, cuts: Tensor, owner: Tensor, low: Tensor) -> list[bool]:
    """Per block: its runs, relative to its first row and their spans, are those of the block before."""
    blocks = cuts.numel() - 1
    ptr = graph.indptr[cuts]
    count = ptr.diff()
    block = torch.repeat_interleave(torch.arange(blocks, device=cuts.device), count)
    row = graph.run_row() - cuts[block]
    # each run lies in one span, and is compared relative to it: spans may move by different steps
    width = graph.s + 1
    span = torch.searchsorted(owner * width + low, block * width + graph.start, right=True) - 1
    start, stop = graph.start - low[span], graph.stop - low[span]
    span -= torch.searchsorted(owner, block)
    alike = torch.zeros(blocks, dtype=torch.bool, device=cuts.device)
    alike[1:] = (count[1:] == count[:-1]) & (cuts.diff()[1:] == cuts.diff()[:-1])
    here = alike[block].nonzero().squeeze(1)
    before = here - count[block[here]]
    differ = torch.zeros_like(here, dtype=torch.bool)
    for x in (row, span, start, stop):
        differ |= x[here] != x[before]
    alike[block[here[differ]]] = False
    return alike.tolist()


def _join(group: Group, spans: list[tuple[int, int]], rows: int, lead: int, first: int) -> Group | None:
    """The group with one more block, if that block continues it."""
    if lead != group.lead or rows != group.rows or first != group.first + group.size * rows:
        return None
    if len(spans) != len(group.parts):
        return None
    parts = []
    for (low, width), p in zip(spans, group.parts, strict=True):
        step = low - p.first if group.size == 1 else p.step
        if width != p.width or low != p.first + group.size * step:
            return None
        # gradients of overlapping spans are added in slices of one step
        if step < 0 or (0 < step < LEAST_STEP) or (step and width > 64 * step):
            return None
        parts.append(Part(p.first, width, step))
    return group._replace(size=group.size + 1, parts=tuple(parts))


def _edges(
    graph: Graph, first: int, last: int, spans: list[tuple[int, int]], masks: dict[tuple[int, int, bytes], Tensor]
) -> tuple[tuple[tuple[int, int, Tensor], ...], bool]:
    """Column ranges of a block in which a pair is hidden, each with the hidden pairs (rows, columns)."""
    r0, r1 = int(graph.indptr[first]), int(graph.indptr[last])
    start, stop, rows = graph.start[r0:r1], graph.stop[r0:r1], last - first
    count = graph.indptr[first : last + 1].diff()
    row = torch.repeat_interleave(torch.arange(rows, device=start.device), count)
    out, base = [], 0
    for low, width in spans:
        inside = (start >= low) & (stop <= low + width)
        a, z, r = start[inside] - low, stop[inside] - low, row[inside]
        if r.numel() == rows and torch.equal(r, torch.arange(rows, device=r.device)):
            open_from, open_to = int(a.max()), int(z.min())  # columns that every row reads
            ranges = [(0, width)] if open_to <= open_from else [(0, open_from), (open_to, width)]
        else:
            ranges = [(0, width)]
        for c0, c1 in ranges:
            if c1 <= c0:
                continue
            hidden = ~_visible(r, a, z, rows, c0, c1)
            for d0, d1 in _trim(hidden):
                piece = hidden[:, d0:d1].contiguous()
                key = (rows, d1 - d0, piece.cpu().numpy().tobytes()) if piece.numel() <= 2**17 else None
                if key is not None:
                    piece = masks.setdefault(key, piece)
                out.append((base + c0 + d0, base + c0 + d1, piece))
        base += width
    return tuple(out), bool((count == 0).any())


def _visible(row: Tensor, start: Tensor, stop: Tensor, rows: int, c0: int, c1: int) -> Tensor:
    """Bool (rows, c1 - c0) of runs, which are disjoint."""
    a, z = start.clamp(c0, c1) - c0, stop.clamp(c0, c1) - c0
    step = torch.zeros(rows, c1 - c0 + 1, dtype=torch.int32, device=row.device)
    one = torch.ones_like(row, dtype=torch.int32)
    step.index_put_((row, a), one, accumulate=True)
    step.index_put_((row, z), -one, accumulate=True)
    return step.cumsum(1)[:, :-1] > 0


def _trim(hidden: Tensor) -> list[tuple[int, int]]:
    """Ranges of columns in which something is hidden, in whole tiles of 16 columns, near ones united."""
    bad = hidden.any(0)
    if not bool(bad.any()):
        return []
    if bool(bad.all()):
        return [(0, hidden.shape[1])]
    wide = F.pad(bad, (0, -bad.numel() % 16)).view(-1, 16).any(1)
    edge = torch.diff(F.pad(wide.to(torch.int8), (1, 1))).nonzero().squeeze(1).tolist()
    out: list[tuple[int, int]] = []
    for a, z in zip(edge[0::2], edge[1::2], strict=True):
        a, z = 16 * a, min(16 * z, hidden.shape[1])
        if out and a - out[-1][1] <= 64:
            out[-1] = (out[-1][0], z)
        else:
            out.append((a, z))
    return out


# ---------------------------------------------------------------------- one call


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """`(out, lse)`, chunk by chunk of the plan."""
    if call.graph.num_edges == 0 or call.q.numel() == 0 or call.v.numel() == 0:
        return call.zeros()
    wide = call.wide
    k, v = call.expanded_kv()
    position = call.position
    values = None
    if position is not None:
        values = (position.slopes if isinstance(position, Alibi) else position.table).to(wide)
    bias = None if call.bias is None else call.bias.to(wide)
    seed: int | Tensor | None = call.seed
    if call.dropout and seed is None:
        # a generator of its own, so that the backward pass can draw the same numbers again
        seed = int(torch.randint(2**62, ()))
    work = _Work(
        plan(call.graph, _shared(call)), call.graph, call.scale, call.score.name, getattr(call.score, "slope", 0.0),
        call.softcap, call.dropout, seed, call.seed is not None,
        None if position is None else (position.name, position.offset),
    )  # fmt: skip
    out, lse = _Tiles.apply(call.q, k, v, bias, values, work, wide, call.want_lse)
    return out, lse


class _Work(NamedTuple):
    """What the passes need besides tensors that may have a gradient."""

    plan: Plan
    graph: Graph
    scale: float
    score: str
    slope: float
    softcap: float | None
    dropout: float
    seed: int | Tensor | None
    seeded: bool
    position: tuple[str, int] | None

    @property
    def plain(self) -> bool:
        return self.score == "dot" and self.softcap is None and self.position is None


class _Chunk:
    """`size` blocks of a group for one batch and head index, or one block for several of them."""

    def __init__(self, group: Group, pairs: slice, block: int, size: int) -> None:
        self.group, self.pairs, self.block, self.size = group, pairs, block, size
        self.first = group.first + block * group.rows

    def rows(self, x: Tensor) -> Tensor:
        """(pairs, T, W) to this chunk's (n, rows, W), a view."""
        g = self.group
        if self.size == 1:
            return x[self.pairs, self.first : self.first + g.rows]
        return x[self.pairs.start, self.first : self.first + self.size * g.rows].view(self.size, g.rows, x.shape[-1])

    def cols(self, x: Tensor) -> Tensor:
        """(pairs, S, W) to (n, width, W): a view for one part, else copied together."""
        parts = [self._part(x, p) for p in self.group.parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _part(self, x: Tensor, p: Part) -> Tensor:
        low = p.first + self.block * p.step
        if self.size == 1:
            return x[self.pairs, low : low + p.width]
        x = x[self.pairs.start]
        row = x.stride(0)
        return x.as_strided(
            (self.size, p.width, x.shape[1]), (p.step * row, row, x.stride(1)), x.storage_offset() + low * row
        )

    def add_cols(self, into: Tensor, left: Tensor, right: Tensor) -> None:
        """into (pairs, S, W)[spans] += left^T right, left (n, rows, width), right (n, rows, W)."""
        if self.size == 1:
            at = 0
            for p in self.group.parts:
                low = p.first + self.block * p.step
                into[self.pairs, low : low + p.width].baddbmm_(left[:, :, at : at + p.width].mT, right)
                at += p.width
            return
        whole = torch.bmm(left.mT, right)  # (n, width, W)
        flat = into[self.pairs.start]
        at = 0
        for p in self.group.parts:
            piece = whole[:, at : at + p.width]
            low = p.first + self.block * p.step
            if p.step == 0:
                flat[low : low + p.width] += piece.sum(0)
            else:  # blocks overlap, but slices of one step of them do not
                for c in range(0, p.width, p.step):
                    w = min(p.step, p.width - c)
                    side = flat.as_strided(
                        (self.size, w, flat.shape[1]),
                        (p.step * flat.stride(0), flat.stride(0), flat.stride(1)),
                        flat.storage_offset() + (low + c) * flat.stride(0),
                    )
                    side += piece[:, c : c + w]
            at += p.width

    def targets(self, device: torch.device) -> Tensor:
        """(size, rows, 1) number of each target."""
        n = torch.arange(self.first, self.first + self.size * self.group.rows, device=device)
        return n.view(self.size, self.group.rows, 1)

    def sources(self, device: torch.device) -> Tensor:
        """(size, 1, width) number of each source."""
        block = torch.arange(self.block, self.block + self.size, device=device)[:, None]
        parts = [p.first + block * p.step + torch.arange(p.width, device=device) for p in self.group.parts]
        return torch.cat(parts, 1).unsqueeze(1)

    def cells(self, graph: Graph) -> tuple[Tensor, slice]:
        """Positions of this chunk's edges among its flattened cells, and their numbers: both rise together."""
        g = self.group
        a = g.lead * graph.t + self.first
        z = a + self.size * g.rows
        r0, r1 = int(graph.indptr[a]), int(graph.indptr[z])
        row = torch.repeat_interleave(torch.arange(z - a, device=graph.device), graph.indptr[a : z + 1].diff())
        start, stop = graph.start[r0:r1], graph.stop[r0:r1]
        block = row // g.rows + self.block
        column = torch.zeros_like(start)
        base = 0
        for p in g.parts:
            low = p.first + block * p.step
            inside = (start >= low) & (stop <= low + p.width)
            column = torch.where(inside, start - low + base, column)
            base += p.width
        length = stop - start
        ends = torch.cumsum(length, 0)
        at = torch.repeat_interleave(row * g.width + column - (ends - length), length)
        at += torch.arange(at.numel(), device=at.device)
        ptr = graph.edge_ptr()
        return at, slice(int(ptr[a]), int(ptr[z]))


def _chunks(groups: list[Group], pairs: int) -> Iterator[_Chunk]:
    for g in groups:
        tile = g.rows * g.width
        together = max(1, CELLS // tile)
        by_pair = pairs * -(-g.size // together)
        by_block = g.size * -(-pairs // together)
        if g.size > 1 and by_pair <= by_block:
            for i in range(pairs):
                for j in range(0, g.size, together):
                    yield _Chunk(g, slice(i, i + 1), j, min(together, g.size - j))
        else:
            for j in range(g.size):
                for i in range(0, pairs, together):
                    yield _Chunk(g, slice(i, min(i + together, pairs)), j, 1)


def _by_lead(work: _Work, batch: int, heads: int) -> Iterator[tuple[list[Group], slice, slice]]:
    """Groups of one leading index of the graph, with the batch and head indices that share it."""
    bg, hg = work.graph.lead or (1, 1)
    groups: list[list[Group]] = [[] for _ in range(bg * hg)]
    for g in work.plan.groups:
        groups[g.lead].append(g)
    for lead, some in enumerate(groups):
        b, h = divmod(lead, hg)
        yield some, slice(b, b + 1) if bg > 1 else slice(0, batch), slice(h, h + 1) if hg > 1 else slice(0, heads)


def _pairs(x: Tensor, b: slice, h: slice) -> Tensor:
    """(B, H, T, W) contiguous to a view (pairs, T, W) of these indices."""
    x = x[b, h]
    if x.shape[1] == 1:
        return x[:, 0]
    return x[0] if x.shape[0] == 1 else x.view(-1, *x.shape[2:])


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, values: Tensor | None, work: _Work,
        wide: torch.dtype, want_lse: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        wq, wk, wv = _wide(q, k, v, work, wide)
        batch, heads, t, _ = q.shape
        whole = _covers(work.plan, work.graph)
        make = torch.empty if whole else torch.zeros
        out = make(batch, heads, t, v.shape[-1], dtype=wide, device=q.device)
        lse = torch.full((batch, heads, t, 1), -math.inf, dtype=wide, device=q.device)
        noise = _noise(work, q.device)
        bg, hg = work.graph.lead or (1, 1)
        kept = work.plan.cells * (batch // bg) * (heads // hg) * lse.element_size()
        stash: list[Tensor] | None = None
        if any(ctx.needs_input_grad) and work.score == "dot" and work.softcap is None and kept <= STASH:
            stash = []
        for groups, b, h in _by_lead(work, batch, heads):
            qs, ks, vs, outs, lses = (_pairs(x, b, h) for x in (wq, wk, wv, out, lse))
            for c in _chunks(groups, qs.shape[0]):
                s, _, _ = _scores(c, work, qs, ks, bias, values, b, h)
                peak = s.amax(-1, keepdim=True)
                p = torch.softmax(s, -1)
                # the largest weight is exp(peak - lse)
                total = p.amax(-1, keepdim=True).log_().neg_().add_(peak)
                if c.group.empty:
                    p.masked_fill_(_no_edges(c, work.graph), 0.0)
                if c.group.empty or bias is not None:  # also where every bias is -inf
                    total.masked_fill_(peak == -math.inf, -math.inf)
                if stash is not None:
                    stash.append(p)
                if work.dropout:
                    p = (p * _kept(c, work, noise, p, b, h)).div_(1 - work.dropout)
                c.rows(outs).copy_(torch.bmm(p, c.cols(vs)))
                c.rows(lses).copy_(total)
        lse = lse.squeeze(-1)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, values, result if result.dtype == wide else out)
        ctx.work, ctx.wide, ctx.stash = work, wide, stash
        if not want_lse:
            ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return result, lse

    @staticmethod
    def backward(ctx: Any, go: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "tiles are differentiable once: for gradients of gradients pass backend='edges' to attend"
            )
        q, k, v, bias, values, out = ctx.saved_tensors
        work, wide = ctx.work, ctx.wide
        wq, wk, wv = _wide(q, k, v, work, wide)
        batch, heads = q.shape[:2]
        go = torch.zeros_like(out) if go is None else go.to(wide).contiguous()
        # ds = p * (dp - pull), and what lse pulls enters with the other sign
        pull = (go * out).sum(-1, keepdim=True)
        if dlse is not None:
            pull = pull - dlse.unsqueeze(-1).to(wide)
        dq, dk, dv = (torch.zeros_like(x) for x in (wq, wk, wv))
        needs = ctx.needs_input_grad
        dbias = torch.zeros_like(bias, memory_format=torch.contiguous_format) if needs[3] else None
        dvalues = torch.zeros_like(values, memory_format=torch.contiguous_format) if needs[4] else None
        stash = None if ctx.stash is None else iter(ctx.stash)
        noise = _noise(work, q.device)
        for groups, b, h in _by_lead(work, batch, heads):
            qs, ks, vs, gos, pulls = (_pairs(x, b, h) for x in (wq, wk, wv, go, pull))
            dqs, dks, dvs = (_pairs(x, b, h) for x in (dq, dk, dv))
            for c in _chunks(groups, qs.shape[0]):
                grad = c.rows(gos)
                raw = capped = None
                if stash is not None:
                    p = next(stash)
                    dp = torch.bmm(grad, c.cols(vs).mT)
                else:
                    s, raw, capped = _scores(c, work, qs, ks, bias, values, b, h)
                    p = torch.softmax(s, -1)
                    if c.group.empty:
                        p.masked_fill_(_no_edges(c, work.graph), 0.0)
                    dp = torch.bmm(grad, c.cols(vs).mT, out=s)
                if work.dropout:
                    kept = _kept(c, work, noise, p, b, h).to(wide).div_(1 - work.dropout)
                    dp.mul_(kept)
                    c.add_cols(dvs, p * kept, grad)
                else:
                    c.add_cols(dvs, p, grad)
                ds = dp.sub_(c.rows(pulls)).mul_(p)
                if dbias is not None:
                    _add_bias_grad(c, work, ds, dbias, b, h)
                if dvalues is not None:
                    _add_position_grad(c, work, ds, dvalues, h)
                if capped is not None:
                    assert work.softcap is not None
                    ds.mul_(1 - (capped / work.softcap).square_())
                if raw is not None:  # the additive score: a sum of two numbers through a leaky ReLU
                    ds.mul_((raw > 0).to(wide).mul_(1 - work.slope).add_(work.slope)).mul_(work.scale)
                    c.rows(dqs).copy_(ds.sum(-1, keepdim=True))
                    c.add_cols(dks, ds, torch.ones_like(c.rows(qs)))
                else:
                    c.rows(dqs).copy_(torch.bmm(ds, c.cols(ks)))
                    c.add_cols(dks, ds, c.rows(qs))
        if work.score == "dot":
            dq.mul_(work.scale)
        return (
            dq.to(q.dtype) if needs[0] else None, dk.to(k.dtype) if needs[1] else None,
            dv.to(v.dtype) if needs[2] else None, dbias, dvalues, None, None, None,
        )  # fmt: skip


def _wide(q: Tensor, k: Tensor, v: Tensor, work: _Work, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """In the dtype of the arithmetic, contiguous, and queries times the scale of a dot product."""
    wq = q.to(wide)
    if work.score == "dot":
        wq = wq * work.scale
    return wq.contiguous(), k.to(wide).contiguous(), v.to(wide).contiguous()


def _covers(plan: Plan, graph: Graph) -> bool:
    """Every target is in a block, so that outputs need no zeros first."""
    return sum(g.rows * g.size for g in plan.groups) == graph.rows


def _scores(
    c: _Chunk, work: _Work, q: Tensor, k: Tensor, bias: Tensor | None, values: Tensor | None, b: slice, h: slice
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores (n, rows, width), -inf where hidden; the sums before a leaky ReLU, and the capped scores before a bias."""
    raw = capped = None
    if work.score == "dot":
        s = torch.bmm(c.rows(q), c.cols(k).mT)
    else:
        raw = c.rows(q) + c.cols(k).mT
        s = F.leaky_relu(raw, work.slope).mul_(work.scale)
    if work.softcap is not None:
        capped = s.div_(work.softcap).tanh_().mul_(work.softcap)
        s = capped.clone()
    if values is not None:
        s += _position_values(c, work, values, h)
    if bias is not None:
        at, edges = c.cells(work.graph)
        for i, flat in enumerate(s.view(-1, s.shape[-1] * s.shape[-2] * c.size if c.size > 1 else s[0].numel())):
            flat.index_add_(0, at, _bias_of(bias, c.pairs.start + i, b, h)[edges])
    for c0, c1, hidden in c.group.edges:
        s[..., c0:c1].masked_fill_(hidden, -math.inf)
    return s, raw, capped


def _bias_of(bias: Tensor, pair: int, b: slice, h: slice) -> Tensor:
    """(E,) bias of the pair-th batch and head index among b x h, a view."""
    heads = h.stop - h.start
    i, j = b.start + pair // heads, h.start + pair % heads
    return bias[i if bias.shape[0] > 1 else 0, j if bias.shape[1] > 1 else 0]


def _heads_of(c: _Chunk, h: slice) -> Tensor:
    """(n,) head index of each product of the chunk, or (1,) if all share it."""
    heads = h.stop - h.start
    return torch.tensor([h.start + i % heads for i in range(c.pairs.start, c.pairs.stop)])


def _away(c: _Chunk, work: _Work, device: torch.device) -> Tensor:
    """(size, rows, width) source minus target; of one block where all have the same."""
    assert work.position is not None
    away = c.sources(device) - c.targets(device) - work.position[1]
    return away[:1] if all(p.step == c.group.rows for p in c.group.parts) else away


def _position_values(c: _Chunk, work: _Work, values: Tensor, h: slice) -> Tensor:
    assert work.position is not None
    away, heads = _away(c, work, values.device), _heads_of(c, h).to(values.device)
    if work.position[0] == "alibi":
        return values[heads].view(-1, 1, 1) * away.abs().neg_()
    reach = values.shape[1] // 2
    at = away.clamp_(-reach, reach).add_(reach)  # (size or 1, rows, width)
    if c.size > 1:
        return values[heads[0]].index_select(0, at.view(-1)).view(at.shape)
    return values[heads].index_select(1, at.view(-1)).view(-1, *at.shape[1:])


def _add_position_grad(c: _Chunk, work: _Work, ds: Tensor, into: Tensor, h: slice) -> None:
    assert work.position is not None
    away, heads = _away(c, work, ds.device), _heads_of(c, h).to(ds.device)
    if c.size > 1 and away.shape[0] == 1:
        ds = ds.sum(0, keepdim=True)
    if work.position[0] == "alibi":
        pulled = (ds * away.abs()).sum((-1, -2)).neg_()
        into.index_add_(0, heads.expand(pulled.numel()) if c.size > 1 else heads, pulled)
        return
    reach = into.shape[1] // 2
    at = away.clamp_(-reach, reach).add_(reach)
    if c.size > 1:
        into[heads[0]].index_add_(0, at.reshape(-1), ds.reshape(-1))
    else:
        for i, head in enumerate(heads.tolist()):
            into[head].index_add_(0, at.view(-1), ds[i].reshape(-1))


def _add_bias_grad(c: _Chunk, work: _Work, ds: Tensor, into: Tensor, b: slice, h: slice) -> None:
    at, edges = c.cells(work.graph)
    count = c.pairs.stop - c.pairs.start
    for i, flat in enumerate(ds.reshape(count, -1)):
        _bias_of(into, c.pairs.start + i, b, h)[edges] += flat.index_select(0, at)


def _no_edges(c: _Chunk, graph: Graph) -> Tensor:
    """(size, rows, 1) bool: targets that read nothing."""
    a = c.group.lead * graph.t + c.first
    return (graph.indptr[a : a + c.size * c.group.rows + 1].diff() == 0).view(c.size, c.group.rows, 1)


def _noise(work: _Work, device: torch.device) -> torch.Generator | None:
    if not work.dropout or work.seeded:
        return None
    assert isinstance(work.seed, int)
    return torch.Generator(device).manual_seed(work.seed)


def _kept(c: _Chunk, work: _Work, noise: torch.Generator | None, like: Tensor, b: slice, h: slice) -> Tensor:
    """Bool or 0/1, broadcasting to (n, rows, width): pairs that dropout leaves."""
    if noise is not None:
        return torch.empty_like(like).bernoulli_(1 - work.dropout, generator=noise)
    device, heads = like.device, h.stop - h.start
    pair = torch.arange(c.pairs.start, c.pairs.stop, device=device).view(-1, 1, 1)
    batch, head = b.start + pair // heads, h.start + pair % heads
    assert work.seed is not None
    return keep_edges(work.seed, work.dropout, batch, head, c.targets(device), c.sources(device))
