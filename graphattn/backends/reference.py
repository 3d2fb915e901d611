"""The definition of attention over a graph: one softmax per target, in float64, one target at a time.

Never fast and never optimised: every other backend is compared with this one.  It shares no code with them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .call import Call


def why_not(call: Call) -> str | None:
    """Can do everything."""
    return None


def cost(call: Call) -> float:
    """Never chosen by `auto`."""
    return math.inf


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """`(out, lse)` by the formula, each target by itself, differentiable to any order."""
    q, k, v = call.q.double(), call.k.double(), call.v.double()
    graph, (bg, hg) = call.graph, call.lead
    batch, heads, t, _ = q.shape
    group = heads // k.shape[1] if k.shape[1] else 1
    indptr, start, stop = graph.indptr.tolist(), graph.start.tolist(), graph.stop.tolist()
    first_edge = 0
    edge_at = {}
    for row in range(graph.rows):
        edge_at[row] = first_edge
        first_edge += sum(stop[r] - start[r] for r in range(indptr[row], indptr[row + 1]))
    outs, lses = [], []
    for b in range(batch):
        for h in range(heads):
            for i in range(t):
                row = ((b if bg > 1 else 0) * hg + (h if hg > 1 else 0)) * t + i
                sources = [j for r in range(indptr[row], indptr[row + 1]) for j in range(start[r], stop[r])]
                if not sources:
                    outs.append(q[b, h, i, :1].nan_to_num(0, 0, 0).sum() * 0 + q.new_zeros(v.shape[-1]))
                    lses.append(q.new_tensor(-math.inf))
                    continue
                edges = slice(edge_at[row], edge_at[row] + len(sources))
                score, value = (
                    _scores(call, b, h, i, q[b, h, i], k[b, h // group][sources], sources, edges),
                    v[b, h // group][sources],
                )
                if call.edge_value is not None:
                    value = value + call.edge_value.double()[edges, h if call.edge_value.shape[1] > 1 else 0]
                lse = torch.logsumexp(score, 0)
                p = torch.exp(score - lse)
                if call.dropout:
                    p = (
                        p
                        * torch.tensor(_kept(call, b, h, i, sources), dtype=p.dtype, device=p.device)
                        / (1 - call.dropout)
                    )
                outs.append(p @ value)
                lses.append(lse)
    if graph.num_edges == 0 or not outs:
        return call.zeros()
    out = torch.stack(outs).view(batch, heads, t, v.shape[-1]).to(call.q.dtype)
    return out, torch.stack(lses).view(batch, heads, t).to(call.wide)


def _scores(call: Call, b: int, h: int, i: int, query: Tensor, key: Tensor, sources: list[int], edges: slice) -> Tensor:
    """The scores of one target's edges: score, times scale, softcap, plus bias."""
    if call.edge_key is not None:
        key = key + call.edge_key.double()[edges, h if call.edge_key.shape[1] > 1 else 0]
    match call.score.name:
        case "dot":
            s = key @ query
        case "additive":
            s = torch.nn.functional.leaky_relu(query + key, call.score.slope).squeeze(-1)
        case "gatv2":
            s = torch.nn.functional.leaky_relu(query + key, call.score.slope) @ call.score.vector.double()[h]
        case name:
            raise AssertionError(f"the reference does not know the score {name}")
    s = call.scale * s
    if call.softcap is not None:
        s = call.softcap * torch.tanh(s / call.softcap)
    if call.bias is not None:
        nb, nh, _ = call.bias.shape
        s = s + call.bias.double()[b if nb > 1 else 0, h if nh > 1 else 0, edges]
    if call.position is not None:
        away = torch.tensor(sources, device=s.device) - (i + call.position.offset)
        if call.position.name == "alibi":
            s = s - call.position.slopes.double()[h] * away.abs()
        else:
            table = call.position.table.double()
            reach = table.shape[1] // 2
            s = s + table[h, away.clamp(-reach, reach) + reach]
    return s


def _kept(call: Call, b: int, h: int, i: int, sources: list[int]) -> list[bool]:
    if call.seed is None:
        return (torch.rand(len(sources)) >= call.dropout).tolist()
    seed = int(call.seed)
    return [_murmur3(seed, b, h, i, j) >= int(call.dropout * 2**32) for j in sources]


def _murmur3(seed: int, *words: int) -> int:
    """MurmurHash3_x86_32 of 32-bit words, the upper half of `seed` first, under its lower half."""
    mask = 0xFFFFFFFF
    h = seed & mask
    for w in (seed >> 32, *words):
        x = (w & mask) * 0xCC9E2D51 & mask
        x = (x << 15 | x >> 17) & mask
        h ^= x * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        h = (h * 5 + 0xE6546B64) & mask
    h ^= 4 * (len(words) + 1)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return h ^ h >> 16
