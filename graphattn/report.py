"""What a finished run leaves to look at: its loss curve, its graphs, a sample."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphattn.checkpoint import Run
from graphattn.config import TrainConfig
from graphattn.generate import generate
from graphattn.gpt import GPT
from graphattn.graph import Graph

if TYPE_CHECKING:
    from graphattn.data import Vocabulary


def write_pictures(run: Run, graphs: Sequence[Graph], config: TrainConfig) -> None:
    """`loss.png`, and `graph.png` or `graph-0.png`, `graph-1.png`, ..."""
    lines = (run.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    run.put("loss.png", loss_picture([json.loads(line) for line in lines]))
    for n, graph in enumerate(graphs):
        name = "graph.png" if len(graphs) == 1 else f"graph-{n}.png"
        run.put(name, graph_picture(graph, title=f"{config.graph[n]}\n{graph!r}"))


def graph_picture(graph: Graph, **options: Any) -> bytes:
    """A PNG of who reads whom; options as in `draw`."""
    from graphattn.draw import draw

    return _png(draw(graph, **options).figure)


def loss_picture(records: Sequence[dict[str, Any]]) -> bytes:
    """A PNG of the loss per step and of the held-out loss."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    ax = figure.subplots()
    ax.plot([r["step"] for r in records], [r["loss"] for r in records], lw=0.6, alpha=0.6, label="training batch")
    held = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
    if held:
        ax.plot(*zip(*held, strict=True), marker="o", ms=3, lw=1.2, label="held-out text")
    ax.set(xlabel="step", ylabel="loss (nats per character)")
    ax.grid(alpha=0.3)
    ax.legend()
    return _png(figure)


def _png(figure: Any) -> bytes:
    raw = io.BytesIO()
    figure.savefig(raw, format="png", dpi=120)
    return raw.getvalue()


def first_prompt(vocabulary: Vocabulary) -> str:
    """What an empty prompt stands for: a line break, or the first character the model knows."""
    return "\n" if "\n" in vocabulary.characters else vocabulary.characters[0]


def write_sample(run: Run, model: GPT, graphs: Sequence[Graph], vocabulary: Vocabulary, config: TrainConfig) -> None:
    """`sample.txt`, `config.sample` characters."""
    start = vocabulary.encode(first_prompt(vocabulary))
    tokens = generate(model, graphs, start, config.sample, seed=config.seed)
    run.put("sample.txt", vocabulary.decode(tokens[1:]).encode("utf-8"))
