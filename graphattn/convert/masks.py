"""Dense masks: bool, additive, over keys alone, and Hugging Face's."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from ..graph import Graph, check_shape, plainly
from .door import BLOCK, _edge, _from_rows, _refuse_dense, _tensor, _zero_one


@plainly
def from_mask(mask: Any) -> Graph:
    """A bool mask, `mask[i, j]` True = target i reads source j: `(T_q, T_kv)` or `(B, H, T_q, T_kv)`.

    The meaning of a bool `attn_mask` in `scaled_dot_product_attention`; the opposite of `nn.MultiheadAttention`, whose
    True means blocked: pass `~mask`.

    Args:
        mask: tensor, array or nested list of bools; size 1 on a leading axis broadcasts.

    Raises:
        TypeError: not bool (0/1 in floats would be *added* by SDPA: `mask.bool()` or `from_additive` say which).
        ValueError: 1, 3 or more than 4 axes; a 3-D mask fits a batch and heads alike.
    """
    mask = _tensor(mask)
    if mask.dtype != torch.bool and mask.numel():
        raise TypeError(
            f"a mask must be bool, got {mask.dtype}: use mask.bool() if nonzero means keep, from_additive(mask) if it "
            "holds 0 and -inf, ~mask.bool() if nonzero means blocked"
        )
    return _from_rows(mask.bool(), _mask_shape(mask))


def to_mask(graph: Graph) -> Tensor:
    """Bool of `graph.shape`, True = target i reads source j.

    Raises:
        ValueError: more than 2**32 cells (4 GiB); the figure is named.
    """
    _refuse_dense(graph, 1)
    s, rows = graph.s, graph.rows
    if rows * s <= BLOCK:
        return graph.dense()
    out = torch.empty(rows, s, dtype=torch.bool, device=graph.device)
    step = max(1, BLOCK // s)
    for low in range(0, rows, step):
        pick = torch.arange(low, min(rows, low + step), device=graph.device)
        out[low : low + step] = graph._gather_rows(pick, (pick.numel(), s)).dense()
    return out.view(graph.shape)


@plainly
def from_additive(mask: Any) -> Graph:
    """A float mask that is added to scores: 0 = target i reads source j, -inf = it does not.

    Raises:
        TypeError: not floating point.
        ValueError: another value, named with its place: a bias belongs in `attend(bias=...)`, and -1e9 or the least
            float are not -inf (`from_hf` takes them where a library promises them).
    """
    mask = _tensor(mask)
    if not mask.dtype.is_floating_point:
        raise TypeError(f"an additive mask must be floating point, got {mask.dtype}: from_mask takes bool")
    shape = _mask_shape(mask)
    keep = mask == 0
    wrong = ~(keep | (mask == -torch.inf))
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"additive mask holds {float(mask[at])} at {list(at)}: only 0 (edge) and -inf (no edge) say a graph"
        )
    return _from_rows(keep, shape)


def to_additive(graph: Graph, dtype: torch.dtype = torch.float32) -> Tensor:
    """Float of `graph.shape`: 0 where target i reads source j, -inf elsewhere.

    Raises:
        ValueError: more than 2**32 bytes.
    """
    if not dtype.is_floating_point:
        raise TypeError(f"an additive mask must be floating point, got {dtype}")
    _refuse_dense(graph, dtype.itemsize)
    out = torch.zeros(graph.shape, dtype=dtype, device=graph.device)
    return out.masked_fill_(~to_mask(graph), -torch.inf)


def _mask_shape(mask: Tensor) -> tuple[int, ...]:
    if mask.dim() == 3:
        raise ValueError(
            f"a 3-D mask of shape {tuple(mask.shape)} fits a batch and heads alike: use mask[:, None] "
            "(one per sample) or mask[None] (one per head)"
        )
    if mask.dim() not in (2, 4):
        raise ValueError(f"a mask must be (T_q, T_kv) or (B, H, T_q, T_kv), got shape {tuple(mask.shape)}")
    return tuple(mask.shape)


@plainly
def from_key_padding(mask: Any, true_means: Literal["keep", "drop"], t: int | None = None) -> Graph:
    """A mask over sources alone: `(B, T_kv)` gives a `(B, 1, t, T_kv)` graph, `(T_kv,)` a plain one.

    `true_means="keep"` is Hugging Face's `attention_mask`, "drop" is torch's `key_padding_mask`.

    Args:
        mask: bool, or integers that are 0 or 1.
        true_means: what True (1) says about a source; there is no default, since libraries disagree.
        t: number of targets, all reading alike; T_kv if not given.

    Raises:
        TypeError: floats.  ValueError: integers other than 0 and 1, another `true_means`, or more than two axes.
    """
    if true_means not in ("keep", "drop"):
        raise ValueError(f'true_means must be "keep" or "drop", got {true_means!r}')
    mask = _tensor(mask)
    if mask.dim() not in (1, 2):
        raise ValueError(f"a key padding mask must be (T_kv,) or (B, T_kv), got shape {tuple(mask.shape)}")
    keep = _zero_one(mask, "key padding mask")
    if true_means == "drop":
        keep = ~keep
    s = keep.shape[-1]
    t = s if t is None else t
    one = _from_rows(keep, tuple(keep.shape) if keep.dim() == 2 else (1, s))
    rows = torch.arange(one.rows, device=keep.device).repeat_interleave(t)
    return one._gather_rows(rows, check_shape((one.rows, 1, t, s) if keep.dim() == 2 else (t, s)))


def to_key_padding(graph: Graph, true_means: Literal["keep", "drop"]) -> Tensor:
    """Bool `(B, T_kv)` of a `(B, 1, T_q, T_kv)` graph, `(T_kv,)` of a plain one: the sources that all targets read.

    Raises:
        ValueError: some target of a sample reads otherwise than its first, or heads differ; the edge is named.
    """
    if true_means not in ("keep", "drop"):
        raise ValueError(f'true_means must be "keep" or "drop", got {true_means!r}')
    if graph.lead and graph.lead[1] != 1:
        raise ValueError(f"a key padding mask has no heads, but the graph is {graph!r}: use graph.select(head=0)")
    if graph.t == 0:
        raise ValueError(f"{graph!r} has no targets: a key padding mask would not be told from any other")
    n = graph.rows // graph.t
    first = graph._gather_rows(torch.arange(n, device=graph.device) * graph.t, (n, 1, 1, graph.s))
    alike = first._gather_rows(
        torch.arange(n, device=graph.device).repeat_interleave(graph.t), (n, 1, graph.t, graph.s)
    )
    own = graph if graph.lead else graph.expand(1, 1)
    odd = own ^ alike
    if odd.num_edges:
        raise ValueError(f"targets of {graph!r} read different sources: {_edge(odd)} is in one of two rows only")
    keep = to_mask(first).view(n, graph.s)
    keep = keep if true_means == "keep" else ~keep
    return keep if graph.lead else keep[0]


@plainly
def from_hf(mask: Any, t: int | None = None) -> Graph:
    """A Hugging Face attention mask, 2-D over tokens or 4-D over pairs.

    2-D `(B, T_kv)`, integers or bool: 1 = keep, as a tokenizer returns it; gives `(B, 1, t, T_kv)`.  It says padding
    only: combine it with `causal(t)` as the model would.
    4-D `(B, H or 1, T_q, T_kv)`: bool, True = target i reads source j; or floats that are added to scores, where 0
    keeps and -inf or the dtype's least number drops.

    Raises:
        TypeError, ValueError: other types, axes or values; the value is named with its place.
    """
    mask = _tensor(mask)
    if mask.dim() == 2:
        return from_key_padding(mask, "keep", t)
    if mask.dim() != 4:
        raise ValueError(f"a Hugging Face mask is (B, T_kv) or (B, H, T_q, T_kv), got shape {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return from_mask(mask)
    if not mask.dtype.is_floating_point:
        raise TypeError(f"a 4-D Hugging Face mask is bool or floating point, got {mask.dtype}: integers mean either")
    least = torch.finfo(mask.dtype).min
    return from_additive(mask.masked_fill(mask == least, -torch.inf))


def to_hf(graph: Graph, dtype: torch.dtype = torch.float32) -> Tensor:
    """The 4-D mask that Hugging Face models add to scores: `(B, H, T_q, T_kv)`, 0 = keep, `finfo(dtype).min` = drop.

    `dtype=torch.bool` gives the form newer models take, True = keep.  A row without sources comes out uniform in such
    a model, where attention here gives 0.

    Raises:
        ValueError: a graph without leading axes, which the format would return with them: use `graph.expand(1, 1)`.
    """
    if not graph.lead:
        raise ValueError(f"a Hugging Face mask has a batch and a head axis, {graph!r} has none: use graph.expand(1, 1)")
    if dtype == torch.bool:
        return to_mask(graph)
    out = to_additive(graph, dtype)
    return out.masked_fill_(out == -torch.inf, torch.finfo(dtype).min)
