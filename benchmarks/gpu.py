"""Does the engine reach a GPU's limits?  Rows 1 to 7 on one GPU, row 0 (compile every kernel) on none.

    python benchmarks/gpu.py                 every row; needs CUDA
    python benchmarks/gpu.py 3 4             some rows
    python benchmarks/gpu.py 0               compile for sm_80 and sm_90, registers and spills from ptxas; needs triton
    python benchmarks/gpu.py --dry 2 3       tiny sizes on a CPU in triton's interpreter: the logic, not the figures

Every work is compared with its definition on some rows before it is timed.  Times are device events, medians, with a
warm and a cold L2; shares are of the copy bandwidth, gather bandwidth and matmul rate measured in the same run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import graphattn as ga
from graphattn.backends import flex
from graphattn.backends.call import make_call

DRY = False


def device() -> str:
    return "cpu" if DRY else "cuda"


def size(full: int, dry: int) -> int:
    return dry if DRY else full


# ---------------------------------------------------------------------- measuring


def seconds(work: Callable[[], Any], *, cold: bool = False, repeat: int = 20) -> float:
    """Median seconds of `work` by device events; `cold` empties the L2 before each."""
    if DRY:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    for _ in range(3):
        work()
    flush = torch.empty(2**28, dtype=torch.int8, device="cuda") if cold else None
    pairs = []
    for _ in range(repeat):
        if flush is not None:
            flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(b.elapsed_time(e) for b, e in pairs) * 1e-3


def both(work: Callable[[], Any], repeat: int = 20) -> tuple[float, float]:
    """Seconds with a warm and with a cold cache."""
    return seconds(work, repeat=repeat), seconds(work, cold=True, repeat=repeat)


_CEILINGS: dict[str, float] = {}


def ceilings() -> dict[str, float]:
    """Bytes per second of a copy and of gathered rows of 1 KiB, bf16 operations per second of a matmul; once a run."""
    if not _CEILINGS:
        n = size(2**29, 2**12)
        a = torch.empty(n, dtype=torch.float32, device=device())
        b = torch.empty_like(a)
        _CEILINGS["copy"] = 8 * n / seconds(lambda: b.copy_(a))
        rows = a[: n // 256 * 256].view(-1, 256)
        index = torch.randint(rows.shape[0], (rows.shape[0] // 2,), device=device())
        into = b[: index.numel() * 256].view(-1, 256)
        _CEILINGS["gather"] = 8 * into.numel() / seconds(lambda: torch.index_select(rows, 0, index, out=into))
        m = size(8192, 64)
        x, y = (torch.randn(m, m, device=device(), dtype=torch.bfloat16) for _ in range(2))
        _CEILINGS["matmul"] = 2 * m**3 / seconds(lambda: x @ y)
        copy, gather, matmul = (_CEILINGS[k] for k in ("copy", "gather", "matmul"))
        print(f"copy {copy / 1e12:.2f} TB/s, gather {gather / 1e12:.2f} TB/s, bf16 matmul {matmul / 1e12:.0f} TFLOP/s")
    return _CEILINGS


def report(row: int, what: str, value: float, unit: str, want: str, good: bool | None) -> None:
    verdict = "" if good is None or DRY else ("  reached" if good else "  MISSED")
    print(f"row {row}: {what:<58} {value:10.3f} {unit:<8} wanted {want}{verdict}", flush=True)


def inputs(heads: int, t: int, width: int, *, nodes_first: bool = False) -> list[Tensor]:
    generator = torch.Generator(device()).manual_seed(0)
    shape = (1, t, heads, width) if nodes_first else (1, heads, t, width)
    out = []
    for _ in range(3):
        x = torch.randn(shape, generator=generator, device=device(), dtype=torch.bfloat16)
        out.append((x.transpose(1, 2) if nodes_first else x).requires_grad_())
    return out


def gate(graph: ga.Graph, q: Tensor, k: Tensor, v: Tensor, out: Tensor, rows: int = 8) -> None:
    """Some rows of `out` against their definition in float64."""
    at = torch.randint(graph.t, (rows,), generator=torch.Generator().manual_seed(1)).tolist()
    for i in {0, graph.t - 1, *at}:
        first, last = int(graph.indptr[i]), int(graph.indptr[i + 1])
        runs = [torch.arange(int(graph.start[r]), int(graph.stop[r])) for r in range(first, last)]
        source = torch.cat([torch.zeros(0, dtype=torch.int64), *runs]).to(q.device)
        key, value = (x.detach()[0].index_select(1, source).double() for x in (k, v))
        s = (key @ q.detach()[0, :, i, :, None].double()).squeeze(-1) * q.shape[-1] ** -0.5
        want = (torch.softmax(s, -1)[:, None] @ value).squeeze(1)
        torch.testing.assert_close(out.detach()[0, :, i].double(), want, atol=2e-2, rtol=2e-2)


def backward_of(attend: Callable[..., Tensor], leaves: list[Tensor]) -> Callable[[], Any]:
    """The gradient alone: the forward is done once."""
    out = attend()
    dout = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


# ---------------------------------------------------------------------- rows


def row1() -> None:
    """The lecture's GPT with dropout: tokens per second against flash SDPA with its own dropout, and the recipe."""
    from graphattn.checkpoint import Run
    from graphattn.gpt import GPT, GPTConfig

    block, batch = size(256, 8), size(64, 1)
    config = GPTConfig(
        vocab=65, block=block, layers=size(6, 1), heads=size(6, 2), width=size(384, 16), position="learned", dropout=0.2
    )
    graph = ga.causal(block).to(device())
    speed = {}
    for backend in ("auto", "sdpa", "triton"):
        torch.manual_seed(0)
        model = GPT(config).to(device()).train()
        model_step = model if DRY else torch.compile(model)
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=not DRY)
        text = torch.randint(65, (batch, block), device=device())

        def step(model_step: Any = model_step, adam: Any = adam, text: Tensor = text, backend: str = backend) -> None:
            with torch.autocast(device(), dtype=torch.bfloat16, enabled=not DRY):
                loss = model_step(text, graph, text, backend=backend)[1]
            loss.backward()
            adam.step()
            adam.zero_grad(set_to_none=True)

        with contextlib.suppress(ValueError) if backend == "triton" else contextlib.nullcontext():
            speed[backend] = batch * block / seconds(step)
    for backend, tokens in speed.items():
        ratio = tokens / speed["sdpa"]
        what = f"GPT step, dropout 0.2, {backend}, {tokens:,.0f} tokens/s: share of sdpa"
        report(1, what, ratio, "x", ">= 0.98", ratio >= 0.98)
    if DRY:
        return
    with tempfile.TemporaryDirectory() as folder:
        constant = ["--schedule", "constant", "--lr", "3e-4", "--warmup", "0"]
        for name, extra, most in (("warm-up and cosine", [], 1.47), ("constant 3e-4", constant, 1.49)):
            begin = time.perf_counter()
            command = [sys.executable, "-m", "graphattn", "train", "--preset", "gpu", "--dataset", "shakespeare"]
            done = subprocess.run(
                [*command, "--out", f"{folder}/{most}", "--quiet", *extra], capture_output=True, text=True, check=False
            )  # fmt: skip
            took = time.perf_counter() - begin
            print((done.stdout + done.stderr)[-600:])
            best = float("nan")
            if done.returncode == 0:
                best = Run.open(f"{folder}/{most}").read_json("summary.json")["best"]["all_windows"]
            report(1, f"tiny shakespeare, {name}: best validation loss", best, "nats", f"<= {most}", best <= most)
            report(1, f"tiny shakespeare, {name}: time", took / 60, "min", "<= 3", took <= 180)


def row2() -> None:
    """Causal: against flash SDPA."""
    heads, width = size(16, 2), size(128, 16)
    for t in (4096, 8192, 16384, 32768) if not DRY else (48,):
        q, k, v = inputs(heads, t, width)
        graph = ga.causal(t).to(device())
        gate(graph, q, k, v, ga.attend(q, k, v, graph, backend="auto" if not DRY else "triton"))
        flops = 2 * 2 * heads * t * t / 2 * width

        def flash(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        for backend in ("auto", "triton") if not DRY else ("triton",):

            def ours(q: Tensor = q, k: Tensor = k, v: Tensor = v, graph: Any = graph, backend: str = backend) -> Tensor:
                return ga.attend(q, k, v, graph, backend=backend)

            for name, a, b, f in (
                ("forward", ours, flash, flops),
                ("backward", backward_of(ours, [q, k, v]), backward_of(flash, [q, k, v]), 2.5 * flops),
            ):
                (mine, _), (theirs, _) = both(a), both(b)
                share = f / mine / ceilings()["matmul"]
                what = f"causal {t} {name}, {backend}, {100 * share:.0f} % of matmul: share of flash"
                report(2, what, theirs / mine, "x", ">= 0.98", theirs / mine >= 0.98)


def row3() -> None:
    """A window, against FlexAttention; and how fast its block lists are made."""
    t, heads, width, window = size(32768, 70), size(32, 2), size(128, 16), size(128, 9)
    q, k, v = inputs(heads, t, width)
    graph = ga.window(t, window).to(device())
    ours = lambda: ga.attend(q, k, v, graph, backend="triton")  # noqa: E731
    gate(graph, q, k, v, ours())
    work = {"forward": ours, "backward": backward_of(ours, [q, k, v])}
    mine = {name: both(w) for name, w in work.items()}
    for name, (warm, cold) in mine.items():
        report(3, f"window {window}, {t}, triton {name} (cold {cold * 1e3:.3f} ms)", warm * 1e3, "ms", "-", None)
    if DRY:
        build = seconds(lambda: flex.block_mask_of(_fresh(graph)))
        report(3, "block lists from runs", build * 1e3, "ms", "-", None)
        return
    theirs = lambda: ga.attend(q, k, v, graph, backend="flex")  # noqa: E731
    gate(graph, q, k, v, theirs())
    for name, w in {"forward": theirs, "backward": backward_of(theirs, [q, k, v])}.items():
        ratio = both(w)[0] / mine[name][0]
        report(3, f"window {window}, {t}, {name}: FlexAttention's time over ours", ratio, "x", ">= 1.3", ratio >= 1.3)
    from torch.nn.attention.flex_attention import create_block_mask

    create = torch.compile(create_block_mask)
    predicate = lambda b, h, i, j: (j <= i) & (i - j < window)  # noqa: E731
    slow = seconds(lambda: create(predicate, None, None, t, t, device="cuda"))
    quick = seconds(lambda: flex.block_mask_of(_fresh(graph)))
    report(3, "compiled create_block_mask's time over ours", slow / quick, "x", ">= 20", slow / quick >= 20)


def _fresh(graph: ga.Graph) -> ga.Graph:
    """The same runs without derived forms."""
    return ga.Graph._new(graph.indptr, graph.start, graph.stop, graph.shape)


def _random(nodes: int, degree: int, hubs: int = 0) -> ga.Graph:
    """Random sources, `degree` a target; with `hubs`, a third of the edges go to and another third come from hubs."""
    generator = torch.Generator().manual_seed(0)
    count = nodes * degree
    target = torch.arange(nodes).repeat_interleave(degree)
    source = torch.randint(nodes, (count,), generator=generator)
    if hubs:
        third = torch.randperm(count, generator=generator)
        target[third[: count // 3]] = torch.randint(hubs, (count // 3,), generator=generator) * (nodes // hubs)
        source[third[-(count // 3) :]] = torch.randint(hubs, (count // 3,), generator=generator) * (nodes // hubs) + 1
    return ga.Graph.from_keys(target * (nodes + 1) + source, (nodes, nodes))


def row4() -> None:
    """Random degree 16 on a million nodes: against the bytes it must gather, and compiled PyG."""
    nodes, degree, heads, width = size(1_000_000, 40), size(16, 3), size(8, 2), size(64, 8)
    graph = _random(nodes, degree).to(device())
    q, k, v = inputs(heads, nodes, width, nodes_first=True)
    ours = lambda: ga.attend(q, k, v, graph, backend="triton")  # noqa: E731
    gate(graph, q, k, v, ours())
    size_of_row = heads * width * 2
    times = {}
    for name, w, most, passes in (("forward", ours, 11, 2), ("backward", backward_of(ours, [q, k, v]), 28, 4)):
        warm, cold = both(w)
        times[name] = warm
        share = passes * graph.num_edges * size_of_row / warm / ceilings()["gather"]
        what = f"random {degree}, {nodes:,} {name}, {100 * share:.0f} % of gather (cold {cold * 1e3:.2f} ms)"
        report(4, what, warm * 1e3, "ms", f"<= {most}", warm * 1e3 <= most)
    try:
        from torch_geometric.utils import scatter, softmax
    except ImportError:
        print("row 4: torch_geometric is missing, so there is nothing to compare with")
        return
    target, source = graph.targets_sources()

    def pyg(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # what TransformerConv does between its projections
        alpha = (q[target] * k[source]).sum(-1) * width**-0.5
        alpha = softmax(alpha, target, num_nodes=nodes)
        return scatter(v[source] * alpha.unsqueeze(-1), target, dim=0, dim_size=nodes, reduce="sum")

    run = pyg if DRY else torch.compile(pyg)
    flat = [x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
    theirs = lambda: run(*flat)  # noqa: E731
    torch.testing.assert_close(theirs().transpose(0, 1)[None], ours(), atol=5e-2, rtol=5e-2)
    for name, w in {"forward": theirs, "backward": backward_of(theirs, flat)}.items():
        ratio = seconds(w) / times[name]
        report(4, f"random {degree}, {nodes:,} {name}: compiled PyG's time over ours", ratio, "x", ">= 5", ratio >= 5)


def row5() -> None:
    """Hubs on both sides, against a uniform graph with as many edges."""
    nodes, degree, heads, width = size(1_000_000, 40), size(16, 6), size(8, 2), size(64, 8)
    q, k, v = inputs(heads, nodes, width, nodes_first=True)
    found = {}
    for name, graph in {"uniform": _random(nodes, degree), "hubs": _random(nodes, degree, size(16, 2))}.items():
        graph = graph.to(device())
        attend = lambda graph=graph: ga.attend(q, k, v, graph, backend="triton")  # noqa: E731
        gate(graph, q, k, v, attend())
        found[name] = [seconds(w) / graph.num_edges for w in (attend, backward_of(attend, [q, k, v]))]
    for name, a, b in zip(("forward", "backward"), found["hubs"], found["uniform"], strict=True):
        report(5, f"hub graph {name}: time per edge over a uniform graph's", a / b, "x", "<= 1.5", a / b <= 1.5)


def row6() -> None:
    """The longest context of a window, one head, forward."""
    width, best = size(64, 16), 0
    for t in (2**20, 64_000_000, 128_000_000, 192_000_000, 250_000_000, 280_000_000) if not DRY else (90,):
        try:
            graph = ga.window(t, size(128, 9)).to(device())
            q, k, v = (torch.empty(1, 1, t, width, dtype=torch.bfloat16, device=device()) for _ in range(3))
            for x in (q, k, v):
                x.normal_()
            with torch.no_grad():
                begin = time.perf_counter()
                out = ga.attend(q, k, v, graph, backend="triton")
                if not DRY:
                    torch.cuda.synchronize()
                print(f"row 6: {t:,} tokens in {time.perf_counter() - begin:.3f} s, plan included")
            gate(graph, q, k, v, out)
            best = t
            del graph, q, k, v, out
        except torch.cuda.OutOfMemoryError as error:
            print(f"row 6: {t:,} tokens: {str(error).splitlines()[0]}")
            break
        finally:
            if not DRY:
                torch.cuda.empty_cache()
    report(6, "longest window, one head, forward", best / 1e6, "M tokens", ">= 250", best >= 250_000_000)


def row7() -> None:
    """The gradient: the same bits every time, and what that costs against one that adds atomically."""
    nodes, t = size(200_000, 40), size(8192, 60)
    cases = {
        "random 16": (_random(nodes, size(16, 3)), inputs(size(8, 2), nodes, size(64, 8), nodes_first=True)),
        "hubs": (_random(nodes, size(16, 3), size(16, 2)), inputs(size(8, 2), nodes, size(64, 8), nodes_first=True)),
        "window": (ga.window(t, size(128, 9)), inputs(size(16, 2), t, size(128, 16))),
    }
    for name, (graph, leaves) in cases.items():
        graph = graph.to(device())
        attend = lambda graph=graph, leaves=leaves: ga.attend(*leaves, graph, backend="triton")  # noqa: E731
        out = attend()
        dout = torch.randn_like(out)
        first = torch.autograd.grad(out, leaves, dout)
        same = 0
        runs = size(20, 2)
        for _ in range(runs):
            again = torch.autograd.grad(attend(), leaves, dout)
            same += all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        report(7, f"{name}: of {runs} gradients, bit-identical", same, "", str(runs), same == runs)
    # the only variant with atomic additions here is message passing in plain torch
    graph, leaves = cases["random 16"]
    graph = graph.to(device())
    mine, theirs = (
        seconds(backward_of(lambda backend=backend: ga.attend(*leaves, graph, backend=backend), leaves))
        for backend in ("triton", "edges")
    )
    report(7, "random 16 backward over atomic message passing's", mine / theirs, "x", "<= 1.05", mine / theirs <= 1.05)


# ---------------------------------------------------------------------- row 0: compile without a GPU

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32", torch.int64: "i64"}


class _Collect:
    """Stands in for `launch`: notes every kernel with the types and constants it would start with."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[Any, ...]] = {}
        self.label = ""

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        options = {k: meta.pop(k) for k in ("num_warps", "num_stages", "maxnreg") if k in meta}
        types: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        facts: dict[tuple[int, ...], list[list[Any]]] = {}
        for at, (name, x) in enumerate(zip(kernel.arg_names, args, strict=False)):
            if x is None or (isinstance(x, int) and x == 1):
                types[name], constants[(at,)] = "constexpr", x
            elif isinstance(x, Tensor):
                types[name], facts[(at,)] = f"*{_NAMES[x.dtype]}", [["tt.divisibility", 16]]
            elif isinstance(x, int):
                types[name] = "i32" if -(2**31) <= x < 2**31 else "i64"
                if x % 16 == 0:
                    facts[(at,)] = [["tt.divisibility", 16]]
            else:
                types[name] = "fp32"
        for name, x in meta.items():
            types[name], constants[(kernel.arg_names.index(name),)] = "constexpr", x
        types = {name: types[name] for name in kernel.arg_names}
        key = repr((kernel.__name__, types, sorted(constants.items(), key=repr), sorted(facts), options))
        self.found.setdefault(key, (kernel, types, constants, facts, options, self.label))


@contextlib.contextmanager
def _collecting() -> Iterator[_Collect]:
    from graphattn.backends import triton as backend
    from graphattn.backends.triton import launch

    collect, before, full = _Collect(), launch.launch, backend.FULL
    launch.launch = collect  # type: ignore[assignment]
    try:
        yield collect
    finally:
        launch.launch, backend.FULL = before, full


def kernels_of(label: str, graph: ga.Graph, collect: _Collect, **choice: Any) -> None:
    """Note the kernels of one call, forward and backward."""
    from graphattn.backends import triton as backend

    collect.label = label
    heads, kv_heads = choice.pop("heads", 8), choice.pop("kv_heads", None)
    width, dtype, leaves = choice.pop("width", 64), choice.pop("dtype", torch.bfloat16), choice.pop("leaves", ())
    nodes_first, backend.FULL = choice.pop("nodes_first", False), 2.0 if choice.pop("sparse", False) else 0.1

    def make(h: int, t: int) -> Tensor:
        x = torch.zeros((1, t, h, width) if nodes_first else (1, h, t, width), dtype=dtype)
        return (x.transpose(1, 2) if nodes_first else x).requires_grad_()

    q, k, v = make(heads, graph.t), make(kv_heads or heads, graph.s), make(kv_heads or heads, graph.s)
    for x in leaves:
        x.requires_grad_()
    out, lse = backend.attend(make_call(q, k, v, graph, want_lse=True, **choice))
    torch.autograd.grad([out, lse], [q, k, v, *leaves], [torch.empty_like(out), torch.empty_like(lse)])


def variants(which: str = "all") -> list[tuple[Any, ...]]:
    """(kernel, types, constants, facts, options, label) of representative calls."""
    from graphattn.backends.triton import plan

    with _collecting() as collect:
        n = 512
        graph = _random(n, 16)
        chunk, plan.CHUNK = plan.CHUNK, 64
        kernels_of("random 16, hubs", _random(n, 16, 4), collect, sparse=True, nodes_first=True)
        plan.CHUNK = chunk
        kernels_of("causal", ga.causal(n), collect)
        if which == "few":
            return list(collect.found.values())
        kernels_of("random 16, one head", graph, collect, sparse=True, heads=1)
        kernels_of("random 16, float32", graph, collect, sparse=True, nodes_first=True, dtype=torch.float32)
        kernels_of("random 16, width 8", graph, collect, sparse=True, nodes_first=True, width=8, dtype=torch.float32)
        kernels_of("random 16, width 128", graph, collect, sparse=True, nodes_first=True, width=128)
        vector = torch.randn(8, 64)
        kernels_of("gatv2", graph, collect, sparse=True, nodes_first=True, score=ga.GATv2(vector), leaves=[vector])
        kernels_of("additive", graph, collect, sparse=True, width=1, score=ga.Additive(), dtype=torch.float32)
        kernels_of("dropout", graph, collect, sparse=True, nodes_first=True, dropout=0.1, seed=3)
        extra = [torch.randn(graph.num_edges, 8, 64).bfloat16() for _ in range(2)]
        edges = {"edge_key": extra[0], "edge_value": extra[1]}
        kernels_of("edge vectors", graph, collect, sparse=True, nodes_first=True, leaves=extra, **edges)
        bias = torch.randn(8, graph.num_edges)
        kernels_of(
            "bias, softcap", graph, collect, sparse=True, nodes_first=True, bias=bias, softcap=5.0, leaves=[bias]
        )
        window = ga.window(n, 128)
        kernels_of("window, gatv2", window, collect, sparse=True, score=ga.GATv2(vector), leaves=[vector])
        bias = torch.randn(8, window.num_edges)
        kernels_of("window, bias", window, collect, sparse=True, bias=bias, leaves=[bias])
        for width in (32, 128, 256):
            kernels_of(f"causal {width}", ga.causal(n), collect, width=width)
        kernels_of("causal, float16", ga.causal(n), collect, dtype=torch.float16)
        for width in (64, 128, 256):
            kernels_of(f"causal {width}, float32", ga.causal(n), collect, width=width, dtype=torch.float32)
        kernels_of("causal, dropout", ga.causal(n), collect, nodes_first=True, dropout=0.2, seed=1)
        table = ga.relative(torch.randn(8, 65))
        kernels_of("causal, odd, softcap, relative", ga.causal(n - 3), collect, softcap=4.0, bias=table)
        bits = ga.from_mask(torch.rand(n, n, generator=torch.Generator().manual_seed(0)) < 0.3)
        kernels_of("bits, groups", bits, collect, width=128, kv_heads=2)
        # everything at once, in the widths and dtypes above
        for width in (64, 128, 256):
            every = {"softcap": 4.0, "bias": table, "dropout": 0.2, "seed": 1}
            kernels_of(f"bits {width}, odd, softcap, relative, dropout", bits[:-3, :-3], collect, width=width, **every)
        for width in (64, 128):
            kernels_of(
                f"bits {width}, float32, softcap, alibi, dropout", bits, collect, width=width, dtype=torch.float32,
                softcap=4.0, bias=ga.alibi(torch.randn(8)), dropout=0.2, seed=1,
            )  # fmt: skip
        vector = torch.randn(8, 64)
        for name, g in {"random 16": graph, "window": window}.items():
            bias = torch.randn(8, g.num_edges)
            extra = [torch.randn(g.num_edges, 8, 64) for _ in range(2)]
            kernels_of(
                f"{name}, gatv2, everything", g, collect, sparse=True, nodes_first=True, dtype=torch.float32,
                score=ga.GATv2(vector), bias=bias, edge_key=extra[0], edge_value=extra[1], softcap=4.0, dropout=0.2,
                seed=1, leaves=[vector, bias, *extra],
            )  # fmt: skip
        return list(collect.found.values())


def compiled(variant: tuple[Any, ...], capability: int) -> dict[str, int]:
    """Registers a thread, bytes spilled and bytes of shared memory of one kernel on one architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.compiler import ASTSource

    from graphattn.backends.triton.launch import OPTIONS

    kernel, types, constants, facts, options, _ = variant
    source, target = ASTSource(kernel, types, constants, facts), GPUTarget("cuda", capability, 32)
    done = triton.compile(source, target=target, options=options | OPTIONS)
    ptxas = get_ptxas(capability).path  # the one triton itself uses for this architecture
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(done.asm["ptx"])
        named = re.search(r"^\.target (\S+?)(?:,|\s|$)", done.asm["ptx"], re.M)
        assert named is not None
        command = [ptxas, "-v", "--gpu-name", named[1], path, "-o", f"{folder}/out"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    assert registers is not None and spills is not None
    return {
        "registers": int(registers[1]), "spilled": int(spills[1]) + int(spills[2]), "shared": done.metadata.shared,
        "matrix": int(("mma.sync" in done.asm["ptx"]) or ("wgmma" in done.asm["ptx"])),
    }  # fmt: skip


def row0(which: str = "all") -> int:
    """Every kernel compiles for sm_80 and sm_90; how many spill."""
    import triton

    spilling = 0
    every = variants(which)
    print(f"triton {triton.__version__}: {len(every)} kernels")
    for variant in every:
        kernel, _, constants, _, options, label = variant
        cells = []
        for capability in (80, 90):
            facts = compiled(variant, capability)
            spilling += facts["spilled"] > 0
            said = f"{facts['registers']:3} registers, {facts['spilled']} B spilled, {facts['shared']} B shared"
            cells.append(f"sm_{capability} {said}")
        names = [n for n in ("BE", "HB", "BM", "BN") if n in kernel.arg_names]
        sizes = " ".join(f"{n}={constants[(kernel.arg_names.index(n),)]}" for n in names)
        head = f"{kernel.__name__:<23} {label:<31} {sizes:<12} {options['num_warps']} warps"
        print(" | ".join([head, *cells]), flush=True)
    report(0, "kernels that spill, both architectures", spilling, "", "0", spilling == 0)
    return spilling


def main(rows: list[int] | None = None, dry: bool = False, few: bool = False) -> None:
    """Run the rows; `dry` in triton's interpreter at tiny sizes."""
    global DRY
    DRY = dry
    if rows == [0]:
        raise SystemExit(row0("few" if few else "all") > 0)
    if dry:
        os.environ["TRITON_INTERPRET"] = "1"
    elif not torch.cuda.is_available():
        raise SystemExit("rows 1 to 7 need a CUDA device; row 0 compiles without one, --dry runs tiny sizes")
    else:
        torch.backends.cuda.matmul.allow_tf32 = True
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    ceilings()
    for row in rows or range(1, 8):
        {1: row1, 2: row2, 3: row3, 4: row4, 5: row5, 6: row6, 7: row7}[row]()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int, help="0 alone, or some of 1 to 7")
    parser.add_argument("--dry", action="store_true", help="tiny sizes in triton's interpreter")
    parser.add_argument("--few", action="store_true", help="row 0: the main kernels alone")
    given = parser.parse_args()
    main(given.rows, given.dry, given.few)
