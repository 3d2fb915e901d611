"""What the examples share: a text, a training loop with a progress bar, and a place for figures."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphattn.config import TrainConfig
from graphattn.data import Vocabulary, Windows, read_text
from graphattn.train import learning_rate, make_optimizer

HELP = {
    "steps": "how long to train or sample",
    "lr": "learning rate",
    "text": "a UTF-8 file or a folder of .txt files; without it Python's help topics",
    "out": "folder for the figure",
}


def fit(
    model: nn.Module, loss_of: Callable[[int], Tensor], steps: int, *, lr: float = 1e-3, name: str = "training",
    on_step: Callable[[int], None] | None = None, **options: Any,
) -> list[float]:  # fmt: skip
    """`steps` steps of AdamW with warm-up, a cosine and clipping; returns the losses.

    Args:
        loss_of: step number to a scalar loss.
        on_step: called before each step.
        options: of `TrainConfig`, such as clip=0, decay=0 or schedule="constant".
    """
    from tqdm import tqdm

    options = {"lr": lr, "min_lr": lr / 10, "warmup": min(100, steps // 10), "steps": steps} | options
    config = TrainConfig(**options)
    optimizer = make_optimizer(model, config)
    losses = []
    model.train()
    calm = 0.5 if sys.stderr.isatty() else 10.0
    for step in tqdm(range(steps), desc=name, unit="step", mininterval=calm, dynamic_ncols=True):
        if on_step is not None:
            on_step(step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        loss = loss_of(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if config.clip:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


def characters(text: str | None, block: int) -> tuple[str, Vocabulary, Windows]:
    """The text of a file, or Python's own help topics; its characters; its windows, the last tenth held out."""
    words, source = read_text([text] if text else ())
    vocabulary = Vocabulary.of(words)
    print(f"text: {source}, {len(words):,} characters, {len(vocabulary)} different")
    return words, vocabulary, Windows.split(vocabulary.encode(words), block, 0.1)


def last(losses: list[float], most: int = 50) -> float:
    """The mean of the last losses, nan without any."""
    tail = losses[-most:]
    return sum(tail) / len(tail) if tail else float("nan")


def figure(out: str, name: str, picture: Any) -> Path:
    """Write a picture into the folder `out`, and say where it is."""
    from graphattn.draw import save

    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = save(picture, folder / name)
    print(f"figure: {path}")
    return path


def run(main: Callable[..., dict[str, Any]]) -> None:
    """Call an example's main with the command line's options, each of which is one of its arguments."""
    module = sys.modules[main.__module__]
    parser = argparse.ArgumentParser(description=module.__doc__)
    for p in inspect.signature(main).parameters.values():
        kind = str if p.default is None else type(p.default)
        parser.add_argument(f"--{p.name}", type=kind, default=p.default, help=HELP.get(p.name, "") + f" ({p.default})")
    torch.manual_seed(1337)
    main(**vars(parser.parse_args()))
