"""Note 1: attention is communication.  The graph is an input; a GPT's is one triangle among infinitely many.

Draws the eight-node triangle as arrows and as a matrix, then swaps other graphs into the same weights and loop.
"""

from __future__ import annotations

from typing import Any

import torch
from loop import characters, figure, fit, last, run

import graphattn as ga
from graphattn.gpt import GPT, GPTConfig


def main(steps: int = 150, text: str | None = None, out: str = "runs/examples/communication") -> dict[str, Any]:
    triangle = ga.causal(8)
    print(f"the lecture's graph: {triangle!r}")
    print("row i = target i, column j = source j; 1 means that i reads j")
    for row in ga.to_mask(triangle).int().tolist():
        print("  ", *row)
    degree = triangle.degree().tolist()
    print(f"node 1 reads {degree[0]}, node 2 reads {degree[1]}, node 8 reads {degree[7]}: degrees {degree}")
    figure(out, "triangle.png", picture_of(triangle))

    t, prompt = 32, 8
    graphs = {
        "GPT: causal(32)": ga.causal(t),
        "BERT: full(32)": ga.full(t),
        "sliding window: window(32, 4)": ga.window(t, 4),
        "prefix LM: prefix(32, 8)": ga.prefix(t, prompt),
        "packed: causal & documents": ga.causal(t) & ga.documents([10, 22]),
    }
    _, vocabulary, windows = characters(text, t)
    model = GPT(GPTConfig(vocab=len(vocabulary), block=t, layers=2, width=64))
    first = {name: p.clone() for name, p in model.state_dict().items()}
    tokens, _ = windows.evaluation(2)
    # inside its prefix a prefix LM reads its labels; from node 7 on it doesn't, and there all five are scored
    counted = torch.arange(t) >= prompt - 1
    losses, outputs = {}, []
    for name, graph in graphs.items():
        model.load_state_dict(first)  # the same weights, whatever the graph
        model.eval()
        with torch.no_grad():
            outputs.append(model(tokens, graph)[0])

        def loss_of(step: int, graph: ga.Graph = graph) -> torch.Tensor:
            inputs, targets = windows.batch(windows.starts(0, step, 12))
            return model(inputs, graph, targets.where(counted, -1))[1]

        losses[name] = last(fit(model, loss_of, steps, lr=3e-3, name=name), 10)
    weights = {name: tuple(p.shape) for name, p in first.items()}
    same_shape = len({tuple(x.shape) for x in outputs}) == 1
    differ = all(not torch.equal(outputs[0], x) for x in outputs[1:])
    print(
        f"one set of {len(weights)} weight tensors, {steps} steps each from the same start, scored from node "
        f"{prompt - 1} on:"
    )
    for name, graph in graphs.items():
        leak = ga.find_leak([graph] * 2, targets=counted)
        note = "" if leak is None else f"   reads its labels ({leak.path[0]}): its loss means nothing"
        print(f"  {name:32} {graph.num_edges:5} edges, training loss {losses[name]:.3f}{note}")
    figure(out, "graphs.png", ga.draw.draw_grid(list(graphs.values()), titles=list(graphs), columns=3))
    print(
        f"result: {triangle.num_edges} edges in the triangle of 8; {len(graphs)} graphs through one model: "
        f"same weights and output shapes {same_shape}, different outputs {differ}"
    )
    return {"edges": triangle.num_edges, "degree": degree, "same_shape": same_shape, "differ": differ, "losses": losses}


def picture_of(graph: ga.Graph) -> Any:
    """The same graph twice: as a matrix and as arrows."""
    from graphattn.draw.palette import new_figure

    page = new_figure(11, 5.4)
    left, right = page.subplots(1, 2)
    names = [str(i) for i in range(1, graph.t + 1)]
    ga.draw(graph, layout="circle", ax=left, labels=names, title="as arrows")
    ga.draw(graph, layout="matrix", ax=right, labels=names, title="as a matrix")
    return page


if __name__ == "__main__":
    run(main)
