"""What `auto` picks on a GPU, by the backends' estimates alone: no GPU is needed, nothing is computed."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn import backends
from graphattn.backends import cost, gpu, make_call

CUDA = torch.device("cuda", 0)


class OnGPU(Tensor):
    """A tensor that says it is on a GPU, without memory of its own: enough for every question but the answer."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return CUDA


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine with an H200 and triton, as far as estimates look."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cost, "_tables", {})
    monkeypatch.setattr(ga.Graph, "to", lambda self, device: self)
    monkeypatch.setattr(gpu, "memory", lambda device: 141 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if "triton" not in sys.modules:
        monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    yield


def inputs(graph: ga.Graph, dtype: torch.dtype, grad: bool, batch: int = 1, heads: int = 8, width: int = 64) -> list:
    sizes = [(batch, heads, n, width) for n in (graph.t, graph.s, graph.s)]
    return [torch.empty(1, dtype=dtype).expand(s).as_subclass(OnGPU).requires_grad_(grad) for s in sizes]


def chosen(graph: ga.Graph, dtype: torch.dtype, grad: bool, **options) -> str:
    shape = {k: options.pop(k) for k in ("batch", "heads", "width") if k in options}
    table = ga.explain(graph, *inputs(graph, dtype, grad, **shape), **options)
    (name,) = [e.backend for e in table if e.chosen]
    assert f"> {name}" in str(table)
    return name


def scattered(nodes: int, degree: int, hubs: int = 0) -> ga.Graph:
    generator = torch.Generator().manual_seed(0)
    target = torch.arange(nodes).repeat_interleave(degree)
    source = torch.randint(nodes, (nodes * degree,), generator=generator)
    if hubs:
        source[::3] = torch.randint(hubs, source[::3].shape, generator=generator)
    return ga.Graph.from_keys(target * (nodes + 1) + source, (nodes, nodes))


FUSED = {"full": ga.full, "causal": ga.causal, "decoding": lambda t: ga.full(1, t)}
BLOCKS = {
    "window": lambda t: ga.window(t, 128),
    "prefix": lambda t: ga.prefix(t, t // 4),
    "prefix LM": lambda t: ga.prefix(t, t // 4) | ga.causal(t),
    "documents": lambda t: ga.documents([t // 8] * 8) & ga.causal(t),
    "BigBird": lambda t: ga.bigbird(t, 64),
    "Longformer": lambda t: ga.band(t, 256, 256) | ga.global_tokens(t, 16),
}
REST = {
    "random degree 16": lambda: scattered(20_000, 16),
    "hubs": lambda: scattered(20_000, 16, 8),
    "Cora": lambda: scattered(2708, 5),
    "tolokers": lambda: scattered(11_758, 88),
}
_GRAPHS: dict[str, ga.Graph] = {}


def made(name: str, make, *size: int) -> ga.Graph:
    """One of each, so that what is derived from it is derived once."""
    key = f"{name} {size}"
    if key not in _GRAPHS:
        _GRAPHS[key] = make(*size)
    return _GRAPHS[key]


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PHASES = {"forward": False, "both": True}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestRoutes:
    @pytest.mark.parametrize("t", [128, 1024, 4096, 32768])
    @pytest.mark.parametrize("name", FUSED)
    def test_causal_and_full_go_to_flash_attention(self, name: str, t: int, dtype: torch.dtype, phase: str) -> None:
        graph = made(name, FUSED[name], t)
        assert chosen(graph, dtype, PHASES[phase]) == "sdpa"
        assert chosen(graph, dtype, PHASES[phase], batch=8, heads=16, width=128, dropout=0.1) == "sdpa"

    @pytest.mark.parametrize("t", [4096, 16384, 32768])
    @pytest.mark.parametrize("name", BLOCKS)
    def test_block_structured_graphs_go_to_tiles(self, name: str, t: int, dtype: torch.dtype, phase: str) -> None:
        graph = made(name, BLOCKS[name], t)
        assert chosen(graph, dtype, PHASES[phase]) in ("flex", "triton")
        assert chosen(graph, dtype, PHASES[phase], heads=32, width=128) in ("flex", "triton")
        if dtype != torch.float32:  # tiles of both kinds skip what is hidden, so that neither is far from the other
            seconds = {e.backend: e.seconds for e in ga.explain(graph, *inputs(graph, dtype, PHASES[phase], heads=32))}
            assert 1 / 3 < seconds["flex"] / seconds["triton"] < 3

    @pytest.mark.parametrize("name", REST)
    def test_the_rest_goes_to_triton(self, name: str, dtype: torch.dtype, phase: str) -> None:
        graph = made(name, REST[name])
        assert chosen(graph, dtype, PHASES[phase]) == "triton"
        assert chosen(graph, dtype, PHASES[phase], heads=1, width=256) == "triton"

    def test_what_flash_attention_has_not_goes_to_triton_or_flex(self, dtype: torch.dtype, phase: str) -> None:
        graph, grad = made("causal", ga.causal, 4096), PHASES[phase]
        assert chosen(graph, dtype, grad, dropout=0.1, seed=3) == "triton"
        assert chosen(graph, dtype, grad, want_lse=True) in ("flex", "triton")
        assert chosen(graph, dtype, grad, softcap=3.0) in ("flex", "triton")
        graph = made("Cora", REST["Cora"])
        vector = torch.ones(8, 8).as_subclass(OnGPU)
        assert chosen(graph, dtype, grad, width=8, score=ga.GATv2(vector)) == "triton"
        assert chosen(graph, dtype, grad, width=1, score=ga.Additive()) == "triton"


def test_a_million_nodes_fit_and_cost_what_the_issue_asks_for() -> None:
    # forward 11 ms and backward 28 ms at 75 and 65 % of 4.3 TB/s
    graph = scattered(100_000, 16)
    for grad, most in ((False, 11e-3), (True, 39e-3)):
        table = {e.backend: e for e in ga.explain(graph, *inputs(graph, torch.bfloat16, grad))}
        assert table["triton"].chosen
        assert 0.5 * most < 10 * table["triton"].seconds < 1.2 * most


def test_without_triton_there_is_still_a_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert chosen(made("Cora", REST["Cora"]), torch.float32, True) == "edges"
    table = {e.backend: e for e in ga.explain(ga.causal(64), *inputs(ga.causal(64), torch.float32, True))}
    assert "triton" in table["flex"].reason and "triton" in table["triton"].reason


@pytest.mark.parametrize("name", ["dense", "sdpa", "edges", "csr", "tiles", "flex", "triton"])
def test_estimates_are_above_the_hosts_price_and_grow(name: str) -> None:
    module, _ = backends._try_module(name)
    found = []
    for t, grad in ((512, False), (16384, False), (16384, True)):
        call = make_call(*inputs(ga.causal(t), torch.bfloat16, grad), ga.causal(t))
        found.append(module.cost(call))
        if hasattr(module, "floor"):
            assert 0 < module.floor(call) <= found[-1]
    assert gpu.CALL / 2 < found[0] < found[1] < found[2] < math.inf


def test_the_quick_ranking_agrees_with_the_whole_one() -> None:
    for name in ("causal", "window", "documents"):
        graph = made(name, (FUSED | BLOCKS)[name], 4096)
        call = make_call(*inputs(graph, torch.bfloat16, True), graph)
        assert backends._ranked(call, quick=True)[0] == backends._ranked(call)[0]
        assert backends._choose(call) == backends._ranked(call)[0][1]


def test_the_budget_is_the_gpus() -> None:
    graph = made("window", BLOCKS["window"], 32768)
    table = {e.backend: e for e in ga.explain(graph, *inputs(graph, torch.bfloat16, True, heads=32))}
    assert "memory budget of 70.5 GiB" in table["dense"].reason
    assert ga.backends.memory_budget() != ga.backends.memory_budget("cuda")


def test_factors_of_a_gpu_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = made("causal", ga.causal, 4096)
    call = make_call(*inputs(graph, torch.bfloat16, False), graph)
    cost._tables["NVIDIA H200"] = {"sdpa causal forward half": 6.0}
    assert cost.factor("sdpa", call) == 6.0
    assert chosen(graph, torch.bfloat16, False, heads=64) in ("flex", "triton")
    assert chosen(graph, torch.float32, False, heads=64) == "sdpa"
    assert cost.cache_file(CUDA) != cost.cache_file()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert cost.factor("sdpa", call) == 1.0
    assert not cost.worth_measuring([(1.0, "a"), (1.1, "b")], call)  # its kernels are compiled first


def test_a_gpu_is_measured_by_the_same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU that says it is a GPU: two kinds of arithmetic, and every time waited for."""
    waited = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(device))
    monkeypatch.setattr(cost, "_graphs", lambda t: [ga.causal(40)])
    monkeypatch.setattr(Tensor, "to", lambda self, *a, to=Tensor.to: to(self, *(x for x in a if x != CUDA)))
    seen: list[str] = []

    class Module:
        why_not = staticmethod(lambda call: None)
        cost = staticmethod(lambda call: 1e-3)

        @staticmethod
        def attend(call) -> tuple[Tensor, None]:
            seen.append(f"{call.q.dtype} {call.needs_grad}")
            return call.q * 1.0 + call.k + call.v, None

    monkeypatch.setattr(backends, "_try_module", lambda name: (Module, None))
    found = ga.calibrate(0.0, CUDA)
    assert {f"{n} causal forward" for n in ("sdpa", "flex", "triton")} <= set(found)
    assert set(seen) == {f"{d} {g}" for d in (torch.bfloat16, torch.float32) for g in (False, True)}
    assert waited and cost.table(CUDA) == found and cost.cache_file(CUDA).is_file() and not cost.cache_file().exists()


def test_calibrate_says_what_it_can_not_measure() -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        ga.calibrate(device="cuda")
    with pytest.raises(ValueError, match="got mps"):
        ga.calibrate(device="mps")
