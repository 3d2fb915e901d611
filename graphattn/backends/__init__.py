"""attend(): check once, choose a backend, call it.

A backend is a module with `attend(call) -> (out, lse)`, `why_not(call)` (None, or the reason it can't do exactly what
was asked), `cost(call)` in seconds, and optionally `memory(call)` in bytes.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..graph import Graph
from . import compiled, cost, gpu
from .call import Call, make_call
from .numerics import merge_parts, transformed

BACKENDS = ("reference", "dense", "sdpa", "edges", "csr", "tiles", "native", "flex", "triton")
# They multiply hidden pairs by 0 instead of leaving them out, so that 0 * NaN spreads.
_SPREADS_NAN = frozenset(("dense", "sdpa", "tiles", "flex"))


class Estimate(NamedTuple):
    """What `explain` says of one backend."""

    backend: str
    seconds: float | None
    bytes: int
    chosen: bool
    reason: str


class Explanation(tuple[Estimate, ...]):
    """A table of estimates; prints as one."""

    def __str__(self) -> str:
        lines = [f"{'':2}{'backend':<10} {'estimate':>10} {'memory':>9}  why"]
        for e in self:
            time = "-" if e.seconds is None else f"{e.seconds * 1e3:.3g} ms" if math.isfinite(e.seconds) else "never"
            size = "-" if e.seconds is None else _size(e.bytes)
            lines.append(f"{'> ' if e.chosen else '  '}{e.backend:<10} {time:>10} {size:>9}  {e.reason}")
        return "\n".join(lines)

    __repr__ = __str__


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    graph: Graph | Sequence[Graph],
    *,
    scale: float | None = None,
    score: Any = None,
    bias: Any = None,
    edge_key: Tensor | None = None,
    edge_value: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Exact softmax attention in which target i reads exactly the sources the graph gives it.

    out_i = sum_j p_ij v_j over the edges j -> i, p = softmax of scale * <q_i, k_j> (+ bias) over the same edges.

    Args:
        q: `(..., T_q, D)`; axis -3, if there is one, is heads. float16, bfloat16, float32 or float64; sums are in
            float32, or float64 for float64.
        k: `(..., T_kv, D)`, v: `(..., T_kv, D_v)`; with fewer heads than q (a divisor), groups of query heads share one.
        graph: a `Graph` of `(T_q <- T_kv)`, or `(B, H)` of them, or a list of disjoint graphs (attended apart, merged).
        scale: of the score, by default 1 / sqrt(D) for `Dot` and 1 for the others.
        score: `Dot()` (default), `Additive(slope)`, `GATv2(vector, slope)`.
        bias: added to scores after scale and softcap: a tensor per edge in edge order, `(E,)`, `(H, E)` or `(B, H, E)`
            (axes the graph owns are inside E), or `alibi(slopes)`, `relative(table)`. Differentiable.  -inf gives an
            edge the weight 0; a target whose biases are all -inf has a softmax of nothing, NaN, as in `torch.softmax`:
            to hide sources take their edges out of the graph, `graph - hidden`, which gives 0 where none is left.
        edge_key, edge_value: `(E, H, D)` or `(E, D)`, added to the source's key and value on that edge. Differentiable.
        softcap: c for c * tanh(score / c).
        dropout: probability of dropping an edge after the softmax; the rest is scaled by 1 / (1 - dropout).
        seed: which edges are dropped, the same on every backend (see `numerics.edge_hash`); None: torch's random state.
        backend: one of `BACKENDS`, which never falls back, or "auto".  Named, `dense`, `sdpa`, `tiles` and `flex` spread
            a NaN or inf of a source to targets that don't read it (auto looks for one first), and any of theirs spreads
            one in the upstream gradient of a target to the gradients of sources it doesn't read.

    Returns:
        `(..., T_q, D_v)` in q's dtype. A target that reads nothing gets exactly 0, and zero gradients.

    Raises:
        TypeError, ValueError: what was got, what was needed; an explicit backend that can't do exactly this.
    """
    if _is_list(graph):
        return _attend_parts(
            q, k, v, graph, scale=scale, score=score, bias=bias, edge_key=edge_key, edge_value=edge_value,
            softcap=softcap, dropout=dropout, seed=seed, backend=backend,
        )[0]  # fmt: skip
    if torch.compiler.is_compiling():
        return compiled.attend(
            q, k, v, graph, False, backend, scale=scale, score=score, bias=bias, edge_key=edge_key,  # type: ignore[arg-type]
            edge_value=edge_value, softcap=softcap, dropout=dropout, seed=seed,
        )[0]  # fmt: skip
    call = make_call(
        q, k, v, graph, scale=scale, score=score, bias=bias, edge_key=edge_key, edge_value=edge_value,  # type: ignore[arg-type]
        softcap=softcap, dropout=dropout, seed=seed,
    )  # fmt: skip
    return _shaped(_run(call, backend)[0], q)


def attend_lse(
    q: Tensor, k: Tensor, v: Tensor, graph: Graph | Sequence[Graph], *, backend: str = "auto", **options: Any
) -> tuple[Tensor, Tensor]:
    """`attend`, and the log-sum-exp of each target's scores, `(..., T_q)`, float32 or float64; both differentiable.

    -inf for a target that reads nothing.  `merge` unites several such results.  Dropout does not enter lse.
    """
    if _is_list(graph):
        return _attend_parts(q, k, v, graph, backend=backend, **options)
    if torch.compiler.is_compiling():
        return compiled.attend(q, k, v, graph, True, backend, **options)  # type: ignore[arg-type]
    out, lse = _run(make_call(q, k, v, graph, want_lse=True, **options), backend)  # type: ignore[arg-type]
    assert lse is not None
    return _shaped(out, q), lse.reshape(q.shape[:-1])


def weights(
    q: Tensor, k: Tensor, graph: Graph, *, scale: float | None = None, score: Any = None, bias: Any = None,
    edge_key: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """The attention weight of every edge, in edge order: `(..., E)`, without the axes the graph owns.

    `(B, H, E)` for a plain graph and 4-D q, `(H, E)` for a `(B, 1)` graph, `(E,)` for a `(B, H)` graph or 2-D q.
    The weights of one target sum to 1.  Differentiable; costs a vector per edge.
    """
    call = make_call(
        q, k, k, graph, scale=scale, score=score, bias=bias, edge_key=edge_key, softcap=softcap
    )  # fmt: skip
    return _per_edge(_module("edges").weights(call), call, q)


def edge_scores(
    q: Tensor, k: Tensor, graph: Graph, *, scale: float | None = None, score: Any = None, bias: Any = None,
    edge_key: Tensor | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """The score of every edge before the softmax, in edge order and shaped as `weights` gives them.

    In float32, or float64 for float64.  Differentiable; costs a vector per edge.  The graph may be any set of pairs, as
    in attention that is trained to tell edges from pairs that are none (Kim and Oh 2021, section 3).
    """
    call = make_call(
        q, k, k, graph, scale=scale, score=score, bias=bias, edge_key=edge_key, softcap=softcap
    )  # fmt: skip
    # sampled products are several times as fast as gathered vectors, but dear for a few edges
    sampled = (
        q.device.type == "cpu"
        and call.lead == (1, 1)
        and call.graph.num_edges >= 2**12
        and not torch.compiler.is_compiling()
        and _module("csr").why_not(call) is None
    )
    return _per_edge(_module("csr" if sampled else "edges").scores(call), call, q)


def _per_edge(x: Tensor, call: Call, q: Tensor) -> Tensor:
    """`(nb, nh, E)` without the axes the graph owns, otherwise with those of q."""
    bg, hg = call.lead
    if q.dim() == 2:
        return x[0, 0]
    if bg > 1:
        return x[0, 0] if hg > 1 else x[0]
    if hg > 1:
        return x[:, 0]
    return x.reshape(*q.shape[:-2], x.shape[-1])


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """`(out, lse)` over a union of disjoint edge sets, from the `(out, lse)` of each; exact and differentiable.

    out (..., T_q, D_v), lse (..., T_q).  Splitting the sources of a graph in any way and merging gives the same answer.
    """
    parts = list(parts)
    if not parts:
        raise ValueError("merge needs at least one (out, lse)")
    outs, lses = [p[0] for p in parts], [p[1] for p in parts]
    for out, lse in parts:
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"parts to merge need one shape, out (..., T_q, D_v) and lse (..., T_q); got {tuple(out.shape)} and "
                f"{tuple(lse.shape)} beside {tuple(outs[0].shape)}"
            )
    return merge_parts(outs, lses)


def explain(
    graph: Graph, q: Tensor, k: Tensor, v: Tensor, *, want_lse: bool = False, backend: str = "auto", **options: Any
) -> Explanation:
    """For this call, every backend: can it, its estimated seconds and memory, and why it was or was not chosen."""
    call = make_call(q, k, v, graph, want_lse=want_lse, **options)
    ranked = _ranked(call)
    best = ranked[0][1] if backend == "auto" else backend
    if best in _SPREADS_NAN and backend == "auto" and _hides_nonfinite(call):
        best = next(name for _, name in ranked if name not in _SPREADS_NAN)
    able = {name: seconds for seconds, name in ranked}
    rows = []
    for name in BACKENDS:
        module, missing = _try_module(name)
        reason = missing if module is None else module.why_not(call)
        if reason is not None or module is None:
            rows.append(Estimate(name, None, 0, False, f"can't: {reason}"))
            continue
        size = _memory(module, call)
        seconds = _seconds(name, module, call)
        if name == best:
            why = "the cheapest that can" if backend == "auto" else "asked for"
        elif not math.isfinite(seconds):
            why = "the definition, never chosen by itself"
        elif name not in able:
            why = f"needs {_size(size)}, over the memory budget of {_size(memory_budget(q.device))}"
        elif best in able and seconds < able[best]:
            why = "passed over: a source that is not read by every target holds NaN or inf, which this backend spreads"
        else:
            why = f"{seconds / able[best]:.3g} times the chosen estimate" if best in able else "can"
        rows.append(Estimate(name, seconds, size, name == best, why))
    return Explanation(rows)


def memory_budget(device: torch.device | str = "cpu") -> int:
    """Bytes `auto` lets one call use for intermediate results: half of the physical memory, or of the GPU's."""
    device = torch.device(device)
    return gpu.memory(device) // 2 if device.type == "cuda" else _BUDGET


def _physical_memory() -> int:
    """Bytes of the machine, or of the container if that is given less."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 8 * 2**30
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as f:
                return min(found, int(f.read()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return found


_BUDGET = _physical_memory() // 2


def _size(n: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.3g} {unit}"
        n /= 1024  # type: ignore[assignment]
    return f"{n:.3g} TiB"


_MODULES: dict[str, ModuleType | str] = {}


def _try_module(name: str) -> tuple[ModuleType | None, str | None]:
    """The backend's module, or why it can't be imported."""
    found = _MODULES.get(name)
    if found is None:
        try:
            found = importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:
            found = f"it can't be imported here ({error})"
        _MODULES[name] = found
    return (None, found) if isinstance(found, str) else (found, None)


def _module(name: str) -> ModuleType:
    module, why = _try_module(name)
    if module is None:
        raise ValueError(f"backend {name!r} is missing: {why}")
    return module


def _memory(module: ModuleType, call: Call) -> int:
    return module.memory(call) if hasattr(module, "memory") else 0


def _seconds(name: str, module: ModuleType, call: Call) -> float:
    """The backend's estimate, its part beyond the fixed price of a call times what calibration found on this machine."""
    estimate = module.cost(call)
    fixed = min(estimate, 1e-4)
    return fixed + (estimate - fixed) * cost.factor(name, call)


def _ranked(call: Call, quick: bool = False) -> list[tuple[float, str]]:
    """(estimated seconds, backend) of those that can within memory, cheapest first.

    `quick` leaves out a backend whose `floor(call)`, a bound that needs no look at the graph, is above an estimate.
    """
    found: list[tuple[float, str]] = []
    late = []
    for name in BACKENDS:
        module, _ = _try_module(name)
        if module is not None:
            if quick and hasattr(module, "floor"):
                late.append((name, module))
            else:
                _rank(name, module, call, found)
    for name, module in late:
        if not found or module.floor(call) * min(1.0, cost.factor(name, call)) < min(found)[0]:
            _rank(name, module, call, found)
    return sorted(found)


def _rank(name: str, module: ModuleType, call: Call, found: list[tuple[float, str]]) -> None:
    if module.why_not(call) is None:
        seconds = _seconds(name, module, call)
        if math.isfinite(seconds) and _memory(module, call) <= memory_budget(call.q.device):
            found.append((seconds, name))


def calibrate(seconds: float = 2.0, device: torch.device | str = "cpu") -> dict[str, float]:
    """Measure this machine for `auto`, about `seconds` long, and keep the result in the user's cache folder.

    Per backend, kind of graph and phase, the factor between measured and estimated time.  On a CPU `auto` does this by
    itself once, at the first call that takes long and whose choice is not clear; small calls never wait for it.  A GPU
    (`device="cuda"`) is measured only when asked to, since its kernels are compiled first, for a minute or so.

    Raises:
        ValueError: a device other than a CPU or a CUDA device that is here.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"calibrate measures a CPU or a CUDA device, got {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"calibrate can't measure {device}: this machine has no CUDA device")
    measured = ("dense", "sdpa", "csr", "tiles") + (("flex", "triton") if device.type == "cuda" else ("native",))
    found = {name: module for name in measured if (module := _try_module(name)[0]) is not None}
    return cost.calibrate(found, make_call, seconds=seconds, device=device)


def _choose(call: Call) -> str:
    """The cheapest backend, decided once per graph and kind of call."""
    q, k, v = call.q, call.k, call.v
    if transformed():  # values can't be looked at, and not every gradient is written for wrapped tensors
        return "native" if _module("native").why_not(call) is None else "edges"
    key = (
        "plan", q.shape, k.shape[1], v.shape[-1], q.dtype, call.score.name, call.needs_grad, call.want_lse,
        call.bias is None, call.position is None, call.edge_key is None, call.edge_value is None,
        call.softcap is None, call.dropout > 0, call.seed is None, torch.get_num_threads(), q.device,
    )  # fmt: skip
    cache = call.graph._cache
    plan = cache.get(key)
    if plan is None:
        ranked = _ranked(call, quick=True)
        if cost.worth_measuring(ranked, call):
            calibrate()
            ranked = _ranked(call, quick=True)
        safe = next((name for _, name in ranked if name not in _SPREADS_NAN), ranked[0][1])
        plan = cache[key] = (ranked[0][1], safe)
    name, safe = plan
    if name in _SPREADS_NAN and name != safe and _hides_nonfinite(call):
        return safe
    return name


def _hides_nonfinite(call: Call) -> bool:
    """A NaN or inf sits in a key or value that some target does not read.

    Sums find it in one pass.  On a GPU reading the answer would stall the queue, and inside a compiled region it would
    break it, so there dense backends are documented to spread it.
    """
    if call.q.device.type != "cpu" or torch.compiler.is_compiling() or call.graph.is_full():
        return False
    # a sum of finite halves may overflow; float32 holds it
    k, v = call.k.detach(), call.v.detach()
    total = k.sum(dtype=call.wide) + v.sum(dtype=call.wide)
    if call.needs_grad:  # a query reaches the gradients of every source, times 0 where it does not read
        total = total + call.q.detach().sum(dtype=call.wide)
    return not math.isfinite(total.item())


def _run(call: Call, backend: str) -> tuple[Tensor, Tensor | None]:
    if backend == "auto":
        module = _module(_choose(call))
    else:
        if backend not in BACKENDS:
            raise ValueError(f"backend must be 'auto' or one of {', '.join(BACKENDS)}; got {backend!r}")
        module = _module(backend)
        reason = module.why_not(call)
        if reason is not None:
            able = ", ".join(name for _, name in _ranked(call))
            raise ValueError(f"backend {backend!r} can't do this call: {reason}. These can: {able}, reference")
    if torch.is_autocast_enabled(call.q.device.type):  # inputs are cast already; what a backend does inside is its own
        with torch.autocast(call.q.device.type, enabled=False):
            return module.attend(call)
    return module.attend(call)


def _eager(
    q: Tensor, k: Tensor, v: Tensor, graph: Graph, backend: str, want_lse: bool, options: dict[str, Any]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`(out, lse if it is wanted, lse if _gradients can go on from it)`."""
    call = make_call(q, k, v, graph, want_lse=want_lse, **options)
    native = _module("native")
    keeps = (backend == "native" or (backend == "auto" and _choose(call) == "native")) and native.keeps(call)
    out, lse = _run(call, backend)
    if lse is not None:
        lse = lse.reshape(q.shape[:-1])
    return _shaped(out, q), lse if want_lse else None, lse if keeps else None


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, graph: Graph, options: dict[str, Any],
    out: Tensor, lse: Tensor, g_out: Tensor, g_lse: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Of q, k and v where _eager kept lse; a batch axis that was expanded is summed over."""
    call = make_call(q, k, v, graph, **options)
    four, three = call.q.shape[:3] + call.v.shape[3:], call.q.shape[:3]
    found = _module("native").gradients(
        call,
        out.reshape(four),
        lse.reshape(three),
        g_out.reshape(four),
        None if g_lse is None else g_lse.reshape(three),
    )
    return [
        (g if g.numel() == x.numel() else g.sum(0, keepdim=True)).reshape(x.shape)
        for g, x in zip(found, (q, k, v), strict=True)
    ]


compiled._eager, compiled._gradients = _eager, _gradients


def _shaped(out: Tensor, q: Tensor) -> Tensor:
    return out if q.dim() == 4 else out.reshape(*q.shape[:-1], out.shape[-1])


def _is_list(graph: Graph | Sequence[Graph]) -> TypeGuard[Sequence[Graph]]:
    return graph.__class__ is not Graph and isinstance(graph, Sequence) and not isinstance(graph, str)


def _attend_parts(
    q: Tensor, k: Tensor, v: Tensor, graphs: Sequence[Graph], *, backend: str = "auto", **options: Any
) -> tuple[Tensor, Tensor]:
    """Attend over each graph of a list and merge: exact iff no edge is in two of them, which is checked."""
    graphs = list(graphs)
    if not graphs:
        raise ValueError("the list of graphs is empty: graphattn.empty(t, s) reads nothing")
    for g in graphs:
        if not isinstance(g, Graph):
            raise TypeError(f"a list of graphs must hold Graphs, got {type(g).__name__}")
    for name in ("bias", "edge_key", "edge_value"):
        if isinstance(options.get(name), Tensor):
            raise ValueError(f"{name} is in the edge order of one graph: unite the list with | and pass that graph")
    _check_disjoint(graphs)
    return merge([attend_lse(q, k, v, g, backend=backend, **options) for g in graphs])


def _check_disjoint(graphs: list[Graph]) -> None:
    key = ("disjoint", tuple(id(g) for g in graphs[1:]))
    # the cached value holds the graphs, so that an id is not reused while the entry lives
    if key in graphs[0]._cache:
        return
    seen = graphs[0]
    for n, g in enumerate(graphs[1:], 1):
        both = seen & g
        if both.num_edges:
            target, source = (int(x[0]) for x in both.targets_sources())
            raise ValueError(
                f"graphs of a list must be disjoint, but edge {source} -> {target} is in graph {n} and in one before it"
                f" ({both.num_edges} such edges): subtract with -, or unite them with |"
            )
        seen = seen | g
    graphs[0].cached(key, lambda: tuple(graphs[1:]))
