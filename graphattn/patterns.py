"""Patterns: each is its formula, an inequality between target i and source j, built from runs without a T x T mask.

What the algebra can say is not a function: packed causal documents are `causal(t) & documents(lengths)`, a padded
batch is `causal(t) & padding(lengths, t)`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .graph import LIMIT, Graph, _starts, check_shape, plainly


def _size(n: int, name: str, least: int = 0) -> int:
    if isinstance(n, bool) or str(getattr(n, "dtype", "")).endswith("bool"):
        raise TypeError(f"{name} must be an integer, got {n!r}")
    try:
        n = operator.index(n)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {n!r}") from None
    if n < least:
        raise ValueError(f"{name} must be at least {least}, got {n}")
    if n > _MOST[name == "t"]:
        raise ValueError(
            f"{name} = {n:,} is over the limit of {_MOST[name == 't']:,}: a run per target alone takes {n * 24 / 2**30:.0f} GiB"
        )
    return n


_MOST = {True: LIMIT, False: 2**40}  # of targets, each of which has a run; of any other number


def _lengths(lengths: Tensor | Sequence[int], name: str = "lengths") -> Tensor:
    try:
        out = torch.as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be integers along one axis, got {lengths!r}") from None
    if out.dim() != 1 or (out.numel() and (out.dtype.is_floating_point or out.dtype == torch.bool)):
        raise ValueError(f"{name} must be integers along one axis, got {out.dtype} of shape {tuple(out.shape)}")
    out = out.to(torch.int64)
    if out.numel() and int(out.min()) < 0:
        raise ValueError(f"{name} must not be negative, got {int(out.min())}")
    return out


def _total(n: Tensor, what: str, most: int = LIMIT) -> int:
    """The sum of lengths, or a ValueError where it is more than can be built (or counted)."""
    if float(n.double().sum()) > most:  # int64 would wrap
        raise ValueError(f"the {what} would be {float(n.double().sum()):,.0f}, over the limit of {most:,}")
    return int(n.sum())


def _fits(rows: int, what: str) -> None:
    """Refuse more rows than can be built, before anything is."""
    if rows > LIMIT:
        raise ValueError(
            f"{what} would have {rows:,} rows, over the limit of {LIMIT:,}: a run for each takes {rows * 24 / 2**30:,.0f} GiB"
        )


def _one_run(start: Tensor, stop: Tensor, shape: Sequence[int]) -> Graph:
    """Row r reads `[start[r], stop[r])`, nothing where that is empty."""
    keep = stop > start
    if bool(keep.all()):
        return Graph._new(torch.arange(keep.numel() + 1, device=keep.device), start, stop, shape)
    return Graph._new(_starts(keep), start[keep], stop[keep], shape)


# ---------------------------------------------------------------------- the elementary ones


@plainly
def full(t: int, s: int | None = None) -> Graph:
    """Every pair: the encoder of Vaswani et al. 2017, BERT; `s` sources (default: t) give cross-attention."""
    t = _size(t, "t")
    s = t if s is None else _size(s, "s")
    shape = check_shape((t, s))
    return _one_run(torch.zeros(t, dtype=torch.int64), torch.full((t,), s), shape)


@plainly
def empty(t: int, s: int | None = None) -> Graph:
    """No pair at all, the zero of `|`: every target gets output 0."""
    t = _size(t, "t")
    s = t if s is None else _size(s, "s")
    none = torch.zeros(0, dtype=torch.int64)
    shape = check_shape((t, s))
    return Graph._new(torch.zeros(t + 1, dtype=torch.int64), none, none, shape)


@plainly
def self_loops(t: int) -> Graph:
    """j == i: each node reads itself, the one of `@`."""
    own = torch.arange(_size(t, "t"))
    return _one_run(own, own + 1, (t, t))


@plainly
def causal(t: int, s: int | None = None, align: Literal["start", "end"] | None = None) -> Graph:
    """j <= i: the triangular DAG of every GPT (decoder of Vaswani et al. 2017).

    On a rectangle (`s != t`) libraries disagree, so `align` is required: "start" means j <= i (what SDPA's
    `is_causal` does), "end" means j <= i + s - t (decoding with a cache, FlashAttention >= 2.1).  With fewer sources
    than targets, "end" leaves the first t - s targets without a source.

    Raises:
        ValueError: `s != t` without `align`.
    """
    t = _size(t, "t")
    s = t if s is None else _size(s, "s")
    if align not in (None, "start", "end"):
        raise ValueError(f'align must be "start" or "end", got {align!r}')
    if s != t and align is None:
        raise ValueError(
            f'causal({t}, {s}) is a rectangle: say align="start" (j <= i) or align="end" (j <= i + {s - t})'
        )
    shape = check_shape((t, s))
    stop = torch.arange(1, t + 1)
    if align == "end":
        stop += s - t
    return _one_run(torch.zeros(t, dtype=torch.int64), stop.clamp_(0, s), shape)


@plainly
def band(t: int, before: int, after: int = 0) -> Graph:
    """i - before <= j <= i + after: local attention (Longformer's and BigBird's window, ViT over a row).

    Negative numbers leave out the diagonal: `band(t, -1, 3)` reads the next three, `band(t, 3, -1)` the last three.
    """
    t, before, after = _size(t, "t"), operator.index(before), operator.index(after)
    before, after = (max(-t - 1, min(t + 1, n)) for n in (before, after))
    own = torch.arange(t)
    return _one_run((own - before).clamp_(0, t), (own + (after + 1)).clamp_(0, t), (t, t))


@plainly
def window(t: int, size: int) -> Graph:
    """i - size < j <= i: causal, `size` keys counting oneself (Mistral 7B, `sliding_window`); size 1 is self-loops."""
    return band(t, _size(size, "size", 1) - 1)


@plainly
def prefix(t: int, length: int) -> Graph:
    """j <= i or j < length: dense in the prompt, triangular after it; the prefix LM (T5, UniLM, PaliGemma).

    It leaks the labels of the prefix itself: train it with the loss taken beyond the prefix only.

    Raises:
        ValueError: a length above t.
    """
    t, length = _size(t, "t"), _size(length, "length")
    if length > t:
        raise ValueError(f"prefix of length {length} does not fit {t} sources")
    return _one_run(torch.zeros(t, dtype=torch.int64), torch.arange(1, t + 1).clamp_(min=length), (t, t))


@plainly
def bipartite(t: int, s: int) -> Graph:
    """Complete bipartite: t targets read all of s sources of another set (cross-attention, Perceiver's first layer)."""
    return full(t, s)


@plainly
def padding(lengths: Tensor | Sequence[int], s: int, t: int | None = None) -> Graph:
    """j < lengths[b]: `(B, 1, t, s)`, sample b reads its first `lengths[b]` sources; `t` defaults to s.

    Targets beyond a sample's length still read: their outputs are for the loss to ignore, never NaN.

    Raises:
        ValueError: a length above s.
    """
    n = _lengths(lengths)
    s = _size(s, "s")
    t = s if t is None else _size(t, "t")
    if n.numel() and int(n.max()) > s:
        raise ValueError(f"lengths reach {int(n.max())}, but there are {s} sources")
    _fits(n.numel() * t, f"padding of {n.numel():,} samples of {t:,} targets")
    stop = n.repeat_interleave(t)
    return _one_run(torch.zeros_like(stop), stop, check_shape((n.numel(), 1, t, s)))


@plainly
def documents(lengths: Tensor | Sequence[int], t: int | None = None) -> Graph:
    """document(j) == document(i): packed sequences that do not see each other, `causal(t) & documents(lengths)`.

    Args:
        lengths: tokens of each document in turn; 0 is allowed.
        t: if given, checked to be the total.

    Raises:
        ValueError: `t` is not the sum of the lengths.
    """
    n = _lengths(lengths)
    total = _total(n, f"tokens of {n.numel():,} documents")
    if t is not None and t != total:
        raise ValueError(f"document lengths sum to {total}, but there are {t} tokens: pad with a document or cut")
    stop = torch.cumsum(n, 0)
    return _one_run((stop - n).repeat_interleave(n), stop.repeat_interleave(n), (total, total))


# ---------------------------------------------------------------------- putting graphs together


@plainly
def disjoint(graphs: Iterable[Graph]) -> Graph:
    """Block diagonal: the targets and sources of each graph follow those of the one before, and never mix.

    What PyG's `Batch` does to graphs and packing does to documents.  Leading axes broadcast.
    """
    graphs = list(graphs)
    if not graphs:
        return empty(0)
    lead = _common_lead(graphs, "disjoint")
    t, s = sum(g.t for g in graphs), sum(g.s for g in graphs)
    _fits(t * (lead[0] * lead[1] if lead else 1), f"disjoint of {len(graphs):,} graphs")
    check_shape((*lead, t, s))
    indptr, start, stop = [torch.zeros(1, dtype=torch.int64, device=graphs[0].device)], [], []
    runs = col = 0
    for g in graphs:
        g = g.expand(*lead) if lead else g
        indptr.append(g.indptr[1:] + runs)
        start.append(g.start + col)
        stop.append(g.stop + col)
        runs, col = runs + g.num_runs, col + g.s
    n = lead[0] * lead[1] if lead else 1
    out = Graph._new(torch.cat(indptr), torch.cat(start), torch.cat(stop), (n * t, s))
    if not lead:
        return out
    # rows are ordered (graph, batch and head, target): bring batch and head to the front
    row, at = [], 0
    for g in graphs:
        row.append(torch.arange(at, at + n * g.t, device=out.device).view(n, g.t))
        at += n * g.t
    return out._gather_rows(torch.cat(row, 1).reshape(-1), (*lead, t, s))


@plainly
def stack(graphs: Iterable[Graph], axis: Literal["batch", "head"]) -> Graph:
    """One graph per sample (`axis="batch"`) or per head (`axis="head"`): a graph with leading axes `(B, H)`.

    Each keeps its own other axis, which broadcasts: stacking `(1, H)` graphs along "batch" gives `(B, H)`.

    Raises:
        ValueError: no graph, another `axis`, or sizes that differ.
    """
    graphs = list(graphs)
    if axis not in ("batch", "head"):
        raise ValueError(f'axis must be "batch" or "head", got {axis!r}')
    if not graphs:
        raise ValueError("stack needs at least one graph")
    first = graphs[0]
    for k, g in enumerate(graphs):
        if (g.t, g.s) != (first.t, first.s):
            raise ValueError(f"graph {k} is {g!r}, but graph 0 is {first!r}: stacked graphs need one size")
    leads = [g.lead or (1, 1) for g in graphs]
    other = 1 if axis == "batch" else 0
    sizes = {lead[other] for lead in leads} - {1}
    if len(sizes) > 1:
        raise ValueError(f"stack along {axis}: the other leading axis is {sorted(sizes)}, which does not broadcast")
    n = sizes.pop() if sizes else 1
    _fits(
        sum(lead[1 - other] for lead in leads) * n * first.t, f"stack of {len(graphs):,} graphs of {first.t:,} targets"
    )
    parts = [
        g.expand(lead[0], n) if axis == "batch" else g.expand(n, lead[1]) for g, lead in zip(graphs, leads, strict=True)
    ]
    rows = sum(g.rows for g in parts)
    indptr, runs = [torch.zeros(1, dtype=torch.int64, device=first.device)], 0
    for g in parts:
        indptr.append(g.indptr[1:] + runs)
        runs += g.num_runs
    joined = torch.cat(indptr), torch.cat([g.start for g in parts]), torch.cat([g.stop for g in parts])
    if axis == "batch":
        return Graph._new(*joined, (sum(g.lead[0] for g in parts), n, first.t, first.s))
    flat = Graph._new(*joined, (rows, first.s))
    grid, at = [], 0
    for g in parts:
        grid.append(torch.arange(at, at + g.rows, device=first.device).view(n, g.lead[1], g.t))
        at += g.rows
    order = torch.cat(grid, 1)
    return flat._gather_rows(order.reshape(-1), (n, order.shape[1], first.t, first.s))


def _common_lead(graphs: Sequence[Graph], what: str) -> tuple[int, ...]:
    leads = [g.lead for g in graphs if g.lead]
    if not leads:
        return ()
    out = []
    for axis in (0, 1):
        sizes = {lead[axis] for lead in leads} - {1}
        if len(sizes) > 1:
            raise ValueError(f"{what}: leading axes {sorted(set(leads))} do not broadcast")
        out.append(sizes.pop() if sizes else 1)
    return tuple(out)


# ---------------------------------------------------------------------- sparse attention


@plainly
def dilated(t: int, size: int, dilation: int) -> Graph:
    """i - j in {0, d, 2d, ..., (size - 1) d}: causal, `size` keys counting oneself, d = `dilation` apart.

    WaveNet's and LongNet's spacing; `g | g.T` is Longformer's symmetric dilated window.  `dilation=1` is `window`.
    """
    t, size, d = _size(t, "t"), _size(size, "size", 1), _size(dilation, "dilation", 1)
    if d == 1:
        return window(t, size)
    count = (torch.div(torch.arange(t), d, rounding_mode="floor") + 1).clamp_(max=size)
    row, k = _ragged(count, f"dilated({t}, {size}, {d})")
    source = row - (count[row] - 1 - k) * d
    return Graph._new(_starts(count), source, source + 1, (t, t))


@plainly
def strided(t: int, stride: int) -> Graph:
    """j <= i and (i - j < stride or (i - j) % stride == 0): Sparse Transformer, strided (Child et al. 2019).

    Both heads of the paper united; each alone is `window(t, stride)` and `dilated(t, t, stride)`.
    """
    return window(t, _size(stride, "stride", 1)) | dilated(t, max(t, 1), stride)


@plainly
def fixed(t: int, stride: int, c: int = 1) -> Graph:
    """j <= i and (j // stride == i // stride or j % stride >= stride - c): Sparse Transformer, fixed.

    Child et al. 2019.  The last `c` positions of each block summarise it for all later ones.
    """
    t, stride, c = _size(t, "t"), _size(stride, "stride", 1), _size(c, "c")
    if c > stride:
        raise ValueError(f"c must be at most the stride {stride}, got {c}")
    own = torch.arange(t)
    block = torch.div(own, stride, rounding_mode="floor")
    local = _one_run(block * stride, own + 1, (t, t))
    if c == 0:
        return local
    row, k = _ragged(block, f"fixed({t}, {stride}, {c})")
    stop = (k + 1) * stride
    return local | Graph._from_pieces(row, stop - c, stop, (t, t))


@plainly
def global_tokens(t: int, tokens: int | Tensor | Sequence[int]) -> Graph:
    """i in tokens or j in tokens: they read all and all read them (Longformer's [CLS], BigBird's global, ETC)."""
    t = _size(t, "t")
    at = torch.unique(
        _lengths([tokens] if hasattr(tokens, "__index__") and getattr(tokens, "ndim", 0) == 0 else tokens, "tokens")  # type: ignore[arg-type, list-item]
    )
    if at.numel() and int(at[-1]) >= t:
        raise ValueError(f"token {int(at[-1])} is out of range for {t} nodes")
    # sources: the same few runs for every row; targets: whole rows
    fresh = torch.ones_like(at, dtype=torch.bool)
    fresh[1:] = at.diff() > 1
    start = at[fresh]
    stop = torch.cat([at[:-1][fresh[1:]], at[-1:]]) + 1
    n = start.numel()
    if n * t > LIMIT:
        raise ValueError(f"{at.numel()} scattered tokens of {t} take {n * t:,} runs, over the limit of {LIMIT:,}")
    read = Graph._new(torch.arange(t + 1) * n, start.repeat(t), stop.repeat(t), (t, t))
    whole = torch.zeros(t, dtype=torch.int64)
    whole[at] = t
    return read | _one_run(torch.zeros_like(whole), whole, (t, t))


@plainly
def random_regular(t: int, degree: int, seed: int) -> Graph:
    """Each target reads `degree` distinct others, uniformly at random: BigBird's random part (Zaheer et al. 2020).

    The same (t, degree, seed) gives the same graph in every process.
    """
    t, degree = _size(t, "t"), _size(degree, "degree")
    if degree and degree > t - 1:
        raise ValueError(f"each of {t} targets has {max(t - 1, 0)} others to read, got degree {degree}")
    if t * degree > LIMIT:
        raise ValueError(f"random_regular({t}, {degree}) would have {t * degree:,} edges, over the limit of {LIMIT:,}")
    few = min(degree, t - 1 - degree)
    generator = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, max(t - 1, 1), (t, max(few, 0)), generator=generator).sort(1).values
    while few > 0:
        again = (pick.diff(dim=1) == 0).any(1).nonzero().squeeze(1)  # whole rows anew: conditioning keeps it uniform
        if not again.numel():
            break
        if few * few > t:  # a row without repeats is rare: take the first of a shuffle
            keys = torch.rand(again.numel(), t - 1, generator=generator) if again.numel() * t <= LIMIT else None
            if keys is not None:
                pick[again] = keys.argsort(1)[:, :few].sort(1).values
                continue
            for r in again.tolist():
                pick[r] = torch.randperm(t - 1, generator=generator)[:few].sort().values
            continue
        pick[again] = torch.randint(0, t - 1, (again.numel(), few), generator=generator).sort(1).values
    own = torch.arange(t)[:, None]
    keys = (own * (t + 1) + pick + (pick >= own)).reshape(-1)  # numbers 0..t-2 skip oneself
    chosen = Graph.from_keys(keys, (t, t), owned=True)
    return chosen if few == degree else ~chosen - self_loops(t)


@plainly
def expander(t: int, degree: int, seed: int) -> Graph:
    """i and j are neighbours on one of `degree / 2` random Hamiltonian cycles: symmetric, connected, small diameter.

    A union of random cycles is almost surely a near-Ramanujan expander (Friedman 2003), so a stack of O(log t) layers
    covers everything with O(t) edges: Exphormer (Shirzad et al. 2023).  Where cycles share an edge the degree is less.
    """
    t, degree = _size(t, "t"), _size(degree, "degree")
    if degree % 2:
        raise ValueError(f"degree must be even, two per cycle, got {degree}")
    if degree > 2 * t:
        raise ValueError(f"degree must be at most two per node, {2 * t}, got {degree}: full(t) has every edge")
    if t * degree > LIMIT:
        raise ValueError(f"expander({t}, {degree}) would have {t * degree:,} edges, over the limit of {LIMIT:,}")
    generator = torch.Generator().manual_seed(seed)
    keys = [torch.zeros(0, dtype=torch.int64)]
    for _ in range(degree // 2):
        cycle = torch.randperm(t, generator=generator)
        after = cycle.roll(-1)
        keys += [cycle * (t + 1) + after, after * (t + 1) + cycle]
    return Graph.from_keys(torch.cat(keys), (t, t), owned=True) - self_loops(t)


@plainly
def bigbird(
    t: int, block: int, *, window: int = 3, global_blocks: int = 2, random_blocks: int = 3, seed: int = 0
) -> Graph:
    """block_sparse(band | global | random): BigBird in its block form (Zaheer et al. 2020, ITC).

    Args:
        block: tokens per block; the last may be shorter.
        window: blocks in the symmetric window, odd.  global_blocks: the first so many.
        random_blocks: blocks each block reads at random besides; as many as there are if the sequence is short.
    """
    t, block = _size(t, "t"), _size(block, "block", 1)
    if window < 1 or window % 2 == 0:
        raise ValueError(f"window must be an odd number of blocks, got {window}")
    n = -(-t // block)
    far = random_regular(n, min(random_blocks, max(n - 1, 0)), seed)
    near = band(n, window // 2, window // 2) | global_tokens(n, range(min(global_blocks, n)))
    return block_sparse(near | far, _block_sizes(t, block))


# ---------------------------------------------------------------------- blocks


@plainly
def block_sparse(
    graph: Graph, sizes: int | Tensor | Sequence[int], source_sizes: Tensor | Sequence[int] | None = None
) -> Graph:
    """block(j) -> block(i) is an edge of `graph`: every node becomes a block of tokens (block-sparse attention).

    Args:
        graph: a graph over blocks.
        sizes: tokens of each target block, or one number for all.
        source_sizes: tokens of each source block, if they differ.
    """
    if not isinstance(graph, Graph):
        raise TypeError(f"graph must be a Graph over blocks, such as causal(8), got {type(graph).__name__}")
    if not isinstance(sizes, Sequence) and getattr(sizes, "ndim", 0) == 0:
        every = _size(sizes, "sizes")  # type: ignore[arg-type]
        sizes = torch.full((graph.t,), every)
        source_sizes = torch.full((graph.s,), every) if source_sizes is None else source_sizes
    rows = _lengths(sizes, "sizes").to(graph.device)  # type: ignore[arg-type]
    cols = rows if source_sizes is None else _lengths(source_sizes, "source_sizes").to(graph.device)
    for what, n, have in (("target", rows.numel(), graph.t), ("source", cols.numel(), graph.s)):
        if n != have:
            raise ValueError(f"{n} sizes given for the {have} {what} blocks of {graph!r}")
    lead = graph.lead[0] * graph.lead[1] if graph.lead else 1
    t, s = _total(rows, f"targets of block_sparse of {graph!r}"), _total(cols, f"sources of {graph!r}", 2**40)
    _fits(lead * t, f"block_sparse of {graph!r}")
    shape = check_shape((*graph.lead, t, s))
    at = _starts(cols)
    coarse = Graph._from_pieces(graph.run_row(), at[graph.start], at[graph.stop], (*graph.lead, graph.t, s))
    row = torch.arange(lead * graph.t, device=graph.device).repeat_interleave(rows.repeat(lead))
    runs = int((coarse.indptr.diff() * rows.repeat(lead)).sum())
    if runs > LIMIT:
        raise ValueError(f"block_sparse of {graph!r} would have {runs:,} runs, over the limit of {LIMIT:,}")
    return coarse._gather_rows(row, shape)


@plainly
def block_causal(sizes: Tensor | Sequence[int]) -> Graph:
    """block(j) <= block(i): causal between blocks, full inside (frames of a video, block diffusion, VAR's scales)."""
    n = _lengths(sizes, "sizes")
    return block_sparse(causal(n.numel()), n)


def _block_sizes(t: int, block: int) -> Tensor:
    n = torch.full((-(-t // block),), block)
    if t % block:
        n[-1] = t % block
    return n


# ---------------------------------------------------------------------- grids


@plainly
def neighborhood(shape: int | Sequence[int], radius: int | Sequence[int], causal: bool = False) -> Graph:
    """|i_d - j_d| <= radius_d on every axis d of a grid flattened in raster order: images, video.

    Neighbourhood attention (Hassani et al. 2023) without its shift at the border: corners have fewer neighbours.
    `causal=True` also asks j <= i in raster order (the local form of Image Transformer, Parmar et al. 2018);
    it is `neighborhood(...) & causal(t)`.

    Args:
        shape: `(height, width)`, `(frames, height, width)`, ... or a length.
        radius: one for all axes or one each.
    """
    sides, reach = _grid(shape, radius, "radius")
    place = _places(sides)
    low = [(p - r).clamp_(min=0) for p, r in zip(place, reach, strict=True)]
    high = [(p + r + 1).clamp_(max=n) for p, r, n in zip(place, reach, sides, strict=True)]
    out = _boxes(sides, low, high)
    return out & _causal(out.t) if causal else out


@plainly
def shifted_window(shape: int | Sequence[int], size: int | Sequence[int], shift: int | Sequence[int] = 0) -> Graph:
    """(i_d + shift_d) // size_d == (j_d + shift_d) // size_d on every axis d of a grid: Swin Transformer.

    Liu et al. 2021.  Swin alternates shift 0 and size // 2; its cyclic shift with the wrapped parts masked is these
    smaller border windows.
    """
    sides, width = _grid(shape, size, "size")
    _, move = _grid(shape, shift, "shift")
    if min(width, default=1) < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    low, high = [], []
    for p, w, m, n in zip(_places(sides), width, move, sides, strict=True):
        begin = torch.div(p + m, w, rounding_mode="floor") * w - m
        low.append(begin.clamp(min=0))
        high.append((begin + w).clamp(max=n))
    return _boxes(sides, low, high)


_causal = causal


def _grid(shape: int | Sequence[int], value: int | Sequence[int], name: str) -> tuple[list[int], list[int]]:
    sides = [_size(n, "shape") for n in ([shape] if isinstance(shape, int) else shape)]
    if not sides:
        raise ValueError("shape needs at least one axis")
    values = [value] * len(sides) if isinstance(value, int) else list(value)
    if len(values) != len(sides):
        raise ValueError(f"{name} has {len(values)} entries for a grid of {len(sides)} axes")
    # a side of 0 hides the others in the product, but places along them are made all the same
    _fits(max([math.prod(sides), *sides]), f"a grid of {'x'.join(map(str, sides[:8]))}")
    return sides, [_size(v, name) for v in values]


def _places(sides: Sequence[int]) -> list[Tensor]:
    """Coordinates of every node in raster order."""
    return [x.reshape(-1) for x in torch.meshgrid(*(torch.arange(n) for n in sides), indexing="ij")]


def _boxes(sides: Sequence[int], low: list[Tensor], high: list[Tensor]) -> Graph:
    """Target i reads the box low_d[i] <= j_d < high_d[i]: one run per line of the last axis."""
    t = low[0].numel()
    row, base = torch.arange(t), torch.zeros(t, dtype=torch.int64)
    for d in range(len(sides) - 1):
        count = (high[d] - low[d])[row]
        owner, k = _ragged(count, f"a grid of {'x'.join(map(str, sides))}")
        row = row[owner]
        base = (base[owner] + low[d][row] + k) * sides[d + 1]
    return Graph._from_pieces(row, base + low[-1][row], base + high[-1][row], (t, t))


# ---------------------------------------------------------------------- trees, streams, given graphs


@plainly
def tree_ancestors(parent: Tensor | Sequence[int]) -> Graph:
    """j == i or j is an ancestor of i: tree attention of speculative decoding (SpecInfer, Medusa), trees of thought.

    Args:
        parent: `(t,)` integers, the parent of each node, -1 for a root.

    Raises:
        ValueError: a parent out of range, or a cycle.
    """
    up = torch.as_tensor(parent)
    if up.dim() != 1 or (up.numel() and (up.dtype.is_floating_point or up.dtype == torch.bool)):
        raise ValueError(f"parent must be integers along one axis, got {up.dtype} of shape {tuple(up.shape)}")
    up = up.to(torch.int64)
    t = up.numel()
    if t and (int(up.min()) < -1 or int(up.max()) >= t):
        raise ValueError(
            f"parents span {int(up.min())}..{int(up.max())}, but there are {t} nodes: each needs -1 <= parent < {t}"
        )
    # depth by levels; a node's runs are its parent's and itself
    depth = torch.full((t,), -1)
    level, at = (up < 0).nonzero().squeeze(1), 0
    order = torch.argsort(up, stable=True)
    children = torch.searchsorted(up[order], torch.arange(t + 1))
    begin = torch.zeros(t, dtype=torch.int64)  # where a node's runs lie in what was made so far
    length = torch.zeros(t, dtype=torch.int64)
    starts, stops, made = (
        torch.zeros(max(2 * t, 16), dtype=torch.int64),
        torch.zeros(max(2 * t, 16), dtype=torch.int64),
        0,
    )
    while level.numel():
        depth[level] = at
        above = up[level].clamp(min=0)
        count = torch.where(up[level] >= 0, length[above], 0)
        total = int(count.sum()) + level.numel()
        if made + total > LIMIT:
            raise ValueError(f"a tree of {t} nodes would have more than {LIMIT:,} runs: deep and scattered")
        while made + total > starts.numel():
            starts, stops = torch.cat([starts, torch.zeros_like(starts)]), torch.cat([stops, torch.zeros_like(stops)])
        # canonical per level: the new node joins a run it touches, which keeps a chain at one run per node
        owner = torch.cat([torch.arange(level.numel()).repeat_interleave(count), torch.arange(level.numel())])
        pick = (begin[above] - (torch.cumsum(count, 0) - count)).repeat_interleave(count) + torch.arange(
            total - level.numel()
        )
        piece = Graph._from_pieces(
            owner, torch.cat([starts[pick], level]), torch.cat([stops[pick], level + 1]), (level.numel(), t)
        )
        n = piece.num_runs
        starts[made : made + n], stops[made : made + n] = piece.start, piece.stop
        begin[level], length[level] = piece.indptr[:-1] + made, piece.indptr.diff()
        made += n
        width = children[level + 1] - children[level]
        offset = (children[level] - (torch.cumsum(width, 0) - width)).repeat_interleave(width)
        level, at = order[offset + torch.arange(offset.numel())], at + 1
    if t and int(depth.min()) < 0:
        raise ValueError(
            f"node {int((depth < 0).nonzero()[0])} is on or below a cycle: parents must lead to a root, -1"
        )
    indptr = _starts(length)
    pick = (begin - indptr[:-1]).repeat_interleave(length) + torch.arange(int(indptr[-1]))
    return Graph._new(indptr, starts[pick], stops[pick], (t, t))


@plainly
def shared_prefix(prefix: int, lengths: Tensor | Sequence[int]) -> Graph:
    """j <= i, and j in the prefix or in i's own continuation: one prompt, several answers in one pass.

    The nodes are `prefix` tokens, then each continuation in turn (Hydragen, Juravsky et al. 2024; grouped rollouts).
    """
    n = _size(prefix, "prefix")
    inner = _lengths(lengths)
    t = n + _total(inner, "tokens of continuations")
    _fits(t, f"shared_prefix({n}, ...)")
    groups = torch.cat([torch.tensor([n]), inner])
    head = torch.full((t,), n)
    return _causal(t) & (documents(groups) | _one_run(torch.zeros_like(head), head, (t, t)))


@plainly
def encoder_decoder(encoder: int | Graph, decoder: int | Graph, cross: Graph | None = None) -> Graph:
    """[[encoder, 0], [cross, decoder]]: both streams of an encoder-decoder as one graph (Vaswani et al. 2017, T5).

    Nodes 0..s-1 are the encoder's, the rest the decoder's.  A number means the usual: a full encoder, a causal decoder;
    `cross` is full unless given, `(decoder targets <- encoder sources)`.
    """
    enc = full(encoder) if isinstance(encoder, int) else encoder
    dec = _causal(decoder) if isinstance(decoder, int) else decoder
    between = full(dec.t, enc.t) if cross is None else cross
    if enc.t != enc.s or dec.t != dec.s or (between.t, between.s) != (dec.t, enc.t):
        raise ValueError(
            f"encoder {enc!r} and decoder {dec!r} must be square, and cross {between!r} be ({dec.t} <- {enc.t})"
        )
    return disjoint([enc, dec]) | disjoint([empty(enc.t, 0), between, empty(0, dec.t)])


@plainly
def k_hop(graph: Graph, k: int) -> Graph:
    """The shortest path j -> i has 1 to k edges: k rounds of message passing in one (MixHop, NAGphormer).

    A node reads itself only where `graph` says so.

    Raises:
        ValueError: k below 0, a rectangle, or more than 2**27 runs on the way.
    """
    k = _size(k, "k")
    if graph.t != graph.s:
        raise ValueError(f"k_hop needs as many targets as sources, got {graph!r}")
    own = self_loops(graph.t).to(graph.device)
    if k == 0:
        return graph - graph
    return (((graph | own) ** k) - own) | graph


def _ragged(count: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """`(owner, k)`: k = 0 .. count[owner] - 1 for each owner in turn."""
    total = int(count.sum())
    if total > LIMIT:
        raise ValueError(
            f"{what} would have {total:,} runs ({total * 16 / 2**30:.0f} GiB), over the limit of {LIMIT:,}"
        )
    owner = torch.arange(count.numel()).repeat_interleave(count)
    return owner, torch.arange(total) - (torch.cumsum(count, 0) - count)[owner]
