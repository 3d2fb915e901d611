"""What the foundations must show: the front door is thin, and every backend trains the same model.

python benchmarks/foundations.py                     # overhead and training step
python benchmarks/foundations.py --train --text FILE # also 300 steps on several backends and two graphs
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

import graphattn as ga
from graphattn import backends
from graphattn.config import TrainConfig
from graphattn.train import make_optimizer, model_config


def interleaved(sides: dict[str, Callable[[], object]], rounds: int, inner: int = 1) -> dict[str, float]:
    """Median seconds of each side, the sides taking turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds + 2):
        for name, f in sides.items():
            start = time.perf_counter()
            for _ in range(inner):
                f()
            times[name].append((time.perf_counter() - start) / inner)
    return {name: statistics.median(t[2:]) for name, t in times.items()}


def overhead() -> None:
    """attend() on calls that it hands to SDPA, beside the bare SDPA call."""
    print("attend() beside the SDPA call it makes, causal, microseconds")
    for shape in ((1, 1, 8, 8), (12, 4, 64, 32), (4, 4, 256, 32)):
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        graph = ga.causal(shape[2])
        found = interleaved(
            {
                "sdpa": lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                "attend": lambda q=q, k=k, v=v, g=graph: ga.attend(q, k, v, g),
            },
            300,
        )
        chosen = next(e.backend for e in ga.explain(graph, q, k, v) if e.chosen)
        added = 1e6 * (found["attend"] - found["sdpa"])
        print(
            f"  {shape!s:18} sdpa {1e6 * found['sdpa']:7.1f}  attend {1e6 * found['attend']:7.1f}  "
            f"added {added:5.1f}  ({chosen})"
        )


def training_step() -> None:
    """A step of preset cpu, with `attend` and with SDPA written into the same model."""
    config = TrainConfig()
    graph = ga.causal(config.block)
    tokens = torch.randint(0, 65, (config.batch, config.block + 1))

    def written_in(q: Tensor, k: Tensor, v: Tensor, graph: ga.Graph, **_: object) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def stepper(attention: Callable[..., Tensor]) -> Callable[[], None]:
        torch.manual_seed(0)
        model = ga.GPT(model_config(config, 65))
        optimizer = make_optimizer(model, config)

        def step() -> None:
            backends.attend, kept = attention, backends.attend
            optimizer.zero_grad(set_to_none=True)
            model(tokens[:, :-1], graph, tokens[:, 1:])[1].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            backends.attend = kept

        return step

    found = interleaved({"attend": stepper(backends.attend), "sdpa written in": stepper(written_in)}, 120)
    ratio = found["attend"] / found["sdpa written in"]
    print("a training step of preset cpu, milliseconds")
    print("  " + "  ".join(f"{name} {1e3 * t:.2f}" for name, t in found.items()) + f"  ratio {ratio:.3f}")


def random_causal(t: int, sources: int, seed: int = 0) -> ga.Graph:
    """Each target reads itself and `sources - 1` random earlier ones: no interval."""
    g = torch.Generator().manual_seed(seed)
    score = torch.rand(t, t, generator=g).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(), 2.0)
    score.fill_diagonal_(-1.0)
    kept = score.argsort(1).argsort(1) < sources
    return ga.from_mask(kept & (score < 2))


def training(text: Path, steps: int) -> None:
    """The same run on several backends: the largest difference of a step's loss from sdpa's."""
    print(f"{steps} steps of preset cpu, largest difference of a loss from sdpa's")
    for name, graph in (("causal", ga.causal(64)), ("random causal, 16 sources", random_causal(64, 16))):
        losses = {}
        for backend in ("sdpa", "edges", "csr", "auto"):
            with tempfile.TemporaryDirectory() as folder:
                start = time.perf_counter()
                ga.train(
                    Path(folder) / "run",
                    graphs=graph,
                    text=text.read_text("utf-8"),
                    steps=steps,
                    backend=backend,
                    eval_every=steps,
                    warmup=100,
                )
                seconds = time.perf_counter() - start
                rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
                losses[backend] = torch.tensor([r["loss"] for r in rows], dtype=torch.float64)
            worst = (losses[backend] - losses["sdpa"]).abs().max().item()
            print(
                f"  {name:26} {backend:6} last loss {losses[backend][-1]:.4f}  difference {worst:.1e}  {seconds:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    overhead()
    training_step()
    if options.train:
        if options.text is None:
            parser.error("--train needs --text FILE")
        training(options.text, options.steps)
