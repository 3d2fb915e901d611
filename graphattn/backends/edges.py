"""Message passing in plain torch: gather, softmax per target, scatter-add.  Right on any device, fast on none.

Its memory is one vector per edge.  It never touches what a target does not read, and is differentiable to any order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from . import gpu
from .call import Call
from .numerics import keep_edges


def why_not(call: Call) -> str | None:
    """Can do everything."""
    return None


def memory(call: Call) -> int:
    """Bytes of the vectors per edge alive at once: keys, values and what is multiplied with them."""
    width = call.q.shape[-1] + call.v.shape[-1]
    size = 8 if call.wide == torch.float64 else 4
    return int(call.edge_work * width * size * (3.2 if call.needs_grad else 1.5))


def cost(call: Call) -> float:
    """Gathers and scatters one row of width D per edge, several times, mostly on one core."""
    if call.q.device.type == "cuda":
        return _cuda_cost(call)
    width = call.q.shape[-1] + call.v.shape[-1]
    passes = 3.5 if call.needs_grad else 1.0
    if call.edge_key is not None or call.score.name == "gatv2":
        passes *= 1.5
    return 75e-6 * passes + passes * call.edge_work * (12e-9 + width * 1.5e-9)


def _cuda_cost(call: Call) -> float:
    """A row per edge gathered, multiplied and added up by itself, each of them written and read again."""
    width = call.q.shape[-1] + call.v.shape[-1]
    more = 1.5 if call.edge_key is not None or call.score.name == "gatv2" else 1.0
    messages = gpu.passes(call.edge_work * width, 4 * more, 8 * more, call)
    numbers = gpu.passes(call.edge_work, 12, 12, call)
    return gpu.launches(call, 25, 30) + gpu.gathered(call, call.edge_work, width, 4) + messages + numbers


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """`(out, lse)` with one message per edge."""
    if call.graph.num_edges == 0 or call.q.numel() == 0 and call.v.shape[-1] == 0:
        return call.zeros()
    p, lse = _softmax(call)
    target = call.graph.edges()[0]
    value = _fold(call, call.expanded_kv()[1]).index_select(0, _source_node(call)).to(call.wide)  # (E, F, D_v)
    if call.edge_value is not None:
        value = value + _per_head(call, call.edge_value)
    if call.dropout:
        p = p * _kept(call) / (1 - call.dropout)
    out = value.new_zeros(call.graph.rows, *value.shape[1:]).index_add(0, target, p.unsqueeze(-1) * value)
    return _unfold(call, out).to(call.q.dtype), _unfold(call, lse.unsqueeze(-1)).squeeze(-1)


def weights(call: Call) -> Tensor:
    """`(nb, nh, E)` attention weights in edge order; nb and nh are 1 where the graph owns the axis. Never dropped."""
    b, h = _shared(call)
    if call.graph.num_edges == 0:
        return call.zeros((b, h, 0))[0]
    return _softmax(call)[0].T.reshape(b, h, call.graph.num_edges).to(call.q.dtype)


def scores(call: Call) -> Tensor:
    """`(nb, nh, E)` scores before the softmax, in the dtype of sums, as `weights` orders them."""
    b, h = _shared(call)
    if call.graph.num_edges == 0:
        return call.zeros((b, h, 0))[0].to(call.wide)
    return _scores(call).T.reshape(b, h, call.graph.num_edges)


def _softmax(call: Call) -> tuple[Tensor, Tensor]:
    """Weights `(E, F)` and log-sum-exp `(rows, F)`, F the batch and head indices that share the graph."""
    graph = call.graph
    target, _ = graph.edges()
    s = _scores(call)
    rows = (graph.rows, s.shape[1])
    with torch.no_grad():
        peak = s.new_full(rows, float("-inf")).scatter_reduce_(0, target.unsqueeze(1).expand_as(s), s, "amax")
        # scores of -inf alone (a bias of -inf on every edge), or +inf: subtract 0, the softmax then says NaN or 0
        peak = torch.where(torch.isinf(peak), 0.0, peak)
    e = torch.exp(s - peak.index_select(0, target))
    total = s.new_zeros(rows).index_add(0, target, e)
    empty = (graph.indptr.diff() == 0).unsqueeze(1)
    safe = torch.where(empty, 1.0, total)
    lse = torch.where(empty, float("-inf"), torch.log(safe) + peak)
    return e / safe.index_select(0, target), lse


def _scores(call: Call) -> Tensor:
    graph, wide = call.graph, call.wide
    target, source = graph.targets_sources()
    row = graph.edges()[0]
    query = _fold(call, call.q).index_select(0, row).to(wide)  # (E, F, D)
    key = _fold(call, call.expanded_kv()[0]).index_select(0, _source_node(call)).to(wide)
    if call.edge_key is not None:
        key = key + _per_head(call, call.edge_key)
    if call.score.name == "dot":
        s = (query * key).sum(-1)
    else:
        s = F.leaky_relu(query + key, call.score.slope)
        if call.score.name == "gatv2":
            s = (s * _per_row_head(call, call.score.vector.to(wide))).sum(-1)
        else:
            s = s.squeeze(-1)
    s = s * call.scale
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    b, h = _shared(call)
    if call.bias is not None:
        s = s + call.bias.to(wide).expand(b, h, -1).reshape(b * h, -1).T
    if call.position is not None:
        away = source - target - call.position.offset
        if call.position.name == "alibi":
            s = s - _per_row_head(call, call.position.slopes.to(wide)) * away.abs().unsqueeze(1)
        else:
            table = call.position.table.to(wide)  # (H, 2R + 1)
            reach = table.shape[1] // 2
            at = away.clamp(-reach, reach) + reach
            if call.lead[1] > 1:
                at = at + table.shape[1] * _head_of_row(call).index_select(0, row)
                s = s + table.reshape(-1).index_select(0, at).unsqueeze(1)
            else:
                s = s + table.index_select(1, at).T.unsqueeze(1).expand(-1, b, h).reshape(-1, b * h)
    return s


def _shared(call: Call) -> tuple[int, int]:
    """How many batch and head indices share one row of the graph."""
    bg, hg = call.lead
    return (1 if bg > 1 else call.batch), (1 if hg > 1 else call.heads)


def _fold(call: Call, x: Tensor) -> Tensor:
    """(B, H, T, D) to (nodes, F, D): axes the graph owns go into the nodes, the others beside the width."""
    bg, hg = call.lead
    b, h = _shared(call)
    x = x.reshape(bg, b, hg, h, *x.shape[2:])  # one of bg and b is 1, one of hg and h
    return x.permute(0, 2, 4, 1, 3, 5).reshape(bg * hg * x.shape[4], b * h, x.shape[5])


def _unfold(call: Call, x: Tensor) -> Tensor:
    bg, hg = call.lead
    b, h = _shared(call)
    x = x.reshape(bg, hg, call.graph.t, b, h, x.shape[-1]).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(bg * b, hg * h, call.graph.t, x.shape[-1])


def _source_node(call: Call) -> Tensor:
    """(E,) node number of each edge's source: sources of different leading indices are different nodes."""
    graph = call.graph
    row, source = graph.edges()
    if graph.rows == graph.t:
        return source
    return graph.cached("source_node", lambda: torch.div(row, graph.t, rounding_mode="floor") * graph.s + source)


def _head_of_row(call: Call) -> Tensor:
    graph = call.graph
    return torch.arange(graph.rows, device=graph.device) // max(graph.t, 1) % call.lead[1]


def _per_head(call: Call, x: Tensor) -> Tensor:
    """(E, nh, D) to (E, F, D)."""
    b, h = _shared(call)
    return x.to(call.wide).unsqueeze(1).expand(-1, b, h, -1).reshape(x.shape[0], b * h, x.shape[-1])


def _per_row_head(call: Call, x: Tensor) -> Tensor:
    """(H, ...) to (E, F, ...) or (1, F, ...): one entry per head of each edge's row."""
    b, h = _shared(call)
    if call.lead[1] > 1:
        return x.index_select(0, _head_of_row(call).index_select(0, call.graph.edges()[0])).unsqueeze(1)
    return x.expand(b, *x.shape).reshape(1, b * h, *x.shape[1:])


def _kept(call: Call) -> Tensor:
    """(E, F) bool: edges that dropout leaves."""
    graph = call.graph
    b, h = _shared(call)
    if call.seed is None:
        return torch.rand(graph.num_edges, b * h, device=graph.device, dtype=call.wide) >= call.dropout
    target, source = (x.unsqueeze(1) for x in graph.targets_sources())
    lead = torch.div(graph.edges()[0], graph.t, rounding_mode="floor").unsqueeze(1)
    shared = torch.arange(b * h, device=graph.device)
    batch = lead // call.lead[1] + shared // h
    head = lead % call.lead[1] + shared % h
    return keep_edges(call.seed, call.dropout, batch, head, target, source)
