"""Train on many small graphs: classes over the ten folds a set comes with, or a value over random splits."""

from __future__ import annotations

import copy
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .graph_data import Batch, GraphSet, load_graphs, walk_returns
from .graph_models import GraphPredictor
from .results import read_runs, write_runs


@dataclass(frozen=True)
class GraphRecipe:
    """A `GraphPredictor` and how it is trained.

    walk: that many random-walk return probabilities beside the features (0: none).  epochs: all are run, the learning
    rate falling to 0 along a cosine after a rise over a twentieth of them; the epoch with the best validation figure is
    kept, of equals that with the least loss.  average: validation and test use a running mean of the weights with this
    decay per step (0: the weights themselves).
    """

    width: int = 64
    heads: int = 4
    layers: int = 4
    score: str = "dot"
    pools: tuple[str, ...] = ("mean", "max")
    dropout: float = 0.2
    edge_dropout: float = 0.0
    norm: str = "batch"
    degree: bool = True
    walk: int = 8
    lr: float = 1e-3
    weight_decay: float = 1e-4
    batch: int = 64
    epochs: int = 60
    average: float = 0.0

    def model(self, data: GraphSet) -> GraphPredictor:
        return GraphPredictor(
            data.features, data.classes or 1, width=self.width, heads=self.heads, layers=self.layers, score=self.score,
            pools=self.pools, dropout=self.dropout, edge_dropout=self.edge_dropout, edge_dim=data.edge_dim,
            norm=self.norm, degree=self.degree,
        )  # fmt: skip


# chosen on the validation graphs of the first split
RECIPES: dict[str, GraphRecipe] = {
    "mutag": GraphRecipe(),
    "proteins": GraphRecipe(width=32, layers=3, dropout=0.1, epochs=15, weight_decay=1e-2),
    "nci1": GraphRecipe(pools=("mean", "max", "sum"), dropout=0.1, epochs=12),
    "esol": GraphRecipe(dropout=0.1, batch=32, epochs=40, pools=("mean", "max", "sum"), average=0.9),
}


def prepare(data: GraphSet, recipe: GraphRecipe) -> GraphSet:
    """The set with the recipe's random-walk features."""
    if not recipe.walk:
        return data
    x = [torch.cat([x, walk_returns(g, recipe.walk)], 1) for g, x in zip(data.graphs, data.x, strict=True)]
    return replace(data, x=x)


def fit_graphs(
    data: GraphSet, recipe: GraphRecipe, train: Tensor, val: Tensor, test: Tensor, *, seed: int = 0,
    backend: str = "auto",
) -> tuple[GraphPredictor, dict[str, float]]:  # fmt: skip
    """Train on the graphs numbered train; val chooses the epoch; test is read once.

    Returns:
        The model, and {"val", "test", "epoch", "seconds"}: accuracy in percent, or root mean square error.

    Raises:
        ValueError: no graphs or epochs to train with, batches too small for a batch norm, or no finite loss.
    """
    for name, ids in (("train", train), ("val", val), ("test", test)):
        if not ids.numel():
            raise ValueError(f"{name} holds no graph: give at least one to each of train, val and test")
    if recipe.epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {recipe.epochs}")
    fewest = 2 if recipe.norm == "batch" else 1  # a batch norm of one vector has no deviation
    if min(recipe.batch, train.numel()) < fewest:
        raise ValueError(
            f'norm "batch" needs batches of 2 graphs or more, got batch={recipe.batch} and {train.numel()} to train on: '
            'use norm="layer" or larger batches'
        )
    torch.manual_seed(seed)
    began = time.perf_counter()
    model = recipe.model(data)
    mean, std = torch.zeros(()), torch.ones(())
    if data.classes is None:
        mean = data.y[train].mean()
        spread = data.y[train].std(correction=0 if train.numel() == 1 else 1)
        std = spread if spread > 0 else std  # targets that are all the same keep their unit
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    steps: int = recipe.epochs * max(1, math.ceil(train.numel() / recipe.batch))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: _rate(k, steps))
    shadow = copy.deepcopy(model) if recipe.average else model
    # batches of validation and test never change: their disjoint graphs are made once
    val_batches, best, kept, kept_epoch, k = _batches(data, val, 256), (-math.inf, -math.inf), None, 0, 0
    for epoch in range(1, recipe.epochs + 1):
        model.train()
        order = train[torch.randperm(train.numel())]
        for part in order.split(recipe.batch):
            if part.numel() < fewest:
                continue
            b = data.batch(part)
            loss = _loss(_run(model, b, backend), b.y, mean, std)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            k += 1
            if recipe.average:
                _follow(shadow, model, min(recipe.average, k / (k + 10)))
        figure, cost = _evaluate(shadow, val_batches, mean, std, backend)
        if (figure, -cost) > best:
            best, kept, kept_epoch = (figure, -cost), copy.deepcopy(shadow.state_dict()), epoch
    if kept is None:
        raise ValueError(
            "no epoch had a validation loss that is a number: are there NaN or inf in features or targets?"
        )
    shadow.load_state_dict(kept)
    sign = 1 if data.classes is not None else -1
    figures = {
        "val": sign * _evaluate(shadow, val_batches, mean, std, backend)[0],
        "test": sign * _evaluate(shadow, _batches(data, test, 256), mean, std, backend)[0],
        "epoch": kept_epoch,
        "seconds": time.perf_counter() - began,
    }
    return shadow, figures


def splits_of(data: GraphSet, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Train, validation and test indices: fold `seed` with a tenth of its training graphs for selection, or, for a set
    without folds, a random 80/10/10.
    """
    if data.folds:
        train, test = data.folds[seed % len(data.folds)]
        train = train[torch.randperm(train.numel(), generator=torch.Generator().manual_seed(seed))]
        cut = train.numel() // 10
        return train[cut:], train[:cut], test
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    a, b = int(0.8 * len(data)), int(0.9 * len(data))
    return order[:a], order[a:b], order[b:]


def graphs(
    dataset: str = "proteins", path: str | None = None, splits: int = 10, first: int = 0, out: str = "runs/graphs",
    epochs: int | None = None, backend: str = "auto", quiet: bool = False, recipe: GraphRecipe | None = None,
    tag: str = "best",
) -> dict[str, Any]:  # fmt: skip
    """Train on splits first .. first + splits - 1, keep each in `OUT/DATASET-TAG.json`, print mean and deviation.

    Args:
        dataset: mutag, proteins, nci1 (accuracy over the given folds), esol (RMSE over random splits).
        path: the folder that holds it.

    Returns:
        {"mean", "deviation", "runs"}.
    """
    if path is None:
        raise ValueError(f"{dataset} is read from files: give the folder that holds it")
    data = load_graphs(dataset, path)
    recipe = RECIPES[data.name] if recipe is None else recipe
    if epochs is not None:
        recipe = replace(recipe, epochs=epochs)
    file = Path(out) / f"{data.name}-{tag}.json"
    kept = json.loads(json.dumps(asdict(recipe)))  # tuples become lists, as in the file
    sizes = [len(data), sum(g.t for g in data.graphs), sum(g.num_edges for g in data.graphs)]
    found = read_runs(file, kept, data=sizes)
    say = (lambda *_: None) if quiet else (lambda *words: print(*words, flush=True))
    say(data)
    data = prepare(data, recipe)
    for k in range(first, first + splits):
        if f"split {k}" not in found:
            _, found[f"split {k}"] = fit_graphs(data, recipe, *splits_of(data, k), seed=k, backend=backend)
            write_runs(file, {"dataset": data.name, "data": sizes, "recipe": kept, "runs": found})
        r = found[f"split {k}"]
        say(f"split {k}: val {r['val']:.3f}  test {r['test']:.3f}  epoch {r['epoch']}  {r['seconds']:.1f} s")
    runs = [found[f"split {k}"] for k in range(first, first + splits)]
    tests = torch.tensor([r["test"] for r in runs], dtype=torch.float64)
    mean, deviation = float(tests.mean()), float(tests.std()) if len(runs) > 1 else 0.0
    what = "accuracy" if data.classes is not None else "RMSE"
    say(f"{data.name}: test {what} {mean:.3f} +- {deviation:.3f} over {len(runs)} splits")
    return {"mean": mean, "deviation": deviation, "runs": runs}


def _rate(k: int, steps: int) -> float:
    rise = max(1, steps // 20)
    return (k + 1) / rise if k < rise else 0.5 * (1 + math.cos(math.pi * (k - rise) / max(1, steps - rise)))


def _batches(data: GraphSet, ids: Tensor, size: int) -> list[Batch]:
    return [data.batch(part) for part in ids.split(size)]


def _run(model: GraphPredictor, b: Batch, backend: str) -> Tensor:
    return model(b.x, b.graph, b.index, b.count, b.edge_features, backend=backend)


def _loss(out: Tensor, y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    if y.dtype.is_floating_point:
        return F.mse_loss(out[:, 0], (y - mean) / std)
    return F.cross_entropy(out, y)


def _evaluate(
    model: GraphPredictor, batches: list[Batch], mean: Tensor, std: Tensor, backend: str
) -> tuple[float, float]:
    """(accuracy in percent or minus the RMSE in y's unit, loss)."""
    model.eval()
    with torch.no_grad():
        out = torch.cat([_run(model, b, backend) for b in batches])
    y = torch.cat([b.y for b in batches])
    loss = float(_loss(out, y, mean, std))
    if y.dtype.is_floating_point:
        return -float((out[:, 0] * std + mean - y).square().mean().sqrt()), loss
    return 100 * float((out.argmax(1) == y).double().mean()), loss


def _follow(shadow: GraphPredictor, model: GraphPredictor, decay: float) -> None:
    with torch.no_grad():
        for mine, its in zip(shadow.parameters(), model.parameters(), strict=True):
            mine.lerp_(its, 1 - decay)
        for kept, now in zip(shadow.buffers(), model.buffers(), strict=True):
            kept.copy_(now)
