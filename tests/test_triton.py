"""The triton kernels against the reference: on a GPU where there is one, otherwise in triton's interpreter.

What needs no triton (plans, refusals) is tested without it.  The interpreter runs the same kernels' code, not what the
compiler makes of it; that every kernel compiles for sm_80 and sm_90 without spilling is the last test.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn.backends import reference
from graphattn.backends import triton as backend
from graphattn.backends.call import make_call
from graphattn.backends.triton import plan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def _random(*shape: int, p: float, seed: int = 0) -> ga.Graph:
    """Random edges; target 3 reads nothing, target 5 everything, nobody reads source 4."""
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < p
    mask[..., 5, :] = True
    mask[..., 3, :] = False
    mask[..., 4] = False
    return ga.from_mask(mask)


SPARSE = _random(11, 13, p=0.15)
LEAD = _random(2, 3, 7, 11, p=0.2)
LEAD_BATCH = LEAD.select(head=1)
LEAD_HEAD = LEAD.select(batch=1)
BANDS = ga.window(23, 16) - ga.window(23, 6) | ga.self_loops(23)  # two runs per target
TILED = _random(37, 70, p=0.4)
TILED_LEAD = _random(2, 3, 20, 35, p=0.3)


# ---------------------------------------------------------------------- without triton


def test_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    q = torch.randn(2, 13, 4)

    def why(x: Tensor) -> str | None:
        return backend.why_not(make_call(x[:, :11], x, x, SPARSE))

    assert "needs a CUDA device" in why(q)
    assert "float64" in why(q.double())
    with pytest.raises(ValueError, match="CUDA device"):
        ga.attend(q[:, :11], q, q, SPARSE, backend="triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = why(q)
    assert (reason is None) == (importlib.util.find_spec("triton") is not None), reason
    assert backend.cost(make_call(q[:, :11], q, q, SPARSE)) == float("inf")


@pytest.mark.parametrize("chunk", [4, 1024])
@pytest.mark.parametrize("graph", [SPARSE, LEAD, ga.causal(19), BANDS, ga.window(40, 25)], ids=repr)
def test_items_cover_every_edge_once(graph: ga.Graph, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "CHUNK", chunk)
    graph = ga.Graph.from_runs(graph.indptr, graph.start, graph.stop, graph.shape)  # nothing cached
    row, source = graph.edges()
    form = plan.rows(graph)
    items = form.items
    sizes = (items.end - items.begin).tolist()
    assert max(sizes) <= chunk
    edge = torch.cat([torch.arange(a, b) for a, b in zip(items.begin.tolist(), items.end.tolist(), strict=True)])
    torch.testing.assert_close(edge.sort().values, torch.arange(graph.num_edges))
    torch.testing.assert_close(items.row.long().repeat_interleave(torch.tensor(sizes)), row[edge])
    assert set(items.row.tolist()) == set(range(graph.rows))  # targets without edges are written too
    assert sum(b.size for b in items.buckets) == items.row.numel()
    split = [n for b in items.buckets if b.split for n in items.row[b.first : b.first + b.size].tolist()]
    assert split == items.hub_row.repeat_interleave(items.hub_ptr.diff()).tolist()
    if form.cols is not None:
        torch.testing.assert_close(form.cols.long(), source)
    else:
        for n, (first, last) in enumerate(items.run.view(-1, 2).tolist()):
            got = []
            for r in range(first, last):
                shift = int(form.run_edge[r] - form.run_start[r])
                low, high = (
                    max(int(form.run_start[r]), int(items.begin[n]) - shift),
                    min(int(form.run_stop[r]), int(items.end[n]) - shift),
                )
                got += range(low, high)
            assert got == source[items.begin[n] : items.end[n]].tolist()
    back = plan.sources(graph)
    torch.testing.assert_close(back.targets.long(), row[back.edges.long()] % graph.t)
    node = row // graph.t * graph.s + source
    sizes = (back.items.end - back.items.begin).long()
    at = torch.cat(
        [torch.arange(a, b) for a, b in zip(back.items.begin.tolist(), back.items.end.tolist(), strict=True)]
    )
    torch.testing.assert_close(back.items.row.long().repeat_interleave(sizes), node[back.edges.long()[at]])
    blocks = plan.run_list(graph)
    width = -(-graph.s // plan.SOURCES)
    for block in range(blocks.ptr.numel() - 1):
        low = block % width * plan.SOURCES
        meets = (graph.start < low + plan.SOURCES) & (graph.stop > low) & (graph.run_row() // graph.t == block // width)
        listed = blocks.run[blocks.ptr[block] : blocks.ptr[block + 1]].long()
        torch.testing.assert_close(listed, meets.nonzero().squeeze(1))


def test_tiles_by_source_find_the_bits_of_tiles_by_target() -> None:
    form = plan.tiles_by_source(TILED_LEAD, 16, 32, 1)
    assert form.ends == 0
    some = plan.tiling(TILED_LEAD, 16, 32).some
    row, col = some.edges()
    lead, m = row // some.t, row % some.t
    back_row, back_col = some.T.edges()
    order = form.order.long()
    torch.testing.assert_close(lead[order] * some.s + col[order], back_row)
    torch.testing.assert_close(m[order], back_col)


# ---------------------------------------------------------------------- with triton


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NO_TRITON = "triton is not installed, so its kernels can be neither interpreted nor compiled"


@pytest.fixture
def engine() -> Any:
    """The backend, ready to run on DEVICE."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip(NO_TRITON)
    if DEVICE == "cpu":
        if not INTERPRETED:
            pytest.skip("no GPU here: test_the_kernels_in_the_interpreter runs this in a process of its own")
        _interpreter_works()
    return backend


def test_the_kernels_in_the_interpreter() -> None:
    """The tests below that need an engine; triton reads TRITON_INTERPRET when it is imported, so in a new process."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip(NO_TRITON)
    if INTERPRETED or DEVICE == "cuda":
        pytest.skip("they run in this process")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-k", "kernels", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    if "does not fit this numpy" in done.stdout:
        pytest.skip("this triton's interpreter does not fit this numpy")
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) >= 40, done.stdout[-2000:]


_WORKS: dict[str, str | None] = {}


def _interpreter_works() -> None:
    """Triton 3.6's interpreter needs numpy below 2.4: loops over loaded bounds fail there."""
    if "why" not in _WORKS:
        q = torch.ones(1, 3, 2)
        try:
            backend.attend(make_call(q, q, q, ga.self_loops(3)))
            _WORKS["why"] = None
        except Exception as error:  # noqa: BLE001 - the interpreter wraps it in a class of its own
            if "0-dimensional arrays" not in str(error):
                raise
            _WORKS["why"] = f"this triton's interpreter does not fit this numpy ({error})"
    if _WORKS["why"]:
        pytest.skip(_WORKS["why"])


def _agree(
    graph: ga.Graph, *, batch: int = 1, heads: int = 2, kv_heads: int | None = None, width: int = 3, out_width: int = 2,
    dtype: torch.dtype = torch.float32, nodes_first: bool = False, leaves: tuple[str, ...] = (), **options: Any,
) -> None:  # fmt: skip
    """Output, lse and every gradient as the reference has them."""
    generator = torch.Generator().manual_seed(7)

    def make(h: int, t: int, d: int) -> Tensor:
        x = torch.randn((batch, t, h, d) if nodes_first else (batch, h, t, d), generator=generator)
        x = x.to(DEVICE, dtype)
        return (x.transpose(1, 2) if nodes_first else x).detach().requires_grad_()

    kv_heads = kv_heads or heads
    q, k, v = make(heads, graph.t, width), make(kv_heads, graph.s, width), make(kv_heads, graph.s, out_width)
    inputs: list[Tensor] = [q, k, v]
    for name, x in options.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            x = x.to(DEVICE).requires_grad_(name in leaves)
            inputs += [x] if name in leaves else []
            options[name] = x
    for name, make_option in list(options.items()):
        if callable(make_option):
            shape = (heads, width) if name == "score" else (heads, 7)
            x = torch.randn(shape, generator=generator).to(DEVICE).requires_grad_(name in leaves)
            inputs += [x] if name in leaves else []
            options[name] = make_option(x)
    call = make_call(q, k, v, graph, want_lse=True, **options)
    assert backend.why_not(call) is None
    got, want = backend.attend(call), reference.attend(call)
    low = dtype != torch.float32
    torch.testing.assert_close(got[0], want[0], atol=1e-2 if low else 2e-5, rtol=1e-2 if low else 1e-4)
    torch.testing.assert_close(got[1], want[1], atol=1e-2 if low else 1e-4, rtol=1e-4)
    weight = [torch.randn(x.shape, generator=generator).to(DEVICE) for x in want]
    grads = []
    for out, lse in (got, want):
        loss = (out.float() * weight[0]).sum() + (torch.where(lse.isinf(), 0.0, lse) * weight[1]).sum()
        grads.append(torch.autograd.grad(loss, inputs))
    for at, (a, b) in enumerate(zip(*grads, strict=True)):
        torch.testing.assert_close(
            a, b, atol=3e-2 if low else 1e-4, rtol=3e-2 if low else 1e-3, msg=lambda m, at=at: f"gradient {at}: {m}"
        )


def _edges(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _gatv2(x: Tensor) -> ga.GATv2:
    return ga.GATv2(x, 0.2)


def _table(x: Tensor) -> Any:
    return ga.relative(x, -1)


def _slopes(x: Tensor) -> Any:
    return ga.alibi(x[:, 0], 2)


E, EL = SPARSE.num_edges, LEAD.num_edges
SPARSE_CASES: dict[str, tuple[ga.Graph, dict[str, Any]]] = {
    "dot": (SPARSE, {"heads": 3}),
    "nodes first, groups": (SPARSE, {"heads": 4, "kv_heads": 2, "nodes_first": True}),
    "gatv2": (SPARSE, {"score": _gatv2, "leaves": ("score",)}),
    "additive": (SPARSE, {"width": 1, "score": ga.Additive(0.2)}),
    "bias per head, softcap": (SPARSE, {"bias": _edges(2, E), "leaves": ("bias",), "softcap": 2.0}),
    "bias for all": (SPARSE, {"batch": 2, "bias": _edges(E), "leaves": ("bias",)}),
    "edge key and value": (
        SPARSE,
        {
            "batch": 2,
            "edge_key": _edges(E, 2, 3),
            "edge_value": _edges(E, 2),
            "leaves": ("edge_key", "edge_value"),
        },
    ),  # fmt: skip
    "gatv2, edge key, softcap": (
        SPARSE,
        {"edge_key": _edges(E, 3), "score": _gatv2, "leaves": ("edge_key", "score"), "softcap": 1.0},
    ),  # fmt: skip
    "dropout": (SPARSE, {"batch": 2, "dropout": 0.4, "seed": -12345678901}),
    "dropout, seed in a tensor, groups": (
        SPARSE,
        {"heads": 4, "kv_heads": 2, "dropout": 0.9, "seed": torch.tensor(5)},
    ),  # fmt: skip
    "alibi": (SPARSE, {"bias": _slopes, "leaves": ("bias",)}),
    "relative": (SPARSE, {"batch": 2, "bias": _table, "leaves": ("bias",)}),
    "bfloat16": (SPARSE, {"dtype": torch.bfloat16}),
    "float16": (SPARSE, {"dtype": torch.float16}),
    "graph per batch and head, bias": (
        LEAD,
        {"batch": 2, "heads": 3, "bias": _edges(EL), "leaves": ("bias",), "nodes_first": True},
    ),  # fmt: skip
    "graph per batch and head, alibi": (LEAD, {"batch": 2, "heads": 3, "bias": _slopes, "leaves": ("bias",)}),
    "graph per batch and head, relative": (LEAD, {"batch": 2, "heads": 3, "bias": _table, "leaves": ("bias",)}),
    "graph per head, gatv2, dropout": (
        LEAD_HEAD,
        {"batch": 2, "heads": 3, "score": _gatv2, "leaves": ("score",), "dropout": 0.3, "seed": 9},
    ),  # fmt: skip
    "graph per head, groups": (LEAD_HEAD, {"batch": 2, "heads": 3, "kv_heads": 1}),
    "graph per batch, edge key": (
        LEAD_BATCH,
        {"batch": 2, "heads": 3, "edge_key": _edges(LEAD_BATCH.num_edges, 3, 3), "leaves": ("edge_key",)},
    ),  # fmt: skip
}
RUN_CASES: dict[str, tuple[ga.Graph, dict[str, Any]]] = {
    "causal": (ga.causal(19), {}),
    "causal, gatv2, edges": (
        ga.causal(7),
        {
            "batch": 2, "score": _gatv2, "edge_key": _edges(28, 2, 3), "edge_value": _edges(28, 2),
            "leaves": ("score", "edge_key", "edge_value"),
        },
    ),
    "causal, bias, dropout": (
        ga.causal(7),
        {"batch": 2, "bias": _edges(2, 2, 28), "leaves": ("bias",), "dropout": 0.3, "seed": 4, "softcap": 2.0},
    ),
    "two runs, relative, groups": (BANDS, {"heads": 4, "kv_heads": 2, "bias": _table, "leaves": ("bias",)}),
    "graph per head, groups": (
        ga.stack([ga.causal(9), ga.window(9, 4)], axis="head"), {"batch": 2, "heads": 2, "kv_heads": 1}
    ),
}  # fmt: skip
TILE_CASES: dict[str, tuple[ga.Graph, dict[str, Any]]] = {
    "causal, groups": (ga.causal(50, 70, align="end"), {"batch": 2, "heads": 4, "kv_heads": 2}),
    "bits, nodes first, softcap": (TILED, {"nodes_first": True, "softcap": 2.0}),
    "bits, dropout": (TILED, {"dropout": 0.3, "seed": 77}),
    "window, dropout": (ga.window(64, 20), {"dropout": 0.3, "seed": 77, "heads": 1}),
    "two runs": (ga.window(64, 40) - ga.window(64, 20) | ga.self_loops(64), {}),
    "bfloat16": (TILED, {"dtype": torch.bfloat16}),
    "float16": (TILED, {"dtype": torch.float16}),
    "alibi": (TILED, {"bias": _slopes}),
    "relative": (TILED, {"bias": _table, "softcap": 1.5}),
    "graph per batch and head": (TILED_LEAD, {"batch": 2, "heads": 3}),
    "graph per head, groups, dropout": (
        TILED_LEAD.select(batch=0), {"heads": 3, "kv_heads": 1, "dropout": 0.2, "seed": 3}
    ),
    "graph per batch, groups": (TILED_LEAD.select(head=0), {"batch": 2, "heads": 4, "kv_heads": 2}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", SPARSE_CASES)
def test_sparse_kernels(name: str, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "FULL", 2.0)
    graph, options = SPARSE_CASES[name]
    assert not plan.rows(graph).walks_runs
    _agree(graph, **options)


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", RUN_CASES)
def test_kernels_that_walk_runs(name: str, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "FULL", 2.0)
    monkeypatch.setattr(plan, "LONG_RUN", 2)
    graph, options = RUN_CASES[name]
    graph = ga.Graph.from_runs(graph.indptr, graph.start, graph.stop, graph.shape)  # nothing cached
    assert plan.rows(graph).walks_runs
    _agree(graph, **options)


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", ["dot", "gatv2", "graph per batch and head, alibi", "runs"])
def test_kernels_split_targets_and_sources_of_many_edges(
    name: str, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "FULL", 2.0)
    monkeypatch.setattr(plan, "CHUNK", 4)
    graph, options = (ga.causal(13), {}) if name == "runs" else SPARSE_CASES[name]
    monkeypatch.setattr(plan, "LONG_RUN", 2 if name == "runs" else 16)
    graph = ga.Graph.from_runs(graph.indptr, graph.start, graph.stop, graph.shape)
    assert plan.rows(graph).items.parts > 0
    _agree(graph, **options)


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", TILE_CASES)
def test_tile_kernels(name: str, engine: Any) -> None:
    graph, options = TILE_CASES[name]
    options = {"width": 16, "out_width": 8, **options}
    q = torch.zeros(1, options.get("heads", 2) if graph.lead else 1, graph.t, 16, device=DEVICE)
    k = torch.zeros(*q.shape[:2], graph.s, 16, device=DEVICE)
    if not graph.lead:
        assert backend.in_tiles(make_call(q, k, k[..., :8], graph))
    _agree(graph, **options)


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", ["bits, dropout", "graph per batch and head", "causal, groups"])
def test_tile_kernels_with_half_a_word_of_bits(name: str, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, options = TILE_CASES[name]
    monkeypatch.setattr(backend, "tile_size", lambda call, by_source=False: (32, 16) if by_source else (16, 32))
    _agree(graph, **{"width": 16, "out_width": 8, **options})


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_sparse_kernels_never_touch_what_is_not_read_and_repeat_to_the_bit(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "FULL", 2.0)
    graph = SPARSE
    q, k, v = (torch.randn(1, 2, n, 3, device=DEVICE) for n in (graph.t, graph.s, graph.s))
    k[:, :, 4], v[:, :, 4], q[:, :, 3] = float("nan"), float("inf"), float("nan")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found = []
    for _ in range(2):
        out, lse = backend.attend(make_call(q, k, v, graph))
        assert out.isfinite().all() and (out[:, :, 3] == 0).all() and (lse[:, :, 3] == -float("inf")).all()
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    assert all(x.isfinite().all() for x in found[0][1:])
    assert (found[0][1][:, :, 3] == 0).all() and (found[0][2][:, :, 4] == 0).all()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_main_kernels_compile_for_two_architectures_without_spilling() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip(NO_TRITON)
    if INTERPRETED:
        pytest.skip("not in the interpreter")
    root = Path(__file__).parents[1]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    command = [sys.executable, "-W", "ignore", str(root / "benchmarks" / "gpu.py"), "0", "--few"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("sm_80") == done.stdout.count("sm_90") > 10
