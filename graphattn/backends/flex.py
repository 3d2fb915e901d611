"""FlexAttention on block lists made from runs: fast on a GPU for graphs whose edges lie in tiles, slow to start.

The lists come from the graph's tiling, so no predicate is evaluated over T_q x T_kv (they still hold (T / 128)^2
numbers).  It always runs compiled: where it can't, it raises, for the uncompiled path would build the whole score
matrix unasked.  On a CPU it compiles with the machine's C++ compiler, and has neither a backward nor log-sum-exp.
Hidden pairs of a tile that holds some edges are multiplied by 0, so that a NaN in their value spreads.  Its gradient of
`bias` and of position tables adds atomically, so that on a GPU their last bits differ between runs.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..blocks import bounds, tile_bits, tiling
from ..graph import Graph
from ..scores import Alibi
from . import gpu
from .call import Call

BLOCK = 128
RUNS = 4  # up to so many runs per target the predicate compares bounds; above, it looks up bits
_COMPILER = "inductor"


def why_not(call: Call) -> str | None:
    """Products of queries and keys, without what belongs to the weights or to vectors of an edge."""
    if call.score.name != "dot":
        return f"it multiplies queries and keys, and the score is {call.score.name}"
    if call.edge_key is not None or call.edge_value is not None:
        return "it has no vectors per edge (edge_key, edge_value)"
    if call.dropout:
        return "it has no dropout"
    if call.q.dtype == torch.float64:
        return "it computes in float32 at most, and q is float64"
    if call.bias is not None and _bounds(call.graph) is None:
        return f"it numbers edges by runs for a bias per edge, and a target has more than {RUNS} of them"
    device = call.q.device.type
    if device == "cpu":
        if call.needs_grad:
            return "FlexAttention has no backward on a CPU"
        if call.want_lse:
            return "FlexAttention does not return the log-sum-exp on a CPU"
        if not _has_cxx():
            return "on a CPU it is compiled by a C++ compiler, and none was found (set CXX)"
    elif device == "cuda":
        if call.q.shape[-1] < 16 or call.v.shape[-1] < 16:
            return f"its kernels need widths of at least 16, and these are {call.q.shape[-1]} and {call.v.shape[-1]}"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "its kernels are compiled by triton, which is not installed"
    else:
        return f"it runs on CPU and CUDA, and q is on {device}"
    return None


def cost(call: Call) -> float:
    """On a GPU the pairs of tiles that hold an edge; on a CPU never by itself: the first call compiles for seconds."""
    if call.q.device.type != "cuda":
        return math.inf
    tiles = tiling(call.graph, BLOCK, BLOCK)
    cells = (tiles.some.num_edges + tiles.all.num_edges) * BLOCK * BLOCK
    cells *= (call.batch // max(call.lead[0], 1)) * (call.heads // max(call.lead[1], 1))
    # in float32 without the matrix units, unless torch was told that TF32 will do
    peak = gpu.HALF if gpu.is_half(call) else gpu.FLOAT32
    fixed = gpu.FLEX_CALL * (2 if call.needs_grad else 1)
    return fixed + gpu.fused(call, cells, peak, gpu.FLEX, gpu.FLEX_BACK)


def memory(call: Call) -> int:
    """Bytes of the block lists, by target and by source."""
    graph = call.graph
    return 16 * (graph.rows // max(graph.t, 1)) * -(-graph.t // BLOCK) * -(-graph.s // BLOCK)


def attend(call: Call) -> tuple[Tensor, Tensor | None]:
    """`(out, lse)`; lse is None where it was not asked for."""
    graph = call.graph
    if graph.num_edges == 0 or call.q.numel() == 0 or call.v.numel() == 0:
        return call.zeros()
    score_mod, kind = _score_mod(call)
    block_mask, mask_kind = graph.cached("flex_block_mask", lambda: block_mask_of(graph))
    if call.want_lse and not call.needs_grad:
        kind += ("lse",)
    run = _entry((*kind, mask_kind, call.q.device.type, _COMPILER))
    from torch._dynamo.exc import FailOnRecompileLimitHit  # loaded by torch.compile in any case, and slow to load

    try:
        out, lse = run(call.q, call.k, call.v, score_mod, block_mask, call.scale, call.want_lse)
    except FailOnRecompileLimitHit as error:
        raise RuntimeError(
            f"FlexAttention would recompile for {tuple(call.q.shape)} queries on {graph!r}, past torch's limit of "
            f"{torch._dynamo.config.recompile_limit} versions of one kind of call, and it does not run uncompiled: use "
            "fewer head counts, widths and dtypes, raise torch._dynamo.config.recompile_limit, or another backend"
        ) from error
    empty = graph.cached("flex_empty", lambda: _empty(graph))
    if empty is not None:
        out = out.masked_fill(empty.unsqueeze(-1), 0.0)
        lse = None if lse is None else lse.masked_fill(empty, -math.inf)
    return out, lse


def block_mask_of(graph: Graph, block: int = BLOCK) -> tuple[Any, str]:
    """A `BlockMask` of the graph, and which predicate it carries; lists by target and by source straight from runs."""
    from torch.nn.attention.flex_attention import BlockMask

    tiles = tiling(graph, block, block)
    mask_mod, kind = predicate(graph, block)
    lists = []
    for part in (tiles.some, tiles.all, tiles.some.T, tiles.all.T):
        lists += [*_list(part)]
    some, some_at, every, every_at, some_q, some_q_at, every_q, every_q_at = lists
    mask = BlockMask(
        (graph.t, graph.s), some, some_at, every, every_at, some_q, some_q_at, every_q, every_q_at,
        BLOCK_SIZE=(block, block), mask_mod=mask_mod,
    )  # fmt: skip
    return mask, kind


def _list(blocks: Graph) -> tuple[Tensor, Tensor]:
    """Per row of blocks, how many and which: int32 (B, H, rows) and (B, H, rows, columns), padded with 0."""
    lead = blocks.lead or (1, 1)
    row, col = blocks.edges()
    at = torch.zeros(blocks.rows, blocks.s, dtype=torch.int32, device=blocks.device)
    rank = torch.arange(row.numel(), device=blocks.device) - blocks.edge_ptr()[row]
    at[row, rank] = col.to(torch.int32)
    count = blocks.degree().to(torch.int32)
    return count.view(*lead, blocks.t), at.view(*lead, blocks.t, blocks.s)


def predicate(graph: Graph, block: int = BLOCK) -> tuple[Callable[..., Tensor], str]:
    """`mask_mod(b, h, q, kv)` for any graph, and its kind: bounds of few runs per target, or bits of odd tiles."""
    bg, hg = graph.lead or (1, 1)
    ends = _bounds(graph)
    if ends is not None:
        # (lead, T, K), so that no length enters the closure: one compiled kernel serves all of them
        start, stop = (x.view(bg * hg, graph.t, -1) for x in ends)
        return _in_bounds(start, stop, bg > 1, hg > 1, hg, start.shape[-1]), f"bounds{start.shape[-1]}"
    tiles = tiling(graph, block, block)
    which = torch.zeros(tiles.some.rows, tiles.some.s, dtype=torch.int32, device=graph.device)
    row, col = tiles.some.edges()
    which[row, col] = torch.arange(row.numel(), dtype=torch.int32, device=graph.device)
    bits = tile_bits(graph, tiles)
    if bits.numel() == 0:
        bits = bits.new_zeros(1, block, block // 32)
    return _in_bits(bits, which.view(bg * hg, tiles.some.t, tiles.some.s), bg > 1, hg > 1, hg, block), "bits"


def _bounds(graph: Graph) -> tuple[Tensor, Tensor] | None:
    return bounds(graph, RUNS)


def _in_bounds(
    start: Tensor, stop: Tensor, own_batch: bool, own_head: bool, heads: int, runs: int
) -> Callable[..., Tensor]:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        lead = (b * heads if own_batch else b * 0) + (h if own_head else 0)
        inside = (kv >= start[lead, q, 0]) & (kv < stop[lead, q, 0])
        for r in range(1, runs):
            inside = inside | ((kv >= start[lead, q, r]) & (kv < stop[lead, q, r]))
        return inside

    return mask_mod


def _in_bits(
    bits: Tensor, which: Tensor, own_batch: bool, own_head: bool, heads: int, block: int
) -> Callable[..., Tensor]:
    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        lead = (b * heads if own_batch else b * 0) + (h if own_head else 0)
        tile = which[lead, q // block, kv // block]
        word = bits[tile, q % block, kv % block // 32]
        return ((word >> (kv % 32)) & 1) == 1

    return mask_mod


def _score_mod(call: Call) -> tuple[Callable[..., Tensor] | None, tuple[str, ...]]:
    """Softcap, then the bias of the edge, then the bias of the distance: what changes a scaled score."""
    steps: list[Callable[..., Tensor]] = []
    kind: tuple[str, ...] = ()
    if call.softcap is not None:
        steps.append(_capped(call.softcap))
        kind += ("softcap",)
    if call.bias is not None:
        steps.append(_edge_bias(call))
        kind += ("bias",)
    if call.position is not None:
        position = call.position
        if isinstance(position, Alibi):
            steps.append(_alibi(_owned(position.slopes), position.offset))
        else:
            steps.append(_relative(_owned(position.table), position.offset))
        kind += (position.name,)
    if len(steps) < 2:
        return (steps[0] if steps else None), kind
    return _chain(tuple(steps)), kind


def _owned(x: Tensor) -> Tensor:
    """A captured tensor that is a view gets no gradient from the compiled function, silently; a copy does."""
    return x.to(torch.float32, copy=x.requires_grad)


def _chain(steps: tuple[Callable[..., Tensor], ...]) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        for step in steps:
            score = step(score, b, h, q, kv)
        return score

    return score_mod


def _capped(cap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    return score_mod


def _edge_bias(call: Call) -> Callable[..., Tensor]:
    ends = _bounds(call.graph)
    assert call.bias is not None and ends is not None
    bg, hg = call.lead
    bias = _owned(call.bias)
    own_batch, own_head, wide_batch, wide_head = bg > 1, hg > 1, bias.shape[0] > 1, bias.shape[1] > 1
    start, stop = (x.view(bg * hg, call.graph.t, -1) for x in ends)
    runs = start.shape[-1]
    first = call.graph.cached(("flex_first_edge", runs), lambda: _first_edges(call.graph, runs)).view(start.shape)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        lead = (b * hg if own_batch else b * 0) + (h if own_head else 0)
        edge = b.to(torch.int64) * 0
        for r in range(runs):
            inside = (kv >= start[lead, q, r]) & (kv < stop[lead, q, r])
            edge = torch.where(inside, first[lead, q, r] + kv - start[lead, q, r], edge)
        return score + bias[b if wide_batch else b * 0, h if wide_head else h * 0, edge]

    return score_mod


def _first_edges(graph: Graph, runs: int) -> Tensor:
    """(rows, K) number of the first edge of each of a row's runs."""
    out = torch.zeros(graph.rows, runs, dtype=torch.int64, device=graph.device)
    row = graph.run_row()
    out[row, torch.arange(graph.num_runs, device=graph.device) - graph.indptr[row]] = graph.run_edge()
    return out


def _alibi(slopes: Tensor, offset: int) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score - slopes[h] * (q + offset - kv).abs()

    return score_mod


def _relative(table: Tensor, offset: int) -> Callable[..., Tensor]:
    reach = table.shape[1] // 2

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return score + table[h, (kv - q - offset).clamp(-reach, reach) + reach]

    return score_mod


def _empty(graph: Graph) -> Tensor | None:
    """(B or 1, H or 1, T_q), True where a target reads nothing; None if all read something."""
    empty = graph.indptr.diff() == 0
    return empty.view(*(graph.lead or (1, 1)), graph.t) if bool(empty.any()) else None


_ENTRIES: dict[tuple[str, ...], Callable[..., Any]] = {}


def _entry(kind: tuple[str, ...]) -> Callable[..., Any]:
    """The compiled function for one kind of call.

    Compiled versions are counted per code object, so each kind gets its own: lengths make two or three versions (the
    first exact, then one for any length), and a kind that needs more than torch's limit of 8 raises, because the whole
    function must compile.
    """
    found = _ENTRIES.get(kind)
    if found is None:
        code = _flex.__code__.replace(co_name="flex_" + "_".join(kind))
        plain = FunctionType(code, _flex.__globals__, code.co_name)
        found = _ENTRIES[kind] = torch.compile(plain, fullgraph=True, backend=kind[-1])
    return found


def _flex(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    grouped = q.shape[1] != k.shape[1]
    if not want_lse:
        return flex_attention(q, k, v, score_mod, block_mask, scale, enable_gqa=grouped), None
    out, aux = flex_attention(
        q, k, v, score_mod, block_mask, scale, enable_gqa=grouped, return_aux=AuxRequest(lse=True)
    )
    return out, aux.lse


def _has_cxx() -> bool:
    from torch._inductor import config

    named = config.cpp.cxx if isinstance(config.cpp.cxx, list | tuple) else [config.cpp.cxx]
    return any(shutil.which(c) for c in (os.environ.get("CXX"), *named, "g++", "clang++") if c)
