"""One attention call, validated and normalised: what every backend receives."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..graph import Graph
from ..scores import Additive, Alibi, Dot, GATv2, Position, Relative, Score
from .numerics import wide_dtype

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DOT = Dot()


@dataclass(slots=True, eq=False)
class Call:
    """Everything one call needs; all tensors on one device, per-edge values in edge order.

    q (B, H, T_q, D), k (B, H_kv, T_kv, D), v (B, H_kv, T_kv, D_v), H a multiple of H_kv, any strides.
    bias (nb, nh, E) or None; edge_key (E, nh, D) or None; edge_value (E, nh, D_v) or None.
    `seed` is None, an int, or a 0-d int64 tensor.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    graph: Graph
    scale: float
    score: Any = _DOT  # Dot, Additive or GATv2; backends branch on its `name`
    bias: Tensor | None = None
    position: Any = None  # None, Alibi or Relative
    edge_key: Tensor | None = None
    edge_value: Tensor | None = None
    softcap: float | None = None
    dropout: float = 0.0
    seed: int | Tensor | None = None
    want_lse: bool = False
    needs_grad: bool = False

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[1]

    @property
    def wide(self) -> torch.dtype:
        """The dtype of all arithmetic and of lse."""
        return wide_dtype(self.q.dtype)

    @property
    def lead(self) -> tuple[int, int]:
        """The graph's own (batch, head) sizes, 1 where it has none."""
        return self.graph.lead or (1, 1)  # type: ignore[return-value]

    @property
    def edge_work(self) -> int:
        """Edges times the batch and head indices that share them."""
        bg, hg = self.lead
        return self.graph.num_edges * (self.batch // max(bg, 1)) * (self.heads // max(hg, 1))

    @property
    def plain(self) -> bool:
        """A scaled dot product with nothing added, capped or dropped."""
        return (
            self.score.name == "dot"
            and self.bias is None
            and self.position is None
            and self.edge_key is None
            and self.edge_value is None
            and self.softcap is None
            and self.dropout == 0.0
        )

    def expanded_kv(self) -> tuple[Tensor, Tensor]:
        """Keys and values with one head per query head."""
        groups = self.heads // self.kv_heads if self.kv_heads else 1
        if groups == 1:
            return self.k, self.v
        return self.k.repeat_interleave(groups, 1), self.v.repeat_interleave(groups, 1)

    def zeros(self, shape: tuple[int, ...] | None = None) -> tuple[Tensor, Tensor]:
        """The answer where nothing is read: out 0, lse -inf, tied to every input so that all gradients are 0."""
        lse = torch.full(self.q.shape[:3], -math.inf, dtype=self.wide, device=self.q.device)
        shape = (*self.q.shape[:3], self.v.shape[-1]) if shape is None else shape
        if not self.needs_grad:
            return self.q.new_zeros(shape), lse
        return _Nothing.apply(shape, self.q, self.k, self.v, *(x for x in learnt(self) if x is not None)), lse


class _Nothing(torch.autograd.Function):
    """Zeros that depend on nothing: gradients are 0 whatever the inputs hold, NaN included."""

    generate_vmap_rule = True

    @staticmethod
    def forward(shape: tuple[int, ...], *inputs: Tensor) -> Tensor:
        return inputs[0].new_zeros(shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.zeros_like(x) for x in ctx.saved_tensors)


def make_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    graph: Graph,
    *,
    scale: float | None = None,
    score: Score | None = None,
    bias: Tensor | Position | None = None,
    edge_key: Tensor | None = None,
    edge_value: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    want_lse: bool = False,
) -> Call:
    """Check every argument of `attend` and bring it to four axes."""
    if not isinstance(graph, Graph):
        raise TypeError(
            f"graph must be a Graph, got {type(graph).__name__}: build one with graphattn.causal(t), "
            "graphattn.from_edge_index(edge_index, n), "
            "graphattn.from_mask(mask) or another pattern or converter"
        )
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    dims = q.dim()
    if dims < 2:
        raise ValueError(f"q must be (..., T_q, D), got shape {tuple(q.shape)}")
    if k.dim() != dims or v.dim() != dims:
        raise ValueError(
            f"q, k and v need the same number of axes, got shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if torch.is_autocast_enabled(q.device.type):
        to = torch.get_autocast_dtype(q.device.type)
        q, k, v = (x.to(to) if x.dtype != torch.float64 and x.is_floating_point() else x for x in (q, k, v))
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise TypeError(
            f"q, k and v must share one dtype of float16, bfloat16, float32, float64; got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}: move them to one device")
    t, d = q.shape[-2:]
    s, dv = v.shape[-2:]
    if t != graph.t:
        raise ValueError(f"q has {t} rows, but the graph is {graph!r}: q needs {graph.t}")
    for name, x in (("k", k), ("v", v)):
        if x.shape[-2] != graph.s:
            raise ValueError(f"{name} has {x.shape[-2]} rows, but the graph is {graph!r}: {name} needs {graph.s}")
    if k.shape[-1] != d:
        raise ValueError(f"q has width {d} and k width {k.shape[-1]}: they must agree")
    if graph.lead and dims != 4:
        raise ValueError(f"{graph!r} has leading axes (batch, head), so q must be (B, H, T_q, D); got {tuple(q.shape)}")
    if dims > 4 and not (k.shape[:-3] == v.shape[:-3] == q.shape[:-3]):
        raise ValueError(
            f"with more than four axes the leading ones must agree, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if dims != 4:
        q, k, v = (_four(x) for x in (q, k, v))
    batch = q.shape[0]
    if k.shape[0] != batch or v.shape[0] != batch:
        if k.shape[0] not in (1, batch) or v.shape[0] not in (1, batch):
            raise ValueError(
                f"batch axes of q, k, v are {batch}, {k.shape[0]}, {v.shape[0]}: k's and v's must be q's, or 1"
            )
        k, v = k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)
    heads, kv_heads = q.shape[1], k.shape[1]
    if v.shape[1] != kv_heads or (heads != kv_heads and (kv_heads == 0 or heads % kv_heads)):
        raise ValueError(
            f"q, k, v have {heads}, {kv_heads}, {v.shape[1]} heads: k and v need the same number, one that divides q's"
        )
    if graph.lead:
        bg, hg = graph.lead
        if bg not in (1, batch) or hg not in (1, heads):
            raise ValueError(
                f"the graph is {graph!r}, but q has batch {batch} and {heads} heads: each leading axis must be 1 or equal"
            )
    if graph.device != q.device:
        graph = graph.to(q.device)
    call = Call(q, k, v, graph, d**-0.5 if scale is None and d else 1.0, want_lse=want_lse)
    if scale is not None:
        call.scale = _number(scale, "scale")
    if softcap is not None:
        call.softcap = _number(softcap, "softcap")
        if call.softcap <= 0:
            raise ValueError(f"softcap must be above 0, got {softcap}")
    if dropout:
        call.dropout = _number(dropout, "dropout")
        if not 0 <= call.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        call.seed = _seed(seed)
    if score is not None and score.__class__ is not Dot:
        call.score = _score(score, call)
        if scale is None:
            call.scale = 1.0
    if bias is not None:
        if isinstance(bias, Alibi | Relative):
            call.position = _position(bias, call)
        else:
            call.bias = _per_edge(bias, call)
    if edge_key is not None:
        call.edge_key = _edge_vectors(edge_key, d, "edge_key", call)
    if edge_value is not None:
        call.edge_value = _edge_vectors(edge_value, dv, "edge_value", call)
    if torch.is_grad_enabled():
        call.needs_grad = (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or any(x is not None and x.requires_grad for x in learnt(call))
        )
    return call


def learnt(call: Call) -> tuple[Tensor | None, ...]:
    """The tensors besides q, k, v that may need a gradient."""
    position = call.position
    return (
        call.bias,
        call.edge_key,
        call.edge_value,
        call.score.vector if isinstance(call.score, GATv2) else None,
        position.slopes if isinstance(position, Alibi) else position.table if isinstance(position, Relative) else None,
    )


def _four(x: Tensor) -> Tensor:
    if x.dim() == 2:
        return x[None, None]
    if x.dim() == 3:
        return x[None]
    return x.flatten(0, -4)


def _number(x: Any, name: str) -> float:
    if isinstance(x, str) or (isinstance(x, Tensor) and x.requires_grad):
        raise TypeError(f"{name} must be a plain number, got {x!r}: to learn it, multiply the queries instead")
    try:
        value = float(x)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, got {x!r}") from None
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    return value


def _seed(seed: int | Tensor | None) -> int | Tensor | None:
    if seed is None:
        return None
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.dim() != 0:
            raise TypeError(f"seed must be an int or a 0-d int64 tensor, got {seed.dtype} of shape {tuple(seed.shape)}")
        return seed
    try:
        seed = operator.index(seed)
    except TypeError:
        raise TypeError(f"seed must be an int or a 0-d int64 tensor, got {type(seed).__name__}") from None
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must fit in 64 bits, got {seed}")
    return seed - 2**64 if seed >= 2**63 else seed


def _score(score: Score, call: Call) -> Score:
    d = call.q.shape[-1]
    if isinstance(score, Additive):
        if d != 1:
            raise ValueError(f"the additive score adds one number per node, so q and k need width 1, got {d}")
        return score
    if isinstance(score, GATv2):
        vector = score.vector
        if vector.shape not in ((d,), (1, d), (call.heads, d)):
            raise ValueError(f"GATv2's vector must be ({call.heads}, {d}) or ({d},), got {tuple(vector.shape)}")
        _check_side(vector, "GATv2's vector", call)
        return replace(score, vector=vector.expand(call.heads, d))
    raise TypeError(f"score must be Dot(), Additive(slope) or GATv2(vector, slope), got {score!r}")


def _position(bias: Position, call: Call) -> Position:
    if isinstance(bias, Alibi):
        slopes = bias.slopes
        if slopes.shape not in ((), (1,), (call.heads,)):
            raise ValueError(f"alibi's slopes must be ({call.heads},) or (), got {tuple(slopes.shape)}")
        _check_side(slopes, "alibi's slopes", call)
        return replace(bias, slopes=slopes.expand(call.heads))
    table = bias.table
    if (
        table.dim() not in (1, 2)
        or table.shape[-1] % 2 == 0
        or table.dim() == 2
        and table.shape[0] not in (1, call.heads)
    ):
        raise ValueError(f"relative's table must be ({call.heads}, 2R + 1) or (2R + 1,), got {tuple(table.shape)}")
    _check_side(table, "relative's table", call)
    return replace(bias, table=table.expand(call.heads, table.shape[-1]))


def _check_side(x: Tensor, name: str, call: Call) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.device != call.q.device:
        raise ValueError(f"{name} is on {x.device}, q on {call.q.device}: move them to one device")


def _per_edge(x: Tensor, call: Call) -> Tensor:
    """To (nb, nh, E): axes the graph owns are inside E."""
    if not isinstance(x, Tensor):
        raise TypeError(f"bias must be a tensor per edge, alibi(...) or relative(...), got {type(x).__name__}")
    if x.dtype == torch.bool:
        raise TypeError("bias is added to scores, so it must be floating point; a bool mask is a graph: use from_mask")
    _check_side(x, "bias", call)
    bg, hg = call.lead
    axes = ([] if bg > 1 else [call.batch]) + ([] if hg > 1 else [call.heads])
    full = (*axes, call.graph.num_edges)
    fits = 1 <= x.dim() <= len(full) and all(
        n == m or (n == 1 and i < x.dim() - 1)
        for i, (n, m) in enumerate(zip(x.shape, full[len(full) - x.dim() :], strict=True))
    )
    if not fits:
        names = " or ".join(str(tuple(full[i:])) for i in range(len(full) - 1, -1, -1))
        raise ValueError(f"bias has shape {tuple(x.shape)}, but {call.graph!r} needs {names}, in edge order")
    x = x.reshape((1,) * (len(full) - x.dim()) + tuple(x.shape))
    if bg > 1:
        x = x.unsqueeze(0)
    return x.unsqueeze(1) if hg > 1 else x


def _edge_vectors(x: Tensor, width: int, name: str, call: Call) -> Tensor:
    """To (E, nh, width)."""
    _check_side(x, name, call)
    e, heads = call.graph.num_edges, 1 if call.lead[1] > 1 else call.heads
    if x.shape == (e, width):
        return x.unsqueeze(1)
    if x.shape in ((e, heads, width), (e, 1, width)):
        return x
    raise ValueError(
        f"{name} has shape {tuple(x.shape)}, but {call.graph!r} needs ({e}, {heads}, {width}) or ({e}, {width}), in edge order"
    )
