"""How fast is a GAT layer, an epoch and a large graph beside PyG, and what does a trained Head do on another graph?

    python benchmarks/nodes.py layer epoch tolokers swap --data FOLDER [--md FILE]
    python benchmarks/nodes.py accuracy --data FOLDER --results FOLDER

FOLDER holds `nodes/planetoid_cora.npz` and the others.  Every timing is taken after both sides gave the same numbers
with the same weights; ours and PyG's calls alternate in one process, and the median of each is reported with its
quartiles.  Rows that lose are printed like the others.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphattn as ga
from graphattn.node_data import NodeData, load_nodes
from graphattn.node_train import Recipe, fit, metric, nodes, predict, prepare, recipe_for
from graphattn.nodes import NodeClassifier
from graphattn.pyg import from_pyg_conv

Rows = list[list[str]]


def main(
    parts: list[str] | None = None, data: str = "../shared/data", seconds: float = 6.0, md: str | None = None,
    results: str = "runs/nodes",
) -> list[str]:  # fmt: skip
    """Run the parts named and return their tables; `seconds` is spent on each pair of timings."""
    todo = {"layer": layer, "epoch": epoch, "tolokers": tolokers, "swap": swap}
    tables = [header()]
    for part in parts or list(todo):
        if part == "accuracy":
            tables.append(accuracy(data, results))
        else:
            tables.append(todo[part](data, seconds))
        print(tables[-1], flush=True)
    if md is not None:
        Path(md).write_text("\n\n".join(tables) + "\n")
    return tables


def header() -> str:
    import torch_geometric

    cpu = platform.processor() or platform.machine()
    return (
        f"torch {torch.__version__}, torch_geometric {torch_geometric.__version__}, {cpu}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    )


def layer(folder: str, seconds: float) -> str:
    """One GAT layer without its projection, 8 heads of 8, forward and backward."""
    rows = [layer_row(load_nodes(name, Path(folder) / "nodes"), seconds) for name in ("cora", "pubmed")]
    head = ["graph", "edges", "ours, ms", "GATConv, loops given, ms", "GATConv, as used, ms", "ratio", "ratio as used"]
    return table("One GAT layer beyond its projection, 8 heads of 8, forward + backward (goal: 4x)", head, rows)


def layer_row(data: NodeData, seconds: float) -> list[str]:
    from torch_geometric.nn import GATConv

    graph, index = data.graph | ga.self_loops(data.graph.t), ga.to_edge_index(data.graph)
    with_loops = ga.to_edge_index(graph)
    theirs, plain = GATConv(64, 8, 8), GATConv(64, 8, 8, add_self_loops=False)
    plain.load_state_dict(theirs.state_dict())
    ours = from_pyg_conv(plain)
    theirs.lin, plain.lin, ours.head.value = nn.Identity(), nn.Identity(), nn.Identity()  # type: ignore[assignment]
    x, up = torch.randn(data.graph.t, 64), torch.randn(data.graph.t, 64)

    def run(conv: nn.Module, edges: object) -> list[Tensor]:
        given = x.detach().requires_grad_()
        out = conv(given, edges)
        out.backward(up)
        return [out.detach(), given.grad]  # type: ignore[list-item]

    want = run(theirs, index)
    same(want, run(ours, graph))
    same(want, run(plain, with_loops))
    a, b, c = race(
        lambda: run(ours, graph), lambda: run(plain, with_loops), lambda: run(theirs, index), seconds=seconds
    )
    ratios = [f"{b[0] / a[0]:.1f}x", f"{c[0] / a[0]:.1f}x"]
    return [data.name, str(graph.num_edges), show(a), show(b), show(c), *ratios]


class PygGAT(nn.Module):
    """GAT as PyG's example has it: dense features, dropout 0.6 on features and edges, ELU."""

    def __init__(self, features: int, classes: int, out_heads: int) -> None:
        from torch_geometric.nn import GATConv

        super().__init__()
        self.first = GATConv(features, 8, 8, dropout=0.6)
        self.second = GATConv(64, classes, out_heads, concat=False, dropout=0.6)

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        x = F.elu(self.first(F.dropout(x, 0.6, self.training), index))
        return self.second(F.dropout(x, 0.6, self.training), index)


def epoch(folder: str, seconds: float) -> str:
    """A training step (forward, loss, backward, Adam) of the published GAT."""
    rows = []
    for name in ("cora", "pubmed"):
        data = load_nodes(name, Path(folder) / "nodes")
        recipe = recipe_for("published", name)
        x, graph = prepare(data, recipe)
        dense = x.to_dense()  # type: ignore[union-attr]
        index = ga.to_edge_index(data.graph)
        theirs = PygGAT(data.x.shape[1], data.classes, recipe.out_heads)
        ours, ours_dense = recipe.model(data), recipe.model(data)
        carry_over(theirs, ours)
        carry_over(theirs, ours_dense)
        for model in (theirs, ours, ours_dense):
            model.eval()
        same([theirs(dense, index)], [ours(x, graph)])
        same([theirs(dense, index)], [ours_dense(dense, graph)])
        train = data.train[0].nonzero().squeeze(1)

        def step(model: nn.Module, *given: object, y: Tensor = data.y, train: Tensor = train) -> Callable[[], None]:
            model.train()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)

            def once() -> None:
                optimizer.zero_grad()
                F.cross_entropy(model(*given)[train], y[train]).backward()
                optimizer.step()

            return once

        calls = step(ours, x, graph), step(ours_dense, dense, graph), step(theirs, dense, index)
        a, b, c = race(*calls, seconds=seconds)
        goal = {"cora": "3x", "pubmed": "2x"}[name]
        rows.append([name, show(a), show(b), show(c), f"{c[0] / a[0]:.1f}x", f"{c[0] / b[0]:.1f}x", goal])
    head = ["graph", "ours, sparse, ms", "ours, dense, ms", "PyG, ms", "ratio", "ratio dense", "goal"]
    return table("A training epoch of the published GAT", head, rows)


def carry_over(theirs: PygGAT, ours: NodeClassifier) -> None:
    """PyG's weights into ours, so that both are seen to compute the same."""
    with torch.no_grad():
        for conv, mine in zip((theirs.first, theirs.second), ours.layers, strict=True):
            mine.head.value.weight.copy_(conv.lin.weight)
            mine.head.source_vector.copy_(conv.att_src[0])
            mine.head.target_vector.copy_(conv.att_dst[0])
            mine.bias.copy_(conv.bias)


def tolokers(folder: str, seconds: float) -> str:
    """One layer of 8 heads of 64 on 1.04 M edges, forward and backward, each side in a process of its own."""
    del seconds
    found = {}
    for side in ("ours", "pyg"):
        done = subprocess.run(
            [sys.executable, __file__, "--child", side, "--data", folder], capture_output=True, text=True, check=True
        )
        found[side] = json.loads(done.stdout.splitlines()[-1])
    same([torch.tensor(found["pyg"]["probe"])], [torch.tensor(found["ours"]["probe"])], 1e-3)
    a, b = found["ours"], found["pyg"]
    faster, smaller = b["seconds"] / a["seconds"], b["gib"] / max(a["gib"], 1e-3)
    rows = [
        ["seconds, best of runs", f"{a['seconds']:.2f}", f"{b['seconds']:.2f}", f"{faster:.1f}x", "14x"],
        ["memory above the inputs, GiB", f"{a['gib']:.2f}", f"{b['gib']:.2f}", f"1/{smaller:.1f}", "1/8"],
    ]
    head = ["", "ours", "TransformerConv", "ratio", "goal"]
    return table("tolokers, one layer of 8 heads of 64, forward + backward", head, rows)


def child(side: str, folder: str) -> None:
    """One side of `tolokers`: seconds, peak memory above what was there before, and sums to compare."""
    from torch_geometric.nn import TransformerConv

    data = load_nodes("tolokers", Path(folder) / "nodes")
    torch.manual_seed(0)
    conv = TransformerConv(64, 64, 8)
    x, up = torch.randn(data.graph.t, 64), torch.randn(data.graph.t, 512)
    edges: object = ga.to_edge_index(data.graph)
    layer: nn.Module = conv
    if side == "ours":
        layer = from_pyg_conv(conv)
    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(5 if side == "ours" else 2):
        x = x.detach().requires_grad_()
        layer.zero_grad()
        began = time.perf_counter()
        out = layer(x, edges)
        out.backward(up)
        seconds.append(time.perf_counter() - began)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    assert x.grad is not None
    probe = [out[::997, ::101].flatten().tolist(), x.grad[::997, ::13].flatten().tolist()]
    print(json.dumps({"seconds": min(seconds), "gib": peak, "probe": probe[0] + probe[1]}))


def swap(folder: str, seconds: float, epochs: int = 300) -> str:
    """The weights of one GAT, trained on Cora's graph, on other graphs."""
    del seconds
    data = load_nodes("cora", Path(folder) / "nodes")
    run = fit(data, Recipe(epochs=epochs), seed=0)
    head = ["graph", "test accuracy", "why"]
    return table("A GAT trained on Cora, the graph swapped, nothing retrained", head, swaps(data, run.model))


def swaps(data: NodeData, model: NodeClassifier) -> Rows:
    x, graph = prepare(data, Recipe())
    n = graph.t
    draw = torch.Generator().manual_seed(0)
    order = torch.randperm(n, generator=draw)
    others = {
        "Cora with self-loops, as trained": (graph, "neighbours mostly share a topic, and the weights expect them"),
        "self-loops": (ga.self_loops(n), "every paper is judged by its own words alone"),
        "edges shuffled": (
            data.graph.relabel(order) | ga.self_loops(n),
            "as many neighbours, but strangers: they drown the paper's own words",
        ),
        "complement": (~graph, "all read nearly one mean: every paper gets the most common class"),
        "full": (ga.full(n), "all read nearly one mean: every paper gets the most common class"),
        "two hops": (graph @ graph, "more papers of mostly the same topic, diluted"),
    }
    rows = []
    test = data.test[0]
    for name, (other, why) in others.items():
        out = predict(model, x, other)[test]
        rows.append([f"{name}: {other!r}", f"{metric('accuracy', out, data.y[test]):.1f}", why])
    return rows


def accuracy(folder: str, results: str) -> str:
    """The node figures from runs kept in a folder; what is missing is trained."""
    rows = []
    for name, recipe, seeds, splits in (
        ("cora", "published", 10, 1), ("citeseer", "published", 10, 1), ("pubmed", "published", 10, 1),
        ("cora", "best", 10, 1), ("citeseer", "best", 10, 1),
        ("minesweeper", "best", 1, 3), ("tolokers", "best", 1, 3), ("karate", "published", 10, 1),
    ):  # fmt: skip
        where = str(Path(folder) / "nodes")
        found = nodes(name, where, recipe, seeds=seeds, splits=splits, out=results, pictures=False, quiet=True)
        rows.append([name, recipe, f"{found.mean:.2f} +- {found.deviation:.2f}", str(len(found.runs))])
        print(found, flush=True)
    return table("Test figures", ["dataset", "recipe", "mean +- deviation", "runs"], rows)


# ---------------------------------------------------------------------- how it is measured


def same(theirs: list[Tensor], ours: list[Tensor], tolerance: float = 1e-4) -> None:
    """The gate: nothing is timed that does not give the same numbers."""
    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)


def race(*calls: Callable[[], object], seconds: float) -> list[list[float]]:
    """Per call [median, first quartile, third quartile] in seconds, taken in turns until time is up."""
    for call in calls:
        call()
    took: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(took[0]) < 5:
        for call, kept in zip(calls, took, strict=True):
            began = time.perf_counter()
            call()
            kept.append(time.perf_counter() - began)
    return [[statistics.median(t), *statistics.quantiles(t, n=4)[::2]] for t in took]


def show(t: list[float]) -> str:
    return f"{1e3 * t[0]:.2f} ({1e3 * t[1]:.2f}-{1e3 * t[2]:.2f})"


def table(title: str, head: list[str], rows: Rows) -> str:
    lines = [f"**{title}**", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("parts", nargs="*", help="layer, epoch, tolokers, swap (the default), accuracy")
    parser.add_argument("--data", default="../shared/data", help="folder with nodes/*.npz")
    parser.add_argument("--results", default="runs/nodes", help="folder of kept runs, for accuracy")
    parser.add_argument("--seconds", type=float, default=6.0, help="spent on each row")
    parser.add_argument("--md", help="also write the tables to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.data)
    else:
        main(given.parts, given.data, given.seconds, given.md, given.results)
