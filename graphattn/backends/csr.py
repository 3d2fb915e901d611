"""Sampled products: score only the edges, softmax per row, multiply the sparse weights with the values.

Fast on large sparse graphs with no compiler at all; slow on small batches of many heads (one product for each).
The gradient is written out, as products over the same edges and their transpose, since the one torch derives for
sparse products allocates N x N.  It never touches what a target does not read, and is differentiable to any order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import gpu
from .call import Call
from .numerics import csr_tensor, keep_edges, sparse_product, transformed


class _Pattern(NamedTuple):
    """The edges of one leading index as CSR, and as CSR of the transpose; `order` permutes values to the transpose."""

    crow: Tensor
    col: Tensor
    shape: tuple[int, int]
    t_crow: Tensor
    t_col: Tensor
    order: Tensor
    back: Tensor

    @property
    def transposed(self) -> _Pattern:
        shape = (self.shape[1], self.shape[0])
        return _Pattern(self.t_crow, self.t_col, shape, self.crow, self.col, self.back, self.order)


def why_not(call: Call) -> str | None:
    """Sums of products only."""
    if call.score.name != "dot":
        return f"it multiplies queries and keys, and the score is {call.score.name}"
    if call.edge_key is not None or call.edge_value is not None:
        return "it has no vectors per edge (edge_key, edge_value)"
    if 0 in (call.q.shape[-1], call.v.shape[-1]) and call.graph.num_edges:
        return "it needs queries and values of width 1 or more"
    if transformed():
        return "its gradient is written out for plain tensors: not inside torch.func or vmap"
    return None


def cost(call: Call) -> float:
    """A gathered row per edge and product, slower once keys and values are out of the caches; a price per head and row."""
    if call.q.device.type == "cuda":
        return _cuda_cost(call)
    width = call.q.shape[-1] + call.v.shape[-1]
    pairs = call.batch * call.heads
    passes = 3.4 if call.needs_grad else 1.0
    each = 14e-9 + width * 0.13e-9
    gathered = call.graph.s * width * (8 if call.wide == torch.float64 else 4)
    each *= 1.0 if gathered < 2**22 else 1.5 if gathered < 2**25 else 4.0
    return 40e-6 + passes * (pairs * (60e-6 + call.graph.t * 0.1e-6) + call.edge_work * each / torch.get_num_threads())


def _cuda_cost(call: Call) -> float:
    """Two sampled or sparse products forward and three backward for each batch and head index, started one by one."""
    width, pairs = call.q.shape[-1] + call.v.shape[-1], call.batch * call.heads
    numbers = gpu.passes(call.edge_work, 12, 12, call)
    # cuSPARSE at half the rate of a kernel made for this: a guess
    return gpu.launches(call, 15 * pairs, 20 * pairs) + 2 * gpu.gathered(call, call.edge_work, width, 4) + numbers


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """`(out, lse)`, one sampled and one sparse product per batch and head index."""
    if call.graph.num_edges == 0 or call.q.numel() == 0 or call.v.numel() == 0:
        return call.zeros()
    wide, (bg, hg) = call.wide, call.lead
    q, (k, v) = call.q.to(wide), (x.to(wide) for x in call.expanded_kv())
    outs, lses = [], []
    for n, (one_q, one_k, one_v) in enumerate(zip(_each(q), _each(k), _each(v), strict=True)):
        b, h = divmod(n, call.heads)
        lead = (b if bg > 1 else 0) * hg + (h if hg > 1 else 0)
        pattern, first = _pattern(call, lead)
        s = _scored(call, pattern, one_q, one_k, b, h, lead, first)
        p, lse = _Softmax.apply(pattern, s)
        if call.dropout:
            p = p * _kept(call, pattern, b, h) / (1 - call.dropout)
        outs.append(_Spmm.apply(pattern, p, one_v))
        lses.append(lse)
    shape = (call.batch, call.heads, call.graph.t)
    return torch.stack(outs).view(*shape, v.shape[-1]).to(call.q.dtype), torch.stack(lses).view(shape)


def scores(call: Call) -> Tensor:
    """`(B, H, E)` scores before the softmax, in the dtype of sums; of a graph without axes of its own."""
    q, k = call.q.to(call.wide), call.expanded_kv()[0].to(call.wide)
    pattern, _ = _pattern(call, 0)
    found = [
        _scored(call, pattern, one_q, one_k, *divmod(n, call.heads), 0, 0)
        for n, (one_q, one_k) in enumerate(zip(_each(q), _each(k), strict=True))
    ]
    return torch.stack(found).view(call.batch, call.heads, pattern.col.numel())


def _each(x: Tensor) -> list[Tensor]:
    """Batch and head indices one by one; indexing would fill a gradient of all of x for each of them."""
    return [y for sample in x.unbind(0) for y in sample.unbind(0)]


def _scored(call: Call, pattern: _Pattern, q: Tensor, k: Tensor, b: int, h: int, lead: int, first: int) -> Tensor:
    s = _Sddmm.apply(pattern, q, k) * call.scale
    return _adjust(call, s, b, h, lead, slice(first, first + s.numel()))


def _adjust(call: Call, s: Tensor, b: int, h: int, lead: int, edges: slice) -> Tensor:
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if call.bias is not None:
        nb, nh, _ = call.bias.shape
        s = s + call.bias[b if nb > 1 else 0, h if nh > 1 else 0, edges].to(s.dtype)
    if call.position is not None:
        target, source = call.graph.targets_sources()
        away = source[edges] - target[edges] - call.position.offset
        if call.position.name == "alibi":
            s = s - call.position.slopes[h].to(s.dtype) * away.abs()
        else:
            table = call.position.table[h].to(s.dtype)
            reach = table.numel() // 2
            s = s + table.index_select(0, away.clamp(-reach, reach) + reach)
    return s


def _pattern(call: Call, lead: int) -> tuple[_Pattern, int]:
    """Edges of one leading index, and the number of the first of them."""
    graph = call.graph

    def make() -> tuple[_Pattern, int]:
        ptr = graph.edge_ptr()[lead * graph.t : (lead + 1) * graph.t + 1]
        first, last = int(ptr[0]), int(ptr[-1])
        row, col = (x[first:last] for x in graph.targets_sources())
        order = torch.argsort(col, stable=True)
        t_crow = torch.searchsorted(col[order], torch.arange(graph.s + 1, device=col.device))
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        # MKL, below torch.sparse, takes indices of 32 bits: others it copies at every product
        small = torch.int32 if max(last - first, graph.t, graph.s) < 2**31 else torch.int64
        crow, col, t_crow, t_col = (x.to(small) for x in (ptr - first, col, t_crow, row[order]))
        return _Pattern(crow, col, (graph.t, graph.s), t_crow, t_col, order, back), first

    return graph.cached(("csr", lead), make)


def _row_sum(pattern: _Pattern, x: Tensor) -> Tensor:
    return torch.segment_reduce(x, "sum", offsets=pattern.crow, initial=0.0)


def _to_edges(pattern: _Pattern, x: Tensor) -> Tensor:
    return torch.repeat_interleave(x, pattern.crow.diff(), output_size=pattern.col.numel())


class _Sddmm(torch.autograd.Function):
    """`(E,)` products <a_row, b_col> of an edge's two ends."""

    @staticmethod
    def forward(ctx: Any, pattern: _Pattern, a: Tensor, b: Tensor) -> Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(a, b)
        if pattern.col.numel() == 0:
            return a.new_zeros(0)
        zero = csr_tensor(pattern.crow, pattern.col, a.new_zeros(pattern.col.numel()), pattern.shape)
        return torch.sparse.sampled_addmm(zero, a.contiguous(), b.contiguous().mT).values()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        pattern = ctx.pattern
        da = _Spmm.apply(pattern, g, b) if ctx.needs_input_grad[1] else None
        db = _Spmm.apply(pattern.transposed, g.index_select(0, pattern.order), a) if ctx.needs_input_grad[2] else None
        return None, da, db


class _Spmm(torch.autograd.Function):
    """Per row, the sum of its edges' values times the rows of `x` they read."""

    @staticmethod
    def forward(ctx: Any, pattern: _Pattern, values: Tensor, x: Tensor) -> Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(values, x)
        return sparse_product(pattern.crow, pattern.col, values, pattern.shape, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, Tensor | None, Tensor | None]:
        values, x = ctx.saved_tensors
        pattern = ctx.pattern
        dvalues = _Sddmm.apply(pattern, g, x) if ctx.needs_input_grad[1] else None
        dx = None
        if ctx.needs_input_grad[2]:
            dx = _Spmm.apply(pattern.transposed, values.index_select(0, pattern.order), g)
        return None, dvalues, dx


class _Softmax(torch.autograd.Function):
    """Softmax of `(E,)` scores within each row, and its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, pattern: _Pattern, s: Tensor) -> tuple[Tensor, Tensor]:
        ctx.pattern = pattern
        peak = torch.segment_reduce(s, "max", offsets=pattern.crow, initial=float("-inf"))
        peak = torch.where(torch.isinf(peak), 0.0, peak)
        e = torch.exp(s - _to_edges(pattern, peak))
        total = _row_sum(pattern, e)
        empty = pattern.crow.diff() == 0
        safe = torch.where(empty, 1.0, total)
        p = e / _to_edges(pattern, safe)
        lse = torch.where(empty, float("-inf"), torch.log(safe) + peak)
        ctx.save_for_backward(p)
        return p, lse

    @staticmethod
    def backward(ctx: Any, dp: Tensor, dlse: Tensor) -> tuple[None, Tensor]:
        (p,) = ctx.saved_tensors
        pull = p * dp
        return None, pull + p * _to_edges(ctx.pattern, dlse - _row_sum(ctx.pattern, pull))


def _kept(call: Call, pattern: _Pattern, b: int, h: int) -> Tensor:
    if call.seed is None:
        return torch.rand(pattern.col.numel(), device=pattern.col.device) >= call.dropout
    target = _to_edges(pattern, torch.arange(call.graph.t, device=pattern.col.device))
    at = torch.tensor([b, h], device=pattern.col.device)
    return keep_edges(call.seed, call.dropout, at[0], at[1], target, pattern.col)
