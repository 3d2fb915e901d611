"""FlexAttention: predicates (`mask_mod`) and block masks, straight from runs and exact per element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..blocks import tiling
from ..graph import Graph, plainly, square_or_shape
from .door import BLOCK, _from_rows

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# up to this many runs per target are compared one by one; beyond, bits are looked up
_FEW = 4


@plainly
def from_predicate(mask_mod: MaskMod, shape: int | Sequence[int], *, device: torch.device | str = "cpu") -> Graph:
    """A FlexAttention `mask_mod(b, h, q_idx, kv_idx)`, True = target q_idx reads source kv_idx.

    Read in blocks of rows, so the cost is time T_q x T_kv but not memory.

    Args:
        mask_mod: as `create_block_mask` takes it: written for 0-d index tensors, without `if` or `.item()` on them.
        shape: `(T_q, T_kv)`, evaluated at b = h = 0; `(B, H, T_q, T_kv)`; or the number of nodes of a square graph.
        device: where the indices lie, and so the graph: that of the tensors the predicate looks up.

    Raises:
        ValueError: the predicate looks at the values of its indices, or returns something other than one bool.
    """
    shape = square_or_shape(shape)
    lead, t, s = (shape[:-2] or (1, 1)), shape[-2], shape[-1]
    step = max(1, BLOCK // max(s, 1))
    parts, lower = [torch.zeros(0, dtype=torch.int64, device=device)], 0
    source = torch.arange(s, device=device)
    for b in range(lead[0]):
        for h in range(lead[1]):
            for low in range(0, t, step):
                rows = torch.arange(low, min(t, low + step), device=device)
                keep = _evaluate(mask_mod, torch.tensor(b), torch.tensor(h), rows[:, None], source[None])
                block = _from_rows(keep, (rows.numel(), s))
                parts.append(block._points() + lower * (s + 1))
                lower += rows.numel()
    return Graph._from_points(torch.cat(parts), shape)


def _evaluate(mask_mod: MaskMod, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    """The predicate on index tensors that broadcast to (rows, columns), each element by itself."""
    device = kv.device
    b, h = b.to(device), h.to(device)
    try:
        if q.shape[1:] == (1,) and kv.shape[:1] == (1,) and b.dim() == 0:
            over_kv = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
            keep = torch.vmap(over_kv, in_dims=(None, None, 0, None))(b, h, q[:, 0], kv[0])
        else:
            flat = [x.expand(kv.shape).reshape(-1) for x in (b, h, q, kv)]
            keep = torch.vmap(mask_mod)(*flat).view(kv.shape)
    except RuntimeError as error:
        raise ValueError(
            f"the predicate could not be evaluated without looking at its indices one by one ({error}): use tensor "
            "operations and lookups, such as offsets[b], instead of .item() or if"
        ) from error
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        got = keep.dtype if isinstance(keep, Tensor) else type(keep).__name__
        raise ValueError(f"a predicate must return bool tensors, got {got}: True = target reads source")
    return keep


def to_predicate(graph: Graph) -> MaskMod:
    """A FlexAttention `mask_mod(b, h, q_idx, kv_idx)` for any graph: a callable that pickles and lies on its device.

    Up to four runs per target are compared directly.  Beyond, bits are looked up: a run is cut into aligned words of
    64 sources, whole words into words of 64 words, and so on, all in one table of two-choice (cuckoo) hashing, so that
    an element costs a few loads however many runs its row has, and the table O(runs).
    """
    most = int(graph.indptr.diff().max()) if graph.rows else 0
    if most <= _FEW:
        return _Runs(graph, most)
    return _Bits(graph)


class _Predicate:
    def __init__(self, graph: Graph) -> None:
        self.t, self.s, self.b, self.h = graph.t, graph.s, *(graph.lead or (1, 1))

    def row(self, b: Tensor, h: Tensor, q: Tensor) -> Tensor:
        """Row of the graph; a kernel may ask beyond the last target and masks the answer."""
        row = torch.clamp(q, 0, max(self.t - 1, 0))
        if self.h > 1:
            row = row + h * self.t
        if self.b > 1:
            row = row + b * (self.h * self.t)
        return row

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


class _Runs(_Predicate):
    """start[row] <= kv < stop[row], for each of a row's few runs."""

    def __init__(self, graph: Graph, most: int) -> None:
        super().__init__(graph)
        self.runs = []
        for k in range(most):
            start, stop = (torch.zeros(graph.rows, dtype=torch.int64, device=graph.device) for _ in range(2))
            has = graph.indptr.diff() > k
            at = graph.indptr[:-1][has] + k
            start[has], stop[has] = graph.start[at], graph.stop[at]
            self.runs.append((start, stop))

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = self.row(b, h, q_idx)
        keep = kv_idx < 0
        for start, stop in self.runs:
            keep = keep | ((start[row] <= kv_idx) & (kv_idx < stop[row]))
        return keep


class _Bits(_Predicate):
    """A run is bits of words: word kv // 64 at level 0, and at level n one bit for 64**n sources that are all read."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        row, start, stop = (x.cpu().numpy() for x in (graph.run_row(), graph.start, graph.stop))
        self.tables = []
        while row.size:
            inner, outer = -(-start // 64), np.maximum(stop // 64, -(-start // 64))
            pieces = [(row, start, np.minimum(stop, inner * 64)), (row, np.maximum(outer * 64, start), stop)]
            r, a, z = (np.concatenate(x) for x in zip(*pieces, strict=True))
            some = z > a
            r, a, z = r[some], a[some], z[some]
            bits = ((np.uint64(1) << (z - a).astype(np.uint64)) - np.uint64(1)) << (a % 64).astype(np.uint64)
            words, back = np.unique(np.stack([r, a // 64]), axis=1, return_inverse=True)
            value = np.zeros(words.shape[1], dtype=np.uint64)
            np.bitwise_or.at(value, back, bits)
            self.tables.append(
                tuple(torch.from_numpy(x).to(graph.device) for x in _cuckoo(words, value.view(np.int64)))
            )
            whole = outer > inner
            row, start, stop = row[whole], inner[whole], outer[whole]

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        row = self.row(b, h, q_idx).to(torch.int64)
        kv_idx = kv_idx.to(torch.int64)
        keep = kv_idx < 0
        for level, (rows, words, bits) in enumerate(self.tables):
            word, bit = kv_idx >> (6 * level + 6), (kv_idx >> (6 * level)) & 63
            for multiplier in _MULTIPLIERS:
                at = _slot(row, word, multiplier, rows.shape[0])
                keep = keep | ((rows[at] == row) & (words[at] == word) & (((bits[at] >> bit) & 1) == 1))
        return keep


# products stay below 2**63 for rows and words below 2**31, so that no compiler meets an overflow
_MULTIPLIERS = ((2654435761, 1640531527), (1540483477, 2246822519))


def _slot(row: Any, word: Any, multiplier: tuple[int, int], size: int) -> Any:
    """Where a word may lie: numpy or torch, `size` a power of two."""
    mixed = row * multiplier[0] + word * multiplier[1]
    mixed = mixed ^ (mixed >> 29)
    return (mixed ^ (mixed >> 13)) & (size - 1)


def _cuckoo(words: np.ndarray, bits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tables (rows, words, bits) in which each key lies in one of its two slots; a newcomer pushes the old one out."""
    n = words.shape[1]
    size = max(4, 1 << (4 * n - 1).bit_length()) if n else 4
    while True:
        choice = np.stack([_slot(words[0], words[1], m, size) for m in _MULTIPLIERS])
        held = np.full(size, -1)
        side = np.zeros(n, dtype=np.int64)
        wait = np.arange(n)
        for _ in range(200):
            if not wait.size:
                break
            at = choice[side[wait], wait]
            old = held[at]
            held[at] = wait  # of several newcomers the last stays
            lost = wait[held[at] != wait]
            out = np.unique(old[old >= 0])
            wait = np.concatenate([lost, out])
            side[wait] ^= 1
        if not wait.size:
            break
        size *= 2
    rows, cols, value = (np.full(size, fill, dtype=np.int64) for fill in (-1, -1, 0))
    full = held >= 0
    rows[full], cols[full], value[full] = words[0][held[full]], words[1][held[full]], bits[held[full]]
    return rows, cols, value


def to_block_mask(graph: Graph, block_size: int | tuple[int, int] = 128) -> BlockMask:
    """FlexAttention's `BlockMask`, its block lists made from runs: no `T_q x T_kv` predicate is evaluated.

    The same lists, full and partial, as `create_block_mask(to_predicate(graph), ...)`.  The format keeps four tables of
    (T_q / block) x (T_kv / block) numbers; a `(B, H)` graph one set for each.

    Args:
        block_size: rows and columns of a block, one number or two.

    Raises:
        ValueError: more than 2**28 blocks to tabulate.
    """
    from torch.nn.attention.flex_attention import BlockMask

    q, kv = (block_size, block_size) if isinstance(block_size, int) else block_size
    lead = graph.lead or (1, 1)
    n, m = -(-graph.t // q), -(-graph.s // kv)
    cells = lead[0] * lead[1] * n * m
    if cells > 2**28:
        raise ValueError(
            f"a BlockMask of {graph!r} has {cells:,} blocks ({cells * 16 / 2**30:.0f} GiB), over the limit of {2**28:,}"
        )
    tiles = tiling(graph, q, kv)
    some, full = (x.dense().view(*lead, n, m) for x in (tiles.some, tiles.all))
    # a block that reaches beyond the last target or source is partial here, whatever it holds: its mask is looked up
    for ragged, last in ((graph.t % q, (..., slice(n - 1, n), slice(None))), (graph.s % kv, (..., slice(m - 1, m)))):
        if ragged:
            some[last] |= full[last]
            full[last] = False
    lists = [*_ordered(some), *_ordered(full)]
    columns = [*_ordered(some.transpose(-2, -1)), *_ordered(full.transpose(-2, -1))]
    return BlockMask(
        seq_lengths=(graph.t, graph.s),
        kv_num_blocks=lists[0],
        kv_indices=lists[1],
        full_kv_num_blocks=lists[2],
        full_kv_indices=lists[3],
        q_num_blocks=columns[0],
        q_indices=columns[1],
        full_q_num_blocks=columns[2],
        full_q_indices=columns[3],
        BLOCK_SIZE=(q, kv),
        mask_mod=to_predicate(graph),
    )


def _ordered(block: Tensor) -> tuple[Tensor, Tensor]:
    """Per row the number of True blocks, and all columns with those first, each kind rising: a sort by counting."""
    block = block.contiguous()
    rank = torch.cumsum(block, -1, dtype=torch.int32)
    count = rank[..., -1:] if block.shape[-1] else rank.new_zeros(*block.shape[:-1], 1)
    column = torch.arange(block.shape[-1], dtype=torch.int32, device=block.device)
    place = torch.where(block, rank - 1, count + column - rank)
    order = torch.empty_like(place)
    order.scatter_(-1, place.to(torch.int64), column.expand_as(place))
    return count.squeeze(-1).contiguous(), order


@plainly
def from_block_mask(block_mask: BlockMask) -> Graph:
    """The exact graph of a `BlockMask`: full blocks whole, partial blocks by its predicate, element by element.

    `BlockMask.to_dense()` is per block and says less.  A size-1 batch and head axis without effect is kept: the graph
    has leading axes `(B, H)` if either is longer than 1, else none.

    Raises:
        TypeError: not a BlockMask.
        ValueError: a sliced mask, which has lost its predicate (slice the graph instead), or a predicate that cannot be
            evaluated.
    """
    if not hasattr(block_mask, "seq_lengths"):
        raise TypeError(
            f"block_mask must be FlexAttention's BlockMask, got {type(block_mask).__name__}: a mask of pairs is from_mask(mask)"
        )
    t, s = block_mask.seq_lengths
    q, kv = block_mask.BLOCK_SIZE
    kinds = [(block_mask.kv_num_blocks, block_mask.kv_indices, True)]
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        kinds.append((block_mask.full_kv_num_blocks, block_mask.full_kv_indices, False))
    if block_mask.kv_indices.dim() != 4:
        raise ValueError(f"a BlockMask has axes (B, H, rows, columns), got {block_mask.kv_indices.dim()} axes")
    lost = getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error"
    if lost and bool((block_mask.kv_num_blocks > 0).any()):
        raise ValueError(
            "this BlockMask was sliced and lost its predicate: slice the graph, graph[rows, cols], instead"
        )
    lead = tuple(block_mask.kv_indices.shape[:2])
    device = block_mask.kv_indices.device
    row_parts, start_parts, stop_parts = [], [], []
    rows_in, cols_in = torch.arange(q, device=device), torch.arange(kv, device=device)
    for count, index, partial in kinds:
        chosen = torch.arange(index.shape[-1], device=device) < count[..., None]
        b, h, i, k = chosen.nonzero().unbind(1)
        j = index[b, h, i, k].to(torch.int64)
        step = max(1, BLOCK // (q * kv) // 4)
        for at in range(0, b.numel(), step):
            here = slice(at, at + step)
            target = i[here, None] * q + rows_in  # (blocks, q)
            row = (b[here, None] * lead[1] + h[here, None]) * t + target
            real = target < t
            if not partial:
                begin = (j[here, None] * kv).expand_as(target)[real]
                row_parts.append(row[real])
                start_parts.append(begin)
                stop_parts.append((begin + kv).clamp(max=s))
                continue
            source = (j[here, None] * kv + cols_in)[:, None, :].expand(-1, q, -1)
            inside = real[:, :, None] & (source < s)
            # indices beyond the ends are clamped: the predicate may look them up in tables of the true size
            keep = _evaluate(
                block_mask.mask_mod,
                b[here, None, None],
                h[here, None, None],
                target.clamp(max=t - 1)[:, :, None],
                source.clamp(max=s - 1),
            )
            block = _from_rows((keep & inside).view(-1, kv), (target.numel(), kv))
            run = block.run_row()
            shift = (j[here, None] * kv).expand_as(target).reshape(-1)[run]
            row_parts.append(row.reshape(-1)[run])
            start_parts.append(block.start + shift)
            stop_parts.append(block.stop + shift)
    shape = (*lead, t, s) if lead != (1, 1) else (t, s)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return Graph._from_pieces(
        torch.cat([none, *row_parts]), torch.cat([none, *start_parts]), torch.cat([none, *stop_parts]), shape
    )
