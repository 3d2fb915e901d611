"""Patterns: each is its formula, an inequality between target i and source j, built from runs without a T x T mask.

What the algebra can say is not a function: a prefix language model is `causal(t) | prefix(t, n)`, packed causal
documents are `causal(t) & documents(lengths)`, a padded batch is `causal(t) & padding(lengths, t)`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from .graph import Graph, _starts


def _size(n: int, name: str, least: int = 0) -> int:
    try:
        n = operator.index(n)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {n!r}") from None
    if n < least:
        raise ValueError(f"{name} must be at least {least}, got {n}")
    return n


def _lengths(lengths: Tensor | Sequence[int], name: str = "lengths") -> Tensor:
    out = torch.as_tensor(lengths)
    if out.dim() != 1 or (out.numel() and (out.dtype.is_floating_point or out.dtype == torch.bool)):
        raise ValueError(f"{name} must be integers along one axis, got {out.dtype} of shape {tuple(out.shape)}")
    out = out.to(torch.int64)
    if out.numel() and int(out.min()) < 0:
        raise ValueError(f"{name} must not be negative, got {int(out.min())}")
    return out


def _one_run(start: Tensor, stop: Tensor, shape: Sequence[int]) -> Graph:
    """Row r reads `[start[r], stop[r])`, nothing where that is empty."""
    keep = stop > start
    if bool(keep.all()):
        return Graph._new(torch.arange(keep.numel() + 1, device=keep.device), start, stop, shape)
    return Graph._new(_starts(keep), start[keep], stop[keep], shape)


# ---------------------------------------------------------------------- the elementary ones


def full(t: int, s: int | None = None) -> Graph:
    """Every pair: the encoder of Vaswani et al. 2017, BERT; `s` sources (default: t) give cross-attention."""
    t = _size(t, "t")
    s = t if s is None else _size(s, "s")
    return _one_run(torch.zeros(t, dtype=torch.int64), torch.full((t,), s), (t, s))


def empty(t: int, s: int | None = None) -> Graph:
    """No pair at all, the zero of `|`: every target gets output 0."""
    t = _size(t, "t")
    s = t if s is None else _size(s, "s")
    none = torch.zeros(0, dtype=torch.int64)
    return Graph._new(torch.zeros(t + 1, dtype=torch.int64), none, none, (t, s))


def self_loops(t: int) -> Graph:
    """j == i: each node reads itself, the one of `@`."""
    own = torch.arange(_size(t, "t"))
    return _one_run(own, own + 1, (t, t))


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
        raise ValueError(f'causal({t}, {s}) is a rectangle: say align="start" (j <= i) or align="end" (j <= i + {s - t})')
    stop = torch.arange(1, t + 1)
    if align == "end":
        stop += s - t
    return _one_run(torch.zeros(t, dtype=torch.int64), stop.clamp_(0, s), (t, s))


def band(t: int, before: int, after: int = 0) -> Graph:
    """i - before <= j <= i + after: local attention (Longformer's and BigBird's window, ViT over a row).

    Negative numbers leave out the diagonal: `band(t, -1, 3)` reads the next three, `band(t, 3, -1)` the last three.
    """
    t, before, after = _size(t, "t"), operator.index(before), operator.index(after)
    own = torch.arange(t)
    return _one_run((own - before).clamp_(0, t), (own + (after + 1)).clamp_(0, t), (t, t))


def window(t: int, size: int) -> Graph:
    """i - size < j <= i: causal, `size` keys counting oneself (Mistral 7B, `sliding_window`); size 1 is self-loops."""
    return band(t, _size(size, "size", 1) - 1)


def prefix(t: int, length: int) -> Graph:
    """j < length: every target reads the prefix.  `causal(t) | prefix(t, n)` is the prefix LM (T5, UniLM, PaliGemma)."""
    t, length = _size(t, "t"), _size(length, "length")
    if length > t:
        raise ValueError(f"prefix of length {length} does not fit {t} sources")
    return _one_run(torch.zeros(t, dtype=torch.int64), torch.full((t,), length), (t, t))


def bipartite(t: int, s: int) -> Graph:
    """Complete bipartite: t targets read all of s sources of another set (cross-attention, Perceiver's first layer)."""
    return full(t, s)


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
    stop = n.repeat_interleave(t)
    return _one_run(torch.zeros_like(stop), stop, (n.numel(), 1, t, s))


def documents(lengths: Tensor | Sequence[int], t: int | None = None) -> Graph:
    """document(j) == document(i): packed sequences that do not see each other, `causal(t) & documents(lengths)`.

    Args:
        lengths: tokens of each document in turn; 0 is allowed.
        t: if given, checked to be the total.

    Raises:
        ValueError: `t` is not the sum of the lengths.
    """
    n = _lengths(lengths)
    total = int(n.sum())
    if t is not None and t != total:
        raise ValueError(f"document lengths sum to {total}, but there are {t} tokens: pad with a document or cut")
    stop = torch.cumsum(n, 0)
    return _one_run((stop - n).repeat_interleave(n), stop.repeat_interleave(n), (total, total))


# ---------------------------------------------------------------------- putting graphs together


def disjoint(graphs: Iterable[Graph]) -> Graph:
    """Block diagonal: the targets and sources of each graph follow those of the one before, and never mix.

    What PyG's `Batch` does to graphs and packing does to documents.  Leading axes broadcast.
    """
    graphs = list(graphs)
    if not graphs:
        return empty(0)
    lead = _common_lead(graphs, "disjoint")
    t, s = sum(g.t for g in graphs), sum(g.s for g in graphs)
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
    parts = [g.expand(lead[0], n) if axis == "batch" else g.expand(n, lead[1]) for g, lead in zip(graphs, leads, strict=True)]
    rows = sum(g.rows for g in parts)
    indptr, runs = [torch.zeros(1, dtype=torch.int64, device=first.device)], 0
    for g in parts:
        indptr.append(g.indptr[1:] + runs)
        runs += g.num_runs
    joined = [torch.cat(indptr), torch.cat([g.start for g in parts]), torch.cat([g.stop for g in parts])]
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
