"""Benchmarks behind a green gate: every contender is first equal to float64, then timed, interleaved in one process.

A *case* is a graph with sizes; a *contender* is one way to attend over it (a backend of ours, or a peer); a *phase*
is "fwd", "bwd" or "fwd+bwd".  Losing rows are printed like the others.  Times are medians.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import backends, patterns
from .graph import Graph
from .head import Head
from .scores import Additive

PHASES = ("fwd", "bwd", "fwd+bwd")
PEERS = ("sdpa", "flex", "pyg", "gather-scatter", "compiled gather-scatter", "torch.sparse")

Times = dict[tuple[str, str, str], float]


class Unavailable(Exception):
    """Why a contender can't enter a case."""


@dataclass(eq=False)
class Case:
    """A graph, the sizes around it, and who competes.

    `projections`: both sides also project `(N, head_dim)` features to queries, keys and values.
    `score`: "dot", or "additive" (GAT's attention part, `score(i, j) = leaky_relu(q_i + k_j, 0.2)`).
    `mask_mod`: the graph as a formula for FlexAttention; without it a table is indexed.
    """

    name: str
    graph: Graph
    batch: int = 1
    heads: int = 1
    kv_heads: int | None = None
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    phases: tuple[str, ...] = ("fwd", "fwd+bwd")
    peers: tuple[str, ...] = PEERS
    ours: tuple[str, ...] = ("auto",)
    projections: bool = False
    score: str = "dot"
    mask_mod: Callable[..., Tensor] | None = None

    def flops(self, phase: str) -> float:
        """Useful operations: 2 products of 2 D per edge forward, 5 backward."""
        products = {"fwd": 2, "bwd": 5, "fwd+bwd": 7}[phase]
        bg, hg = self.graph.lead or (1, 1)
        pairs = self.graph.num_edges * (self.batch // bg) * (self.heads // hg)
        return 2.0 * products * pairs * self.head_dim


@dataclass(eq=False)
class Contender:
    """`forward()` to a tensor that `common` brings to (B, H, T_q, D); gradients are those of `leaves`."""

    name: str
    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    common: Callable[[Tensor], Tensor] = lambda x: x
    setup_s: float = 0.0
    differentiable: bool = True
    threads: int | None = None


@dataclass
class Result:
    """One line of the table; times in seconds, None where it was not measured."""

    case: str
    contender: str
    phase: str
    seconds: float | None = None
    first: float | None = None
    best: float | None = None
    rounds: int = 0
    error: float | None = None
    peak_bytes: int | None = None
    preprocess_s: float | None = None
    gflops: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Figure:
    """A number promised of a row: `value(times)` beside `bound`; times maps (case, phase, contender) to seconds."""

    row: int
    text: str
    value: Callable[[Times], float]
    bound: float
    at_most: bool = False


@dataclass
class Report:
    """Everything one run found; `markdown()` and `json()` are its two forms."""

    machine: dict[str, Any]
    limits: dict[str, float]
    results: list[Result] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)

    def times(self) -> Times:
        return {(r.case, r.phase, r.contender): r.seconds for r in self.results if r.seconds is not None}

    def json(self) -> str:
        rows = [r.__dict__ for r in self.results]
        return json.dumps(
            {"machine": self.machine, "limits": self.limits, "results": rows, "figures": self.figures}, indent=1
        )

    def markdown(self) -> str:
        return _markdown(self)


# ---------------------------------------------------------------------- what a user calls


def run_bench(
    graph: Graph | None = None,
    *,
    rows: Sequence[int] = (),
    batch: int = 1,
    heads: int = 4,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype | str = torch.float32,
    phases: Sequence[str] = ("fwd", "fwd+bwd"),
    peers: Sequence[str] | None = None,
    ours: Sequence[str] | None = None,
    budget: float = 20.0,
    data: str | Path | None = None,
    name: str | None = None,
    json_path: str | Path | None = None,
    markdown_path: str | Path | None = None,
    echo: Callable[[str], None] | None = print,
) -> Report:
    """Time attention over your graph, or over presets, against every peer that is installed.

    Args:
        graph: the graph to time, with `batch`, `heads`, `kv_heads`, `head_dim`, `dtype`.
        rows: numbers of presets (see `presets`), beside or instead of `graph`.
        phases: of "fwd", "bwd", "fwd+bwd"; for `graph` only, presets have theirs.
        peers: of `PEERS`; default: what the case names (all, for `graph`).  One that is missing or can't is listed
            with the reason.
        ours: "auto" or names of backends, or "all"; default "auto" (presets: what the row compares).
        budget: seconds to spend on the timing of one case and phase.
        data: folder that holds `nodes/tolokers.npz`; default `../shared/data` from the working folder.  A row whose
            data is absent is listed with that reason.
        json_path, markdown_path: files to write.
        echo: called with each line as it is known; None for silence.

    Raises:
        ValueError: nothing to time, or an unknown row, peer, phase or dtype.
    """
    say = echo or (lambda line: None)
    if isinstance(dtype, str):
        named = getattr(torch, dtype, None)
        if not isinstance(named, torch.dtype):
            raise ValueError(f"dtype must be the name of a torch dtype such as float32, got {dtype!r}")
        dtype = named
    for what, given, known in (("phase", phases, PHASES), ("peer", peers or (), PEERS)):
        for x in given:
            if x not in known:
                raise ValueError(f"{what} must be one of {', '.join(known)}; got {x!r}")
    cases: list[Case] = []
    figures: list[Figure] = []
    skipped: list[Result] = []
    if graph is not None:
        cases.append(Case(name or repr(graph), graph, batch, heads, kv_heads, head_dim, dtype, tuple(phases)))
    for row in rows:
        try:
            more, promised = presets(row, data)
        except Unavailable as missing:
            skipped.append(Result(f"row {row}", "-", "-", why=str(missing)))
            continue
        cases += more
        figures += promised
    if not cases and not skipped:
        raise ValueError("nothing to time: give a graph, or rows of presets")
    report = Report(machine(), limits())
    report.results += skipped
    say(f"{report.machine['cpu']}, {report.machine['threads']} threads, torch {report.machine['torch']}")
    say(_limits_line(report.limits))
    for case in cases:
        if peers is not None:
            case.peers = tuple(p for p in peers if p in case.peers)
        if ours is not None:
            case.ours = tuple(n for n in backends.BACKENDS if n != "reference") if "all" in ours else tuple(ours)
            case.ours = tuple(dict.fromkeys(("auto", *case.ours))) if "all" in ours else case.ours
        for result in run_case(case, budget, say):
            report.results.append(result)
    again = limits()
    report.limits = {k: max(v, again[k]) for k, v in report.limits.items()}
    report.figures = [f for fig in figures if (f := _judge(fig, report.times(), report.limits)) is not None]
    for f in report.figures:
        say(f"row {f['row']}: {f['text']}: {f['value']:.3g} (wanted {f['wanted']}) {'ok' if f['met'] else 'MISSED'}")
    if json_path is not None:
        Path(json_path).write_text(report.json())
    if markdown_path is not None:
        Path(markdown_path).write_text(report.markdown())
    return report


def run_case(case: Case, budget: float = 20.0, say: Callable[[str], None] = lambda line: None) -> list[Result]:
    """Build, check and time every contender of one case, all phases."""
    say(f"\n{case.name}: {case.graph!r}, B={case.batch} H={case.heads} D={case.head_dim} {str(case.dtype)[6:]}")
    inputs = _Inputs(case)
    found: list[Result] = []
    alive: dict[str, tuple[Contender, float, float]] = {}
    for label, name in [*((f"ga {n}", n) for n in case.ours), *((_label(case, n), n) for n in case.peers)]:
        try:
            began = time.perf_counter()
            contender = _ours(inputs, name) if label.startswith("ga ") else _MAKE[name](inputs)
            contender.name, contender.setup_s = label, time.perf_counter() - began
            first, error = _gate(contender, inputs)
            alive[label] = (contender, first, error)
        except Unavailable as reason:
            found.append(Result(case.name, label, "-", why=str(reason)))
            say(f"  {label:<26} {'-':<8} {reason}")
        gc.collect()
    for phase in case.phases:
        entered = {n: c for n, (c, _, _) in alive.items() if c.differentiable or phase == "fwd"}
        times = _interleave(entered, phase, inputs.go_common, budget)
        for n, c in entered.items():
            median = sorted(times[n])[len(times[n]) // 2]
            r = Result(case.name, n, phase, median, times[n][0], min(times[n]), len(times[n]), alive[n][2])
            r.peak_bytes = peak_bytes(lambda c=c, phase=phase: _run(c, phase, inputs.go_common))  # type: ignore[misc]
            r.preprocess_s = max(0.0, c.setup_s + alive[n][1] - 2 * median) if phase == case.phases[0] else None
            r.gflops = case.flops(phase) / median / 1e9
            found.append(r)
            size = "-" if r.peak_bytes is None else f"{r.peak_bytes / 2**20:.1f} MiB"
            say(
                f"  {n:<26} {phase:<8} {median * 1e3:10.3f} ms (best {min(times[n]) * 1e3:.3f})  x{r.rounds:<3} "
                f"{r.gflops:7.1f} GFLOP/s  peak {size:>11}  err {r.error:.1e}"
            )
        for n, (c, _, _) in alive.items():
            if n not in entered:
                found.append(Result(case.name, n, phase, why=f"{c.name} has no gradient here"))
    return found


# ---------------------------------------------------------------------- inputs, gate, clock


class _Inputs:
    """Random inputs of a case, the cotangent, and the float64 answer on a sample of targets."""

    CELLS = 2**27  # multiply-adds times width that the float64 answer may cost

    def __init__(self, case: Case) -> None:
        self.case, g = case, case.graph
        make = torch.Generator().manual_seed(0)
        b, h, d = case.batch, case.heads, case.head_dim
        kv = case.kv_heads or h

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=make, dtype=torch.float32).to(case.dtype)

        self.head: Head | None = None
        if case.projections:
            self.x = normal(g.t, d).requires_grad_()
            self.head = Head(d, d, h, bias=True)
            with torch.no_grad():
                for p in self.head.parameters():
                    p.copy_(torch.randn(p.shape, generator=make) * d**-0.5)
            self.q = self.k = self.v = self.x
        else:
            width = 1 if case.score == "additive" else d
            self.q, self.k, self.v = normal(b, h, g.t, width), normal(b, kv, g.s, width), normal(b, kv, g.s, d)
            for x in (self.q, self.k, self.v):
                x.requires_grad_()
        self.scale = 1.0 if case.score == "additive" else d**-0.5
        self.go_common = normal(b, h, g.t, d)
        # the gate's cotangent lives on sampled targets only, so that all gradients are theirs
        bg, hg = g.lead or (1, 1)
        pairs = max(1, g.num_edges * (b // bg) * (h // hg) * d)
        if pairs <= 8 * self.CELLS:
            self.blocks = [(0, g.t)]
        else:
            size = max(1, min(64, g.t))
            count = max(1, int(g.t / size * 8 * self.CELLS / pairs))
            at = torch.linspace(0, g.t - size, count).long().tolist()
            self.blocks = [(a, a + size) for a in sorted(set(at))]
        self.rows = torch.cat([torch.arange(a, z) for a, z in self.blocks]).unique()
        self.go_gate = torch.zeros_like(self.go_common)
        self.go_gate[:, :, self.rows] = self.go_common[:, :, self.rows]
        self.answer = self._exact()

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        if self.head is not None:
            p = self.head
            assert p.query is not None
            return (self.x, *(w for m in (p.query, p.key, p.value) for w in (m.weight, m.bias)))
        return (self.q, self.k, self.v)

    def _exact(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        go = self.go_gate.double()
        if self.head is None:
            q, k, v = (x.detach().double() for x in (self.q, self.k, self.v))
            out, grads = exact(self.case.graph, q, k, v, go, self.blocks, self.scale, self.case.score)
            return out[:, :, self.rows], grads
        leaves = [x.detach().double().requires_grad_() for x in self.leaves]
        x, n, h, d = leaves[0], self.case.graph.t, self.case.heads, self.case.head_dim
        qkv = [F.linear(x, leaves[i], leaves[i + 1]).view(n, h, d).transpose(0, 1)[None] for i in (1, 3, 5)]
        q, k, v = (y.detach() for y in qkv)
        out, grads = exact(self.case.graph, q, k, v, go, self.blocks, self.scale, "dot")
        return out[:, :, self.rows], torch.autograd.grad(qkv, leaves, list(grads))


def exact(
    graph: Graph,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    go: Tensor,
    blocks: Iterable[tuple[int, int]],
    scale: float,
    score: str,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Attention and its gradient in the inputs' (double) precision, one block of targets at a time, by autograd.

    Shares no code with the backends.  `go` must be 0 outside the blocks; outputs are right inside them.
    """
    batch, heads, _, _ = q.shape
    group = heads // k.shape[1]
    out = q.new_zeros(go.shape)
    grads = tuple(torch.zeros_like(x) for x in (q, k, v))
    for b in range(batch if graph.lead or batch == 1 else 1):
        for h in range(heads if graph.lead and graph.lead[1] > 1 else 1):
            g = graph
            bs, hs = slice(None), slice(None)
            if graph.lead:
                g = graph.select(b if graph.lead[0] > 1 else 0, h if graph.lead[1] > 1 else 0)
                bs = slice(b, b + 1)
                hs = slice(h, h + 1) if graph.lead[1] > 1 else hs
            ks = slice(h // group, h // group + 1) if hs != slice(None) else hs
            for first, last in blocks:
                for a in range(first, last, 128):
                    z = min(a + 128, last)
                    _exact_block(g, q[bs, hs], k[bs, ks], v[bs, ks], go[bs, hs], out[bs, hs], tuple(
                        x[bs, s] for x, s in zip(grads, (hs, ks, ks), strict=True)), a, z, scale, score)  # fmt: skip
    return out, grads


def _exact_block(
    g: Graph, q: Tensor, k: Tensor, v: Tensor, go: Tensor, out: Tensor, grads: tuple[Tensor, ...], a: int, z: int,
    scale: float, score: str,
) -> None:  # fmt: skip
    lo, hi = int(g.indptr[a]), int(g.indptr[z])
    if lo == hi:
        return
    start, stop = g.start[lo:hi], g.stop[lo:hi]
    row = torch.repeat_interleave(torch.arange(z - a), g.indptr[a : z + 1].diff())
    low, high = int(start.min()), int(stop.max())
    edges = int((stop - start).sum())
    if edges * 32 >= (z - a) * (high - low):
        source = torch.arange(low, high)
        step = torch.zeros(z - a, high - low + 1, dtype=torch.int32)
        step[row, start - low] += 1
        step[row, stop - low] -= 1
        mask = step.cumsum(1)[:, :-1] > 0
    else:  # only the sources that some target of the block reads
        length = stop - start
        offset = torch.cumsum(length, 0) - length
        each = torch.repeat_interleave(start - offset, length) + torch.arange(edges)
        source, at = each.unique(return_inverse=True)
        mask = torch.zeros(z - a, source.numel(), dtype=torch.bool)
        mask[torch.repeat_interleave(row, length), at] = True
    qb, kb, vb = q[:, :, a:z], k.index_select(2, source), v.index_select(2, source)
    qb, kb, vb = (x.detach().requires_grad_() for x in (qb, kb, vb))
    group = q.shape[1] // k.shape[1]
    kk, vv = (x.repeat_interleave(group, 1) if group > 1 else x for x in (kb, vb))
    s = F.leaky_relu(qb + kk.mT, 0.2) if score == "additive" else qb @ kk.mT
    p = torch.softmax((s * scale).masked_fill(~mask, -math.inf), -1)
    p = p.masked_fill(~mask.any(1)[:, None], 0.0)
    o = p @ vv
    out[:, :, a:z] = o.detach()
    dq, dk, dv = torch.autograd.grad(o, (qb, kb, vb), go[:, :, a:z])
    grads[0][:, :, a:z] += dq
    grads[1].index_add_(2, source, dk)
    grads[2].index_add_(2, source, dv)


TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}


def _gate(c: Contender, inputs: _Inputs) -> tuple[float, float]:
    """Seconds of the first call, and the largest error relative to the largest entry; Unavailable if it is wrong."""
    want, grads = inputs.answer
    began = time.perf_counter()
    out = c.forward()
    first = time.perf_counter() - began
    worst = _error(c.common(out).detach()[:, :, inputs.rows], want)
    if c.differentiable:
        got = _grads(out, c, inputs.go_gate)
        common = [c.common(x) if inputs.head is None else x for x in got]
        # the gradient of a key's bias is 0 whatever the inputs: it is compared on the scale of the others
        floor = 1e-2 * max(float(y.abs().max()) for y in grads if y.numel())
        worst = max([worst, *(_error(x, y, floor) for x, y in zip(common, grads, strict=True))])
    if not worst <= TOLERANCE[inputs.case.dtype]:
        raise Unavailable(f"WRONG: differs from float64 by {worst:.2g} of the largest entry")
    return first, worst


def _error(got: Tensor, want: Tensor, floor: float = 0.0) -> float:
    """The largest difference relative to the largest entry, or to `floor` if that is more; NaN counts as infinite."""
    if want.numel() == 0:
        return 0.0
    size = max(float(want.abs().max()), floor) or 1.0
    worst = float((got.detach().double() - want).abs().max()) / size
    return math.inf if math.isnan(worst) else worst


def _grads(out: Tensor, c: Contender, go: Tensor) -> tuple[Tensor, ...]:
    # the inverse of `common` for the cotangent: whatever permutation brought out there brings it back
    shape = torch.empty_like(out)
    here = shape.copy_(out.detach())
    c.common(here).copy_(go)
    return torch.autograd.grad(out, c.leaves, here, allow_unused=True, materialize_grads=True)


def _run(c: Contender, phase: str, go: Tensor) -> float:
    """One call; seconds of the phase."""
    if phase == "fwd":
        with torch.no_grad():
            began = time.perf_counter()
            c.forward()
            return time.perf_counter() - began
    cot = _cotangent(c, go)
    began = time.perf_counter()
    out = c.forward()
    if phase == "bwd":
        began = time.perf_counter()
    torch.autograd.grad(out, c.leaves, cot, allow_unused=True, materialize_grads=True)
    return time.perf_counter() - began


_COT: dict[int, tuple[Tensor, Tensor]] = {}


def _cotangent(c: Contender, go: Tensor) -> Tensor:
    kept = _COT.get(id(c))
    if kept is None or kept[0] is not go:
        with torch.no_grad():
            here = torch.empty_like(c.forward())
            c.common(here).copy_(go)
        kept = _COT[id(c)] = (go, here)
    return kept[1]


def _interleave(contenders: dict[str, Contender], phase: str, go: Tensor, budget: float) -> dict[str, list[float]]:
    """Rounds in which each contender has one turn of a few milliseconds, until the budget of seconds is spent.

    A turn begins with a call that is not timed: after another contender the caches hold its data and the allocator has
    given its memory back, so the first call would time the change of contenders.
    """
    times: dict[str, list[float]] = {n: [] for n in contenders}
    _COT.clear()
    threads = torch.get_num_threads()
    order = list(contenders)
    for n in order:  # warm up
        with _threads(contenders[n].threads or threads):
            _run(contenders[n], phase, go)
    share = budget / max(1, len(order))
    spent = dict.fromkeys(order, 0.0)
    for turn in range(60):
        live = [n for n in order if len(times[n]) < 3 or spent[n] < share]
        if not live:
            break
        for n in live[turn % len(live) :] + live[: turn % len(live)]:
            with _threads(contenders[n].threads or threads):
                began = time.perf_counter()
                _run(contenders[n], phase, go)
                timed = time.perf_counter()
                while True:
                    times[n].append(_run(contenders[n], phase, go))
                    if time.perf_counter() - timed > 5e-3:
                        break
                spent[n] += time.perf_counter() - began
    _COT.clear()
    return times


@contextlib.contextmanager
def _threads(n: int) -> Any:
    before = torch.get_num_threads()
    if n != before:
        torch.set_num_threads(n)
    try:
        yield
    finally:
        if n != before:
            torch.set_num_threads(before)


def peak_bytes(f: Callable[[], Any]) -> int | None:
    """Bytes by which the resident memory rose at most while `f` ran; None where the system (not Linux) hides it."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        f()
        return max(0, _status("VmHWM") - before)
    except (OSError, AttributeError, KeyError):
        return None


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


# ---------------------------------------------------------------------- contenders


def _label(case: Case, name: str) -> str:
    if name == "sdpa":
        return "SDPA" if case.graph.is_full() or case.graph.is_causal() else "SDPA + mask"
    return {"flex": "Flex (compiled)", "pyg": "PyG"}.get(name, name)


def _fresh(graph: Graph) -> Graph:
    """An equal graph with nothing cached, so that preprocessing shows."""
    return Graph._new(graph.indptr, graph.start, graph.stop, graph.shape)


def _ours(inputs: _Inputs, name: str) -> Contender:
    name, _, threads = name.partition("@")
    graph, case = _fresh(inputs.case.graph), inputs.case
    score = Additive(0.2) if case.score == "additive" else None
    if name != "auto":
        module, missing = backends._try_module(name)
        if module is None:
            raise Unavailable(str(missing))
    with torch.enable_grad():
        if name != "auto":
            q, k, v = (inputs.q, inputs.k, inputs.v) if inputs.head is None else inputs.head.project(inputs.x)
            call = backends.make_call(q, k, v, graph, score=score)
            reason = module.why_not(call)  # type: ignore[union-attr]
            if reason is not None:
                raise Unavailable(reason)
            if backends._memory(module, call) > backends.memory_budget():  # type: ignore[arg-type]
                raise Unavailable("over the memory budget")
    count = int(threads) if threads else None
    if inputs.head is not None:
        head, x = inputs.head, inputs.x
        common = _by_head(case)
        return Contender(name, lambda: head(x, graph, backend=name), inputs.leaves, common, threads=count)
    q, k, v = inputs.q, inputs.k, inputs.v
    return Contender(
        name, lambda: backends.attend(q, k, v, graph, score=score, backend=name), inputs.leaves, threads=count
    )


def _by_head(case: Case) -> Callable[[Tensor], Tensor]:
    """(N, H * D) or (N, H, D) to (1, H, N, D), as a view."""
    return lambda x: x.view(x.shape[0], case.heads if x.dim() == 2 else x.shape[1], -1).transpose(0, 1)[None]


def _dot_only(inputs: _Inputs, projections: bool = False) -> Case:
    case = inputs.case
    if case.score != "dot":
        raise Unavailable(f"it multiplies queries and keys, and the score is {case.score}")
    if case.projections and not projections:
        raise Unavailable("it has no projections of its own")
    return case


def _sdpa(inputs: _Inputs) -> Contender:
    case, g = _dot_only(inputs), inputs.case.graph
    q, k, v = inputs.q, inputs.k, inputs.v
    gqa: dict[str, Any] = {"enable_gqa": True} if k.shape[1] != q.shape[1] else {}
    if g.is_full() or (g.is_causal() and g.t == g.s):
        causal = not g.is_full()
        return Contender("", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, **gqa), inputs.leaves)
    if g.rows * g.s > 2**28 or 4 * case.batch * case.heads * g.t * g.s > 2**33:
        raise Unavailable(f"its mask has {g.rows * g.s:,} cells")
    mask = g.dense()
    if bool((g.degree() == 0).any()):
        raise Unavailable("a target reads nothing, which it does not define")
    return Contender("", lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **gqa), inputs.leaves)


_FLEX: dict[str, Any] = {}


def _flex(inputs: _Inputs) -> Contender:
    case, g = _dot_only(inputs), inputs.case.graph
    if g.lead or case.kv_heads not in (None, case.heads):
        raise Unavailable("not written for leading axes here")
    if g.t > 16_384 or g.s > 16_384 or min(g.t, g.s) < 128:
        raise Unavailable(f"create_block_mask reads all {g.t * g.s:,} cells")
    if importlib.util.find_spec("torch.nn.attention.flex_attention") is None:
        raise Unavailable("this torch has no flex_attention")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mod = case.mask_mod
    if mod is None:
        table = g.dense()

        def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return table[i, j]

    try:
        block = create_block_mask(mod, None, None, g.t, g.s, device="cpu")
        run = _FLEX.setdefault("f", torch.compile(flex_attention, dynamic=False))
        q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))

        def forward() -> Tensor:
            with torch.no_grad():
                return run(q, k, v, block_mask=block)

        forward()
    except Exception as error:  # a compiler that is missing, a size it does not take
        raise Unavailable(f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}") from None
    return Contender("", forward, (), differentiable=False)


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return backends.memory_budget()


def _edge_list(inputs: _Inputs, vectors: float) -> tuple[Case, Tensor]:
    """The case and its edge_index, if `vectors` rows per edge and head fit into memory."""
    case, g = inputs.case, inputs.case.graph
    if g.lead or case.batch != 1 or case.kv_heads not in (None, case.heads):
        raise Unavailable("it takes one graph with one sample and as many key as query heads")
    need = int(vectors * g.num_edges * case.heads * case.head_dim * inputs.q.element_size())
    if need > 0.8 * _available():
        raise Unavailable(f"its vectors per edge need about {need / 2**30:.0f} GiB")
    row, source = g.edges()
    return case, torch.stack([source, row])


def _by_node(inputs: _Inputs) -> list[Tensor]:
    """q, k, v as (N, H, D) leaves, what libraries of graph networks use."""
    return [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]


def _pyg(inputs: _Inputs) -> Contender:
    if importlib.util.find_spec("torch_geometric") is None:
        raise Unavailable("torch_geometric is not installed")
    from torch_geometric.nn import GATConv, TransformerConv

    case, edge_index = _edge_list(inputs, 6.5)
    g, common = case.graph, _by_head(case)
    if case.score == "additive":
        gat = GATConv(case.head_dim, case.head_dim, case.heads, negative_slope=0.2, add_self_loops=False, bias=False)
        q, k, v = _by_node(inputs)

        def attention_part() -> Tensor:
            alpha = gat.edge_updater(edge_index, alpha=(k.squeeze(-1), q.squeeze(-1)), edge_attr=None, size=(g.s, g.t))
            return gat.propagate(edge_index, x=(v, v), alpha=alpha, size=(g.s, g.t))

        return Contender("", attention_part, (q, k, v), common)
    conv = TransformerConv(case.head_dim, case.head_dim, case.heads, root_weight=False)
    if inputs.head is not None:
        for mine, theirs in (
            (inputs.head.query, conv.lin_query),
            (inputs.head.key, conv.lin_key),
            (inputs.head.value, conv.lin_value),
        ):
            theirs.weight, theirs.bias = mine.weight, mine.bias  # type: ignore[union-attr]
        x = inputs.x
        return Contender("", lambda: conv(x, edge_index), inputs.leaves, common)
    q, k, v = _by_node(inputs)

    def messages() -> Tensor:
        return conv.propagate(edge_index, query=q, key=k, value=v, edge_attr=None, size=(g.s, g.t))

    return Contender("", messages, (q, k, v), common)


def _gather_scatter(q: Tensor, k: Tensor, v: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Gather, softmax per target, scatter-add, as one writes it by hand; (N, H, D)."""
    s = (q.index_select(0, target) * k.index_select(0, source)).sum(-1) * q.shape[-1] ** -0.5  # (E, H)
    where = target.unsqueeze(1).expand_as(s)
    peak = s.new_full((q.shape[0], s.shape[1]), -math.inf).scatter_reduce(0, where, s.detach(), "amax")
    e = torch.exp(s - peak.index_select(0, target))
    total = torch.zeros_like(peak).index_add(0, target, e)
    p = e / total.index_select(0, target)
    message = p.unsqueeze(-1) * v.index_select(0, source)
    return v.new_zeros(q.shape[0], *v.shape[1:]).index_add(0, target, message)


def _scatter(inputs: _Inputs, compiled: bool = False) -> Contender:
    _dot_only(inputs)
    case, edge_index = _edge_list(inputs, 3 if compiled else 6.5)
    q, k, v = _by_node(inputs)
    source, target = edge_index[0].contiguous(), edge_index[1].contiguous()
    run = torch.compile(_gather_scatter, dynamic=False) if compiled else _gather_scatter
    try:
        if compiled:
            torch.autograd.grad(run(q, k, v, source, target).sum(), (q, k, v))
    except Exception as error:
        raise Unavailable(f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}") from None
    return Contender("", lambda: run(q, k, v, source, target), (q, k, v), _by_head(case))


def _sparse(inputs: _Inputs) -> Contender:
    """sampled_addmm, a segment softmax and a sparse product; its own gradient allocates N x N, so forward only."""
    case, g = _dot_only(inputs), inputs.case.graph
    if (
        g.lead
        or case.batch * case.heads > 8
        or case.kv_heads not in (None, case.heads)
        or case.dtype not in (torch.float32, torch.float64)
    ):
        raise Unavailable("one product per sample and head in float32 or float64: not written for this case")
    crow, col = g.edge_ptr(), g.edges()[1]
    q, k, v = (x.detach()[0] for x in (inputs.q, inputs.k, inputs.v))
    degree = crow.diff()

    def forward() -> Tensor:
        outs = []
        for h in range(case.heads):
            zero = torch.sparse_csr_tensor(
                crow, col, torch.zeros(col.numel(), dtype=q.dtype), (g.t, g.s), check_invariants=False
            )
            s = torch.sparse.sampled_addmm(zero, q[h], k[h].mT).values() * inputs.scale
            peak = torch.segment_reduce(s, "max", offsets=crow)
            e = torch.exp(s - torch.repeat_interleave(peak, degree, output_size=s.numel()))
            total = torch.segment_reduce(e, "sum", offsets=crow, initial=0.0)
            p = e / torch.repeat_interleave(total, degree, output_size=s.numel())
            outs.append(
                torch.sparse.mm(torch.sparse_csr_tensor(crow, col, p, (g.t, g.s), check_invariants=False), v[h])
            )
        return torch.stack(outs)[None]

    return Contender("", forward, (), differentiable=False)


_MAKE: dict[str, Callable[[_Inputs], Contender]] = {
    "sdpa": _sdpa,
    "flex": _flex,
    "pyg": _pyg,
    "gather-scatter": _scatter,
    "compiled gather-scatter": lambda inputs: _scatter(inputs, True),
    "torch.sparse": _sparse,
}


# ---------------------------------------------------------------------- presets


def presets(row: int, data: str | Path | None = None) -> tuple[list[Case], list[Figure]]:
    """The cases and promised figures of one row of the table; `Unavailable` if its data is absent.

    1 window, 2 long window, 3 random degree 16, 4 causal and full, 5 prefix and documents, 6 BigBird, 7 tolokers,
    8 Cora, 9 random masks, 10 a million tokens, 15 without a compiler, 16 every second target reads all.
    (11, 12: share of the limit is in row 1, `auto` against the fastest backend is a figure of every row run with
    `ours=["all"]`.)

    Raises:
        ValueError: no such row.
    """
    if row not in _ROWS:
        raise ValueError(f"there is no row {row}: rows are {', '.join(map(str, _ROWS))}")
    return _ROWS[row](Path(data) if data is not None else Path("../shared/data"))


def _ratio(row: int, case: str, phase: str, peer: str, bound: float, ours: str = "ga auto", text: str = "") -> Figure:
    return Figure(
        row, f"{case}, {phase}, {peer} / {text or ours}", lambda t: t[case, phase, peer] / t[case, phase, ours], bound
    )


def _row_1(data: Path) -> tuple[list[Case], list[Figure]]:
    t, name = 4096, "window 129, T=4096"
    case = Case(name, patterns.window(t, 129), heads=4, mask_mod=lambda b, h, i, j: (j <= i) & (j > i - 129))

    def share(t: Times) -> float:
        return 100 * case.flops("fwd") / t[name, "fwd", "ga auto"] / t["limit", "", "sgemm"]

    return [case], [
        _ratio(1, name, "fwd", "SDPA + mask", 25),
        _ratio(1, name, "fwd", "Flex (compiled)", 4.5),
        _ratio(1, name, "fwd+bwd", "SDPA + mask", 12),
        Figure(11, f"{name}, fwd, share of sgemm in %", share, 45),
    ]


def _row_2(data: Path) -> tuple[list[Case], list[Figure]]:
    names = ["window 129, T=4096", "window 129, T=65536"]
    cases = [Case(n, patterns.window(t, 129), heads=4, peers=()) for n, t in zip(names, (4096, 65536), strict=True)]
    return cases, [
        Figure(
            2,
            f"T=65536 / T=4096, {p}",
            lambda t, p=p: t[names[1], p, "ga auto"] / t[names[0], p, "ga auto"],  # type: ignore[misc]
            17,
            True,  # type: ignore[misc]
        )  # type: ignore[misc]
        for p in ("fwd", "fwd+bwd")
    ]


def random_degree(t: int, degree: int, seed: int = 0) -> Graph:
    """Each target reads `degree` sources drawn at random (duplicates collapse)."""
    make = torch.Generator().manual_seed(seed)
    source = torch.randint(0, t, (t, degree), generator=make)
    return Graph.from_keys((source + torch.arange(t)[:, None] * (t + 1)).reshape(-1), (t, t), owned=True)


def _row_3(data: Path) -> tuple[list[Case], list[Figure]]:
    g = random_degree(100_000, 16)
    with_, alone = "random degree 16, N=100,000, with projections", "random degree 16, N=100,000"
    cases = [
        Case(with_, g, projections=True, peers=("pyg",)),
        Case(
            alone, g, peers=("pyg", "gather-scatter", "compiled gather-scatter", "torch.sparse"), ours=("auto", "csr")
        ),
    ]
    return cases, [
        _ratio(3, with_, "fwd", "PyG", 18),
        _ratio(3, with_, "fwd+bwd", "PyG", 14),
        _ratio(3, alone, "fwd", "ga csr", 2.2),
        _ratio(3, alone, "fwd+bwd", "compiled gather-scatter", 20),
    ]


def _row_4(data: Path) -> tuple[list[Case], list[Figure]]:
    cases, figures = [], []
    for kind, make in (("causal", patterns.causal), ("full", patterns.full)):
        for t in (256, 1024, 4096):
            name = f"{kind}, T={t}"
            cases.append(Case(name, make(t), heads=4, peers=("sdpa",)))
            figures.append(_ratio(4, name, "fwd+bwd", "SDPA", 0.97))
            if t >= 1024:
                figures.append(_ratio(4, name, "fwd", "SDPA", 0.97))
    name = "causal, T=2048, one head"
    cases.append(Case(name, patterns.causal(2048), phases=("fwd", "bwd", "fwd+bwd"), peers=("sdpa",)))
    return cases, [*figures, _ratio(4, name, "bwd", "SDPA", 1.5)]


def _row_5(data: Path) -> tuple[list[Case], list[Figure]]:
    t = 4096
    row = torch.arange(t + 1)
    first = Graph._new(row, torch.zeros(t, dtype=torch.int64), torch.full((t,), 512), (t, t))
    found = [
        ("prefix 512, T=4096", patterns.prefix(t, 512), lambda b, h, i, j: (j <= i) | (j < 512), 1.7),
        ("the first 512 of T=4096", first, lambda b, h, i, j: (j < 512) & (i >= 0), 1.7),
        ("16 documents of 256", patterns.documents([256] * 16), lambda b, h, i, j: i // 256 == j // 256, 8),
    ]
    cases = [Case(name, g, heads=4, peers=("sdpa", "flex"), mask_mod=mod) for name, g, mod, _ in found]
    return cases, [_ratio(5, name, "fwd+bwd", "SDPA + mask", bound) for name, _, _, bound in found]


def bigbird(t: int, block: int = 64, seed: int = 0) -> Graph:
    """Zaheer et al. 2020 in blocks: a window of 3, 2 global blocks, 3 random blocks for each."""
    n = t // block
    make = torch.Generator().manual_seed(seed)
    near = (torch.arange(n)[:, None] - torch.arange(n)).abs() <= 1
    near[:2], near[:, :2] = True, True
    near.scatter_(1, torch.rand(n, n, generator=make).masked_fill(near, -1.0).topk(3, 1).indices, True)
    mask = near.repeat_interleave(block, 0)
    row, at = mask.nonzero(as_tuple=True)
    return Graph._from_pieces(row, at * block, (at + 1) * block, (n * block, n * block))


def _row_6(data: Path) -> tuple[list[Case], list[Figure]]:
    name = "BigBird, T=4096"
    return [Case(name, bigbird(4096), heads=4, peers=("sdpa", "flex"))], [_ratio(6, name, "fwd+bwd", "SDPA + mask", 5)]


def _row_7(data: Path) -> tuple[list[Case], list[Figure]]:
    z = _npz(data / "nodes" / "tolokers.npz")
    a, b = torch.from_numpy(z["edges"]).T
    n = z["node_features"].shape[0]
    keys = torch.cat([a * (n + 1) + b, b * (n + 1) + a])
    name = "tolokers, H=8, D=64"
    case = Case(name, Graph.from_keys(keys, (n, n)), heads=8, peers=("pyg",), ours=("auto", "auto@1"))
    threads = [Figure(7, f"{name}, {p}, 1 thread / {torch.get_num_threads()} threads",
                      lambda t, p=p: t[name, p, "ga auto@1"] / t[name, p, "ga auto"], 1.7) for p in ("fwd", "fwd+bwd")]  # type: ignore[misc]  # fmt: skip
    return [case], [_ratio(7, name, "fwd+bwd", "PyG", 20), *threads]


def _row_8(data: Path) -> tuple[list[Case], list[Figure]]:
    z = _npz(data / "nodes" / "planetoid_cora.npz")
    source, target = torch.from_numpy(z["edge_index"]).long()
    n, name = int(z["num_nodes"]), "Cora, H=8, D=8, GAT"
    case = Case(
        name, Graph.from_keys(target * (n + 1) + source, (n, n)), heads=8, head_dim=8, score="additive", peers=("pyg",)
    )
    return [case], [
        _ratio(8, name, "fwd", "PyG", 5),
        Figure(8, f"{name}, fwd, ms", lambda t: t[name, "fwd", "ga auto"] * 1e3, 0.3, True),
    ]


def random_mask(t: int, density: float, seed: int = 0) -> Graph:
    """Each pair an edge with probability `density`; everyone reads itself."""
    make = torch.Generator().manual_seed(seed)
    mask = (torch.rand(t, t, generator=make) < density).fill_diagonal_(True)
    row, source = mask.nonzero(as_tuple=True)
    return Graph.from_keys(row * (t + 1) + source, (t, t), owned=True)


def _row_9(data: Path) -> tuple[list[Case], list[Figure]]:
    cases, figures = [], []
    for percent in (1, 5, 20, 50):
        name = f"random mask of {percent} %, T=2048, H=8"
        peers = ("sdpa", "flex") if percent > 1 else ("sdpa", "flex", "pyg", "compiled gather-scatter", "torch.sparse")
        cases.append(Case(name, random_mask(2048, percent / 100), heads=8, peers=peers))

        for phase in ("fwd", "fwd+bwd"):
            bound = 4 if percent == 1 else 0.95
            figures.append(Figure(9, f"{name}, {phase}, best peer / ga auto", _best_peer(name, phase), bound))
    return cases, figures


def _best_peer(case: str, phase: str) -> Callable[[Times], float]:
    def value(t: Times) -> float:
        peers = [s for (c, p, n), s in t.items() if (c, p) == (case, phase) and not n.startswith("ga ")]
        return min(peers) / t[case, phase, "ga auto"]

    return value


def _row_10(data: Path) -> tuple[list[Case], list[Figure]]:
    name = "window 129, T=1,048,576"
    case = Case(name, patterns.window(2**20, 129), peers=(), phases=("fwd+bwd",))
    return [case], [Figure(10, f"{name}, fwd+bwd, seconds", lambda t: t[name, "fwd+bwd", "ga auto"], 5, True)]


def _row_15(data: Path) -> tuple[list[Case], list[Figure]]:
    g, window, random_ = random_degree(100_000, 16), "window 129, T=4096, tiles", "random degree 16, csr"
    cases = [
        Case(window, patterns.window(4096, 129), heads=4, peers=("sdpa",), ours=("tiles",)),
        Case(random_, g, projections=True, peers=("pyg",), ours=("csr",)),
    ]
    return cases, [
        _ratio(15, window, "fwd", "SDPA + mask", 8, "ga tiles"),
        _ratio(15, random_, "fwd", "PyG", 7, "ga csr"),
        _ratio(15, random_, "fwd+bwd", "PyG", 5, "ga csr"),
    ]


def _row_16(data: Path) -> tuple[list[Case], list[Figure]]:
    t = 16_384
    indptr = (torch.arange(t + 1) + 1) // 2
    half = Graph._new(indptr, torch.zeros(t // 2, dtype=torch.int64), torch.full((t // 2,), t), (t, t))
    names = ["every second target reads all, T=16,384", "full, T=16,384"]
    cases = [Case(n, g, peers=(), phases=("fwd+bwd",)) for n, g in zip(names, (half, patterns.full(t)), strict=True)]

    def value(x: Times) -> float:
        return 2 * x[names[0], "fwd+bwd", "ga auto"] / x[names[1], "fwd+bwd", "ga auto"]

    return cases, [Figure(16, "time per edge / that of full", value, 1.5, True)]


_ROWS: dict[int, Callable[[Path], tuple[list[Case], list[Figure]]]] = {
    1: _row_1, 2: _row_2, 3: _row_3, 4: _row_4, 5: _row_5, 6: _row_6, 7: _row_7, 8: _row_8, 9: _row_9, 10: _row_10,
    15: _row_15, 16: _row_16,
}  # fmt: skip


def _npz(path: Path) -> Any:
    if not path.is_file():
        raise Unavailable(f"{path.name} is not in {path.parent}")
    import numpy as np

    return np.load(path)


# ---------------------------------------------------------------------- machine, limits, tables, plots


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": cpu, "isa": torch.backends.cpu.get_cpu_capability(), "cores": os.cpu_count(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "python": platform.python_version(),
    }  # fmt: skip


def limits(seconds: float = 0.4) -> dict[str, float]:
    """What this machine can do: sgemm in flop/s; copy, and gather of rows of 64 floats, in bytes moved per second."""

    def best(f: Callable[[], Any]) -> float:
        f()
        end = time.perf_counter() + seconds
        times: list[float] = []
        while time.perf_counter() < end or len(times) < 3:
            began = time.perf_counter()
            f()
            times.append(time.perf_counter() - began)
        return min(times)

    with torch.no_grad():
        a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
        c = torch.empty(1024, 1024)
        sgemm = 2 * 1024**3 / best(lambda: torch.mm(a, b, out=c))
        x, y = torch.zeros(2**24), torch.empty(2**24)
        copy = 2 * 4 * 2**24 / best(lambda: y.copy_(x))
        table, at = torch.randn(100_000, 64), torch.randint(0, 100_000, (200_000,))
        rows = torch.empty(200_000, 64)
        gather = 2 * 4 * rows.numel() / best(lambda: torch.index_select(table, 0, at, out=rows))
    return {"sgemm": sgemm, "copy": copy, "row gather": gather}


def _limits_line(x: dict[str, float]) -> str:
    sgemm, copy, gather = (x[n] / 1e9 for n in ("sgemm", "copy", "row gather"))
    return f"limits: sgemm {sgemm:.0f} GFLOP/s, copy {copy:.1f} GB/s, row gather {gather:.1f} GB/s"


def _judge(figure: Figure, times: Times, limit: dict[str, float]) -> dict[str, Any] | None:
    try:
        value = figure.value({**times, **{("limit", "", k): v for k, v in limit.items()}})
    except (KeyError, ValueError):  # a contender did not run, which the table shows
        return None
    met = value <= figure.bound if figure.at_most else value >= figure.bound
    sign = "<=" if figure.at_most else ">="
    return {"row": figure.row, "text": figure.text, "value": value, "wanted": f"{sign} {figure.bound:g}", "met": met}


def auto_against_best(report: Report) -> list[tuple[str, str, str, float]]:
    """(case, phase, fastest backend, auto's time / its time), for cases that timed both."""
    out = []
    times = report.times()
    for (case, phase, name), seconds in times.items():
        if name == "ga auto":
            own = {
                n: s
                for (c, p, n), s in times.items()
                if (c, p) == (case, phase) and n.startswith("ga ") and "auto" not in n
            }
            if own:
                best = min(own, key=own.__getitem__)
                out.append((case, phase, best[3:], seconds / own[best]))
    return out


def _markdown(report: Report) -> str:
    m = report.machine
    lines = [
        f"{m['cpu']} ({m['isa']}), {m['threads']} threads, torch {m['torch']}; medians of one process; "
        f"{_limits_line(report.limits)}.",
        "",
        "`/ auto`: how many times as long as `ga auto` (below 1: auto loses). `pays after`: calls until preprocessing "
        "is won back from the slowest.",
    ]
    times = report.times()
    head = "contender", "phase", "ms", "best ms", "/ auto", "GFLOP/s", "peak MiB", "prepare ms", "pays after", "error"
    for case in dict.fromkeys(r.case for r in report.results):
        lines += ["", f"### {case}", "", _row(*head), "|---|---|" + "---:|" * (len(head) - 2)]
        for r in (r for r in report.results if r.case == case):
            if r.seconds is None or r.best is None:
                lines.append(_row(r.contender, r.phase, r.why, *[""] * (len(head) - 3)))
                continue
            auto = times.get((case, r.phase, "ga auto"))
            slowest = max(s for (c, p, _), s in times.items() if (c, p) == (case, r.phase))
            pays = ""
            if r.preprocess_s is not None and slowest > r.seconds:
                pays = str(math.ceil(r.preprocess_s / (slowest - r.seconds)))
            lines.append(
                _row(
                    r.contender,
                    r.phase,
                    f"{r.seconds * 1e3:.3f}",
                    f"{r.best * 1e3:.3f}",
                    "" if auto is None else f"{r.seconds / auto:.2f}",
                    "" if r.gflops is None else f"{r.gflops:.1f}",
                    "" if r.peak_bytes is None else f"{r.peak_bytes / 2**20:.1f}",
                    "" if r.preprocess_s is None else f"{r.preprocess_s * 1e3:.1f}",
                    pays,
                    f"{r.error:.1e}",
                )
            )
    against = auto_against_best(report)
    if against:
        lines += ["", "### auto against the fastest backend", "", _row("case", "phase", "fastest", "auto / fastest")]
        lines += ["|---|---|---|---:|", *(_row(c, p, b, f"{x:.2f}") for c, p, b, x in against)]
    if report.figures:
        lines += ["", "### figures", "", _row("row", "figure", "measured", "wanted", ""), "|---:|---|---:|---|---|"]
        for f in report.figures:
            met = "met" if f["met"] else "**missed**"
            lines.append(_row(f["row"], f["text"], f"{f['value']:.3g}", f["wanted"], met))
    return "\n".join(lines) + "\n"


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def plot_crossover(
    path: str | Path,
    densities: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    t: int = 1024,
    budget: float = 2.0,
    **sizes: Any,
) -> Report:
    """Time of dense and of sparse routes against density, and where they cross: random masks of T x T.

    Writes a picture to `path` (its suffix is the format) and returns the report behind it.
    """
    own: dict[str, Any] = {"heads": 4, "ours": ("auto",), "peers": ("sdpa", "torch.sparse"), **sizes}
    cases = [Case(f"{d:g}", random_mask(t, d), **own) for d in densities]
    return _plot(cases, list(densities), "share of pairs that are edges", f"random masks, T={t}", path, budget)


def plot_scaling(
    path: str | Path,
    lengths: Sequence[int] = (512, 1024, 2048, 4096, 8192),
    size: int = 129,
    budget: float = 2.0,
    **sizes: Any,
) -> Report:
    """Time and peak memory against T for a window: lines for what grows with T, parabolas for what grows with T x T."""
    own: dict[str, Any] = {"heads": 4, "ours": ("auto",), "peers": ("sdpa",), **sizes}
    cases = [Case(str(t), patterns.window(t, size), **own) for t in lengths]
    return _plot(cases, list(lengths), "T", f"window of {size}", path, budget)


def _plain_name(r: Result) -> str:
    return r.contender.replace("SDPA + mask", "SDPA")  # a full graph needs no mask, and is the same line


def _plot(cases: list[Case], x: list[float], label: str, title: str, path: str | Path, budget: float) -> Report:
    from matplotlib.figure import Figure as Canvas

    report = Report(machine(), limits())
    for case in cases:
        report.results += run_case(case, budget)
    canvas = Canvas(figsize=(10, 4), layout="constrained")
    seconds, memory = canvas.subplots(1, 2)
    phase = cases[0].phases[-1]
    names = dict.fromkeys(_plain_name(r) for r in report.results if r.seconds is not None)
    for name in names:
        found = {
            float(r.case): r
            for r in report.results
            if _plain_name(r) == name and r.phase == phase and r.seconds is not None
        }
        at = [v for v in x if v in found]
        if not at:
            continue
        seconds.plot(at, [1e3 * (found[v].seconds or 0.0) for v in at], marker="o", label=name)
        memory.plot(at, [max(1e-2, (found[v].peak_bytes or 0) / 2**20) for v in at], marker="o", label=name)
    for axes, what in ((seconds, "ms"), (memory, "peak MiB")):
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel=f"{phase}, {what}")
        axes.grid(alpha=0.3)
    seconds.legend()
    canvas.suptitle(f"{title}; {report.machine['cpu']}, {report.machine['threads']} threads")
    canvas.savefig(path, dpi=120)
    return report
