"""Fused exact attention in C++: the fastest route on a CPU for most graphs, forward and backward, and the leanest.

Nothing of size edges x width is ever made.  Long runs go through register-blocked tiles of 32 targets, short ones
target by target with prefetch, narrow heads eight at a time; bfloat16 is read as it is stored.  Vectors per edge
(`edge_key`, `edge_value`) are where it is least ahead; where there was no compiler it is absent.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..graph import Graph
from ..scores import Alibi, GATv2, Relative
from .call import Call, learnt
from .numerics import drop_threshold, transformed

_LIBRARY = Path(__file__).parent / "_native" / "libgraphattn.so"
_ISA = {"base": 1, "v3": 3, "v4": 4}
_ARGS = struct.Struct("=87q4d")  # struct Args of _native/abi.h
_SLOTS = 64  # partial sums of gradients that every edge adds to
# Bytes of p and ds per edge kept between the two passes of the backward; beyond it they are computed twice.
STASH = 256 * 2**20
# From this size on new tensors ask for pages of 2 MiB: by then what a page rounds up is little.
LARGE = 4 * 2**20
# From as many numbers in keys and values on it is asked whether the scores are worth keeping for the backward.
HOLD = 2**21
# A group of 32 targets goes to the tiles if it has this many edges per column.
TILE_FILL = 5.0

_lock = threading.Lock()
_isa = 0


# ---------------------------------------------------------------------- the library


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The loaded library, or why there is none."""
    with _lock:
        if not _LIBRARY.exists():
            return (
                "the native engine was not built: install a C++17 compiler, then reinstall graphattn "
                "(or run `python setup.py build_native` in a checkout)"
            )
        try:
            lib = ctypes.CDLL(str(_LIBRARY))
        except OSError as error:
            return f"the native engine does not load: {error}"
        pointer, i64 = ctypes.c_void_p, ctypes.c_int64
        try:
            lib.ga_run.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p]
            lib.ga_args_size.restype = i64
            lib.ga_plan.argtypes = [pointer] * 4 + [i64] * 3 + [ctypes.c_double, i64, pointer]
            lib.ga_plan.restype = pointer
            lib.ga_source_plan.argtypes = [pointer] * 6 + [i64] * 2 + [pointer]
            lib.ga_source_plan.restype = pointer
            lib.ga_release.argtypes = [pointer]
            lib.ga_start.argtypes = [pointer]
            lib.ga_terms.argtypes = [ctypes.c_int, ctypes.c_int, pointer]
            lib.ga_terms.restype = None
            lib.ga_large_pages.argtypes = [pointer, i64]
            lib.ga_set_last_level.argtypes = [i64]
            same = lib.ga_args_size() == _ARGS.size
        except AttributeError:
            same = False
        if not same:
            return "the native engine was built from other sources than this package: reinstall graphattn"
        lib.ga_start(_torch_pool())
        global _isa
        _isa = lib.ga_best()
        return lib


def _torch_pool() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime torch uses, so that both share one pool of threads."""
    names: list[str] = []
    try:
        with open("/proc/self/maps") as maps:
            names = sorted({line.split()[-1] for line in maps if "omp" in line.rsplit("/", 1)[-1]})
    except OSError:
        names = [str(p) for p in (Path(torch.__file__).parent / "lib").glob("*omp*")]
    for name in names:
        try:
            return ctypes.cast(ctypes.CDLL(name).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def set_isa(name: str) -> None:
    """For tests: use "base", "v3" or "v4", not the best instruction set; ValueError where it is missing."""
    global _isa
    lib = _library()
    if isinstance(lib, str) or _ISA[name] > lib.ga_best():
        raise ValueError(f"this machine or build can't run {name}")
    _isa = _ISA[name]


def set_last_level(size: int) -> None:
    """For tests: the bytes of cache from which tables are gathered one after the other; 0 asks the system again."""
    _checked().ga_set_last_level(size)


def isas() -> list[str]:
    """The instruction sets of `set_isa` this machine and build have, weakest first."""
    lib = _library()
    return [] if isinstance(lib, str) else [name for name, level in _ISA.items() if level <= lib.ga_best()]


# ---------------------------------------------------------------------- the backend


def why_not(call: Call) -> str | None:
    """None if it can do the call exactly."""
    lib = _library()
    if isinstance(lib, str):
        return lib
    if call.q.device.type != "cpu":
        return f"the native engine runs on the CPU, but q is on {call.q.device}"
    if max(call.graph.t, call.graph.s) >= 2**31:
        return "the native engine numbers targets and sources with 31 bits"
    return None


class Constants(NamedTuple):
    """Seconds of one thread in float32 with AVX-512; a Zen 5 core.  Replace `CONSTANTS` to calibrate."""

    call: float = 25e-6
    cell: float = 0.25e-9  # a pair of the tile path, and per unit of width
    cell_width: float = 0.0075e-9
    edge: float = 5e-9  # an edge of the row path, and per unit of width while keys and values lie in cache
    edge_width: float = 0.06e-9
    far_width: float = 0.12e-9  # more per unit of width when they do not
    cache: float = 32e6  # bytes
    narrow: float = 1.2e-9  # an edge of the path for narrow heads, and per unit of width
    narrow_width: float = 0.08e-9
    backward: float = 3.0  # times the forward, besides it
    isa: tuple[float, ...] = (0, 6.0, 0, 2.0, 1.0)  # times the arithmetic, by level


CONSTANTS = Constants()


def cost(call: Call) -> float:
    """Estimated seconds, forward, or forward and backward where `call.needs_grad`.  Builds the plan of the graph."""
    c, graph = CONSTANTS, call.graph
    q, k, v = call.q, call.k, call.v
    bg, hg = call.lead
    over = (call.batch // max(bg, 1)) * (call.heads // max(hg, 1))
    if graph.num_edges == 0 or over == 0:
        return c.call
    extras = (call.bias, call.edge_key, call.edge_value)
    score = ("dot", "additive", "gatv2").index(call.score.name)
    plan = _plan(graph, score == 0 and extras[1] is None and extras[2] is None)
    groups, rows = int(plan[1]), int(plan[5])  # P_GROUPS, P_ROWS
    cells = 32 * over * int(plan[int(plan[11]) + groups])  # P_GROUP_COL
    edges = over * int(plan[int(plan[18]) + rows])  # P_ROW_EDGE
    width = q.shape[-1] + v.shape[-1]
    size = 8 if call.wide == torch.float64 else 4
    speed = c.isa[_isa] * size / 4
    far = min(1.0, (k.shape[-2] * width * size) / c.cache)
    options = sum(x is not None for x in (call.bias, call.position, call.softcap)) + (call.dropout > 0)
    seconds = cells * (c.cell * (1 + 2 * options) + c.cell_width * width) * speed
    narrow = hg == 1 and k.shape[1] == call.heads >= 4 and max(q.shape[-1], v.shape[-1]) <= 16 and not groups
    if narrow and all(x is None for x in (*extras, call.position, call.softcap)):
        seconds += edges * (c.narrow + c.narrow_width * width) * speed
    else:
        per_edge = c.edge * (1 + 0.5 * options) + c.edge_width * width * (2 if score == 2 else 1)
        per_edge += width * c.edge_width * 5 * ((extras[1] is not None) + (extras[2] is not None))
        seconds += edges * (per_edge * speed + c.far_width * width * far)
    if call.needs_grad:
        seconds *= 1 + c.backward
    return c.call * (3 if call.needs_grad else 1) + seconds / max(1.0, 0.9 * torch.get_num_threads())


def memory(call: Call) -> int:
    """Bytes beyond inputs, output and gradients: copies of narrow inputs, p and ds per edge up to a limit."""
    size = 8 if call.wide == torch.float64 else 4
    nodes = call.batch * call.heads * (call.graph.t + call.graph.s) * (call.q.shape[-1] + call.v.shape[-1])
    kept = min(STASH, 2 * call.edge_work * size) if call.needs_grad else 0
    return kept + 2 * nodes * size


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """`(out, lse)`; differentiable once."""
    wide, dtype = call.wide, call.q.dtype
    q, k, v = call.q, call.k, call.v
    if dtype != wide and (dtype != torch.bfloat16 or transformed()):  # bfloat16 is read as it is stored
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    if call.plain:
        spec = _Spec(call.graph, call.scale)
        if not call.needs_grad and not transformed():
            return _back(_forward(spec, q, k, v), dtype)
        return _back(_apply(spec, q, k, v, None, None, None, None, None), dtype)
    spec, extras = _spec(call)
    return _back(_apply(spec, q, k, v, *(x if x is None else x.to(wide) for x in extras)), dtype)


def keeps(call: Call) -> bool:
    """`gradients` can do the call's backward pass from its output and lse alone."""
    return call.q.dtype == call.wide and all(x is None for x in learnt(call)) and why_not(call) is None


def gradients(
    call: Call, out: Tensor, lse: Tensor, g_out: Tensor, g_lse: Tensor | None
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Of q, k and v, from what `attend` gave for a call that `keeps`; dropout needs the call's seed."""
    spec, extras = _spec(call)
    needs = (True,) * 3 + (False,) * 5
    return _backward(spec, needs, g_out, g_lse, out, lse, call.q, call.k, call.v, *extras)[:3]


def _spec(call: Call) -> tuple[_Spec, tuple[Tensor | None, ...]]:
    """What the kernels need besides q, k and v: numbers, and tensors (bias, edge_key, edge_value, vector, table)."""
    position, score = call.position, call.score
    seed = 0
    if call.dropout:
        seed = int(torch.empty((), dtype=torch.int64).random_() if call.seed is None else call.seed)
    spec = _Spec(
        call.graph,
        call.scale,
        ("dot", "additive", "gatv2").index(score.name),
        getattr(score, "slope", 0.0),
        call.softcap or 0.0,
        call.dropout,
        seed,
        0 if position is None else 1 if isinstance(position, Alibi) else 2,
        0 if position is None else position.offset,
    )
    table = None
    if isinstance(position, Alibi):
        table = position.slopes
    elif isinstance(position, Relative):
        table = position.table
    return spec, (call.bias, call.edge_key, call.edge_value, score.vector if isinstance(score, GATv2) else None, table)


def _back(result: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, lse = result
    return out if out.dtype == dtype else out.to(dtype), lse


class _Spec(NamedTuple):
    """What a call has besides tensors with gradients."""

    graph: Graph
    scale: float
    score: int = 0
    slope: float = 0.0
    softcap: float = 0.0
    dropout: float = 0.0
    seed: int = 0
    position: int = 0
    offset: int = 0


def _apply(spec: _Spec, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
    if transformed():
        return _Attend.apply(spec, *tensors)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _Eager.apply(spec, *tensors)
    return _forward(spec, *tensors)  # type: ignore[arg-type]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(spec: _Spec, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor | None) -> tuple[Tensor, Tensor]:
        return _forward(spec, q, k, v, *extras)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.spec = inputs[0]
        ctx.save_for_backward(*inputs[1:], *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, g_out: Tensor | None, g_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        if g_out is None:
            if g_lse is None:
                return (None,) * 9
            g_out = torch.zeros_like(out, dtype=inputs[0].dtype)
        needs = ctx.needs_input_grad[1:]
        if not torch.is_grad_enabled() and not transformed():
            held = getattr(ctx, "held", None)
            return None, *_backward(ctx.spec, needs, g_out, g_lse, out, lse, *inputs, held=held)
        found = iter(_AttendBackward.apply(ctx.spec, needs, g_out, g_lse, out, lse, *inputs))
        return None, *(next(found) if there else None for there in _has_gradient(needs, inputs))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], spec: _Spec, *tensors: Tensor | None) -> tuple[Any, Any]:
        size, dims = info.batch_size, in_dims[1:]
        q, k, v, bias, *rest = tensors
        bg = (spec.graph.lead or (1, 1))[0]
        if bg > 1 or spec.dropout or any(d is not None for d in dims[4:]):
            parts = [_Attend.apply(spec, *_slices(tensors, dims, n)) for n in range(size)]
            return tuple(torch.stack(x) for x in zip(*parts, strict=True)), (0, 0)
        # the new axis joins the batch
        q, k, v = (_joined(x, d, size) for x, d in zip((q, k, v), dims, strict=False))  # type: ignore[arg-type]
        if bias is not None and (dims[3] is not None or bias.shape[0] > 1):
            nb = q.shape[0] // size
            bias = bias.movedim(dims[3], 0) if dims[3] is not None else bias.expand(size, *bias.shape)
            bias = bias.expand(size, nb, *bias.shape[2:]).flatten(0, 1)
        out, lse = _Attend.apply(spec, q, k, v, bias, *rest)
        return (out.unflatten(0, (size, -1)), lse.unflatten(0, (size, -1))), (0, 0)


class _Eager(torch.autograd.Function):
    """_Attend outside of transforms: torch binds no signature for a function with a context of its own, 20 us a call."""

    @staticmethod
    def forward(ctx: Any, spec: _Spec, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.held = _room(spec, *tensors) if any(ctx.needs_input_grad[1:4]) else None  # type: ignore[arg-type]
        output = _forward(spec, *tensors, held=ctx.held)  # type: ignore[arg-type]
        _Attend.setup_context(ctx, (spec, *tensors), output)
        return _back(output, tensors[0].dtype)  # type: ignore[union-attr]

    backward = _Attend.backward


class _AttendBackward(torch.autograd.Function):
    """The backward where a transform or a graph of the gradient asks for an operation of its own."""

    @staticmethod
    def forward(spec: _Spec, needs: tuple[bool, ...], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(x for x in _backward(spec, needs, *tensors) if x is not None)  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        raise RuntimeError(
            "the native engine is differentiable once: for gradients of gradients pass backend='edges' to attend"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], spec: _Spec, needs: tuple[bool, ...], *tensors: Tensor | None
    ) -> tuple[Any, Any]:
        parts = [_AttendBackward.apply(spec, needs, *_slices(tensors, in_dims[2:], n)) for n in range(info.batch_size)]
        stacked = tuple(torch.stack(x) for x in zip(*parts, strict=True))
        return stacked, (0,) * len(stacked)


def _has_gradient(needs: tuple[bool, ...], inputs: list[Tensor | None]) -> list[bool]:
    return [i < 3 or (x is not None and needs[i]) for i, x in enumerate(inputs)]


def _slices(tensors: tuple[Tensor | None, ...], dims: tuple[int | None, ...], n: int) -> list[Tensor | None]:
    return [x if x is None or d is None else x.select(d, n) for x, d in zip(tensors, dims, strict=True)]


def _joined(x: Tensor, dim: int | None, size: int) -> Tensor:
    x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return x.flatten(0, 1)


# ---------------------------------------------------------------------- plans


def _plan(graph: Graph, tiles: bool) -> Tensor:
    """Which targets go through tiles and which one by one, and the cuts of the work; int64, see PlanField of abi.h."""

    def make() -> Tensor:
        lib = _checked()
        indptr, start, stop, edge_ptr = _runs(graph)
        bg, hg = graph.lead or (1, 1)
        length = ctypes.c_int64()
        at = lib.ga_plan(
            indptr.data_ptr(),
            start.data_ptr(),
            stop.data_ptr(),
            edge_ptr.data_ptr(),
            bg * hg,
            graph.t,
            graph.s,
            TILE_FILL if tiles else 0.0,
            torch.get_num_threads(),
            ctypes.byref(length),
        )
        return _take(lib, at, length.value)

    return graph.cached(("native", "plan", tiles), make)


def _source_plan(graph: Graph, tiles: bool) -> Tensor:
    """Per block of sources the (target, run) that meet it; int64, see SourcePlanField of abi.h."""

    def make() -> Tensor:
        lib = _checked()
        indptr, start, stop, edge_ptr = _runs(graph)
        length = ctypes.c_int64()
        at = lib.ga_source_plan(
            indptr.data_ptr(),
            start.data_ptr(),
            stop.data_ptr(),
            graph.run_edge().data_ptr(),
            edge_ptr.data_ptr(),
            _plan(graph, tiles).data_ptr(),
            graph.t,
            graph.s,
            ctypes.byref(length),
        )
        return _take(lib, at, length.value)

    return graph.cached(("native", "sources", tiles), make)


def _runs(graph: Graph) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return graph.cached(
        ("native", "runs"),
        lambda: (
            graph.indptr.contiguous(),
            graph.start.contiguous(),
            graph.stop.contiguous(),
            graph.edge_ptr().contiguous(),
        ),
    )


def _take(lib: ctypes.CDLL, at: int | None, length: int) -> Tensor:
    if not at:
        raise MemoryError("no memory for the plan of the graph")
    try:
        plan = torch.empty(length, dtype=torch.int64)
        ctypes.memmove(plan.data_ptr(), at, 8 * length)
    finally:
        lib.ga_release(at)
    return plan


def _checked() -> ctypes.CDLL:
    lib = _library()
    if isinstance(lib, str):
        raise RuntimeError(lib)
    return lib


# ---------------------------------------------------------------------- calls into the library


def _rows(x: Tensor) -> Tensor:
    """The kernels step through the last axis one by one."""
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _wide(x: Tensor) -> torch.dtype:
    """Of what is computed from x."""
    return torch.float32 if x.dtype == torch.bfloat16 else x.dtype


def _like(x: Tensor, width: int, zero: bool = False) -> Tensor:
    """A new wide tensor (..., width) laid out like x: heads beside width if x is (B, T, H, D) inside."""
    b, h, t, _ = x.shape
    beside = h > 1 and t > 1 and x.stride(1) < x.stride(2)
    new = torch.empty((b, t, h, width) if beside else (b, h, t, width), dtype=_wide(x))
    if new.nbytes >= LARGE:
        _checked().ga_large_pages(new.data_ptr(), new.nbytes)
    if zero:
        new.zero_()
    return new.transpose(1, 2) if beside else new


def _place(x: Tensor | None) -> tuple[int, int, int, int]:
    return (0, 0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


_NONE9 = (0,) * 9


def _head(
    spec: _Spec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    extras: tuple[Tensor | None, ...],
    tiles: bool,
    splan: int,
) -> list[int]:
    """The fields of Args up to the backward's, all ints."""
    graph = spec.graph
    bg, hg = graph.lead or (1, 1)
    b, h, t, d = q.shape
    indptr, start, stop, edge_ptr = _runs(graph)
    fields = [
        {torch.float64: 1, torch.bfloat16: 2}.get(q.dtype, 0),
        torch.get_num_threads(),
        *(b, h, k.shape[1], t, k.shape[2], d, v.shape[3], bg, hg, graph.num_edges),
        *(indptr.data_ptr(), start.data_ptr(), stop.data_ptr(), graph.run_edge().data_ptr(), edge_ptr.data_ptr()),
        *(_plan(graph, tiles).data_ptr(), splan),
        *_place(q),
        *_place(k),
        *_place(v),
        *_place(out),
        lse.data_ptr(),
        spec.score,
    ]
    if _is_plain(spec, extras):
        return fields + [0] * 18
    bias, edge_key, edge_value, vector, table = extras
    fields.append(0 if vector is None else vector.data_ptr())
    if bias is None:
        fields += (0, 0, 0, 0)
    else:
        step = [0 if n == 1 else s for n, s in zip(bias.shape[:2], bias.stride(), strict=False)]
        fields += (bias.data_ptr(), *step, bias.stride(2))
    fields += (spec.position, 0, 0, spec.offset)
    if table is not None:
        fields[-3:-1] = table.data_ptr(), (table.shape[1] // 2 if spec.position == 2 else 0)
    for x in (edge_key, edge_value):
        fields += (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), 0 if x.shape[1] == 1 else x.stride(1))
    fields += (spec.dropout > 0, spec.seed, drop_threshold(spec.dropout))
    return fields


def _is_plain(spec: _Spec, extras: tuple[Tensor | None, ...]) -> bool:
    return spec.score == 0 and not (spec.softcap or spec.dropout) and all(x is None for x in extras)


def _tiled(spec: _Spec, extras: tuple[Tensor | None, ...]) -> bool:
    """Tiles know dot products and numbers per edge, not vectors per edge."""
    return spec.score == 0 and extras[1] is None and extras[2] is None


def _tail(spec: _Spec) -> tuple[float, float, float, float]:
    return spec.scale, spec.softcap, spec.slope, 1 / (1 - spec.dropout)


def _ready(extras: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    if not extras:
        return (None,) * 5
    bias, edge_key, edge_value, vector, table = extras
    return (
        bias,
        None if edge_key is None else _rows(edge_key),
        None if edge_value is None else _rows(edge_value),
        None if vector is None else vector.contiguous(),
        None if table is None else table.contiguous(),
    )


def _call(op: int, fields: list[int], tail: tuple[float, ...]) -> None:
    if _checked().ga_run(_isa, op, _ARGS.pack(*fields, *tail)):
        raise MemoryError("the native engine could not get the memory it needs")


def _room(spec: _Spec, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor | None) -> Tensor | None:
    """Where the forward leaves its scores for the backward, if keys and values overflow the last level of cache."""
    if k.numel() + v.numel() < HOLD or spec.score or spec.softcap or any(x is not None for x in extras[1:3]):
        return None
    if not q.shape[2] or not q.shape[0] * q.shape[1]:
        return None
    out = q[..., :0]  # not written
    fields = _head(spec, q, k, v, out, out, (None,) * 5, True, 0) + [0] * 32
    fields[-4] = STASH
    lib = _checked()
    count = lib.ga_run(_isa, 2, _ARGS.pack(*fields, *_tail(spec)))
    return torch.empty(*q.shape[:2], count, dtype=_wide(q)) if count else None


def _forward(
    spec: _Spec, q: Tensor, k: Tensor, v: Tensor, *extras: Tensor | None, held: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    q, k, v, extras = _rows(q), _rows(k), _rows(v), _ready(extras)
    out = _like(q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=_wide(q))
    if lse.numel():
        at = 0 if held is None else held.data_ptr()
        _call(0, _head(spec, q, k, v, out, lse, extras, _tiled(spec, extras), 0) + [0] * 31 + [at], _tail(spec))
    return out, lse


def _backward(
    spec: _Spec,
    needs: tuple[bool, ...],
    g_out: Tensor,
    g_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *extras: Tensor | None,
    held: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    shapes = [() if x is None else x.shape for x in extras]
    q, k, v, g_out, ready = _rows(q), _rows(k), _rows(v), _rows(g_out), _ready(extras)
    bias, edge_key, edge_value, vector, table = ready
    graph = spec.graph
    b, h, t, d = q.shape
    bg, hg = graph.lead or (1, 1)
    need_kv = needs[1] or needs[2]
    empty = lse.numel() == 0  # no target: nothing writes
    dq = _like(q, d)
    dk, dv = (_like(x, x.shape[3], zero=empty or not need_kv) for x in (k, v))
    grads = [
        None if x is None or not n else torch.zeros(s, dtype=out.dtype)
        for x, n, s in zip(ready, needs[3:], shapes, strict=True)
    ]
    if empty:
        return *(x.to(q.dtype) for x in (dq, dk, dv)), *grads
    d_bias, d_key, d_value, _, _ = grads
    over_b, over_h = b if bg == 1 else 1, h if hg == 1 else 1
    shared = (
        d_bias is not None
        and ((over_b > 1 and d_bias.shape[0] == 1) or (over_h > 1 and d_bias.shape[1] == 1))
        or any(x is not None and (over_b > 1 or (over_h > 1 and x.shape[1] == 1)) for x in (d_key, d_value))
    )
    d_vector = torch.zeros(_SLOTS, b * h, d, dtype=out.dtype) if grads[3] is not None else None
    width = 1 if spec.position == 1 else table.shape[1] if table is not None else 0
    d_table = torch.zeros(_SLOTS, b * h, width, dtype=out.dtype) if grads[4] is not None else None
    delta = torch.empty_like(lse)
    tiles = _tiled(spec, ready) and not shared  # tiles write a bias gradient from one (b, h) only
    splan = _source_plan(graph, tiles) if need_kv else None
    if g_lse is not None:
        g_lse = g_lse.contiguous()
    fields = _head(spec, q, k, v, out, lse, ready, tiles, 0 if splan is None else splan.data_ptr())
    fields += (
        *_place(g_out),
        0 if g_lse is None else g_lse.data_ptr(),
        *_place(dq),
        *_place(dk),
        *_place(dv),
        0 if d_bias is None else d_bias.data_ptr(),
        0 if d_bias is None or d_bias.shape[0] == 1 else d_bias.stride(0),
        0 if d_bias is None or d_bias.shape[1] == 1 else d_bias.stride(1),
        0 if d_key is None else d_key.data_ptr(),
        0 if d_key is None else int(d_key.shape[1] > 1),
        0 if d_value is None else d_value.data_ptr(),
        0 if d_value is None else int(d_value.shape[1] > 1),
        0 if d_vector is None else d_vector.data_ptr(),
        0 if d_table is None else d_table.data_ptr(),
        _SLOTS,
        shared,
        STASH,
        delta.data_ptr(),
        need_kv,
        0 if held is None else held.data_ptr(),
    )
    _call(1, fields, _tail(spec))
    if d_vector is not None:
        grads[3] = d_vector.view(_SLOTS, b, h, d).sum((0, 1))
    if d_table is not None:
        grads[4] = d_table.view(_SLOTS, b, h, width).sum((0, 1)).view(shapes[4])
    return *(x.to(q.dtype) for x in (dq, dk, dv)), *grads
