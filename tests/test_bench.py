"""The benchmark's own parts: its float64 answer, its gate, its peers, its tables.  No verdict depends on a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import graphattn as ga
from graphattn import bench

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"sgemm": 1e11, "copy": 1e10, "row gather": 1e9}
    monkeypatch.setattr(bench, "limits", lambda seconds=0.4: dict(known))


def tiny(**options) -> bench.Case:
    graph = options.pop("graph", ga.window(23, 5) | ga.from_mask(torch.eye(23, dtype=torch.bool).flip(0)))
    return bench.Case("tiny", graph, **{"heads": 3, "head_dim": 4, "peers": (), "ours": ("edges",), **options})


@pytest.mark.parametrize("score", ["dot", "additive"])
@pytest.mark.parametrize("graph", ["plain", "batch", "both"])
def test_the_float64_answer_is_the_reference(graph: str, score: str) -> None:
    g = {
        "plain": ga.causal(17, 29, align="end"),
        "batch": ga.padding([0, 7], 11, 5),
        "both": ga.stack([ga.stack([a, ga.window(7, 2)], "head") for a in (ga.causal(7), ga.full(7))], "batch"),
    }[graph]
    d = 1 if score == "additive" else 3
    heads, kv = 2, 1
    sizes = (heads, g.t, d), (kv, g.s, d), (kv, g.s, 5)
    q, k, v = (torch.randn(2, *size, dtype=torch.float64) for size in sizes)
    go = torch.randn(2, heads, g.t, 5, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    rule = ga.Additive(0.2) if score == "additive" else None
    want = ga.attend(*leaves, g, score=rule, scale=0.7, backend="reference")
    out, grads = bench.exact(g, q, k, v, go, [(0, g.t)], 0.7, score)
    torch.testing.assert_close(out, want)
    for x, y in zip(grads, torch.autograd.grad(want, leaves, go), strict=True):
        torch.testing.assert_close(x, y)


def test_the_answer_on_a_sample_of_targets_is_that_of_all() -> None:
    g = bench.random_degree(300, 3)  # scattered: takes the path of listed sources
    q, k, v, go = (torch.randn(1, 2, 300, 4, dtype=torch.float64) for _ in range(4))
    go[:, :, 10:] = 0
    whole, grads = bench.exact(g, q, k, v, go, [(0, 300)], 0.5, "dot")
    part, same = bench.exact(g, q, k, v, go, [(0, 10)], 0.5, "dot")
    torch.testing.assert_close(part[:, :, :10], whole[:, :, :10])
    for x, y in zip(grads, same, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", ["sdpa", "gather-scatter", "torch.sparse", "pyg"])
def test_every_peer_passes_the_gate(name: str) -> None:
    if name == "pyg":
        pytest.importorskip("torch_geometric")
    inputs = bench._Inputs(tiny())
    contender = bench._MAKE[name](inputs)
    first, error = bench._gate(contender, inputs)
    assert first > 0 and error < 1e-5


def test_projected_and_additive_peers_pass_the_gate() -> None:
    pytest.importorskip("torch_geometric")
    for case in (tiny(projections=True), tiny(score="additive")):
        inputs = bench._Inputs(case)
        assert bench._gate(bench._pyg(inputs), inputs)[1] < 1e-5
        assert bench._gate(bench._ours(inputs, "edges"), inputs)[1] < 1e-5


@pytest.mark.parametrize("what", ["output", "gradient", "nan"])
def test_a_wrong_contender_does_not_enter(what: str) -> None:
    inputs = bench._Inputs(tiny())
    right = bench._ours(inputs, "edges")

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return {"output": x * 1.01, "gradient": x.clone(), "nan": x * float("nan")}[what]

        @staticmethod
        def backward(ctx, g: Tensor) -> Tensor:
            return g * 1.01

    wrong = bench.Contender("wrong", lambda: Wrong.apply(right.forward()), right.leaves)
    with pytest.raises(bench.Unavailable, match="WRONG"):
        bench._gate(wrong, inputs)


def test_a_run_reports_every_contender_and_writes_both_files(tmp_path: Path) -> None:
    lines: list[str] = []
    report = ga_run(tmp_path, lines)
    names = {r.contender for r in report.results}
    assert {"ga auto", "ga edges", "ga tiles", "SDPA + mask", "torch.sparse"} <= names
    assert {r.phase for r in report.results if r.seconds is not None} == {"fwd", "fwd+bwd"}
    for r in report.results:
        assert (r.seconds is None) == bool(r.why), r
    stored = json.loads((tmp_path / "r.json").read_text())
    assert len(stored["results"]) == len(report.results) and stored["machine"]["threads"] == torch.get_num_threads()
    table = (tmp_path / "r.md").read_text()
    assert "SDPA + mask" in table and "auto against the fastest backend" in table
    assert any("ga edges" in line for line in lines)
    assert bench.auto_against_best(report)


def ga_run(folder: Path, lines: list[str]) -> bench.Report:
    return bench.run_bench(
        ga.window(40, 6),
        heads=2,
        head_dim=4,
        budget=0.01,
        ours=["auto", "edges", "tiles"],
        peers=["sdpa", "torch.sparse"],
        json_path=folder / "r.json",
        markdown_path=folder / "r.md",
        echo=lines.append,
    )


def test_a_peer_that_cannot_is_listed_with_the_reason() -> None:
    report = bench.run_bench(ga.empty(7), heads=1, head_dim=4, budget=0.01, peers=["sdpa"], echo=None)
    row = next(r for r in report.results if r.contender.startswith("SDPA"))
    assert row.seconds is None and "reads nothing" in row.why
    assert "reads nothing" in report.markdown()


def test_presets_are_what_the_table_says() -> None:
    cases, figures = bench.presets(1)
    assert cases[0].graph == ga.window(4096, 129) and cases[0].heads == 4
    assert [f.bound for f in figures] == [25, 4.5, 12, 45]
    g = bench.presets(6)[0][0].graph
    blocks = g.dense().view(64, 64, 64, 64).permute(0, 2, 1, 3)
    assert (blocks.any(-1).any(-1) == blocks.all(-1).all(-1)).all()
    assert blocks[:, :2].all() and blocks[:2].all()
    half = bench.presets(16)[0][0].graph
    assert half.num_edges == 8192 * 16_384 and int((half.degree() == 0).sum()) == 8192
    for row in bench._ROWS:
        if row in (3, 7, 8, 10, 15):
            continue
        for case in bench.presets(row)[0]:
            assert set(case.peers) <= set(bench.PEERS) and set(case.phases) <= set(bench.PHASES)


def test_masks_as_formulas_are_the_graphs() -> None:
    for row in (1, 5):
        for case in bench.presets(row)[0]:
            i, j = torch.arange(4096)[::37, None], torch.arange(4096)
            assert case.mask_mod is not None
            want = case.graph[torch.arange(4096)[::37], :].dense()
            assert torch.equal(torch.as_tensor(case.mask_mod(0, 0, i, j)).expand(want.shape), want)


def test_absent_data_skips_the_row(tmp_path: Path) -> None:
    report = bench.run_bench(rows=[7], data=tmp_path, echo=None)
    assert "tolokers.npz" in report.results[0].why and report.figures == []


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data is not here")
def test_data_rows_load() -> None:
    cases, _ = bench.presets(7, DATA)
    assert cases[0].graph.num_edges == 1_038_000 and int(cases[0].graph.degree().max()) == 2138
    assert bench.presets(8, DATA)[0][0].graph.num_edges == 10_556


def test_what_is_refused() -> None:
    g = ga.causal(4)
    for bad in ({"rows": [99]}, {}, {"graph": g, "peers": ["dgl"]}, {"graph": g, "dtype": "float99"}):
        with pytest.raises(ValueError):
            bench.run_bench(**bad, echo=None)


def test_figures_judge_by_their_bound() -> None:
    times = {("c", "fwd", "peer"): 2.0, ("c", "fwd", "ga auto"): 1.0}
    figure = bench._ratio(1, "c", "fwd", "peer", 1.5)
    found = bench._judge(figure, times, {})
    assert found is not None and found["met"] and found["value"] == 2
    assert bench._judge(bench._ratio(1, "c", "fwd", "absent", 1.5), times, {}) is None


def test_peak_memory_sees_a_large_array() -> None:
    peak = bench.peak_bytes(lambda: torch.ones(2**24).sum())
    if peak is None:
        pytest.skip("the system does not tell")
    assert 2**25 < peak < 2**28


def test_plots_are_pictures(tmp_path: Path) -> None:
    report = bench.plot_crossover(
        tmp_path / "a.png", densities=(0.1, 0.5), t=16, budget=0.0, head_dim=4, peers=("sdpa",)
    )
    bench.plot_scaling(tmp_path / "b.svg", lengths=(16, 32), size=3, budget=0.0, head_dim=4, phases=("fwd",))
    assert {r.case for r in report.results} == {"0.1", "0.5"}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (tmp_path / "b.svg").read_text()
