"""Block sizes, buffers and launches; the gradient formulas are in the kernels."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...scores import Additive, Alibi, GATv2, Relative
from ..call import Call
from ..numerics import drop_threshold
from . import kernels, plan

OPTIONS = {"enable_fp_fusion": True}  # multiply and add in one instruction, which triton's default stops doing in 3.10
_SUM = 1024  # numbers added one after another when gradients are summed by key


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """The one place kernels start from, so that a test can compile what would run."""
    if all(grid):
        with torch.cuda.device_of(args[0]):  # triton starts on the current device, wherever the tensors are
            kernel[grid](*args, **meta, **OPTIONS)


@dataclass(slots=True, eq=False)
class _Spec:
    """Numbers and flags of a call that kernels take, and its graph."""

    call: Call
    own_b: bool
    own_h: bool
    group: int
    seed: Tensor | None
    threshold: int
    keep_scale: float
    offset: int = 0
    reach: int = 0
    pos: int = 0

    @property
    def nb(self) -> int:
        return 1 if self.own_b else self.call.batch

    @property
    def nh(self) -> int:
        return 1 if self.own_h else self.call.heads

    @property
    def cap(self) -> float:
        return self.call.softcap or 1.0

    @property
    def bends(self) -> bool:
        return self.call.softcap is not None

    @property
    def width(self) -> int:
        return 2 * self.reach + 1


def _spec(call: Call) -> _Spec:
    seed = None
    if call.dropout:
        device = call.q.device
        if call.seed is None:
            seed = torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=device)
        elif isinstance(call.seed, Tensor):
            seed = call.seed.to(device).reshape(1)
        else:
            seed = torch.full((1,), call.seed, dtype=torch.int64, device=device)
    spec = _Spec(
        call, call.lead[0] > 1, call.lead[1] > 1, call.heads // call.kv_heads, seed, drop_threshold(call.dropout),
        1.0 / (1.0 - call.dropout),
    )  # fmt: skip
    if call.position is not None:
        spec.offset = call.position.offset
        spec.pos = 1 if isinstance(call.position, Alibi) else 2
        if isinstance(call.position, Relative):
            spec.reach = call.position.table.shape[1] // 2
    return spec


def _values(call: Call) -> Tensor | None:
    """What the position bias reads: slopes (H,) or table (H, 2R + 1)."""
    match call.position:
        case Alibi(slopes=slopes):
            return slopes.contiguous()
        case Relative(table=table):
            return table.contiguous()
    return None


def _unit(x: Tensor) -> Tensor:
    """With numbers of one row side by side."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _pow2(n: int) -> int:
    return triton.next_power_of_2(max(n, 1))


# ---------------------------------------------------------------------- sparse graphs


def rows(call: Call) -> tuple[Tensor, Tensor]:
    """`(out, lse)` by the kernels that gather."""
    spec = _spec(call)
    score = call.score
    vector = score.vector if isinstance(score, GATv2) else None
    if isinstance(score, Additive):
        vector = call.q.new_ones(call.heads, 1, dtype=torch.float32)
    return _Rows.apply(
        spec, _unit(call.q), _unit(call.k), _unit(call.v), call.bias, call.edge_key, call.edge_value, vector,
        _values(call),
    )  # fmt: skip


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: _Spec, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor | None) -> tuple[Tensor, Tensor]:
        out, lse = _rows_forward(spec, q, k, v, *_plain(extra))
        ctx.spec = spec
        ctx.save_for_backward(q, k, v, out, lse, *extra)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *extra = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        needs = ctx.needs_input_grad[1:]
        return (None, *_rows_backward(ctx.spec, needs, q, k, v, out, lse, dout, dlse, *_plain(extra)))


def _plain(extra: Any) -> list[Tensor | None]:
    """Bias, edge key and value with unit stride, vector contiguous."""
    bias, edge_key, edge_value, vector, values = extra
    return [
        None if bias is None else _unit(bias),
        None if edge_key is None else _unit(edge_key),
        None if edge_value is None else _unit(edge_value),
        None if vector is None else vector.contiguous(),
        values,
    ]


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, head and node; 0 where one serves all."""
    b, h, t = (s if n > 1 else 0 for s, n in zip(x.stride()[:3], x.shape[:3], strict=True))
    return b, h, t


def _bias_strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else tuple(s if n > 1 else 0 for s, n in zip(x.stride()[:2], x.shape[:2], strict=True))  # type: ignore[return-value]


def _edge_strides(x: Tensor | None) -> tuple[int, int]:
    return (0, 0) if x is None else (x.stride(0), x.stride(1) if x.shape[1] > 1 else 0)


def _wide(*tensors: Tensor) -> bool:
    """Offsets of nodes need 64 bits."""
    return any(x.shape[2] * max(x.stride(2), 1) >= 2**31 for x in tensors)


def _heads_at_once(spec: _Spec, heads: int, *tensors: Tensor) -> int:
    """As many heads as lie together in a node's row, up to 512 numbers."""
    width = max(_pow2(x.shape[-1]) for x in tensors)
    together = all(x.shape[1] == 1 or x.stride(1) <= x.stride(2) for x in tensors) or width <= 16
    if spec.own_h or not together:
        return 1
    n = 1
    while heads % (2 * n) == 0 and 2 * n * width <= 512:
        n *= 2
    return n


def _block(cap: int, width: int, crowded: bool) -> tuple[int, int]:
    """Edges at a time, and warps, for rows of `width` numbers.

    A thread holds 8 numbers of each array of rows that is alive, 16 bytes where they have 16 bits.  Forward that is a
    key, a value and a sum, so that it may hold up to 32; in a crowded kernel, backward or with vectors per edge, more.
    """
    be = max(1, min(cap, (2048 if crowded else 4096) // width))
    return be, min(8 if crowded else 4, max(1, be * width // 256))


def _threads(call: Call, warps: int) -> dict[str, int]:
    """Warps of a kernel, and what a thread may have of registers where options or float32 want more of them.

    Left to itself the assembler spills a few so that one more block fits on a multiprocessor.
    """
    few = call.plain and call.q.dtype != torch.float32
    return {"num_warps": warps} if few else {"num_warps": warps, "maxnreg": 255}


def _rows_forward(spec: _Spec, q: Tensor, k: Tensor, v: Tensor, *extra: Tensor | None) -> tuple[Tensor, Tensor]:
    call = spec.call
    bias, edge_key, edge_value, vector, values = extra
    graph, (batch, heads, t, d), dv = call.graph, q.shape, v.shape[-1]
    form = plan.rows(graph)
    items, parts = form.items, form.items.parts
    out = _like_nodes(q, dv)
    lse = torch.empty(batch, heads, t, dtype=torch.float32, device=q.device)
    part_out = torch.empty(parts, spec.nb, spec.nh, dv, dtype=torch.float32, device=q.device) if parts else None
    part_lse = torch.empty(parts, spec.nb, spec.nh, dtype=torch.float32, device=q.device) if parts else None
    hb = _heads_at_once(spec, heads, k, v)
    bd, bdv = _pow2(d), _pow2(dv)
    for bucket in items.buckets:
        be, warps = _block(bucket.cap, hb * max(bd, bdv), crowded=edge_key is not None or edge_value is not None)
        part = slice(bucket.first, bucket.first + bucket.size)
        run = None if items.run is None else items.run[2 * part.start : 2 * part.stop]
        launch(
            kernels.rows_forward, (bucket.size, spec.nh // hb, spec.nb),
            q, k, v, out, lse, part_out, part_lse,
            items.row[part], items.begin[part], items.end[part], run,
            form.cols, form.run_start, form.run_stop, form.run_edge,
            bias, edge_key, edge_value, vector, values, spec.seed,
            *_strides(q), *_strides(k), *_strides(v), *_strides(out), *_bias_strides(bias),
            *_edge_strides(edge_key), *_edge_strides(edge_value),
            t, heads, call.lead[1], spec.nb, spec.nh, call.scale, spec.cap, _slope(call), spec.offset, spec.reach,
            spec.width, spec.threshold, spec.keep_scale if call.dropout else 1.0,
            D=d, DV=dv, BD=bd, BDV=bdv, BE=be, HB=hb, GROUP=spec.group, KIND=_kind(call), RUNS=form.walks_runs,
            WIDE=_wide(q, k, v), POS=spec.pos, CAP=spec.bends, DROP=call.dropout > 0, SPLIT=bucket.split,
            OWN_B=spec.own_b, OWN_H=spec.own_h, **_threads(call, warps),
        )  # fmt: skip
    if parts:
        launch(
            kernels.merge_parts, (items.hub_row.numel(), spec.nh, spec.nb),
            part_out, part_lse, out, lse, items.hub_row, items.hub_ptr, *_strides(out), t, heads, call.lead[1], spec.nb,
            spec.nh, DV=dv, BDV=bdv, BS=16, OWN_B=spec.own_b, OWN_H=spec.own_h, num_warps=4,
        )  # fmt: skip
    return out, lse


def _like_nodes(q: Tensor, dv: int) -> Tensor:
    """An output (B, H, T, dv) laid out as q is: the heads of a node together if q's are."""
    batch, heads, t, _ = q.shape
    if heads > 1 and q.stride(1) < q.stride(2):
        return q.new_empty(batch, t, heads, dv).transpose(1, 2)
    return q.new_empty(batch, heads, t, dv)


def _slope(call: Call) -> float:
    return call.score.slope if isinstance(call.score, Additive | GATv2) else 0.0


def _kind(call: Call) -> int:
    return 0 if call.score.name == "dot" else 1


def _delta(out: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    batch, heads, t, dv = out.shape
    delta = torch.empty(batch, heads, t, dtype=torch.float32, device=out.device)
    bdv = _pow2(dv)
    bt = max(1, min(128, 4096 // bdv))
    slse = (0, 0, 0) if dlse is None else dlse.stride()
    launch(
        kernels.row_delta, (triton.cdiv(t, bt), heads, batch),
        out, dout, dlse, delta, *_strides(out), *_strides(dout), *slse, heads, t, DV=dv, BDV=bdv, BT=bt, num_warps=4,
    )  # fmt: skip
    return delta


def _rows_backward(
    spec: _Spec, needs: tuple[bool, ...], q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    dlse: Tensor | None, *extra: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    need_q, need_k, need_v, need_bias, need_ek, need_ev, need_vector, need_values = needs
    bias, edge_key, edge_value, vector, values = extra
    dout = _unit(dout)
    if q.shape[1] > 1 and q.stride(1) < q.stride(2) and dout.stride(1) > dout.stride(2):
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)  # heads of a node together, to be gathered together
    delta = _delta(out, dout, dlse)
    grads: list[Tensor | None] = [None] * 8
    if need_q or need_bias or need_ek or need_ev or need_vector or need_values:
        grads[0], *grads[3:] = _by_targets(spec, needs, q, k, v, dout, lse, delta, *extra)
    if need_k or need_v:
        back = _runs_by_sources if plan.rows(spec.call.graph).walks_runs else _by_sources
        grads[1], grads[2] = back(spec, q, k, v, dout, lse, delta, *extra)
    inputs = (q, k, v, *extra)
    return [
        g.to(x.dtype) if need and g is not None and x is not None else None
        for g, x, need in zip(grads, inputs, needs, strict=True)
    ]


def _by_targets(
    spec: _Spec, needs: tuple[bool, ...], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor,
    *extra: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    call = spec.call
    _, _, _, need_bias, need_ek, need_ev, need_vector, need_values = needs
    bias, edge_key, edge_value, vector, values = extra
    graph, (batch, heads, t, d), dv = call.graph, q.shape, v.shape[-1]
    form = plan.rows(graph)
    items, edges, nb, nh = form.items, graph.num_edges, spec.nb, spec.nh

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    count, parts = items.row.numel(), items.parts
    dq = empty(batch, heads, t, d)
    part_dq = empty(parts, nb, nh, d) if parts else None
    dbias = empty(nb, nh, edges) if need_bias or (need_values and spec.pos == 2) else None
    dek = empty(edges, nh, d) if need_ek else None
    dev = empty(edges, nh, dv) if need_ev else None
    dvector = empty(count, nb, nh, d) if need_vector else None
    dslope = empty(count, nb, nh) if need_values and spec.pos == 1 else None
    hb = _heads_at_once(spec, heads, k, v)
    bd, bdv = _pow2(d), _pow2(dv)
    # vectors per edge are summed over the batch indices that share the graph: one launch for each, in order
    alone = (need_ek or need_ev) and nb > 1
    for first_batch in range(nb if alone else 1):
        for bucket in items.buckets:
            be, warps = _block(bucket.cap, hb * max(bd, bdv), crowded=True)
            part = slice(bucket.first, bucket.first + bucket.size)
            run = None if items.run is None else items.run[2 * part.start : 2 * part.stop]
            launch(
                kernels.rows_backward_targets, (bucket.size, nh // hb, 1 if alone else nb),
                q, k, v, dout, lse, delta, dq, part_dq, dbias, dek, dev, dvector, dslope,
                items.row[part], items.begin[part], items.end[part], run,
                form.cols, form.run_start, form.run_stop, form.run_edge,
                bias, edge_key, edge_value, vector, values, spec.seed,
                *_strides(q), *_strides(k), *_strides(v), *_strides(dout), *_bias_strides(bias),
                *_edge_strides(edge_key), *_edge_strides(edge_value),
                t, heads, call.lead[1], nb, nh, edges, bucket.first, first_batch,
                call.scale, spec.cap, _slope(call), spec.offset, spec.reach, spec.width, spec.threshold,
                spec.keep_scale,
                D=d, DV=dv, BD=bd, BDV=bdv, BE=be, HB=hb, GROUP=spec.group, KIND=_kind(call), RUNS=form.walks_runs,
                WIDE=_wide(q, k, v), POS=spec.pos, CAP=spec.bends, DROP=call.dropout > 0, SPLIT=bucket.split,
                OWN_B=spec.own_b, OWN_H=spec.own_h, ADD=first_batch > 0, **_threads(call, warps),
            )  # fmt: skip
    if parts:
        _sum_parts(spec, items, part_dq, dq)
    grad_values = None
    if dslope is not None:
        grad_values = _per_head(spec, items, dslope.unsqueeze(-1)).squeeze(-1)
    elif need_values and dbias is not None:
        grad_values = _per_distance(spec, dbias)
    return (
        dq,
        _fold(dbias, bias, 0, 1) if need_bias else None,
        dek.sum(1, keepdim=True) if dek is not None and edge_key is not None and edge_key.shape[1] < nh else dek,
        dev.sum(1, keepdim=True) if dev is not None and edge_value is not None and edge_value.shape[1] < nh else dev,
        None if dvector is None else _per_head(spec, items, dvector),
        grad_values,
    )


def _fold(grad: Tensor | None, like: Tensor | None, *axes: int) -> Tensor | None:
    """Summed over the axes on which `like` has one entry for all."""
    assert grad is not None and like is not None
    for axis in axes:
        if like.shape[axis] == 1 and grad.shape[axis] > 1:
            grad = grad.sum(axis, keepdim=True)
    return grad


def _sum_parts(spec: _Spec, items: plan.Items, part: Tensor | None, out: Tensor) -> None:
    heads, nodes, d = out.shape[1:]
    launch(
        kernels.sum_parts, (items.hub_row.numel(), 1 if spec.own_h else heads, spec.nb),
        part, out, items.hub_row, items.hub_ptr, nodes, heads, spec.call.lead[1], spec.nb, 1 if spec.own_h else heads,
        D=d, BD=_pow2(d), BS=16, OWN_B=spec.own_b, OWN_H=spec.own_h, num_warps=4,
    )  # fmt: skip


def _per_head(spec: _Spec, items: plan.Items, x: Tensor) -> Tensor:
    """(items, nb, nh, W) to (H, W)."""
    x = x.sum(1)
    if not spec.own_h:
        return x.sum(0)
    heads = spec.call.heads
    head = torch.div(items.row.long(), spec.call.graph.t, rounding_mode="floor") % heads
    return _sum_by(head, heads, x[:, 0])


def _per_distance(spec: _Spec, ds: Tensor) -> Tensor:
    """(nb, nh, E) of every edge to (H, 2R + 1), by distance."""
    graph, heads = spec.call.graph, spec.call.heads
    target, source = graph.targets_sources()
    key = (source - target - spec.offset).clamp(-spec.reach, spec.reach) + spec.reach
    x = ds.sum(0).T  # (E, nh)
    if not spec.own_h:
        return _sum_by(key, spec.width, x).T
    head = torch.div(graph.edges()[0], graph.t, rounding_mode="floor") % heads
    return _sum_by(head * spec.width + key, heads * spec.width, x).view(heads, spec.width)


def _sum_by(key: Tensor, keys: int, x: Tensor) -> Tensor:
    """(n, W) to (keys, W): sums of rows with one key, in order and so the same every time."""
    order = torch.argsort(key, stable=True)
    count = torch.bincount(key, minlength=keys)
    pieces = torch.div(count + _SUM - 1, _SUM, rounding_mode="floor")
    which = torch.repeat_interleave(torch.arange(keys, device=key.device), pieces)
    rank = torch.arange(which.numel(), device=key.device) - (pieces.cumsum(0) - pieces)[which]
    length = (count[which] - rank * _SUM).clamp_(max=_SUM)
    x = torch.segment_reduce(x.index_select(0, order).contiguous(), "sum", lengths=length, axis=0)
    return torch.segment_reduce(x, "sum", lengths=pieces, axis=0)


def _source_heads(spec: _Spec) -> tuple[int, int]:
    """Heads that dK and dV are made for, and query heads each is the sum of; a graph per head keeps them apart."""
    return (spec.call.heads, 1) if spec.own_h else (spec.call.kv_heads, spec.group)


def _ungroup(spec: _Spec, x: Tensor) -> Tensor:
    """(B, heads, S, W) with a gradient per query head to one per key head."""
    kv_heads = spec.call.kv_heads
    return x if x.shape[1] == kv_heads else x.unflatten(1, (kv_heads, -1)).sum(2)


def _by_sources(
    spec: _Spec, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, *extra: Tensor | None
) -> tuple[Tensor, Tensor]:
    call = spec.call
    bias, edge_key, edge_value, vector, values = extra
    (batch, heads, t, d), s, dv = q.shape, k.shape[2], v.shape[-1]
    form = plan.sources(call.graph)
    items, parts = form.items, form.items.parts
    hn, loop = _source_heads(spec)
    nh = 1 if spec.own_h else hn

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q.device)

    dk, dv_out = empty(batch, hn, s, d), empty(batch, hn, s, dv)
    part_dk = empty(parts, spec.nb, nh, d) if parts else None
    part_dv = empty(parts, spec.nb, nh, dv) if parts else None
    hb = _heads_at_once(spec, hn, q, dout)
    bd, bdv = _pow2(d), _pow2(dv)
    numbered = not (bias is None and edge_key is None and edge_value is None)
    for bucket in items.buckets:
        be, warps = _block(bucket.cap, hb * max(bd, bdv), crowded=True)
        part = slice(bucket.first, bucket.first + bucket.size)
        launch(
            kernels.rows_backward_sources, (bucket.size, nh // hb, spec.nb),
            q, k, v, dout, lse, delta, dk, dv_out, part_dk, part_dv,
            items.row[part], items.begin[part], items.end[part], form.targets, form.edges if numbered else None,
            bias, edge_key, edge_value, vector, values, spec.seed,
            *_strides(q), *_strides(k), *_strides(v), *_strides(dout), *_bias_strides(bias),
            *_edge_strides(edge_key), *_edge_strides(edge_value),
            s, t, heads, hn, call.lead[1], spec.nb, nh, call.scale, spec.cap, _slope(call), spec.offset, spec.reach,
            spec.width, spec.threshold, spec.keep_scale,
            D=d, DV=dv, BD=bd, BDV=bdv, BE=be, HB=hb, GROUP=spec.group, LOOP=loop, KIND=_kind(call),
            WIDE=_wide(q, k, v, dout), POS=spec.pos, CAP=spec.bends, DROP=call.dropout > 0, SPLIT=bucket.split,
            OWN_B=spec.own_b, OWN_H=spec.own_h, **_threads(call, warps),
        )  # fmt: skip
    if parts:
        _sum_parts(spec, items, part_dk, dk)
        _sum_parts(spec, items, part_dv, dv_out)
    return _ungroup(spec, dk), _ungroup(spec, dv_out)


def _runs_by_sources(
    spec: _Spec, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, *extra: Tensor | None
) -> tuple[Tensor, Tensor]:
    call, graph = spec.call, spec.call.graph
    bias, edge_key, edge_value, vector, values = extra
    (batch, heads, t, d), s, dv = q.shape, k.shape[2], v.shape[-1]
    form = plan.run_list(graph)
    hn, loop = _source_heads(spec)
    dk = torch.empty(batch, hn, s, d, dtype=torch.float32, device=q.device)
    dv_out = torch.empty(batch, hn, s, dv, dtype=torch.float32, device=q.device)
    bd, bdv = _pow2(d), _pow2(dv)
    bt, warps = _block(plan.SOURCES, plan.SOURCES * max(bd, bdv), crowded=True)
    launch(
        kernels.runs_backward_sources, (form.ptr.numel() - 1, 1 if spec.own_h else hn, spec.nb),
        q, k, v, dout, lse, delta, dk, dv_out,
        form.ptr, form.run, form.row, graph.start, graph.stop, graph.run_edge(),
        bias, edge_key, edge_value, vector, values, spec.seed,
        *_strides(q), *_strides(k), *_strides(v), *_strides(dout), *_bias_strides(bias),
        *_edge_strides(edge_key), *_edge_strides(edge_value),
        s, t, heads, hn, call.lead[1], form.blocks, call.scale, spec.cap, _slope(call), spec.offset, spec.reach,
        spec.width, spec.threshold, spec.keep_scale,
        D=d, DV=dv, BD=bd, BDV=bdv, BT=bt, BS=plan.SOURCES, GROUP=spec.group, LOOP=loop, KIND=_kind(call),
        POS=spec.pos, CAP=spec.bends, DROP=call.dropout > 0, OWN_B=spec.own_b, OWN_H=spec.own_h, **_threads(call, warps),
    )  # fmt: skip
    return _ungroup(spec, dk), _ungroup(spec, dv_out)


# ---------------------------------------------------------------------- denser graphs


_Size = tuple[int, int]


def tiles(call: Call, size: _Size, source_size: _Size) -> tuple[Tensor, Tensor]:
    """`(out, lse)` by the kernels that multiply tiles."""
    q, k, v = _unit(call.q), _unit(call.k), _unit(call.v)
    if q.dtype == torch.bfloat16 and not isinstance(kernels.tiles_forward, triton.JITFunction):
        # triton's interpreter multiplies the bits of bfloat16 numbers as if they were integers
        q, k, v = q.float(), k.float(), v.float()
    out, lse = _Tiles.apply(_spec(call), size, source_size, q, k, v, _values(call))
    return out.to(call.q.dtype), lse


class _Tiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, spec: _Spec, size: _Size, source_size: _Size, q: Tensor, k: Tensor, v: Tensor, values: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = _tiles_forward(spec, size, q, k, v, values)
        ctx.spec, ctx.sizes = spec, (size, source_size)
        ctx.save_for_backward(q, k, v, out, lse, values)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, values = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(out)
        needs = ctx.needs_input_grad[3:]
        size, source_size = ctx.sizes
        dq, dk, dv = _tiles_backward(ctx.spec, needs, size, source_size, q, k, v, out, lse, dout, dlse, values)
        return None, None, None, dq, dk, dv, None


def _precision(q: Tensor) -> str:
    """Of float32 tiles: three products in TF32 that make up one in float32, or one if the user allows TF32."""
    matmul = torch.backends.cuda.matmul
    # allow_tf32 can't be read once the newer name was set
    allowed = matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else matmul.allow_tf32
    return "tf32" if q.dtype != torch.float32 or allowed else "tf32x3"


def tile_launch(kernel: str, width: int, call: Call) -> dict[str, int]:
    """Warps and pipeline stages of a tile kernel; one stage where a block has less shared memory than on an A100."""
    if call.q.dtype == torch.float32:
        return _threads(call, 8 if width <= 64 or kernel == "sources" else 4) | {"num_stages": 1}
    stages = 3 if kernel == "forward" and width <= 64 else 2
    return _threads(call, 8) | {"num_stages": stages if _shared_memory(call.q.device) >= 160 * 1024 else 1}


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes a block may have: 163 KiB on an A100, 227 on an H100, 99 on the GPUs of desktops."""
    if device.type != "cuda":
        return 163 * 1024
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 163 * 1024)


def _tiles_forward(
    spec: _Spec, size: _Size, q: Tensor, k: Tensor, v: Tensor, values: Tensor | None
) -> tuple[Tensor, Tensor]:
    call, (bm, bn) = spec.call, size
    (batch, heads, t, d), s, dv = q.shape, k.shape[2], v.shape[-1]
    form = plan.tiles(call.graph, bm, bn, plan.ENDS)
    out = _like_nodes(q, dv)
    lse = torch.empty(batch, heads, t, dtype=torch.float32, device=q.device)
    blocks = triton.cdiv(t, bm)
    bd, bdv = max(16, _pow2(d)), max(16, _pow2(dv))
    launch(
        kernels.tiles_forward, (blocks, heads, batch),
        q, k, v, out, lse, *form.grid, form.start, form.stop, form.bits, values, spec.seed,
        *_strides(q), *_strides(k), *_strides(v), *_strides(out),
        t, s, heads, call.lead[1], blocks, call.scale, spec.cap, spec.offset, spec.reach, spec.width, spec.threshold,
        spec.keep_scale if call.dropout else 1.0,
        D=d, DV=dv, BD=bd, BDV=bdv, BM=bm, BN=bn, GROUP=spec.group, ENDS=form.ends, POS=spec.pos, CAP=spec.bends,
        DROP=call.dropout > 0, PAD=s % bn != 0, OWN_B=spec.own_b, OWN_H=spec.own_h, PRECISION=_precision(q),
        **tile_launch("forward", max(bd, bdv), call),
    )  # fmt: skip
    return out, lse


def _tiles_backward(
    spec: _Spec, needs: tuple[bool, ...], size: _Size, source_size: _Size, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, dout: Tensor, dlse: Tensor | None, values: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    call = spec.call
    (batch, heads, t, d), s, dv = q.shape, k.shape[2], v.shape[-1]
    dout = _unit(dout)
    delta = _delta(out, dout, dlse)
    bd, bdv = max(16, _pow2(d)), max(16, _pow2(dv))
    dq = dk = dv_out = None
    if needs[0]:
        bm, bn = size
        form = plan.tiles(call.graph, bm, bn, plan.ENDS)
        dq = torch.empty(batch, heads, t, d, dtype=torch.float32, device=q.device)
        blocks = triton.cdiv(t, bm)
        launch(
            kernels.tiles_backward_targets, (blocks, heads, batch),
            q, k, v, dout, lse, delta, dq, *form.grid, form.start, form.stop, form.bits, values,
            spec.seed, *_strides(q), *_strides(k), *_strides(v), *_strides(dout),
            t, s, heads, call.lead[1], blocks, call.scale, spec.cap, spec.offset, spec.reach, spec.width,
            spec.threshold, spec.keep_scale,
            D=d, DV=dv, BD=bd, BDV=bdv, BM=bm, BN=bn, GROUP=spec.group, ENDS=form.ends, POS=spec.pos, CAP=spec.bends,
            DROP=call.dropout > 0, PAD=s % bn != 0, OWN_B=spec.own_b, OWN_H=spec.own_h, PRECISION=_precision(q),
            **tile_launch("targets", max(bd, bdv), call),
        )  # fmt: skip
        dq = dq.to(q.dtype)
    if needs[1] or needs[2]:
        bm, bn = source_size
        form = plan.tiles_by_source(call.graph, bm, bn, plan.ENDS)
        hn, loop = _source_heads(spec)
        dk = torch.empty(batch, hn, s, d, dtype=torch.float32, device=q.device)
        dv_out = torch.empty(batch, hn, s, dv, dtype=torch.float32, device=q.device)
        blocks = triton.cdiv(s, bn)
        launch(
            kernels.tiles_backward_sources, (blocks, hn, batch),
            q, k, v, dout, lse, delta, dk, dv_out, *form.grid, form.order, form.start, form.stop,
            form.bits, values, spec.seed, *_strides(q), *_strides(k), *_strides(v), *_strides(dout),
            t, s, heads, hn, call.lead[1], blocks, call.scale, spec.cap, spec.offset, spec.reach, spec.width,
            spec.threshold, spec.keep_scale,
            D=d, DV=dv, BD=bd, BDV=bdv, BM=bm, BN=bn, GROUP=spec.group, LOOP=loop, ENDS=form.ends, POS=spec.pos,
            CAP=spec.bends, DROP=call.dropout > 0, PAD=t % bm != 0, OWN_B=spec.own_b, OWN_H=spec.own_h,
            PRECISION=_precision(q), **tile_launch("sources", max(bd, bdv), call),
        )  # fmt: skip
        dk, dv_out = _ungroup(spec, dk).to(k.dtype), _ungroup(spec, dv_out).to(v.dtype)
    return dq, dk, dv_out
