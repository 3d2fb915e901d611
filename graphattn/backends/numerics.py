"""What several backends need and must agree on to the bit: the dropout hash, and the merge of partial results."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..graph import Graph
from ..scores import Position

_MASK = 0xFFFFFFFF


def _mul(x: Tensor, c: int) -> Tensor:
    # the low 32 bits of a product are right even where the 64-bit product wraps
    return (x * c) & _MASK


def _rotl(x: Tensor, r: int) -> Tensor:
    return ((x << r) | (x >> (32 - r))) & _MASK


def hash32(seed: int | Tensor, *words: int | Tensor) -> Tensor:
    """MurmurHash3_x86_32 of (seed's high half, *words) under seed's low half, as int64 in [0, 2**32).

    Each word is taken modulo 2**32; tensors broadcast.  Austin Appleby's public-domain MurmurHash3 (2008), over
    little-endian 32-bit words, so any implementation of it reproduces the values.
    """
    seed = torch.as_tensor(seed, dtype=torch.int64)
    h = seed & _MASK
    for word in (seed >> 32, *words):
        k = torch.as_tensor(word, dtype=torch.int64) & _MASK
        k = _mul(_rotl(_mul(k, 0xCC9E2D51), 15), 0x1B873593)
        h = (_mul(_rotl(h ^ k, 13), 5) + 0xE6546B64) & _MASK
    h = h ^ (4 * (len(words) + 1))
    h = _mul(h ^ (h >> 16), 0x85EBCA6B)
    h = _mul(h ^ (h >> 13), 0xC2B2AE35)
    return h ^ (h >> 16)


def edge_hash(seed: int | Tensor, batch: Tensor, head: Tensor, target: Tensor, source: Tensor) -> Tensor:
    """The 32-bit number that decides whether an edge is dropped; arguments broadcast, result int64 in [0, 2**32)."""
    return hash32(seed, batch, head, target, source)


def drop_threshold(p: float) -> int:
    """An edge is dropped iff its hash is below this."""
    return int(p * 2**32)


def keep_edges(seed: int | Tensor, p: float, batch: Tensor, head: Tensor, target: Tensor, source: Tensor) -> Tensor:
    """Bool, True where the edge survives seeded dropout of probability p."""
    return edge_hash(seed, batch, head, target, source) >= drop_threshold(p)


def merge_parts(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over a union of disjoint edge sets from each set's `(out, lse)`; differentiable in all of them.

    out = sum_p out_p exp(lse_p - lse), lse = log sum_p exp(lse_p); a target empty in every part stays exactly 0, -inf.
    """
    stacked = torch.stack(lses)
    peak = stacked.detach().amax(0)
    # a row empty everywhere: subtract 0 rather than -inf, so that nothing is NaN forward or backward
    peak = torch.where(peak == float("-inf"), 0.0, peak)
    share = torch.exp(stacked - peak)
    total = share.sum(0)
    empty = total == 0
    lse = torch.where(empty, float("-inf"), torch.log(torch.where(empty, 1.0, total)) + peak)
    share = share / torch.where(empty, 1.0, total)
    wide = share.dtype
    out = sum(o.to(wide) * w.unsqueeze(-1) for o, w in zip(outs, share, strict=True))
    return out.to(outs[0].dtype), lse  # type: ignore[union-attr]


_WARNED = False


def csr_tensor(crow: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int]) -> Tensor:
    """A sparse CSR tensor of trusted parts, without torch's warning, once per process, that the format is in beta."""
    global _WARNED
    if not _WARNED:
        _WARNED = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return csr_tensor(crow, col, values, shape)
    return torch.sparse_csr_tensor(crow, col, values, shape, check_invariants=False)


def sparse_product(crow: Tensor, col: Tensor, values: Tensor, shape: tuple[int, int], x: Tensor) -> Tensor:
    """`(T, D)`: per row of a CSR matrix of trusted parts, the sum of its values times the rows of `x` (S, D) they name."""
    if values.numel() == 0:
        return x.new_zeros(shape[0], x.shape[1])
    if x.dtype == torch.float32 and x.device.type == "cpu":
        # a bag of embeddings is the same sum; FBGEMM's kernel prefetches its rows and is 4 times as fast as MKL's at D = 64
        return torch.nn.functional.embedding_bag(
            col, x.contiguous(), crow, mode="sum", per_sample_weights=values.contiguous(), include_last_offset=True
        )
    return torch.sparse.mm(csr_tensor(crow, col, values.contiguous(), shape), x.contiguous())


def transformed() -> bool:
    """Inside torch.func or vmap, where tensors are wrapped and have no plain storage or value."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype arithmetic is done in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dense_mask(graph: Graph) -> Tensor:
    """Bool (Bg, Hg, T_q, T_kv), kept on the graph when small."""

    def make() -> Tensor:
        return graph.dense().view(*(graph.lead or (1, 1)), graph.t, graph.s)

    return graph.cached("dense_mask", make) if graph.rows * graph.s <= 2**26 else make()


def scatter_edges(graph: Graph, x: Tensor) -> Tensor:
    """Per-edge values (nb, nh, E) to (nb or Bg, nh or Hg, T_q, T_kv), 0 where there is no edge; differentiable."""
    bg, hg = graph.lead or (1, 1)
    nb, nh, _ = x.shape
    row, source = graph.edges()
    out = x.new_zeros(nb * nh, graph.rows * graph.s).index_copy(1, row * graph.s + source, x.reshape(nb * nh, -1))
    out = out.view(nb, nh, bg, hg, graph.t, graph.s).permute(0, 2, 1, 3, 4, 5)
    return out.reshape(nb * bg, nh * hg, graph.t, graph.s)


def position_bias(position: Position, t: int, s: int, dtype: torch.dtype) -> Tensor:
    """(1, H, T_q, T_kv) bias as a function of i - j; differentiable."""
    values = position.slopes if position.name == "alibi" else position.table  # type: ignore[union-attr]
    device = values.device
    away = torch.arange(s, device=device) - torch.arange(t, device=device)[:, None] - position.offset
    if position.name == "alibi":
        return -(values.to(dtype)[:, None, None] * away.abs())[None]
    reach = values.shape[1] // 2
    at = away.clamp(-reach, reach) + reach
    return values.to(dtype).index_select(1, at.reshape(-1)).view(1, values.shape[0], t, s)
