"""PyTorch's fused attention: fastest on causal and full graphs, and with a mask on small dense ones.

It multiplies what the mask throws away, so a NaN or inf in a source spreads even where no target reads it
(`auto` looks for that first), and it gives neither log-sum-exp nor a second derivative.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..graph import Graph
from . import gpu
from .call import Call
from .numerics import dense_mask, position_bias, scatter_edges


def why_not(call: Call) -> str | None:
    """Plain scaled dot products with an additive mask."""
    if call.score.name != "dot":
        return f"it multiplies queries and keys, and the score is {call.score.name}"
    if call.edge_key is not None or call.edge_value is not None:
        return "it has no vectors per edge (edge_key, edge_value)"
    if call.softcap is not None:
        return "it has no softcap"
    if call.q.dtype != call.wide and not (call.bias is None and call.position is None):
        return f"it would round the bias to {call.q.dtype}"
    if call.want_lse:
        return "it does not return the log-sum-exp"
    if call.dropout and call.seed is not None:
        return "its dropout takes no seed"
    return None


def memory(call: Call) -> int:
    """Bytes of the mask or bias, 0 for causal and full graphs."""
    graph = call.graph
    if call.bias is None and call.position is None and (graph.is_full() or graph.is_causal()):
        return 0
    cells = graph.rows * graph.s
    if call.bias is not None or call.position is not None:
        return 16 * call.batch * call.heads * graph.t * graph.s
    # the fused kernel turns a bool mask into numbers, once per batch and head index the mask has
    return 5 * cells + (8 * call.batch * call.heads * graph.t * graph.s if call.dropout else 0)


def cost(call: Call) -> float:
    """Operations at the rate of a fused kernel, which skips hidden pairs of causal graphs only, by 512 columns."""
    if call.q.device.type == "cuda":
        return _cuda_cost(call)
    graph, threads = call.graph, torch.get_num_threads()
    rows = call.batch * call.heads * graph.t
    cells, each = rows * graph.s, 2 * (call.q.shape[-1] + call.v.shape[-1]) / 95e9
    # the gradient of one head of one sample runs on one core
    parallel = min(threads, call.batch * call.heads)
    work = 1 / threads + (2.5 / max(1, parallel) if call.needs_grad else 0.0)
    fixed = 32e-6 if call.needs_grad else 9e-6
    if call.bias is not None or call.position is not None or call.dropout:
        return 3 * fixed + work * cells * (each + 4e-9)
    if graph.is_full():
        return fixed + work * (cells * each + rows * 5e-8)
    if graph.is_causal():
        return fixed + work * (min(cells, rows * (graph.s / 2 + 256)) * each + rows * 5e-8)
    return 1.5 * fixed + work * (cells * (each + 0.7e-9) + rows * 5e-8)


def _cuda_cost(call: Call) -> float:
    """FlashAttention-2 on full and causal graphs in 16 bits; with a mask, or in float32, the kernels that are slower."""
    graph = call.graph
    rows = call.batch * call.heads * graph.t
    pairs = float(rows * graph.s)
    own = call.bias is not None or call.position is not None
    if call.q.dtype == torch.float64:  # no fused kernel: the whole score matrix
        work = gpu.fused(call, pairs, gpu.FLOAT64, 0.7, 0.7)
        return gpu.launches(call, 8, 12) + work + gpu.passes(pairs, 6, 8, call)
    # float32 products are three in TF32
    peak, efficient = (gpu.HALF, gpu.EFFICIENT) if gpu.is_half(call) else (gpu.TF32 / 3, gpu.EFFICIENT_FLOAT32)
    fixed = gpu.CALL * (3 if call.needs_grad else 1)
    if not own and (graph.is_full() or graph.is_causal()):
        if graph.is_causal():
            pairs = min(pairs, rows * (graph.s / 2 + 64))
        share = gpu.FLASH if gpu.is_half(call) and max(call.q.shape[-1], call.v.shape[-1]) <= 256 else efficient
        return fixed + gpu.fused(call, pairs, peak, share, share * gpu.BACK)
    # the mask becomes numbers, which every batch and head index reads
    read = pairs * call.q.element_size() * (2 if call.needs_grad else 1) / gpu.COPY
    made = gpu.passes(pairs, 4, 4, call) if own else gpu.passes(graph.rows * graph.s, 1, 0, call)
    work = gpu.fused(call, pairs, peak, efficient, efficient * gpu.BACK)
    return 2 * fixed + max(work, read) + made


def attend(call: Call) -> tuple[Tensor, None]:
    """`(out, None)`."""
    graph = call.graph
    if graph.num_edges == 0:
        return call.zeros()[0], None
    k, v = call.expanded_kv()
    q, scale = _upward(call)
    plain = call.bias is None and call.position is None
    if plain and graph.is_full():
        return F.scaled_dot_product_attention(q, k, v, dropout_p=call.dropout, scale=scale), None
    if plain and graph.is_causal():
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=call.dropout, is_causal=True, scale=scale)
        return out, None
    mask, empty = _mask(graph)
    if not plain:
        mask = _bias(call, mask)
    elif mask.dim() == 4 and mask.shape[1] not in (1, call.heads):
        mask = mask.expand(-1, call.heads, -1, -1)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=call.dropout, scale=scale)
    if call.bias is not None:
        out = out * _softmax_of_nothing(graph, call.bias).to(out.dtype)
    if empty is not None:
        out = out.masked_fill(empty, 0.0)
    return out, None


def _upward(call: Call) -> tuple[Tensor, float]:
    """Queries and a positive scale of the same scores.

    Fused kernels hide a pair, or take the maximum, before they scale: with 0 or less -inf becomes NaN or the largest.
    """
    if call.scale > 0:
        return call.q, call.scale
    return (call.q * 0, 1.0) if call.scale == 0 else (-call.q, -call.scale)


def _softmax_of_nothing(graph: Graph, bias: Tensor) -> Tensor:
    """`(b, h, T_q, 1)`: NaN for a target whose biases are all -inf, as the definition has it (torch says 0), else 1."""
    (nb, nh, _), (bg, hg) = bias.shape, graph.lead or (1, 1)
    readable = (~torch.isneginf(bias.detach())).to(torch.int32)
    count = readable.new_zeros(nb, nh, graph.rows).index_add_(2, graph.edges()[0], readable)
    nothing = (count == 0) & (graph.indptr.diff() > 0)
    nothing = nothing.view(nb, nh, bg, hg, graph.t).permute(0, 2, 1, 3, 4).reshape(nb * bg, nh * hg, graph.t, 1)
    return torch.where(nothing, float("nan"), 1.0)


def _mask(graph: Graph) -> tuple[Tensor, Tensor | None]:
    """Bool mask (Bg, Hg, T_q, T_kv) in which an empty row reads source 0, and which rows those are, (Bg, Hg, T_q, 1).

    What an all-False row gives differs between the kernels behind this function (zeros or NaN); a row that reads
    something is safe in all of them, and its output is set to 0 afterwards.
    """

    def make() -> tuple[Tensor, Tensor | None]:
        mask = dense_mask(graph)
        empty = (graph.indptr.diff() == 0).view(*(graph.lead or (1, 1)), graph.t, 1)
        if not bool(empty.any()):
            return mask, None
        mask = mask.clone()
        mask[..., :1] |= empty
        return mask, empty

    return graph.cached("sdpa_mask", make) if graph.rows * graph.s <= 2**26 else make()


def _bias(call: Call, mask: Tensor) -> Tensor:
    """Additive (B, H, T_q, T_kv) mask with the biases where there is an edge, -inf elsewhere; differentiable."""
    graph = call.graph
    total: Tensor | float = 0.0
    if call.bias is not None:
        total = scatter_edges(graph, call.bias.to(call.q.dtype))
    if call.position is not None:
        total = total + position_bias(call.position, graph.t, graph.s, call.q.dtype)
    assert isinstance(total, Tensor)
    return torch.where(mask, total, float("-inf")).expand(call.batch, call.heads, graph.t, graph.s)
