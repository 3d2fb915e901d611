"""Every pair scored, the mask applied, one softmax: fast for small or nearly full graphs, T_q x T_kv numbers otherwise.

Differentiable to any order.  A NaN or inf in a source is multiplied by 0 even where no target reads it, so it spreads
(`auto` looks for that first).  One in the upstream gradient of a target likewise reaches the values of every source.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import gpu
from .call import Call
from .numerics import dense_mask, keep_edges, position_bias, scatter_edges


def why_not(call: Call) -> str | None:
    """Can do everything."""
    return None


def memory(call: Call) -> int:
    """Bytes of the largest intermediate results."""
    cells = call.batch * call.heads * call.graph.t * call.graph.s
    width = call.q.shape[-1] if call.score.name == "gatv2" else 1
    return cells * width * (8 if call.wide == torch.float64 else 4) * (6 if call.needs_grad else 3)


def cost(call: Call) -> float:
    """Two products over all pairs, and passes over the scores, slower once these are out of the caches."""
    if call.q.device.type == "cuda":
        return _cuda_cost(call)
    graph, threads = call.graph, torch.get_num_threads()
    cells = call.batch * call.heads * graph.t * graph.s
    width = call.q.shape[-1] + call.v.shape[-1]
    passes = 3.0 if call.needs_grad else 1.0
    if call.score.name == "gatv2":
        return 45e-6 * passes + passes * cells * width * 4e-9 / threads
    each = 2 * width / 95e9 + (1.5e-9 if graph.is_full() else 4e-9)
    if cells * (8 if call.wide == torch.float64 else 4) > 2**25:
        each += 8e-9
    if call.bias is not None or call.position is not None or call.softcap is not None or call.dropout:
        each += 2e-9
    return 45e-6 * passes + passes * cells * each / threads


def _cuda_cost(call: Call) -> float:
    """Products at torch's own rate, and passes over all scores, those of GATv2 over a vector for each."""
    cells = float(call.batch * call.heads * call.graph.t * call.graph.s)
    options = sum(x is not None for x in (call.bias, call.position, call.softcap, call.edge_key, call.edge_value))
    options += call.dropout > 0
    wide = call.q.shape[-1] if call.score.name == "gatv2" else 0
    work = gpu.fused(call, cells, gpu.plain_peak(call), 0.7, 0.7)
    passes = gpu.passes(cells, 9 + 3 * options + 4 * wide, 10 + 3 * options + 8 * wide, call)
    return gpu.launches(call, 15 + 3 * options, 15 + 4 * options) + work + passes


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """`(out, lse)` through the whole score matrix."""
    if call.graph.num_edges == 0:
        return call.zeros()
    wide, graph = call.wide, call.graph
    k, v = (x.to(wide) for x in call.expanded_kv())
    allowed = dense_mask(graph)  # (Bg, Hg, T_q, T_kv)
    s = _scores(call, call.q.to(wide), k)
    if not graph.is_full():
        s = s.masked_fill(~allowed, float("-inf"))
    with torch.no_grad():
        peak = s.amax(-1, keepdim=True)
        peak = torch.where(torch.isinf(peak), 0.0, peak)
    e = torch.exp(s - peak)
    total = e.sum(-1, keepdim=True)
    empty = (graph.indptr.diff() == 0).view(*call.lead, graph.t, 1)
    safe = torch.where(empty, 1.0, total)
    p = e / safe
    lse = torch.where(empty, float("-inf"), torch.log(safe) + peak).squeeze(-1)
    if call.dropout:
        p = F.dropout(p, call.dropout) if call.seed is None else p * _kept(call) / (1 - call.dropout)
    out = p @ v
    if call.edge_value is not None:
        out = out + _edge_values(call, p)
    return out.to(call.q.dtype), lse.expand(call.batch, call.heads, graph.t)


def _scores(call: Call, q: Tensor, k: Tensor) -> Tensor:
    match call.score.name:
        case "dot":
            s = q @ k.mT
            if call.edge_key is not None:
                s = s + scatter_edges(call.graph, _edge_dots(call, q))
        case "additive":
            s = q + k.mT
            if call.edge_key is not None:
                s = s + scatter_edges(call.graph, call.edge_key.to(q.dtype).permute(2, 1, 0))
            s = F.leaky_relu(s, call.score.slope)
        case "gatv2":
            pair = q.unsqueeze(-2) + k.unsqueeze(-3)  # (B, H, T_q, T_kv, D)
            if call.edge_key is not None:
                extra = call.edge_key.to(q.dtype).permute(2, 1, 0).unsqueeze(1)  # (D, 1, nh, E)
                pair = pair + torch.stack([scatter_edges(call.graph, x) for x in extra], -1)
            s = (F.leaky_relu(pair, call.score.slope) * call.score.vector.to(q.dtype)[:, None, None]).sum(-1)
        case name:
            raise AssertionError(f"unknown score {name}")
    s = s * call.scale
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if call.bias is not None:
        s = s + scatter_edges(call.graph, call.bias.to(q.dtype))
    if call.position is not None:
        s = s + position_bias(call.position, call.graph.t, call.graph.s, s.dtype)
    return s


def _edge_cells(call: Call) -> Tensor:
    """(E,) position of each edge among the graph's rows * T_kv cells."""
    row, source = call.graph.edges()
    return row * call.graph.s + source


def _by_row(call: Call, x: Tensor) -> Tensor:
    """(B, H, T_q, W) to (b, h, rows, W): axes the graph owns go into the rows."""
    bg, hg = call.lead
    b, h = (1 if bg > 1 else call.batch), (1 if hg > 1 else call.heads)
    x = x.reshape(bg, b, hg, h, *x.shape[2:]).permute(1, 3, 0, 2, 4, 5)
    return x.reshape(b, h, bg * hg * call.graph.t, x.shape[-1])


def _edge_dots(call: Call, q: Tensor) -> Tensor:
    """(b, h, E) product of each edge's key with its target's query."""
    assert call.edge_key is not None
    query = _by_row(call, q).index_select(2, call.graph.edges()[0])
    return (query * call.edge_key.to(q.dtype).transpose(0, 1)).sum(-1)


def _edge_values(call: Call, p: Tensor) -> Tensor:
    """(B, H, T_q, D_v): what edges add to the values, weighted."""
    assert call.edge_value is not None
    graph, (bg, hg) = call.graph, call.lead
    weight = _by_row(call, p).flatten(2).index_select(2, _edge_cells(call))  # (b, h, E)
    message = weight.unsqueeze(-1) * call.edge_value.to(p.dtype).transpose(0, 1)
    b, h, _, dv = message.shape
    out = message.new_zeros(b, h, graph.rows, dv).index_add(2, graph.edges()[0], message)
    return out.view(b, h, bg, hg, graph.t, dv).permute(2, 0, 3, 1, 4, 5).reshape(call.batch, call.heads, graph.t, dv)


def _kept(call: Call) -> Tensor:
    assert call.seed is not None

    def axis(n: int, dim: int) -> Tensor:
        return torch.arange(n, device=call.q.device).view([-1 if i == dim else 1 for i in range(4)])

    graph = call.graph
    return keep_edges(
        call.seed, call.dropout, axis(call.batch, 0), axis(call.heads, 1), axis(graph.t, 2), axis(graph.s, 3)
    )
